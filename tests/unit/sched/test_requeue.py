"""Requests that go back to the queue: what they find there, what they report, and when that cannot help them."""

from __future__ import annotations

import pytest

from tests.disk_worlds import FakeStorage
from tests.failing import KINDS, let_fail
from tests.worlds import World, expected_output, make_world
from twinpool.memory.host import HostArena
from twinpool.request import Request
from twinpool.sched.requeue import MOST_RESTARTS

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def said(request: Request) -> list[int]:
    return [int(token) for token in request.tokens[request.prompt_len : request.n_tokens]]


def small_world(**settings) -> World:
    world = make_world(host=HostArena(total_bytes=2000, page_bytes=10, slot_bytes=30), **settings)
    let_fail(world)
    return world


def test_a_lost_restore_is_computed_and_the_report_says_so() -> None:
    world = small_world()
    world.run(world.request(0, PROMPT, 2))
    world.tree.evict(pages=99, slots=99)
    world.executor.lose_next = True
    again = world.request(1, [*PROMPT, 7], 6, ignore_eos=True)
    world.run(again)
    assert said(again) == expected_output([*PROMPT, 7], 6, ignore_eos=True)
    assert (again.restarts, again.retractions) == (1, 0)
    assert (again.reuse.reused, again.reuse.from_host, dict(again.reuse.gaps)) == (
        0,
        0,
        {"restore_failed": 8, "new": 1},
    )
    assert world.scheduler.book.totals.restarted_requests == 1


def test_what_was_reused_before_the_first_token_stays_in_the_report() -> None:
    world = small_world()
    world.run(world.request(0, PROMPT, 2))
    again = world.request(1, [*PROMPT, 7], 6, ignore_eos=True)
    world.scheduler.add(again)
    while again.n_output < 2:
        world.loop.step()
    world.executor.lose_next = True
    world.run()
    assert said(again) == expected_output([*PROMPT, 7], 6, ignore_eos=True)
    assert (again.restarts, again.reuse.reused) == (1, 8)


def test_who_loses_memory_too_often_without_tiers_is_told_and_the_others_go_on() -> None:
    world = make_world(overlap=False)
    let_fail(world)
    early, late = (world.request(rid, [*PROMPT, rid], 30, ignore_eos=True) for rid in (0, 1))
    world.scheduler.add(early)
    for n in range(MOST_RESTARTS + 1):
        if n == MOST_RESTARTS:
            world.scheduler.add(late)
        told = early.n_output
        while early.n_output == told or (n == MOST_RESTARTS and not late.n_output):
            world.loop.step()
        world.executor.lose_next = True
        world.loop.step()
    world.run()
    assert early.finish is not None
    assert early.finish.reason == "error"
    assert early.finish.message == (
        "memory could not be copied (made to lose memory), and the request was begun 4 times: the log has the reason."
    )
    assert said(late) == expected_output([*PROMPT, 1], 30, ignore_eos=True)
    assert late.restarts == 1


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_that_fail_for_ever_cost_the_tiers_and_no_answer(kind, policy) -> None:
    storage, prompts = FakeStorage(), [[n % 9 + 1, n // 9 + 1, *PROMPT] for n in range(40)]
    before = small_world(storage=storage, host_policy=policy)
    for rid, prompt in enumerate(prompts[:20]):
        before.run(before.request(rid, prompt, 3))
    world = small_world(storage=storage, host_policy=policy)
    world.executor.refuses = KINDS[kind]
    for rid, prompt in enumerate([*prompts, *prompts]):
        asked = world.request(rid, prompt, 3, ignore_eos=True)
        world.run(asked)
        assert (asked.finish.reason, said(asked)) == ("length", expected_output(prompt, 3, ignore_eos=True))
        if rid % 3 == 2:
            world.tree.evict(pages=99, slots=99)
    assert MOST_RESTARTS < len(world.loop.failures) < len(prompts) / 2
    assert world.tree.tier is None
    assert world.scheduler.book.storage is None
    assert not storage.waiting


def test_tiers_stay_while_memory_comes_back_between_the_failures() -> None:
    world = small_world()
    for rid in range(4 * MOST_RESTARTS):
        world.executor.lose_next = True
        world.run(world.request(3 * rid, PROMPT, 2))
        world.tree.evict(pages=99, slots=99)
        again = world.request(3 * rid + 1, [*PROMPT, 7], 2)
        world.run(again)
        assert again.reuse.from_host
    assert world.tree.tier is not None


@pytest.mark.parametrize("overlap", [True, False])
def test_one_request_that_is_begun_too_often_costs_the_tiers_whatever_others_restore(overlap) -> None:
    world = small_world(overlap=overlap)
    long = world.request(0, [1, 2], 60, ignore_eos=True)
    world.scheduler.add(long)
    rid = 1
    while world.tree.tier is not None:
        for prompt in (PROMPT, [*PROMPT, 7]):
            other = world.request(rid, prompt, 2)
            world.scheduler.add(other)
            while other.finish is None:
                world.loop.step()
            world.tree.evict(pages=99, slots=99)
            rid += 1
        assert other.reuse.from_host
        told = long.restarts
        world.executor.lose_next = True
        while long.restarts == told:
            world.loop.step()
    assert long.restarts == MOST_RESTARTS + 1
    world.run()
    assert said(long) == expected_output([1, 2], 60, ignore_eos=True)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_that_fills_the_pool_is_begun_again(overlap) -> None:
    """Prompt 8 of 12 tokens: it can say five, the last of which has no KV. Whenever memory is lost, it says these and then why."""
    expected = expected_output(PROMPT, 20, ignore_eos=True)
    for losing in range(9):
        world = small_world(n_pages=12, overlap=overlap)
        world.executor.lose_at = losing
        asked = world.request(0, PROMPT, 20, ignore_eos=True)
        world.run(asked, world.request(1, [2], 3))
        assert asked.finish is not None
        assert asked.finish.out_of_memory
        assert said(asked) == expected[:5]
