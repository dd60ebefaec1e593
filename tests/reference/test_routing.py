"""Experts in bfloat16: each token goes to those that transformers' router chooses, with its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.tiny_models import tiny_checkpoint
from twinpool.models.adopt import load_model
from twinpool.models.blocks import Router

# Family -> the share of tokens whose experts may be others, and the error of a weight. Where transformers' router works in bfloat16
# its weights are rounded (8 bits); LFM2-MoE's are rounded before the choice, so that experts become equal.
FAMILIES = {
    "nemotron": (0.0, 1e-6), "nemotron_latent": (0.0, 1e-6), "kimi": (0.0, 1e-6), "ling": (0.0, 1e-6), "glm": (0.0, 1e-6),
    "qwen3_next": (0.0, 2**-8), "qwen3_5_moe": (0.0, 2**-8), "granite_moe": (0.0, 2**-8), "jamba": (0.0, 2**-8),
    "lfm2_moe": (0.01, 2**-6),
}  # fmt: skip
HIDDEN, TOKENS = 32, 2000


def in_transformers(router: Any, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, experts), each [T, top_k], sorted by expert."""
    out = router(x, bias) if hasattr(router, "use_expert_bias") else router(x)
    (experts,) = (part for part in out if part.dtype == torch.int64)
    weights = next(part for part in out if part.shape == experts.shape and part.dtype != torch.int64)
    return by_expert(weights.float(), experts)


def by_expert(weights: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = experts.argsort(-1)
    return weights.gather(-1, order), experts.gather(-1, order)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path, dtype="bfloat16")
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    whole = getattr(transformers, name).from_pretrained(folder, dtype=torch.bfloat16).eval()
    theirs = [module for module in whole.modules() if type(module).__name__.endswith("Router")]
    model = load_model(folder, dtype="bfloat16", context_len=8).module
    ours: list[Router] = [module.router for module in model.modules() if hasattr(module, "router")]
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    others, error = FAMILIES[family]
    for router, expected in zip(ours, theirs, strict=True):
        with torch.inference_mode():
            weights, experts = in_transformers(expected, x, router.bias)
            our_weights, our_experts = by_expert(*router.choose(x))
        same = (our_experts == experts).all(-1)
        assert 1 - same.float().mean() <= others
        assert (our_weights - weights)[same].abs().max() <= error
