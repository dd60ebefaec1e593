"""What a chart shows, as values: series of points, marks on the x axis, labels; drawn by terminal.py and svg.py."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One line: ys over xs in this order, in `unit` (empty for a plain number). None in ys is a gap: no value here.

    step: a value holds until the next x, as a setting or a count does. Raises ValueError when xs and ys differ in
    length or a number is infinite or NaN.
    """

    name: str
    xs: tuple[float, ...]
    ys: tuple[float | None, ...]
    _: KW_ONLY
    unit: str = ""
    step: bool = False

    def __post_init__(self) -> None:
        if len(self.xs) != len(self.ys):
            raise ValueError(f"series '{self.name}' has {len(self.xs)} xs and {len(self.ys)} ys: they go in pairs")
        if not all(math.isfinite(value) for value in (*self.xs, *self.ys) if value is not None):
            raise ValueError(f"series '{self.name}' has a number that is not finite: a missing y is None")

    @property
    def label(self) -> str:
        """The name with its unit, for a legend."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    @property
    def points(self) -> tuple[Point, ...]:
        """The (x, y) pairs that have a y."""
        return tuple((x, y) for x, y in zip(self.xs, self.ys, strict=True) if y is not None)

    @property
    def lines(self) -> tuple[tuple[Point, ...], ...]:
        """The line to draw, cut at gaps; with `step` a value holds up to the x of the next, or of the gap."""
        runs: list[list[Point]] = [[]]
        for x, y in zip(self.xs, self.ys, strict=True):
            if self.step and runs[-1]:
                runs[-1].append((x, runs[-1][-1][1]))
            if y is None:
                runs.append([])
            else:
                runs[-1].append((x, y))
        return tuple(tuple(run) for run in runs if run)


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at x with a word about it."""

    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Series over one x axis and one y axis, in the order of the legend.

    log_x: the x axis is logarithmic. Raises ValueError for an x of 0 or less on a logarithmic axis, or a mark that is
    not finite.
    """

    title: str
    x_label: str
    y_label: str
    _: KW_ONLY
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    log_x: bool = False

    def __post_init__(self) -> None:
        if not all(math.isfinite(mark.x) for mark in self.marks):
            raise ValueError(f"chart '{self.title}' has a mark that is not finite")
        if self.log_x and min(self.xs, default=1) <= 0:
            raise ValueError(f"chart '{self.title}' has x = {min(self.xs)}: a logarithmic axis needs more than 0")

    @property
    def xs(self) -> tuple[float, ...]:
        """Every x of points and marks."""
        return tuple(x for one in self.series for x in one.xs) + tuple(mark.x for mark in self.marks)

    @property
    def ys(self) -> tuple[float, ...]:
        """Every y of points."""
        return tuple(y for one in self.series for _, y in one.points)
