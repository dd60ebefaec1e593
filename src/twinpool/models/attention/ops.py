"""Attention over the paged cache: compiled on the CPU (no gather, fixed key tiles), row by row in torch elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from twinpool.models.attention import reference
from twinpool.models.attention.cache import kept
from twinpool.models.bound import Step
from twinpool.models.native import CODES, native, use_native


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Heads and sizes of a layer.

    rotary: leading elements of a head that are rotated, 0 for none; scale: factor on the scores; eps: of the per-head norms, where
    there are any; gated: each head's query comes with a gate on its output.
    """

    heads: int
    kv_heads: int
    dim: int
    rotary: int
    scale: float
    eps: float = 0.0
    gated: bool = False

    @property
    def query_columns(self) -> int:
        """Columns of all queries, and gates, in the projection."""
        return (1 + self.gated) * self.heads * self.dim


class AttentionKernel:
    """A layer's constants, prepared once.

    query_scale, key_scale: float32 [dim] of the per-head norms, None without; table: float32 [positions, rotary], cos then sin;
    dtype: of activations.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        query_scale: torch.Tensor | None,
        key_scale: torch.Tensor | None,
        table: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.shape = shape
        self.query_scale, self.key_scale, self.table = query_scale, key_scale, table
        self.handle: Any = None
        if use_native(table.device):
            self.handle = native.Attention(
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                dim=shape.dim,
                rotary=shape.rotary,
                scale=shape.scale,
                eps=shape.eps,
                dtype=CODES[dtype],
                query_scale=0 if query_scale is None else query_scale.data_ptr(),
                key_scale=0 if key_scale is None else key_scale.data_ptr(),
                table=table.data_ptr(),
                gated=shape.gated,
            )


def attend(kernel: AttentionKernel, step: Step, layer: int, proj: torch.Tensor) -> torch.Tensor:
    """[T, heads * dim] of proj's dtype, gated if the shape is; keys and values of the step's tokens go to their pages first.

    proj [T, query_columns + 2 kv_heads dim], rows contiguous: query (and gate) of each head, then keys, then values.
    """
    if kernel.handle is None:
        return _attend_torch(kernel, step, layer, proj)
    kv, n, width = step.memory.kv[layer].handle, len(proj), kernel.shape.heads * kernel.shape.dim
    work = torch.empty((2, n, width), dtype=proj.dtype)
    q, out = work[0], work[1]
    at, ld = proj.data_ptr(), proj.stride(0)
    kernel.handle.rotate_and_store(step.rows, kv, at, ld, q.data_ptr())
    kernel.handle.attend(step.rows, kv, q.data_ptr(), at, ld, out.data_ptr())
    return out


def _attend_torch(kernel: AttentionKernel, step: Step, layer: int, proj: torch.Tensor) -> torch.Tensor:
    shape, batch, views, dtype = kernel.shape, step.batch, step.memory.kv[layer].views, proj.dtype
    page_size = views.keys.shape[1]
    queries, k, v = proj.split([shape.query_columns, shape.kv_heads * shape.dim, shape.kv_heads * shape.dim], -1)
    q, *gate = queries.float().unflatten(-1, (shape.heads, 1 + shape.gated, shape.dim)).unbind(-2)
    k, v = (t.float().unflatten(-1, (shape.kv_heads, shape.dim)) for t in (k, v))
    positions = torch.from_numpy(batch.positions).to(proj.device)
    cos_sin = kernel.table[positions]
    q = _norm_and_rotate(q, kernel.query_scale, cos_sin, shape, dtype)
    k = _norm_and_rotate(k, kernel.key_scale, cos_sin, shape, dtype)
    pieces = []
    for row, end in enumerate(batch.ends.tolist()):
        at = slice(int(batch.row_offsets[row]), int(batch.row_offsets[row + 1]))
        tokens = torch.arange(end, device=proj.device)
        pages = torch.from_numpy(batch.pages[row]).to(proj.device).long()[tokens // page_size]
        places = pages, tokens % page_size
        new = pages[int(batch.starts[row]) :], (tokens % page_size)[int(batch.starts[row]) :]
        views.keys[new] = kept(k[at], views.keys.dtype)
        views.values[new] = kept(v[at], views.values.dtype)
        keys, values = views.keys[places].float(), views.values[places].float()
        pieces.append(reference.attention(q[at], keys, values, positions=positions[at], scale=shape.scale))
    out = torch.cat(pieces).to(dtype)
    if gate:
        out = (out.float() * torch.sigmoid(gate[0]).to(dtype).float()).to(dtype)
    return out.flatten(1)


def _norm_and_rotate(
    x: torch.Tensor, scale: torch.Tensor | None, cos_sin: torch.Tensor, shape: AttentionShape, dtype: torch.dtype
) -> torch.Tensor:
    normed = x if scale is None else reference.head_norm(x, scale, shape.eps).to(dtype).float()
    return reference.rotate(normed, cos_sin).to(dtype).float()
