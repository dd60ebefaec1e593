"""Architecture name → how its config describes its layers. One row a family; a miss lists what is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from twinpool.errors import ModelError
from twinpool.models.attention.spec import GqaSpec, MlaSpec
from twinpool.models.gdn.spec import GdnSpec
from twinpool.models.kda.spec import KdaSpec
from twinpool.models.mamba2.spec import Mamba2Spec
from twinpool.models.shapes import ConfigReader
from twinpool.models.shortconv.spec import ShortConvSpec
from twinpool.models.spec import LayerSpec

FLA_CHUNK_TOKENS = 64


def _gqa(reader: ConfigReader, *, head_dim: int | None = None) -> GqaSpec:
    heads = reader.integer("num_attention_heads")
    dim = reader.integer("head_dim", default=head_dim or max(1, reader.integer("hidden_size") // heads))
    return GqaSpec(reader.integer("num_key_value_heads", default=heads), dim, dim)


def _layer_types(reader: ConfigReader) -> list[str]:
    """'full_attention' or 'linear_attention' for each layer: listed, or every full_attention_interval-th is full (reference 1.6)."""
    n_layers = reader.integer("num_hidden_layers")
    listed = reader.items("layer_types")
    if listed is None:
        interval = reader.integer("full_attention_interval", default=4)
        return ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(n_layers)]
    if len(listed) != n_layers:
        raise ModelError(f"config.json lists {len(listed)} layer_types for num_hidden_layers={n_layers}.")
    return listed


def _qwen(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    attention = LayerSpec(attention=_gqa(reader, head_dim=256))
    gdn = GdnSpec(
        key_heads=reader.integer("linear_num_key_heads", default=16),
        key_dim=reader.integer("linear_key_head_dim", default=128),
        value_heads=reader.integer("linear_num_value_heads", default=32),
        value_dim=reader.integer("linear_value_head_dim", default=128),
        kernel=reader.integer("linear_conv_kernel_dim", default=4, least=2),
    )
    if gdn.value_heads % gdn.key_heads:
        raise ModelError(
            f"config.json says linear_num_value_heads={gdn.value_heads} and linear_num_key_heads={gdn.key_heads}; "
            "the first must be a multiple of the second."
        )
    linear = LayerSpec(linear=gdn)
    kinds = {"full_attention": attention, "linear_attention": linear}
    types = _layer_types(reader)
    unknown = sorted({str(t) for t in types} - set(kinds))
    if unknown:
        raise ModelError(f"config.json lists layer type '{unknown[0]}'; known here: {', '.join(kinds)}.")
    return tuple(kinds[t] for t in types)


def _kimi(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    linear_config = reader.values.get("linear_attn_config")
    if not isinstance(linear_config, Mapping):
        raise ModelError("config.json has no 'linear_attn_config', which this architecture needs.")
    inner = ConfigReader(linear_config)
    kda = LayerSpec(
        linear=KdaSpec(
            inner.integer("num_heads"), inner.integer("head_dim"), inner.integer("short_conv_kernel_size", default=4, least=2)
        )
    )
    mla = LayerSpec(attention=MlaSpec(reader.integer("kv_lora_rank"), reader.integer("qk_rope_head_dim")))
    full = set(inner.items("full_attn_layers") or [])  # counted from 1
    return tuple(mla if i + 1 in full else kda for i in range(reader.integer("num_hidden_layers")))


def _lfm2(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    attention = LayerSpec(attention=_gqa(reader))
    conv = LayerSpec(linear=ShortConvSpec(reader.integer("hidden_size"), reader.integer("conv_L_cache", default=3, least=2)))
    n_layers = reader.integer("num_hidden_layers")
    types = reader.items("layer_types")
    if types is None:
        full = set(reader.items("full_attn_idxs") or range(n_layers))
        types = ["full_attention" if i in full else "conv" for i in range(n_layers)]
    return tuple(attention if t == "full_attention" else conv for t in types)


def _nemotron_h(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    mamba = LayerSpec(
        linear=Mamba2Spec(
            heads=reader.integer("mamba_num_heads"),
            head_dim=reader.integer("mamba_head_dim"),
            state_size=reader.integer("ssm_state_size"),
            groups=reader.integer("n_groups", default=8),
            kernel=reader.integer("conv_kernel", default=4, least=2),
        )
    )
    attention = LayerSpec(attention=_gqa(reader))
    listed = reader.items("layers_block_type")
    pattern = listed if listed is not None else list(reader.text("hybrid_override_pattern", default=""))
    if not pattern:
        raise ModelError("config.json has neither 'hybrid_override_pattern' nor 'layers_block_type', one of which is needed.")
    kinds = {"M": mamba, "mamba": mamba, "*": attention, "attention": attention}
    return tuple(kinds.get(str(kind), LayerSpec()) for kind in pattern)


def _granite(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    heads = reader.integer("mamba_n_heads", default=128)
    inner = reader.integer("mamba_expand", default=2) * reader.integer("hidden_size")
    head_dim = reader.values.get("mamba_d_head", "auto")
    mamba = LayerSpec(
        linear=Mamba2Spec(
            heads=heads,
            head_dim=inner // heads if head_dim == "auto" else reader.integer("mamba_d_head"),
            state_size=reader.integer("mamba_d_state", default=256),
            groups=reader.integer("mamba_n_groups", default=1),
            kernel=reader.integer("mamba_d_conv", default=4, least=2),
        )
    )
    attention = LayerSpec(attention=_gqa(reader))
    types = reader.items("layer_types") or reader.items("layers_block_type") or []
    if not types:
        raise ModelError("config.json has no 'layer_types', which this architecture needs.")
    return tuple(mamba if t == "mamba" else attention for t in types)


def _falcon_h1(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    heads, head_dim = reader.integer("mamba_n_heads", default=128), reader.integer("mamba_d_head", default=64)
    both = LayerSpec(
        attention=_gqa(reader),
        linear=Mamba2Spec(
            heads=heads,
            head_dim=head_dim,
            state_size=reader.integer("mamba_d_state", default=256),
            groups=reader.integer("mamba_n_groups", default=1),
            kernel=reader.integer("mamba_d_conv", default=4, least=2),
        ),
    )
    return (both,) * reader.integer("num_hidden_layers")


@dataclass(frozen=True, slots=True)
class Family:
    """One row: layers from a config, kernel chunk in tokens and the config key that overrides it, extra_buffer support (3.5)."""

    name: str
    architectures: tuple[str, ...]
    layers: Callable[[ConfigReader], tuple[LayerSpec, ...]]
    chunk_tokens: int
    chunk_key: str | None = None
    supports_extra_buffer: bool = True


FAMILIES = (
    Family(
        "gdn",
        (
            "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
            "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
        ),
        _qwen,
        FLA_CHUNK_TOKENS,
    ),
    Family("kda", ("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"), _kimi, FLA_CHUNK_TOKENS),
    Family("shortconv", ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"), _lfm2, 1, supports_extra_buffer=False),
    Family("mamba2", ("NemotronHForCausalLM",), _nemotron_h, 256, "chunk_size"),
    Family("mamba2", ("GraniteMoeHybridForCausalLM",), _granite, 256, "mamba_chunk_size"),
    Family("mamba2", ("FalconH1ForCausalLM",), _falcon_h1, 256, "mamba_chunk_size"),
)  # fmt: skip
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}


def known_architecture(config: Mapping[str, Any]) -> str:
    """The first name in config['architectures']. Raises ModelError when there is none or it is not in the table."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(f"config.json says architectures={names!r}; it must list the model's class name.")
    if names[0] not in _BY_ARCHITECTURE:
        raise ModelError(f"architecture '{names[0]}' is not known; known: {', '.join(_BY_ARCHITECTURE)}.")
    return names[0]


def build_layers(architecture: str, reader: ConfigReader) -> tuple[str, tuple[LayerSpec, ...], int, bool]:
    """(family, layers, kernel chunk tokens, supports extra_buffer) of a known architecture."""
    family = _BY_ARCHITECTURE[architecture]
    chunk = reader.integer(family.chunk_key, default=family.chunk_tokens) if family.chunk_key else family.chunk_tokens
    return family.name, family.layers(reader), chunk, family.supports_extra_buffer
