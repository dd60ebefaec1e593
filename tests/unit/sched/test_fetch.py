"""Requests whose prefix is being read from the disk: they wait, others do not, and what came is reported as what it is."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.disk_worlds import FakeStorage
from tests.worlds import World, expected_output, make_world
from twinpool.memory.host import HostArena
from twinpool.request import Request
from twinpool.sched.fetch import MOST_LOOKS


@dataclass
class Gate(FakeStorage):
    """A disk that answers when it is told to."""

    open: set[int] = field(default_factory=set)

    def poll(self, rid: int):
        return super().poll(rid) if rid in self.open or rid not in self.waiting else None


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def boot(storage: FakeStorage, **world: object) -> World:
    return make_world(host=HostArena(total_bytes=2000, page_bytes=10, slot_bytes=10), storage=storage, **world)


@pytest.fixture
def gate() -> Gate:
    """A disk that knows PROMPT's first nine tokens (one was said), and holds back what it reads."""
    storage = Gate()
    world = boot(storage)
    world.run(world.request(1, PROMPT, 2, ignore_eos=True))
    world.run(world.request(2, [9, 9], 1, ignore_eos=True))
    assert (len(PROMPT) + 1) * 4 in {len(tokens) for tokens in storage.segments}
    return storage


def turn(world: World, rid: int) -> Request:
    """The next turn of PROMPT's conversation."""
    return world.request(rid, [*PROMPT, *expected_output(PROMPT, 2, ignore_eos=True), 3], 2, ignore_eos=True)


def check(*requests: Request) -> None:
    for request in requests:
        tokens = [int(token) for token in request.tokens[: request.n_tokens]]
        prompt = tokens[: request.prompt_len]
        assert tokens[request.prompt_len :] == expected_output(prompt, request.params.max_tokens, ignore_eos=True)


def test_others_pass_one_that_waits(gate: Gate) -> None:
    world = boot(gate)
    waits = turn(world, 1)
    others = [world.request(rid, [rid, 9, 9, 9], 2, ignore_eos=True) for rid in (2, 3, 4)]
    for request in (waits, *others):
        world.scheduler.add(request)
    for _ in range(30):
        world.loop.step()
    assert [request.finish is not None for request in (waits, *others)] == [False, True, True, True]
    assert world.loop.waits
    gate.open.add(1)
    world.run()
    check(waits, *others)
    assert (waits.reuse.from_storage, waits.reuse.from_host, waits.reuse.reused) == (9, 0, 9)
    assert waits.reuse.by_tier == {"device": 0, "host": 0, "storage": 9}


def test_an_aborted_one_is_forgotten(gate: Gate) -> None:
    world = boot(gate)
    waits = turn(world, 1)
    world.scheduler.add(waits)
    world.loop.step()
    assert set(gate.waiting) == {1}
    assert world.scheduler.abort(1)
    assert not gate.waiting
    assert not world.scheduler.book.fetched
    assert world.loop.idle
    assert waits.finish.reason == "abort"


def crowded(gate: Gate) -> tuple[World, Request, Request]:
    """A world with room for one more request, but not for the KV of the one that waits for the disk: (world, who runs, who waits)."""
    world = boot(gate, n_pages=20)
    runs, waits = world.request(9, [9] * 10, 9, ignore_eos=True), turn(world, 1)
    world.scheduler.add(runs)
    world.loop.step()
    gate.open.add(1)
    world.scheduler.add(waits)
    while not world.scheduler.book.fetched[1].end:
        world.loop.step()
    assert waits.finish is None
    assert world.tree.tier.totals.filled_tokens == 9
    return world, runs, waits


def drop_host(world: World) -> None:
    """The host has no room for anything any more, for a moment."""
    tier = world.tree.tier
    tier.room(pages=tier.arena.most_pages)


def test_one_aborted_after_its_prefix_came_leaves_it_on_the_host(gate: Gate) -> None:
    world, _, _ = crowded(gate)
    world.scheduler.abort(1)
    assert not world.scheduler.book.fetched
    world.run()
    again = turn(world, 2)
    world.run(again)
    check(again)
    assert (again.reuse.from_host, again.reuse.from_storage) == (9, 0)


def test_what_is_read_stays_aside_while_the_house_is_full(gate: Gate) -> None:
    world = boot(gate, max_running=1)
    gate.open |= {1, 2}
    runs, waits, further = world.request(9, [9, 9], 20, ignore_eos=True), turn(world, 1), turn(world, 2)
    for request in (runs, waits, further):
        world.scheduler.add(request)
    while runs.n_output < 15:
        world.loop.step()
    assert world.tree.tier.totals.filled_tokens == 0
    world.scheduler.abort(2)
    assert set(gate.waiting) == {1}
    world.run()
    check(runs, waits)
    assert (waits.reuse.reused, waits.reuse.from_storage) == (9, 9)


def test_two_of_one_prefix_are_filled_and_restored_once(gate: Gate) -> None:
    world = boot(gate)
    gate.open |= {1, 2}
    pair = [turn(world, 1), turn(world, 2)]
    world.run(*pair)
    check(*pair)
    assert [request.reuse.reused for request in pair] == [9, 9]
    assert [request.reuse.from_storage for request in pair] == [9, 0]
    totals = world.tree.tier.totals
    assert (totals.filled_tokens, totals.loaded_tokens) == (9, 9)


def test_nobody_waits_for_what_was_read_for_another(gate: Gate) -> None:
    world = boot(gate)
    gate.open.add(1)
    pair = [turn(world, 1), turn(world, 2)]
    further = world.request(3, [9, 9, 9, 9], 1, ignore_eos=True)
    world.scheduler.add(further)
    gate.waiting[3] = (0, [gate.chain(pair[0].tokens)[-1]])  # its own prefix, which nobody else brings
    for request in pair:
        world.scheduler.add(request)
    for _ in range(30):
        world.loop.step()
    check(*pair)
    assert [request.reuse.reused for request in pair] == [9, 9]
    assert set(gate.waiting) == {3}
    assert gate.read_tokens == 9


def test_only_what_the_host_lacked_counts_as_from_the_disk(gate: Gate) -> None:
    """Memory has the first turn; the disk brings the second."""
    longer = turn(first := boot(gate), 1)
    gate.open.add(1)
    first.run(longer)
    first.run(first.request(2, [9, 9], 1, ignore_eos=True))
    world = boot(gate)
    world.run(world.request(1, PROMPT, 2, ignore_eos=True))
    world.tree.evict(pages=world.pages.count, slots=world.slots.count)
    prompt = [int(token) for token in longer.tokens]
    request = world.request(3, [*prompt, 4], 1, ignore_eos=True)
    gate.open.add(3)
    world.run(request)
    check(request)
    assert request.reuse.by_tier == {"device": 0, "host": 9, "storage": len(prompt) - 1 - 9}


def test_one_that_was_sent_back_does_not_wait_again(gate: Gate) -> None:
    world = boot(gate, n_pages=50, schedule_conservativeness=0.1)
    gate.open |= {1, 2}
    pair = [turn(world, 1), world.request(2, [4] * 8, 24, ignore_eos=True)]
    pair[0] = world.request(1, list(map(int, pair[0].tokens[:11])), 24, ignore_eos=True)
    world.run(*pair)
    check(*pair)
    assert sum(request.retractions for request in pair) > 0
    assert not gate.waiting


def test_what_was_read_and_lost_before_it_could_start_is_read_again(gate: Gate) -> None:
    world, runs, waits = crowded(gate)
    drop_host(world)
    world.run()
    check(runs, waits)
    assert (waits.reuse.reused, waits.reuse.from_storage) == (9, 9)
    assert gate.read_tokens == 18


def test_what_memory_had_on_arrival_and_lost_is_read(gate: Gate) -> None:
    world = boot(gate, max_running=1)
    gate.open |= {1, 3}
    world.run(turn(world, 1))
    runs, waits = world.request(2, [9, 9], 20, ignore_eos=True), turn(world, 3)
    world.scheduler.add(runs)
    world.loop.step()
    world.scheduler.add(waits)
    assert not gate.waiting
    world.loop.step()
    world.tree.evict(pages=99, slots=99)
    drop_host(world)
    world.run()
    check(runs, waits)
    assert waits.reuse.from_storage == waits.reuse.reused == 9


def test_what_is_lost_again_and_again_is_computed(gate: Gate) -> None:
    world, runs, waits = crowded(gate)
    while world.scheduler.book.waiting:
        drop_host(world)
        world.loop.step()
    world.run()
    check(runs, waits)
    assert (waits.reuse.reused, waits.reuse.from_storage) == (0, 0)
    assert gate.read_tokens == 9 * MOST_LOOKS


def test_only_the_state_is_read_where_memory_has_the_kv(gate: Gate) -> None:
    """The chain is PROMPT's segments and the next turn's; the device keeps all KV and loses its states (sglang#39856)."""
    gate.open |= set(range(1, 9))
    world = boot(gate, host_policy="write_back")
    first = turn(world, 1)
    world.run(first)
    world.run(world.request(2, [9, 9], 1, ignore_eos=True))
    drop_host(world)
    while world.tree.evictable_slots:
        world.tree.evict(slots=1)
        drop_host(world)
    assert world.tree.evictable_pages > 0
    before = gate.read_tokens
    prompt = [int(token) for token in first.tokens]
    again = world.request(3, [*prompt, 4], 1, ignore_eos=True)
    chain = gate.chain(again.tokens[: again.prompt_len - 1])
    assert len(chain) > 1
    world.run(again)
    check(again)
    assert again.reuse.reused == chain[-1].end
    assert gate.read_tokens - before == chain[-1].end - chain[-1].start


def test_what_device_and_host_have_pushed_out_comes_from_the_disk() -> None:
    """Without a restart or a flush: the disk is asked, too, when only a trace of the prefix is left in memory (sglang#38452)."""
    host = HostArena(total_bytes=300, page_bytes=10, slot_bytes=10)
    world = make_world(host=host, storage=FakeStorage(), n_pages=24, n_slots=6, max_running=1)
    world.run(world.request(1, PROMPT, 2, ignore_eos=True))
    for rid in range(2, 12):
        world.run(world.request(rid, [rid + 20] * 10, 2, ignore_eos=True))
    assert world.scheduler.book.tree.tier.totals.evicted_states > 0
    again = turn(world, 12)
    world.run(again)
    assert (again.reuse.reused, again.reuse.from_storage) == (9, 9)
    check(again)


def test_a_flush_leaves_the_disk_alone(gate: Gate) -> None:
    world = boot(gate)
    gate.open |= {1, 2}
    world.run(turn(world, 1))
    assert world.scheduler.flush()
    again = turn(world, 2)
    world.run(again)
    assert again.reuse.from_storage == again.reuse.reused > 0
