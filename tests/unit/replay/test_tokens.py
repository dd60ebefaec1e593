"""Token identity: (block id, offset), tails and answers that the next prompt names, namespaces."""

from __future__ import annotations

import pytest

from tests.replay_worlds import Turn, session, trace
from twinpool.errors import ConfigError
from twinpool.replay import tokens as tokens_module
from twinpool.replay.tokens import TokenSpace
from twinpool.replay.trace import Session, Trace


def contents(recorded: Trace, whose: Session) -> list[tuple[list[int], list[int]]]:
    space = TokenSpace(recorded)
    found = [space.content(whose, index) for index in range(len(whose.requests))]
    return [(one.prompt.tolist(), one.answer.tolist()) for one in found]


def test_a_token_is_its_block_and_its_place_in_it() -> None:
    one = session("a", Turn(blocks=[70, 30], input_tokens=8, output_tokens=0))
    assert contents(trace(one, block_size=4), one) == [([4, 5, 6, 7, 0, 1, 2, 3], [])]


def test_an_answer_is_what_the_next_prompt_has_in_its_place() -> None:
    one = session(
        "a",
        Turn(blocks=[0], input_tokens=5, output_tokens=2),
        Turn(blocks=[0, 1, 2], input_tokens=12, output_tokens=1),
    )
    first, second = contents(trace(one, block_size=4), one)
    assert second[0] == list(range(12))
    assert first == ([0, 1, 2, 3, 4], [5, 6])


def test_what_no_block_names_is_nobody_elses() -> None:
    one = session("a", Turn(blocks=[0], input_tokens=6, output_tokens=3))
    other = session("b", Turn(blocks=[0], input_tokens=6, output_tokens=3))
    recorded = trace(one, other, block_size=4)
    (first,), (second,) = contents(recorded, one), contents(recorded, other)
    assert first == ([0, 1, 2, 3, 4, 5], [6, 7, 8])
    assert second == ([0, 1, 2, 3, 9, 10], [11, 12, 13])


def test_a_prompt_that_does_not_extend_the_one_before_says_nothing_of_its_answer() -> None:
    one = session(
        "a",
        Turn(blocks=[0, 1], input_tokens=4, output_tokens=2),
        Turn(blocks=[0, 2, 3], input_tokens=6, output_tokens=1),
    )
    first, second = contents(trace(one, block_size=2), one)
    assert first[0] + first[1] == [0, 1, 2, 3, 8, 9]
    assert second[0] == [0, 1, 4, 5, 6, 7]


def test_an_end_that_the_next_prompt_leaves_open_is_told_by_the_one_after_it() -> None:
    """Prompts of 5, 7 and 12 tokens in blocks of 4, with ids of full blocks only: the second one's end is the third's."""
    one = session(
        "a",
        Turn(blocks=[0], input_tokens=5, output_tokens=1),
        Turn(blocks=[0], input_tokens=7, output_tokens=1),
        Turn(blocks=[0, 1, 2], input_tokens=12),
    )
    first, second, third = contents(trace(one, block_size=4), one)
    assert first[0] + first[1] == third[0][:6]
    assert second[0] + second[1] == third[0][:8]


def test_a_partial_blocks_tokens_are_those_of_the_full_block_that_follows() -> None:
    """Recorders that give the last, partial block an id of its own: 91 and the block 1 begin with the same token."""
    one = session(
        "a",
        Turn(blocks=[0, 91], input_tokens=5, output_tokens=2),
        Turn(blocks=[0, 1, 92], input_tokens=9, output_tokens=2),
    )
    first, second = contents(trace(one, block_size=4), one)
    assert first[0] + first[1] == second[0][:7] == list(range(7))
    assert second[0][8:] == [12]  # ids 0, 1, 91, 92 are blocks 0 to 3


def test_the_last_of_a_chain_keeps_its_own_end_and_those_before_share_it() -> None:
    one = session(
        "a",
        Turn(blocks=[0], input_tokens=5, output_tokens=4),
        Turn(blocks=[0], input_tokens=6, output_tokens=1),
    )
    first, second = contents(trace(one, block_size=4), one)
    assert second[0] + second[1] == [0, 1, 2, 3, 9, 10, 11]
    assert first[0] + first[1] == [0, 1, 2, 3, 9, 10, 11, 7, 8]  # two more tokens than the second knows: its own


def test_the_same_id_in_two_namespaces_is_two_blocks() -> None:
    one = session("a", Turn(blocks=[5], input_tokens=2, output_tokens=0), namespace="x")
    other = session("b", Turn(blocks=[5], input_tokens=2, output_tokens=0), namespace="y")
    child = session("c", Turn(blocks=[5], input_tokens=2, output_tokens=0), namespace="x", parent="a")
    recorded = trace(one, other, child, block_size=2)
    assert [contents(recorded, whose)[0][0] for whose in (one, other, child)] == [[0, 1], [2, 3], [0, 1]]


def test_lengths_alone_share_nothing() -> None:
    one = session(
        "a", Turn(blocks=[], input_tokens=3, output_tokens=1), Turn(blocks=[], input_tokens=4, output_tokens=0)
    )
    assert contents(trace(one, block_size=None), one) == [([0, 1, 2], [3]), ([4, 5, 6, 7], [])]


def test_more_tokens_than_int32_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "LARGEST_TOKEN", 9)
    one = session("a", Turn(blocks=[0, 1], input_tokens=8, output_tokens=2))
    with pytest.raises(ConfigError, match=r"The trace has 10 different tokens, and replay tells at most 9 apart\."):
        TokenSpace(trace(one, block_size=4))
