"""`twinpool replay`: recorded traffic through the real scheduler in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from twinpool.errors import ConfigError
from twinpool.replay.command import ReplayCommand, check_idle, read_replay, write_report
from twinpool.replay.options import ReplayOptions, disk_link
from twinpool.replay.outcome import Outcome, first_refused

USAGE = """\
usage: twinpool replay TRACE MODEL --gpu NAME [options] [-- LAUNCH LINE]
       twinpool replay sweep TRACE MODEL --gpu NAME [options] [-- LAUNCH LINE]
       twinpool replay calibrate URL MODEL --gpu NAME [options]

The server's own admission, prefix tree, eviction, chunking and retraction on recorded traffic, without a GPU: TRACE is a file that
twinpool trace info can read, MODEL is one that twinpool plan can size. Times are modelled; counts are not. sweep runs many settings
and finds where reuse collapses, calibrate fits the model of time to a live server; each has a --help of its own.
"""


def run(argv: Sequence[str]) -> int:
    """Replay, print and write what was asked for, and return the exit code.

    Raises ConfigError or ModelError for bad input (exit 2), MemoryRefusal where the engine would refuse to start (exit 3).
    """
    if argv and argv[0] == "sweep":
        from twinpool.replay.sweep_cli import run as run_sweep

        return run_sweep(argv[1:])
    if argv and argv[0] == "calibrate":
        from twinpool.replay.calibrate import run as run_calibrate

        return run_calibrate(argv[1:])
    return _replay(read_replay(argv, usage=USAGE))


def _replay(command: ReplayCommand) -> int:
    from twinpool.replay import document, report

    options = command.options
    if options.records and not options.json:
        raise ConfigError("--records adds requests to the JSON: give --json with it.")
    check_idle(command)
    outcome = _outcome(command)
    if options.strict and outcome.result.counts.refused:
        raise ConfigError(f"{first_refused(outcome.result)}; without --strict it is counted as refused.")
    text = document.replay_json(outcome, records=options.records) if options.json else report.report_text(outcome)
    print(text, end="")
    _write_files(options, outcome)
    return 0


def _outcome(command: ReplayCommand) -> Outcome:
    """Read the trace, run it, and bound it from above unless that is switched off or nobody knows what requests share."""
    from twinpool.replay.experiment import Experiment, prepare, run_experiment
    from twinpool.replay.formats import load_trace
    from twinpool.replay.tokens import TokenSpace

    options = command.options
    trace, traffic = prepare(load_trace(command.trace, format=options.trace_format, strict=options.strict), options)
    has_disk = command.sizing.resolved.hicache_storage_backend is not None
    experiment = Experiment(
        trace=trace, sizing=command.sizing, traffic=traffic, calibration=command.calibration,
        disk=disk_link(options, has_disk=has_disk, timed=traffic.arrival != "count"), skip=not options.no_skip,
    )  # fmt: skip
    tokens = TokenSpace(trace)
    outcome = Outcome(trace=trace, traffic=traffic, result=run_experiment(experiment, tokens=tokens))
    if options.no_bounds or not outcome.reuse_known:
        return outcome
    from twinpool.replay.bound import bounds

    return replace(outcome, bounds=bounds(experiment, outcome.result, tokens))


def _write_files(options: ReplayOptions, outcome: Outcome) -> None:
    from twinpool.replay import chrome, page

    if options.html is not None:
        write_report("--html", options.html, page.replay_page(outcome))
    if options.chrome_trace is not None:
        write_report("--chrome-trace", options.chrome_trace, chrome.chrome_trace(outcome.result))
