"""Ling-3 (bailing_hybrid): Kimi Delta Attention or gated attention over a latent, then an MLP or experts in groups."""

from __future__ import annotations

from typing import Any

from torch import nn

from twinpool.models.attention.latent_layer import adopt_latent
from twinpool.models.blocks import PreNormLayer, RmsNorm
from twinpool.models.families.base import Decoder, Parts, Source
from twinpool.models.families.kimi import CONVOLUTIONS, FORGET_GATE, feed_forward
from twinpool.models.kda.layer import adopt_kda
from twinpool.models.kda.sharding import delta_sharding


def build(parts: Parts) -> Decoder:
    """Our layers with the model's weights, in its order."""
    return Decoder(layers=tuple(_layer(parts, block) for block in parts.base.layers), norm=_norm(parts.base.norm))


def _layer(parts: Parts, block: Any) -> PreNormLayer:
    mixer: nn.Module
    if block.block_type == "linear_attention":
        forget = block.self_attn.forget_gate
        bound = forget.lower_bound if forget.safe_gate else None
        mixer = adopt_kda(block.self_attn, layer=next(parts.linear), lower_bound=bound)
    else:
        mixer = adopt_latent(block.self_attn, layer=next(parts.attention), table=parts.table)
    return PreNormLayer(
        norm=_norm(block.input_layernorm),
        mixer=mixer,
        second_norm=_norm(block.post_attention_layernorm),
        mlp=feed_forward(block.mlp),
    )


def _norm(module: Any) -> RmsNorm:
    return RmsNorm(module.weight, module.variance_epsilon)


_RENAMED = {
    r"^model\.word_embeddings\.": "model.embed_tokens.",
    r"\.attention\.": ".self_attn.",
    r"\.self_attn\.dense\.": ".self_attn.o_proj.",
    r"\.mlp\.gate\.expert_bias$": ".mlp.gate.e_score_correction_bias",
    **FORGET_GATE,
}
_SOURCE = Source(
    module="bailing_hybrid",
    config="BailingHybridConfig",
    model="BailingHybridForCausalLM",
    build=build,
    renamed=_RENAMED,
    joined=CONVOLUTIONS,
    sharding=delta_sharding(),
)
# The published checkpoints have the first name, what transformers saves has the second.
SOURCES = {"BailingMoeV3ForCausalLM": _SOURCE, "BailingHybridForCausalLM": _SOURCE}
