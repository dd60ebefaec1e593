"""A sweep cut into lines along its axis, and the setting to choose out of all of them with its margins."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.config.field import Value
from twinpool.replay.cliff import Reading, Shape, shape_of
from twinpool.replay.outcome import STATE_GAPS
from twinpool.replay.sweep import Measured, Row, Sweep

TIE = 0.005  # shares of the best reuse that are as good as the best: other things decide
QUICK = 0.1  # the same for the time to the first token


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Rows that differ only along the sweep's axis, by x. others: (axis name, value) that they have in common."""

    others: tuple[tuple[str, Value], ...]
    xs: tuple[float, ...]
    rows: tuple[Row, ...]
    shape: Shape

    @property
    def measured(self) -> tuple[Measured, ...]:
        """Of its rows."""
        return tuple(row.measured for row in self.rows if row.measured is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The recommended row; x: its place on the axis; below, above: from there to the plateau's edge beside the cliff, in units of
    the axis (None: no axis, or no cliff on that side).
    """

    row: Row
    x: float | None = None
    below: float | None = None
    above: float | None = None


def lines_of(sweep: Sweep) -> tuple[Line, ...]:
    """In the order of the grid; none without a numeric axis or a measured row."""
    if sweep.over is None:
        return ()
    groups: dict[tuple[tuple[str, Value], ...], list[tuple[float, Row]]] = {}
    for row in sweep.measured:
        if isinstance(dict(row.point.values)[sweep.over.name], str):
            continue  # a word is at no place of the axis
        groups.setdefault(_others(row, sweep.over.name), []).append((_x(row, sweep.over.name), row))
    found = []
    for others, pairs in groups.items():
        pairs.sort(key=lambda pair: pair[0])
        shape = shape_of([_reading(x, row.measured) for x, row in pairs if row.measured is not None])
        found.append(
            Line(others=others, xs=tuple(x for x, _ in pairs), rows=tuple(row for _, row in pairs), shape=shape)
        )
    return tuple(found)


def _others(row: Row, over: str) -> tuple[tuple[str, Value], ...]:
    return tuple((name, value) for name, value in row.point.values if name != over)


def _x(row: Row, over: str) -> float:
    value = dict(row.point.values)[over]
    assert isinstance(value, int | float)
    return float(value)


def _reading(x: float, measured: Measured) -> Reading:
    slots_free, pages_free = measured.slots_free, measured.pages_free
    host_full = bool(measured.host_dropped_tokens or measured.host_dropped_states)
    if host_full and measured.host_states_free is not None and measured.host_kv_free is not None:
        slots_free, pages_free = measured.host_states_free, measured.host_kv_free
    return Reading(
        x=x, reuse=measured.token_share, state_evicted=sum(measured.gap(reason) for reason in STATE_GAPS),
        kv_evicted=measured.gap("kv_evicted"), slots_free=slots_free, pages_free=pages_free,
        one_memory=host_full and not measured.host_split, disk=measured.disk_lacked,
    )  # fmt: skip


def choice_of(sweep: Sweep) -> Choice | None:
    """The most reuse; among those within TIE of it the shortest median time to first token; among those within QUICK of that the
    widest margin for its size, then the most output tokens a second. None if nothing has run.
    """
    choices = _choices(sweep)
    if not choices:
        return None
    best = max(_measured(choice).token_share for choice in choices)
    equal = [choice for choice in choices if _measured(choice).token_share >= (1 - TIE) * best]
    first_token_s = min(_measured(choice).ttft_p50_s or 0.0 for choice in equal)
    quick = [choice for choice in equal if (_measured(choice).ttft_p50_s or 0.0) <= (1 + QUICK) * first_token_s]
    return max(quick, key=_rank)


def _choices(sweep: Sweep) -> list[Choice]:
    if sweep.over is None:
        return [Choice(row=row) for row in sweep.measured]
    found = []
    for line in lines_of(sweep):
        for x, row in zip(line.xs, line.rows, strict=True):
            below, above = line.shape.margins(x)
            found.append(Choice(row=row, x=x, below=below, above=above))
    on_lines = {id(choice.row) for choice in found}
    found += [Choice(row=row) for row in sweep.measured if id(row) not in on_lines]
    return found


def _measured(choice: Choice) -> Measured:
    assert choice.row.measured is not None
    return choice.row.measured


def _rank(choice: Choice) -> tuple[float, float]:
    margins = [margin / choice.x for margin in (choice.below, choice.above) if margin is not None and choice.x]
    return (min(margins, default=float("inf")), _measured(choice).output_tokens_per_s)
