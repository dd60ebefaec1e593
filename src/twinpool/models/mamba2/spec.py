"""Bytes of a Mamba2 state (reference 1.6)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.models.shapes import StateShapes, shard


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """`heads` heads of head_dim, state size N, G groups, a convolution of `kernel` taps over x|B|C."""

    heads: int
    head_dim: int
    state_size: int
    groups: int
    kernel: int

    def states(self, tp: int) -> StateShapes:
        """conv [(inner + 2 G N) / tp, kernel - 1], G raised to tp when it does not divide; temporal [H / tp, head_dim, N]."""
        heads = shard(self.heads, tp, what="Mamba heads")
        groups = self.groups if self.groups % tp == 0 else tp
        channels = (self.heads * self.head_dim + 2 * groups * self.state_size) // tp
        return StateShapes((channels, self.kernel - 1), (heads, self.head_dim, self.state_size))
