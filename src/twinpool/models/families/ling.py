"""Ling-3 (bailing_hybrid): Kimi Delta Attention or gated attention over a latent, then an MLP or experts in groups."""

from __future__ import annotations

from typing import Any

from twinpool.models.families.base import Decoder, Parts, Source
from twinpool.models.families.kimi import CONVOLUTIONS, FORGET_GATE, decoder
from twinpool.models.kda.sharding import delta_sharding


def build(parts: Parts) -> Decoder:
    """Our layers with the model's weights, in its order."""
    return decoder(parts, lower_bound=_lower_bound)


def _lower_bound(mixer: Any) -> float | None:
    forget = mixer.forget_gate
    return forget.lower_bound if forget.safe_gate else None


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
