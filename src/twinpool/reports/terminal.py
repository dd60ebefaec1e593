"""Charts for a terminal: lines of braille dots, a letter for each series, a legend below; no colour."""

from __future__ import annotations

import math

from twinpool.reports.axis import Axis, short_number, x_axis, y_axis
from twinpool.reports.chart import Chart, Point

# Why no library draws this (looked at in November 2026). plotext 6.1: a rewrite of August 2026 around one global figure
# and a compiled kernel, no annotations, 0.2 s to import, its legend covers the plot, and series need colour to be told
# apart. uniplot 0.23: typed and small, but braille series look alike without colour, marks have no labels, numbers no
# short form. Either would leave us the ticks and legend, which svg.py shares, and save the thirty lines of dots below.

_SERIES_LETTERS = "ox+*#@%&"
_MARK_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LEAST_COLUMNS = 16
_COLUMNS_PER_LETTER = 6  # between two letters on a line, so that the dots show
_COLUMNS_PER_NUMBER = 10
_ROWS_PER_NUMBER = 4
# A braille character is 2 dots wide and 4 high; the bit of each dot by row, left then right (Unicode block U+2800).
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def chart_text(chart: Chart, *, width: int = 72, height: int = 18) -> str:
    """A chart as text of about `width` columns; the plot has `height` rows, below the title and above axis and legend.

    Each series is a line of dots with its letter on it (at points, not at all of them where they are dense), each mark
    a dashed column under a capital letter; the legend gives a series' least and greatest y and a mark's x. The plot is
    at least 16 columns wide. Raises ValueError for a height under 2.
    """
    if height < 2:
        raise ValueError(f"a chart of {height} rows was asked for: the least is 2")
    down = y_axis(chart, intervals=max(1, height // _ROWS_PER_NUMBER))
    margin = max(len(label) for label in down.labels)
    columns = max(_LEAST_COLUMNS, width - margin - 2)
    across = x_axis(chart, intervals=max(1, columns // _COLUMNS_PER_NUMBER))
    plot = _Plot(across, down, columns=columns, rows=height)
    for index, mark in enumerate(chart.marks):
        plot.mark(mark.x, _letter(_MARK_LETTERS, index))
    for one in chart.series:
        for line in one.lines:
            plot.line(line)
    for index, one in enumerate(chart.series):
        plot.letters(one.points, _letter(_SERIES_LETTERS, index))
    indent = " " * (margin + 2)
    lines = [chart.title, chart.y_label, *_with_y_numbers(plot, down, margin)]
    lines += [" " * (margin + 1) + line for line in _x_numbers(across, columns)]
    lines += [indent + chart.x_label.rjust(columns), *_legend(chart)]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _letter(letters: str, index: int) -> str:
    return letters[index % len(letters)]


class _Plot:
    """A grid of characters: dots, and letters that cover them."""

    def __init__(self, across: Axis, down: Axis, *, columns: int, rows: int) -> None:
        self._across, self._down = across, down
        self._columns, self._rows = columns, rows
        self._dots = [[0] * columns for _ in range(rows)]
        self._over: dict[tuple[int, int], str] = {}
        self._under: set[int] = set()
        self._heads = [" "] * columns

    def _place(self, point: Point) -> tuple[int, int]:
        """Column and row of a point's dot, counted from the top left."""
        x, y = point
        wide, high = 2 * self._columns - 1, 4 * self._rows - 1
        return round(self._across.share(x) * wide), round((1 - self._down.share(y)) * high)

    def mark(self, x: float, letter: str) -> None:
        """Dash the column of x, under the letter."""
        column = self._place((x, self._down.low))[0] // 2
        self._under.add(column)
        self._heads[column] = letter

    def line(self, points: tuple[Point, ...]) -> None:
        """Join points by dots."""
        places = [self._place(point) for point in points]
        for (x, y), (to_x, to_y) in zip(places, places[1:] or places, strict=False):
            count = max(abs(to_x - x), abs(to_y - y), 1)
            for step in range(count + 1):
                self._dot(x + round((to_x - x) * step / count), y + round((to_y - y) * step / count))

    def _dot(self, x: int, y: int) -> None:
        self._dots[y // 4][x // 2] |= _DOTS[y % 4][x % 2]

    def letters(self, points: tuple[Point, ...], letter: str) -> None:
        """Write the letter on points, on a part of them where they are dense."""
        room = max(1, self._columns // _COLUMNS_PER_LETTER)
        for point in points[:: max(1, math.ceil(len(points) / room))]:
            x, y = self._place(point)
            self._over[y // 4, x // 2] = letter

    @property
    def heads(self) -> str:
        """The letters of the marks, above the plot."""
        return "".join(self._heads)

    def row(self, row: int) -> str:
        """One row: letters over dots over marks."""
        return "".join(self._character(row, column) for column in range(self._columns))

    def _character(self, row: int, column: int) -> str:
        if (row, column) in self._over:
            return self._over[row, column]
        if self._dots[row][column]:
            return chr(0x2800 + self._dots[row][column])
        return "┊" if column in self._under else " "

    def row_of(self, y: float) -> int:
        """The row of a y."""
        return self._place((self._across.low, y))[1] // 4

    @property
    def rows(self) -> range:
        """The rows from the top."""
        return range(self._rows)


def _with_y_numbers(plot: _Plot, down: Axis, margin: int) -> list[str]:
    numbers = {plot.row_of(tick): label for tick, label in zip(down.ticks, down.labels, strict=True)}
    lines = [" " * (margin + 2) + plot.heads]
    for row in plot.rows:
        edge = "┤" if row in numbers else "│"
        lines.append(f"{numbers.get(row, ''):>{margin}} {edge}{plot.row(row)}")
    return lines


def _x_numbers(across: Axis, columns: int) -> tuple[str, str]:
    """The axis with a notch at each number, and the numbers below their notches; one without room is left out."""
    axis, numbers = "└" + "─" * columns, ""
    for tick, label in zip(across.ticks, across.labels, strict=True):
        column = 1 + round(across.share(tick) * (2 * columns - 1)) // 2
        begin = min(max(0, column - len(label) // 2), columns + 1 - len(label))
        if numbers and begin <= len(numbers):
            continue
        axis = axis[:column] + "┬" + axis[column + 1 :]
        numbers = numbers.ljust(begin) + label
    return axis, numbers


def _legend(chart: Chart) -> list[str]:
    lines = []
    for index, one in enumerate(chart.series):
        ys = [y for _, y in one.points]
        span = f"{short_number(min(ys))} to {short_number(max(ys))}" if ys else "no values"
        lines.append(f"{_letter(_SERIES_LETTERS, index)}  {one.label}: {span}")
    for index, mark in enumerate(chart.marks):
        lines.append(f"{_letter(_MARK_LETTERS, index)}  {mark.label}: {short_number(mark.x)}")
    return lines
