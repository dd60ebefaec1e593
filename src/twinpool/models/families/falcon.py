"""Falcon-H1: Mamba2 and attention side by side in every layer, then an MLP, with factors on what goes in and out of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from twinpool.models.attention.layer import AttentionMixer, adopt_attention
from twinpool.models.blocks import Linear, RmsNorm, adopt_linear, adopt_linears, adopt_norm, gated_product
from twinpool.models.bound import Step
from twinpool.models.families.base import Decoder, Parts, Source
from twinpool.models.group import Adds
from twinpool.models.mamba2.layer import Mamba2Mixer, adopt_mamba2
from twinpool.models.mamba2.sharding import MAMBA2_KEYS, mamba2_cuts, narrow_inner
from twinpool.models.shard import ATTENTION, COLUMNS, ROWS, Sharding, on_first


class FalconLayer(nn.Module):
    """hidden += b ssm(a norm(hidden)) + d attention(c norm(hidden)), then hidden += mlp(second_norm(hidden)).

    ssm_factors: a, b; attention_factors: c, d.
    """

    def __init__(
        self,
        *,
        norm: RmsNorm,
        ssm: Mamba2Mixer,
        attention: AttentionMixer,
        second_norm: RmsNorm,
        mlp: FalconMlp,
        ssm_factors: tuple[float, float],
        attention_factors: tuple[float, float],
    ) -> None:
        super().__init__()
        self.norm, self.second_norm = norm, second_norm
        self.ssm, self.attention, self.mlp = ssm, attention, mlp
        self.ssm_factors, self.attention_factors = ssm_factors, attention_factors
        self._ssm, self._attention, self._mlp = ssm.forward, attention.forward, mlp.forward

    def over_ranks(self, summed: Callable[[Adds], Adds]) -> None:
        """As PreNormLayer's."""
        self._ssm, self._attention, self._mlp = summed(self._ssm), summed(self._attention), summed(self._mlp)

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """hidden [T, hidden_size], changed in place and returned."""
        x = self.norm.forward(hidden)
        mixed = self._scaled(self._ssm, x, step, self.ssm_factors)
        mixed.add_(self._scaled(self._attention, x, step, self.attention_factors))
        hidden.add_(mixed)
        return self._mlp(self.second_norm.forward(hidden), hidden)

    @staticmethod
    def _scaled(mixer: Adds, x: torch.Tensor, step: Step, factors: tuple[float, float]) -> torch.Tensor:
        before, after = factors
        out = mixer(_times(x, before), step, torch.zeros_like(x))
        return out if after == 1.0 else out.mul_(after)


class FalconMlp(nn.Module):
    """residual += b down(silu(a gate(x)) * up(x)); factors: a, b."""

    def __init__(self, *, gate_up: Linear, down: Linear, factors: tuple[float, float]) -> None:
        super().__init__()
        self.gate_up, self.down, self.factors = gate_up, down, factors

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x (normed), residual: [T, hidden_size]."""
        opened = self.gate_up.forward(x)
        opened[:, : self.down.k].mul_(self.factors[0])
        return residual.add_(self.down.forward(gated_product(opened)).mul_(self.factors[1]))


def build(parts: Parts) -> Decoder:
    """Our layers with the model's weights, in its order."""
    return Decoder(
        layers=tuple(_layer(parts, block) for block in parts.base.layers),
        norm=adopt_norm(parts.base.final_layernorm),
        embed_scale=parts.config.embedding_multiplier,
        logit_scale=parts.config.lm_head_multiplier,
    )


def _layer(parts: Parts, block: Any) -> FalconLayer:
    config, attention, mlp = parts.config, block.self_attn, block.feed_forward
    return FalconLayer(
        norm=adopt_norm(block.input_layernorm),
        ssm=adopt_mamba2(block.mamba, layer=next(parts.linear), factors=_column_factors(config, block.mamba)),
        attention=adopt_attention(
            attention,
            layer=next(parts.attention),
            table=parts.table,
            out_proj=attention.o_proj,
            # Keys are multiplied before they are rotated, which is linear: the scores are what changes.
            scale=attention.scaling * attention.key_multiplier,
        ),
        second_norm=adopt_norm(block.pre_ff_layernorm),
        mlp=FalconMlp(
            gate_up=adopt_linears(mlp.gate_proj, mlp.up_proj),
            down=adopt_linear(mlp.down_proj),
            factors=(mlp.gate_multiplier, mlp.down_multiplier),
        ),
        ssm_factors=(block.mamba.ssm_in_multiplier, block.ssm_out_multiplier),
        attention_factors=(block.attention_in_multiplier, block.attn_out_multiplier),
    )


def _column_factors(config: Any, mixer: Any) -> torch.Tensor | None:
    """[columns of in_proj]: a factor on each of z | x | B | C | dt, of the weights' dtype; None if all are 1."""
    if all(factor == 1.0 for factor in config.ssm_multipliers):
        return None
    width = mixer.n_groups * mixer.ssm_state_size
    sizes = torch.tensor([mixer.intermediate_size, mixer.intermediate_size, width, width, mixer.num_heads])
    weight = mixer.in_proj.weight
    return torch.tensor(config.ssm_multipliers).repeat_interleave(sizes).to(weight.device, weight.dtype)


def _times(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1.0 else x * factor


SHARDING = Sharding(
    divided=("num_attention_heads", "mamba_n_heads", "mamba_d_ssm", "intermediate_size"),
    shared=("num_key_value_heads", "mamba_n_groups"),
    head_dim=lambda config: getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    cuts={
        **ATTENTION,
        **mamba2_cuts(r"\.mamba", MAMBA2_KEYS),
        r"\.(gate|up)_proj\.(weight|bias)": ROWS,
        r"\.down_proj\.weight": COLUMNS,
        r"\.down_proj\.bias": on_first,
    },
    check=MAMBA2_KEYS.check,
    joint_norm=lambda config: config.mamba_rms_norm and MAMBA2_KEYS.joint_norm(config),
    adjust=lambda part, ranks: narrow_inner(part, ranks) if part.mamba_d_ssm is None else None,
)
SOURCES = {
    "FalconH1ForCausalLM": Source(
        module="falcon_h1", config="FalconH1Config", model="FalconH1ForCausalLM", build=build, sharding=SHARDING
    ),
}
