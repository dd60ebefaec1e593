"""Synthetic traces: same seed, same trace; lengths, sharing and forks as ordered; and back from a request log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from twinpool.errors import ConfigError
from twinpool.replay.describe import describe
from twinpool.replay.formats import load_trace
from twinpool.replay.formats.request_log import write
from twinpool.replay.synthetic import SyntheticOptions, synthesize
from twinpool.replay.trace import Trace

PLAIN = SyntheticOptions(
    sessions=2, turns=3, system_tokens=40, input_tokens=20, output_tokens=10, think_s=3.0, interval_s=0.0,
    tokens_per_s=5.0, variation=0.0,
)  # fmt: skip


def rows(trace: Trace) -> list[tuple[object, ...]]:
    return [
        (r.session, r.index, r.arrival_s, r.think_s, r.api_time_s, r.input_tokens, r.output_tokens, r.blocks.tolist())
        for r in trace.requests()
    ]


def test_exact_numbers_without_variation() -> None:
    first, second = synthesize(PLAIN).sessions
    assert [request.input_tokens for request in first.requests] == [60, 90, 120]
    assert [request.arrival_s for request in first.requests] == [0.0, 5.0, 10.0]
    assert [request.think_s for request in first.requests] == [None, 3.0, 3.0]
    assert [request.api_time_s for request in first.requests] == [2.0, 2.0, 2.0]
    # 40 system tokens are two full blocks of 16; the block across the border is the session's own.
    assert [request.blocks.tolist() for request in first.requests] == [
        [0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6],
    ]  # fmt: skip
    assert second.requests[0].blocks.tolist() == [0, 1, 7]


def test_a_fork_extends_a_prompt_of_its_parent() -> None:
    trace = synthesize(replace(PLAIN, sessions=20, fork_share=1.0))
    by_id = {session.id: session for session in trace.sessions}
    forks = [session for session in trace.sessions if session.parent is not None]
    assert len(forks) == 19
    for fork in forks:
        assert fork.parent is not None
        blocks = fork.requests[0].blocks.tolist()
        prompts = [(r.blocks.tolist(), r.arrival_s) for r in by_id[fork.parent].requests]
        assert any(blocks[: len(ids)] == ids and at_s < fork.requests[0].arrival_s for ids, at_s in prompts)


def test_seed_decides() -> None:
    options = SyntheticOptions(sessions=5, fork_share=0.5)
    assert rows(synthesize(options)) == rows(synthesize(options))
    assert rows(synthesize(options)) != rows(synthesize(replace(options, seed=1)))


def test_a_written_log_reads_back(tmp_path: Path) -> None:
    trace = synthesize(SyntheticOptions(sessions=6, turns=5, fork_share=0.3, seed=3))
    path = tmp_path / "t.jsonl"
    with path.open("w") as stream:
        assert write(trace, stream) == 30
    back = load_trace(str(path), strict=True)
    assert rows(back) == rows(trace)
    assert [session.parent for session in back.sessions] == [session.parent for session in trace.sessions]
    assert replace(describe(back), name="", format="") == replace(describe(trace), name="", format="")


def test_values_out_of_range_name_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"--fork-share must be at most 1, got 1\.5"):
        SyntheticOptions(fork_share=1.5)
