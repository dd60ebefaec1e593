"""`twinpool replay calibrate URL MODEL`: measure a live endpoint, fit the cost model to it, and write the file for --calibration."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from twinpool.clock import WallClock
from twinpool.config import command_line
from twinpool.config.deployment import deployment_options
from twinpool.config.field import Flag, options_of
from twinpool.errors import ConfigError
from twinpool.plan.command import chosen, command_of, launch_flags_footer, parts
from twinpool.plan.options import LaunchFile, MachineOptions, PlanOptions
from twinpool.plan.run import sizing_of
from twinpool.plan.sizing import Sizing
from twinpool.replay.cost import Calibration, CostModel
from twinpool.replay.endpoint import HttpEndpoint
from twinpool.replay.fit import Point, decode_point, fit, prefill_point
from twinpool.replay.machine import cost_model
from twinpool.replay.measure import Decode, Limits, Measurement, Prefill
from twinpool.tables import table_text

PROG = "twinpool replay calibrate"
USAGE = """\
usage: twinpool replay calibrate URL MODEL --gpu NAME [options] [-- LAUNCH LINE]

Measures the OpenAI-compatible server at URL, which runs MODEL on that machine and should have nothing else to do, and fits the times
of twinpool replay to it. The prompts are random tokens, so that no cache knows them. --api-key and --served-model-name are the server's.
"""


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Measurement"""

    out: Annotated[str, Flag("Where to write the result, for --calibration.", metavar="FILE")] = "calibration.json"
    seconds: Annotated[
        float, Flag("About how long to measure; lengths and batches are chosen for it.", metavar="S", above=0)
    ] = 60.0
    repeats: Annotated[int, Flag("Measurements of each point; the median counts.", metavar="N", at_least=1)] = 3
    launch: LaunchFile = None
    engine: Annotated[
        Literal["sglang", "sglang-unpadded", "twinpool"] | None,
        Flag("Whose rules size the pools.", default_text="as twinpool plan"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(MeasureOptions, MachineOptions):
    """All of them. Raises ConfigError naming the flag whose value has the wrong type or is out of range."""

    def __post_init__(self) -> None:
        for option in options_of(CalibrateOptions):
            option.check(getattr(self, option.field))


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateCommand:
    """options: of calibrate; url: of the endpoint; served_name, api_key: for its requests; sizing: the machine, as planned."""

    options: CalibrateOptions
    url: str
    served_name: str | None
    api_key: str | None
    sizing: Sizing


def run(argv: Sequence[str]) -> int:
    """Measure, fit, print and write; returns the exit code. Raises ConfigError, ModelError or TwinpoolError."""
    command = read_calibrate(argv)
    out = Path(command.options.out)
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out} cannot be written: there is no folder {out.parent}.")
    cost = cost_model(command.sizing, Calibration())
    prefills, decodes = _measured(command)
    points = points_of(cost, prefills, decodes, chunk_tokens=command.sizing.resolved.chunked_prefill_size)
    machine = command.sizing.machine
    source = f"{len(points)} points of {command.sizing.model.name} on {machine.ranks} × {machine.name}"
    found = fit(points, source=source)
    print(report(points, found))
    try:
        out.write_text(json.dumps(asdict(found), indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}.") from error
    print(f"\nWritten to {out}: give it to twinpool replay as --calibration.")
    return 0


def read_calibrate(argv: Sequence[str]) -> CalibrateCommand:
    """Read it all. --help prints and exits 0. Raises ConfigError or ModelError."""
    own, launch_words = parts(argv)
    options, line_options = options_of(CalibrateOptions), deployment_options()
    values, words = command_line.read_command_line(
        (*options, *line_options), own, prog=PROG, help_text=help_text
    )  # fmt: skip
    found = CalibrateOptions(**chosen(values, options))
    if not words:
        raise ConfigError(
            f"No endpoint is named: give URL (such as http://127.0.0.1:30000) and MODEL; see {PROG} --help."
        )
    if len(words) > 2:
        raise ConfigError(f"'{words[2]}' is one word too many: there are URL and MODEL.")
    direct = chosen(values, line_options)
    shared = PlanOptions(**chosen(chosen(values, options), options_of(PlanOptions)))
    command = command_of(shared, direct, models=words[1:], launch_words=launch_words)
    return CalibrateCommand(
        options=found, url=words[0], served_name=command.flags.served_model_name, api_key=command.flags.api_key,
        sizing=sizing_of(command),
    )  # fmt: skip


def help_text() -> str:
    """What `twinpool replay calibrate --help` prints."""
    rows = command_line.rows_of((MeasureOptions, MachineOptions))
    return command_line.help_text(rows, usage=USAGE, footer=launch_flags_footer())


def points_of(
    cost: CostModel, prefills: Sequence[Prefill], decodes: Sequence[Decode], *, chunk_tokens: int | None
) -> list[Point]:
    """What was measured, as the cost model sees it. chunk_tokens: of one prefill step."""
    return [
        *(
            prefill_point(cost, tokens=one.tokens, chunk_tokens=chunk_tokens, measured_s=one.measured_s)
            for one in prefills
        ),
        *(
            decode_point(
                cost, context_tokens=one.context_tokens, batch=one.batch, steps=one.steps, measured_s=one.measured_s
            )
            for one in decodes
        ),
    ]


def report(points: Sequence[Point], found: Calibration) -> str:
    """Measured against modelled, and the fitted values."""
    rows = []
    for point in points:
        modelled_s = point.modelled_s(found)
        error = modelled_s / point.measured_s - 1
        rows.append((point.name, f"{point.measured_s * 1e3:,.2f}", f"{modelled_s * 1e3:,.2f}", f"{error:+.0%}"))
    table = table_text(("point", "measured ms", "modelled ms", "error"), rows, right=(1, 2, 3))
    return (
        f"{table}\n\nReached shares of the peaks: {found.flops_share:.3g} of products, {found.bandwidth_share:.3g} of memory; "
        f"beside them {found.step_s * 1e3:.3g} ms a step and {found.row_s * 1e3:.3g} ms a row."
    )


def _measured(command: CalibrateCommand) -> tuple[list[Prefill], list[Decode]]:
    options = command.options
    endpoint = HttpEndpoint(
        command.url, model=command.served_name, api_key=command.api_key, timeout_s=options.seconds + 60
    )
    with contextlib.closing(endpoint):
        limits = limits_of(command.sizing, options, context_tokens=endpoint.context_tokens)
        print(f"Measuring {command.url} for about {options.seconds:g} s.", file=sys.stderr)
        measurement = Measurement(
            endpoint, limits, clock=WallClock(), seed=secrets.randbits(64), say=lambda line: print(line, file=sys.stderr)
        )  # fmt: skip
        return measurement.run()


def limits_of(sizing: Sizing, options: CalibrateOptions, *, context_tokens: int | None) -> Limits:
    """What the endpoint can take: as it says itself (context_tokens), and as the machine is planned. Half of the KV pool is left, so
    that nothing is evicted or retracted while it is measured.
    """
    planned_tokens, ledger = sizing.resolved.context_len, sizing.ledger
    return Limits(
        context_tokens=min(planned_tokens, context_tokens or planned_tokens),
        pool_tokens=ledger.kv_tokens // 2 if ledger is not None else planned_tokens,
        running=ledger.max_running_requests if ledger is not None else 1,
        vocab_size=sizing.model.spec.vocab_size,
        chunk_tokens=sizing.resolved.chunked_prefill_size,
        seconds=options.seconds,
        repeats=options.repeats,
    )
