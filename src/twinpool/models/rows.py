"""A step made ready for the layers: the arrays of step_batch.py, and the compiled kernels' view of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from twinpool.models import native
from twinpool.models.step_batch import Int32Array, StepBatch


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """positions: int64 [T] tensor; checkpoint_offsets: as in the step, -1 for none. `native` is the compiled kernels' view of the rows,
    None without them; `step` and `kept` keep what it points at alive."""

    step: StepBatch
    positions: torch.Tensor
    checkpoint_offsets: Int32Array
    page_size: int
    native: Any
    kept: tuple[Any, ...]

    @staticmethod
    def of(step: StepBatch, *, page_size: int, device: torch.device) -> PackedRows:
        """Wrap a packed step without copying page tables."""
        checkpoint_offsets = np.where(step.checkpoint_offsets > 0, step.checkpoint_offsets, -1).astype(np.int32)
        page_tables = np.array([_address(table) for table in step.pages], np.int64)
        rows = None
        if native.available() and device.type == "cpu":
            rows = native.kernels.Rows(
                len(step.slots), _address(step.row_offsets), _address(step.starts), _address(step.slots),
                _address(checkpoint_offsets), _address(step.checkpoint_slots), _address(page_tables),
            )  # fmt: skip
        return PackedRows(
            step=step,
            positions=torch.from_numpy(step.positions).to(device),
            checkpoint_offsets=checkpoint_offsets,
            page_size=page_size,
            native=rows,
            kept=(page_tables,),
        )

    def spans(self) -> list[tuple[int, int]]:
        """(begin, end) of each row on the packed token axis."""
        offsets = self.step.row_offsets.tolist()
        return list(zip(offsets[:-1], offsets[1:], strict=True))


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
