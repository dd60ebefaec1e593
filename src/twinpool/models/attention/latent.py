"""Attention over a latent of all heads (MLA): the pool keeps one narrow row a token, and heads never expand it.

Keys of head h are K_h latent, its values V_h latent. So a query may go through K_h^T instead, and a weighted sum of latents
through V_h afterwards: what is left is attention of many queries to one key-value head whose key and value are the same row,
latent | rotated key. That is what the kernels of grouped-query attention run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from twinpool.models.attention import reference
from twinpool.models.attention.cache import kept
from twinpool.models.bound import BoundKv, Step
from twinpool.models.native import CODES, native, use_native


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Heads and sizes of a layer.

    rank: elements of a latent; plain, rotary: elements of a key that come from the latent and that all heads share, rotated where
    the model has positions; value_dim: elements of a head's value; scale: factor on the scores.
    """

    heads: int
    rank: int
    plain: int
    rotary: int
    value_dim: int
    scale: float

    @property
    def width(self) -> int:
        """Elements of a token in the pool: latent | shared key."""
        return self.rank + self.rotary

    @property
    def key_dim(self) -> int:
        """Elements of a head's query."""
        return self.plain + self.rotary


class LatentKernel:
    """A layer's constants, prepared once. dtype: of activations; device: where they are computed."""

    def __init__(self, shape: LatentShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.handle: Any = None
        if use_native(device):
            self.handle = native.Attention(
                heads=shape.heads,
                kv_heads=1,
                dim=shape.width,
                rotary=0,
                scale=shape.scale,
                eps=0.0,
                dtype=CODES[dtype],
                query_scale=0,
                key_scale=0,
                table=0,
                gated=False,
            )


def attend(kernel: LatentKernel, step: Step, layer: int, queries: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """[T, heads, width] of queries' dtype: weighted sums of rows of attention layer `layer`; the step's own go to their pages first.

    queries [T, heads, width], contiguous; latents [T, width].
    """
    kv = step.memory.kv[layer]
    store(step, kv.views.keys, latents)
    return attend_stored(kernel, step, kv, queries)


def attend_stored(kernel: LatentKernel, step: Step, kv: BoundKv, queries: torch.Tensor) -> torch.Tensor:
    """As attend, over what is in the pages of `kv` already."""
    if kernel.handle is None:
        return _attend_torch(kernel, step, kv.views.keys, queries)
    out = torch.empty_like(queries)
    kernel.handle.attend(step.rows, kv.handle, queries.data_ptr(), 0, 0, out.data_ptr())
    return out


def rotate_pairs(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, rotary], whose elements 2 i and 2 i + 1 are a pair; cos_sin [T, rotary]: cos of each pair, then sin.

    The first elements of all pairs come out before the second ones: scores do not see the order.
    """
    return reference.rotate(torch.cat([x[..., 0::2], x[..., 1::2]], -1), cos_sin)


def store(step: Step, view: torch.Tensor, latents: torch.Tensor) -> None:
    """Write the step's latents [T, width] to their pages in `view`."""
    batch, page_size = step.batch, view.shape[1]
    pages = [
        batch.pages[row][np.arange(start, end) // page_size]
        for row, (start, end) in enumerate(zip(batch.starts.tolist(), batch.ends.tolist(), strict=True))
    ]
    places = (torch.from_numpy(part).to(view.device) for part in (np.concatenate(pages), batch.positions % page_size))
    page, offset = (part.long() for part in places)
    view[page, offset, 0] = kept(latents, view.dtype)


def _attend_torch(kernel: LatentKernel, step: Step, view: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    batch, page_size = step.batch, view.shape[1]
    positions = torch.from_numpy(batch.positions).to(view.device)
    pieces = []
    for row, end in enumerate(batch.ends.tolist()):
        at = slice(int(batch.row_offsets[row]), int(batch.row_offsets[row + 1]))
        tokens = torch.arange(end, device=view.device)
        pages = torch.from_numpy(batch.pages[row]).to(view.device).long()[tokens // page_size]
        rows = view[pages, tokens % page_size].float()
        pieces.append(
            reference.attention(queries[at].float(), rows, rows, positions=positions[at], scale=kernel.shape.scale)
        )
    return torch.cat(pieces).to(queries.dtype)
