"""A sweep for people: a table and plots in the terminal, and the same as a page."""

from __future__ import annotations

from twinpool.plan.outcome import Outcome
from twinpool.plan.report import fit_paragraphs, heading
from twinpool.plan.sweep import Sweep, charts
from twinpool.reports.html import Section, html_page
from twinpool.reports.terminal import chart_text
from twinpool.tables import Table


def sweep_text(outcome: Outcome, found: Sweep) -> str:
    """Heading, table, plots and the crossing."""
    plots = [chart_text(chart) for chart in charts(found)]
    return "\n\n".join([heading(outcome.sizing), _table(found).text, *plots, _crossing(found)]) + "\n"


def sweep_page(outcome: Outcome, found: Sweep) -> str:
    """One HTML file that needs no network."""
    title = f"{outcome.sizing.model.name} on {outcome.sizing.machine.ranks} × {outcome.sizing.machine.name}: sweep over {found.over}"
    sections = (
        Section("Sweep", paragraphs=(*fit_paragraphs(outcome), _crossing(found)), charts=charts(found)),
        Section("Points", tables=(_table(found),)),
    )
    return html_page(title, sections)


def _table(found: Sweep) -> Table:
    head = (found.over, "slots", "KV tokens", "running requests", "idle sessions", "")
    if found.over == "slots":
        head = ("slots", "", "KV tokens", "running requests", "idle sessions", "")
    nearest = (
        None if found.present is None else min(found.points, key=lambda point: abs(point.value - (found.present or 0)))
    )
    rows = [
        (
            f"{point.value:,g}" if found.over == "slots" else f"{point.value:g}",
            "" if found.over == "slots" else f"{point.slots:,}",
            f"{point.tokens:,}",
            f"{point.running:,}",
            f"{point.idle_sessions:,}",
            "nearest to the present" if point is nearest else "",
        )
        for point in found.points
    ]
    return Table(head, rows, right=(0, 1, 2, 3, 4))


def _crossing(found: Sweep) -> str:
    if found.crossing is None:
        return "The pools do not cross in this memory: at every split the states run out first."
    return (
        f"The pools cross at {found.crossing:g} {found.over}: with less, states run out before KV; with more, KV before states "
        f"(at {found.tokens_per_request:,} tokens a request)."
    )
