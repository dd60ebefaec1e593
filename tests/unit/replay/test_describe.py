"""The numbers of a trace: exact on small files, and against a slow count of prefixes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.replay.describe import Spread, TraceFacts, concurrency, describe, spread
from twinpool.replay.formats import load_trace
from twinpool.replay.formats.assemble import shared_views
from twinpool.replay.reuse import common_blocks, matches, prefix_keys
from twinpool.replay.trace import Blocks, Session, Trace, TraceRequest

DATA = Path(__file__).resolve().parents[2] / "data" / "traces"
BLOCK_SIZE = 4


def facts(name: str) -> TraceFacts:
    return describe(load_trace(str(DATA / name)))


def array(*ids: int) -> Blocks:
    return np.array(ids, dtype=np.int64)


def one_request_sessions(prompts: list[list[int]]) -> Trace:
    """A trace of single requests, a second apart, all with full blocks of four tokens."""
    sessions = [
        Session(str(at), (TraceRequest(str(at), 0, float(at), None, BLOCK_SIZE * len(ids), 1, array(*ids)),))
        for at, ids in enumerate(prompts)
    ]
    return Trace("t", "test", BLOCK_SIZE, "global", "trace", tuple(sessions))


def test_mooncake() -> None:
    found = facts("mooncake.jsonl")
    assert (found.requests, found.sessions, found.duration_s, found.peak_sessions) == (4, 4, 2.0, None)
    reuse = found.reuse
    assert reuse is not None
    # Block 1 of the last request follows another block, so it is not the one that was seen.
    assert (reuse.blocks, reuse.seen_blocks, reuse.block_share) == (10, 5, 0.5)
    assert (reuse.tokens, reuse.seen_tokens) == (3924, 1024 + 1100)
    assert (reuse.duplicates, reuse.context_drops, reuse.dropped_tokens) == (1, 0, None)
    assert found.growth_tokens is None


def test_agent() -> None:
    found = facts("agent.json")
    assert (found.requests, found.sessions, found.sub_sessions, found.duration_s) == (5, 2, 1, None)
    assert found.session_s == spread([10.0, 3.0])
    assert found.growth_tokens == spread([130, 64])
    assert found.think_s == spread([3.0, 1.0, 1.0])
    assert found.preamble_tokens == spread([128, 64])
    reuse = found.reuse
    assert reuse is not None
    assert (reuse.blocks, reuse.seen_blocks) == (2 + 4 + 1 + 2 + 3, 2 + 1 + 2)
    assert (reuse.context_drops, reuse.dropped_tokens) == (1, spread([128]))
    assert reuse.shared_prefix_tokens is None


def test_azure_knows_no_reuse() -> None:
    found = facts("azure.csv")
    assert found.reuse is None
    assert found.input_tokens.p50 == 3180
    assert found.total_output_tokens == 45


def test_request_log_sessions() -> None:
    found = facts("requests.jsonl")
    assert found.turns == spread([3, 1, 1])
    assert (found.peak_sessions, found.median_sessions) == (2, 1)
    reuse = found.reuse
    assert reuse is not None
    assert reuse.shared_prefix_tokens == spread([0, 32, 0])
    assert reuse.context_drops == 1


def test_spread_takes_values_that_occur() -> None:
    assert spread([]) is None
    assert spread(range(1, 101)) == Spread(count=100, mean=50.5, p10=10, p50=50, p90=90, p99=99, max=100)


@pytest.mark.parametrize(
    ("spans", "most", "median"),
    [
        ([(0.0, 10.0)], 1, 1),
        ([(0.0, 10.0), (10.0, 12.0)], 2, 1),
        ([(0.0, 10.0), (1.0, 10.0), (2.0, 3.0)], 3, 2),
        ([(5.0, 5.0), (5.0, 5.0)], 2, 2),
    ],
)
def test_concurrency(spans: list[tuple[float, float]], most: int, median: int) -> None:
    assert concurrency(spans) == (most, median)


PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=12)


@given(PROMPTS)
def test_reuse_is_the_longest_prefix_sent_before(prompts: list[list[int]]) -> None:
    for at, match in enumerate(matches(one_request_sessions(prompts))):
        now = prompts[at]
        slow = max((common_blocks(array(*now), array(*before)) for before in prompts[:at]), default=0)
        assert match.seen_blocks == slow
        assert match.seen_tokens == BLOCK_SIZE * slow
        assert match.duplicate == (bool(now) and now in prompts[:at])


@given(PROMPTS)
def test_equal_keys_mean_equal_prefixes(prompts: list[list[int]]) -> None:
    keys = {
        (tuple(ids[: place + 1]), int(key)) for ids in prompts for place, key in enumerate(prefix_keys(array(*ids)))
    }
    assert len({prefix for prefix, _ in keys}) == len({key for _, key in keys}) == len(keys)


@given(PROMPTS)
def test_shared_views_change_nothing(prompts: list[list[int]]) -> None:
    assert [view.tolist() for view in shared_views([array(*ids) for ids in prompts])] == prompts
