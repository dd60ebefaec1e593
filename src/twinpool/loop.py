"""The loop: schedule → run → commit. Server, offline door and replay all drive this one."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

from twinpool.sched.book import Delta
from twinpool.sched.scheduler import Scheduler
from twinpool.sched.stride import Horizon
from twinpool.step import Executor, Handle, OrdersFailed, StepPlan, StepResult

StepObserver = Callable[[StepPlan, StepResult], None]


class Loop:
    """Drives a scheduler and an executor one step at a time.

    With overlap the next step is planned and submitted before the previous one is committed, so that the executor never waits for
    the scheduler; without it each step is committed before the next is planned. `observe` sees every committed step.
    """

    def __init__(
        self, *, scheduler: Scheduler, executor: Executor, overlap: bool, observe: StepObserver | None = None
    ) -> None:
        self.scheduler = scheduler
        self.failures: list[Exception] = []
        self._executor = executor
        self._observe = observe
        self._ahead = 1 if overlap else 0
        self._in_flight: deque[tuple[StepPlan, Handle]] = deque()

    @property
    def idle(self) -> bool:
        """Nothing to schedule and nothing in flight."""
        return not self._in_flight and not self.scheduler.has_work

    @property
    def waits(self) -> bool:
        """There are requests, and nothing of them runs: their prefixes are being read from the disk."""
        return not self._in_flight and self.scheduler.has_work and not self.scheduler.n_running

    def step(self, horizon: Horizon | None = None) -> list[Delta]:
        """Plan at most one step, commit at most one, return the news. horizon: see Scheduler.schedule."""
        plan = self.scheduler.schedule(horizon)
        if plan is not None:
            self._in_flight.append((plan, self._executor.submit(plan)))
        if self._in_flight and (plan is None or len(self._in_flight) > self._ahead):
            return self._commit_oldest()
        return self.scheduler.take_deltas()

    def _commit_oldest(self) -> list[Delta]:
        """Wait for the oldest step. One that raised ends its own requests with an error, or, if only its orders failed, has all that run
        begin again; what it raised is kept in `failures`.
        """
        plan, handle = self._in_flight.popleft()
        try:
            result = handle.result()
        except OrdersFailed as error:
            self.failures.append(error)
            return self._begin_again(plan, error)
        except Exception as error:
            self.failures.append(error)
            return self.scheduler.fail(plan, f"the step could not be computed: {type(error).__name__}: {error}")
        deltas = self.scheduler.commit(plan, result)
        if self._observe is not None:
            self._observe(plan, result)
        return deltas

    def _begin_again(self, plan: StepPlan, error: OrdersFailed) -> list[Delta]:
        """Memory is not what the tree says it is: empty the cache, and compute from their tokens the requests that run."""
        self.scheduler.drop(plan)
        while self._in_flight:
            plan, handle = self._in_flight.popleft()
            with contextlib.suppress(Exception):  # whatever it gave stands on the same memory
                handle.result()
            self.scheduler.drop(plan)
        deltas = self.scheduler.begin_again(f"memory could not be copied ({error})")
        self._executor.recover()
        return deltas
