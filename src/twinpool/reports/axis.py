"""Axes of a chart: their range, where they are labelled, and numbers in short and in full."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.reports.chart import Chart

_SIZES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))


def short_number(value: float, *, digits: int = 3) -> str:
    """A number of at most `digits` significant digits with a decimal suffix: 1234 is 1.23K, 3400000 is 3.4M."""
    rounded = float(f"{value:.{digits}g}")
    for size, suffix in _SIZES:
        if abs(rounded) >= size:
            return f"{rounded / size:.12g}{suffix}"
    return f"{rounded:.12g}"


def full_number(value: float) -> str:
    """A number as one reads it off a chart: whole numbers in full with thousands separators, others to 6 digits."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e6 <= abs(value) < 1e15 else f"{value:,.6g}"


@dataclass(frozen=True, slots=True)
class Axis:
    """The range of an axis (low < high) and the values where it is labelled; log: equal ratios are equal lengths."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, from 0 at the low end to 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    @property
    def labels(self) -> tuple[str, ...]:
        """One short number for each tick, with as many digits as it takes to tell them apart."""
        for digits in range(3, 12):
            texts = tuple(short_number(tick, digits=digits) for tick in self.ticks)
            if len(set(texts)) == len(texts):
                break
        return texts


def x_axis(chart: Chart, *, intervals: int) -> Axis:
    """From the least to the greatest x of points and marks, labelled at round numbers about `intervals` apart.

    A chart with one x gets room on both sides; one without any runs from 0 to 1, or from 1 to 10 when logarithmic.
    """
    low, high = min(chart.xs, default=1 if chart.log_x else 0), max(chart.xs, default=10 if chart.log_x else 1)
    if low == high:
        low, high = (low / 2, high * 2) if chart.log_x else (low - (abs(low) / 2 or 1), high + (abs(high) / 2 or 1))
    ticks = _log_ticks(low, high, intervals) if chart.log_x else _linear_ticks(low, high, intervals)
    return Axis(low, high, ticks, log=chart.log_x)


def y_axis(chart: Chart, *, intervals: int) -> Axis:
    """From 0 to a round number above the greatest y (and from one below the least, if negative): lengths compare."""
    low, high = min((0, *chart.ys)), max((0, *chart.ys))
    if low == high:
        high = 1
    digit, power = _round_step((high - low) / intervals)
    step = _multiple(1, digit, power)
    first, last = math.floor(low / step + _SLACK), math.ceil(high / step - _SLACK)
    ticks = tuple(_multiple(count, digit, power) for count in range(first, last + 1))
    return Axis(min(low, ticks[0]), max(high, ticks[-1]), ticks)


# A quotient this close to a whole number is one: 0.3 / 0.1 is a little under 3.
_SLACK = 1e-9


def _linear_ticks(low: float, high: float, intervals: int) -> tuple[float, ...]:
    digit, power = _round_step((high - low) / intervals)
    step = _multiple(1, digit, power)
    counts = range(math.ceil(low / step - _SLACK), math.floor(high / step + _SLACK) + 1)
    return tuple(_multiple(count, digit, power) for count in counts)


def _log_ticks(low: float, high: float, intervals: int) -> tuple[float, ...]:
    """1, 2 and 5 times powers of ten if there is room, else powers of ten, else every so many; linear within a few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = _inside(low, high, [_multiple(1, digit, power) for power in powers for digit in (1, 2, 5)])
    if len(fine) < 3:
        return _linear_ticks(low, high, intervals)
    if len(fine) <= intervals + 1:
        return fine
    tens = _inside(low, high, [_multiple(1, 1, power) for power in powers])
    return tens[:: math.ceil(len(tens) / (intervals + 1))]


def _inside(low: float, high: float, values: Sequence[float]) -> tuple[float, ...]:
    return tuple(value for value in values if low <= value <= high)


def _round_step(least: float) -> tuple[int, int]:
    """The smallest (1, 2 or 5) x 10**power that is >= least, as digit and power."""
    power = math.floor(math.log10(least))
    for digit in (1, 2, 5):
        if _multiple(1, digit, power) >= least * (1 - _SLACK):
            return digit, power
    return 1, power + 1


def _multiple(count: int, digit: int, power: int) -> float:
    """count x digit x 10**power; divided by a whole number for small powers, so that 3 x 0.1 is 0.3."""
    return float(count * digit * 10**power) if power >= 0 else count * digit / 10**-power
