"""LFM2, LFM2-MoE and the text part of LFM2-VL: short convolution or attention, then an MLP or experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from twinpool.models.attention.layer import HeadNorms, adopt_attention
from twinpool.models.blocks import Linear, Mlp, Moe, PreNormLayer, Router, adopt_norm, make_experts
from twinpool.models.families.base import Decoder, Parts, Source, only_text
from twinpool.models.shard import ATTENTION, COLUMNS, EXPERTS_GATE_UP, ROWS, Sharding, cut, on_first
from twinpool.models.shortconv.layer import adopt_short_conv


def build(parts: Parts) -> Decoder:
    """Our layers with the model's weights, in its order."""
    return Decoder(
        layers=tuple(_layer(parts, block) for block in parts.base.layers), norm=adopt_norm(parts.base.embedding_norm)
    )


def _layer(parts: Parts, block: Any) -> PreNormLayer:
    mixer: nn.Module
    if block.is_attention_layer:
        module = block.self_attn
        query, key = module.q_layernorm, module.k_layernorm
        mixer = adopt_attention(
            module,
            layer=next(parts.attention),
            table=parts.table,
            out_proj=module.out_proj,
            norms=HeadNorms(query.weight.float(), key.weight.float(), query.variance_epsilon),
        )
    else:
        mixer = adopt_short_conv(block.conv, layer=next(parts.linear))
    return PreNormLayer(
        norm=adopt_norm(block.operator_norm),
        mixer=mixer,
        second_norm=adopt_norm(block.ffn_norm),
        mlp=_feed_forward(block.feed_forward),
    )


def _feed_forward(module: Any) -> Mlp | Moe:
    if not hasattr(module, "experts"):
        return Mlp(gate_up=Linear([module.w1.weight, module.w3.weight]), down=Linear([module.w2.weight]))
    gate = module.gate
    router = Router(
        linear=Linear([gate.weight]),
        top_k=gate.top_k,
        sigmoid=True,
        bias=module.expert_bias if module.use_expert_bias else None,
        normalise=gate.norm_topk_prob,
        epsilon=1e-6,
        scale=gate.routed_scaling_factor,
    )
    return Moe(router=router, experts=make_experts(module.experts))


def _channels(config: Any) -> tuple[tuple[int, int], ...]:
    """B | C | x of a short convolution."""
    return ((config.hidden_size, 1),) * 3


SHARDING = Sharding(
    divided=("num_attention_heads", "moe_intermediate_size"),
    head_dim=lambda config: getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    cuts={
        **ATTENTION,
        r"\.conv\.in_proj\.(weight|bias)": cut(0, _channels),
        r"\.conv\.conv\.(weight|bias)": ROWS,
        r"\.out_proj\.weight": COLUMNS,
        r"\.out_proj\.bias": on_first,
        r"\.feed_forward\.w[13]\.weight": ROWS,
        r"\.feed_forward\.w2\.weight": COLUMNS,
        r"\.experts\.gate_up_proj": EXPERTS_GATE_UP,
        r"\.experts\.down_proj": COLUMNS,
    },
    # Channels are the hidden size, and transformers adjusts the width of the MLP.
    narrowed=r"\.(conv\..*|feed_forward\.w[123]\.weight)",
)

# Experts are stored one by one, their matrices numbered as in the plain MLP.
_RENAMED = {
    r"(\.experts\.\d+)\.w1\.": r"\1.gate_proj.",
    r"(\.experts\.\d+)\.w3\.": r"\1.up_proj.",
    r"(\.experts\.\d+)\.w2\.": r"\1.down_proj.",
}
_DENSE = Source(module="lfm2", config="Lfm2Config", model="Lfm2ForCausalLM", build=build, sharding=SHARDING)
SOURCES = {
    "Lfm2ForCausalLM": _DENSE,
    "Lfm2VlForConditionalGeneration": replace(
        _DENSE,
        check=only_text("lfm2"),
        ignored=("model.vision_tower.", "model.multi_modal_projector."),
        renamed={r"^model\.language_model\.": "model."},
    ),
    "Lfm2MoeForCausalLM": Source(
        module="lfm2_moe",
        config="Lfm2MoeConfig",
        model="Lfm2MoeForCausalLM",
        build=build,
        renamed=_RENAMED,
        rotary="pos_emb",
        sharding=SHARDING,
    ),
}
