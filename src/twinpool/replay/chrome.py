"""A replay as a Chrome trace (also Perfetto's): a span for each phase of a request, and both pools as counters."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from typing import Any

from twinpool.replay.record import PoolSample, RequestRecord
from twinpool.replay.result import ReplayResult
from twinpool.units import GB

Event = dict[str, Any]
REQUESTS, POOLS = 1, 2  # process ids: one group of tracks each


def chrome_trace(result: ReplayResult) -> str:
    """JSON in the trace event format (the public "Trace Event Format" document), an event a line; virtual microseconds."""
    setup = result.setup
    events = [*_names(), *_requests(result.records), *_counters(result.samples, setup.page_size)]
    if result.host is not None:
        events += _host_counters(result.samples, setup.page_size)
    if result.disk is not None:
        events += _disk_counters(result.samples)
    lines = ",\n".join(json.dumps(event, ensure_ascii=False, allow_nan=False) for event in events)
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def _names() -> Iterator[Event]:
    for process, name in ((REQUESTS, "requests"), (POOLS, "pools")):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}


def _requests(records: Iterable[RequestRecord]) -> Iterator[Event]:
    """Requests in order of arrival, each on the lowest track that is free from its arrival to its end."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    tracks = 0
    for record in sorted(records, key=lambda one: one.arrival_s):
        while busy and busy[0][0] <= record.arrival_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            tracks += 1
            heapq.heappush(free, tracks)
        track = heapq.heappop(free)
        heapq.heappush(busy, (record.arrival_s if record.finished_s is None else record.finished_s, track))
        yield from _spans(record, track)


def _spans(record: RequestRecord, track: int) -> Iterator[Event]:
    """The phases that a request went through: queue, prefill, decode; a refusal is an instant."""
    about = {
        "session": record.session, "request": record.index, "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens, "reused": record.reused, "from_host": record.from_host,
        "from_storage": record.from_storage, "kv_matched": record.kv_matched,
        "retractions": record.retractions, "warm_up": record.warm_up, **dict(record.gaps),
    }  # fmt: skip
    if record.refusal:
        at = {"ph": "i", "s": "t", "name": "refused", "pid": REQUESTS, "tid": track, "ts": _us(record.arrival_s)}
        yield at | {"args": about | {"why": record.refusal}}
    moments = (record.arrival_s, record.scheduled_s, record.first_token_s, record.finished_s)
    for name, start_s, end_s in zip(("queue", "prefill", "decode"), moments, moments[1:], strict=False):
        if start_s is None or end_s is None:
            return
        start, end = _us(start_s), _us(end_s)
        yield {
            "ph": "X", "name": name, "cat": "request", "pid": REQUESTS, "tid": track, "ts": start, "dur": end - start, "args": about,
        }  # fmt: skip


def _counters(samples: Iterable[PoolSample], page_size: int) -> Iterator[Event]:
    """Slots, KV tokens and requests at every sample."""
    for one in samples:
        values = {
            "state slots": {
                "working": one.slots_held, "protected": one.slots_protected, "evictable": one.slots_evictable, "free": one.slots_free,
            },
            "KV tokens": {
                "working": one.pages_held * page_size, "protected": one.pages_protected * page_size,
                "evictable": one.pages_evictable * page_size, "free": one.pages_free * page_size,
            },
            "requests": {"running": one.running, "waiting": one.waiting},
        }  # fmt: skip
        for name, parts in values.items():
            yield {"ph": "C", "name": name, "pid": POOLS, "tid": 0, "ts": _us(one.now_s), "args": parts}


def _host_counters(samples: Iterable[PoolSample], page_size: int) -> Iterator[Event]:
    """KV tokens and states on the host at every sample."""
    for one in samples:
        for name, value in (("host KV tokens", one.host_pages * page_size), ("host states", one.host_states)):
            yield {"ph": "C", "name": name, "pid": POOLS, "tid": 0, "ts": _us(one.now_s), "args": {"used": value}}


def _disk_counters(samples: Iterable[PoolSample]) -> Iterator[Event]:
    """GB of files on the disk at every sample."""
    for one in samples:
        yield {
            "ph": "C",
            "name": "disk GB",
            "pid": POOLS,
            "tid": 0,
            "ts": _us(one.now_s),
            "args": {"used": one.disk_bytes / GB},
        }


def _us(seconds: float) -> int:
    return round(seconds * 1_000_000)
