"""A step plan as flat arrays: what the model reads, without copying a page table."""

from __future__ import annotations

import numpy as np

from twinpool.models.step_batch import Arrivals, PackedStep
from twinpool.step import StepPlan


class LastTokens:
    """The token sampled last for each running request: the input of its next decode row."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}

    def put(self, rid: int, token: int) -> None:
        """Remember a sampled token."""
        self._tokens[rid] = token

    def get(self, rid: int) -> int:
        """The token sampled last for a request; asking for one that never sampled is a bug (KeyError)."""
        return self._tokens[rid]

    def forget(self, rid: int) -> None:
        """The request has left."""
        self._tokens.pop(rid, None)


def pack(plan: StepPlan, last: LastTokens, arrivals: Arrivals | None = None) -> PackedStep:
    """Flatten a plan; decode rows take their token from `last`. arrivals: what layers have to wait for, if anything."""
    rows = plan.rows
    starts = np.array([row.start for row in rows], np.int32)
    ends = np.array([row.end for row in rows], np.int32)
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(ends - starts, out=offsets[1:])
    input_ids = np.empty(int(offsets[-1]), np.int64)
    positions = np.empty(int(offsets[-1]), np.int64)
    for row, at in zip(rows, offsets.tolist(), strict=False):
        if row.tokens is None:
            assert row.end == row.start + 1, "a decode row has one token"
            input_ids[at], positions[at] = last.get(row.rid), row.start
        else:
            input_ids[at : at + row.end - row.start] = row.tokens
            positions[at : at + row.end - row.start] = np.arange(row.start, row.end)
    return PackedStep(
        input_ids=input_ids,
        positions=positions,
        row_offsets=offsets,
        starts=starts,
        ends=ends,
        slots=np.array([row.slot for row in rows], np.int32),
        checkpoint_offsets=np.array(
            [0 if row.checkpoint_at is None else row.checkpoint_at - row.start for row in rows], np.int32
        ),
        checkpoint_slots=np.array([row.checkpoint_slot for row in rows], np.int32),
        pages=tuple(row.pages for row in rows),
        arrivals=arrivals,
        sample_at=np.array([int(offsets[i + 1]) - 1 for i, row in enumerate(rows) if row.sample], np.int64),
    )
