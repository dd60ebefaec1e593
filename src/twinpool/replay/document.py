"""--json of a replay: twinpool-replay/1, documented in docs/replay.md. Times in virtual seconds, lengths in tokens."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from twinpool.replay.options import TrafficOptions
from twinpool.replay.outcome import Outcome, held, pressure, recomputed
from twinpool.replay.record import PoolSample, RequestRecord
from twinpool.replay.result import SCHEMA, ReuseSummary
from twinpool.replay.trace import Trace
from twinpool.reports.jsonio import json_text


def replay_json(outcome: Outcome, *, records: bool = False) -> str:
    """One object; same run, same bytes. records: with one object a request."""
    return json_text(document(outcome, records=records)) + "\n"


def document(outcome: Outcome, *, records: bool = False) -> dict[str, Any]:
    """The object. A key is always there: null says that there is nothing to say."""
    result = outcome.result
    again = recomputed(outcome)
    return {
        "schema": SCHEMA,
        "setup": result.setup,
        "traffic": {one.name: getattr(outcome.traffic, one.name) for one in fields(TrafficOptions)},
        "trace": _trace(outcome.trace),
        "reuse": _reuse(result.reuse) if outcome.reuse_known else None,
        "bounds": outcome.bounds,
        "pressure": pressure(outcome),
        "counts": result.counts,
        "recomputed": {"tokens": again.tokens, **{one.name: getattr(again, one.name) for one in fields(again)}},
        "checkpoints": held(result),
        "times": result.times if outcome.timed else None,
        "occupancy": result.occupancy,
        "host": result.host,
        "disk": result.disk,
        "samples": {one.name: [getattr(sample, one.name) for sample in result.samples] for one in fields(PoolSample)},
        "records": [_record(record) for record in result.records] if records else None,
    }


def _trace(trace: Trace) -> dict[str, Any]:
    return {
        "name": trace.name,
        "format": trace.format,
        "block_size": trace.block_size,
        "sessions": len(trace.sessions),
        "requests": sum(len(session.requests) for session in trace.sessions),
        "rejected": len(trace.rejected),
        "rejections": trace.rejected,
        "notes": trace.notes,
    }


def _reuse(reuse: ReuseSummary) -> dict[str, Any]:
    return {one.name: getattr(reuse, one.name) for one in fields(reuse)} | {"gaps": dict(reuse.gaps)}


def _record(record: RequestRecord) -> dict[str, Any]:
    return {one.name: getattr(record, one.name) for one in fields(record)} | {"gaps": dict(record.gaps)}
