"""Inkling: short-convolution windows beside full or sliding-window attention in every layer (reference 1.6)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.models.attention.spec import GqaSpec
from twinpool.models.shapes import ConfigReader, LayerSpec, StateShapes, WindowSpec


@dataclass(frozen=True, slots=True)
class InklingConvSpec:
    """Six windows of kernel - 1 tokens: keys and values of a full and of a sliding layer, and two of the hidden size.

    Every layer reserves all six, though it uses only four (SGLang's shapes).
    """

    full: GqaSpec
    sliding: GqaSpec
    hidden_size: int
    kernel: int

    def states(self, tp: int) -> StateShapes:
        """conv [kernel - 1, channels of the six windows side by side], the hidden ones whole; no temporal state."""
        heads = sum(kind.kv_heads_per_rank(tp) * kind.head_dim for kind in (self.full, self.sliding))
        return StateShapes((self.kernel - 1, 2 * (heads + self.hidden_size)), ())


def inkling_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """By layer_types, or local_layer_ids names the sliding layers, or all but every sixth slides. Raises ModelError."""
    full, sliding = GqaSpec.read(reader, head_dim=128), _sliding(reader)
    kernel = reader.integer("sconv_kernel_size", default=reader.integer("conv_kernel_size", default=4, least=2))
    conv = InklingConvSpec(full, sliding, reader.integer("hidden_size"), kernel)
    window = WindowSpec(sliding, reader.integer("sliding_window_size", default=512))
    wide, narrow = LayerSpec(attention=full, linear=conv), LayerSpec(linear=conv, window=window)
    listed = reader.layers("layer_types", {"hybrid": wide, "hybrid_sliding": narrow})
    if listed is None:
        listed = reader.numbered_layers("local_layer_ids", named=narrow, others=wide)
    if listed is None:
        listed = tuple(narrow if (i + 1) % 6 else wide for i in range(reader.integer("num_hidden_layers")))
    return listed


def _sliding(reader: ConfigReader) -> GqaSpec:
    """Heads of the sliding-window layers; transformers' own defaults where a config leaves one out."""
    dim = reader.integer("swa_head_dim", default=128)
    return GqaSpec(reader.integer("swa_num_key_value_heads", default=16), dim, dim)
