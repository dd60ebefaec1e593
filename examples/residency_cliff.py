"""Where agent sessions stop being resumable: both pools fixed at 62.4 GiB together, their division swept; then ten times the sessions.

python examples/residency_cliff.py --quick              an invented workload of the same kind, seconds
python examples/residency_cliff.py --full TRACE         the agent collection, minutes; findings: docs/residency-cliff.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from twinpool.plan.command import read_command
from twinpool.plan.run import sizing_of
from twinpool.replay.cost import Calibration
from twinpool.replay.experiment import prepare
from twinpool.replay.formats import load_trace
from twinpool.replay.options import TrafficOptions
from twinpool.replay.spread import Shared
from twinpool.replay.sweep import Sweep, grid_of, main_axis, points_of
from twinpool.replay.sweep_cli import SpreadOptions, run_points
from twinpool.replay.sweep_report import sweep_page, sweep_text
from twinpool.replay.synthetic import SyntheticOptions, synthesize
from twinpool.replay.tokens import TokenSpace
from twinpool.replay.trace import Session, Trace
from twinpool.replay.traffic import trees

MACHINE = "GLM-5.3-Flash --gpu H200 --tp 2 --kv-cache-dtype fp8_e4m3 --page-size 64"


@dataclass(frozen=True)
class Scale:
    """sessions: alive in the first half, and running at most in both; the second has ten times as many alive. All requests are
    those of ten times as many session trees, each session with its first `turns`. more_idle_s: longest pause in the second half.
    """

    sessions: int
    pool_memory: str
    slots: str
    turns: int
    more_idle_s: float = 600.0


# Whole sessions (79 requests on average) would take eight times as long.
FULL = Scale(sessions=48, pool_memory="62.4GiB", slots="60:840:8", turns=10)
QUICK = Scale(sessions=12, pool_memory="15.6GiB", slots="20,60,90,210", turns=2)
WORKLOAD = SyntheticOptions(
    sessions=12, turns=5, system_tokens=2048, input_tokens=20_000, output_tokens=300, block_size=64
)


@dataclass(frozen=True)
class World:
    """One half of the experiment: the requests, sessions alive, the longest pause of a session."""

    trace: Trace
    alive: int
    idle_cap_s: float


def crowd_of(trace: Trace, count: int) -> Trace:
    """So many session trees: the first ones of the trace, and again from its start under namespaces of their own if it has fewer."""
    root_of = trees(trace)
    roots = list(dict.fromkeys(root_of.values()))
    copies: list[Session] = []
    for copy in range(-(-count // len(roots))):
        kept = set(roots[: count - copy * len(roots)])
        copies += [_copy(session, copy) for session in trace.sessions if root_of[session.id] in kept]
    return replace(trace, sessions=tuple(copies))


def _copy(session: Session, number: int) -> Session:
    """Nothing in it is shared with what it was copied from."""
    if number == 0:
        return session
    name = f"{session.id}#{number}"
    requests = tuple(replace(request, session=name) for request in session.requests)
    parent = None if session.parent is None else f"{session.parent}#{number}"
    return replace(
        session, id=name, namespace=f"{session.namespace or 'all'}#{number}", parent=parent, requests=requests
    )


def head(trace: Trace, turns: int) -> Trace:
    """The first requests of each session."""
    return replace(trace, sessions=tuple(replace(one, requests=one.requests[:turns]) for one in trace.sessions))


def sweep(world: World, scale: Scale, spreading: SpreadOptions) -> Sweep:
    """The division swept, at fixed memory and the same number of requests that may run."""
    traffic = TrafficOptions(arrival="closed", sessions=world.alive, idle_cap_s=world.idle_cap_s)
    words = f"{MACHINE} --pool-memory {scale.pool_memory} --max-running-requests {scale.sessions}".split()
    sizing, grid = sizing_of(read_command(words, usage="")), grid_of({"--slots": scale.slots})
    trace, traffic = prepare(world.trace, traffic)
    points = points_of(sizing, traffic, grid)
    shared = Shared(trace=trace, tokens=TokenSpace(trace), calibration=Calibration())
    rows, _ = run_points(shared, points, spreading)
    return Sweep(
        trace=trace.name, model=sizing.model.name, machine=f"{sizing.machine.ranks} × {sizing.machine.name}",
        arrival=traffic.arrival, calibration=shared.calibration.source, over=main_axis(grid), rows=rows, notes=trace.notes,
        pool_bytes=sizing.machine.available_bytes,
    )  # fmt: skip


def worlds(trace: Trace, scale: Scale) -> tuple[World, World]:
    """The same requests twice: as many sessions alive as may run, and ten times as many with longer pauses."""
    crowd = head(crowd_of(trace, 10 * scale.sessions), scale.turns)
    return (
        World(crowd, scale.sessions, idle_cap_s=10.0),
        World(crowd, 10 * scale.sessions, idle_cap_s=scale.more_idle_s),
    )


def main(argv: Sequence[str]) -> None:
    """Both sweeps as text, and as pages beside each other with --html FOLDER."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--quick", action="store_true")
    size.add_argument("--full", metavar="TRACE")
    parser.add_argument("--html", metavar="FOLDER", type=Path)
    parser.add_argument("--out", metavar="FILE.jsonl", help="keep finished points here and go on from them")
    options = parser.parse_args(argv)
    scale = QUICK if options.quick else FULL
    trace = synthesize(WORKLOAD) if options.quick else load_trace(options.full)
    for half in worlds(trace, scale):
        found = sweep(half, scale, SpreadOptions(out=options.out))
        print(f"{half.alive} sessions alive\n\n{sweep_text(found)}")
        if options.html is not None:
            (options.html / f"residency-{half.alive}.html").write_text(sweep_page(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
