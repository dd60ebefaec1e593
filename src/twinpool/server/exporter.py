"""The metric catalogue as a Prometheus registry: one registry a server, filled when it is scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from twinpool.metrics import CATALOGUE, USUAL_LABELS, Metric
from twinpool.server.meters import Meters


def make_registry(*, meters: Meters, model_name: str, refresh: Callable[[], None]) -> CollectorRegistry:
    """A registry whose scrape calls `refresh` (sets the gauges), then reports all of the catalogue with the usual
    labels (reference 7.3).
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Exporter(meters=meters, usual=(model_name, "unified", "0", "0", "0"), refresh=refresh))
    return registry


class _Exporter(Collector):
    def __init__(self, *, meters: Meters, usual: tuple[str, ...], refresh: Callable[[], None]) -> None:
        assert len(usual) == len(USUAL_LABELS)
        self._meters = meters
        self._usual = usual
        self._refresh = refresh

    def collect(self) -> Iterator[Family]:
        self._refresh()
        for metric in CATALOGUE:
            yield self._histogram(metric) if metric.kind == "histogram" else self._value(metric)

    def _value(self, metric: Metric) -> Family:
        names = (*USUAL_LABELS, *metric.labels)
        family: GaugeMetricFamily | CounterMetricFamily
        if metric.kind == "gauge":
            family = GaugeMetricFamily(metric.name, metric.help, labels=names)
        else:
            family = CounterMetricFamily(metric.name, metric.help, labels=names)
        for labels, value in sorted(self._meters.values(metric.name).items()):
            family.add_metric((*self._usual, *labels), value)
        return family

    def _histogram(self, metric: Metric) -> Family:
        content = self._meters.distribution(metric.name)
        family = HistogramMetricFamily(metric.name, metric.help, labels=USUAL_LABELS)
        buckets: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*metric.buckets, float("inf")), content.counts, strict=True):
            seen += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), seen))
        family.add_metric(self._usual, buckets, content.total)
        return family
