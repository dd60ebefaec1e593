"""Checkpoints of running requests: where they are written, what a finish leaves, what a short pool costs (reference 9.2, 28-32)."""

from __future__ import annotations

import pytest

from tests.worlds import World, expected_output, make_world


def checkpoints(world: World, rid: int) -> list[int]:
    """Lengths at which rows of a request wrote a checkpoint, in order."""
    return [r.checkpoint_at for plan in world.executor.plans for r in plan.rows if r.rid == rid and r.checkpoint_at]


def reused(world: World, rid: int, prompt: list[int]) -> int:
    request = world.request(rid, prompt, 1)
    world.run(request)
    return request.reuse.reused


@pytest.mark.parametrize("strategy", ["extra_buffer", "extra_buffer_lazy"])
def test_decode_is_tracked_exactly_at_multiples_of_the_track_grid(strategy: str) -> None:
    world = make_world(n_pages=200, strategy=strategy, grid=4, track=12, chunk=64)
    world.run(world.request(0, [1] * 6, 45, ignore_eos=True))
    # The prompt leaves one at 4; decode goes from 6 to 50 computed tokens.
    assert checkpoints(world, 0) == [4, 12, 24, 36, 48]


@pytest.mark.parametrize(
    ("strategy", "overlap"),
    [("extra_buffer", True), ("extra_buffer", False), ("extra_buffer_lazy", True), ("no_buffer", False)],
)
def test_a_finished_request_leaves_its_end_when_that_is_a_whole_page(strategy: str, overlap: bool) -> None:
    world = make_world(n_pages=200, strategy=strategy, overlap=overlap, chunk=64)
    prompt = [3, 1, 4, 1, 5]
    world.run(world.request(0, prompt, 9, ignore_eos=True))
    history = prompt + expected_output(prompt, 9, ignore_eos=True)
    assert reused(world, 1, [*history, 9]) == len(history) - 1
    pages, slots = world.scheduler.counts()
    assert (pages.held, slots.held) == (0, 0)


def test_inside_a_page_it_leaves_the_last_tracked_position() -> None:
    world = make_world(n_pages=60, page_size=4, grid=4, track=8, chunk=64)
    prompt = [3, 1, 4, 1, 5]
    world.run(world.request(0, prompt, 14, ignore_eos=True))  # 18 tokens computed: tracked at 8 and 16
    assert checkpoints(world, 0) == [4, 8, 16]
    history = prompt + expected_output(prompt, 14, ignore_eos=True)
    assert reused(world, 1, [*history, 9]) == 16


def test_shorter_than_a_page_leaves_nothing() -> None:
    world = make_world(n_pages=60, page_size=8, grid=8, track=8, chunk=64)
    world.run(world.request(0, [3, 1], 3, ignore_eos=True))
    assert world.tree.n_nodes == 0
    assert world.pages.available == 60


def test_lazy_takes_a_second_slot_only_at_a_boundary_and_gives_it_back() -> None:
    world = make_world(n_pages=200, n_slots=12, strategy="extra_buffer_lazy", grid=4, track=8, chunk=64)
    world.scheduler.add(world.request(0, [1] * 3, 40, ignore_eos=True))
    seen = set()
    while not world.loop.idle:
        world.loop.step()
        world.scheduler.check()
        for sequence in world.scheduler.book.running.values():
            seen.add(len(sequence.tracks))
    assert seen == {1, 2}


def test_lazy_without_a_free_slot_forgets_the_older_checkpoint_and_goes_on() -> None:
    world = make_world(n_pages=200, n_slots=2, strategy="extra_buffer_lazy", grid=4, track=8, chunk=64)
    request = world.request(0, [1] * 3, 40, ignore_eos=True)
    world.run(request)
    said = [int(t) for t in request.tokens[3 : request.n_tokens]]
    assert said == expected_output([1] * 3, 40, ignore_eos=True)
    assert checkpoints(world, 0) == [8, 16, 24, 32, 40]


def test_a_pool_without_room_for_a_track_slot_skips_the_checkpoint_and_counts_it() -> None:
    world = make_world(n_pages=200, n_slots=3, grid=4, chunk=4, track=64)
    prompt = [2] * 23
    request = world.request(0, prompt, 2, ignore_eos=True)
    world.run(request)
    assert [int(t) for t in request.tokens[23 : request.n_tokens]] == expected_output(prompt, 2, ignore_eos=True)
    assert world.scheduler.book.totals.skipped_checkpoints + len(checkpoints(world, 0)) == 5


def test_a_long_prompt_is_matchable_while_it_is_still_being_read() -> None:
    world = make_world(n_pages=300, n_slots=30, grid=4, chunk=8, overlap=False, max_running=2)
    prompt = [k % 7 for k in range(60)]
    world.scheduler.add(world.request(0, prompt, 1))
    for _ in range(4):
        world.loop.step()
    follower = world.request(1, [*prompt[:30], 8, 8], 1)
    world.run(follower)
    assert follower.reuse.reused >= 24


def test_path_cap_bounds_what_one_long_prompt_keeps() -> None:
    kept = {}
    for cap in (-1, 2):
        world = make_world(n_pages=300, n_slots=40, grid=4, chunk=8, max_states_per_path=cap)
        world.run(world.request(0, [k % 7 for k in range(64)], 1))
        kept[cap] = world.tree.evictable_slots
    assert kept[-1] >= 8
    assert kept[2] == 2


def test_a_published_prefix_carries_the_priority_of_its_request() -> None:
    world = make_world(n_pages=60, chunk=64)
    request = world.request(0, [1, 2, 3, 4, 5], 2, ignore_eos=True)
    request.priority = 7
    world.run(request)
    leaf = world.tree.root
    while leaf.children:
        (leaf,) = leaf.children.values()
    assert leaf.priority == 7
