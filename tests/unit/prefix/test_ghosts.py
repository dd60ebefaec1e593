"""What was cached once and evicted is told from what is new; the memory of it is bounded (DESIGN, "Reuse explains itself")."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.prefix.test_tree import Small, seq
from twinpool.prefix.ghosts import Ghosts, attribute
from twinpool.prefix.node import NO_PAGES, Node


def gaps(small: Small, tokens: list[int]) -> dict[str, int]:
    return dict(small.match(tokens, touch=False).reuse.gaps)


def test_ghosts_past_a_shorter_reinsertion_are_still_known() -> None:
    small = Small()
    small.put(seq(12))
    small.put(seq(20))
    small.tree.evict(pages=20)
    small.put(seq(5))
    assert gaps(small, [*seq(20), 99]) == {"kv_evicted": 15, "new": 1}
    small.put(seq(12))
    assert gaps(small, [*seq(20), 99]) == {"kv_evicted": 8, "new": 1}


def test_what_is_cached_again_is_no_ghost_and_a_new_branch_is_new() -> None:
    small = Small()
    small.put(seq(6))
    small.tree.evict(pages=6)
    small.put([*seq(4), 77, 78])
    assert gaps(small, [*seq(4), 77, 78, 79]) == {"new": 1}
    small.tree.evict(pages=6)
    assert gaps(small, [*seq(4), 77, 78, 79]) == {"kv_evicted": 6, "new": 1}


def test_evicted_tokens_count_up_to_the_limit_of_a_match() -> None:
    small = Small()
    small.put(seq(8))
    small.tree.evict(pages=8)
    found = small.match(seq(8), limit=7)
    assert dict(found.reuse.gaps) == {"kv_evicted": 7, "new": 1}


def test_the_oldest_ghosts_are_forgotten_first() -> None:
    ghosts = Ghosts(limit_bytes=700)
    root = Node(key=b"", depth=0, pages=NO_PAGES, parent=None, now=0)
    keys = [np.array(seq(10, base=base), np.int32).tobytes() for base in range(3)]
    for k in keys:
        ghosts.remember(root, k[:4], Node(key=k, depth=10, pages=NO_PAGES, parent=root, now=0))
    # 40 bytes of key and 256 for the rest of each: two fit in 700.
    assert [Ghosts.evicted_tokens(root, k, 0, 4) for k in keys] == [0, 10, 10]


@pytest.mark.parametrize(
    ("kv", "resume", "gone", "expected"),
    [
        (150, 64, 0, {"no_checkpoint": 64, "below_grid": 22, "new": 50}),
        (150, 64, 140, {"state_evicted": 76, "below_grid": 10, "new": 50}),
        (150, 64, 100, {"state_evicted": 36, "no_checkpoint": 28, "below_grid": 22, "new": 50}),
        (150, 150, 100, {"new": 50}),
        (60, 0, 0, {"below_grid": 60, "new": 140}),
    ],
)
def test_attribution_rule(kv, resume, gone, expected) -> None:
    reuse = attribute(prompt=200, limit=199, kv=kv, resume=resume, gone=gone, grid=64, evicted=0)
    assert dict(reuse.gaps) == expected
    assert reuse.reused == resume
