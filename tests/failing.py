"""An executor whose steps can be made to fail: their rows (RuntimeError), or the orders before them (OrdersFailed)."""

from __future__ import annotations

from collections.abc import Callable

from tests.worlds import POISON, FakeExecutor, World
from twinpool.loop import Loop
from twinpool.step import HostCopy, HostFill, Order, OrdersFailed, StepPlan, StepResult, StoreCopy

FAILED, LOST = "made to fail", "made to lose memory"


class FailingExecutor(FakeExecutor):
    """fail_next: the next step's orders are obeyed and its rows spoilt, as are later rows of its requests, which are planned already.

    lose_next, the step's number in `lose_at`, or an order that `refuses` names: half of its orders are obeyed, then all memory is
    rubbish; no step is run from then on until `recover`.
    """

    fail_next = lose_next = False
    lose_at = -1

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.failing: set[int] = set()
        self.losing: set[int] = set()
        self.is_lost = False
        self.refuses: Callable[[Order], bool] = lambda order: False
        self.spoilt: set[int] = set()  # requests

    def submit(self, plan: StepPlan):
        if self.fail_next:
            self.failing.add(plan.step)
        if self.lose_next or len(self.plans) == self.lose_at or any(map(self.refuses, plan.orders)):
            self.losing.add(plan.step)
        self.fail_next = self.lose_next = False
        return _Failing(self, super().submit(plan))

    def recover(self) -> None:
        self.is_lost = False

    def _run(self, plan: StepPlan) -> StepResult:
        self.spoilt -= set(plan.left)
        if plan.step in self.losing and not self.is_lost:
            for order in plan.orders[: len(plan.orders) // 2]:
                self._obey(order)
            self.is_lost = True
            for memory in (self.kv, self.slots, self.host_kv, self.host_slots):
                memory.update(dict.fromkeys(memory, POISON))
            self.last.clear()
        if self.is_lost:
            self.losing.add(plan.step)
            return StepResult(plan.step, ())
        if plan.step in self.failing:
            self.spoilt |= {row.rid for row in plan.rows}
        return super()._run(plan)

    def _row(self, row) -> int | None:
        if row.rid not in self.spoilt:
            return super()._row(row)
        for position in range(row.start, row.end):
            self.kv[int(row.pages[position // self.page_size]), position % self.page_size] = POISON
        for slot in (row.slot, row.checkpoint_slot if row.checkpoint_at is not None else row.slot):
            self.slots[slot] = POISON
        return 0 if row.sample else None


class _Failing:
    def __init__(self, executor: FailingExecutor, handle) -> None:
        self.executor, self.handle = executor, handle

    def result(self) -> StepResult:
        result = self.handle.result()
        if result.step in self.executor.losing:
            raise OrdersFailed(LOST)
        if result.step in self.executor.failing:
            raise RuntimeError(FAILED)
        return result


# Kinds of copies that can fail for ever, as FailingExecutor.refuses.
KINDS: dict[str, Callable[[Order], bool]] = {
    "to the host": lambda order: isinstance(order, HostCopy) and order.to_host,
    "from the host": lambda order: isinstance(order, HostCopy) and not order.to_host,
    "from the disk": lambda order: isinstance(order, HostFill),
    "to the disk": lambda order: isinstance(order, StoreCopy),
}


def let_fail(world: World) -> None:
    """Give a world an executor that can be made to fail."""
    plain = world.executor
    world.executor = FailingExecutor(page_size=plain.page_size, lazy=plain.lazy)
    world.executor.store = plain.store
    world.loop = Loop(scheduler=world.scheduler, executor=world.executor, overlap=world.scheduler.shape.overlap)
