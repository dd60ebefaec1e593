"""What a step tells the layers: its rows (StepBatch) and where the pools are (MemoryViews).

Rows lie one after another in the packed token axis; T tokens, R rows. Row r is tokens [row_offsets[r], row_offsets[r + 1]) of
the packed axis and positions [starts[r], ends[r]) of its sequence. For each row, every linear layer reads slots[r], carries the
state over the row's tokens and leaves it in slots[r]; every attention layer writes K and V of the row's tokens to their pages and
attends over positions [0, token]. Token t of a sequence is at offset t % page_size of page pages[r][t // page_size].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class Arrivals(Protocol):
    """Prefixes that come back from the host while the forward runs."""

    def await_kv(self, layer: int) -> None:
        """Return when attention layer `layer` has its pages."""
        ...

    def await_state(self, layer: int) -> None:
        """Return when linear layer `layer` has its states."""
        ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepBatch:
    """The rows of one step. All arrays are C-contiguous and are kept alive by this object.

    positions: int64 [T]; row_offsets: int32 [R + 1]; starts, ends: int32 [R], absolute; slots: int32 [R].
    checkpoint_offsets: int32 [R], tokens of the row (1..length) after which its states are also written to checkpoint_slots[r],
    0 for none; checkpoint_slots: int32 [R]. pages: R page tables, int32 [>= ceil(ends[r] / page_size)] each. arrivals: what a layer
    has to wait for before it touches its pools, None when everything is there.
    """

    positions: Int64Array
    row_offsets: Int32Array
    starts: Int32Array
    ends: Int32Array
    slots: Int32Array
    checkpoint_offsets: Int32Array
    checkpoint_slots: Int32Array
    pages: tuple[Int32Array, ...]
    arrivals: Arrivals | None = None

    @property
    def n_rows(self) -> int:
        """R."""
        return len(self.slots)

    @property
    def n_tokens(self) -> int:
        """T."""
        return len(self.positions)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedStep(StepBatch):
    """A step's rows, with what goes into the model and what comes out of it.

    input_ids: int64 [T]. sample_at: int64 [sampling rows], the packed place of each sampling row's last token. Page
    tables are the plan's own arrays, not copies.
    """

    input_ids: Int64Array
    sample_at: Int64Array


class KvLayer(Protocol):
    """One attention layer's cache."""

    @property
    def keys(self) -> torch.Tensor:
        """[pages + 1, page_size, kv_heads, head_dim]; each page contiguous, pages at any constant distance.

        A latent (MLA) is one head of kv_lora_rank + qk_rope_head_dim elements, and its values are the same memory.
        """
        ...

    @property
    def values(self) -> torch.Tensor:
        """Like keys, of the same dtype."""
        ...

    @property
    def index(self) -> torch.Tensor:
        """[pages + 1, keys of a page, index_dim]: keys of a sparse index, one for each pool of tokens whose last token is in the page.

        The key of the pool that ends at offset o of a page is number o // pool tokens. [pages + 1, 0] without an index.
        """
        ...


class StateLayer(Protocol):
    """One linear layer's states; each slot's part contiguous, slots at any constant distance."""

    @property
    def conv(self) -> torch.Tensor:
        """[slots + 1, channels, kernel - 1]: the last inputs of the convolution, oldest first, in the conv dtype (reference 1.6)."""
        ...

    @property
    def ssm(self) -> torch.Tensor:
        """[slots + 1, value_heads, value_dim, key_dim], in the ssm dtype (reference 1.6)."""
        ...


class MemoryViews(Protocol):
    """The pools as layers see them. engine.tensors.Memory is one."""

    @property
    def kv(self) -> Sequence[KvLayer]:
        """Attention layers, in model order."""
        ...

    @property
    def states(self) -> Sequence[StateLayer]:
        """Linear layers, in model order."""
        ...
