"""Scheduling rules in worlds small enough to count by hand."""

from __future__ import annotations

import pytest

from tests.worlds import EOS, expected_output, make_world
from twinpool.errors import BadRequest, QueueFull
from twinpool.request import Finish
from twinpool.sched.chunking import chunk_end

SHARED = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def said(request) -> list[int]:
    return [int(t) for t in request.tokens[request.prompt_len : request.n_tokens]]


def rows_of(world, rid: int) -> list[tuple[int, int]]:
    return [(row.start, row.end) for plan in world.executor.plans for row in plan.rows if row.rid == rid]


def test_a_conversation_rereads_only_what_is_new() -> None:
    world = make_world(n_pages=400, n_slots=40, chunk=64, grid=4, track=256)
    history: list[int] = []
    for turn in range(10):
        prompt = [*history, turn, 3, 5]
        request = world.request(turn, prompt, 7, ignore_eos=True)
        world.run(request)
        assert said(request) == expected_output(prompt, 7, ignore_eos=True)
        # All of the previous turn but its last token, which was said and never read, is resumed.
        assert request.reuse.reused == max(0, len(history) - 1)
        history = prompt + said(request)


def test_with_overlap_the_end_of_turn_token_is_resumed_too() -> None:
    prompt = next([1, 2, k] for k in range(11) if expected_output([1, 2, k], 50)[-1] == EOS)
    for overlap, unread in ((True, 0), (False, 1)):
        world = make_world(n_pages=200, n_slots=40, overlap=overlap)
        first = world.request(0, prompt, 50)
        world.run(first)
        assert first.finish == Finish("stop", matched=EOS)
        history = prompt + said(first)
        second = world.request(1, [*history, 4, 4], 3)
        world.run(second)
        assert second.reuse.reused == len(history) - unread


def test_prefill_leaves_checkpoints_on_the_grid_and_at_forks() -> None:
    world = make_world(n_pages=200, n_slots=60, chunk=64, grid=4)
    world.run(world.request(0, [*SHARED, 0, 0, 0, 0, 0, 0], 1))
    fork = world.request(1, [*SHARED, 1, 1, 1, 1, 1, 1, 1], 1)
    world.run(fork)
    # KV of ten shared tokens matched; no state before 16, so all of it is computed again, and a state stays at floor(10/4)*4.
    assert (fork.reuse.kv_matched, fork.reuse.reused) == (10, 0)
    assert dict(fork.reuse.gaps) == {"no_checkpoint": 8, "below_grid": 2, "new": 7}
    third = world.request(2, [*SHARED, 2, 2, 2, 2], 1)
    world.run(third)
    assert third.reuse.reused == 8


def test_no_buffer_leaves_a_state_where_prompts_part() -> None:
    world = make_world(n_pages=200, n_slots=60, chunk=64, strategy="no_buffer", overlap=False)
    for rid, tail in enumerate(([0, 0, 0], [1, 1, 1], [2, 2, 2])):
        request = world.request(rid, SHARED + tail, 1)
        world.run(request)
    assert request.reuse.reused == len(SHARED)
    assert rows_of(world, 1) == [(0, 10), (10, 13)]


@pytest.mark.parametrize(
    ("start", "target", "budget", "expected"),
    [
        (0, 100, 200, 100),
        (0, 100, 30, 28),
        (28, 100, 30, 56),
        (0, 100, 3, 2),
        (0, 100, 1, 0),
        (30, 100, 5, 32),
        (30, 31, 1, 31),
    ],
)
def test_chunks_are_cut_on_the_grid_when_that_makes_progress(start, target, budget, expected) -> None:
    assert chunk_end(start=start, target=target, budget_tokens=budget, page_size=2, grid_tokens=4) == expected


def test_decode_rows_come_before_prefill_chunks_in_one_budget() -> None:
    world = make_world(n_pages=200, n_slots=60, chunk=8, grid=4, max_running=4)
    world.scheduler.add(world.request(0, [1, 2], 20, ignore_eos=True))
    world.loop.step()
    world.scheduler.add(world.request(1, list(range(10)) * 3, 2))
    for _ in range(6):
        world.loop.step()
    mixed = [plan for plan in world.executor.plans if len(plan.rows) == 2]
    assert mixed
    for plan in mixed:
        assert [row.rid for row in plan.rows] == [0, 1]
        assert plan.n_tokens <= 8
    world.run()


def test_states_cap_the_running_requests_while_kv_idles() -> None:
    world = make_world(n_pages=500, n_slots=6, max_running=8)  # 1 working + 2 tracks each
    requests = [world.request(rid, [rid, 1, 2], 5) for rid in range(6)]
    for request in requests:
        world.scheduler.add(request)
    world.loop.step()
    assert world.scheduler.n_running == 2
    assert world.scheduler.n_waiting == 4
    world.run()
    assert [said(r) for r in requests] == [expected_output([r.rid, 1, 2], 5) for r in requests]


def test_a_request_counts_as_one_use_of_its_prefix_however_long_it_waits() -> None:
    """lfu, slru and write_through_selective go by how often a prefix was used."""
    world = make_world(n_pages=500, n_slots=5, max_running=8)  # room for one request and a checkpoint or two
    world.run(world.request(1, [1, 2, 3, 4], 2))
    cached = world.tree.match(world.request(9, [1, 2, 3, 4, 5], 1).key(5), limit_tokens=4, touch=False).node
    uses = cached.hits
    world.scheduler.add(world.request(2, [7, 7, 7], 12, ignore_eos=True))
    world.loop.step()
    world.scheduler.add(world.request(3, [1, 2, 3, 4, 5], 2))
    for _ in range(6):
        world.loop.step()
        assert world.scheduler.n_waiting == 1
    assert cached.hits == uses + 1


@pytest.mark.parametrize("strategy", ["extra_buffer", "extra_buffer_lazy", "no_buffer"])
def test_retraction_publishes_and_changes_no_token(strategy: str) -> None:
    world = make_world(
        n_pages=880,
        n_slots=60,
        strategy=strategy,
        overlap=strategy != "no_buffer",
        schedule_conservativeness=0.0,
        chunk=64,
    )
    prompts = [[rid, *([5, 6, 7] * 66)] for rid in range(4)]
    requests = [world.request(rid, prompt, 30, ignore_eos=True) for rid, prompt in enumerate(prompts)]
    world.run(*requests)
    retracted = world.scheduler.book.totals.retracted_requests
    assert retracted > 0
    for request, prompt in zip(requests, prompts, strict=True):
        assert said(request) == expected_output(prompt, 30, ignore_eos=True)
    # Most of a retracted request (about 220 tokens) is resumed from what it left in the tree.
    computed = sum(plan.n_tokens for plan in world.executor.plans)
    assert computed < sum(r.n_tokens for r in requests) + 120 * retracted


def test_the_last_request_that_runs_out_is_told_what_fits() -> None:
    world = make_world(n_pages=20, n_slots=8)
    request = world.request(0, [1, 2, 3, 4], 100, ignore_eos=True)
    world.run(request)
    assert request.finish is not None
    assert request.finish.reason == "error"
    assert request.finish.message.startswith(
        "Out of memory even after retracting all other requests in the decode batch. Aborting the last request."
    )
    assert "at most 16 tokens" in request.finish.message
    assert request.finish.out_of_memory
    assert said(request) == expected_output([1, 2, 3, 4], 100, ignore_eos=True)[: len(said(request))]


def test_what_can_never_fit_is_refused_at_once() -> None:
    world = make_world(n_pages=20, n_slots=8, context_len=64)
    with pytest.raises(BadRequest, match="the KV pool holds 20: at most 19 prompt tokens fit"):
        world.scheduler.add(world.request(0, [1] * 20, 1))
    with pytest.raises(BadRequest, match=r"the context is 64 tokens: .* at most 60 tokens"):
        world.scheduler.add(world.request(1, [1] * 4, 61))
    with pytest.raises(BadRequest, match=r"the context is 64 tokens: shorten the prompt \(server flag"):
        world.scheduler.add(world.request(2, [1] * 64, 1))
    assert not world.scheduler.has_work


def test_the_queue_limit_and_cancel_while_waiting() -> None:
    world = make_world(max_running=1)
    object.__setattr__(world.scheduler.shape, "max_queued_requests", 2)
    for rid in range(2):
        world.scheduler.add(world.request(rid, [1, 2], 2))
    with pytest.raises(QueueFull, match="--max-queued-requests allows 2"):
        world.scheduler.add(world.request(2, [1, 2], 2))
    assert world.scheduler.abort(1)
    (delta,) = world.scheduler.take_deltas()
    assert delta.finish is not None
    assert delta.finish.reason == "abort"
    assert not world.scheduler.abort(1)
    world.run()


def test_longest_prefix_first() -> None:
    world = make_world(n_pages=300, n_slots=60, max_running=1, schedule_policy="lpm")
    world.run(world.request(0, [7] * 12, 1))
    cold, warm = world.request(1, [3] * 12, 1), world.request(2, [*([7] * 12), 1, 2], 1)
    world.run(cold, warm)
    assert warm.first_scheduled_s is not None
    order = [plan.joined[0].rid for plan in world.executor.plans if plan.joined]
    assert order == [0, 2, 1]


def test_a_failing_step_ends_its_requests_and_no_others() -> None:
    world = make_world(n_pages=100, n_slots=20, overlap=False)
    victim = world.request(0, [1, 2, 3], 4)
    world.scheduler.add(victim)
    good_submit = world.executor.submit

    class Broken:
        def result(self):
            raise RuntimeError("boom")

    world.loop._executor = type("E", (), {"submit": staticmethod(lambda plan: Broken())})()
    world.loop.step()
    assert victim.finish is not None
    assert "boom" in victim.finish.message
    assert [str(f) for f in world.loop.failures] == ["boom"]
    world.loop._executor = type("E", (), {"submit": staticmethod(good_submit)})()
    survivor = world.request(1, [1, 2, 3], 4)
    world.run(survivor)
    assert said(survivor) == expected_output([1, 2, 3], 4)
    pages, slots = world.scheduler.counts()
    assert pages.held == slots.held == 0
