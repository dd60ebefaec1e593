"""Durations for the simulated executor: of a cost model, or none at all (counts only)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twinpool.replay.cost import CostModel, Seconds
from twinpool.step import StepPlan


def step_durations(cost: CostModel | None) -> Callable[[StepPlan], Seconds]:
    """Of each step of a plan (float64 [repeat])."""
    return cost.step_s if cost is not None else lambda plan: np.zeros(plan.repeat)


def decode_durations(cost: CostModel | None) -> Callable[[list[int], int], Seconds]:
    """Of so many decode steps of rows with these lengths (float64 [steps])."""
    return cost.decode_s if cost is not None else lambda lengths, steps: np.zeros(steps)
