"""Bamba: Mamba2 or attention with half of each head rotated, then an MLP."""

from __future__ import annotations

from typing import Any

from torch import nn

from twinpool.models.attention.layer import adopt_attention
from twinpool.models.blocks import PreNormLayer, adopt_mlp, adopt_norm
from twinpool.models.families.base import Decoder, Parts, Source
from twinpool.models.mamba2.layer import adopt_mamba2
from twinpool.models.mamba2.sharding import MAMBA2_KEYS, mamba2_cuts, narrow_inner
from twinpool.models.shard import ATTENTION, COLUMNS, ROWS, Sharding, on_first


def build(parts: Parts) -> Decoder:
    """Our layers with the model's weights, in its order."""
    return Decoder(
        layers=tuple(_layer(parts, block) for block in parts.base.layers), norm=adopt_norm(parts.base.final_layernorm)
    )


def _layer(parts: Parts, block: Any) -> PreNormLayer:
    mixer: nn.Module
    if block.block_type == "linear_attention":
        mixer = adopt_mamba2(block.mamba, layer=next(parts.linear))
    else:
        module = block.self_attn
        mixer = adopt_attention(module, layer=next(parts.attention), table=parts.table, out_proj=module.o_proj)
    return PreNormLayer(
        norm=adopt_norm(block.input_layernorm),
        mixer=mixer,
        second_norm=adopt_norm(block.pre_ff_layernorm),
        mlp=adopt_mlp(block.feed_forward),
    )


SHARDING = Sharding(
    divided=("num_attention_heads", "mamba_n_heads", "intermediate_size"),
    head_dim=lambda config: config.hidden_size // config.num_attention_heads,
    shared=("num_key_value_heads", "mamba_n_groups"),
    cuts={
        **ATTENTION,
        **mamba2_cuts(r"\.mamba", MAMBA2_KEYS),
        r"\.(gate|up)_proj\.(weight|bias)": ROWS,
        r"\.down_proj\.weight": COLUMNS,
        r"\.down_proj\.bias": on_first,
    },
    check=MAMBA2_KEYS.check,
    joint_norm=MAMBA2_KEYS.joint_norm,
    adjust=narrow_inner,
)
SOURCES = {
    "BambaForCausalLM": Source(
        module="bamba", config="BambaConfig", model="BambaForCausalLM", build=build, sharding=SHARDING
    ),
}
