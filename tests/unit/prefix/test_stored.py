"""What is given to the disk at the end of a turn, and what comes back from it into the tree."""

from __future__ import annotations

import numpy as np
import pytest

from tests.disk_worlds import FakeStorage
from tests.worlds import World, make_world
from twinpool.memory.host import HostArena
from twinpool.prefix.stored import StoredSegment, adopt_stored, forget_stored

PAGE_BYTES = 8  # of one token


def key(n: int) -> bytes:
    return np.arange(1, n + 1, dtype=np.int32).tobytes()


def segment(start: int, end: int) -> StoredSegment:
    return StoredSegment(start, end, memoryview(bytes((end - start) * PAGE_BYTES)), memoryview(bytes(8)))


def world_of(chunks: int = 100, **world: object) -> World:
    """A chunk of the host holds one page or one state."""
    arena = HostArena(total_bytes=PAGE_BYTES * chunks, page_bytes=PAGE_BYTES, slot_bytes=PAGE_BYTES)
    return make_world(host=arena, **world)


def publish(world: World, n: int) -> None:
    """The first n tokens are on the device, with their state, as a finished request leaves them."""
    pages, slot = world.pages.alloc(n), world.slots.alloc(1)
    inserted = world.tree.insert(key(n), pages, length=n, owned_from=0, state_slot=int(slot[0]))
    world.pages.free(inserted.freed_pages)
    if not inserted.state_taken:
        world.slots.free(slot)


def resumable(world: World, n: int = 20) -> tuple[int, int]:
    """(tokens of key(n) that the device can resume, tokens that device and host can)."""
    match = world.tree.match(key(n), limit_tokens=n, touch=False)
    return match.resume_len, match.host_node.depth if match.host_node is not None else match.resume_len


def test_a_chain_is_hung_below_the_root() -> None:
    world = world_of()
    assert adopt_stored(world.tree, key(20), [segment(0, 5), segment(5, 9)]) == 9
    assert resumable(world) == (0, 9)
    assert (world.tree.tier.totals.filled_tokens, world.tree.tier.totals.filled_states) == (9, 2)
    world.scheduler.check()


def test_what_does_not_join_is_left() -> None:
    world = world_of()
    assert adopt_stored(world.tree, key(20), [segment(5, 9)]) == 0
    assert adopt_stored(world.tree, key(20), [segment(0, 5), segment(6, 9)]) == 5
    assert resumable(world) == (0, 5)
    world.scheduler.check()


def test_only_what_memory_lacks_is_filled() -> None:
    world = world_of()
    publish(world, 7)
    assert adopt_stored(world.tree, key(20), [segment(0, 5), segment(5, 12)]) == 12
    # An edge of seven tokens is cut where the first segment ends; five new tokens, two states.
    assert resumable(world) == (7, 12)
    assert (world.tree.tier.totals.filled_tokens, world.tree.tier.totals.filled_states) == (5, 2)
    world.scheduler.check()


def test_what_is_there_already_is_not_filled_again() -> None:
    world = world_of()
    publish(world, 5)
    assert adopt_stored(world.tree, key(20), [segment(0, 5)]) == 5
    assert adopt_stored(world.tree, key(20), [segment(0, 5), segment(5, 9)]) == 9
    assert adopt_stored(world.tree, key(20), [segment(0, 5), segment(5, 9)]) == 9
    assert (world.tree.tier.totals.filled_tokens, world.tree.tier.totals.filled_states) == (4, 1)


def test_kv_on_the_host_without_a_state_gets_one() -> None:
    world = world_of()
    publish(world, 5)
    world.tree.evict(pages=5, slots=1)
    tier = world.tree.tier
    tier._drop_state(next(iter(tier.states)))
    assert resumable(world) == (0, 0)
    assert adopt_stored(world.tree, key(20), [segment(0, 5)]) == 5
    assert resumable(world) == (0, 5)
    assert tier.totals.filled_tokens == 0
    world.scheduler.check()


def test_its_own_copy_makes_no_room_for_its_state() -> None:
    """Five chunks hold its KV: the state finds no room, and the node must not leave the tree for it."""
    world = world_of(6)
    publish(world, 5)
    world.tree.evict(pages=5, slots=1)
    tier = world.tree.tier
    tier._drop_state(next(iter(tier.states)))
    assert tier.arena.alloc(pages=0, slots=1) is not None
    assert adopt_stored(world.tree, key(20), [segment(0, 5)]) == 0
    assert tier.arena.used_pages == 5


def test_what_can_never_fit_pushes_nothing_out() -> None:
    world = world_of(10)
    publish(world, 5)
    world.tree.evict(pages=5, slots=1)
    others = np.arange(50, 70, dtype=np.int32).tobytes()
    assert adopt_stored(world.tree, others, [segment(0, 12)]) == 0
    assert resumable(world) == (0, 5)
    assert adopt_stored(world.tree, others, [segment(0, 9)]) == 9
    assert resumable(world) == (0, 0)
    world.scheduler.check()


@pytest.mark.parametrize("chunks", [1, 4, 6, 9, 10])
def test_without_room_nothing_changes(chunks: int) -> None:
    world = world_of(chunks)
    reached = adopt_stored(world.tree, key(20), [segment(0, 5), segment(5, 9)])
    assert reached == (5 if chunks >= 6 else 0)
    assert resumable(world) == (0, reached)
    assert world.tree.n_nodes == (1 if reached else 0)
    world.scheduler.check()


def test_turns_are_given_once_each_and_stand_on_one_another() -> None:
    storage = FakeStorage()
    world = world_of(storage=storage)
    prompt = [1, 2, 3, 4, 5]
    for rid in range(3):
        request = world.request(rid, prompt, 3, ignore_eos=True)
        world.run(request)
        prompt = [*(int(token) for token in request.tokens), 6]
    world.run(world.request(10, [9, 9], 1, ignore_eos=True))  # its step takes the last orders along
    spans = [(order.start, order.end) for order in storage.given if order.tokens[0] == 1]
    # The grid is four tokens; a turn ends one token before the last that was said.
    assert spans == [(0, 4), (4, 7), (7, 8), (8, 11), (11, 12), (12, 15)]


def test_what_came_from_the_disk_is_not_given_back() -> None:
    storage = FakeStorage()
    first, second = (world_of(storage=storage) for _ in range(2))
    prompt = [1, 2, 3, 4, 5]
    request = first.request(1, prompt, 3, ignore_eos=True)
    first.run(request)
    first.run(first.request(2, [9], 1, ignore_eos=True))
    longer = second.request(1, [*(int(token) for token in request.tokens), 6], 2, ignore_eos=True)
    second.run(longer)
    second.run(second.request(2, [9], 1, ignore_eos=True))
    assert longer.reuse.from_storage == 7
    assert [(order.start, order.end) for order in storage.given if order.tokens[0] == 1] == [
        (0, 4),
        (4, 7),
        (7, 8),
        (8, 10),
    ]


def test_what_the_disk_lost_is_given_again_with_the_next_turn() -> None:
    storage = FakeStorage()
    world = world_of(storage=storage)
    prompt = [1, 2, 3, 4, 5]
    for rid in range(4):
        storage.lost_percent = 100 if rid == 1 else 0
        request = world.request(rid, prompt, 3, ignore_eos=True)
        world.run(request)
        prompt = [*(int(token) for token in request.tokens), 6]
        world.run(world.request(10 + rid, [9, 9, rid], 1, ignore_eos=True))  # its step takes the orders along
    spans = [(order.start, order.end) for order in storage.given if order.tokens[0] == 1]
    # The second turn is lost, and comes again with the third.
    assert spans[:7] == [(0, 4), (4, 7), (7, 8), (8, 11), (7, 8), (8, 11), (11, 12)]
    assert storage.chain(np.array(prompt, np.int32))[-1].end == len(prompt) - 2


def test_forgetting_goes_as_far_as_the_disk_does() -> None:
    world = world_of()
    adopt_stored(world.tree, key(20), [segment(0, 5), segment(5, 9), segment(9, 12)])
    forget_stored(world.tree, key(9), kept_tokens=5)
    nodes, step = [], world.tree.root
    while step.children:
        (step,) = step.children.values()
        nodes.append((step.depth, step.stored))
    assert nodes == [(5, True), (9, False), (12, True)]
