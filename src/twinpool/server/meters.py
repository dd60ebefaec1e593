"""The numbers behind /metrics: the engine thread and the event loop write them, the exporter reads them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass

from twinpool.metrics import CATALOGUE, Metric

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram's content: values in each bucket (the last one is +Inf; not cumulative), and their sum."""

    counts: tuple[int, ...]
    total: float


class Meters:
    """Values by (metric name, label values). Every method raises KeyError on a name that the catalogue lacks."""

    def __init__(self, catalogue: tuple[Metric, ...] = CATALOGUE) -> None:
        self._by_name = {metric.name: metric for metric in catalogue}
        self._lock = threading.Lock()
        self._values: dict[tuple[str, Labels], float] = {}
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        for metric in catalogue:
            if metric.kind == "histogram":
                self._counts[metric.name] = [0] * (len(metric.buckets) + 1)
                self._sums[metric.name] = 0.0
            elif not metric.labels:
                self._values[metric.name, ()] = 0.0

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge, or a counter whose running total is kept elsewhere."""
        metric = self._by_name[name]
        assert metric.kind != "histogram", name
        assert len(labels) == len(metric.labels), name
        with self._lock:
            self._values[name, labels] = value

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Raise a counter by `amount` >= 0."""
        metric = self._by_name[name]
        assert metric.kind == "counter", name
        assert amount >= 0, f"{name} cannot fall by {-amount}"
        assert len(labels) == len(metric.labels), name
        with self._lock:
            self._values[name, labels] = self._values.get((name, labels), 0.0) + amount

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Put `value` into a histogram, `times` times."""
        bucket = bisect_left(self._by_name[name].buckets, value)
        with self._lock:
            self._counts[name][bucket] += times
            self._sums[name] += value * times

    def values(self, name: str) -> dict[Labels, float]:
        """A gauge's or counter's values by its own label values."""
        with self._lock:
            return {labels: value for (key, labels), value in self._values.items() if key == name}

    def distribution(self, name: str) -> Distribution:
        """A histogram's content."""
        with self._lock:
            return Distribution(tuple(self._counts[name]), self._sums[name])
