"""The command line of `twinpool replay`: its own flags, the planner's machine, the flags of a launch line, and a trace."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from twinpool.config import command_line
from twinpool.config.deployment import deployment_options
from twinpool.config.field import options_of
from twinpool.config.idle import idle_flags
from twinpool.errors import ConfigError
from twinpool.plan.command import chosen, command_of, launch_flags_footer, parts
from twinpool.plan.options import PlanOptions
from twinpool.plan.run import sizing_of
from twinpool.plan.sizing import Sizing
from twinpool.replay.cost import Calibration, read_calibration
from twinpool.replay.options import GROUPS, ReplayOptions

PROG = "twinpool replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCommand:
    """options: of replay; trace: its file; sizing: the machine, as the planner sizes it; calibration: of times. direct: fields of
    Deployment that were given beside a launch line.
    """

    options: ReplayOptions
    trace: str
    sizing: Sizing
    calibration: Calibration
    direct: frozenset[str]


def read_replay(argv: Sequence[str], *, usage: str, owner: type[ReplayOptions] = ReplayOptions) -> ReplayCommand:
    """Read it all: TRACE MODEL and flags. owner: a wider options class (sweeps). --help prints and exits 0.

    Raises ConfigError or ModelError.
    """
    own, launch_words = parts(argv)
    kind: type = owner
    options, line_options = options_of(kind), deployment_options()
    values, names = command_line.read_command_line(
        (*options, *line_options), own, prog=PROG, help_text=lambda: help_text(usage)
    )
    found = owner(**chosen(values, options))
    for flag, path in (("--html", found.html), ("--chrome-trace", found.chrome_trace)):
        if path is not None:
            _check_place(flag, Path(path))
    if not names:
        raise ConfigError(
            "No trace is named: give TRACE (a file of recorded traffic) and MODEL; see twinpool replay --help."
        )
    if len(names) > 2:
        raise ConfigError(f"'{names[2]}' is one word too many: there are TRACE and MODEL.")
    shared = chosen(chosen(values, options), [option for option in options_of(PlanOptions) if option.field != "json"])
    direct = chosen(values, line_options)
    command = command_of(PlanOptions(**shared), direct, models=names[1:], launch_words=launch_words)
    command.line.refuse_other_values()
    return ReplayCommand(
        options=found, trace=names[0], sizing=sizing_of(command), direct=frozenset(direct),
        calibration=read_calibration(Path(found.calibration)) if found.calibration else Calibration(),
    )  # fmt: skip


def check_idle(command: ReplayCommand, *, set_elsewhere: Set[str] = frozenset()) -> None:
    """Raise ConfigError for a flag of the host tier that would do nothing: whoever gave it believes in another machine. A pasted line may
    have them. set_elsewhere: fields that a sweep sets.
    """
    for why in idle_flags(command.sizing.flags, among=command.direct, set_elsewhere=set_elsewhere):
        raise ConfigError(why)
    if "hicache_host_memory_fraction" in command.direct:
        raise ConfigError(
            "--hicache-host-memory-fraction does nothing in a replay, which does not know the host's memory: give --hicache-size instead."
        )


def _check_place(flag: str, path: Path) -> None:
    """Before a long run, not after it."""
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; name a file.")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {path} cannot be written: there is no folder {path.parent}.")


def write_report(flag: str, path: str, text: str) -> None:
    """Write what a flag asked for, in UTF-8. Raises ConfigError if that cannot be done."""
    try:
        # Names of files and sessions may hold what UTF-8 has no bytes for.
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror or error}.") from error


def help_text(usage: str) -> str:
    """What `twinpool replay --help` prints."""
    return command_line.help_text(command_line.rows_of(GROUPS), usage=usage, footer=launch_flags_footer())
