"""The split varied over slots or ratio at fixed total memory: what each point can run and keep, and where the pools cross."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from twinpool.errors import ConfigError
from twinpool.memory.refusals import most_slots
from twinpool.memory.split import Split, serves, split, split_with
from twinpool.plan.options import SweepOptions
from twinpool.plan.sizing import Sizing
from twinpool.plan.workload import Workload
from twinpool.reports.chart import Chart, Mark, Series
from twinpool.units import ceil_div, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One split, all workers together: slots, logical tokens, requests that can run at once, and idle sessions that stay
    resumable beside the workload's running requests (0 if those do not all run). value: of what is varied.
    """

    value: float
    slots: int
    tokens: int
    running: int
    idle_sessions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """points in order of `over` ('slots' or 'ratio'); crossing: where states and KV allow the same number of requests
    (None: they do not meet within the range); present: the value of the plan itself.
    """

    over: str
    tokens_per_request: int
    points: tuple[Point, ...]
    crossing: float | None
    present: float | None


def sweep(workload: Workload, sizing: Sizing, options: SweepOptions) -> Sweep:
    """Raises ConfigError for a range that holds no split that serves one request."""
    least, most = _slot_range(sizing)
    request = sizing.request
    if options.over == "slots":
        low, high = options.sweep_from or least * request.dp, options.sweep_to or most * request.dp
        values = [float(round(value)) for value in _spread(low, high, options.points)]
    else:
        low, high = options.sweep_from or _ratio_of(sizing, least), options.sweep_to or _ratio_of(sizing, most)
        values = [float(f"{value:.3g}") for value in _spread(low, high, options.points)]
    if low > high:
        raise ConfigError(f"--from {low:g} is above --to {high:g}: the sweep has no point.")
    points = tuple(
        _point(value, parts, workload, sizing)
        for value in sorted(set(values))
        if serves(request, parts := _split_at(sizing, options.over, value))
    )
    if not points:
        raise ConfigError(
            f"No point between {low:g} and {high:g} serves one request: this memory allows {least * request.dp} to "
            f"{most * request.dp} slots."
        )
    present = None
    if sizing.ledger is not None:
        present = float(sizing.ledger.max_mamba_cache_size * request.dp) if options.over == "slots" else request.ratio
    return Sweep(
        over=options.over, tokens_per_request=workload.tokens_per_request, points=points,
        crossing=_crossing(sizing, workload, options.over, least=least, most=most), present=present,
    )  # fmt: skip


def _slot_range(sizing: Sizing) -> tuple[int, int]:
    """Slots of a worker that serve one request: the least and the most. Raises ConfigError when there are none."""
    request = replace(sizing.request, max_mamba_cache_size=None)
    least, most = request.slots_per_request, most_slots(request)
    if most < least:
        raise ConfigError(
            f"No split serves a request: one needs {least} state slots and this memory has room for {most} beside two tokens."
        )
    return least, most


def _ratio_of(sizing: Sizing, slots: int) -> float:
    """State bytes : KV bytes of a split with so many slots."""
    parts = split_with(sizing.request, slots)
    return (parts.rest_bytes - parts.kv_bytes) / max(1, parts.kv_bytes)


def _spread(low: float, high: float, points: int) -> list[float]:
    """Values from low to high, evenly by their logarithm."""
    if low >= high:
        return [low]
    step = (math.log(high) - math.log(low)) / (points - 1)
    return [low, *(math.exp(math.log(low) + step * i) for i in range(1, points - 1)), high]


def _split_at(sizing: Sizing, over: str, value: float) -> Split:
    if over == "ratio":
        return split(replace(sizing.request, max_mamba_cache_size=None, ratio=value))
    return split_with(sizing.request, int(value) // sizing.request.dp)


def _context_tokens(sizing: Sizing, workload: Workload) -> int:
    return round_up(workload.tokens_per_request, sizing.request.page_size * sizing.request.dcp)


def _point(value: float, parts: Split, workload: Workload, sizing: Sizing) -> Point:
    request, context = sizing.request, _context_tokens(sizing, workload)
    tokens = parts.tokens * request.dcp
    by_states = parts.slots // request.slots_per_request
    by_kv = tokens // context if request.kv_bytes_per_token else by_states
    running = ceil_div(workload.running, request.dp)
    idle = 0
    if running <= min(by_states, by_kv) and request.radix_cache:
        free_slots = parts.slots - running * request.slots_per_request
        idle = min(free_slots // workload.checkpoints_per_session, (tokens - running * context) // context)
    return Point(
        value=value, slots=parts.slots * request.dp, tokens=tokens * request.dp, running=min(by_states, by_kv) * request.dp,
        idle_sessions=max(0, idle) * request.dp,
    )  # fmt: skip


def _crossing(sizing: Sizing, workload: Workload, over: str, *, least: int, most: int) -> float | None:
    """The fewest slots (or their ratio) at which states allow at least as many requests as KV does."""
    request, context = sizing.request, _context_tokens(sizing, workload)
    if not request.kv_bytes_per_token:
        return None

    def states_suffice(slots: int) -> bool:
        return slots // request.slots_per_request >= split_with(request, slots).tokens * request.dcp // context

    if not states_suffice(most):
        return None
    low, high = least, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if states_suffice(middle) else (middle + 1, high)
    return float(low * request.dp) if over == "slots" else float(f"{_ratio_of(sizing, low):.3g}")


def charts(found: Sweep) -> tuple[Chart, ...]:
    """Concurrency and resident sessions, then tokens, over what was varied."""
    xs = tuple(point.value for point in found.points)
    label = "state slots" if found.over == "slots" else "state : KV ratio"
    marks = []
    if found.crossing is not None and xs[0] <= found.crossing <= xs[-1]:
        marks.append(Mark(found.crossing, "pools cross"))
    if found.present is not None and xs[0] <= found.present <= xs[-1]:
        marks.append(Mark(found.present, "present"))
    log_x = xs[-1] > 20 * xs[0]
    running = Series("running requests", xs, tuple(float(point.running) for point in found.points))
    idle = Series("idle sessions that can resume", xs, tuple(float(point.idle_sessions) for point in found.points))
    tokens = Series("KV tokens", xs, tuple(float(point.tokens) for point in found.points))
    title = f"What fits, at {found.tokens_per_request:,} tokens a request"
    return (
        Chart(title, label, "requests, sessions", series=(running, idle), marks=tuple(marks), log_x=log_x),
        Chart("KV pool", label, "tokens", series=(tokens,), marks=tuple(marks), log_x=log_x),
    )
