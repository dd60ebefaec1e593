"""Preambles of equal length become the same blocks in all sessions; nothing else does."""

from __future__ import annotations

from tests.replay_worlds import Turn, session, trace
from twinpool.replay.preamble import share_preambles


def names(recorded) -> dict[str, list[list[int]]]:
    return {one.id: [request.blocks.tolist() for request in one.requests] for one in recorded.sessions}


def test_equal_lengths_share_their_whole_blocks_and_only_those() -> None:
    lengths = {"tool_tokens": 6, "system_tokens": 3}
    one = session("a", Turn(blocks=[1, 2, 3, 4], input_tokens=16), namespace="a", **lengths)
    other = session("b", Turn(blocks=[1, 5, 6, 7], input_tokens=16), namespace="b", **lengths)
    longer = session("c", Turn(blocks=[1, 2, 3, 4], input_tokens=16), namespace="c", tool_tokens=9, system_tokens=3)
    shared = share_preambles(trace(one, other, longer, block_size=4, clock="session"))
    found = {name: blocks for name, (blocks,) in names(shared).items()}
    assert found["a"][:2] == found["b"][:2]  # nine tokens are two whole blocks
    assert len({*found["a"][2:], *found["b"][2:], *found["c"], *found["a"][:2]}) == 2 + 2 + 2 + 4
    assert {one.namespace for one in shared.sessions} == {""}
    assert shared.scope == "global"
    assert shared.notes == ("Tool and system prompts of equal length were taken to be the same text in all sessions.",)


def test_later_turns_and_sub_agents_keep_what_they_share_with_the_first_prompt() -> None:
    one = session(
        "a",
        Turn(blocks=[1, 2, 3], input_tokens=12),
        Turn(blocks=[1, 2, 3, 4], input_tokens=16),
        namespace="a",
        system_tokens=4,
    )
    child = session("a/x", Turn(blocks=[1, 9], input_tokens=8), namespace="a", parent="a")
    stranger = session("b", Turn(blocks=[9], input_tokens=4), namespace="b", system_tokens=4)
    found = names(share_preambles(trace(one, child, stranger, block_size=4)))
    (first, second), (inner,), (other,) = found["a"], found["a/x"], found["b"]
    assert second[:3] == first
    assert inner[0] == first[0] == other[0]
    assert len({*second, *inner}) == 5


def test_lengths_alone_stay_as_they_are() -> None:
    recorded = trace(session("a", Turn(blocks=[], input_tokens=3)), block_size=None)
    assert share_preambles(recorded) is recorded


def test_prompts_without_a_block_of_their_own_are_left_empty() -> None:
    recorded = trace(session("a", Turn(blocks=[], input_tokens=3), system_tokens=3), block_size=4)
    assert names(share_preambles(recorded)) == {"a": [[]]}
