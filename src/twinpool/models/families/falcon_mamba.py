"""Mamba and Falcon-Mamba: Mamba1 in every layer and nothing else, so there is no KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from twinpool.models.blocks import RmsNorm, adopt_norm
from twinpool.models.bound import Step
from twinpool.models.families.base import Decoder, Parts, Source
from twinpool.models.group import Adds
from twinpool.models.mamba1.layer import Mamba1Mixer, SelectionNorms, adopt_mamba1
from twinpool.models.mamba1.sharding import mamba1_cuts
from twinpool.models.shard import Sharding


class Widened(nn.Module):
    """The layer before the first: hidden state in float32 from here on, where the config keeps residuals so."""

    def over_ranks(self, summed: Callable[[Adds], Adds]) -> None:
        """Every rank has the whole of it."""

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """float32 [T, hidden_size] of hidden [T, hidden_size]."""
        del step
        return hidden.float()


class MambaLayer(nn.Module):
    """hidden += mixer(norm(hidden)); hidden is of the model's dtype or wider."""

    def __init__(self, norm: RmsNorm, mixer: Mamba1Mixer, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.mixer, self.dtype = norm, mixer, dtype
        self._mixer = mixer.forward

    def over_ranks(self, summed: Callable[[Adds], Adds]) -> None:
        """As PreNormLayer's."""
        self._mixer = summed(self._mixer)

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """hidden [T, hidden_size], changed in place and returned."""
        narrow = hidden.to(self.dtype)
        return hidden.add_(self._mixer(self.norm.forward(narrow), step, torch.zeros_like(narrow)))


class LastNorm(RmsNorm):
    """The norm before the head, of hidden states that may be wider than the head's input."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__(weight, eps)
        self.dtype = weight.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normed x [T, hidden_size], of the model's dtype."""
        return super().forward(x).to(self.dtype)


def build(parts: Parts) -> Decoder:
    """Our layers with the model's weights, in its order."""
    layers = [_layer(parts, block) for block in parts.base.layers]
    widened = [Widened()] if parts.config.residual_in_fp32 else []
    last = parts.base.norm_f
    return Decoder(layers=(*widened, *layers), norm=LastNorm(last.weight, last.variance_epsilon))


def _layer(parts: Parts, block: Any) -> MambaLayer:
    mixer = adopt_mamba1(block.mixer, layer=next(parts.linear), norms=_norms(block.mixer))
    return MambaLayer(adopt_norm(block.norm), mixer, block.norm.weight.dtype)


def _norms(mixer: Any) -> SelectionNorms | None:
    """Falcon-Mamba's, which have no weights (the module's are not used, and not its width either); Mamba has none."""
    if not hasattr(mixer, "b_layernorm"):
        return None
    place = mixer.D.device
    step, state = (
        RmsNorm(torch.ones(width, device=place), mixer.rms_eps)
        for width in (mixer.time_step_rank, mixer.ssm_state_size)
    )
    return SelectionNorms(step, state, state)


SHARDING = Sharding(
    divided=("intermediate_size",),
    shared=(),
    cuts=mamba1_cuts(r"\.mixer", channels=lambda config: config.intermediate_size),
)
SOURCES = {
    "FalconMambaForCausalLM": Source(
        module="falcon_mamba",
        config="FalconMambaConfig",
        model="FalconMambaForCausalLM",
        build=build,
        rotary=None,
        sharding=SHARDING,
    ),
    "MambaForCausalLM": Source(
        module="mamba",
        config="MambaConfig",
        model="MambaForCausalLM",
        build=build,
        # As transformers itself does: the first checkpoints have it so.
        renamed={r"\.embedding\.": ".embeddings."},
        rotary=None,
        sharding=SHARDING,
    ),
}
