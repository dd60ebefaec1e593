"""SimExecutor: obeys plans in virtual time. Tokens come from the trace, durations from the cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from twinpool.clock import VirtualClock
from twinpool.replay.cost import Seconds
from twinpool.request import Int32Array
from twinpool.step import Order, StepPlan, StepResult, StoreCopy

Durations = Callable[[StepPlan], Seconds]
LONGEST_RUN = 256  # decode steps of one plan


@dataclass(frozen=True, slots=True, eq=False)
class SimHandle:
    """A step in virtual time; begin_s: when the device starts on it; ends_s: when each of its steps ends (float64 [repeat])."""

    executor: SimExecutor
    plan: StepPlan
    begin_s: float
    ends_s: Seconds

    def result(self) -> StepResult:
        """Move the clock to the end of the step and give the recorded tokens."""
        return self.executor.complete(self)


class SimExecutor:
    """One device that works on one step at a time, in order. answers: rid to its recorded answer (int32), which the driver fills.

    step_s: durations of a plan's steps; decode_s: of so many decode steps of rows with these lengths; orders_s: of orders alone.
    store: is told what goes to the disk, and when (seconds). Other orders move bytes, and there are none here.
    """

    def __init__(
        self, *, clock: VirtualClock, overlap: bool, step_s: Durations, decode_s: Callable[[list[int], int], Seconds],
        orders_s: Callable[[Sequence[Order]], float], store: Callable[[StoreCopy, float], None] | None = None,
    ) -> None:  # fmt: skip
        self.answers: dict[int, Int32Array] = {}
        self.until_s: float | None = None  # nothing from outside is due before it
        self._clock, self._overlap = clock, overlap
        self._step_s, self._decode_s, self._orders_s = step_s, decode_s, orders_s
        self._store = store
        self._free_s = 0.0
        self._latest: SimHandle | None = None

    def submit(self, plan: StepPlan) -> SimHandle:
        """Queue a step behind those before it."""
        begin_s = max(self._free_s, self._clock.now_s())
        self._give(plan.orders, begin_s)
        ends_s = np.cumsum(np.concatenate(([begin_s], self._step_s(plan))))[1:]
        self._free_s = float(ends_s[-1])
        self._latest = SimHandle(self, plan, begin_s, ends_s)
        return self._latest

    def recover(self) -> None:
        """Nothing fails here."""

    def settle(self, orders: Sequence[Order]) -> None:
        """Obey orders without a step: nothing may come after them for a while."""
        begin_s = max(self._free_s, self._clock.now_s())
        self._give(orders, begin_s)
        self._free_s = begin_s + self._orders_s(orders)

    def _give(self, orders: Sequence[Order], when_s: float) -> None:
        for order in orders:
            if isinstance(order, StoreCopy) and self._store is not None:
                self._store(order, when_s)

    def horizon(self, lengths: list[int]) -> int:
        """Decode steps that may pass before an arrival would have been seen (sched/stride.py).

        With overlap a step is planned while the one before it runs, so what arrives is seen two steps later, else one.
        """
        if self.until_s is None:
            return LONGEST_RUN
        begin_s = max(self._free_s, self._clock.now_s())
        if self.until_s <= begin_s:
            return 1
        ends_s = np.cumsum(np.concatenate(([begin_s], self._decode_s(lengths, LONGEST_RUN))))[1:]
        before = int(np.searchsorted(ends_s, self.until_s, side="left"))
        return min(LONGEST_RUN, before + (2 if self._overlap else 1))

    def catch_up(self) -> None:
        """After a plan of several steps was submitted with overlap: time goes on to where its last step is being planned."""
        latest = self._latest
        if self._overlap and latest is not None and latest.plan.repeat > 1:
            self._move_to(float(latest.ends_s[-2]))

    def complete(self, handle: SimHandle) -> StepResult:
        """The result of a step that has run by now."""
        self._move_to(float(handle.ends_s[-1]))
        plan = handle.plan
        runs: list[Int32Array] = []
        tokens: list[int | None] = []
        for row in plan.rows:
            if not row.sample:
                tokens.append(None)
                continue
            answer = self.answers[row.rid]
            if plan.repeat > 1:
                runs.append(answer[row.position : row.position + plan.repeat])
            tokens.append(int(answer[row.position + plan.repeat - 1]))
        return StepResult(
            step=plan.step,
            tokens=tuple(tokens),
            runs=tuple(runs),
            duration_s=float(handle.ends_s[-1]) - handle.begin_s,
        )

    def _move_to(self, when_s: float) -> None:
        now_s = self._clock.now_s()
        if when_s > now_s:
            self._clock.advance_to(when_s)
