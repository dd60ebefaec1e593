"""A chart as one inline SVG element with its legend: the value of each point on hover, colours from the page's style."""

from __future__ import annotations

from html import escape

from twinpool.reports.axis import Axis, full_number, x_axis, y_axis
from twinpool.reports.chart import Chart, Mark, Point, Series

# Sizes in units of the view box; the page scales it to its width.
_WIDTH, _HEIGHT = 760, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 30, 48
_X_INTERVALS, _Y_INTERVALS = 8, 5
_MARK_LINE_HEIGHT = 14
_COLOURS = 8
_MOST_DOTS = 100  # on one line
# Solid, dashed, dotted, ...: lines are told apart on paper and without colour vision too.
_DASHES = ("", "7 4", "2 3", "10 3 2 3")


def element(tag: str, content: str = "", **attributes: str | float) -> str:
    """An element with escaped attributes around content that is markup already; `class_` stands for class, _ for -."""
    pairs = "".join(f' {_attribute_name(name)}="{_attribute(value)}"' for name, value in attributes.items())
    return f"<{tag}{pairs}>{content}</{tag}>"


def _attribute_name(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


def _attribute(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def chart_figure(chart: Chart) -> str:
    """A figure element: title, plot, legend. Same chart, same bytes; every text is escaped.

    The classes it uses are styled by html.py: plot, grid, axis, mark, line, dot, dense, legend and c0 to c7 for the colours.
    """
    across, down = x_axis(chart, intervals=_X_INTERVALS), y_axis(chart, intervals=_Y_INTERVALS)
    inside = _grid(across, down)
    inside += [_mark(mark, across, row) for row, mark in enumerate(chart.marks)]
    for index, one in enumerate(chart.series):
        inside += [_line(line, across, down, look=_look(index)) for line in one.lines]
    for index, one in enumerate(chart.series):
        inside += _dots(one, chart, (across, down), colour=index % _COLOURS)
    inside += [
        element("text", escape(chart.y_label), x=8, y=14, class_="label"),
        element("text", escape(chart.x_label), x=_WIDTH - _RIGHT, y=_HEIGHT - 8, text_anchor="end", class_="label"),
    ]
    plot = element(
        "svg",
        "\n".join(inside),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=chart.title,
        class_="plot",
    )
    return element("figure", f"{element('figcaption', escape(chart.title))}\n{plot}\n{_legend(chart)}")


def _look(index: int) -> dict[str, str]:
    """Class and dashes of the line of a series."""
    return {
        "class_": f"line c{index % _COLOURS}",
        "stroke_dasharray": _DASHES[index % len(_DASHES)] or "none",
    }


def _x(value: float, across: Axis) -> float:
    return _LEFT + across.share(value) * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, down: Axis) -> float:
    return _HEIGHT - _BOTTOM - down.share(value) * (_HEIGHT - _TOP - _BOTTOM)


def _grid(across: Axis, down: Axis) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick, label in zip(down.ticks, down.labels, strict=True):
        y = _y(tick, down)
        parts.append(element("line", x1=_LEFT, x2=right, y1=y, y2=y, class_="axis" if tick == 0 else "grid"))
        parts.append(element("text", label, x=_LEFT - 8, y=y + 4, text_anchor="end"))
    for tick, label in zip(across.ticks, across.labels, strict=True):
        x = _x(tick, across)
        parts.append(element("line", x1=x, x2=x, y1=bottom, y2=bottom + 5, class_="axis"))
        parts.append(element("text", label, x=x, y=bottom + 19, text_anchor="middle"))
    return parts


def _mark(mark: Mark, across: Axis, row: int) -> str:
    """A dashed line with its label at the top; labels of several marks stand one below the other."""
    x = _x(mark.x, across)
    is_left = across.share(mark.x) < 0.6
    label = element(
        "text",
        escape(mark.label),
        x=x + (5 if is_left else -5),
        y=_TOP + 10 + row * _MARK_LINE_HEIGHT,
        text_anchor="start" if is_left else "end",
    )
    line = element("line", x1=x, x2=x, y1=_TOP, y2=_HEIGHT - _BOTTOM)
    title = element("title", escape(f"{mark.label}: {full_number(mark.x)}"))
    return element("g", title + line + label, class_="mark")


def _line(points: tuple[Point, ...], across: Axis, down: Axis, *, look: dict[str, str]) -> str:
    places = " ".join(f"{_attribute(_x(x, across))},{_attribute(_y(y, down))}" for x, y in points)
    return element("polyline", points=places, **look)


def _dots(series: Series, chart: Chart, axes: tuple[Axis, Axis], *, colour: int) -> list[str]:
    """A dot for each point, with what it says when the pointer is over it; seen only then where they would hide the line."""
    unit = f" {series.unit}" if series.unit else ""
    look = f"dot c{colour}" if len(series.points) <= _MOST_DOTS else f"dot dense c{colour}"
    dots = []
    for x, y in series.points:
        says = f"{series.name}: {full_number(y)}{unit}\n{chart.x_label}: {full_number(x)}"
        dots.append(
            element(
                "circle",
                element("title", escape(says)),
                cx=_x(x, axes[0]),
                cy=_y(y, axes[1]),
                r=2.5,
                class_=look,
            )
        )
    return dots


def _legend(chart: Chart) -> str:
    rows = []
    for index, one in enumerate(chart.series):
        line = element("line", x1=0, x2=28, y1=5, y2=5, **_look(index))
        sample = element("svg", line, viewBox="0 0 28 10", width=28, height=10, aria_hidden="true")
        rows.append(element("li", f"{sample} {escape(one.label)}"))
    return element("ul", "".join(rows), class_="legend")
