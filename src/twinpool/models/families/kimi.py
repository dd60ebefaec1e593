"""Kimi-Linear: Kimi Delta Attention or attention over a latent without positions, then an MLP or experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from twinpool.errors import ModelError
from twinpool.models.attention.latent_layer import adopt_latent
from twinpool.models.blocks import Mlp, Moe, PreNormLayer, adopt_mlp, adopt_norm, make_experts, make_router
from twinpool.models.families.base import Decoder, Parts, Source
from twinpool.models.kda.layer import adopt_kda
from twinpool.models.kda.sharding import delta_sharding

# Keys of config.json of which only one value is what transformers' model does. Nobody else reads them, so they are told apart here.
_ONLY = {
    "mla_use_nope": True,
    "mla_use_output_gate": False,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
}


def check(config: Any) -> None:
    """Raise ModelError for what transformers' model leaves out: positions, other gates, other scores of experts."""
    for key, only in _ONLY.items():
        value = getattr(config, key, only)
        if value != only:
            raise ModelError(f"config.json says {key}={value!r}; only {only!r} runs here.")
    if (getattr(config, "linear_attn_config", None) or {}).get("use_full_rank_gate"):
        raise ModelError("config.json says use_full_rank_gate=True; only gates through a narrow matrix run here.")


def build(parts: Parts) -> Decoder:
    """Our layers with the model's weights, in its order."""
    return decoder(parts, lower_bound=lambda mixer: None)


def decoder(parts: Parts, *, lower_bound: Callable[[Any], float | None]) -> Decoder:
    """Our layers with the model's weights; `lower_bound` of one of its KDA modules is adopt_kda's."""
    layers = tuple(_layer(parts, block, lower_bound) for block in parts.base.layers)
    return Decoder(layers=layers, norm=adopt_norm(parts.base.norm))


def _layer(parts: Parts, block: Any, lower_bound: Callable[[Any], float | None]) -> PreNormLayer:
    mixer: nn.Module
    if block.block_type == "linear_attention":
        mixer = adopt_kda(block.self_attn, layer=next(parts.linear), lower_bound=lower_bound(block.self_attn))
    else:
        mixer = adopt_latent(block.self_attn, layer=next(parts.attention), table=parts.table)
    return PreNormLayer(
        norm=adopt_norm(block.input_layernorm),
        mixer=mixer,
        second_norm=adopt_norm(block.post_attention_layernorm),
        mlp=feed_forward(block.mlp),
    )


def feed_forward(module: Any) -> Mlp | Moe:
    """Our MLP, or experts as DeepSeek-V3 chooses them: by sigmoids, with a bias for the choice, and one shared."""
    if not hasattr(module, "experts"):
        return adopt_mlp(module)
    return Moe(
        router=make_router(module.gate), experts=make_experts(module.experts), shared=adopt_mlp(module.shared_experts)
    )


# The published names: the decay's parts beside the projections, experts numbered as in Mixtral.
FORGET_GATE = {r"\.self_attn\.(f_a_proj\.|f_b_proj\.|f_proj\.|dt_bias$|A_log$)": r".self_attn.forget_gate.\1"}
CONVOLUTIONS = {".conv1d.weight": (".q_conv1d.weight", ".k_conv1d.weight", ".v_conv1d.weight")}
_RENAMED = {
    **FORGET_GATE,
    r"\.block_sparse_moe\.": ".mlp.",
    r"(\.experts\.\d+)\.w1\.": r"\1.gate_proj.",
    r"(\.experts\.\d+)\.w3\.": r"\1.up_proj.",
    r"(\.experts\.\d+)\.w2\.": r"\1.down_proj.",
}
SOURCES = {
    "KimiLinearForCausalLM": Source(
        module="kimi_linear",
        config="KimiLinearConfig",
        model="KimiLinearForCausalLM",
        build=build,
        check=check,
        renamed=_RENAMED,
        joined=CONVOLUTIONS,
        sharding=delta_sharding(decay_axis=2),
        rotary=None,
    )
}
