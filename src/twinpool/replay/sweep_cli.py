"""`twinpool replay sweep`: one trace through many settings, spread over cores or machines, to find where reuse collapses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, TextIO

from twinpool.clock import Clock, WallClock
from twinpool.config import command_line
from twinpool.config.field import Flag, options_of
from twinpool.errors import ConfigError, MemoryRefusal
from twinpool.plan.command import launch_flags_footer, parts
from twinpool.replay.command import check_idle, read_replay, write_report
from twinpool.replay.experiment import prepare
from twinpool.replay.formats import load_trace
from twinpool.replay.options import GROUPS, ReplayOptions, TrafficOptions, disk_link
from twinpool.replay.spread import Finished, Shared, spread
from twinpool.replay.sweep import Point, Row, Sweep, grid_of, main_axis, points_of, values_text
from twinpool.replay.sweep_host import set_by_axes
from twinpool.replay.sweep_report import sweep_json, sweep_page, sweep_text
from twinpool.replay.sweep_store import Stored, append, fingerprint, open_for_more, point_key, read_finished
from twinpool.replay.tokens import TokenSpace
from twinpool.replay.trace import Trace

USAGE = """\
usage: twinpool replay sweep TRACE MODEL --gpu NAME --slots 80:1000:12 [axes] [options] [-- LAUNCH LINE]

The same trace on every combination of the settings given, each sized as the engine would: where does reuse collapse, which pool
makes it, and what to run instead. Values: 80,120,160 or FIRST:LAST:COUNT, spread evenly by their logarithm.
Memory stays what the device or --pool-memory gives; only its division and the scheduler's settings change.
"""
INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended


@dataclass(frozen=True, kw_only=True)
class AxisOptions:
    """What is varied (at least one)"""

    slots: Annotated[str | None, Flag("State slots, at fixed memory.", metavar="VALUES")] = None
    ratio: Annotated[str | None, Flag("State : KV memory, at fixed memory.", metavar="VALUES")] = None
    sessions_alive: Annotated[str | None, Flag("Sessions alive in a closed loop.", metavar="VALUES")] = None
    strategies: Annotated[str | None, Flag("How checkpoints are taken.", metavar="NAMES")] = None
    path_caps: Annotated[
        str | None, Flag("Checkpoints kept along one conversation; unlimited is a value.", metavar="VALUES")
    ] = None
    track_intervals: Annotated[str | None, Flag("Tokens between checkpoints during decode.", metavar="VALUES")] = None
    chunk_sizes: Annotated[
        str | None,
        Flag(
            "Tokens of one step; unlimited is a value. The default of --mem-fraction-static follows it: give that too to "
            "keep the memory.", metavar="VALUES",
        ),
    ] = None  # fmt: skip
    page_sizes: Annotated[str | None, Flag("Tokens of a KV page.", metavar="VALUES")] = None
    host_sizes: Annotated[
        str | None, Flag("Host tier in GB (10^9 bytes) on each rank; 0 is none.", metavar="VALUES")
    ] = None  # fmt: skip
    host_splits: Annotated[
        str | None,
        Flag("Share of the host tier that only states may take; auto is no split.", metavar="VALUES"),
    ] = None
    disk_sizes: Annotated[
        str | None, Flag("Disk tier below the host in GB, of all ranks together; 0 is none.", metavar="VALUES")
    ] = None  # fmt: skip
    write_policies: Annotated[
        str | None, Flag("When prefixes are copied to the host (--hicache-write-policy).", metavar="NAMES")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SpreadOptions:
    """How it runs"""

    workers: Annotated[
        int | None, Flag("Processes.", metavar="N", at_least=1, at_most=1024, default_text="one a core")
    ] = None  # fmt: skip
    ray: Annotated[str | None, Flag("Run on the Ray cluster at this address instead.", metavar="ADDRESS")] = None
    out: Annotated[
        str | None,
        Flag("Append each finished point to this file, and skip points that are in it already.", metavar="FILE.jsonl"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SweepReplayOptions(AxisOptions, SpreadOptions, ReplayOptions):
    """All of them. Raises ConfigError naming the flag whose value has the wrong type or is out of range."""

    def __post_init__(self) -> None:
        for option in options_of(SweepReplayOptions):
            option.check(getattr(self, option.field))
        if self.chrome_trace is not None:
            raise ConfigError("--chrome-trace is of one run; twinpool replay writes it.")
        if self.records:
            raise ConfigError("--records are of one run; twinpool replay prints them.")
        if self.ray is not None and self.workers is not None:
            raise ConfigError("--workers contradicts --ray: the cluster decides how many run.")


def run(argv: Sequence[str]) -> int:
    """Sweep and return the exit code: 130 after Ctrl-C, with a report of what had finished; 3 when the engine refuses every point.

    Raises ConfigError or ModelError.
    """
    if {"-h", "--help"} & set(parts(argv)[0]):
        flags = command_line.rows_of((AxisOptions, SpreadOptions, *GROUPS))
        print(command_line.help_text(flags, usage=USAGE, footer=launch_flags_footer()), end="")
        return 0
    command = read_replay(argv, usage=USAGE, owner=SweepReplayOptions)
    options = command.options
    assert isinstance(options, SweepReplayOptions)
    grid = grid_of({option.name: getattr(options, option.field) for option in options_of(AxisOptions)})
    check_idle(command, set_elsewhere=set_by_axes({axis.field for axis in grid}))
    trace, traffic = prepare(load_trace(command.trace, format=options.trace_format, strict=options.strict), options)
    points = points_of(command.sizing, _traffic_alone(traffic), grid)
    has_disk = options.disk_sizes is not None or command.sizing.resolved.hicache_storage_backend is not None
    shared = Shared(
        trace=trace, tokens=TokenSpace(trace), calibration=command.calibration, skip=not options.no_skip,
        bounds=not options.no_bounds, disk=disk_link(options, has_disk=has_disk, timed=traffic.arrival != "count"),
    )  # fmt: skip
    rows, interrupted = run_points(shared, points, options)
    sizing = command.sizing
    sweep = Sweep(
        trace=trace.name, model=sizing.model.name, machine=f"{sizing.machine.ranks} × {sizing.machine.name}",
        arrival=traffic.arrival, calibration=command.calibration.source, over=main_axis(grid), rows=rows,
        notes=(*trace.notes, *_left_out(trace)), reuse_known=trace.block_size is not None, pool_bytes=options.pool_memory,
    )  # fmt: skip
    print(sweep_json(sweep) if options.json else sweep_text(sweep), end="\n" if options.json else "")
    if options.html is not None:
        write_report("--html", options.html, sweep_page(sweep))
    if interrupted:
        print(_how_to_go_on(sweep, options.out), file=sys.stderr)
        return INTERRUPTED
    return 0 if sweep.measured else MemoryRefusal.exit_code


def _left_out(trace: Trace) -> tuple[str, ...]:
    """How many records could not be used, and the first of them."""
    if not trace.rejected:
        return ()
    first = trace.rejected[0]
    return (f"Records left out: {len(trace.rejected):,}; the first is {first.where}: {first.reason}.",)


def _traffic_alone(options: TrafficOptions) -> TrafficOptions:
    """Without what else the command line had: it goes to workers and into keys."""
    return TrafficOptions(**{field.name: getattr(options, field.name) for field in fields(TrafficOptions)})


def _how_to_go_on(sweep: Sweep, out: str | None) -> str:
    kept = f"the same command goes on from {out}" if out else "with --out FILE.jsonl the next run would go on from here"
    return f"Interrupted with {sweep.waiting} of {len(sweep.rows)} points not run; {kept}."


def run_points(
    shared: Shared, points: Sequence[Point], options: SpreadOptions, *, stream: TextIO | None = None
) -> tuple[tuple[Row, ...], bool]:
    """(rows in the order of the points, whether Ctrl-C ended it). Finished points of --out are taken from there; progress goes to
    `stream` (standard error).
    """
    keys, stored = _stored(shared, points, options.out)
    rows = [
        Row(point=point, measured=stored.measured.get(key), refusal=point.refusal)
        for point, key in zip(points, keys, strict=True)
    ]
    left = {number: row.point for number, row in enumerate(rows) if row.measured is None and not row.refusal}
    known = shared.trace.block_size is not None
    progress = Progress(len(left), stream=stream or sys.stderr, clock=WallClock(), reuse_known=known)
    progress.begin(finished=sum(row.measured is not None for row in rows), torn=stored.torn)
    if not left:
        return tuple(rows), False
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_for_more(Path(options.out))) if options.out is not None else None
        results: Iterator[Finished] = spread(shared, left, workers=options.workers, ray=options.ray)
        stack.callback(_close, results)
        try:
            for number, outcome in results:
                point = left[number]
                if isinstance(outcome, str):
                    rows[number] = Row(point=point, refusal=outcome)
                else:
                    rows[number] = Row(point=point, measured=outcome)
                    if file is not None:
                        append(file, keys[number], point, outcome)
                progress.finished(rows[number])
        except KeyboardInterrupt:
            progress.end()
            return tuple(rows), True
    progress.end()
    return tuple(rows), False


def _close(results: Iterator[Finished]) -> None:
    close: Callable[[], None] | None = getattr(results, "close", None)
    if close is not None:
        close()


def _stored(shared: Shared, points: Sequence[Point], out: str | None) -> tuple[list[str], Stored]:
    """Keys of the points, and what the file has of them; no key is needed without one."""
    if out is None:
        return [""] * len(points), Stored({})
    trace = fingerprint(shared.trace)
    keys = [point_key(point, trace=trace, calibration=shared.calibration, disk=shared.disk) for point in points]
    stored = read_finished(Path(out))
    wanted: Mapping[str, object] = dict.fromkeys(keys)
    return keys, Stored({key: value for key, value in stored.measured.items() if key in wanted}, stored.torn)


class Progress:
    """A bar with what just finished and the time left on a terminal, else a line a point. Ten lines of our own: no dependency
    draws bars here yet, and one that did would have to be kept out of files and pipes as well.
    """

    def __init__(self, total: int, *, stream: TextIO, clock: Clock, reuse_known: bool = True) -> None:
        self._total, self._stream, self._clock, self._reuse_known = total, stream, clock, reuse_known
        self._done = 0
        self._began_s = clock.now_s()
        self._bar = stream.isatty()

    def begin(self, *, finished: int, torn: int) -> None:
        """Say what the file of earlier runs had."""
        if finished or torn:
            unreadable = f"; {torn} unreadable lines in it are ignored" if torn else ""
            print(f"{finished} points are finished already, {self._total} are left{unreadable}.", file=self._stream)

    def finished(self, row: Row) -> None:
        """One more."""
        self._done += 1
        point = values_text(row.point.values)
        found = "refused"
        if row.measured is not None:
            found = f"{row.measured.token_share:.1%} reuse" if self._reuse_known else "done"
        if not self._bar:
            print(f"{self._done}/{self._total} {point}: {found}", file=self._stream, flush=True)
            return
        left_s = (self._clock.now_s() - self._began_s) / self._done * (self._total - self._done)
        bar = ("#" * (24 * self._done // self._total)).ljust(24, ".")
        text = f"[{bar}] {self._done}/{self._total}, {left_s:.0f} s left. {point}: {found}"
        print(f"\r\x1b[K{text[:118]}", end="", file=self._stream, flush=True)

    def end(self) -> None:
        """Leave the bar's line."""
        if self._bar and self._done:
            print(file=self._stream)
