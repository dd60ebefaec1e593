"""What is simulated is what is served: the same conversations through the live engine on the demo model and through replay.

The live engine goes first and says what it says; replay is given those very tokens and the same arrivals, counted in turns of
the loop. Every step plan must then be the same, to the page id.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.replay_worlds import Turn, session, tree_of
from twinpool import LLM, SamplingParams
from twinpool.clock import VirtualClock
from twinpool.engine.core import Engine, StepReport
from twinpool.replay.run import Replay, Run
from twinpool.replay.tokens import Content
from twinpool.replay.trace import Session
from twinpool.replay.traffic import Arrival, Traffic
from twinpool.request import Request
from twinpool.step import StepPlan
from twinpool.units import ceil_div
from twinpool.wiring import build_scheduler

SESSIONS, TURNS = 12, 3
OPTIONS = {
    "ample": {},
    "few slots": {"max_mamba_cache_size": 24},
    "few pages": {"page_size": 16, "max_mamba_cache_size": 24, "max_total_tokens": 1600},
    "serial": {"page_size": 16, "max_mamba_cache_size": 24, "max_total_tokens": 1600, "disable_overlap_schedule": True},
    "lazy": {
        "mamba_radix_cache_strategy": "extra_buffer_lazy", "page_size": 16, "max_mamba_cache_size": 20,
        "max_total_tokens": 1600,
    },
    "no_buffer": {
        "mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True, "max_mamba_cache_size": 16,
        "max_total_tokens": 1600, "chunked_prefill_size": 64,
    },
    "without radix cache": {"disable_radix_cache": True, "max_total_tokens": 1600},
    "retraction": {
        "max_total_tokens": 560, "max_mamba_cache_size": 45, "chunked_prefill_size": 64, "schedule_conservativeness": 0.01,
        "schedule_policy": "lpm", "max_running_requests": 8,
    },
}  # fmt: skip
# What must happen where memory is short, so that the comparison is about something.
PRESSED = {
    "few slots": {"evicted_states"}, "few pages": {"evicted_states", "evicted_tokens"},
    "serial": {"evicted_states", "evicted_tokens"}, "lazy": {"evicted_states", "evicted_tokens"},
    "no_buffer": {"evicted_states", "evicted_tokens"}, "retraction": {"evicted_tokens", "retractions"},
}  # fmt: skip


@dataclass(frozen=True)
class Script:
    """One conversation: when it starts (turns of the loop), what each turn adds, how long it answers, how long it then waits."""

    start: int
    new: tuple[tuple[int, ...], ...]
    answers: tuple[int, ...]
    pauses: tuple[int, ...]


@dataclass
class Told:
    """What a run did. requests: (session, turn) to (prompt, answer, reuse, retractions); plans: in the order of their commit."""

    requests: dict[tuple[int, int], tuple[object, ...]] = field(default_factory=dict)
    plans: list[object] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    tree: list[object] = field(default_factory=list)


def scripts() -> list[Script]:
    """Sessions that share 70 tokens, and every third one also its first question, and arrive while others run."""
    rng = np.random.default_rng(4)
    system = tuple(rng.integers(3, 3000, 70).tolist())
    question = tuple(rng.integers(3, 3000, 33).tolist())
    found = []
    for number in range(SESSIONS):
        own = [tuple(rng.integers(3, 3000, int(rng.integers(5, 60))).tolist()) for _ in range(TURNS)]
        first = system + (question if number % 3 == 0 else ()) + own[0]
        found.append(
            Script(
                start=number * 3,
                new=(first, *own[1:]),
                answers=tuple(rng.integers(1, 50, TURNS).tolist()),
                pauses=tuple(rng.integers(0, 12, TURNS).tolist()),
            )
        )
    return found


def seen(plan: StepPlan, page_size: int) -> object:
    """A plan as a value, with the ids of the pages its rows use."""
    rows = [
        (row.rid, row.start, row.end, row.tokens is None, row.slot, row.checkpoint_at, row.checkpoint_slot, row.sample, row.position,
         row.pages[: ceil_div(row.end, page_size)].tolist())
        for row in plan.rows
    ]  # fmt: skip
    return (
        plan.step, rows, [(order.dst, order.src) for order in plan.orders], [one.rid for one in plan.joined], plan.left,
        plan.repeat,
    )  # fmt: skip


class Watch:
    """An engine's observer that keeps plans and finished requests."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.plans: list[object] = []

    def on_step(self, report: StepReport) -> None:
        self.plans.append(seen(report.plan, self.page_size))

    def on_finish(self, request: Request) -> None:
        pass

    def on_retraction(self, retraction: object) -> None:
        pass


def live(engine: Engine, talks: Sequence[Script]) -> Told:
    """Everybody's turns through the engine, one turn of the loop after another."""
    told, watch = Told(), Watch(engine.facts.resolved.page_size)
    engine.observers.append(watch)
    due: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, talk in enumerate(talks):
        due[talk.start].append((number, 0))
    histories: list[list[int]] = [[] for _ in talks]
    whose: dict[int, tuple[int, int]] = {}
    now = 0
    while whose or any(when >= now for when in due):
        for number, turn in due.pop(now, []):
            histories[number] += talks[number].new[turn]
            params = SamplingParams(max_tokens=talks[number].answers[turn], temperature=1.0, ignore_eos=True)
            (request,) = engine.add(histories[number], params)
            whose[request.rid] = (number, turn)
        for output in engine.step() if engine.has_work else ():
            if output.finish is None:
                continue
            number, turn = whose.pop(output.request.rid)
            request = output.request
            answer = request.tokens[request.prompt_len : request.n_tokens].tolist()
            told.requests[number, turn] = (list(histories[number]), answer, request.reuse, request.retractions)
            histories[number] += answer
            if turn + 1 < TURNS:
                due[now + 1 + talks[number].pauses[turn]].append((number, turn + 1))
        now += 1
    told.plans = watch.plans
    _finish(told, engine.scheduler)
    return told


def _finish(told: Told, scheduler: object) -> None:
    book = scheduler.book
    told.totals = dataclasses.asdict(book.totals)
    told.counts = {
        "evicted_tokens": book.tree.evictions.n_kv_tokens, "evicted_states": book.tree.evictions.n_states,
        "evictions": book.tree.evictions.copy(),
        "retractions": book.totals.retracted_requests,
    }  # fmt: skip
    told.tree = tree_of(book.tree)


class SaidTokens:
    """In the place of a TokenSpace: the very tokens of the live run."""

    def __init__(self, told: Told) -> None:
        self._told = told

    def content(self, whose: Session, index: int) -> Content:
        prompt, answer, *_ = self._told.requests[int(whose.id), index]
        return Content(np.array(prompt, np.int32), np.array(answer, np.int32))


class LoopTurns(Traffic):
    """Arrivals counted in turns of the loop, as `live` has them."""

    def __init__(self, sessions: Sequence[Session], talks: Sequence[Script]) -> None:
        super().__init__()
        self._talks = talks
        self._now = -1
        self._due: dict[int, list[Arrival]] = defaultdict(list)
        for one, talk in zip(sessions, talks, strict=True):
            self._due[talk.start].append(Arrival(one, 0, 0.0))

    @property
    def next_s(self) -> float | None:
        return 0.0 if self._due else None

    def due(self, now_s: float) -> list[Arrival]:
        self._now += 1
        return self._due.pop(self._now, [])

    def finished(self, arrival: Arrival, now_s: float) -> None:
        if arrival.index + 1 < TURNS:
            pause = self._talks[int(arrival.session.id)].pauses[arrival.index]
            self._due[self._now + 1 + pause].append(Arrival(arrival.session, arrival.index + 1, 0.0))


def said_sessions(talks: Sequence[Script], told: Told) -> list[Session]:
    """The sessions of a trace with the lengths of what was said."""
    return [
        session(
            str(number),
            *(
                Turn(blocks=[], input_tokens=len(told.requests[number, turn][0]), output_tokens=answer)
                for turn, answer in enumerate(talk.answers)
            ),
        )
        for number, talk in enumerate(talks)
    ]


def replayed(engine: Engine, talks: Sequence[Script], told: Told, *, skip: bool) -> tuple[Told, Run]:
    """The same through replay, on a scheduler of its own over the engine's settings and ledger."""
    facts = engine.facts
    clock = VirtualClock()
    replay = Replay(
        scheduler=build_scheduler(facts.resolved, facts.ledger, clock=clock), clock=clock, tokens=SaidTokens(told),
        traffic=LoopTurns(said_sessions(talks, told), talks), cost=None, skip=skip,
    )  # fmt: skip
    again = Told()
    replay.observers.append(lambda plan, result: again.plans.append(seen(plan, facts.resolved.page_size)))
    run = replay.run()
    _finish(again, run.scheduler)
    return again, run


@pytest.mark.parametrize("name", OPTIONS)
def test_replay_plans_what_the_engine_plans(name: str) -> None:
    talks = scripts()
    with LLM(**{"device_memory": "192MiB", "max_running_requests": 4, **OPTIONS[name]}) as llm:
        told = live(llm.engine, talks)
        again, run = replayed(llm.engine, talks, told, skip=False)
        skipped, fast = replayed(llm.engine, talks, told, skip=True)
    assert len(told.requests) == SESSIONS * TURNS
    assert again.plans == told.plans
    for one in (again, skipped):
        assert (one.counts, one.totals, one.tree) == (told.counts, told.totals, told.tree)
    for finished in (run, fast):
        assert len(finished.recorder.records) == len(told.requests)
        for record in finished.recorder.records:
            *_, reuse, retractions = told.requests[int(record.session), record.index]
            assert (record.kv_matched, record.reused, record.gaps) == (reuse.kv_matched, reuse.reused, reuse.gaps)
            assert record.retractions == retractions
    assert fast.steps == run.steps
    assert all(told.counts[what] > 0 for what in PRESSED.get(name, ())), told.counts
