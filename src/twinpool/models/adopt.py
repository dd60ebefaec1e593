"""A transformers model with our layers inside.

The module tree, config and rotary frequencies are transformers'; mixers, norms, MLPs and linear layers are replaced by ours,
which take the step as an argument instead of cache, mask and position embeddings. So the loop over layers is ours as well: it
adds residuals inside the linear layers and makes no mask, which paged attention has no use for.

    model = load_model(folder, dtype="bfloat16", device="cpu")
    logits = model.forward(input_ids, step, memory, sample_at)
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from twinpool.errors import ModelError
from twinpool.models.attention.layer import adopt_attention
from twinpool.models.blocks import Linear, adopt_mlp, adopt_norm
from twinpool.models.bound import BoundMemory, Step
from twinpool.models.config_file import read_config
from twinpool.models.gdn.layer import adopt_gdn
from twinpool.models.step_batch import MemoryViews, StepBatch
from twinpool.models.weights import assign_weights, read_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a family's classes are in transformers, and how its checkpoints name the text part.

    ignored: prefixes of other modalities and draft layers; renamed: prefix in the checkpoint -> prefix in the model.
    """

    module: str
    config: str
    model: str
    ignored: tuple[str, ...] = ("mtp.",)
    renamed: Mapping[str, str] | None = None


_NESTED = {"model.language_model.": "model."}
_VISUAL = ("mtp.", "model.visual.")
_DENSE = "transformers.models.qwen3_5"
_SPARSE = "transformers.models.qwen3_5_moe"
SOURCES = {
    "Qwen3NextForCausalLM": Source("transformers.models.qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "Qwen3_5ForCausalLM": Source(_DENSE, "Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForCausalLM": Source(_SPARSE, "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "Qwen3_5ForConditionalGeneration": Source(_DENSE, "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _VISUAL, _NESTED),
    "Qwen3_5MoeForConditionalGeneration": Source(
        _SPARSE, "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _VISUAL, _NESTED
    ),
}
# Frequencies of these change with the length of the sequence, which a table made at boot cannot follow.
_MOVING_ROPE = ("dynamic", "longrope")


class AdoptedModel:
    """A model that runs packed steps over paged memory.

    weight_bytes: all weights in the form they are kept; vocab_size: columns of the logits.
    """

    def __init__(self, model: Any, *, weight_bytes: int, device: torch.device) -> None:
        self._embeddings: torch.Tensor = model.model.embed_tokens.weight
        self._layers = [
            (
                block.input_layernorm.forward,
                mixer_of(block).forward,
                block.post_attention_layernorm.forward,
                block.mlp.forward,
            )
            for block in model.model.layers
        ]
        self._norm = model.model.norm.forward
        self._head = model.lm_head.forward
        self._device = device
        self._memory: BoundMemory | None = None
        self.module = model
        self.weight_bytes = weight_bytes
        self.vocab_size = int(model.config.vocab_size)

    def forward(
        self, input_ids: torch.Tensor, step: StepBatch, memory: MemoryViews, sample_at: torch.Tensor
    ) -> torch.Tensor:
        """float32 [n, vocab_size], contiguous: logits of the packed tokens sample_at (int64 [n]).

        input_ids: int64 [T]. States, checkpoints and KV of all rows are written to memory. Call under torch.inference_mode().
        """
        bound = self._memory
        if bound is None or bound.source is not memory:
            bound = self._memory = BoundMemory.of(memory)
        ready = Step.of(step, bound, device=self._device)
        hidden = F.embedding(input_ids, self._embeddings)
        for norm, mixer, second_norm, mlp in self._layers:
            hidden = mixer(norm(hidden), ready, hidden)
            hidden = mlp(second_norm(hidden), hidden)
        if len(sample_at) == 0:
            return torch.empty((0, self.vocab_size), device=self._device)
        logits: torch.Tensor = self._head(self._norm(hidden[sample_at]), wide=True)
        return logits


def mixer_of(block: Any) -> Any:
    """The token mixer of a decoder layer."""
    return block.linear_attn if hasattr(block, "linear_attn") else block.self_attn


def load_model(folder: Path, *, dtype: str, device: str = "cpu", context_len: int | None = None) -> AdoptedModel:
    """The text part of a checkpoint folder with our layers, weights in `dtype` (a name) on `device`.

    context_len: positions the rotary table covers, max_position_embeddings by default. Raises ModelError if the architecture is
    not adopted, or weights are missing, unknown, unreadable or of another shape than config.json says.
    """
    config_json = read_config(folder)
    source = _source_of(config_json)
    module = importlib.import_module(f"{source.module}.modeling_{source.module.rsplit('.', 1)[-1]}")
    config_module = importlib.import_module(f"{source.module}.configuration_{source.module.rsplit('.', 1)[-1]}")
    config = _text_config(getattr(config_module, source.config), config_json, folder)
    with torch.device("meta"):
        model = getattr(module, source.model)(config)
    tensors = read_weights(folder, ignored=source.ignored, renamed=source.renamed or {})
    assign_weights(model, tensors, dtype=DTYPES[dtype], folder=folder)
    place = torch.device(device)
    with torch.inference_mode():
        model.to(place) if place.type != "cpu" else None
        table = _rotary_table(type(model.model.rotary_emb)(config), context_len or config.max_position_embeddings).to(
            place
        )
        weight_bytes = _adopt_layers(model, table)
    return AdoptedModel(model.eval(), weight_bytes=weight_bytes, device=place)


def _source_of(config: Mapping[str, Any]) -> Source:
    names = config.get("architectures") or ["none"]
    if names[0] not in SOURCES:
        raise ModelError(f"architecture '{names[0]}' cannot be run here yet; these can: {', '.join(SOURCES)}.")
    return SOURCES[names[0]]


def _text_config(config_class: Any, config_json: Mapping[str, Any], folder: Path) -> Any:
    """transformers' config object of the text part; refuses what our layers do not do."""
    text = dict(config_json.get("text_config", config_json))
    if "text_config" in config_json:
        text["tie_word_embeddings"] = config_json.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    try:
        config = config_class(**text)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} is not a {config_class.__name__}: {error}.") from error
    if config.hidden_act != "silu":
        raise ModelError(f"config.json says hidden_act='{config.hidden_act}'; only 'silu' runs here.")
    rope_type = config.rope_parameters["rope_type"]
    if rope_type in _MOVING_ROPE:
        raise ModelError(
            f"config.json says rope_type='{rope_type}', which does not run here; use 'default', 'linear' or 'yarn'."
        )
    return config


def _rotary_table(rotary: Any, positions: int) -> torch.Tensor:
    """float32 [positions, rotary dims]: cos of each frequency, then sin, from transformers' own module.

    It returns every frequency twice, side by side, and for text all three position axes are the same.
    """
    cos, sin = rotary(torch.empty(0), torch.arange(positions)[None])
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], -1).contiguous()


def _adopt_layers(model: Any, table: torch.Tensor) -> int:
    """Replace norms, mixers and MLPs of every layer; returns the bytes of all weights as they are kept now."""
    counts = {"linear": 0, "attention": 0}
    for block in model.model.layers:
        if hasattr(block, "linear_attn"):
            block.linear_attn = adopt_gdn(block.linear_attn, layer=counts["linear"])
            counts["linear"] += 1
        else:
            block.self_attn = adopt_attention(block.self_attn, layer=counts["attention"], table=table)
            counts["attention"] += 1
        block.mlp = adopt_mlp(block.mlp)
        block.input_layernorm = adopt_norm(block.input_layernorm)
        block.post_attention_layernorm = adopt_norm(block.post_attention_layernorm)
    model.model.norm = adopt_norm(model.model.norm)
    model.lm_head = Linear([model.lm_head.weight])
    packed = sum(module.size_bytes for module in model.modules() if isinstance(module, Linear))
    embeddings = model.model.embed_tokens.weight
    return int(packed + embeddings.numel() * embeddings.element_size() + table.numel() * table.element_size())
