"""ModelSpec: what a model keeps per sequence and per token, from its config.json. Nobody else multiplies dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinpool.errors import ModelError
from twinpool.models.registry import family_of, known_architecture
from twinpool.models.shapes import ITEM_BYTES, ConfigReader, LayerSpec, StateShapes, item_bytes

__all__ = ["LayerSpec", "ModelSpec", "StateShapes"]

STATE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Memory facts of a model.

    context_len: tokens; dtype: of the weights and so of the activations; ssm_dtype: of the temporal state unless a flag
    says otherwise; checkpoint_kv_dtype: of the KV cache the checkpoint was calibrated for (None: that of the weights);
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
    checkpoint_kv_dtype: str | None = None
    warnings: tuple[str, ...] = ()

    @staticmethod
    def from_config_json(config: Mapping[str, Any]) -> ModelSpec:
        """Read a Hugging Face config, nested text configs too. Raises ModelError: what is missing, wrong or unknown."""
        architecture = known_architecture(config)
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            raise ModelError(f"config.json says text_config={text!r}; it must be an object.")
        reader, top, family = ConfigReader(text), ConfigReader(config), family_of(architecture)
        ssm_dtype, warnings = _ssm_dtype(config, text)
        chunk = family.chunk_tokens
        return ModelSpec(
            architecture=architecture,
            model_type=reader.text("model_type", default=""),
            family=family.name,
            hidden_size=reader.integer("hidden_size"),
            vocab_size=reader.integer("vocab_size"),
            context_len=reader.integer("max_position_embeddings", default=32768),
            dtype=_dtype(text, config),
            ssm_dtype=ssm_dtype,
            chunk_tokens=chunk if family.chunk_key is None else top.integer(family.chunk_key, default=chunk),
            supports_extra_buffer=family.supports_extra_buffer,
            layers=family.layers(reader),
            checkpoint_kv_dtype=_checkpoint_kv_dtype(text) or _checkpoint_kv_dtype(config),
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
        conv = self.conv_bytes_per_slot(conv_dtype=conv_dtype, tp=tp)
        return conv + self.ssm_bytes_per_slot(ssm_dtype=ssm_dtype, tp=tp)

    def kv_bytes_per_token(self, *, kv_dtype: str, tp: int = 1, dcp: int = 1) -> int:
        """Keys and values of one token in all attention layers on one rank (reference 1.7, cell_size)."""
        attention = (layer.attention for layer in self.layers if layer.attention is not None)
        return sum(spec.kv_elements_per_token(tp, dcp) for spec in attention) * item_bytes(kv_dtype)


def _dtype(*places: Mapping[str, Any]) -> str:
    """The first dtype (torch_dtype in older files) that is given; bfloat16 when none is. Raises ModelError."""
    for place in places:
        name = place.get("dtype") or place.get("torch_dtype")
        if name is not None:
            short = str(name).removeprefix("torch.")
            if short not in ITEM_BYTES:
                raise ModelError(f"config.json says dtype={name!r}; it must be one of {', '.join(ITEM_BYTES)}.")
            return short
    return "bfloat16"


def _checkpoint_kv_dtype(config: Mapping[str, Any]) -> str | None:
    """fp8_e4m3 when the quantisation config carries an 8-bit floating-point KV scheme (reference 1.7)."""
    quantised = config.get("quantization_config")
    scheme = quantised.get("kv_cache_scheme") if isinstance(quantised, Mapping) else None
    if not isinstance(scheme, Mapping):
        return None
    return "fp8_e4m3" if (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) else None


def _ssm_dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The config's state dtype, the text config's first, else float32; an invalid name warns (reference 1.6)."""
    name = text.get("mamba_ssm_dtype", config.get("mamba_ssm_dtype"))
    if name is None or name in STATE_DTYPES:
        return name or "float32", ()
    choices = ", ".join(f"'{dtype}'" for dtype in STATE_DTYPES)
    sentence = f"Invalid mamba_ssm_dtype '{name}' in config. Must be one of [{choices}]. Using default 'float32'."
    return "float32", (sentence,)
