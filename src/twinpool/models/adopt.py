"""A transformers model becomes ours: same parameters, our mixers and caches inside.

transformers gives the module tree, the weights and the rotary frequencies. The loop over layers is ours: its own forward would build
masks that paged attention has no use for, and its element-wise modules do not promise the same bits in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from twinpool.errors import ModelError
from twinpool.models.attention.layer import AttentionLayer
from twinpool.models.blocks import Linear, Mlp, Moe, RmsNorm
from twinpool.models.gdn.layer import GdnLayer
from twinpool.models.rows import PackedRows
from twinpool.models.step_batch import MemoryViews, PackedStep

# Architectures whose modules the layers above hold; a new family adds its mapping in `_adopt_layer`.
ADOPTED = (
    "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One decoder layer: norm, mixer, norm, MLP; exactly one of `attention` and `linear` is set."""

    input_norm: RmsNorm
    attention: AttentionLayer | None
    linear: GdnLayer | None
    post_norm: RmsNorm
    mlp: Mlp | Moe


class AdoptedModel:
    """A decoder over packed rows and paged memory."""

    def __init__(self, *, embedding: torch.Tensor, layers: tuple[_Layer, ...], norm: RmsNorm, head: Linear) -> None:
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head

    def forward(self, step: PackedStep, memory: MemoryViews) -> torch.Tensor:
        """Run one packed step; returns float32 [sampling rows, vocab]. KV, states and checkpoints are written to memory."""
        device = self._embedding.device
        page_size = memory.kv[0].keys.shape[1] if memory.kv else 1
        rows = PackedRows.of(step, page_size=page_size, device=device)
        x = self._embedding[torch.from_numpy(step.input_ids).to(device)]
        kv, states = iter(memory.kv), iter(memory.states)
        for layer in self._layers:
            normed = layer.input_norm(x)
            if layer.attention is not None:
                x = x + layer.attention(normed, rows, next(kv))
            else:
                assert layer.linear is not None
                x = x + layer.linear(normed, rows, next(states))
            x = x + layer.mlp(layer.post_norm(x))
        sampled = x[torch.from_numpy(step.sample_at).to(device)]
        return self._head.logits(self._norm(sampled))


def adopt(model: Any, *, context_len: int) -> AdoptedModel:
    """Take over a transformers causal language model (its text part). context_len: tokens the rotary table must cover.

    Raises ModelError for an architecture or activation that is not adopted. The model must not be used afterwards: packed weights
    replace its own.
    """
    name = type(model).__name__
    if name not in ADOPTED:
        raise ModelError(f"{name} cannot be served; served: {', '.join(ADOPTED)}.")
    text = model.model
    text = getattr(text, "language_model", text)
    if text.config.hidden_act != "silu":
        raise ModelError(f"config.json says hidden_act={text.config.hidden_act!r}; served models use 'silu'.")
    cos, sin = _rotary_tables(text, context_len)
    layers = tuple(_adopt_layer(layer, cos, sin) for layer in text.layers)
    norm = RmsNorm(text.norm.weight, text.norm.eps)
    return AdoptedModel(
        embedding=text.embed_tokens.weight.detach(), layers=layers, norm=norm, head=Linear(model.lm_head.weight)
    )


def _adopt_layer(layer: Any, cos: torch.Tensor, sin: torch.Tensor) -> _Layer:
    attention = AttentionLayer(layer.self_attn, cos, sin) if hasattr(layer, "self_attn") else None
    linear = GdnLayer(layer.linear_attn) if attention is None else None
    mlp = layer.mlp
    adopted = Moe(mlp) if hasattr(mlp, "experts") else Mlp(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
    norms = [RmsNorm(n.weight, n.eps) for n in (layer.input_layernorm, layer.post_attention_layernorm)]
    result = _Layer(norms[0], attention, linear, norms[1], adopted)
    # Layer by layer, so that packed and unpacked weights of the whole model never stand side by side.
    for module in layer.children():
        for parameter in module.parameters():
            parameter.data = parameter.data.new_empty(0)
    return result


def _rotary_tables(text: Any, context_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, float32 [context_len, n], from the model's own rotary module (text positions)."""
    device = text.embed_tokens.weight.device
    probe = torch.empty(0, dtype=torch.float32, device=device)
    positions = torch.arange(context_len, device=device)[None]
    with torch.inference_mode():
        cos, sin = text.rotary_emb(probe, positions)
    n = cos.shape[-1] // 2
    return cos[0, :, :n].contiguous(), sin[0, :, :n].contiguous()
