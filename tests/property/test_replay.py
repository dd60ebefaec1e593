"""Replay on random traffic: skipping steps changes nothing, memory is conserved at every step, and no request is lost."""

from __future__ import annotations

import dataclasses
import itertools

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from tests.replay_worlds import Turn, keys, one_second_steps, replay, session, trace, tree_of, uneven_steps
from twinpool.replay.record import RequestRecord
from twinpool.replay.run import Replay, Run
from twinpool.replay.trace import Session, Trace, TraceRequest
from twinpool.replay.traffic import ClosedTraffic, OpenTraffic, Traffic, parents

# (strategy, overlap, radix): all that the scheduler knows.
MODES = [
    ("extra_buffer", True, True), ("extra_buffer", False, True), ("extra_buffer_lazy", True, True),
    ("extra_buffer_lazy", False, True), ("no_buffer", False, True), ("extra_buffer", True, False),
    ("extra_buffer", False, False),
]  # fmt: skip
COSTS = {"count": None, "even": one_second_steps(), "uneven": uneven_steps()}
SECONDS = st.one_of(st.just(0.0), st.integers(0, 40).map(float), st.floats(0, 40))


@st.composite
def sessions(draw: st.DrawFn) -> Trace:
    """Conversations that extend, forget or repeat their prompts, some with a sub-agent, over a few shared openings."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    found: list[Session] = []
    fresh = 100
    for number in range(draw(st.integers(1, 5))):
        blocks = draw(st.sampled_from([[], [1], [1, 2, 3], [1, 2, 4, 5]]))
        turns = []
        at_s = draw(SECONDS)
        for _ in range(draw(st.integers(1, 4))):
            grown = draw(st.integers(1, 5))
            blocks = [*blocks[: draw(st.sampled_from([100, 100, 100, 2]))], *range(fresh, fresh + grown)]
            fresh += grown
            tokens = len(blocks) * block_size - draw(st.integers(0, block_size - 1))
            turns.append(
                Turn(
                    blocks=blocks, input_tokens=tokens, output_tokens=draw(st.integers(0, 30)), arrival_s=at_s,
                    think_s=draw(st.one_of(st.none(), SECONDS)), api_time_s=draw(st.one_of(st.none(), SECONDS)),
                )
            )  # fmt: skip
            at_s += draw(SECONDS)
        parent = draw(st.sampled_from([None, None, *(one.id for one in found)]))
        found.append(session(f"s{number}", *turns, parent=parent))
    return trace(*found, block_size=block_size)


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, object]:
    """A machine whose pools are too small for most of what comes."""
    strategy, overlap, radix = draw(st.sampled_from(MODES))
    page_size = 1 if strategy == "no_buffer" else draw(st.sampled_from([1, 2, 4]))
    n_running = draw(st.integers(1, 4))
    return {
        "strategy": strategy, "overlap": overlap, "radix": radix, "page_size": page_size,
        "n_pages": draw(st.integers(48, 160)) // page_size, "max_running": n_running,
        "n_slots": n_running * 3 + 1 + draw(st.integers(0, 12)), "chunk": draw(st.sampled_from([4, 8, 13, 64, None])),
        "grid": 4, "track": draw(st.sampled_from([4, 8, 16])), "schedule_policy": draw(st.sampled_from(["fcfs", "lpm"])),
        "max_states_per_path": draw(st.sampled_from([-1, -1, 1, 2])),
        "schedule_conservativeness": draw(st.sampled_from([0.0, 0.3, 1.0])),
    }  # fmt: skip


@st.composite
def arrivals(draw: st.DrawFn) -> dict[str, object]:
    """How requests arrive: recorded times (also with no step taking time) or a closed loop."""
    if draw(st.booleans()):
        return {"speed": draw(st.sampled_from([0.5, 1.0, 3.0]))}
    return {
        "alive": draw(st.integers(1, 4)), "idle_cap_s": draw(st.sampled_from([0.0, 3.0, 100.0])),
        "seed": draw(st.integers(0, 3)), "start_anywhere": draw(st.booleans()),
        "default_think_s": draw(st.sampled_from([0.0, 0.7])),
    }  # fmt: skip


def traffic_of(recorded: Trace, options: dict[str, object]) -> Traffic:
    return OpenTraffic(recorded, **options) if "speed" in options else ClosedTraffic(recorded, **options)


def made(recorded: Trace, world: dict[str, object], options: dict[str, object], *, cost: str, skip: bool) -> Replay:
    return replay(recorded, traffic=traffic_of(recorded, options), cost=COSTS[cost], skip=skip, **world)


def outcome(run: Run) -> dict[str, object]:
    """Everything a run says, without its samples and the number of its plans."""
    book = run.scheduler.book
    return {
        "records": run.recorder.records,
        "totals": dataclasses.asdict(book.totals),
        "evicted": book.tree.evictions.copy(),
        "tree": tree_of(book.tree),
        "pools": [counts.free for counts in run.scheduler.counts()],
        "peak": run.recorder.peak_running,
        "steps": (run.steps, run.prefilled_tokens, run.duration_s),
    }


def recorded_request(recorded: Trace, name: str, index: int) -> TraceRequest:
    return next(one for one in recorded.requests() if (one.session, one.index) == (name, index))


def root_of(name: str, parent_of: dict[str, str | None]) -> str:
    while (parent := parent_of[name]) is not None:
        name = parent
    return name


def end_of(record: RequestRecord) -> float:
    """When its session could go on: a refused request ends as it arrives."""
    return record.arrival_s if record.finished_s is None else record.finished_s


SETTINGS = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@SETTINGS
@given(recorded=sessions(), world=worlds(), options=arrivals(), cost=st.sampled_from(sorted(COSTS)))
def test_skipping_steps_changes_nothing(recorded, world, options, cost) -> None:
    stepped = made(recorded, world, options, cost=cost, skip=False).run()
    skipped = made(recorded, world, options, cost=cost, skip=True).run()
    assert outcome(skipped) == outcome(stepped)
    assert skipped.plans <= stepped.plans == stepped.steps


@SETTINGS
@given(recorded=sessions(), world=worlds(), options=arrivals(), cost=st.sampled_from(sorted(COSTS)), skip=st.booleans())
def test_every_request_ends_once_and_memory_is_conserved_at_every_step(recorded, world, options, cost, skip) -> None:
    machine = made(recorded, world, options, cost=cost, skip=skip)
    moments = [0.0]

    def look(plan, result) -> None:
        machine.scheduler.check()
        moments.append(machine.scheduler.book.clock.now_s())

    machine.observers.append(look)
    run = machine.run()
    assert moments == sorted(moments)
    assert run.duration_s >= moments[-1]
    for counts in run.scheduler.counts():
        assert counts.held == counts.protected == 0
    records = run.recorder.records
    served = sorted((record.session, record.index) for record in records)
    if not options.get("start_anywhere"):
        assert served == keys(recorded)
    assert len(set(served)) == len(served)
    assert set(served) <= set(keys(recorded))
    for record in records:
        assert record.reused <= record.kv_matched < record.input_tokens
        if record.refusal:
            continue
        assert record.reused + sum(tokens for _, tokens in record.gaps) == record.input_tokens
        assert record.arrival_s <= record.scheduled_s <= record.first_token_s <= record.finished_s <= run.duration_s
        asked = recorded_request(recorded, record.session, record.index)
        assert (record.input_tokens, record.output_tokens) == (asked.input_tokens, max(1, asked.output_tokens))


@SETTINGS
@given(recorded=sessions(), world=worlds(), options=arrivals(), cost=st.sampled_from(["even", "uneven"]))
def test_a_closed_loop_keeps_to_its_number_and_its_pauses(recorded, world, options, cost) -> None:
    options = {"alive": 2, "idle_cap_s": 3.0, "seed": 1, "start_anywhere": False, **options}
    options.pop("speed", None)
    machine = made(recorded, world, options, cost=cost, skip=True)
    run = machine.run()
    records = {(record.session, record.index): record for record in run.recorder.records}
    parent_of = parents(recorded)
    alive: list[tuple[float, int]] = []
    for root in {root_of(name, parent_of) for name in parent_of}:
        members = [record for record in records.values() if root_of(record.session, parent_of) == root]
        spans = [(record.arrival_s, end_of(record)) for record in members]
        alive += [(min(start_s for start_s, _ in spans), 1), (max(end_s for _, end_s in spans), -1)]
    assert max(itertools.accumulate(change for _, change in sorted(alive))) <= options["alive"]
    for (name, index), record in records.items():
        before = records.get((name, index - 1))
        if before is not None:
            think_s = recorded_request(recorded, name, index).think_s
            think_s = min(options.get("default_think_s", 0.0) if think_s is None else think_s, options["idle_cap_s"])
            assert record.arrival_s == end_of(before) + think_s
        elif parent_of[name] is not None:
            begun_by = [end_of(one) for one in records.values() if one.session == parent_of[name]]
            assert any(end_s <= record.arrival_s <= end_s + options["idle_cap_s"] for end_s in begun_by)
