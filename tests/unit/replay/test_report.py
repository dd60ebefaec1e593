"""The report of a replay: what it shows, and what it must not claim."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.replay.outcomes import BOUNDS, outcome
from twinpool.replay.options import TrafficOptions
from twinpool.replay.report import (
    GAP_MEANINGS,
    arrival,
    counts_table,
    report_text,
    reuse_table,
    times_table,
    trace_lines,
)
from twinpool.request import REUSE_GAPS


def cells(head: str, rows: tuple[tuple[str, ...], ...] | list[tuple[str, ...]]) -> tuple[str, ...]:
    """The row that starts with this cell."""
    return next(tuple(row) for row in rows if row[0] == head)


def test_reuse_by_reason() -> None:
    rows = reuse_table(outcome()).rows
    assert cells("reused", rows)[1:3] == ("256", "25.6%")
    assert cells("state_evicted", rows)[1:3] == ("128", "12.8%")
    assert cells("kv_evicted", rows)[1:3] == ("64", "6.4%")
    assert cells("new", rows)[1:3] == ("552", "55.2%")
    assert cells("matched in KV", rows)[1:3] == ("384", "38.4%")
    assert [row[0] for row in rows] == ["reused", "state_evicted", "kv_evicted", "new", "all prompts", "matched in KV"]
    assert sum(int(row[1]) for row in rows[:4]) == 1000


def test_output_in_the_document_is_real() -> None:
    """Every line of a ```text block of docs/replay.md is a line of the golden report."""
    root = Path(__file__).resolve().parents[3]
    golden = (root / "tests" / "golden" / "replay_small.txt").read_text().splitlines()
    blocks = (root / "docs" / "replay.md").read_text().split("```text\n")[1:]
    lines = [line for block in blocks for line in block.split("```")[0].splitlines()]
    assert lines
    assert [line for line in lines if line not in golden] == []


def test_every_reason_has_a_meaning() -> None:
    assert set(REUSE_GAPS) <= set(GAP_MEANINGS)


def test_bounds_stand_below_the_reuse() -> None:
    bounded = replace(outcome(), bounds=BOUNDS)
    assert [row[:3] for row in reuse_table(bounded).rows[-2:]] == [
        ("at most, clairvoyant", "500", "50.0%"), ("at most, infinite", "600", "60.0%")
    ]  # fmt: skip
    assert "\n\nAt most.\n\n" in report_text(bounded)
    assert "of KV 64 (and at most 152 more, forgotten), after" in report_text(bounded)
    assert "clairvoyant" not in report_text(outcome())


def test_counts() -> None:
    rows = counts_table(outcome()).rows
    assert cells("requests", rows) == ("requests", "4", "1 of them refused")
    assert cells("of these, again", rows)[1:] == (
        "448", "after eviction of a state 128, of KV 64, after retraction 256"
    )  # fmt: skip
    assert cells("checkpoints held, mean", rows)[1:] == ("2.0", "1.43 for each session alive")
    assert cells("evicted states", rows)[1:] == ("3", "1 for want of pages, 2 over --mamba-max-states-per-path")
    assert cells("evicted KV tokens", rows)[1:] == ("192", "192 for want of pages")
    assert cells("checkpoints published", rows)[1:] == ("7", "1 skipped for want of a slot")


def test_times_are_modelled_and_in_their_units() -> None:
    rows = times_table(outcome()).rows
    assert cells("queue, s", rows) == ("queue, s", "3", "0.500", "0.000", "0.250", "1.000", "1.000", "1.000")
    assert cells("per output token, ms", rows) == ("per output token, ms", "0", "-", "-", "-", "-", "-", "-")
    text = report_text(outcome())
    assert "Times are modelled (calibration: assumed)\n" in text
    assert "100 input tokens/s (computed or reused), 3.0 output tokens/s and 0.30 requests/s over 10.0 s." in text


def test_a_run_that_only_counts_has_no_times() -> None:
    text = report_text(outcome(arrival="count"))
    assert "Times: none. With --arrival count no step takes time" in text
    assert "to the first token" not in text


def test_pools_and_concurrency() -> None:
    lines = report_text(outcome()).splitlines()
    assert "state slots       40.0%      10.0%      10.0%  40.0%" in lines
    assert "KV pages          25.0%      25.0%      25.0%  25.0%" in lines
    assert "Running at once: median 1, mean 1.5, peak 2; waiting: mean 0.5, peak 1." in lines


def test_refusals_and_rejects_are_counted_with_their_place() -> None:
    text = report_text(outcome(rejected=7))
    assert "Refused: 1; the first is session b, request 2: it is too long." in text
    assert "  left out: 7 records that cannot be used\n  left out: t.jsonl:1: it is wrong\n" in text
    assert text.endswith("  left out: t.jsonl:5: it is wrong\n  left out: 2 more; --json lists them all\n")
    assert trace_lines(outcome()) == ("note: Times are invented.",)


def test_unknown_reuse_is_not_zero() -> None:
    text = report_text(outcome(lengths_only=True))
    assert "Reuse: unknown. The trace has lengths only" in text
    assert "25.6%" not in text
    assert "reused  " not in text


@pytest.mark.parametrize(
    ("traffic", "words"),
    [
        (TrafficOptions(arrival="recorded"), "as recorded"),
        (TrafficOptions(arrival="recorded", speed=2.5, limit=7), "as recorded, 2.5 times as fast; the first 7 session trees"),
        (TrafficOptions(arrival="closed", sessions=8, idle_cap_s=10, seed=3, start_anywhere=True),
         "closed loop, 8 sessions alive, pauses of at most 10 s, seed 3; the first ones begin anywhere"),
        (TrafficOptions(arrival="count", shared_preamble=True),
         "in recorded order, and no step takes time; preambles of equal length shared"),
    ],
)  # fmt: skip
def test_arrival_in_words(traffic: TrafficOptions, words: str) -> None:
    assert arrival(traffic) == words


def test_warm_up_is_told_apart() -> None:
    found = outcome()
    warm = replace(found, result=replace(found.result, counts=replace(found.result.counts, warm_up=3)))
    text = report_text(warm)
    assert "4 requests of 2 sessions and 3 warm-up prompts that count in no share and no time" in text
    assert cells("prompt tokens computed", counts_table(warm).rows)[2] == "with warm-up"
