"""The rank's one buffer, and what lies where in it: typed, strided views of KV pages and state slots for every layer.

    KV page:    keys of sparse indices; layer 0: K [page_size, heads, dim], V [page_size, heads, dim]; layer 1: K, V; ...
    state slot: ssm state of every linear layer, then the conv window of every linear layer; rounded up to whole pages

A latent (MLA) is one K of one head, and its own V. Keys of indices come first, so that elements wider than those of K stay aligned.

Views never copy: what a kernel writes through them is in the buffer (memory/arena.py has the geometry).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from twinpool.engine.copies import TierCopies
from twinpool.memory.arena import ALIGN_BYTES, Arena
from twinpool.memory.host import HostArena
from twinpool.models.attention.spec import GqaSpec, MlaSpec, PooledIndexSpec, index_dtype
from twinpool.models.shapes import StateShapes
from twinpool.request import Int32Array

DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn,
}  # fmt: skip
# All bits set is a NaN in every float format.
_NAN_BYTE = 0xFF
_NOTHING = (0,)
# Attention whose cache has views here.
KvShape = GqaSpec | MlaSpec | PooledIndexSpec


@dataclass(frozen=True, slots=True, eq=False)
class KvViews:
    """One attention layer's cache: keys and values, each [pages + 1, page_size, heads, head_dim]; page 0 is padding.

    Of a latent both are the same view, [pages + 1, page_size, 1, width]. index: keys of a sparse index, [pages + 1, keys of a page,
    index_dim]; [pages + 1, 0] without one.
    """

    keys: torch.Tensor
    values: torch.Tensor
    index: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StateViews:
    """One linear layer's states: conv [slots + 1, *conv], ssm [slots + 1, *temporal]; slot 0 is padding.

    A part that the layer does not have is [slots + 1, 0].
    """

    conv: torch.Tensor
    ssm: torch.Tensor


class Memory:
    """The buffer and its views. `kv` and `states` follow the order of attention and of linear layers in the model."""

    def __init__(
        self,
        arena: Arena,
        *,
        page_size: int,
        kv_shapes: Sequence[KvShape],
        state_shapes: Sequence[StateShapes],
        kv_dtype: str,
        ssm_dtype: str,
        conv_dtype: str,
        device: str = "cpu",
        host: HostArena | None = None,
    ) -> None:
        self.arena = arena
        self.page_size = page_size
        self.buffer = _zeroed(arena.total_bytes, device)
        host_buffer = _zeroed(host.total_bytes, "cpu") if host is not None else None
        self.tiers = TierCopies(arena, self.buffer, host, host_buffer)
        typed = {
            name: self.buffer.view(DTYPES[name]) for name in {kv_dtype, index_dtype(kv_dtype), ssm_dtype, conv_dtype}
        }
        index = typed[index_dtype(kv_dtype)]
        self.kv = _kv_views(typed[kv_dtype], index, arena, page_size=page_size, shapes=kv_shapes)
        self.states = _state_views(typed[ssm_dtype], typed[conv_dtype], arena, state_shapes)

    def poison(self, *, pages: Int32Array | Iterable[int] = (), slots: Int32Array | Iterable[int] = ()) -> None:
        """Fill freed pages and slots with NaN, so that a late reader is seen (tests)."""
        for slot in slots:
            self._slot(int(slot)).fill_(_NAN_BYTE)
        for page in pages:
            start = self.arena.page_offset_bytes(int(page))
            self.buffer[start : start + self.arena.page_bytes].fill_(_NAN_BYTE)

    def _slot(self, slot: int) -> torch.Tensor:
        start = self.arena.slot_offset_bytes(slot)
        return self.buffer[start : start + self.arena.slot_bytes]


def _zeroed(size_bytes: int, device: str) -> torch.Tensor:
    """A uint8 buffer of zeros, aligned to ALIGN_BYTES."""
    if device != "cpu":
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    # numpy asks the system for zero pages and does not touch them: a large arena costs nothing until it is used.
    room = np.zeros(size_bytes + ALIGN_BYTES, np.uint8)
    start = -room.ctypes.data % ALIGN_BYTES
    # The views of every dtype need a whole number of their elements.
    return torch.from_numpy(room[start : start + size_bytes // 4 * 4])


def _kv_views(
    typed: torch.Tensor, index: torch.Tensor, arena: Arena, *, page_size: int, shapes: Sequence[KvShape]
) -> tuple[KvViews, ...]:
    """Views of every attention layer; `typed` is the buffer in the KV dtype, `index` in that of indices' keys."""
    views: list[KvViews] = []
    index_views: list[torch.Tensor] = []
    count, stride = arena.n_pages + 1, arena.page_bytes
    at_bytes = arena.kv_offset_bytes
    for shape in shapes:
        keys = (shape.keys_per_page, shape.index_dim) if isinstance(shape, PooledIndexSpec) else _NOTHING
        view, at_bytes = _view(index, keys, at_bytes, count=count, stride_bytes=stride)
        index_views.append(view)
    for shape, index_view in zip(shapes, index_views, strict=True):
        parts: list[torch.Tensor] = []
        for heads, head_dim in _kv_parts(shape):
            item = (page_size, heads, head_dim)
            view, at_bytes = _view(typed, item, at_bytes, count=count, stride_bytes=stride)
            parts.append(view)
        views.append(KvViews(parts[0], parts[-1], index_view))
    assert at_bytes - arena.kv_offset_bytes <= arena.page_bytes, "the layers' KV is larger than a page"
    return tuple(views)


def _kv_parts(shape: KvShape) -> tuple[tuple[int, int], ...]:
    """(Heads, elements of one) of what a layer keeps of a token."""
    if isinstance(shape, GqaSpec):
        return (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.v_head_dim)
    latent = shape.latent if isinstance(shape, PooledIndexSpec) else shape
    return ((1, latent.kv_lora_rank + latent.qk_rope_head_dim),)


def _state_views(
    ssm: torch.Tensor, conv: torch.Tensor, arena: Arena, shapes: Sequence[StateShapes]
) -> tuple[StateViews, ...]:
    """Views of every linear layer; all ssm states first, so that the wider elements stay aligned."""
    count, stride = arena.n_slots + 1, arena.slot_stride_bytes
    at_bytes = 0
    ssm_views: list[torch.Tensor] = []
    for shape in shapes:
        view, at_bytes = _view(ssm, shape.temporal or _NOTHING, at_bytes, count=count, stride_bytes=stride)
        ssm_views.append(view)
    views: list[StateViews] = []
    for shape, ssm_view in zip(shapes, ssm_views, strict=True):
        conv_view, at_bytes = _view(conv, shape.conv or _NOTHING, at_bytes, count=count, stride_bytes=stride)
        views.append(StateViews(conv_view, ssm_view))
    assert at_bytes <= arena.slot_bytes, "the layers' states are larger than a slot"
    return tuple(views)


def _view(
    typed: torch.Tensor, item: tuple[int, ...], at_bytes: int, *, count: int, stride_bytes: int
) -> tuple[torch.Tensor, int]:
    """(`count` items, one every `stride_bytes` from `at_bytes` on: [count, *item]; the byte after the first item)."""
    width = typed.element_size()
    assert at_bytes % width == 0, "an item starts between elements"
    assert stride_bytes % width == 0, "items lie between elements"
    strides = [math.prod(item[i + 1 :]) for i in range(len(item))]
    view = typed.as_strided((count, *item), (stride_bytes // width, *strides), at_bytes // width)
    return view, at_bytes + math.prod(item) * width
