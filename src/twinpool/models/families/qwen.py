"""Qwen3-Next, Qwen3.5 and the text part of MiniCPM-V: Gated DeltaNet or gated attention, then an MLP or experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from twinpool.models.attention.layer import HeadNorms, adopt_attention
from twinpool.models.blocks import Linear, Mlp, Moe, PreNormLayer, Router, ZeroCentredNorm, adopt_mlp, make_experts
from twinpool.models.families.base import Decoder, Parts, Source, only_text
from twinpool.models.gdn.layer import adopt_gdn
from twinpool.models.gdn.sharding import qkv_heads
from twinpool.models.shard import ATTENTION, COLUMNS, EXPERTS_GATE_UP, ROWS, Sharding, cut


def build(parts: Parts) -> Decoder:
    """Our layers with the model's weights, in its order."""
    return Decoder(layers=tuple(_layer(parts, block) for block in parts.base.layers), norm=_norm(parts.base.norm))


def _layer(parts: Parts, block: Any) -> PreNormLayer:
    mixer: nn.Module
    if hasattr(block, "linear_attn"):
        mixer = adopt_gdn(block.linear_attn, layer=next(parts.linear))
    else:
        module = block.self_attn
        norms = HeadNorms(1.0 + module.q_norm.weight.float(), 1.0 + module.k_norm.weight.float(), module.q_norm.eps)
        mixer = adopt_attention(
            module, layer=next(parts.attention), table=parts.table, norms=norms, out_proj=module.o_proj, gated=True
        )
    return PreNormLayer(
        norm=_norm(block.input_layernorm),
        mixer=mixer,
        second_norm=_norm(block.post_attention_layernorm),
        mlp=_feed_forward(block.mlp),
    )


def _norm(module: Any) -> ZeroCentredNorm:
    return ZeroCentredNorm(module.weight, module.eps)


def _feed_forward(module: Any) -> Mlp | Moe:
    if not hasattr(module, "experts"):
        return adopt_mlp(module)
    return Moe(
        router=Router(
            linear=Linear([module.gate.weight]),
            top_k=module.gate.top_k,
            normalise=getattr(module.gate, "norm_topk_prob", True),
        ),
        experts=make_experts(module.experts),
        shared=adopt_mlp(module.shared_expert),
        shared_gate=Linear([module.shared_expert_gate.weight]),
    )


# Qwen3-Next has what belongs to a key head together, so that equal parts of its rows are heads as well.
SHARDING = Sharding(
    divided=(
        "num_attention_heads",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "intermediate_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ),
    cuts={
        **ATTENTION,
        r"\.linear_attn\.(in_proj_(qkvz|ba|z|b|a)\.weight|A_log|dt_bias)": ROWS,
        r"\.linear_attn\.(in_proj_qkv|conv1d)\.weight": cut(0, qkv_heads),
        r"\.linear_attn\.out_proj\.weight": COLUMNS,
        r"\.(gate|up)_proj\.weight": ROWS,
        r"\.experts\.gate_up_proj": EXPERTS_GATE_UP,
        r"\.(down_proj\.weight|experts\.down_proj)": COLUMNS,
    },
)

_NESTED = {r"^model\.language_model\.": "model."}
_VISUAL = ("mtp.", "model.visual.")


def _source(module: str, config: str, model: str, *, nested: bool = False) -> Source:
    if not nested:
        return Source(module=module, config=config, model=model, build=build, sharding=SHARDING)
    return Source(
        module=module,
        config=config,
        model=model,
        build=build,
        ignored=_VISUAL,
        renamed=_NESTED,
        sharding=SHARDING,
    )


_DENSE = ("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM")
_SPARSE = ("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM")
_MINICPM = replace(
    _source(*_DENSE, nested=True),
    check=only_text("qwen3_5_text"),
    ignored=("mtp.", "model.vision_tower.", "model.merger."),
)
SOURCES = {
    "Qwen3NextForCausalLM": _source("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "Qwen3_5ForCausalLM": _source(*_DENSE),
    "Qwen3_5MoeForCausalLM": _source(*_SPARSE),
    "Qwen3_5ForConditionalGeneration": _source(*_DENSE, nested=True),
    "Qwen3_5MoeForConditionalGeneration": _source(*_SPARSE, nested=True),
    "MiniCPMV4_6ForConditionalGeneration": _MINICPM,
    "MiniCPMV4_7ForConditionalGeneration": _MINICPM,
}
