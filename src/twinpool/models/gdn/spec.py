"""Gated DeltaNet: shapes of a state, and the layers of Qwen3-Next to Qwen4, OLMo-Hybrid and Jet (reference 1.6)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.errors import ModelError
from twinpool.models.attention.spec import GqaSpec
from twinpool.models.shapes import ConfigReader, LayerSpec, StateShapes, item_bytes, shard

INT64_BYTES = 8
FLOAT32_BYTES = item_bytes("float32")


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

    def replay_ring_bytes(self, *, records: int, conv_item_bytes: int, tp: int) -> int:
        """Bytes of one request's replay ring in this layer on one rank (reference 1.6, ReplaySSM).

        records × (Hv dv + Hk dk) elements of the conv's type, twice unless that is float32, and a float32 gate a head.
        Raises ModelError when tp does not divide the heads.
        """
        keys, heads = (
            shard(self.key_heads, tp, what="linear key heads"),
            shard(self.value_heads, tp, what="linear value heads"),
        )
        copies = 1 if conv_item_bytes == FLOAT32_BYTES else 2
        inputs = copies * (heads * self.value_dim + keys * self.key_dim) * conv_item_bytes
        return records * (inputs + heads * FLOAT32_BYTES)


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
    """By layer_types, or every full_attention_interval-th layer is attention. Raises ModelError."""
    return _mixed(reader, LayerSpec(linear=read_gdn(reader)), LayerSpec(attention=GqaSpec.read(reader, head_dim=256)))


def olmo_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """As Qwen's, with transformers' defaults for OLMo-Hybrid: heads as in attention, keys of 3/4 a head, values twice.

    Raises ModelError.
    """
    heads, hidden = reader.integer("num_attention_heads"), reader.integer("hidden_size")
    key_heads = reader.integer("linear_num_key_heads", default=heads)
    key_dim = reader.integer("linear_key_head_dim", default=max(1, 3 * hidden // (4 * key_heads)))
    own = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": reader.integer("linear_num_value_heads", default=heads),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": reader.integer("linear_value_head_dim", default=2 * key_dim),
    }
    linear = LayerSpec(linear=read_gdn(ConfigReader({**reader.values, **own})))
    return _mixed(reader, linear, LayerSpec(attention=GqaSpec.read(reader)))


def _mixed(reader: ConfigReader, linear: LayerSpec, attention: LayerSpec) -> tuple[LayerSpec, ...]:
    """By layer_types, or every full_attention_interval-th layer is attention; Qwen4 calls that layer indexed."""
    kinds = {
        "linear_attention": linear,
        "full_attention": attention,
        "indexed_attention": attention,
        "qwen_sparse_attention": attention,
    }
    listed = reader.layers("layer_types", kinds)
    if listed is not None:
        return listed
    interval = reader.integer("full_attention_interval", default=4)
    return tuple(linear if (i + 1) % interval else attention for i in range(reader.integer("num_hidden_layers")))


def jet_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """By layer_types; sliding-window layers keep every token, as SGLang counts them. Raises ModelError."""
    block = reader.inner("efficient_attention_config").inner("jet")
    heads, key_dim = block.integer("num_heads"), block.integer("head_dim")
    value_dim = int(key_dim * block.number("expand_v"))
    gdn = GdnSpec(heads, key_dim, heads, value_dim, block.integer("conv_size", least=2))
    attention = LayerSpec(attention=GqaSpec.read(reader))
    listed = reader.layers("layer_types", {"jet": LayerSpec(linear=gdn), "attn": attention, "swa": attention})
    if listed is None:
        raise ModelError("config.json has no 'layer_types', which this architecture needs.")
    return listed


def ngram_state_bytes(reader: ConfigReader) -> int:
    """Bytes per slot beside the states of Qwen4: per n-gram embedding layer a bf16 window and the last token ids.

    The window is [hc_count × hidden_size, (ple_conv_kernel_size - 1) × ngram_size], dilated by the n-gram size; the
    ids are ngram_size - 1 int64 (transformers' qwen4_exp; one layer of 2560: [10240, 9] and 2, reference models.md).
    Raises ModelError.
    """
    layers = len(reader.items("ple_layer_ids") or [])
    ngram = reader.integer("ngram_size", default=3, least=2)
    channels = reader.integer("hc_count", default=4) * reader.integer("hidden_size")
    columns = (reader.integer("ple_conv_kernel_size", default=4, least=2) - 1) * ngram
    return layers * (channels * columns * item_bytes("bfloat16") + (ngram - 1) * INT64_BYTES)


def index_warnings(reader: ConfigReader) -> tuple[str, ...]:
    """A sentence when sparse attention keeps index keys beside K and V, which the reference does not count."""
    if reader.values.get("indexer_head_dim") is None:
        return ()
    return ("The index keys of this model's sparse attention are not counted in its KV bytes per token.",)
