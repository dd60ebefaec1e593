"""Nemotron-H and Nemotron 3: Mamba2, attention without positions, an MLP or experts, each a layer of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from twinpool.errors import ModelError
from twinpool.models.attention.layer import adopt_attention
from twinpool.models.blocks import Mlp, Moe, adopt_linear, adopt_norm, make_experts, make_router
from twinpool.models.bound import Step
from twinpool.models.families.base import Decoder, Parts, Source
from twinpool.models.group import Adds
from twinpool.models.mamba2.layer import adopt_mamba2
from twinpool.models.mamba2.sharding import Mamba2Keys, mamba2_cuts
from twinpool.models.shard import ATTENTION, COLUMNS, ROWS, Sharding, cut, on_first

# Keys that transformers reads but does not act on, or that our layers know one value of: the value that runs.
_ONLY = {
    "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "sliding_window": None,
    "residual_in_fp32": False,
    "attention_bias": False,
    "n_shared_experts": 1,
}


class MixerLayer(nn.Module):
    """hidden += mixer(norm(hidden)); mixer: a module `(x, step, residual) -> residual` that adds in place."""

    def __init__(self, norm: nn.Module, mixer: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList([norm, mixer])
        self._norm, self._mixer = norm.forward, mixer.forward

    def over_ranks(self, summed: Callable[[Adds], Adds]) -> None:
        """As PreNormLayer's."""
        self._mixer = summed(self._mixer)

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """hidden [T, hidden_size], changed in place and returned."""
        return self._mixer(self._norm(hidden), step, hidden)  # type: ignore[no-any-return]


class FeedForwardLayer(nn.Module):
    """hidden += mlp(norm(hidden)); mlp: a module `(x, residual) -> residual` that adds in place."""

    def __init__(self, norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList([norm, mlp])
        self._norm, self._mlp = norm.forward, mlp.forward

    def over_ranks(self, summed: Callable[[Adds], Adds]) -> None:
        """As PreNormLayer's."""
        self._mlp = summed(self._mlp)

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """hidden [T, hidden_size], changed in place and returned."""
        del step
        return self._mlp(self._norm(hidden), hidden)  # type: ignore[no-any-return]


def check(config: Any) -> None:
    """Raise ModelError for keys whose value nothing here acts on."""
    for key, value in _ONLY.items():
        said = getattr(config, key)
        if said != value:
            raise ModelError(f"config.json says {key}={said!r}; only {value!r} runs here.")
    limits = list(config.time_step_limit)
    if len(limits) != 2 or limits[0] > config.time_step_min or limits[1] < 1e30:
        raise ModelError(
            f"config.json says time_step_limit={limits}; steps are bounded by time_step_min={config.time_step_min} only."
        )
    width = getattr(config, "attention_head_dim", None)
    if width not in (None, config.head_dim):
        raise ModelError(
            f"config.json says attention_head_dim={width} and head_dim={config.head_dim}, which must agree."
        )


def build(parts: Parts) -> Decoder:
    """Our layers with the model's weights, in its order."""
    return Decoder(
        layers=tuple(_layer(parts, block) for block in parts.base.layers), norm=adopt_norm(parts.base.norm_f)
    )


def _layer(parts: Parts, block: Any) -> nn.Module:
    module, norm = block.mixer, adopt_norm(block.norm)
    if block.block_type == "linear_attention":
        return MixerLayer(norm, adopt_mamba2(module, layer=next(parts.linear)))
    if block.block_type == "full_attention":
        layer = next(parts.attention)
        return MixerLayer(norm, adopt_attention(module, layer=layer, table=parts.table, out_proj=module.o_proj))
    return FeedForwardLayer(norm, _mlp(module) if block.block_type == "mlp" else _experts(module))


def _mlp(module: Any) -> Mlp:
    return Mlp(gate_up=adopt_linear(module.up_proj), down=adopt_linear(module.down_proj), squared_relu=True)


def _experts(module: Any) -> Moe:
    whole = isinstance(module.fc1_latent_proj, nn.Identity)
    return Moe(
        router=make_router(module.gate),
        experts=make_experts(module.experts, squared_relu=True),
        shared=_mlp(module.shared_experts),
        narrow=None if whole else adopt_linear(module.fc1_latent_proj),
        widen=None if whole else adopt_linear(module.fc2_latent_proj),
    )


_MAMBA2 = Mamba2Keys(heads="mamba_num_heads", head_dim="mamba_head_dim", groups="n_groups", state_size="ssm_state_size")
SHARDING = Sharding(
    divided=(
        "num_attention_heads",
        "mamba_num_heads",
        "intermediate_size",
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    shared=("num_key_value_heads", "n_groups"),
    cuts={
        **ATTENTION,
        **mamba2_cuts(r"\.mixer", _MAMBA2),
        r"\.experts\.up_proj": cut(1),
        r"\.up_proj\.(weight|bias)": ROWS,
        r"\.(down_proj\.weight|experts\.down_proj)": COLUMNS,
        # What experts of a latent give is added up before the way back, which only rank 0 gives its bias.
        r"\.(down_proj|fc2_latent_proj)\.bias": on_first,
    },
    check=_MAMBA2.check,
    joint_norm=_MAMBA2.joint_norm,
)
SOURCES = {
    "NemotronHForCausalLM": Source(
        module="nemotron_h",
        config="NemotronHConfig",
        model="NemotronHForCausalLM",
        build=build,
        check=check,
        renamed={r"^backbone\.": "model."},
        rotary=None,
        sharding=SHARDING,
    ),
}
