"""Requests that resume from the host: room is counted before anything starts, all or nothing, and every token has its reason.

The last tests rebuild a report: 565 host slots beside 2,680,896 host tokens gave no hit at all (sglang#39436).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.worlds import World, expected_output, make_world
from twinpool.loop import Loop
from twinpool.memory.host import HostArena
from twinpool.request import Request
from twinpool.step import HostCopy, StepPlan, StepResult


def arena(chunks: int = 200, max_slots: int | None = None) -> HostArena:
    """A chunk is one page or one state."""
    return HostArena(total_bytes=10 * chunks, page_bytes=10, slot_bytes=10, max_slots=max_slots)


def tokens(n: int, base: int = 1) -> list[int]:
    return [base + i % 5 for i in range(n)]


def run(world: World, rid: int, prompt: list[int], max_tokens: int = 2) -> Request:
    request = world.request(rid, prompt, max_tokens, ignore_eos=True)
    world.run(request)
    said = [int(token) for token in request.tokens[request.prompt_len : request.n_tokens]]
    assert said == expected_output(prompt, max_tokens, ignore_eos=True)[: len(said)]
    return request


def leave_device(world: World) -> None:
    world.tree.evict(pages=world.pages.count, slots=world.slots.count)
    world.scheduler.check()


def copies(world: World) -> list[tuple[bool, int, bool]]:
    """(to_host, pages, whether a state) of every copy that was ordered."""
    orders = [order for plan in world.executor.plans for order in plan.orders]
    return [(o.to_host, len(o.pages), bool(o.slot)) for o in orders if isinstance(o, HostCopy)]


def test_an_evicted_prefix_is_brought_back_in_the_step_that_starts_the_request() -> None:
    world = make_world(host=arena())
    first = run(world, 1, tokens(8))
    assert (first.reuse.reused, first.reuse.from_host) == (0, 0)
    leave_device(world)
    n_plans = len(world.executor.plans)
    again = run(world, 2, [*tokens(8), 9])
    assert (again.reuse.reused, again.reuse.from_host, dict(again.reuse.gaps)) == (8, 8, {"new": 1})
    plan = world.executor.plans[n_plans]
    assert [row.start for row in plan.rows] == [8]
    assert any(isinstance(order, HostCopy) and not order.to_host for order in plan.orders)
    assert world.executor.n_checked_tokens > 0


def test_a_prefix_partly_on_the_device_brings_back_the_rest() -> None:
    world = make_world(host=arena())
    run(world, 1, tokens(12), 1)
    run(world, 2, [*tokens(8), 7, 7, 7, 7], 1)
    world.tree.evict(pages=1)
    before = len(copies(world))
    deeper = run(world, 3, [*tokens(12), 9], 1)
    assert deeper.reuse.from_host == 12 - 8
    loads = [copy for copy in copies(world)[before:] if not copy[0]]
    assert loads == [(False, 4, False), (False, 0, True)]


def test_longest_prefix_first_counts_what_the_host_has() -> None:
    world = make_world(host=arena(), max_running=1, schedule_policy="lpm")
    run(world, 0, tokens(12), 1)
    leave_device(world)
    run(world, 1, [7] * 6, 1)
    on_device, on_host = world.request(2, [*([7] * 6), 9], 1), world.request(3, [*tokens(12), 9], 1)
    world.run(world.request(4, [8] * 14, 1), on_device, on_host)
    assert [plan.joined[0].rid for plan in world.executor.plans if plan.joined][2:] == [3, 2, 4]


def test_a_state_on_the_host_above_kv_on_the_device_costs_one_slot_and_no_page() -> None:
    world = make_world(host=arena(), host_policy="write_back", n_pages=20)
    run(world, 1, tokens(12), 1)
    world.tree.evict(slots=1)
    on_device = world.pages.count - world.pages.available
    again = run(world, 2, [*tokens(8), 9], 1)
    assert (again.reuse.reused, again.reuse.from_host) == (8, 8)
    assert on_device >= 12
    assert [copy for copy in copies(world) if not copy[0]] == [(False, 0, True)]


def test_kv_that_is_held_for_a_restore_is_not_asked_for_again() -> None:
    """16 of 20 pages are on the device, only their state is not: that must not look like a prompt of 17 tokens without room."""
    world = make_world(host=arena(), host_policy="write_back", n_pages=20, chunk=None)
    run(world, 1, tokens(16), 1)
    run(world, 2, [*tokens(16), 8], 1)
    world.tree.evict(slots=1)
    again = run(world, 3, [*tokens(16), 9], 1)
    assert (again.reuse.reused, again.reuse.from_host, dict(again.reuse.gaps)) == (16, 16, {"new": 1})
    assert world.scheduler.book.totals.failed_restores == 0


def test_without_a_second_slot_the_request_recomputes_and_says_so() -> None:
    # A request has its working slot and one for tracking without overlap: a restore needs a third.
    world = make_world(host=arena(), n_slots=2, overlap=False, max_running=1)
    run(world, 1, tokens(8))
    leave_device(world)
    before = len(copies(world))
    again = run(world, 2, [*tokens(8), 9])
    assert (again.reuse.reused, again.reuse.from_host) == (0, 0)
    assert dict(again.reuse.gaps) == {"restore_failed": 8, "new": 1}
    assert world.scheduler.book.totals.failed_restores == 1
    assert not [copy for copy in copies(world)[before:] if not copy[0]]
    assert [counts.held + counts.protected for counts in world.scheduler.counts()] == [0, 0]


def test_a_state_that_the_host_dropped_is_named() -> None:
    world = make_world(host=arena(max_slots=2), grid=4, chunk=4)
    run(world, 1, tokens(8), 1)
    leave_device(world)
    run(world, 2, tokens(4, base=5), 1)
    again = run(world, 3, [*tokens(4), 9], 1)
    assert dict(again.reuse.gaps) == {"host_state_evicted": 4, "new": 1}


@pytest.mark.parametrize("short", [{"pages": 999}, {"slots": 99}])
def test_what_was_backed_up_comes_back_whatever_the_device_ran_short_of(short) -> None:
    """26 sessions are on the host, which has 37 % free, and the device has evicted all of them (sglang#33713)."""
    host = HostArena(total_bytes=5_800, page_bytes=10, slot_bytes=10)
    world = make_world(host=host, n_pages=600, n_slots=60, max_running=1)
    turns = [run(world, rid, [rid, *tokens(10, base=rid)], 2) for rid in range(26)]
    said = [[int(token) for token in turn.tokens[: turn.n_tokens]] for turn in turns]
    assert 0.36 < 1 - (host.used_pages + host.used_slots) / host.n_chunks < 0.38
    world.tree.evict(**short)
    assert world.tree.evictable_slots == 0
    again = [run(world, 30 + rid, [*said[rid], 9], 2).reuse for rid in range(26)]
    assert {(reuse.reused, reuse.from_host, reuse.gaps) for reuse in again} == {(12, 12, (("new", 2),))}


def test_two_requests_of_one_prefix_bring_it_back_once() -> None:
    world = make_world(host=arena())
    run(world, 1, tokens(8))
    leave_device(world)
    pair = [world.request(rid, [*tokens(8), 7 + rid % 2], 2, ignore_eos=True) for rid in (2, 3)]
    world.run(*pair)
    assert [request.reuse.reused for request in pair] == [8, 8]
    assert [request.reuse.from_host for request in pair] == [8, 0]
    assert [copy for copy in copies(world) if not copy[0]] == [(False, 8, False), (False, 0, True)]


def test_an_abort_between_restore_and_first_step_leaves_the_prefix_usable() -> None:
    world = make_world(host=arena())
    run(world, 1, tokens(8))
    leave_device(world)
    world.scheduler.add(world.request(2, [*tokens(8), 9], 2))
    world.loop.step()
    assert world.scheduler.abort(2)
    world.run()
    again = run(world, 3, [*tokens(8), 9])
    assert (again.reuse.reused, again.reuse.from_host) == (8, 0)


def test_a_flush_forgets_the_host_too() -> None:
    world = make_world(host=(host := arena()))
    run(world, 1, tokens(8))
    leave_device(world)
    assert world.scheduler.flush()
    assert (host.used_pages, host.used_slots) == (0, 0)
    assert run(world, 2, [*tokens(8), 9]).reuse.reused == 0


# GLM-5.3-Flash on one of four devices, as the report has it: 734 slots in 14 GB are states of 17,825,792 + 1,253,376 bytes
# (16-bit), and (32 GB - 565 slots) / 2,680,896 tokens are 7,915 bytes of KV a token.
SLOT_BYTES, KV_BYTES, PAGE_TOKENS, HOST_TOKENS = 17_825_792 + 1_253_376, 7_915, 64, 2_680_896
PROMPT_TOKENS, CHUNK_TOKENS, N_PROMPTS, N_AGAIN = 8_448, 4_096, 200, 8


class Mute:
    """An executor that says 1, whatever it is asked."""

    def submit(self, plan: StepPlan) -> Mute:
        self.plan = plan
        return self

    def result(self) -> StepResult:
        return StepResult(self.plan.step, tuple(1 if row.sample else None for row in self.plan.rows))


def report_world(host: HostArena) -> World:
    """Device pools of 20 prompts, chunks of 4,096: three checkpoints a prompt, at 4,096, 8,192 and its end."""
    world = make_world(
        n_pages=20 * PROMPT_TOKENS // PAGE_TOKENS, n_slots=20 * 3, page_size=PAGE_TOKENS, overlap=False, chunk=CHUNK_TOKENS,
        grid=PAGE_TOKENS, track=256, max_running=1, context_len=16_384, host=host,
    )  # fmt: skip
    world.loop = Loop(scheduler=world.scheduler, executor=Mute(), overlap=False)
    return world


def replay(world: World, n: int) -> Iterator[Request]:
    """The first n of the report's prompts, one after another."""
    for which in range(n):
        prompt = np.random.default_rng(which).integers(0, 150_000, PROMPT_TOKENS).tolist()
        request = world.request(len(world.scheduler.book.running) + which, prompt, 1)
        world.scheduler.add(request)
        while not world.loop.idle:
            world.loop.step()
        yield request


def hits(host: HostArena) -> tuple[int, set[int], set[str]]:
    """(prompts of the first eight that are resumed from the host after all 200 have been there, tokens they got, first reason why
    no more).
    """
    world = report_world(host)
    list(replay(world, N_PROMPTS))
    world.scheduler.check()
    found = [request.reuse for request in replay(world, N_AGAIN)]
    world.scheduler.check()
    got = [reuse.from_host for reuse in found]
    return sum(n > 0 for n in got), set(got), {reuse.gaps[0][0] for reuse in found}


def report_arena(max_slots: int | None) -> HostArena:
    """32 GB, with so many of its chunks for states."""
    return HostArena(
        total_bytes=32 * 10**9, page_bytes=PAGE_TOKENS * KV_BYTES, slot_bytes=SLOT_BYTES, max_slots=max_slots
    )


def test_the_split_of_the_report_is_rebuilt_to_half_a_percent() -> None:
    host = report_arena(565)
    assert host.most_slots == 565
    assert host.most_pages * PAGE_TOKENS == pytest.approx(HOST_TOKENS, rel=0.006)
    assert round(734 * SLOT_BYTES / 10**9, 1) == 14.0


def test_states_in_the_devices_proportion_leave_dead_kv_and_no_hit() -> None:
    host = report_arena(565)
    assert hits(host) == (0, {0}, {"host_state_evicted"})
    assert host.used_slots == 565
    assert 0.34 < 1 - host.used_pages / host.most_pages < 0.38


@pytest.mark.parametrize("max_slots", [734, None])
def test_enough_states_or_no_split_at_all_bring_every_session_back(max_slots) -> None:
    assert hits(report_arena(max_slots)) == (8, {8_192}, {"no_checkpoint"})
