"""The Chrome trace: spans of requests on tracks of their own, and counters of both pools, in virtual microseconds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.replay.outcomes import RECORDS, outcome
from twinpool.replay.chrome import chrome_trace
from twinpool.replay.record import RequestRecord


def events(records: tuple[RequestRecord, ...] = RECORDS) -> list[dict[str, Any]]:
    """The events of the hand-made run with these records."""
    found = json.loads(chrome_trace(replace(outcome().result, records=records)))
    assert found["displayTimeUnit"] == "ms"
    listed: list[dict[str, Any]] = found["traceEvents"]
    return listed


def test_spans() -> None:
    spans = [
        (one["name"], one["tid"], one["ts"], one["dur"], one["args"]["session"]) for one in events() if one["ph"] == "X"
    ]
    assert spans == [
        ("queue", 1, 0, 0, "a"), ("prefill", 1, 0, 1_000_000, "a"), ("decode", 1, 1_000_000, 1_000_000, "a"),
        ("queue", 1, 4_000_000, 1_000_000, "a"), ("prefill", 1, 5_000_000, 1_000_000, "a"), ("decode", 1, 6_000_000, 2_000_000, "a"),
        ("queue", 2, 4_000_000, 0, "b"), ("prefill", 2, 4_000_000, 500_000, "b"), ("decode", 2, 4_500_000, 5_500_000, "b"),
    ]  # fmt: skip


def test_refusals_and_counters() -> None:
    found = events()
    (refused,) = [one for one in found if one["ph"] == "i"]
    assert (refused["ts"], refused["args"]["why"]) == (10_000_000, "it is too long.")
    counters = [one for one in found if one["ph"] == "C"]
    assert len(counters) == 9
    assert counters[3]["args"] == {"working": 5, "protected": 2, "evictable": 2, "free": 1}
    assert counters[4]["args"] == {"working": 256, "protected": 128, "evictable": 192, "free": 128}
    assert counters[5]["args"] == {"running": 2, "waiting": 1}
    assert [one["args"]["name"] for one in found if one["ph"] == "M"] == ["requests", "pools"]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=20))
def test_no_two_requests_share_a_track_at_once(spans: list[tuple[int, int]]) -> None:
    records = tuple(
        RequestRecord(
            session=str(place), index=0, warm_up=False, input_tokens=1, output_tokens=1, arrival_s=start, scheduled_s=start,
            first_token_s=start, finished_s=start + length,
        )
        for place, (start, length) in enumerate(spans)
    )  # fmt: skip
    ends: dict[int, int] = {}
    for one in [one for one in events(records) if one["ph"] == "X"]:
        assert one["ts"] >= ends.get(one["tid"], 0)
        ends[one["tid"]] = one["ts"] + one["dur"]
