"""Rotary embedding, KV writes and attention over pages for packed rows. Compiled kernels on the CPU, torch elsewhere."""

from __future__ import annotations

import torch

from twinpool.models import native
from twinpool.models.attention import reference
from twinpool.models.rows import PackedRows
from twinpool.models.step_batch import KvLayer
from twinpool.units import ceil_div


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """x: contiguous [T, heads, dim] (rotated in place where the kernels run); cos, sin: float32 [context, n] tables."""
    if not native.use(x):
        return reference.rotate(x, cos[rows.positions], sin[rows.positions])
    tokens, heads, dim = x.shape
    native.kernels.rope(
        x.data_ptr(), x.stride(0), x.stride(1), heads, dim, 2 * cos.shape[1], rows.positions.data_ptr(), tokens,
        cos.data_ptr(), sin.data_ptr(), native.DTYPE_CODES[x.dtype],
    )  # fmt: skip
    return x


def write_kv(k: torch.Tensor, v: torch.Tensor, rows: PackedRows, cache: KvLayer) -> None:
    """Put the step's keys and values, each [T, Hkv, D] with strided tokens, into the rows' pages."""
    if native.use(k):
        native.kernels.write_kv(
            rows.native, k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), k.shape[1], k.shape[2], rows.page_size,
            *_layout(cache), native.DTYPE_CODES[k.dtype], native.DTYPE_CODES[cache.keys.dtype],
        )  # fmt: skip
        return
    for (begin, end), start, table in zip(rows.spans(), rows.step.starts.tolist(), rows.step.pages, strict=True):
        where = torch.arange(start, start + end - begin, device=k.device)
        pages = torch.from_numpy(table).to(k.device)[where // rows.page_size].long()
        cache.keys[pages, where % rows.page_size] = k[begin:end].to(cache.keys.dtype)
        cache.values[pages, where % rows.page_size] = v[begin:end].to(cache.values.dtype)


def attend(q: torch.Tensor, scale: float, rows: PackedRows, cache: KvLayer) -> torch.Tensor:
    """q: contiguous [T, Hq, D] → [T, Hq, D] in the model dtype; keys and values are read from the pages, the step's own included."""
    tokens, heads, dim = q.shape
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    if native.use(q):
        native.kernels.paged_attention(
            rows.native, q.data_ptr(), q.stride(0), q.stride(1), out.data_ptr(), heads, cache.keys.shape[2], dim, scale,
            rows.page_size, *_layout(cache), native.DTYPE_CODES[q.dtype], native.DTYPE_CODES[cache.keys.dtype],
        )  # fmt: skip
        return out
    for (begin, end), start, table in zip(rows.spans(), rows.step.starts.tolist(), rows.step.pages, strict=True):
        length = start + end - begin
        pages = torch.from_numpy(table[: ceil_div(length, rows.page_size)]).to(q.device).long()
        k, v = (part[pages].flatten(0, 1)[:length] for part in (cache.keys, cache.values))
        out[begin:end] = reference.attend(q[begin:end], k, v, scale).to(out.dtype)
    return out


def _layout(cache: KvLayer) -> tuple[int, int, int, int, int]:
    """(base address, bytes from page to page, offset of K, offset of V, bytes from token to token) of one layer's cache."""
    keys, values = cache.keys, cache.values
    width = keys.element_size()
    base = keys.data_ptr()
    return base, keys.stride(0) * width, 0, values.data_ptr() - base, keys.stride(1) * width
