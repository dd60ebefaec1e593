"""The command line of `twinpool plan`: its own flags, those of a launch line beside them or after --, and the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from twinpool.config import command_line
from twinpool.config.deployment import Deployment, deployment_options
from twinpool.config.engines import TWO_POOL_ENGINES, EngineRules
from twinpool.config.field import Option, options_of
from twinpool.config.launch import LaunchLine, deployment_from, read_launch, split_words
from twinpool.config.options import ServerOptions
from twinpool.errors import ConfigError
from twinpool.plan.options import GROUPS, MachineOptions, PlanOptions, SweepOptions

PROG = "twinpool plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """sweep: the word was there. flags: of the launch line and of the command line together. model: a name, or None.

    engine: sglang, sglang-unpadded, twinpool or vllm.
    """

    sweep: bool
    options: PlanOptions
    flags: Deployment
    line: LaunchLine
    model: str | None
    engine: str

    @property
    def rules(self) -> EngineRules:
        """Of the engine with two pools. Raises ConfigError for vLLM, which has one."""
        for rules in TWO_POOL_ENGINES:
            if rules.name == self.engine:
                return rules
        raise ConfigError(f"--engine {self.engine} keeps states and KV in one pool: there is no split to vary.")


def read_command(argv: Sequence[str], *, usage: str) -> Command:
    """Read it all. --help prints and exits 0. Raises ConfigError for unknown, bad or contradicting flags."""
    sweep = list(argv[:1]) == ["sweep"]
    own, launch_words = parts(argv[1:] if sweep else argv)
    plan_options, line_options = options_of(PlanOptions), deployment_options()
    values, words = command_line.read_command_line(
        (*plan_options, *line_options), own, prog=PROG, help_text=lambda: help_text(usage)
    )
    options = PlanOptions(**chosen(values, plan_options))
    command = command_of(options, chosen(values, line_options), models=words, launch_words=launch_words, sweep=sweep)
    _refuse_unused(command)
    return command


def command_of(
    options: PlanOptions, direct: Mapping[str, Any], *, models: list[str], launch_words: list[str], sweep: bool = False
) -> Command:
    """From what was read to a command. direct: fields of Deployment given beside the launch line; models: words that name one.

    Raises ConfigError for flags that contradict each other.
    """
    line = _launch(options, launch_words)
    model = _model(models, direct, line)
    if line.vllm is None:
        line = replace(line, deployment=_merged(line, direct))
    return Command(
        sweep=sweep, options=options, flags=deployment_from(direct) if line.vllm else line.deployment, line=line, model=model,
        engine=options.engine or line.engine or ("twinpool" if (options.gpu or "").lower() == "cpu" else "sglang"),
    )  # fmt: skip


def _refuse_unused(command: Command) -> None:
    """Raise ConfigError for a flag that would be ignored in silence."""
    options = command.options
    if not command.sweep and (name := _given(options, SweepOptions)):
        raise ConfigError(
            f"{name} is a flag of twinpool plan sweep: put the word sweep before the model, or leave it out."
        )
    if options.activations is not None and command.engine != "vllm":
        raise ConfigError(f"--activations is for --engine vllm: {command.engine} leaves them to --mem-fraction-static.")
    if options.boot_log is None:
        return
    if command.sweep:
        raise ConfigError(
            "A sweep has no --boot-log: give MODEL, and the log's free memory as --pre-load-memory and --post-weights-memory."
        )
    machine = _given(replace(options, state_bytes_per_slot=None, kv_bytes_per_token=None), MachineOptions)
    if machine:
        raise ConfigError(f"{machine} contradicts --boot-log: the memory is what the log measured.")


def _given(options: PlanOptions, group: type) -> str:
    """The first flag of a group that is not at its default; empty for none."""
    return next((known.name for known in options_of(group) if getattr(options, known.field) != known.default), "")


def help_text(usage: str) -> str:
    """What `twinpool plan --help` prints: its own flags with their text, those of a launch line by name."""
    return command_line.help_text(command_line.rows_of(GROUPS), usage=usage, footer=launch_flags_footer())


def launch_flags_footer() -> str:
    """The names of the launch line's flags that change memory, for the end of a help text."""
    server = options_of(ServerOptions)
    names = ", ".join(option.name for option in deployment_options() if option not in server)
    return f"Flags of a launch line that change memory (docs/flags.md):\n{command_line.paragraph(names)}"


def parts(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(words before --, words after it)."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def chosen(values: Mapping[str, Any], options: Sequence[Option]) -> dict[str, Any]:
    """The values that belong to these options, by field."""
    fields = {option.field for option in options}
    return {name: value for name, value in values.items() if name in fields}


def _launch(options: PlanOptions, words: list[str]) -> LaunchLine:
    """The launch line, from its file or from after --."""
    if options.launch is not None and words:
        raise ConfigError("There are two launch lines: one in --launch and one after --; give one of them.")
    if options.launch is not None:
        try:
            words = split_words(Path(options.launch).read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--launch {options.launch} cannot be read: {error}.") from error
    engine = "vllm" if options.engine == "vllm" else None
    line = read_launch(words, engine=engine) if words else LaunchLine(engine=engine)
    said = options.engine.partition("-")[0] if options.engine else line.engine
    if line.engine is not None and said != line.engine:
        raise ConfigError(f"--engine {options.engine} contradicts the launch line, which starts {line.engine}.")
    return line


def _model(words: list[str], direct: Mapping[str, Any], line: LaunchLine) -> str | None:
    """The one model that is named: as a word, by --model-path, or in the launch line."""
    named = [*words, *([direct["model_path"]] if "model_path" in direct else [])]
    if "" in named:
        raise ConfigError(
            "MODEL is empty, as a shell variable is that was never set: give a name, a folder or a hub id."
        )
    if len(set(named)) > 1:
        raise ConfigError(f"There are {len(set(named))} models ({', '.join(dict.fromkeys(named))}); give one.")
    return named[0] if named else line.model


def _merged(line: LaunchLine, direct: Mapping[str, Any]) -> Deployment:
    """Flags of both. A flag that is in both must say the same; the model may be another name for the same thing."""
    theirs = {name: getattr(line.deployment, name) for name in line.deployment.given}
    drafts = {name: value for name, value in theirs.items() if name.startswith("speculative_")}
    ours = deployment_from({**drafts, **direct})  # an algorithm here may have its number of tokens there
    for name in ours.given & set(theirs) - {"model_path"}:
        if getattr(ours, name) != theirs[name]:
            flag = next(option.name for option in deployment_options() if option.field == name)
            raise ConfigError(
                f"{flag} is {getattr(ours, name)} on the command line and {theirs[name]} in the launch line; leave one out."
            )
    return deployment_from({**theirs, **{name: getattr(ours, name) for name in ours.given}})
