"""Shapes of a Kimi Delta Attention state (reference 1.6)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.models.shapes import StateShapes, shard


@dataclass(frozen=True, slots=True)
class KdaSpec:
    """`heads` heads of head_dim for q, k and v alike; a convolution of `kernel` taps over all three."""

    heads: int
    head_dim: int
    kernel: int

    def states(self, tp: int) -> StateShapes:
        """conv [kernel - 1, 3 H d / tp] (axes the other way round than in GDN); temporal [H / tp, d, d]."""
        heads = shard(self.heads, tp, what="linear heads")
        return StateShapes((self.kernel - 1, 3 * heads * self.head_dim), (heads, self.head_dim, self.head_dim))
