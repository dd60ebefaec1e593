"""ModelSpec: what a model keeps per sequence and per token, from its config.json. Nobody else multiplies dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinpool.errors import ModelError
from twinpool.models.shapes import AttentionSpec, ConfigReader, LinearSpec, StateShapes, item_bytes

STATE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: what it keeps per token (attention), per sequence (linear), both, or nothing."""

    attention: AttentionSpec | None = None
    linear: LinearSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Memory facts of a model.

    context_len: tokens; dtype: of the weights and so of the activations; ssm_dtype: of the temporal state unless a flag says otherwise;
    chunk_tokens: state chunk of the model's kernels (reference 1.6), the least distance of checkpoints.
    """

    architecture: str
    model_type: str
    family: str
    hidden_size: int
    vocab_size: int
    context_len: int
    dtype: str
    ssm_dtype: str
    chunk_tokens: int
    supports_extra_buffer: bool
    layers: tuple[LayerSpec, ...]
    warnings: tuple[str, ...] = ()

    @staticmethod
    def from_config_json(config: Mapping[str, Any]) -> ModelSpec:
        """Read a Hugging Face config (nested text configs too). Raises ModelError naming what is missing, wrong or unknown."""
        from twinpool.models.registry import build_layers, known_architecture  # the registry's rows build LayerSpecs

        architecture = known_architecture(config)
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            raise ModelError(f"config.json says text_config={text!r}; it must be an object.")
        reader = ConfigReader(text)
        family, layers, chunk_tokens, supports_extra_buffer = build_layers(architecture, reader)
        dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        ssm_dtype, warnings = _ssm_dtype(config, text)
        return ModelSpec(
            architecture=architecture,
            model_type=reader.text("model_type", default=""),
            family=family,
            hidden_size=reader.integer("hidden_size"),
            vocab_size=reader.integer("vocab_size"),
            context_len=reader.integer("max_position_embeddings", default=32768),
            dtype=str(dtype).removeprefix("torch."),
            ssm_dtype=ssm_dtype,
            chunk_tokens=chunk_tokens,
            supports_extra_buffer=supports_extra_buffer,
            layers=layers,
            warnings=warnings,
        )

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of layers with a KV cache."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.attention is not None)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of layers with a recurrent state."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.linear is not None)

    @property
    def n_attention_layers(self) -> int:
        """Layers with a KV cache."""
        return len(self.attention_layers)

    @property
    def n_linear_layers(self) -> int:
        """Layers with a recurrent state."""
        return len(self.linear_layers)

    def state_shapes(self, *, tp: int = 1) -> tuple[StateShapes, ...]:
        """Conv and temporal shapes of each linear layer on one rank, in layer order."""
        return tuple(layer.linear.states(tp) for layer in self.layers if layer.linear is not None)

    def conv_bytes_per_slot(self, *, conv_dtype: str, tp: int = 1) -> int:
        """Conv windows of all linear layers in one slot (reference 1.6)."""
        return sum(shapes.conv_elements for shapes in self.state_shapes(tp=tp)) * item_bytes(conv_dtype)

    def ssm_bytes_per_slot(self, *, ssm_dtype: str, tp: int = 1) -> int:
        """Temporal states of all linear layers in one slot (reference 1.6)."""
        return sum(shapes.temporal_elements for shapes in self.state_shapes(tp=tp)) * item_bytes(ssm_dtype)

    def slot_bytes(self, *, ssm_dtype: str, conv_dtype: str, tp: int = 1) -> int:
        """One complete state of one sequence on one rank (reference 1.6)."""
        return self.conv_bytes_per_slot(conv_dtype=conv_dtype, tp=tp) + self.ssm_bytes_per_slot(ssm_dtype=ssm_dtype, tp=tp)

    def kv_bytes_per_token(self, *, kv_dtype: str, tp: int = 1) -> int:
        """Keys and values of one token in all attention layers on one rank (reference 1.7, cell_size)."""
        elements = sum(layer.attention.kv_elements_per_token(tp) for layer in self.layers if layer.attention is not None)
        return elements * item_bytes(kv_dtype)


def _ssm_dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The config's state dtype (text config first), float32 by default; an invalid name warns and is ignored (reference 1.6)."""
    for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        name = text.get(key, config.get(key))
        if name is None:
            continue
        if name in STATE_DTYPES:
            return str(name), ()
        choices = ", ".join(f"'{dtype}'" for dtype in STATE_DTYPES)
        return "float32", (
            f"Invalid mamba_ssm_dtype '{name}' in config. Must be one of [{choices}]. Using default 'float32'.",
        )
    return "float32", ()
