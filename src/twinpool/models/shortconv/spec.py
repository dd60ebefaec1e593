"""Short convolution: shapes of a state, and the layers of LFM2 (reference 1.6)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.errors import ModelError
from twinpool.models.attention.spec import GqaSpec
from twinpool.models.shapes import ConfigReader, LayerSpec, StateShapes, shard


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A convolution of `kernel` taps over the hidden size, and no recurrent state."""

    hidden_size: int
    kernel: int

    def states(self, tp: int) -> StateShapes:
        """conv [hidden / tp, kernel - 1]; no temporal state."""
        return StateShapes((shard(self.hidden_size, tp, what="hidden channels"), self.kernel - 1), ())


def lfm2_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """By layer_types, or full_attn_idxs names the attention layers, counted from 0."""
    attention = LayerSpec(attention=GqaSpec.read(reader))
    kernel = reader.integer("conv_L_cache", default=3, least=2)
    conv = LayerSpec(linear=ShortConvSpec(reader.integer("hidden_size"), kernel))
    listed = reader.layers("layer_types", {"conv": conv, "full_attention": attention})
    if listed is None:
        listed = reader.numbered_layers("full_attn_idxs", named=attention, others=conv)
    if listed is None:
        raise ModelError("config.json has neither 'layer_types' nor 'full_attn_idxs', one of which is needed.")
    return listed
