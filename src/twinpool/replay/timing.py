"""Durations for the simulated executor: of a cost model, or none at all (counts only)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from twinpool.replay.cost import CostModel, Seconds
from twinpool.step import Order, StepPlan


def step_durations(cost: CostModel | None) -> Callable[[StepPlan], Seconds]:
    """Of each step of a plan (float64 [repeat])."""
    return cost.step_s if cost is not None else lambda plan: np.zeros(plan.repeat)


def order_durations(cost: CostModel | None) -> Callable[[Sequence[Order]], float]:
    """Seconds of orders that are obeyed without a forward."""
    host = cost.host if cost is not None else None
    return lambda orders: float(host.step_s(np.zeros(1), orders)[0]) if host is not None else 0.0


def decode_durations(cost: CostModel | None) -> Callable[[list[int], int], Seconds]:
    """Of so many decode steps of rows with these lengths (float64 [steps])."""
    return cost.decode_s if cost is not None else lambda lengths, steps: np.zeros(steps)
