"""Shapes of a Gated DeltaNet state (reference 1.6)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.models.shapes import StateShapes, shard


@dataclass(frozen=True, slots=True)
class GdnSpec:
    """Key and value heads and their widths; a convolution of `kernel` taps over q|k|v."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    kernel: int

    def states(self, tp: int) -> StateShapes:
        """conv [(2 Hk dk + Hv dv) / tp, kernel - 1], q, k and v each cut on their own; temporal [Hv / tp, dv, dk]."""
        keys = shard(self.key_heads, tp, what="linear key heads") * self.key_dim
        heads = shard(self.value_heads, tp, what="linear value heads")
        return StateShapes((2 * keys + heads * self.value_dim, self.kernel - 1), (heads, self.value_dim, self.key_dim))
