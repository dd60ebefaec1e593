"""Segments with the bytes of several ranks: put together in the order of the orders, and taken apart again."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from twinpool.engine.rank_segments import RankSegments, StorePart, orders_of_ranks
from twinpool.step import HostFill, SlotOrder, StoreCopy

RANKS, PAGE_BYTES, STATE_BYTES = 3, 4, 5
Put = list[tuple[StoreCopy, bytes, bytes]]


def order(n_pages: int) -> StoreCopy:
    return StoreCopy(np.arange(8 * n_pages, dtype=np.int32), 0, 8 * n_pages, np.arange(n_pages, dtype=np.int32), 1)


def part(number: int, rank: int, n_pages: int, page_bytes: int = PAGE_BYTES) -> StorePart:
    """Bytes that say which order and rank they are of."""
    return StorePart(
        bytes([10 * number + rank] * n_pages * page_bytes), bytes([100 + 10 * number + rank] * STATE_BYTES)
    )


def collect(arrivals: list[tuple[int, int]], *, page_bytes: int = PAGE_BYTES) -> Put:
    """What is put when parts (order, rank) arrive so; orders have one page, two, and so on."""
    done: Put = []
    segments = RankSegments(RANKS, lambda order, kv, state: done.append((order, bytes(kv), bytes(state))))
    for number, rank in arrivals:
        one = part(number, rank, number + 1, page_bytes)
        if rank:
            segments.theirs(rank, one)
        else:
            segments.ours(order(number + 1), memoryview(one.kv), memoryview(one.state))
    return done


def test_parts_are_put_together_in_the_order_of_the_orders_however_they_arrive() -> None:
    whole = [
        (bytes([10 * n + rank for rank in range(RANKS) for _ in range(PAGE_BYTES)]) * (n + 1),
         bytes([100 + 10 * n + rank for rank in range(RANKS) for _ in range(STATE_BYTES)]))
        for n in range(2)
    ]  # fmt: skip
    parts = list(itertools.product(range(2), range(RANKS)))
    n_tried = 0
    for arrivals in itertools.permutations(parts):
        if any(arrivals.index((0, rank)) > arrivals.index((1, rank)) for rank in range(RANKS)):
            continue  # a rank gives its parts in order
        assert [(kv, state) for _, kv, state in collect(list(arrivals))] == whole
        n_tried += 1
    assert n_tried == 90


def test_a_segment_that_lacks_a_rank_is_not_put() -> None:
    assert collect([(0, 0), (1, 0), (0, 1), (1, 1)]) == []
    assert [len(one.pages) for one, _, _ in collect([(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)])] == [1]


@pytest.mark.parametrize("page_bytes", [PAGE_BYTES, 0])
def test_each_rank_gets_back_what_it_gave(page_bytes: int) -> None:
    [(_, kv, state)] = collect([(0, 2), (0, 1), (0, 0)], page_bytes=page_bytes)
    fill = HostFill(np.array([7], np.int32), memoryview(kv), 3, memoryview(state))
    other = SlotOrder(dst=1, src=2)
    shares = orders_of_ranks((other, fill), ranks=RANKS, page_bytes=page_bytes)
    assert len(shares) == RANKS
    for rank, (same, mine) in enumerate(shares):
        assert same is other
        assert isinstance(mine, HostFill)
        given = part(0, rank, 1, page_bytes)
        assert (mine.kv, mine.state, mine.host_slot, mine.host_pages.tolist()) == (given.kv, given.state, 3, [7])


def test_a_state_without_its_pages_goes_to_all() -> None:
    """The node has its KV already, so the order names no pages."""
    fill = HostFill(np.zeros(0, np.int32), memoryview(b""), 3, memoryview(bytes(range(RANKS))))
    shares = orders_of_ranks((fill,), ranks=RANKS, page_bytes=PAGE_BYTES)
    assert [(mine.kv, mine.state) for (mine,) in shares if isinstance(mine, HostFill)] == [
        (b"", bytes([rank])) for rank in range(RANKS)
    ]


def test_orders_without_bytes_from_the_disk_are_told_as_they_are() -> None:
    orders = (SlotOrder(dst=1, src=None),)
    assert all(share is orders for share in orders_of_ranks(orders, ranks=RANKS, page_bytes=PAGE_BYTES))
