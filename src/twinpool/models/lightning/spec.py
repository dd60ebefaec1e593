"""Lightning attention: shapes of a state, and the layers of Ling-2.5, MiniMax-Text-01 and MiniCPM-SALA (reference 1.6)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.errors import ModelError
from twinpool.models.attention.spec import GqaSpec, grouped_layers
from twinpool.models.shapes import ConfigReader, LayerSpec, StateShapes, shard


@dataclass(frozen=True, slots=True)
class LightningSpec:
    """`heads` key-value heads of head_dim; no convolution."""

    heads: int
    head_dim: int

    def states(self, tp: int) -> StateShapes:
        """No conv; temporal [Hkv / tp, d, d]. Raises ModelError when tp does not divide the heads."""
        return StateShapes((), (shard(self.heads, tp, what="lightning heads"), self.head_dim, self.head_dim))


def _of_attention_heads(reader: ConfigReader) -> LayerSpec:
    """As many lightning heads as query heads, since these models share no keys between them."""
    heads = reader.integer("num_attention_heads")
    plain = max(1, reader.integer("hidden_size") // heads)
    return LayerSpec(linear=LightningSpec(heads, reader.integer("head_dim", default=plain)))


def ling_lightning_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Ling-2.5: in every group the last layer is attention with a latent. Raises ModelError."""
    return grouped_layers(reader, _of_attention_heads(reader))


def minimax_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """By layer_types, or by attn_type_list: 0 is lightning, 1 attention. Raises ModelError."""
    linear, attention = _of_attention_heads(reader), LayerSpec(attention=GqaSpec.read(reader))
    listed = reader.layers("layer_types", {"linear_attention": linear, "full_attention": attention})
    if listed is not None:
        return listed
    numbers = reader.items("attn_type_list")
    if numbers is None:
        raise ModelError("config.json has neither 'layer_types' nor 'attn_type_list', one of which is needed.")
    spelled = ConfigReader({**reader.values, "attn_type_list": [str(number) for number in numbers]})
    return spelled.layers("attn_type_list", {"0": linear, "1": attention}) or ()


def sala_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """MiniCPM-SALA, by mixer_types; sparse layers keep every key and value. Raises ModelError."""
    heads, head_dim = reader.integer("lightning_nkv"), reader.integer("lightning_head_dim")
    linear, attention = LayerSpec(linear=LightningSpec(heads, head_dim)), LayerSpec(attention=GqaSpec.read(reader))
    names = ("lightning-attn", "lightning_attn", "lightning")
    listed = reader.layers("mixer_types", {"minicpm4": attention, **dict.fromkeys(names, linear)})
    if listed is None:
        raise ModelError("config.json has no 'mixer_types', which this architecture needs.")
    return listed
