"""A sweep for people and programs: table, cliffs and recommendation as text, as a page with plots, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twinpool.plan.outcome import launch_flags
from twinpool.plan.report import flags_head
from twinpool.replay.cliff import HELD, Cliff
from twinpool.replay.outcome import STATE_GAPS
from twinpool.replay.sweep import Measured, Row, Sweep, label_of, value_text, values_text
from twinpool.replay.sweep_choice import Choice, Line, choice_of, lines_of
from twinpool.replay.sweep_store import measured_object
from twinpool.reports.chart import Chart, Mark, Series
from twinpool.reports.html import Section, html_page
from twinpool.reports.jsonio import json_text
from twinpool.reports.terminal import chart_text
from twinpool.tables import Table

SCHEMA = "twinpool-replay-sweep/1"
UNKNOWN_REUSE = (
    "Reuse is unknown: the trace has lengths only. So no cliff can be seen here, and what is recommended goes by modelled times "
    "alone."
)
ENOUGH = 0.75  # share of the infinite cache's reuse under which it is the memory that is missing, not a better division
_POOL = {
    "states": "state slots",
    "KV": "KV",
    "host": "host memory",
    "disk": "room on the disk",
    "disk_writes": "the time that the disk has to write",
}


def sweep_text(sweep: Sweep) -> str:
    """Heading, table, refused points, plot of reuse, cliffs, what to choose and the flags to paste."""
    choice = choice_of(sweep)
    parts = [_heading(sweep), _table(sweep, choice).text if sweep.measured else "No point has run."]
    parts += ["Refused by the engine:\n" + refused.text] if (refused := _refused(sweep)).rows else []
    parts += [chart_text(chart) for chart in charts(sweep)[:1]]
    parts += ["\n".join(_findings(sweep, choice))]
    if choice is not None:
        parts.append("\n  ".join([flags_head(sweep.pool_bytes) + ":", *flags_of(choice)]))
    return "\n\n".join(part for part in parts if part) + "\n"


def sweep_page(sweep: Sweep) -> str:
    """One HTML file that needs no network."""
    choice = choice_of(sweep)
    tables = [_table(sweep, choice)] if sweep.measured else []
    refused = _refused(sweep)
    sections = [
        Section("What was found", paragraphs=[_heading(sweep), *_findings(sweep, choice)]),
        Section("Plots", charts=charts(sweep)),
        Section("Points", tables=tables),
    ]
    if choice is not None:
        sections.insert(
            1, Section("Flags", paragraphs=[flags_head(sweep.pool_bytes) + ":", " ".join(flags_of(choice))])
        )
    if refused.rows:
        sections.append(Section("Refused by the engine", tables=[refused]))
    return html_page(f"{sweep.model} on {sweep.machine}: {sweep.trace} over {_axes(sweep)}", sections)


def sweep_json(sweep: Sweep) -> str:
    """The document, schema twinpool-replay-sweep/1 (docs/replay.md). Equal sweeps are equal bytes."""
    choice = choice_of(sweep)
    document = {
        "schema": SCHEMA, "trace": sweep.trace, "model": sweep.model, "machine": sweep.machine, "arrival": sweep.arrival,
        "calibration": sweep.calibration, "over": sweep.over.name if sweep.over else None, "notes": sweep.notes,
        "reuse_known": sweep.reuse_known, "points": [_point_object(row) for row in sweep.rows],
        "lines": [{"others": dict(line.others), "shape": line.shape} for line in lines_of(sweep)] if sweep.reuse_known else [],
        "recommended": None if choice is None else _choice_object(choice),
    }  # fmt: skip
    return json_text(document)


def _point_object(row: Row) -> dict[str, object]:
    return {
        "values": dict(row.point.values), "refusal": row.refusal or None,
        "measured": None if row.measured is None else measured_object(row.measured),
    }  # fmt: skip


def _choice_object(choice: Choice) -> dict[str, object]:
    return {
        "values": dict(choice.row.point.values), "margin_below": choice.below, "margin_above": choice.above,
        "launch_flags": flags_of(choice),
    }  # fmt: skip


def flags_of(choice: Choice) -> tuple[str, ...]:
    """The launch line's flags of the recommended point."""
    sizing = choice.row.point.sizing
    assert sizing is not None
    return launch_flags(sizing, None)


def _heading(sweep: Sweep) -> str:
    ran, refused = len(sweep.measured), sum(bool(row.refusal) for row in sweep.rows)
    left = f", {sweep.waiting} not run" if sweep.waiting else ""
    return (
        f"{sweep.trace} on {sweep.model}, {sweep.machine}: {_axes(sweep)}. {ran} points run, {refused} refused{left}. "
        f"Arrivals: {sweep.arrival}. Times are modelled (calibration: {sweep.calibration}); counts are not."
    )


def _axes(sweep: Sweep) -> str:
    return ", ".join(label_of(name) for name, _ in sweep.rows[0].point.values)


def _table(sweep: Sweep, choice: Choice | None) -> Table:
    names = [name for name, _ in sweep.rows[0].point.values]
    columns = [(head, text) for head, text in _COLUMNS if head not in names]
    if not _timed(sweep):
        columns = columns[: -len(_TIMES)]
    if not sweep.reuse_known:
        columns = [(head, text) for head, text in columns if head not in _OF_REUSE]
    if not _has_host(sweep):
        columns = [(head, text) for head, text in columns if head != "from host"]
    if not _has_disk(sweep):
        columns = [(head, text) for head, text in columns if head != "from disk"]
    head = [*map(label_of, names), *(head for head, _ in columns), ""]
    rows = []
    for row in sweep.measured:
        assert row.measured is not None
        cells = [value_text(name, value) for name, value in row.point.values]
        mark = "recommended" if choice is not None and row is choice.row else ""
        rows.append((*cells, *(text(row.measured) for _, text in columns), mark))
    return Table(tuple(head), rows, right=range(len(head) - 1))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


_OF_REUSE = ("reuse", "infinite", "state evicted", "KV evicted", "from host", "from disk")
_Column = tuple[str, Callable[[Measured], str]]
_TIMES: tuple[_Column, ...] = (
    ("TTFT p50 s", lambda found: _seconds(found.ttft_p50_s)),
    ("TTFT p99 s", lambda found: _seconds(found.ttft_p99_s)),
    ("output tokens/s", lambda found: f"{found.output_tokens_per_s:,.0f}"),
)
_COLUMNS: tuple[_Column, ...] = (
    ("slots", lambda found: f"{found.slots:,}"),
    ("KV tokens", lambda found: f"{found.kv_tokens:,}"),
    ("reuse", lambda found: _percent(found.token_share)),
    ("infinite", lambda found: _percent(found.infinite_token_share)),
    ("state evicted", lambda found: _percent(sum(found.gap(reason) for reason in STATE_GAPS))),
    ("KV evicted", lambda found: _percent(found.gap("kv_evicted"))),
    ("from host", lambda found: _percent(found.from_host_share)),
    ("from disk", lambda found: _percent(found.from_storage_share)),
    ("retracted", lambda found: f"{found.retractions:,}"),
    ("refused", lambda found: f"{found.refused:,}"),
    ("running", lambda found: f"{found.mean_running:.1f}"),
    *_TIMES,
)


def _timed(sweep: Sweep) -> bool:
    return any(
        row.measured.duration_s > 0 for row in sweep.rows if row.measured is not None and sweep.arrival != "count"
    )


def _has_host(sweep: Sweep) -> bool:
    return any(row.measured.host_kv_free is not None for row in sweep.rows if row.measured is not None)


def _has_disk(sweep: Sweep) -> bool:
    return any(row.measured.disk_full is not None for row in sweep.rows if row.measured is not None)


def _refused(sweep: Sweep) -> Table:
    rows = [
        (
            values_text(row.point.values),
            row.refusal,
        )
        for row in sweep.rows
        if row.refusal
    ]
    return Table(("point", "why"), rows)


def charts(sweep: Sweep) -> tuple[Chart, ...]:
    """Reuse, time to first token and throughput over the axis, a series for each other combination; cliffs are marked."""
    if sweep.over is None:
        return ()
    lines = lines_of(sweep)
    label = label_of(sweep.over.name)
    xs = [x for line in lines for x in line.xs]
    log_x = bool(xs) and max(xs) > 5 * min(xs) > 0
    marks = tuple(mark for line in lines[:1] for mark in _marks(line))

    def chart(title: str, unit: str, value: Callable[[Measured], float | None]) -> Chart:
        series = tuple(Series(_name(line), line.xs, tuple(value(one) for one in line.measured)) for line in lines)
        return Chart(title, label, unit, series=series, marks=marks, log_x=log_x)

    found = [chart("Reuse", "% of prompt tokens", lambda one: 100 * one.token_share)] if sweep.reuse_known else []
    if _timed(sweep):
        found.append(chart("Time to first token, median (modelled)", "s", lambda one: one.ttft_p50_s))
        found.append(chart("Throughput (modelled)", "output tokens/s", lambda one: one.output_tokens_per_s))
    return tuple(found) if xs else ()


def _name(line: Line) -> str:
    return values_text(line.others) or "all"


def _marks(line: Line) -> list[Mark]:
    """The plateau's edges, of one line: more of them would hide the plot."""
    return [
        Mark(cliff.edge, f"{HELD:.0%} of the best")
        for cliff in (line.shape.below, line.shape.above)
        if cliff is not None
    ]


def _findings(sweep: Sweep, choice: Choice | None) -> list[str]:
    """Sentences: cliffs of each line, the upper bound, the recommendation, what the trace's numbers leave out."""
    found: list[str] = []
    if sweep.reuse_known:
        for line in lines_of(sweep):
            found += _cliff_sentences(line, sweep)
        found += _beside_lines(sweep)
        found += _upper_bound(sweep)
    else:
        found.append(UNKNOWN_REUSE)
    if choice is not None:
        found.append(_recommendation(sweep, choice))
    return [*found, *sweep.notes]


def _beside_lines(sweep: Sweep) -> list[str]:
    """Points whose value is a word, which has no place on the axis."""
    over = sweep.over
    if over is None or not over.words:
        return []
    return [
        f"{values_text(row.point.values)}: {row.measured.token_share:.1%} reuse."
        for row in sweep.measured
        if row.measured is not None and dict(row.point.values)[over.name] in over.words
    ]


def _upper_bound(sweep: Sweep) -> list[str]:
    """What an infinite cache would reuse, and whether some division comes near it."""
    measured = [row.measured for row in sweep.measured if row.measured is not None]
    known = [one.infinite_token_share for one in measured if one.infinite_token_share is not None]
    if not known:
        return []
    low, high, best = min(known), max(known), max(one.token_share for one in measured)
    text = f"An infinite cache would reuse {_percent(low)}"
    text += f" to {_percent(high)}." if _percent(low) != _percent(high) else "."
    if best < ENOUGH * low:
        text += f" No point comes near: {_percent(best)} at best, so this memory is too small for these sessions."
    return [text]


def _cliff_sentences(line: Line, sweep: Sweep) -> Sequence[str]:
    assert sweep.over is not None
    name, shape = sweep.over.name, line.shape
    where = f"{_name(line)}: " if line.others else ""
    axis = label_of(name)

    def at(x: float) -> str:
        return value_text(name, int(x) if float(x).is_integer() else x)

    def sentence(cliff: Cliff) -> str:
        return (
            f"{where}Reuse collapses {cliff.side} {axis} {at(cliff.edge)}, the last with {HELD:.0%} of the best "
            f"({shape.best_reuse:.1%} at {at(shape.best_x)}): the steepest fall is from {cliff.inner_reuse:.1%} at {at(cliff.inner)} "
            f"to {cliff.outer_reuse:.1%} at {at(cliff.outer)}; what runs out is {_POOL[cliff.pool]}."
        )

    found = [sentence(cliff) for cliff in (shape.below, shape.above) if cliff is not None]
    return found or [
        f"{where}No cliff from {at(shape.first)} to {at(shape.last)} {axis}: at least {HELD:.0%} of {shape.best_reuse:.1%}."
    ]


def _recommendation(sweep: Sweep, choice: Choice) -> str:
    measured = choice.row.measured
    assert measured is not None
    values = values_text(choice.row.point.values)
    if not sweep.reuse_known:
        return f"Recommended: {values}."
    text = f"Recommended: {values}, with {measured.token_share:.1%} reuse"
    if sweep.over is None or choice.x is None:
        return text + "."
    axis = label_of(sweep.over.name)
    sides = [
        f"no cliff {side} in this sweep"
        if margin is None
        else f"{margin:,.4g} {axis} ({margin / choice.x:.0%}) to the edge {side}"
        for side, margin in (("below", choice.below), ("above", choice.above))
    ]
    return f"{text}; margin: {', '.join(sides)}."
