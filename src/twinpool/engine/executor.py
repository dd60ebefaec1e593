"""Runs step plans on tensors, in one thread of its own: slot orders, one packed forward, then each sampling row by
itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from twinpool.engine.inputs import LastTokens, pack
from twinpool.engine.sampler import RowState, Sampled, sample_row
from twinpool.engine.tensors import Memory
from twinpool.models.step_batch import PackedStep
from twinpool.request import Int32Array
from twinpool.step import StepPlan, StepResult

# What a row that could not be computed feeds to the step after it, which is already planned and whose result nobody
# reads.
_NO_TOKEN = 0


class Forward(Protocol):
    """The model: one packed step to the logits of its sampling rows."""

    def __call__(self, step: PackedStep) -> torch.Tensor:
        """float32 [sampling rows, vocab], contiguous; KV, states and checkpoints of all rows are written to memory."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Freed:
    """Memory that was freed since the last step, to be poisoned before the next one."""

    kind: str
    ids: Int32Array


class TorchExecutor:
    """step.Executor over a model and its memory. `submit` and `poisoner` belong to one thread, the engine's."""

    def __init__(self, *, forward: Forward, memory: Memory, torch_threads: int = 1) -> None:
        self._forward = forward
        self._memory = memory
        self._states: dict[int, RowState] = {}
        self._last = LastTokens()
        self._freed: list[_Freed] = []
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="twinpool-executor", initializer=torch.set_num_threads, initargs=(torch_threads,)
        )

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Queue a step; the future raises what the step raised."""
        freed, self._freed = self._freed, []
        assert plan.repeat == 1, "a step here is one step"
        return self._thread.submit(self._run, plan, freed)

    def poisoner(self, kind: str) -> Callable[[Int32Array], None]:
        """A Pool.on_free that fills freed 'pages' or 'slots' with NaN once every step submitted before has run
        (tests).
        """
        return lambda ids: self._freed.append(_Freed(kind, ids.copy()))

    def close(self) -> None:
        """Wait for what was submitted, then end the thread."""
        self._thread.shutdown()

    def _run(self, plan: StepPlan, freed: list[_Freed]) -> StepResult:
        try:
            return self._compute(plan, freed)
        except Exception:
            for row in plan.rows:
                if row.sample:
                    self._last.put(row.rid, _NO_TOKEN)
            raise

    def _compute(self, plan: StepPlan, freed: list[_Freed]) -> StepResult:
        began_s = time.perf_counter()
        for item in freed:
            self._memory.poison(**{item.kind: item.ids})
        for rid in plan.left:
            self._states.pop(rid, None)
            self._last.forget(rid)
        for joined in plan.joined:
            self._states[joined.rid] = RowState.of(joined)
        for order in plan.orders:
            if order.src is None:
                self._memory.zero_slot(order.dst)
            else:
                self._memory.copy_slot(src=order.src, dst=order.dst)
        with torch.inference_mode():
            logits = self._forward(pack(plan, self._last))
        outcomes = self._sample(plan, logits)
        return StepResult(
            step=plan.step,
            tokens=tuple(outcome.token if outcome is not None else None for outcome in outcomes),
            logprobs=tuple(outcome.logprob if outcome is not None else None for outcome in outcomes),
            errors=tuple((i, o.error) for i, o in enumerate(outcomes) if o is not None and o.error is not None),
            duration_s=time.perf_counter() - began_s,
        )

    def _sample(self, plan: StepPlan, logits: torch.Tensor) -> list[Sampled | None]:
        """One outcome a row of the plan; None for rows that do not sample. Remembers the tokens for the next step."""
        rows = iter(np.asarray(logits.float().cpu()))
        outcomes: list[Sampled | None] = []
        for row in plan.rows:
            if not row.sample:
                outcomes.append(None)
                continue
            outcome = sample_row(next(rows), self._states[row.rid], position=row.position)
            self._last.put(row.rid, _NO_TOKEN if outcome.token is None else outcome.token)
            outcomes.append(outcome)
        return outcomes
