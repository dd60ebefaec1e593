"""Mamba1: shapes of a state, and the layers of Mamba, Falcon-Mamba and Jamba (reference 1.6)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.models.attention.spec import GqaSpec
from twinpool.models.shapes import ConfigReader, LayerSpec, StateShapes, shard


@dataclass(frozen=True, slots=True)
class Mamba1Spec:
    """`inner` channels with a state of state_size each; a convolution of `kernel` taps over the channels alone."""

    inner: int
    state_size: int
    kernel: int

    def states(self, tp: int) -> StateShapes:
        """conv [inner / tp, kernel - 1]; temporal [inner / tp, 1, N]. Raises ModelError when tp does not divide."""
        channels = shard(self.inner, tp, what="Mamba channels")
        return StateShapes((channels, self.kernel - 1), (channels, 1, self.state_size))


def mamba_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Mamba1 in every layer, no attention. Raises ModelError."""
    inner = reader.integer("expand", default=2) * reader.integer("hidden_size")
    mamba = Mamba1Spec(
        inner=reader.integer("intermediate_size", default=inner),
        state_size=reader.integer("state_size", default=16),
        kernel=reader.integer("conv_kernel", default=4, least=2),
    )
    return (LayerSpec(linear=mamba),) * reader.integer("num_hidden_layers")


def jamba_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Attention in layer attn_layer_offset of every attn_layer_period. Raises ModelError."""
    mamba = Mamba1Spec(
        inner=reader.integer("mamba_expand", default=2) * reader.integer("hidden_size"),
        state_size=reader.integer("mamba_d_state", default=16),
        kernel=reader.integer("mamba_d_conv", default=4, least=2),
    )
    period = reader.integer("attn_layer_period", default=8)
    offset = reader.integer("attn_layer_offset", default=4, least=0)
    linear, attention = LayerSpec(linear=mamba), LayerSpec(attention=GqaSpec.read(reader))
    return tuple(attention if i % period == offset else linear for i in range(reader.integer("num_hidden_layers")))
