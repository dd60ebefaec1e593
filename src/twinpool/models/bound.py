"""The pools and a step, made ready for the layers: native handles beside torch views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from twinpool.models.native import CODES, native, use_native
from twinpool.models.step_batch import KvLayer, MemoryViews, StateLayer, StepBatch

_Layer = TypeVar("_Layer")


@dataclass(frozen=True, slots=True, eq=False)
class BoundKv:
    """One attention layer's cache: torch views and, on the CPU, the kernels' handle (None for keys unlike their values)."""

    views: KvLayer
    handle: Any


@dataclass(frozen=True, slots=True, eq=False)
class BoundState:
    """One linear layer's states: torch views and, on the CPU, the kernels' handles."""

    views: StateLayer
    conv: Any
    ssm: Any


class _Awaited(Sequence[_Layer]):
    """Layers, each of which waits until its part is there when a step comes to it."""

    def __init__(self, layers: Sequence[_Layer], wait: Callable[[int], None]) -> None:
        self._layers, self._wait = layers, wait

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer: int) -> _Layer:  # type: ignore[override]  # nobody slices layers
        self._wait(layer)
        return self._layers[layer]


@dataclass(frozen=True, slots=True, eq=False)
class BoundMemory:
    """Attention layers and linear layers, each in model order."""

    source: MemoryViews
    kv: Sequence[BoundKv]
    states: Sequence[BoundState]

    @staticmethod
    def of(memory: MemoryViews) -> BoundMemory:
        """Handles over `memory`, which they keep alive."""
        return BoundMemory(memory, tuple(map(bind_kv, memory.kv)), tuple(map(_bind_state, memory.states)))


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step as layers get it. rows: the kernels' form of `batch`, None where there are no kernels."""

    batch: StepBatch
    memory: BoundMemory
    rows: Any

    @staticmethod
    def of(batch: StepBatch, memory: BoundMemory, *, device: torch.device) -> Step:
        """The step over bound memory."""
        if batch.arrivals is not None:
            kv = _Awaited(memory.kv, batch.arrivals.await_kv)
            memory = BoundMemory(memory.source, kv, _Awaited(memory.states, batch.arrivals.await_state))
        if not use_native(device):
            return Step(batch, memory, None)
        rows = native.Rows(
            batch.positions,
            batch.row_offsets,
            batch.starts,
            batch.ends,
            batch.slots,
            batch.checkpoint_offsets,
            batch.checkpoint_slots,
            batch.pages,
        )
        return Step(batch, memory, rows)


def bind_kv(layer: KvLayer) -> BoundKv:
    """The cache with the kernels' handle, which does not keep it alive."""
    keys, values = layer.keys, layer.values
    if not use_native(keys.device) or keys.shape != values.shape:
        return BoundKv(layer, None)
    assert keys.stride() == values.stride(), "keys and values lie alike"
    assert keys[0].is_contiguous(), "a page's tokens lie one after another"
    _, page_size, heads, dim = keys.shape
    handle = native.KvView(
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        page_stride_bytes=keys.stride(0) * keys.element_size(),
        page_size=page_size,
        heads=heads,
        dim=dim,
        dtype=CODES[keys.dtype],
    )
    return BoundKv(layer, handle)


def _bind_state(layer: StateLayer) -> BoundState:
    if not use_native(layer.ssm.device):
        return BoundState(layer, None, None)
    handles = []
    for view in (layer.conv, layer.ssm):
        assert view[0].is_contiguous(), "a slot's part is contiguous"
        handles.append(native.SlotView(view.data_ptr(), view.stride(0) * view.element_size(), CODES[view.dtype]))
    return BoundState(layer, *handles)
