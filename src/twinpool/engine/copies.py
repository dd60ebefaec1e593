"""Copies within the rank's buffer, to host memory and back, and as bytes for the disk: whole pages and slots, or a layer's part."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from twinpool.memory.arena import Arena
from twinpool.memory.host import HostArena
from twinpool.models.native import native, use_native
from twinpool.request import Int32Array
from twinpool.step import HostCopy, HostFill, SlotOrder, StoreCopy

Bytes = npt.NDArray[np.uint8]
Span = tuple[int, int]


class Part(NamedTuple):
    """Bytes [start, end) of every page and of every slot, counted from where it begins."""

    page: tuple[Span, ...] = ()
    slot: tuple[Span, ...] = ()


class TierCopies:
    """Pages and slots as rows of bytes on both sides. device: the rank's buffer (uint8); host: that of the host's arena, if any."""

    def __init__(
        self, arena: Arena, device: torch.Tensor, host: HostArena | None, host_buffer: torch.Tensor | None
    ) -> None:
        self._arena, self._device = arena, device
        self._host, self._host_buffer = host, host_buffer
        self._pages = _rows(device[arena.page_offset_bytes(0) :], arena.page_bytes, padding=arena.n_pages + 1)
        # Pages of the host lie one after another whatever chunk they are in (memory/host.py).
        self._host_pages = None if host_buffer is None else _rows(host_buffer, arena.page_bytes)
        self.whole = Part(((0, arena.page_bytes),), ((0, arena.slot_bytes),))

    def move(self, order: SlotOrder | HostCopy, part: Part) -> None:
        """Obey an order as far as `part` of every page and slot is concerned; parts that do not overlap can come in any order."""
        if isinstance(order, HostCopy):
            for span in part.page:
                self._move_pages(order, span)
        for start, end in part.slot:
            self._move_slot(order, start, end)

    def gather(self, order: StoreCopy) -> tuple[memoryview, memoryview]:
        """A copy of the order's pages, one after another, and of its slot, in bytes."""
        pages = torch.from_numpy(order.pages).long().to(self._device.device)
        kv = self._pages[pages].cpu().numpy()
        return kv.reshape(-1).data, self._slot(order.slot).cpu().numpy().copy().data

    def fill_host(self, order: HostFill) -> None:
        """Put bytes that were read from the disk where the order says."""
        assert self._host_pages is not None
        count, page_bytes = len(order.host_pages), self._arena.page_bytes
        if count and page_bytes:
            kv = np.frombuffer(order.kv[: count * page_bytes], np.uint8).reshape(count, page_bytes)
            self._host_pages.numpy()[order.host_pages] = kv
        self._host_slot(order.host_slot).numpy()[:] = np.frombuffer(order.state, np.uint8)

    def _move_pages(self, order: HostCopy, span: Span) -> None:
        assert self._host_pages is not None
        device, host = (self._pages, order.pages), (self._host_pages, order.host_pages)
        (dst, dst_ids), (src, src_ids) = (host, device) if order.to_host else (device, host)
        copy_rows(dst, dst_ids, src, src_ids, span)

    def _move_slot(self, order: SlotOrder | HostCopy, start: int, end: int) -> None:
        if isinstance(order, SlotOrder):
            dst = self._slot(order.dst)[start:end]
            dst.zero_() if order.src is None else dst.copy_(self._slot(order.src)[start:end])
        elif order.slot:
            device, host = self._slot(order.slot)[start:end], self._host_slot(order.host_slot)[start:end]
            host.copy_(device) if order.to_host else device.copy_(host)

    def _slot(self, slot: int) -> torch.Tensor:
        start = self._arena.slot_offset_bytes(slot)
        return self._device[start : start + self._arena.slot_bytes]

    def _host_slot(self, slot: int) -> torch.Tensor:
        assert self._host is not None
        assert self._host_buffer is not None
        start = self._host.slot_offset_bytes(slot)
        return self._host_buffer[start : start + self._host.slot_bytes]


def copy_rows(dst: torch.Tensor, dst_ids: Int32Array, src: torch.Tensor, src_ids: Int32Array, span: Span) -> None:
    """dst[dst_ids[i], start:end] = src[src_ids[i], start:end]; both uint8 [rows, width], of one width, on any devices."""
    start, end = span
    if start == end or not len(dst_ids):
        return
    if use_native(dst.device) and use_native(src.device):
        native.copy_rows(
            dst.data_ptr() + start, dst.stride(0), dst_ids, src.data_ptr() + start, src.stride(0), src_ids, end - start
        )
        return
    to, of = (torch.from_numpy(ids).long() for ids in (dst_ids, src_ids))
    dst[to.to(dst.device), start:end] = src[of.to(src.device), start:end].to(dst.device)


def _rows(buffer: torch.Tensor, width_bytes: int, *, padding: int = 0) -> torch.Tensor:
    """[whole rows, width_bytes] of a buffer, a view. Without attention pages have no bytes and only count tokens: `padding` rows."""
    if not width_bytes:
        return buffer[:0].view(padding, 0)
    whole = len(buffer) // width_bytes
    return buffer[: whole * width_bytes].view(whole, width_bytes)
