"""Kimi Delta Attention: shapes of a state, and the layers of Kimi, GLM-5-Next and Ling-3 (reference 1.6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twinpool.errors import ModelError
from twinpool.models.attention.spec import DsaSpec, MlaSpec, grouped_layers
from twinpool.models.shapes import ConfigReader, LayerSpec, StateShapes, item_bytes, shard


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

    def replay_ring_bytes(self, *, records: int, conv_item_bytes: int, tp: int) -> int:
        """Bytes of one request's replay ring in this layer on one rank (reference 1.6, ReplaySSM).

        Twice records × 2 H d elements of the conv's type, and a float32 gate per head and per channel of a head.
        Raises ModelError when tp does not divide the heads.
        """
        heads = shard(self.heads, tp, what="linear heads")
        inputs = 2 * (2 * heads * self.head_dim) * conv_item_bytes
        return records * (inputs + heads * (1 + self.head_dim) * item_bytes("float32"))


def kimi_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """By layer_types (as transformers writes them), or by the lists of linear_attn_config, which count from 1."""
    nested = reader.values.get("linear_attn_config")
    if isinstance(nested, Mapping):
        own = ConfigReader({**nested, "num_hidden_layers": reader.integer("num_hidden_layers")})
        heads, head_dim = own.integer("num_heads"), own.integer("head_dim")
        kernel = own.integer("short_conv_kernel_size", default=4, least=2)
    elif nested is None and reader.items("layer_types") is not None:
        own = reader
        heads, head_dim = reader.integer("linear_num_heads"), reader.integer("linear_head_dim")
        kernel = reader.integer("linear_conv_kernel_dim", default=4, least=2)
    else:
        raise ModelError(f"config.json says linear_attn_config={nested!r}; it must be an object.")
    linear, attention = LayerSpec(linear=KdaSpec(heads, head_dim, kernel)), LayerSpec(attention=MlaSpec.read(reader))
    listed = reader.layers("layer_types", {"linear_attention": linear, "full_attention": attention})
    if listed is None:
        listed = own.numbered_layers("full_attn_layers", named=attention, others=linear, first=1)
    if listed is None:
        raise ModelError("config.json has no 'full_attn_layers' in linear_attn_config, which this architecture needs.")
    return listed


def glm_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """By layer_types, or every fourth layer is attention with a latent and an index. Raises ModelError.

    Every attention layer is taken to keep an index of its own. linear_attn_config, where given, wins over linear_*.
    """
    nested = reader.inner("linear_attn_config") if reader.values.get("linear_attn_config") is not None else None
    own = nested or ConfigReader({})
    heads = own.integer("num_heads", default=reader.integer("linear_num_heads", default=64))
    head_dim = own.integer("head_dim", default=reader.integer("linear_head_dim", default=128))
    taps = reader.integer("linear_conv_kernel_dim", default=4, least=2)
    kernel = own.integer("short_conv_kernel_size", default=taps, least=2)
    linear, indexed = LayerSpec(linear=KdaSpec(heads, head_dim, kernel)), LayerSpec(attention=DsaSpec.read(reader))
    names = ("indexed_attention", "full_attention", "deepseek_sparse_attention")
    listed = reader.layers("layer_types", {"linear_attention": linear, **dict.fromkeys(names, indexed)})
    if listed is not None:
        return listed
    return tuple(indexed if i % 4 == 3 else linear for i in range(reader.integer("num_hidden_layers")))


def ling_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Ling-3 (bailing_hybrid): in every group the last layer is attention with a latent. Raises ModelError.

    What transformers saves has the rotated width as head_dim, and the heads' width as linear_head_dim.
    """
    heads = reader.integer("num_attention_heads")
    head_dim = reader.integer("linear_head_dim", default=reader.integer("head_dim", default=128))
    kda = KdaSpec(heads, head_dim, reader.integer("short_conv_kernel_size", default=4, least=2))
    return grouped_layers(reader, LayerSpec(linear=kda))
