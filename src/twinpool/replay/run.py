"""The driver: traffic in, the server's own loop in virtual time, records out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from twinpool.clock import VirtualClock
from twinpool.errors import RequestError
from twinpool.loop import Loop, StepObserver
from twinpool.replay.cost import CostModel
from twinpool.replay.disk import SimDisk
from twinpool.replay.executor import SimExecutor
from twinpool.replay.record import Recorder
from twinpool.replay.timing import decode_durations, order_durations, step_durations
from twinpool.replay.tokens import TokenSpace
from twinpool.replay.traffic import Arrival, Traffic
from twinpool.request import Request, SamplingParams
from twinpool.sched.scheduler import Scheduler
from twinpool.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run: the recorder's content, the scheduler as it was left, steps (and the plans they came in), prompt tokens
    computed, virtual seconds passed, and the disk below the host, if there is one.
    """

    recorder: Recorder
    scheduler: Scheduler
    steps: int
    plans: int
    prefilled_tokens: int
    duration_s: float
    disk: SimDisk | None = None


class Replay:
    """One run. cost None: every step takes no time, so that counts depend on the order of arrivals alone.

    disk: the scheduler's storage. skip: plan several decode steps at once where nothing can change (same results, less work).
    """

    def __init__(
        self, *, scheduler: Scheduler, clock: VirtualClock, tokens: TokenSpace, traffic: Traffic, cost: CostModel | None,
        disk: SimDisk | None = None, skip: bool = True,
    ) -> None:  # fmt: skip
        self.scheduler = scheduler
        self._disk = disk
        self._clock, self._tokens, self._traffic, self._skip = clock, tokens, traffic, skip
        overlap = scheduler.shape.overlap
        self._executor = SimExecutor(
            clock=clock, overlap=overlap, step_s=step_durations(cost), decode_s=decode_durations(cost),
            orders_s=order_durations(cost), store=disk.give if disk is not None else None,
        )  # fmt: skip
        self._loop = Loop(scheduler=scheduler, executor=self._executor, overlap=overlap, observe=self._note)
        self._recorder = Recorder(scheduler, disk)
        self._arrivals: dict[int, Arrival] = {}
        self._rid = 0
        self._steps = self._plans = self._prefilled = 0
        self.observers: list[StepObserver] = []

    def run(self) -> Run:
        """Until no request is left. Raises what a step raised, which is a bug."""
        while True:
            for arrival in self._traffic.due(self._clock.now_s()):
                self._add(arrival)
            if self._loop.idle:
                self._settle()
                next_s = self._traffic.next_s
                if next_s is None:
                    break
                self._recorder.pause(self._clock.now_s())
                self._clock.advance_to(max(next_s, self._clock.now_s()))
                continue
            self._step()
        return Run(
            recorder=self._recorder, scheduler=self.scheduler, steps=self._steps, plans=self._plans, prefilled_tokens=self._prefilled,
            duration_s=self._clock.now_s(), disk=self._disk,
        )  # fmt: skip

    def _settle(self) -> None:
        """As the server does (engine/core.py): with nothing left to run, what the tiers below were told is done at once."""
        if orders := self.scheduler.book.take_orders():
            self._executor.settle(orders)

    def _step(self) -> None:
        executor = self._executor
        executor.until_s = self._traffic.next_s
        deltas = self._loop.step(executor.horizon if self._skip else None)
        if self._loop.failures:
            raise self._loop.failures[0]
        for delta in deltas:
            if delta.finish is not None:
                self._end(delta.request)
        executor.catch_up()
        self._recorder.tick(self._clock.now_s())
        if not deltas and self._loop.waits:
            self._wait_for_disk()

    def _wait_for_disk(self) -> None:
        """Nothing runs, and what waits is being read: time goes on to where that changes, or somebody arrives."""
        assert self._disk is not None, "a request waits, and nothing runs that could make room"
        now_s, arrival_s = self._clock.now_s(), self._traffic.next_s
        next_s = self._disk.next_s if arrival_s is None else min(arrival_s, self._disk.next_s)
        assert next_s < math.inf, "a request waits for a disk that does nothing"
        self._recorder.pause(now_s)
        self._clock.advance_to(max(next_s, now_s))

    def _note(self, plan: StepPlan, result: StepResult) -> None:
        self._plans += 1
        self._steps += plan.repeat
        self._prefilled += sum(row.end - row.start for row in plan.rows if row.tokens is not None)
        for observe in self.observers:
            observe(plan, result)

    def _add(self, arrival: Arrival) -> None:
        recorded = arrival.session.requests[arrival.index]
        content = self._tokens.content(arrival.session, arrival.index)
        answer = content.answer
        self._rid += 1
        request = Request.new(
            rid=self._rid, prompt=content.prompt, params=SamplingParams(max_tokens=max(1, len(answer)), ignore_eos=True),
            arrival_s=arrival.due_s,
        )  # fmt: skip
        try:
            self.scheduler.add(request)
        except RequestError as error:
            self._recorder.refused(arrival, why=str(error))
            self._traffic.finished(arrival, arrival.due_s)
            return
        self._executor.answers[request.rid] = answer if recorded.output_tokens else content.prompt[:1]
        self._arrivals[request.rid] = arrival

    def _end(self, request: Request) -> None:
        arrival = self._arrivals.pop(request.rid)
        del self._executor.answers[request.rid]
        self._recorder.finished(arrival, request)
        # One that is refused at the end of KV ends when its step is planned; the news comes with the step's result.
        assert request.finished_s is not None
        self._traffic.finished(arrival, request.finished_s)
