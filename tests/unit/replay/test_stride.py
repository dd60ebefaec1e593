"""Where runs of decode steps end, so that they come out as single steps do."""

from __future__ import annotations

from tests.replay_worlds import Turn, numbers, one_second_steps, replay, session, trace
from twinpool.step import StepPlan


def repeats(*, output_tokens: int, n_sessions: int = 1, late_s: float | None = None, **world: object) -> list[int]:
    """Steps of each plan after the prefills of equal requests (prompts of two tokens) that arrive at once."""
    turn = {"input_tokens": 2, "output_tokens": output_tokens}
    sessions = [
        session(f"s{number}", Turn(blocks=numbers(2, first=10 * number), **turn)) for number in range(n_sessions)
    ]
    if late_s is not None:
        sessions.append(session("late", Turn(blocks=[900, 901], arrival_s=late_s, input_tokens=2)))
    options = {"radix": False, "overlap": False, "n_pages": 99, "chunk": 64, **world}
    machine = replay(trace(*sessions), cost=one_second_steps(), **options)
    plans: list[StepPlan] = []
    machine.observers.append(lambda plan, result: plans.append(plan))
    machine.run()
    return [plan.repeat for plan in plans if plan.n_decode_rows]


def test_a_lone_request_is_decoded_in_one_go() -> None:
    assert repeats(output_tokens=21) == [20]


def test_an_arrival_ends_a_run_where_it_is_seen() -> None:
    # Prefill to 1 s; the request of 6.5 s is seen at 7 s, and its prefill goes with a step of decode.
    assert repeats(output_tokens=21, late_s=6.5) == [6, 1, 13]


def test_a_queue_that_could_move_is_tried_at_every_step_and_a_full_house_is_not() -> None:
    assert repeats(output_tokens=11, n_sessions=2, max_running=1) == [10, 10]


def test_a_run_takes_what_the_pool_has() -> None:
    # 20 pages: 2 + 2 for the prompts, 16 for 8 steps of both.
    assert repeats(output_tokens=9, n_sessions=2, n_pages=20) == [8]


def test_a_run_takes_one_checkpoint_of_a_request_at_most() -> None:
    world = {"radix": True, "strategy": "extra_buffer", "track": 8}
    assert repeats(output_tokens=21, **world) == [8, 8, 4]
    # With overlap a checkpoint in flight keeps its slot until it is committed, so no second one is planned before.
    assert repeats(output_tokens=21, overlap=True, **world) == [1, 7, 5, 7]


def test_the_lazy_strategy_takes_its_checkpoint_in_the_last_step() -> None:
    world = {"radix": True, "strategy": "extra_buffer_lazy", "track": 8}
    assert repeats(output_tokens=21, **world) == [6, 8, 6]
