"""A report as one HTML page that loads nothing: text, tables and charts, for screen (light or dark) and paper."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape

from twinpool.reports.chart import Chart
from twinpool.reports.svg import chart_figure, element
from twinpool.tables import Table

# Why our own SVG (svg.py) and no library (looked at in November 2026): plotly 7.1 puts 4.8 MB of script into every page,
# bokeh 3.9 1.3 MB and five more packages into the installation, altair 6.3 needs a 33 MB converter to be offline, and
# none of them shows a chart without running its script; matplotlib 3.11 is a 10 MB wheel and its SVG has no hover values;
# pygal 3.1 is small, but its hovers are a script from a network address and its colours are fixed when it draws. Lines,
# numbers on axes and hover titles are all that is needed here: under 200 bytes a point.

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --rule: #d1d9e0; --paper: #ffffff;
  --c0: #0b62c4; --c1: #c2410c; --c2: #15803d; --c3: #9333ea; --c4: #b91c5c; --c5: #0e7490; --c6: #854d0e; --c7: #4b5563 }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9da7b1; --rule: #3d444d; --paper: #0d1117;
    --c0: #6cb0ff; --c1: #ff9d66; --c2: #5fd38a; --c3: #c79bff; --c4: #ff8fb8; --c5: #5cd0e6; --c6: #e3b341; --c7: #b1bac4 } }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.5rem } p { max-width: 45rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: 1rem 0; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--rule); text-align: left; white-space: nowrap }
th { color: var(--soft) } .right { text-align: right }
figure { margin: 1.5rem 0 } figcaption { font-weight: 600 }
.plot { width: 100%; height: auto; font: 12px system-ui, sans-serif } .plot text { fill: var(--soft) }
.plot .label { fill: var(--ink) } .grid { stroke: var(--rule) } .axis { stroke: var(--soft) }
.mark line { stroke: var(--ink); stroke-dasharray: 3 3 } .plot .mark text { fill: var(--ink) }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round }
.dot { fill: var(--c); stroke: transparent; stroke-width: 12; pointer-events: all }
.dense { fill: transparent } .dot:hover { fill: var(--c); stroke: var(--c); stroke-width: 5 }
.c0 { --c: var(--c0) } .c1 { --c: var(--c1) } .c2 { --c: var(--c2) } .c3 { --c: var(--c3) }
.c4 { --c: var(--c4) } .c5 { --c: var(--c5) } .c6 { --c: var(--c6) } .c7 { --c: var(--c7) }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; list-style: none; padding: 0; font-size: .9rem }
@media print { body { max-width: none; margin: 0; font-size: 11pt } figure, tr { break-inside: avoid }
  h2 { break-after: avoid } .wide { overflow: visible } th, td { white-space: normal } }
""".strip()


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page: its heading, then paragraphs of plain text, tables, charts."""

    heading: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()


def html_page(title: str, sections: Sequence[Section]) -> str:
    """One HTML file that opens without a network and runs no script; same input, same bytes; every text is escaped.

    A policy in the page forbids it to load anything.
    """
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            element("title", escape(title)),
            f"<style>\n{_STYLE}\n</style>\n</head>\n<body>",
            element("h1", escape(title)),
            *(_section(section) for section in sections),
            "</body>\n</html>\n",
        )
    )


def _section(section: Section) -> str:
    parts = [element("h2", escape(section.heading))]
    parts += [element("p", escape(paragraph)) for paragraph in section.paragraphs]
    parts += [_table(table) for table in section.tables]
    parts += [chart_figure(chart) for chart in section.charts]
    return element("section", "\n".join(parts))


def _table(table: Table) -> str:
    head = element("thead", _row("th", table.head, table.right))
    body = element("tbody", "\n".join(_row("td", row, table.right) for row in table.rows))
    return element("div", element("table", f"{head}\n{body}"), class_="wide")


def _row(tag: str, cells: Sequence[str], right: Collection[int]) -> str:
    return element("tr", "".join(_cell(tag, cell, column in right) for column, cell in enumerate(cells)))


def _cell(tag: str, text: str, is_number: bool) -> str:
    return element(tag, escape(text), class_="right") if is_number else element(tag, escape(text))
