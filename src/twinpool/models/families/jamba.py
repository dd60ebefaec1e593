"""Jamba: Mamba1 or attention without positions, then an MLP or experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from twinpool.errors import ModelError
from twinpool.models.attention.layer import adopt_attention
from twinpool.models.blocks import Linear, Mlp, Moe, PreNormLayer, Router, adopt_mlp, adopt_norm, make_experts
from twinpool.models.families.base import Decoder, Parts, Source
from twinpool.models.mamba1.layer import SelectionNorms, adopt_mamba1
from twinpool.models.mamba1.sharding import mamba1_cuts
from twinpool.models.shard import ATTENTION, COLUMNS, ROWS, Sharding, cut


def check(config: Any) -> None:
    """Raise ModelError for keys that transformers does not act on."""
    window = getattr(config, "sliding_window", None)
    if window is not None:
        raise ModelError(f"config.json says sliding_window={window}; only null runs here.")


def build(parts: Parts) -> Decoder:
    """Our layers with the model's weights, in its order."""
    layers = tuple(_layer(parts, block) for block in parts.base.layers)
    return Decoder(layers=layers, norm=adopt_norm(parts.base.final_layernorm))


def _layer(parts: Parts, block: Any) -> PreNormLayer:
    mixer: nn.Module
    if hasattr(block, "self_attn"):
        module = block.self_attn
        mixer = adopt_attention(module, layer=next(parts.attention), table=parts.table, out_proj=module.o_proj)
    else:
        inner = block.mamba
        norms = SelectionNorms(
            adopt_norm(inner.dt_layernorm), adopt_norm(inner.b_layernorm), adopt_norm(inner.c_layernorm)
        )
        mixer = adopt_mamba1(inner, layer=next(parts.linear), norms=norms)
    return PreNormLayer(
        norm=adopt_norm(block.input_layernorm),
        mixer=mixer,
        second_norm=adopt_norm(block.pre_ff_layernorm),
        mlp=_feed_forward(block.feed_forward),
    )


def _feed_forward(module: Any) -> Mlp | Moe:
    if not hasattr(module, "experts"):
        return adopt_mlp(module)
    router = Router(linear=Linear([module.router.weight]), top_k=module.router.top_k, normalise=False)
    return Moe(router=router, experts=make_experts(module.experts))


SHARDING = Sharding(
    divided=("num_attention_heads", "intermediate_size"),
    head_dim=lambda config: config.hidden_size // config.num_attention_heads,
    cuts={
        **ATTENTION,
        **mamba1_cuts(r"\.mamba", channels=lambda config: config.mamba_expand * config.hidden_size),
        r"\.(gate|up)_proj\.weight": ROWS,
        r"\.experts\.gate_up_proj": cut(1, lambda config: ((config.intermediate_size, 1),) * 2),
        r"\.(down_proj\.weight|experts\.down_proj)": COLUMNS,
    },
    # Channels are a multiple of the hidden size.
    narrowed=r"\.mamba\.(\w+_proj\..*|conv1d\..*|A_log|D)",
)
SOURCES = {
    "JambaForCausalLM": Source(
        module="jamba",
        config="JambaConfig",
        model="JambaForCausalLM",
        build=build,
        check=check,
        rotary=None,
        sharding=SHARDING,
    ),
}
