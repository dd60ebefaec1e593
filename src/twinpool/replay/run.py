"""The driver: traffic in, the server's own loop in virtual time, records out."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.clock import VirtualClock
from twinpool.errors import RequestError
from twinpool.loop import Loop, StepObserver
from twinpool.replay.cost import CostModel
from twinpool.replay.executor import SimExecutor
from twinpool.replay.record import Recorder
from twinpool.replay.timing import decode_durations, step_durations
from twinpool.replay.tokens import TokenSpace
from twinpool.replay.traffic import Arrival, Traffic
from twinpool.request import Request, SamplingParams
from twinpool.sched.scheduler import Scheduler
from twinpool.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run: the recorder's content, the scheduler as it was left, steps (and the plans they came in), prompt tokens
    computed, and virtual seconds passed.
    """

    recorder: Recorder
    scheduler: Scheduler
    steps: int
    plans: int
    prefilled_tokens: int
    duration_s: float


class Replay:
    """One run. cost None: every step takes no time, so that counts depend on the order of arrivals alone.

    skip: plan several decode steps at once where nothing can change (same results, less work). on_step sees every plan.
    """

    def __init__(
        self, *, scheduler: Scheduler, clock: VirtualClock, tokens: TokenSpace, traffic: Traffic, cost: CostModel | None,
        skip: bool = True,
    ) -> None:  # fmt: skip
        self.scheduler = scheduler
        self._clock, self._tokens, self._traffic, self._skip = clock, tokens, traffic, skip
        overlap = scheduler.shape.overlap
        self._executor = SimExecutor(
            clock=clock, overlap=overlap, step_s=step_durations(cost), decode_s=decode_durations(cost)
        )
        self._loop = Loop(scheduler=scheduler, executor=self._executor, overlap=overlap, observe=self._note)
        self._recorder = Recorder(scheduler)
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
                next_s = self._traffic.next_s
                if next_s is None:
                    break
                self._recorder.pause(self._clock.now_s())
                self._clock.advance_to(max(next_s, self._clock.now_s()))
                continue
            self._step()
        return Run(
            recorder=self._recorder, scheduler=self.scheduler, steps=self._steps, plans=self._plans, prefilled_tokens=self._prefilled,
            duration_s=self._clock.now_s(),
        )  # fmt: skip

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
            self._traffic.finished(arrival, self._clock.now_s())
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
