"""`twinpool replay`: recorded traffic through the real scheduler in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.replay.command import read_replay

USAGE = """\
usage: twinpool replay TRACE MODEL --gpu NAME [options] [-- LAUNCH LINE]

The server's own admission, prefix tree, eviction, chunking and retraction on recorded traffic, without a GPU: TRACE is a file that
twinpool trace info can read, MODEL is one that twinpool plan can size. Times are modelled; counts are not.
"""


def run(argv: Sequence[str]) -> int:
    """Replay and return the exit code. Raises ConfigError, ModelError or MemoryRefusal."""
    command = read_replay(argv, usage=USAGE)
    from twinpool.replay.experiment import Experiment, prepare, run_experiment
    from twinpool.replay.formats import load_trace

    options = command.options
    trace, traffic = prepare(load_trace(command.trace, format=options.trace_format, strict=options.strict), options)
    experiment = Experiment(
        trace=trace, sizing=command.sizing, traffic=traffic, calibration=command.calibration, skip=not options.no_skip
    )
    result = run_experiment(experiment)
    print(result.setup, result.reuse, result.counts, result.times, result.occupancy, sep="\n")
    return 0
