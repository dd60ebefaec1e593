"""A replay as a page: both pools, requests and reuse over time, and the tables of the report; it loads nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from twinpool.replay import disk_report, report
from twinpool.replay.disk_use import DiskUse
from twinpool.replay.host_use import HostUse
from twinpool.replay.outcome import Outcome, pressure
from twinpool.replay.record import PoolSample, RequestRecord
from twinpool.replay.result import Setup
from twinpool.reports.chart import Chart, Series
from twinpool.reports.html import Section, html_page
from twinpool.request import REUSE_GAPS
from twinpool.units import GB

MOST_POINTS = 400
REUSE_BINS = 60
_TIME = "virtual seconds"
_T = TypeVar("_T")


def replay_page(outcome: Outcome) -> str:
    """One HTML file that needs no network."""
    return html_page(report.title(outcome), (*_head(outcome), *_middle(outcome), *_trace(outcome)))


def _head(outcome: Outcome) -> tuple[Section, ...]:
    return (
        Section("Set-up", paragraphs=report.setup_lines(outcome)),
        Section("The tighter pool", paragraphs=pressure(outcome).sentences),
        _reuse(outcome),
    )


def _reuse(outcome: Outcome) -> Section:
    if not outcome.reuse_known:
        return Section("Reuse", paragraphs=(report.UNKNOWN_REUSE,))
    charts = (reuse_chart(outcome.result.records),)
    return Section(
        "Reuse", paragraphs=report.bound_notes(outcome), tables=(report.reuse_table(outcome),), charts=charts
    )


def _middle(outcome: Outcome) -> tuple[Section, ...]:
    samples, setup = thinned(outcome.result.samples, MOST_POINTS), outcome.result.setup
    times = Section("Times", paragraphs=(report.NO_TIMES,))
    if outcome.timed:
        said = (report.times_heading(outcome) + ".", report.throughput(outcome.result.times))
        times = Section("Times", paragraphs=said, tables=(report.times_table(outcome),))
    return (
        Section("Pools", tables=(report.pools_table(outcome),), charts=pool_charts(samples, setup.page_size)),
        Section("Requests", paragraphs=(report.concurrency(outcome),), charts=(requests_chart(samples),)),
        *_host(outcome),
        *_disk(outcome),
        times,
        Section("Counts", tables=(report.counts_table(outcome),), paragraphs=report.refused_lines(outcome)),
    )


def _host(outcome: Outcome) -> tuple[Section, ...]:
    host = outcome.result.host
    if host is None:
        return ()
    samples = thinned(outcome.result.samples, MOST_POINTS)
    chart = host_chart(samples, outcome.result.setup, host)
    return (
        Section(
            "Host tier", tables=(report.host_table(host),), paragraphs=(report.host_use_text(host),), charts=(chart,)
        ),
    )


def _disk(outcome: Outcome) -> tuple[Section, ...]:
    disk = outcome.result.disk
    if disk is None:
        return ()
    chart = disk_chart(thinned(outcome.result.samples, MOST_POINTS), disk)
    text = (disk_report.disk_use_text(disk),)
    return (Section("Disk tier", tables=(disk_report.disk_table(disk),), paragraphs=text, charts=(chart,)),)


def _trace(outcome: Outcome) -> tuple[Section, ...]:
    lines = report.trace_lines(outcome)
    return (Section("Trace", paragraphs=lines),) if lines else ()


def thinned(values: Sequence[_T], most: int) -> tuple[_T, ...]:
    """At most `most` (2 or more) of the values at even distances, with the first and the last."""
    if len(values) <= most:
        return tuple(values)
    return tuple(values[round(place * (len(values) - 1) / (most - 1))] for place in range(most))


def pool_charts(samples: Sequence[PoolSample], page_size: int) -> tuple[Chart, Chart]:
    """Slots, and KV in tokens, by owner over time."""
    slots: dict[str, Callable[[PoolSample], float]] = {
        "working": lambda one: one.slots_held, "protected": lambda one: one.slots_protected,
        "evictable": lambda one: one.slots_evictable, "free": lambda one: one.slots_free,
    }  # fmt: skip
    tokens: dict[str, Callable[[PoolSample], float]] = {
        "working": lambda one: one.pages_held * page_size, "protected": lambda one: one.pages_protected * page_size,
        "evictable": lambda one: one.pages_evictable * page_size, "free": lambda one: one.pages_free * page_size,
    }  # fmt: skip
    return (
        Chart("State pool", _TIME, "slots", series=_over_time(samples, slots)),
        Chart("KV pool", _TIME, "tokens", series=_over_time(samples, tokens)),
    )


def host_chart(samples: Sequence[PoolSample], setup: Setup, host: HostUse) -> Chart:
    """The host's memory by what is in it over time, in GB."""
    page_gb = setup.page_size * setup.kv_bytes_per_token / GB
    state_gb = setup.slot_bytes / GB
    parts: dict[str, Callable[[PoolSample], float]] = {
        "KV": lambda one: one.host_pages * page_gb,
        "states": lambda one: one.host_states * state_gb,
        "free": lambda one: max(0.0, host.total_bytes / GB - one.host_pages * page_gb - one.host_states * state_gb),
    }
    return Chart("Host memory", _TIME, "GB", series=_over_time(samples, parts))


def disk_chart(samples: Sequence[PoolSample], disk: DiskUse) -> Chart:
    """Files on the disk over time, and room for more, in GB."""
    parts: dict[str, Callable[[PoolSample], float]] = {
        "files": lambda one: one.disk_bytes / GB,
        "free": lambda one: (disk.limit_bytes - one.disk_bytes) / GB,
    }
    return Chart("Disk", _TIME, "GB", series=_over_time(samples, parts))


def requests_chart(samples: Sequence[PoolSample]) -> Chart:
    """Running and waiting requests over time."""
    counts: dict[str, Callable[[PoolSample], float]] = {
        "running": lambda one: one.running,
        "waiting": lambda one: one.waiting,
    }
    return Chart("Running and waiting requests", _TIME, "requests", series=_over_time(samples, counts))


def _over_time(samples: Sequence[PoolSample], values: dict[str, Callable[[PoolSample], float]]) -> tuple[Series, ...]:
    xs = tuple(one.now_s for one in samples)
    return tuple(Series(name, xs, tuple(value(one) for one in samples), step=True) for name, value in values.items())


def reuse_chart(records: Sequence[RequestRecord]) -> Chart:
    """Prompt tokens by what became of them, as shares of the prompts that were first scheduled in each part of the run."""
    served = [one for one in records if one.is_served]
    scheduled = [one.scheduled_s for one in served if one.scheduled_s is not None]
    start_s, end_s = min(scheduled, default=0.0), max(scheduled, default=0.0)
    width_s = (end_s - start_s) / REUSE_BINS or 1.0
    names = ("reused", *REUSE_GAPS)
    tokens = {name: [0] * REUSE_BINS for name in names}
    prompts = [0] * REUSE_BINS
    for one, when_s in zip(served, scheduled, strict=True):
        place = min(REUSE_BINS - 1, math.floor((when_s - start_s) / width_s))
        prompts[place] += one.input_tokens
        for name, count in (("reused", one.reused), *one.gaps):
            tokens[name][place] += count
    xs = tuple(start_s + (place + 0.5) * width_s for place in range(REUSE_BINS))
    series = tuple(
        Series(name, xs, tuple(100 * part / whole if whole else None for part, whole in zip(tokens[name], prompts, strict=True)))
        for name in names
    )  # fmt: skip
    return Chart("Prompt tokens over time, by reason", _TIME, "% of prompt tokens", series=series)
