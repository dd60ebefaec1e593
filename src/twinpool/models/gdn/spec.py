"""Gated DeltaNet: shapes of a state, and the layers of Qwen3-Next and Qwen3.5 (reference 1.6)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.errors import ModelError
from twinpool.models.attention.spec import GqaSpec
from twinpool.models.shapes import ConfigReader, LayerSpec, StateShapes, shard


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


def read_gdn(reader: ConfigReader) -> GdnSpec:
    """From the linear_* keys; transformers' own defaults where a config leaves one out. Raises ModelError."""
    spec = GdnSpec(
        key_heads=reader.integer("linear_num_key_heads", default=16),
        key_dim=reader.integer("linear_key_head_dim", default=128),
        value_heads=reader.integer("linear_num_value_heads", default=32),
        value_dim=reader.integer("linear_value_head_dim", default=128),
        kernel=reader.integer("linear_conv_kernel_dim", default=4, least=2),
    )
    if spec.value_heads % spec.key_heads:
        raise ModelError(
            f"config.json says linear_num_value_heads={spec.value_heads} and linear_num_key_heads={spec.key_heads}; "
            "the first must be a multiple of the second."
        )
    return spec


def qwen_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """By layer_types, or every full_attention_interval-th layer is attention."""
    attention, linear = LayerSpec(attention=GqaSpec.read(reader, head_dim=256)), LayerSpec(linear=read_gdn(reader))
    listed = reader.layers("layer_types", {"linear_attention": linear, "full_attention": attention})
    if listed is not None:
        return listed
    interval = reader.integer("full_attention_interval", default=4)
    return tuple(linear if (i + 1) % interval else attention for i in range(reader.integer("num_hidden_layers")))
