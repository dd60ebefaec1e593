"""Runs step plans on tensors, in one thread of its own: slot orders, one packed forward, then each sampling row by
itself.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from twinpool.engine.inputs import LastTokens, pack
from twinpool.engine.rank_segments import Store, orders_of_ranks
from twinpool.engine.ranks import Ranks, Told
from twinpool.engine.restore import LayerParts, Restore, Waiting
from twinpool.engine.sampler import RowState, Sampled, sample_row
from twinpool.engine.tensors import Memory
from twinpool.models.step_batch import PackedStep
from twinpool.step import Freed, HostCopy, HostFill, Order, OrdersFailed, SlotOrder, StepPlan, StepResult, StoreCopy

# What a row that could not be computed feeds to the step after it, which is already planned and whose result nobody
# reads.
_NO_TOKEN = 0


class Forward(Protocol):
    """The model: one packed step to the logits of its sampling rows."""

    def __call__(self, step: PackedStep) -> torch.Tensor:
        """float32 [sampling rows, vocab], contiguous; KV, states and checkpoints of all rows are written to memory."""
        ...


class TorchExecutor:
    """step.Executor over a model and its memory. `submit` belongs to one thread, the engine's. store: takes what a StoreCopy
    names, in bytes (pages one after another, state). ranks: the others of this model, which are told every step. layers: what of
    pages and slots belongs to which, so that one need not wait for another's copies from the host; without it each waits for all.
    """

    def __init__(
        self,
        *,
        forward: Forward,
        memory: Memory,
        torch_threads: int = 1,
        store: Store | None = None,
        ranks: Ranks | None = None,
        layers: LayerParts | None = None,
    ) -> None:
        self._forward = forward
        self._memory = memory
        self.layers = layers or LayerParts.undivided(memory)
        self._states: dict[int, RowState] = {}
        self._last = LastTokens()
        self._save_s = self._load_s = 0.0  # of copies that no result has told yet
        self._store = store
        self._ranks = ranks
        self._broken: Exception | None = None  # an order that failed
        self._untold: list[tuple[int, int]] = []  # tokens sampled since the other ranks were told something
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="twinpool-executor", initializer=torch.set_num_threads, initargs=(torch_threads,)
        )

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Queue a step; the future raises what the step raised."""
        assert plan.repeat == 1, "a step here is one step"
        return self._thread.submit(self._run, plan)

    def settle(self, orders: tuple[Order, ...]) -> None:
        """Queue orders without a step: nothing may come after them for a while."""
        self._thread.submit(self._settle, orders)

    def recover(self) -> None:
        """Obey orders again: the cache that counted on those that failed is empty."""
        self._broken = None

    def follow(self, told: Told) -> None:
        """Repeat a step of rank 0, in the calling thread, without sampling: its tokens come with the step after it."""
        for rid, token in told.tokens:
            self._last.put(rid, token)
        if told.plan is None:
            self._obey_all(told.orders)
            return
        for rid in told.plan.left:
            self._last.forget(rid)
        self._run_forward(told.plan, self._obey_all(told.orders, forward_follows=True), samples=False)

    def close(self) -> None:
        """Wait for what was submitted, then end the thread."""
        self._thread.shutdown()

    def _settle(self, orders: tuple[Order, ...]) -> None:
        with contextlib.suppress(OrdersFailed):  # nobody waits for these: the next step says so
            self._obey_all(self._tell(orders, None))

    def _tell(self, orders: tuple[Order, ...], plan: StepPlan | None) -> tuple[Order, ...]:
        """Have the other ranks do the same now; returns what is left to do here."""
        if self._ranks is None:
            return orders
        # Sampling is ours alone, and orders are told beside the plan.
        slim = None if plan is None else replace(plan, joined=(), orders=())
        ours, *theirs = orders_of_ranks(orders, ranks=self._ranks.count, page_bytes=self._memory.arena.page_bytes)
        told = [Told(tuple(self._untold), share, slim) for share in theirs]
        if ours is orders:
            self._ranks.send(told[0])
        else:
            self._ranks.send_each(told)
        self._untold.clear()
        return ours

    def _remember(self, rid: int, token: int) -> None:
        self._last.put(rid, token)
        if self._ranks is not None:
            self._untold.append((rid, token))

    def _run(self, plan: StepPlan) -> StepResult:
        try:
            return self._compute(plan)
        except Exception as error:
            if self._ranks is not None:
                self._ranks.lose(error)
            for row in plan.rows:
                if row.sample:
                    self._remember(row.rid, _NO_TOKEN)
            raise

    def _compute(self, plan: StepPlan) -> StepResult:
        began_s = time.perf_counter()
        for rid in plan.left:
            self._states.pop(rid, None)
            self._last.forget(rid)
        # Before anything that can fail for another reason: the cache counts on them, whatever becomes of the rows.
        restore = self._obey_all(self._tell(plan.orders, plan), forward_follows=True)
        logits = self._run_forward(plan, restore)
        save_s, load_s = self._save_s, self._load_s
        self._save_s = self._load_s = 0.0
        outcomes = self._sample(plan, logits)
        return StepResult(
            step=plan.step,
            tokens=tuple(outcome.token if outcome is not None else None for outcome in outcomes),
            logprobs=tuple(outcome.logprob if outcome is not None else None for outcome in outcomes),
            errors=tuple((i, o.error) for i, o in enumerate(outcomes) if o is not None and o.error is not None),
            duration_s=time.perf_counter() - began_s,
            save_s=save_s,
            load_s=load_s,
        )

    def _run_forward(self, plan: StepPlan, restore: Restore | None, *, samples: bool = True) -> torch.Tensor:
        """The model, beside what still comes back from the host, all of which is there when this returns or raises."""
        try:
            for joined in plan.joined:
                self._states[joined.rid] = RowState.of(joined)
            step = pack(plan, self._last, restore)
            if not samples:
                step = replace(step, sample_at=step.sample_at[:0])
            with torch.inference_mode():
                return self._forward(step)
        finally:
            if restore is not None:
                self._finish(restore)

    def _finish(self, restore: Restore) -> None:
        try:
            restore.finish()
        except OrdersFailed as error:
            self._broken = error
            raise
        finally:
            self._load_s += restore.load_s

    def _obey_all(self, orders: tuple[Order, ...], *, forward_follows: bool = False) -> Restore | None:
        """Orders run one after another: what is copied away is read before anybody writes over it. Of what a forward follows, copies
        from the host run beside it: the Restore, which has begun.

        Raises OrdersFailed for one that fails, and for all from then on.
        """
        if self._broken is not None:
            raise OrdersFailed(str(self._broken)) from self._broken
        waiting = Waiting()
        try:
            for order in orders:
                if forward_follows and waiting.take(order):
                    continue
                if waiting.concerns(order):
                    for move in waiting.moves:
                        self._move(move)
                    waiting = Waiting()
                self._obey(order)
            return Restore(waiting.moves, self.layers, self._memory.tiers) if waiting.moves else None
        except Exception as error:
            self._broken = error
            raise OrdersFailed(f"{type(error).__name__}: {error}") from error

    def _obey(self, order: Order) -> None:
        memory = self._memory
        if isinstance(order, Freed):
            memory.poison(**{order.kind: order.ids})
        elif isinstance(order, StoreCopy):
            if self._store is not None:
                self._store(order, *memory.tiers.gather(order))
        elif isinstance(order, HostFill):
            memory.tiers.fill_host(order)
        else:
            self._move(order)

    def _move(self, order: SlotOrder | HostCopy) -> None:
        began_s = time.perf_counter()
        self._memory.tiers.move(order, self._memory.tiers.whole)
        if not isinstance(order, HostCopy):
            return
        took_s = time.perf_counter() - began_s
        if order.to_host:
            self._save_s += took_s
        else:
            self._load_s += took_s

    def _sample(self, plan: StepPlan, logits: torch.Tensor) -> list[Sampled | None]:
        """One outcome a row of the plan; None for rows that do not sample. Remembers the tokens for the next step."""
        rows = iter(np.asarray(logits.float().cpu()))
        outcomes: list[Sampled | None] = []
        for row in plan.rows:
            if not row.sample:
                outcomes.append(None)
                continue
            outcome = sample_row(next(rows), self._states[row.rid], position=row.position)
            self._remember(row.rid, _NO_TOKEN if outcome.token is None else outcome.token)
            outcomes.append(outcome)
        return outcomes
