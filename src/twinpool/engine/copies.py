"""Copies between the rank's buffer, host memory and bytes for the disk: whole pages by their ids at once, and whole slots."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from twinpool.memory.arena import Arena
from twinpool.memory.host import HostArena
from twinpool.step import HostCopy, HostFill, StoreCopy

Bytes = npt.NDArray[np.uint8]


class TierCopies:
    """Pages and slots as rows of bytes on both sides. device: the rank's buffer (uint8); host: that of the host's arena, if any."""

    def __init__(self, arena: Arena, device: torch.Tensor, host: HostArena | None, host_buffer: Bytes | None) -> None:
        self._arena, self._device = arena, device
        self._host, self._host_buffer = host, host_buffer
        self._pages = self._page_rows()

    def copy_host(self, order: HostCopy) -> None:
        """Copy whole pages and a whole slot between the device and the host, as they lie in memory."""
        assert self._host is not None
        if len(order.pages) and self._arena.page_bytes:
            pages = torch.from_numpy(order.pages).long().to(self._device.device)
            rows = self._host_rows()
            if order.to_host:
                rows[order.host_pages] = self._pages[pages].cpu().numpy()
            else:
                self._pages[pages] = torch.from_numpy(rows[order.host_pages]).to(self._device.device)
        if order.slot:
            device, host = self._slot(order.slot), torch.from_numpy(self._host_slot(order.host_slot))
            if order.to_host:
                host.copy_(device)
            else:
                device.copy_(host)

    def gather(self, order: StoreCopy) -> tuple[memoryview, memoryview]:
        """A copy of the order's pages, one after another, and of its slot, in bytes."""
        pages = torch.from_numpy(order.pages).long().to(self._device.device)
        kv = self._pages[pages].cpu().numpy()
        return kv.reshape(-1).data, self._slot(order.slot).cpu().numpy().copy().data

    def fill_host(self, order: HostFill) -> None:
        """Put bytes that were read from the disk where the order says."""
        count, page_bytes = len(order.host_pages), self._arena.page_bytes
        if count and page_bytes:
            kv = np.frombuffer(order.kv[: count * page_bytes], np.uint8).reshape(count, page_bytes)
            self._host_rows()[order.host_pages] = kv
        self._host_slot(order.host_slot)[:] = np.frombuffer(order.state, np.uint8)

    def _page_rows(self) -> torch.Tensor:
        """The device's pages, [pages + 1, page_bytes], a view."""
        start, page_bytes = self._arena.page_offset_bytes(0), self._arena.page_bytes
        if not page_bytes:  # without attention, pages only count tokens
            return self._device[:0].view(self._arena.n_pages + 1, 0)
        whole = (len(self._device) - start) // page_bytes
        return self._device[start : start + whole * page_bytes].view(whole, page_bytes)

    def _host_rows(self) -> Bytes:
        """The host's pages, a view: pages lie one after another whatever chunk they are in (memory/host.py)."""
        assert self._host_buffer is not None
        page_bytes = self._arena.page_bytes
        whole = len(self._host_buffer) // page_bytes
        return self._host_buffer[: whole * page_bytes].reshape(whole, page_bytes)

    def _slot(self, slot: int) -> torch.Tensor:
        start = self._arena.slot_offset_bytes(slot)
        return self._device[start : start + self._arena.slot_bytes]

    def _host_slot(self, slot: int) -> Bytes:
        assert self._host is not None
        assert self._host_buffer is not None
        start = self._host.slot_offset_bytes(slot)
        return self._host_buffer[start : start + self._host.slot_bytes]
