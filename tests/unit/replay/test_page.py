"""The page of a replay: charts with the right numbers, few points, nothing loaded."""

from __future__ import annotations

import pytest

from tests.unit.replay.outcomes import RECORDS, SAMPLES, outcome
from twinpool.replay.page import MOST_POINTS, REUSE_BINS, pool_charts, replay_page, requests_chart, reuse_chart, thinned


def test_long_series_are_thinned_with_both_ends() -> None:
    found = thinned(range(2000), MOST_POINTS)
    assert (len(found), found[0], found[-1]) == (MOST_POINTS, 0, 1999)
    assert sorted(set(found)) == list(found)
    assert thinned((1, 2, 3), MOST_POINTS) == (1, 2, 3)


def test_pools_over_time() -> None:
    slots, tokens = pool_charts(SAMPLES, 64)
    assert [one.name for one in slots.series] == ["working", "protected", "evictable", "free"]
    assert [one.ys for one in slots.series] == [(3, 5, 0), (0, 2, 0), (0, 2, 4), (7, 1, 6)]
    assert [one.ys for one in tokens.series] == [(192, 256, 0), (0, 128, 0), (0, 192, 384), (512, 128, 320)]
    assert [one.ys for one in requests_chart(SAMPLES).series] == [(1, 2, 0), (0, 1, 0)]


def test_reuse_over_time_adds_up() -> None:
    """Prompts are scheduled at 0, 4 and 5 s of a span of 5 s; the refused one counts nowhere."""
    series = {one.name: one.ys for one in reuse_chart(RECORDS).series}
    filled = [place for place, value in enumerate(series["new"]) if value is not None]
    assert filled == [0, REUSE_BINS * 4 // 5, REUSE_BINS - 1]
    assert series["new"][0] == 100
    assert (series["kv_evicted"][48], series["new"][48]) == (64, 36)
    assert series["reused"][-1] == pytest.approx(51.2)
    for place in filled:
        assert sum(ys[place] or 0 for ys in series.values()) == pytest.approx(100)


def test_no_requests_give_an_empty_chart() -> None:
    assert reuse_chart(()).ys == ()


def test_page_has_every_part_and_loads_nothing() -> None:
    page = replay_page(outcome(rejected=1))
    for heading in ("Set-up", "The tighter pool", "Reuse", "Pools", "Requests", "Times", "Counts", "Trace"):
        assert f"<h2>{heading}</h2>" in page
    assert page.count("<figure") == 4
    assert "Times are modelled (calibration: assumed)." in page
    assert "t.jsonl:1: it is wrong" in page
    assert "<script" not in page
    assert "default-src &#x27;none&#x27;" in page or "default-src 'none'" in page


def test_unknown_reuse_and_no_times_on_the_page() -> None:
    page = replay_page(outcome(lengths_only=True, arrival="count"))
    assert "Reuse: unknown." in page
    assert "Times: none." in page
    assert page.count("<figure") == 3
