"""Shapes of a short-convolution state (reference 1.6)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.models.shapes import StateShapes, shard


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A convolution of `kernel` taps over the hidden size, and no recurrent state."""

    hidden_size: int
    kernel: int

    def states(self, tp: int) -> StateShapes:
        """conv [hidden / tp, kernel - 1]; no temporal state."""
        return StateShapes((shard(self.hidden_size, tp, what="hidden channels"), self.kernel - 1), ())
