"""Geometry of a rank's one buffer: a state region and a KV region of equal pages, with a fixed quota each (DESIGN, "Arena").

    | slot 0 (padding) | slot 1 | ... | slot K | page 0 (padding) | page 1 | ... | page N |
      each slot: pages_per_slot pages            each page: page_size tokens of all attention layers

Both regions are whole pages, so moving the border later changes quotas, not layout. A model without attention has pages of no
bytes, which only count tokens; its slots are whole cache lines instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.units import ceil_div, round_up

ALIGN_BYTES = 64  # a cache line, and the widest vector load of the kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """page_bytes: one KV page, 0 without attention; slot_bytes: one state slot before rounding.

    n_slots, n_pages: usable ids (padding is added).
    """

    page_bytes: int
    slot_bytes: int
    n_slots: int
    n_pages: int

    @property
    def pages_per_slot(self) -> int:
        """Whole pages that hold one slot; 0 where pages have no bytes."""
        return ceil_div(self.slot_bytes, self.page_bytes) if self.page_bytes else 0

    @property
    def slot_stride_bytes(self) -> int:
        """Distance between slots."""
        return round_up(self.slot_bytes, self.page_bytes or ALIGN_BYTES)

    @property
    def kv_offset_bytes(self) -> int:
        """Where the KV region (its padding page) starts."""
        return (self.n_slots + 1) * self.slot_stride_bytes

    @property
    def total_bytes(self) -> int:
        """Size of the buffer."""
        return self.kv_offset_bytes + (self.n_pages + 1) * self.page_bytes

    @property
    def rounding_bytes(self) -> int:
        """Bytes lost to rounding slots up to whole pages."""
        return (self.n_slots + 1) * (self.slot_stride_bytes - self.slot_bytes)

    def slot_offset_bytes(self, slot: int) -> int:
        """Where slot `slot` (0 = padding) starts."""
        return slot * self.slot_stride_bytes

    def page_offset_bytes(self, page: int) -> int:
        """Where KV page `page` (0 = padding) starts."""
        return self.kv_offset_bytes + page * self.page_bytes
