"""Bytes one token adds to the KV cache of one attention layer (reference 1.7)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.errors import ModelError
from twinpool.models.shapes import ConfigReader, LayerSpec, StateShapes, item_bytes, packed_bytes


@dataclass(frozen=True, slots=True)
class GqaSpec:
    """Keys and values per head; grouped-query when there are fewer KV heads than query heads."""

    kv_heads: int
    head_dim: int
    v_head_dim: int

    @staticmethod
    def read(reader: ConfigReader, *, head_dim: int | None = None) -> GqaSpec:
        """From the usual keys; without head_dim in the config: the argument, else hidden_size / num_attention_heads."""
        heads = reader.integer("num_attention_heads")
        kv_heads = reader.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise ModelError(
                f"config.json says num_attention_heads={heads} and num_key_value_heads={kv_heads}; "
                "the first must be a multiple of the second."
            )
        plain = max(1, reader.integer("hidden_size") // heads)
        dim = reader.integer("head_dim", default=reader.integer("attention_head_dim", default=head_dim or plain))
        return GqaSpec(kv_heads, dim, dim)

    def kv_heads_per_rank(self, tp: int, dcp: int = 1) -> int:
        """max(1, kv_heads // (tp / dcp)): heads are replicated rather than cut below one."""
        return max(1, self.kv_heads // max(1, tp // dcp))

    def kv_bytes_per_token(self, kv_dtype: str, tp: int, dcp: int = 1) -> int:
        """Bytes of kv_heads_per_rank × (head_dim + v_head_dim) elements. Raises ModelError on an unknown kv_dtype."""
        return packed_bytes(self.kv_heads_per_rank(tp, dcp) * (self.head_dim + self.v_head_dim), kv_dtype)


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """One latent per token, shared by all heads; every rank holds all of it."""

    kv_lora_rank: int
    qk_rope_head_dim: int

    @staticmethod
    def read(reader: ConfigReader) -> MlaSpec:
        """From kv_lora_rank and qk_rope_head_dim."""
        return MlaSpec(reader.integer("kv_lora_rank"), reader.integer("qk_rope_head_dim"))

    def kv_bytes_per_token(self, kv_dtype: str, tp: int, dcp: int = 1) -> int:
        """Bytes of kv_lora_rank + qk_rope_head_dim elements on every rank. Raises ModelError on an unknown kv_dtype."""
        del tp, dcp  # the latent is not split
        return packed_bytes(self.kv_lora_rank + self.qk_rope_head_dim, kv_dtype)


@dataclass(frozen=True, slots=True)
class DsaSpec:
    """A latent and a sparse index: one fp8 key of index_dim elements, with its scales, for every pool_tokens tokens."""

    latent: MlaSpec
    index_dim: int
    pool_tokens: int = 1

    @staticmethod
    def read(reader: ConfigReader) -> DsaSpec:
        """From kv_lora_rank, qk_rope_head_dim (0: no positions), index_head_dim and index_kpool. Raises ModelError."""
        latent = MlaSpec(reader.integer("kv_lora_rank"), reader.integer("qk_rope_head_dim", default=0, least=0))
        return DsaSpec(latent, reader.integer("index_head_dim", default=128), reader.integer("index_kpool", default=16))

    def kv_bytes_per_token(self, kv_dtype: str, tp: int, dcp: int = 1) -> int:
        """Bytes of latent and index, the latter rounded up to a byte a token. Raises ModelError on an unknown kv_dtype.

        The index is fp8 whatever the latent is, and holds the tokens of all dcp ranks (reference 1.7).
        """
        index = _with_scales(self.index_dim) * dcp
        return self._latent_bytes(kv_dtype, tp, dcp) + -(-index // self.pool_tokens)

    def _latent_bytes(self, kv_dtype: str, tp: int, dcp: int) -> int:
        """In fp8 a rotated part stays in bf16 and the rest has scales; a latent without one is plain fp8.

        Formula: reference 1.7; the plain case: 5,995 = 11 × (512 + 33) bytes in the boot log of GLM-5.3-Flash.
        """
        if not kv_dtype.startswith("fp8") or self.latent.qk_rope_head_dim == 0:
            return self.latent.kv_bytes_per_token(kv_dtype, tp, dcp)
        return _with_scales(self.latent.kv_lora_rank) + self.latent.qk_rope_head_dim * item_bytes("bfloat16")


@dataclass(frozen=True, slots=True)
class PooledIndexSpec:
    """A latent and a sparse index as they are kept here: keys as wide as the latent, not fp8.

    The key of a pool of pool_tokens tokens lies in the page of its last token, so that two sequences which part inside a pool do not
    share it: a page of page_tokens tokens has room for as many keys as pools can end in it.
    """

    latent: MlaSpec
    index_dim: int
    pool_tokens: int
    page_tokens: int

    @property
    def keys_per_page(self) -> int:
        """Pools that can end in a page."""
        return -(-self.page_tokens // self.pool_tokens)

    def kv_bytes_per_token(self, kv_dtype: str, tp: int, dcp: int = 1) -> int:
        """Bytes of the latent and of a token's part of the page's keys, in whole elements, on every rank.

        Keys are of kv_dtype, and bfloat16 where that is narrower; as many as the tokens of all dcp ranks have.
        Raises ModelError on an unknown kv_dtype.
        """
        latent = self.latent.kv_bytes_per_token(kv_dtype, tp, dcp)
        elements = -(-self.keys_per_page * self.index_dim * dcp // self.page_tokens)
        return latent + elements * item_bytes(index_dtype(kv_dtype))


@dataclass(frozen=True, slots=True)
class OpenPoolSpec:
    """What a sequence keeps of the tokens whose pool of the sparse index is not full: key and gate of each, as a window."""

    index_dim: int
    pool_tokens: int

    def states(self, tp: int) -> StateShapes:
        """conv [pool_tokens - 1, 2 index_dim], oldest first, on every rank; no temporal state."""
        del tp  # the index is not split
        return StateShapes((self.pool_tokens - 1, 2 * self.index_dim), ())


def index_dtype(kv_dtype: str) -> str:
    """Of the keys of a sparse index beside a latent of kv_dtype: they are never narrower than 16 bits."""
    return kv_dtype if kv_dtype in ("float32", "float16") else "bfloat16"


def with_exact_index(layer: LayerSpec, page_tokens: int) -> LayerSpec:
    """A layer as it is kept here, with pages of page_tokens tokens: one without a sparse index is as it was."""
    shape = layer.attention
    if not isinstance(shape, DsaSpec):
        return layer
    assert layer.linear is None, "attention with an index has no other state"
    return LayerSpec(
        attention=PooledIndexSpec(shape.latent, shape.index_dim, shape.pool_tokens, page_tokens),
        linear=OpenPoolSpec(shape.index_dim, shape.pool_tokens),
    )


def _with_scales(elements: int) -> int:
    """Bytes of fp8 elements with a float32 scale per 128 of them (reference 1.7)."""
    return elements + elements // 128 * item_bytes("float32")


def grouped_layers(reader: ConfigReader, linear: LayerSpec) -> tuple[LayerSpec, ...]:
    """By layer_types; else the last layer of every layer_group_size has a latent (a list there: 1 is a linear layer).

    Raises ModelError. Source: SGLang's and transformers' bailing_hybrid.
    """
    attention = LayerSpec(attention=MlaSpec.read(reader))
    listed = reader.layers("layer_types", {"linear_attention": linear, "full_attention": attention})
    if listed is not None:
        return listed
    if isinstance(reader.values.get("layer_group_size"), list):
        spelled = {**reader.values, "layer_group_size": [str(n) for n in reader.items("layer_group_size") or ()]}
        return ConfigReader(spelled).layers("layer_group_size", {"1": linear, "0": attention}) or ()
    size = reader.integer("layer_group_size")
    return tuple(linear if (i + 1) % size else attention for i in range(reader.integer("num_hidden_layers")))
