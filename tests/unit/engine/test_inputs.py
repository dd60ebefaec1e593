"""A plan as flat arrays."""

from __future__ import annotations

import numpy as np
import pytest

from twinpool.engine.inputs import LastTokens, pack
from twinpool.step import Row, StepPlan

PAGES = np.arange(1, 9, dtype=np.int32)


def test_rows_are_laid_one_after_another() -> None:
    last = LastTokens()
    last.put(7, 42)
    rows = (
        Row(rid=7, start=5, end=6, tokens=None, slot=3, pages=PAGES, checkpoint_at=6, checkpoint_slot=9),
        Row(rid=8, start=4, end=7, tokens=np.array([11, 12, 13], np.int32), slot=1, pages=PAGES, sample=False),
        Row(rid=9, start=0, end=2, tokens=np.array([21, 22], np.int32), slot=2, pages=PAGES),
    )
    step = pack(StepPlan(step=1, rows=rows), last)
    assert step.input_ids.tolist() == [42, 11, 12, 13, 21, 22]
    assert step.positions.tolist() == [5, 4, 5, 6, 0, 1]
    assert step.row_offsets.tolist() == [0, 1, 4, 6]
    assert (step.starts.tolist(), step.ends.tolist()) == ([5, 4, 0], [6, 7, 2])
    assert step.slots.tolist() == [3, 1, 2]
    assert (step.checkpoint_offsets.tolist(), step.checkpoint_slots.tolist()) == ([1, 0, 0], [9, 0, 0])
    assert step.sample_at.tolist() == [0, 5]
    assert all(table is PAGES for table in step.pages)


def test_a_decode_row_of_a_request_that_never_sampled_is_a_bug() -> None:
    with pytest.raises(KeyError):
        pack(StepPlan(step=1, rows=(Row(rid=1, start=0, end=1, tokens=None, slot=1, pages=PAGES),)), LastTokens())
