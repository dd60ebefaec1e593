"""From measured step times to a Calibration: least squares over the cost model's own roofline, no parameter below zero."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from twinpool.errors import TwinpoolError
from twinpool.replay.cost import Calibration, CostModel, Seconds
from twinpool.request import Int32Array
from twinpool.step import Row, StepPlan

Matrix = npt.NDArray[np.float64]
_NEVER = float("inf")
_NO_PAGES: Int32Array = np.empty(0, np.int32)
_SPLITS = 64
_ROUNDS = 8
LEAST_POINTS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """One measured duration and the steps it consists of.

    name: for people; measured_s: their sum, or their mean if `mean`; compute_s, memory_s: float64 [steps] at the device's peaks;
    link_s: float64 [steps], as modelled; rows: of each step.
    """

    name: str
    measured_s: float
    mean: bool
    compute_s: Seconds
    memory_s: Seconds
    link_s: Seconds
    rows: int

    def modelled_s(self, calibration: Calibration) -> float:
        """What the cost model says, in seconds, for the sum or the mean of the steps."""
        compute_s, memory_s = self.compute_s / calibration.flops_share, self.memory_s / calibration.bandwidth_share
        steps_s = np.maximum(compute_s, memory_s) + self.link_s + calibration.step_s + self.rows * calibration.row_s
        return self.total(steps_s)

    def total(self, steps_s: Seconds) -> float:
        """Sum or mean of values of its steps."""
        return float(steps_s.mean() if self.mean else steps_s.sum())


def prefill_point(cost: CostModel, *, tokens: int, chunk_tokens: int | None, measured_s: float) -> Point:
    """The time to the first token of a prompt that is alone, cut into chunks of so many tokens (None: whole)."""
    chunk_tokens = chunk_tokens or tokens
    plans = [
        StepPlan(0, (Row(0, start, min(tokens, start + chunk_tokens), None, 0, _NO_PAGES),))
        for start in range(0, tokens, chunk_tokens)
    ]

    def durations(model: CostModel) -> Seconds:
        return np.concatenate([model.step_s(plan) for plan in plans])

    compute_s, memory_s, link_s = (durations(model) for model in _parts(cost))
    return Point(f"prefill of {tokens:,}", measured_s, False, compute_s - link_s, memory_s - link_s, link_s, rows=1)


def decode_point(cost: CostModel, *, context_tokens: int, batch: int, steps: int, measured_s: float) -> Point:
    """The time of a decode step: the mean of so many, of a batch of rows that start at the same context."""
    lengths = [context_tokens] * batch
    compute_s, memory_s, link_s = (model.decode_s(lengths, steps) for model in _parts(cost))
    name = f"decode of {batch} at {context_tokens:,}"
    return Point(name, measured_s, True, compute_s - link_s, memory_s - link_s, link_s, rows=batch)


def _parts(cost: CostModel) -> tuple[CostModel, CostModel, CostModel]:
    """The same model with only products and link, only memory and link, and only the link: what is left out takes no time."""

    def only(*, flops_share: float, bandwidth_share: float) -> CostModel:
        free = Calibration(flops_share=flops_share, bandwidth_share=bandwidth_share, step_s=0.0, row_s=0.0)
        return replace(cost, calibration=free)

    return (
        only(flops_share=1.0, bandwidth_share=_NEVER),
        only(flops_share=_NEVER, bandwidth_share=1.0),
        only(flops_share=_NEVER, bandwidth_share=_NEVER),
    )


def fit(points: Sequence[Point], *, source: str) -> Calibration:
    """The calibration with the least sum of squared relative errors. Both shares are at most 1.

    Which of products and memory bounds a step depends on the ratio of the shares, and for a given choice the problem is linear:
    it is solved for many ratios, each refined until its choice is its own. Raises TwinpoolError for too few points.
    """
    n_decode = sum(point.mean for point in points)
    if min(n_decode, len(points) - n_decode) < LEAST_POINTS:
        raise TwinpoolError(
            f"A calibration needs {LEAST_POINTS} prompt lengths and {LEAST_POINTS} decode batches, and {len(points) - n_decode} and "
            f"{n_decode} were measured: give more --seconds."
        )
    found = min(
        (_refined(points, ratio) for ratio in _ratios(points)), key=lambda calibration: _error(points, calibration)
    )
    return replace(_settled(points, found), source=source)


def _ratios(points: Sequence[Point]) -> list[float]:
    """Ratios of (slowdown of products : slowdown of memory) between which the choice of some step changes."""
    edges = np.unique(np.concatenate([point.memory_s / np.maximum(point.compute_s, 1e-30) for point in points]))
    places = np.unique(np.linspace(0, len(edges) - 1, min(len(edges), _SPLITS)).round().astype(int))
    return [0.0, *(float(edge) * (1 + 1e-9) for edge in edges[places])]


def _refined(points: Sequence[Point], ratio: float) -> Calibration:
    best = _solved(points, ratio)
    for _ in range(_ROUNDS):
        again = _solved(points, best.bandwidth_share / best.flops_share)
        if _error(points, again) >= _error(points, best) * (1 - 1e-12):
            break
        best = again
    return best


def _solved(points: Sequence[Point], ratio: float) -> Calibration:
    """Least squares where products bound the steps with compute × ratio > memory. Slowdowns are 1 / share, at least 1."""
    rows, wanted = [], []
    for point in points:
        bound = point.compute_s * ratio > point.memory_s
        compute_s = point.total(np.where(bound, point.compute_s, 0.0))
        memory_s = point.total(np.where(bound, 0.0, point.memory_s))
        steps = 1.0 if point.mean else float(len(point.compute_s))
        left_s = point.measured_s - point.total(point.link_s) - compute_s - memory_s
        rows.append(np.array([compute_s, memory_s, steps, steps * point.rows]) / point.measured_s)
        wanted.append(left_s / point.measured_s)
    more_compute, more_memory, step_s, row_s = non_negative(np.array(rows), np.array(wanted)).tolist()
    return Calibration(
        flops_share=1 / (1 + more_compute), bandwidth_share=1 / (1 + more_memory), step_s=step_s, row_s=row_s
    )


def _error(points: Sequence[Point], calibration: Calibration) -> float:
    return sum((point.modelled_s(calibration) / point.measured_s - 1) ** 2 for point in points)


def _settled(points: Sequence[Point], found: Calibration) -> Calibration:
    """A share that bounded no step was not measured: it stays at its assumed value, or as low as no step shows it."""
    compute_s = np.concatenate([point.compute_s for point in points])
    memory_s = np.concatenate([point.memory_s for point in points])
    bound = compute_s / found.flops_share > memory_s / found.bandwidth_share
    assumed = Calibration()
    if not bound.any():
        most = float(np.min(memory_s / np.maximum(compute_s, 1e-30))) / found.bandwidth_share
        return replace(found, flops_share=min(1.0, max(assumed.flops_share, 1 / most)))
    if bound.all():
        most = float(np.min(compute_s / np.maximum(memory_s, 1e-30))) / found.flops_share
        return replace(found, bandwidth_share=min(1.0, max(assumed.bandwidth_share, 1 / most)))
    return found


def non_negative(matrix: Matrix, wanted: Seconds) -> Seconds:
    """The x >= 0 with the least |matrix · x - wanted|. matrix: float64 [points, columns], few columns: every choice of those that
    may be above zero is solved, and the best of the solutions without a negative value is the optimum.
    """
    norms = np.linalg.norm(matrix, axis=0)
    used = [column for column in range(matrix.shape[1]) if norms[column] > 0]
    best, least = np.zeros(matrix.shape[1]), float(wanted @ wanted)
    for size in range(1, len(used) + 1):
        for columns in itertools.combinations(used, size):
            chosen = list(columns)
            part = matrix[:, chosen] / norms[chosen]
            solution = np.linalg.lstsq(part, wanted, rcond=None)[0]
            error = float(np.sum((part @ solution - wanted) ** 2))
            if (solution >= 0).all() and error < least:
                best, least = np.zeros(matrix.shape[1]), error
                best[chosen] = solution / norms[chosen]
    return best
