"""Hand-computed tiny worlds: three slots, eleven pages, steps of one second."""

from __future__ import annotations

import pytest

from tests.replay_worlds import Turn, keys, numbers, one_second_steps, replay, run, session, trace, tree_of
from twinpool.replay.record import RequestRecord
from twinpool.replay.run import Run
from twinpool.replay.trace import Trace
from twinpool.replay.traffic import ClosedTraffic

# One request at a time, one page a token, a checkpoint at every end.
TINY = {
    "n_slots": 3,
    "n_pages": 11,
    "page_size": 1,
    "strategy": "no_buffer",
    "overlap": False,
    "chunk": 4,
    "max_running": 1,
}


def by_name(done: Run) -> dict[tuple[str, int], RequestRecord]:
    return {(record.session, record.index): record for record in done.recorder.records}


def world(recorded: Trace, **changes: object) -> dict[tuple[str, int], RequestRecord]:
    return by_name(run(recorded, cost=one_second_steps(), **{**TINY, **changes}))


def moments(record: RequestRecord) -> tuple[float | None, ...]:
    return (record.arrival_s, record.scheduled_s, record.first_token_s, record.finished_s)


@pytest.mark.parametrize("skip", [True, False])
def test_a_request_takes_a_step_for_each_chunk_and_each_token_after_the_first(skip: bool) -> None:
    recorded = trace(session("a", Turn(blocks=numbers(6), input_tokens=6, output_tokens=4, arrival_s=0.5)))
    done = run(recorded, cost=one_second_steps(), skip=skip, **TINY)
    (record,) = done.recorder.records
    # Tokens 0-3, 4-5 and the first token; then three decode steps.
    assert moments(record) == (0.5, 0.5, 2.5, 5.5)
    assert (done.steps, done.prefilled_tokens, done.duration_s) == (5, 6, 5.5)
    assert (record.reused, record.gaps) == (0, (("new", 6),))


def test_with_overlap_the_end_is_told_a_step_late_and_the_first_token_is_not() -> None:
    recorded = trace(session("a", Turn(blocks=numbers(4), input_tokens=4, output_tokens=1)))
    record = world(recorded, strategy="extra_buffer", overlap=True, n_slots=5)["a", 0]
    assert moments(record) == (0.0, 0.0, 1.0, 1.0)


def test_a_second_request_waits_for_the_slot_of_the_first() -> None:
    recorded = trace(
        session("a", Turn(blocks=numbers(4), input_tokens=4, output_tokens=3)),
        session("b", Turn(blocks=numbers(4, first=10), input_tokens=4, output_tokens=1, arrival_s=0.25)),
    )
    records = world(recorded)
    assert moments(records["a", 0]) == (0.0, 0.0, 1.0, 3.0)
    assert moments(records["b", 0]) == (0.25, 3.0, 4.0, 4.0)


def test_a_request_arrives_when_it_is_due_not_when_it_is_seen() -> None:
    """It comes 0.4 s into a step of a running request and is planned at the step's end."""
    recorded = trace(
        session("a", Turn(blocks=numbers(2), input_tokens=2, output_tokens=5)),
        session("b", Turn(blocks=numbers(2, first=10), input_tokens=2, output_tokens=1, arrival_s=1.4)),
    )
    records = world(recorded, max_running=2, n_slots=6)
    assert moments(records["b", 0]) == (1.4, 2.0, 3.0, 3.0)


def test_the_next_turn_resumes_from_the_end_of_the_answer() -> None:
    recorded = trace(
        session(
            "a",
            Turn(blocks=numbers(4), input_tokens=4, output_tokens=2),
            Turn(blocks=numbers(8), input_tokens=8, output_tokens=1, arrival_s=10.0),
        )
    )
    record = world(recorded)["a", 1]
    # Computed: the prompt and the first token of the answer; the second was sampled and never fed back.
    assert (record.kv_matched, record.reused, record.gaps) == (5, 5, (("new", 3),))
    assert moments(record) == (10.0, 10.0, 11.0, 11.0)


def test_eleven_pages_hold_two_prompts_and_the_third_evicts_the_oldest() -> None:
    """5 + 5 pages are cached; the third prompt needs 4 and finds 1, so the first one's leaf goes, whole."""
    turns = [
        ("a", numbers(5), 0.0), ("b", numbers(5, first=10), 10.0), ("c", numbers(4, first=20), 20.0),
        ("b2", numbers(6, first=10), 30.0), ("a2", numbers(5), 40.0),
    ]  # fmt: skip
    sessions = [session(name, Turn(blocks=ids, input_tokens=len(ids), arrival_s=at_s)) for name, ids, at_s in turns]
    done = run(trace(*sessions), cost=one_second_steps(), **{**TINY, "chunk": 8, "n_slots": 4})
    records = by_name(done)
    assert [records[name, 0].reused for name, _, _ in turns] == [0, 0, 0, 5, 0]
    assert records["a2", 0].gaps == (("kv_evicted", 4), ("new", 1))
    tree = done.scheduler.book.tree
    # a for c; then c (4) for a2's five pages: 1 of 11 was free, 6 are b's.
    assert (tree.evictions.n_kv_tokens, tree.evictions.n_states) == (9, 2)
    assert sorted(depth for _, depth, _, _ in tree_of(tree)) == [5, 5, 6]


def test_three_slots_hold_two_states_beside_the_working_one() -> None:
    """Pages are ample: it is the state of the oldest prompt that goes, and its leaf with it."""
    turns = [("a", 0, 0.0), ("b", 10, 10.0), ("c", 20, 20.0), ("a2", 0, 30.0), ("c2", 20, 40.0)]
    sessions = [
        session(name, Turn(blocks=numbers(3, first=first), input_tokens=3, arrival_s=at_s)) for name, first, at_s in turns
    ]  # fmt: skip
    done = run(trace(*sessions), cost=one_second_steps(), **{**TINY, "n_pages": 99})
    records = by_name(done)
    assert [records[name, 0].kv_matched for name, _, _ in turns] == [0, 0, 0, 0, 2]
    assert records["a2", 0].gaps == (("kv_evicted", 2), ("new", 1))
    assert records["c2", 0].gaps == (("no_checkpoint", 2), ("new", 1))  # the state is after three tokens, not two
    # a for c, b for a2; c2 leaves a state where it parts from c (c goes) and one at its end (a2 goes).
    assert done.scheduler.book.tree.evictions.n_states == 4


def test_a_prompt_larger_than_the_pool_is_refused_counted_and_the_session_goes_on() -> None:
    recorded = trace(
        session(
            "a",
            Turn(blocks=numbers(11), input_tokens=11),
            Turn(blocks=numbers(3, first=20), input_tokens=3, think_s=2.0),
        )
    )
    traffic = ClosedTraffic(recorded, alive=1, idle_cap_s=9.0, seed=0, start_anywhere=False)
    records = by_name(run(recorded, traffic=traffic, cost=one_second_steps(), **TINY))
    assert records["a", 0].refusal == (
        "the prompt has 11 tokens, but the KV pool holds 11: at most 10 prompt tokens fit (server flags --mem-fraction-static, "
        "--max-total-tokens, --mamba-full-memory-ratio)."
    )
    assert moments(records["a", 0]) == (0.0, None, None, None)
    assert moments(records["a", 1]) == (2.0, 2.0, 3.0, 3.0)


def test_refused_prompts_follow_each_other_at_once_while_others_run() -> None:
    too_long = [Turn(blocks=numbers(11), input_tokens=11, think_s=0.0) for _ in range(3)]
    recorded = trace(
        session("b", Turn(blocks=numbers(4, first=50), input_tokens=4, output_tokens=5)),
        session("a", *too_long, Turn(blocks=numbers(3, first=20), input_tokens=3, think_s=0.5)),
    )
    traffic = ClosedTraffic(recorded, alive=2, idle_cap_s=9.0, seed=0, start_anywhere=False)
    records = by_name(run(recorded, traffic=traffic, cost=one_second_steps(), **TINY))
    assert [records["a", index].arrival_s for index in range(4)] == [0.0, 0.0, 0.0, 0.5]


def test_an_answer_that_outgrows_the_pool_ends_with_a_sentence_and_the_session_goes_on() -> None:
    recorded = trace(
        session(
            "a",
            Turn(blocks=numbers(8), input_tokens=8, output_tokens=9),
            Turn(blocks=numbers(3, first=20), input_tokens=3, think_s=2.0),
        )
    )
    traffic = ClosedTraffic(recorded, alive=1, idle_cap_s=9.0, seed=0, start_anywhere=False)
    records = by_name(run(recorded, traffic=traffic, cost=one_second_steps(), **TINY))
    assert records["a", 0].refusal.startswith("Out of memory even after retracting all other requests")
    # Prefill in two steps, then pages 9, 10 and 11: the next token has none.
    assert (records["a", 0].output_tokens, records["a", 0].finished_s) == (4, 5.0)
    assert (records["a", 1].arrival_s, records["a", 1].refusal) == (7.0, "")


def test_an_answer_of_no_tokens_is_one_step() -> None:
    recorded = trace(session("a", Turn(blocks=numbers(2), input_tokens=2, output_tokens=0)))
    record = world(recorded)["a", 0]
    assert (record.output_tokens, record.finished_s) == (1, 1.0)


def test_without_costs_no_step_takes_time_and_counts_are_the_same() -> None:
    recorded = trace(
        session(
            "a",
            Turn(blocks=numbers(4), input_tokens=4, output_tokens=2),
            Turn(blocks=numbers(8), input_tokens=8, output_tokens=1, arrival_s=10.0),
        )
    )
    records = by_name(run(recorded, cost=None, **TINY))
    assert moments(records["a", 0]) == (0.0, 0.0, 0.0, 0.0)
    assert (records["a", 1].reused, moments(records["a", 1])) == (5, (10.0, 10.0, 10.0, 10.0))


def test_observers_see_every_plan_and_its_time() -> None:
    recorded = trace(session("a", Turn(blocks=numbers(6), input_tokens=6, output_tokens=4)))
    machine = replay(recorded, cost=one_second_steps(), **TINY)
    found: list[tuple[int, float]] = []
    machine.observers.append(lambda plan, result: found.append((plan.repeat, result.duration_s)))
    done = machine.run()
    assert found == [(1, 1.0), (1, 1.0), (3, 3.0)]
    assert (done.plans, done.steps) == (3, 5)
    assert [(one.session, one.index) for one in done.recorder.records] == keys(recorded)


@pytest.mark.parametrize("skip", [True, False])
def test_a_session_goes_on_when_its_answer_ends_for_want_of_kv(skip: bool) -> None:
    long = Turn(blocks=numbers(4), input_tokens=4, output_tokens=9)
    other = session(
        "b", Turn(blocks=numbers(4, first=50), input_tokens=4, output_tokens=2)
    )  # starts in the step that ends `long`
    recorded = trace(session("a", long, Turn(blocks=numbers(5), input_tokens=5, output_tokens=1)), other)
    traffic = ClosedTraffic(recorded, alive=2, idle_cap_s=5.0, seed=0, start_anywhere=False)
    done = by_name(replay(recorded, traffic=traffic, cost=one_second_steps(), skip=skip, **TINY).run())
    assert done["a", 0].refusal.startswith("Out of memory")
    assert done["a", 0].finished_s == done["a", 1].arrival_s
