"""A sweep of replays: the axes, their product as points of one machine each, and what is kept of every run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from twinpool.config.deployment import deployment_options
from twinpool.config.field import Option, Value, options_of
from twinpool.errors import ConfigError, MemoryRefusal, ModelError
from twinpool.plan.sizing import Sizing
from twinpool.replay.cliff import DiskLack
from twinpool.replay.describe import Spread
from twinpool.replay.options import TrafficOptions
from twinpool.replay.result import ReplayResult
from twinpool.replay.sweep_host import AUTO, TierOptions, check_tier, with_tier

MOST_POINTS = 5000
UNLIMITED = "unlimited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What a sweep can vary. name: in tables and JSON; flag: takes its values; field: of Deployment, or of TrafficOptions
    where traffic is set, or of TierOptions. words: values that stand beside numbers and are on no line.
    """

    name: str
    flag: str
    field: str
    traffic: bool = False
    words: tuple[str, ...] = ()

    @property
    def option(self) -> Option:
        """The option that one value is given to: its type, limits and single flag."""
        options = options_of(TrafficOptions) if self.traffic else (*deployment_options(), *options_of(TierOptions))
        return next(option for option in options if option.field == self.field)

    @property
    def numeric(self) -> bool:
        """Whether its values have an order."""
        return self.option.kind is not str


AXES = (
    Axis(name="slots", flag="--slots", field="max_mamba_cache_size"),
    Axis(name="ratio", flag="--ratio", field="mamba_full_memory_ratio"),
    Axis(name="sessions_alive", flag="--sessions-alive", field="sessions", traffic=True),
    Axis(name="strategy", flag="--strategies", field="mamba_radix_cache_strategy"),
    Axis(name="path_cap", flag="--path-caps", field="mamba_max_states_per_path"),
    Axis(name="track_interval", flag="--track-intervals", field="mamba_track_interval"),
    Axis(name="chunk_size", flag="--chunk-sizes", field="chunked_prefill_size"),
    Axis(name="page_size", flag="--page-sizes", field="page_size"),
    Axis(name="host_size", flag="--host-sizes", field="hicache_size"),
    Axis(name="host_split", flag="--host-splits", field="host_split", words=(AUTO,)),
    Axis(name="disk_size", flag="--disk-sizes", field="disk_size"),
    Axis(name="write_policy", flag="--write-policies", field="hicache_write_policy"),
)
Grid = Mapping[Axis, tuple[Value, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination. values: (axis name, value) in the order of AXES; sizing None: the engine refuses it, and says why.

    bounded: this one's run is also held against an infinite cache.
    """

    values: tuple[tuple[str, Value], ...]
    sizing: Sizing | None
    traffic: TrafficOptions
    refusal: str = ""
    bounded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is kept of a run; names as in replay/result.py. Shares are of prompt tokens, except those of the pools: mean shares of
    slots and pages over time. Times in modelled seconds, None where nothing was timed. infinite_token_share: reuse of the
    same requests with an infinite cache, None where it was not looked at. from_host_share: reused after it was brought back from
    the host, from_storage_share: after it was read from the disk. host_dropped_tokens, host_dropped_states: from the host, or not
    copied there, for want of room; host_kv_free, host_states_free: mean free shares there, None without a host tier; host_split:
    whether it has quotas. disk_full: whether a disk below it ran out of room, None without one; disk_lacked: what cost it most segments
    (disk_use.DiskUse).
    """

    slots: int
    kv_tokens: int
    page_size: int
    max_running_requests: int
    requests: int
    refused: int
    prompt_tokens: int
    token_share: float
    kv_share: float
    gaps: tuple[tuple[str, float], ...]
    computed_tokens: int
    evicted_states: int
    evicted_kv_tokens: int
    retractions: int
    slots_free: float
    pages_free: float
    mean_running: float
    peak_running: int
    queue_p50_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    e2e_p50_s: float | None
    input_tokens_per_s: float
    output_tokens_per_s: float
    duration_s: float
    infinite_token_share: float | None = None
    from_host_share: float = 0.0
    host_dropped_tokens: int = 0
    host_dropped_states: int = 0
    host_kv_free: float | None = None
    host_states_free: float | None = None
    host_split: bool = False
    from_storage_share: float = 0.0
    disk_full: bool | None = None
    disk_lacked: DiskLack | None = None

    def gap(self, reason: str) -> float:
        """Share of prompt tokens that were not reused for this reason."""
        return dict(self.gaps).get(reason, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A point with what became of it: a measurement, a sentence that refuses it, or neither (not run yet)."""

    point: Point
    measured: Measured | None = None
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All rows in the order of the grid. over: the axis that plots and cliffs go along (None: nothing numeric is varied).

    notes: what a reader of the numbers must know, of the trace. reuse_known: False for a trace of lengths alone, whose reuse is
    unknown and not 0. pool_bytes: memory of both pools where that was given, not the device's.
    """

    trace: str
    model: str
    machine: str
    arrival: str
    calibration: str
    over: Axis | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    reuse_known: bool = True
    pool_bytes: int | None = None

    @property
    def measured(self) -> tuple[Row, ...]:
        """Rows that have run."""
        return tuple(row for row in self.rows if row.measured is not None)

    @property
    def waiting(self) -> int:
        """Points that could run and have not."""
        return sum(row.measured is None and not row.refusal for row in self.rows)


def values_of(axis: Axis, text: str) -> tuple[Value, ...]:
    """'80,120' or '80:1000:12' (so many values from first to last, evenly by their logarithm). Raises ConfigError."""
    option = axis.option
    option = replace(option, flag=replace(option.flag, name=axis.flag))  # an error names the flag that was given
    words = _spread(axis, text) if ":" in text else [word.strip() for word in text.split(",")]
    values: list[Value] = []
    for word in words:
        if word in axis.words:
            values.append(word)
            continue
        value = -1 if word == UNLIMITED and option.flag.minus_one else option.parse(word)
        if value == "" or (isinstance(value, int) and value == -1 and word != UNLIMITED):
            raise ConfigError(
                f"{axis.flag} {text} has a value that is empty or -1; write {UNLIMITED} where that is meant."
            )
        option.check(value)
        values.append(value)
    return tuple(dict.fromkeys(values))


def _spread(axis: Axis, text: str) -> list[str]:
    parts = text.split(":")
    try:
        low, high, count = float(parts[0]), float(parts[1]), int(parts[2])
    except (ValueError, IndexError):
        low = high = count = 0
    if not axis.numeric or len(parts) != 3 or not 0 < low < high < math.inf or not 2 <= count <= MOST_POINTS:
        raise ConfigError(
            f"{axis.flag} {text} is no range; write FIRST:LAST:COUNT, such as 80:1000:12, or values with commas."
        )
    values = [low * (high / low) ** (step / (count - 1)) for step in range(count)]
    return [str(round(value)) if axis.option.kind is int else f"{value:.3g}" for value in values]


def label_of(name: str) -> str:
    """An axis in words."""
    return name.replace("_", " ")


def value_text(name: str, value: Value) -> str:
    """A value of the axis, for people."""
    if value == -1 and name in ("path_cap", "chunk_size"):
        return UNLIMITED
    return f"{value:,}" if isinstance(value, int) else str(value)


def values_text(values: Iterable[tuple[str, Value]]) -> str:
    """Several, such as 'slots 80, page size 64'."""
    return ", ".join(f"{label_of(name)} {value_text(name, value)}" for name, value in values)


def grid_of(texts: Mapping[str, str | None]) -> Grid:
    """The axes that were given values, by their flags. Raises ConfigError for none, for bad ones, and for two that contradict."""
    grid = {axis: values_of(axis, text) for axis in AXES if (text := texts.get(axis.flag)) is not None}
    if not grid:
        raise ConfigError(f"Nothing is varied: give at least one of {', '.join(axis.flag for axis in AXES)}.")
    if {"slots", "ratio"} <= {axis.name for axis in grid}:
        raise ConfigError("--slots contradicts --ratio: both divide the same memory, and pinned slots win.")
    if (count := math.prod(len(values) for values in grid.values())) > MOST_POINTS:
        raise ConfigError(f"The sweep has {count:,} points and at most {MOST_POINTS:,} are run; give fewer values.")
    return grid


def points_of(sizing: Sizing, traffic: TrafficOptions, grid: Grid) -> tuple[Point, ...]:
    """The product, each point sized as the engine would. Raises ConfigError for an axis whose single flag is set as well, or that
    this traffic does not have.
    """
    for axis in grid:
        _check(axis, sizing, traffic)
        check_tier(axis.flag, axis.field, varied={one.field for one in grid}, sizing=sizing)
    points = [
        _point(sizing, traffic, dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values())
    ]
    return _with_bounds(points)


def _check(axis: Axis, sizing: Sizing, traffic: TrafficOptions) -> None:
    given = sizing.flags.given
    if axis.field in given:
        raise ConfigError(f"{axis.flag} contradicts {axis.option.name}: leave the single value out.")
    if axis.name == "ratio" and "max_mamba_cache_size" in given:
        raise ConfigError("--ratio does nothing beside --max-mamba-cache-size, which pins the slots: leave one out.")
    if axis.traffic and traffic.arrival != "closed":
        raise ConfigError(
            f"{axis.flag} is for a closed loop (--arrival closed); these requests arrive as {traffic.arrival}."
        )


def _point(sizing: Sizing, traffic: TrafficOptions, chosen: Mapping[Axis, Value]) -> Point:
    values = tuple((axis.name, value) for axis, value in chosen.items())
    flags = {axis.field: value for axis, value in chosen.items() if not axis.traffic}
    theirs = {axis.field: value for axis, value in chosen.items() if axis.traffic}
    traffic = replace(traffic, **theirs)  # type: ignore[arg-type]
    try:
        sized = with_tier(sizing, flags)
    except (ConfigError, MemoryRefusal, ModelError) as error:
        return Point(values=values, sizing=None, traffic=traffic, refusal=str(error))
    if sized.ledger is None:
        return Point(values=values, sizing=None, traffic=traffic, refusal=sized.refusal or "")
    return Point(values=values, sizing=sized, traffic=traffic)


def _with_bounds(points: Sequence[Point]) -> tuple[Point, ...]:
    """An infinite cache does not see the pools, only pages and the order of requests: one point a page size and traffic is enough."""
    seen: set[object] = set()
    found = []
    for point in points:
        if point.sizing is not None and (key := bound_key(point)) not in seen:
            seen.add(key)
            point = replace(point, bounded=True)
        found.append(point)
    return tuple(found)


def bound_key(point: Point) -> tuple[object, ...]:
    """Points with the same one share the infinite cache's reuse, up to the order in which their requests happened to run."""
    return (point.sizing.resolved.page_size if point.sizing else None, point.traffic.sessions)


def main_axis(grid: Grid) -> Axis | None:
    """The axis of plots and cliffs: the first of AXES that is numeric and has two numbers."""
    return next((axis for axis in AXES if axis.numeric and len(_numbers(grid.get(axis, ()))) > 1), None)


def _numbers(values: Iterable[Value]) -> list[Value]:
    return [value for value in values if not isinstance(value, str)]


def measured_of(result: ReplayResult, infinite_token_share: float | None) -> Measured:
    """A run in the numbers that a sweep keeps."""
    setup, reuse, counts, times, pools = result.setup, result.reuse, result.counts, result.times, result.occupancy
    host = result.host
    prompt = max(1, reuse.prompt_tokens)
    ttft = times.ttft_s
    return Measured(
        slots=setup.slots, kv_tokens=setup.kv_tokens, page_size=setup.page_size,
        max_running_requests=setup.max_running_requests, requests=counts.requests, refused=counts.refused,
        prompt_tokens=reuse.prompt_tokens, token_share=reuse.token_share, kv_share=reuse.kv_share,
        gaps=tuple((reason, tokens / prompt) for reason, tokens in reuse.gaps),
        computed_tokens=counts.computed_tokens, evicted_states=counts.evicted_states,
        evicted_kv_tokens=counts.evicted_kv_tokens, retractions=counts.retractions, slots_free=pools.slots_free,
        pages_free=pools.pages_free, mean_running=pools.mean_running, peak_running=counts.peak_running,
        queue_p50_s=_p50(times.queue_s), ttft_p50_s=_p50(ttft), ttft_p99_s=ttft.p99 if ttft else None,
        tpot_p50_s=_p50(times.tpot_s), e2e_p50_s=_p50(times.e2e_s), input_tokens_per_s=times.input_tokens_per_s,
        output_tokens_per_s=times.output_tokens_per_s, duration_s=times.duration_s,
        infinite_token_share=infinite_token_share, from_host_share=reuse.from_host_tokens / prompt,
        host_dropped_tokens=host.dropped_tokens + host.unsaved_tokens if host is not None else 0,
        host_dropped_states=host.dropped_states + host.unsaved_states if host is not None else 0,
        host_kv_free=host.kv_free if host is not None else None,
        host_states_free=host.states_free if host is not None else None,
        host_split=host is not None and host.fixed_split, from_storage_share=reuse.from_storage_tokens / prompt,
        disk_full=result.disk.ran_out if result.disk is not None else None,
        disk_lacked=result.disk.lacked if result.disk is not None else None,
    )  # fmt: skip


def _p50(values: Spread | None) -> float | None:
    return values.p50 if values is not None else None
