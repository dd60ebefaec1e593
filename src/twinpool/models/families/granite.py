"""Granite 4 H: Mamba2 or attention, then a shared MLP and perhaps experts, with factors on everything that is added."""

from __future__ import annotations

from typing import Any

from torch import nn

from twinpool.errors import ModelError
from twinpool.models.attention.layer import adopt_attention
from twinpool.models.blocks import Linear, Mlp, Moe, PreNormLayer, Router, adopt_norm, make_experts
from twinpool.models.families.base import Decoder, Parts, Source
from twinpool.models.mamba2.layer import adopt_mamba2
from twinpool.models.mamba2.sharding import MAMBA2_KEYS, mamba2_cuts, narrow_inner
from twinpool.models.shard import ATTENTION, COLUMNS, Sharding, cut


def check(config: Any) -> None:
    """Raise ModelError for positions that are neither rotary nor left out, and for logits over zero."""
    if config.position_embedding_type not in (None, "nope", "rope"):
        raise ModelError(
            f"config.json says position_embedding_type='{config.position_embedding_type}'; only 'rope' and 'nope' run here."
        )
    if not config.logits_scaling:
        raise ModelError(f"config.json says logits_scaling={config.logits_scaling}; it must not be zero.")


def build(parts: Parts) -> Decoder:
    """Our layers with the model's weights, in its order."""
    return Decoder(
        layers=tuple(_layer(parts, block) for block in parts.base.layers),
        norm=adopt_norm(parts.base.norm),
        embed_scale=parts.config.embedding_multiplier,
        logit_scale=1.0 / parts.config.logits_scaling,
    )


def _layer(parts: Parts, block: Any) -> PreNormLayer:
    mixer: nn.Module
    if block.mamba is not None:
        mixer = adopt_mamba2(block.mamba, layer=next(parts.linear))
    else:
        module = block.self_attn
        mixer = adopt_attention(module, layer=next(parts.attention), table=parts.table, out_proj=module.o_proj)
    return PreNormLayer(
        norm=adopt_norm(block.input_layernorm),
        mixer=mixer,
        second_norm=adopt_norm(block.post_attention_layernorm),
        mlp=_feed_forward(block),
        multiplier=block.residual_multiplier,
    )


def _feed_forward(block: Any) -> Mlp | Moe:
    shared = Mlp(
        gate_up=Linear([block.shared_mlp.input_linear.weight]), down=Linear([block.shared_mlp.output_linear.weight])
    )
    moe = block.block_sparse_moe
    if moe is None:
        return shared
    router = Router(linear=Linear([moe.router.weight]), top_k=moe.router.top_k, normalise=True)
    return Moe(router=router, experts=make_experts(moe.experts), shared=shared)


SHARDING = Sharding(
    divided=("num_attention_heads", "mamba_n_heads", "shared_intermediate_size", "intermediate_size"),
    head_dim=lambda config: config.hidden_size // config.num_attention_heads,
    shared=("num_key_value_heads", "mamba_n_groups"),
    cuts={
        **ATTENTION,
        **mamba2_cuts(r"\.mamba", MAMBA2_KEYS),
        r"\.shared_mlp\.input_linear\.weight": cut(0, lambda config: ((config.shared_intermediate_size, 1),) * 2),
        r"\.experts\.gate_up_proj": cut(1, lambda config: ((config.intermediate_size, 1),) * 2),
        r"\.(shared_mlp\.output_linear\.weight|experts\.down_proj)": COLUMNS,
    },
    check=MAMBA2_KEYS.check,
    joint_norm=MAMBA2_KEYS.joint_norm,
    adjust=narrow_inner,
)

# Checkpoints have the names of the first release; transformers renames them while loading.
_RENAMED = {
    r"block_sparse_moe\.input_linear\.weight$": "block_sparse_moe.experts.gate_up_proj",
    r"block_sparse_moe\.output_linear\.weight$": "block_sparse_moe.experts.down_proj",
    r"block_sparse_moe\.router\.layer\.weight$": "block_sparse_moe.router.weight",
}
SOURCES = {
    "GraniteMoeHybridForCausalLM": Source(
        module="granitemoehybrid",
        config="GraniteMoeHybridConfig",
        model="GraniteMoeHybridForCausalLM",
        build=build,
        check=check,
        renamed=_RENAMED,
        sharding=SHARDING,
    )
}
