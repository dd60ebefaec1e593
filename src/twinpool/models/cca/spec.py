"""Compressed convolutional attention: shapes of a state, and the layers of Zaya (reference 1.6)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.models.attention.spec import GqaSpec
from twinpool.models.shapes import ConfigReader, LayerSpec, StateShapes, WindowSpec, shard


@dataclass(frozen=True, slots=True)
class CcaSpec:
    """A window of pad_tokens over queries and keys, and one of a token over the hidden state."""

    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    pad_tokens: int

    def states(self, tp: int) -> StateShapes:
        """conv [(nh + nkv) d / tp, pad] and [hidden, 1], which every rank holds whole; no temporal state.

        Raises ModelError when tp does not divide the heads.
        """
        heads = shard(self.query_heads, tp, what="query heads") + shard(self.kv_heads, tp, what="key heads")
        return StateShapes((heads * self.head_dim, self.pad_tokens), (), (self.hidden_size, 1))


def zaya_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """By layer_types; or zaya_layers ('a': attention); else every layer, as transformers writes them, is hybrid.

    Raises ModelError.
    """
    heads = GqaSpec.read(reader, head_dim=128)
    cca = CcaSpec(
        query_heads=reader.integer("num_attention_heads"),
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        hidden_size=reader.integer("hidden_size"),
        pad_tokens=reader.integer("cca_time0", default=2) + reader.integer("cca_time1", default=2) - 2,
    )
    hybrid, neither = LayerSpec(attention=heads, linear=cca), LayerSpec()
    kinds = {"hybrid": hybrid}
    if reader.values.get("sliding_window") is not None:
        kinds["hybrid_sliding"] = LayerSpec(linear=cca, window=WindowSpec(heads, reader.integer("sliding_window")))
    listed = reader.layers("layer_types", kinds)
    if listed is not None:
        return listed
    legacy = reader.items("zaya_layers")
    if legacy is not None:
        return tuple(hybrid if kind == "a" else neither for kind in legacy)
    return (hybrid,) * reader.integer("num_hidden_layers")
