"""ModelSpec: what a model keeps per sequence and per token, from its config.json. Nobody else multiplies dimensions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from twinpool.errors import ModelError
from twinpool.models.attention.spec import DsaSpec, MlaSpec, with_exact_index
from twinpool.models.registry import family_of, known_architecture
from twinpool.models.shapes import ITEM_BYTES, ConfigReader, LayerSpec, StateShapes, WindowSpec, item_bytes

__all__ = ["LayerSpec", "ModelSpec", "StateShapes"]

STATE_DTYPES = ("float32", "bfloat16", "float16")
TEXT_KEYS = ("text_config", "llm_config")
CONTEXT_KEYS = ("max_position_embeddings", "model_max_length")
DRAFT_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Memory facts of a model.

    context_len: tokens; dtype: of the weights and so of the activations; ssm_dtype: of the temporal state unless a flag
    says otherwise; checkpoint_kv_dtype: of the KV cache the checkpoint was calibrated for (None: that of the weights);
    chunk_tokens: state chunk of the model's kernels (reference 1.6), the least distance of checkpoints;
    n_query_heads: 0 without attention; side_state_bytes: per slot, kept and moved with the states, of every rank;
    draft_layers: layers of the model's own draft (MTP) heads.
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
    n_query_heads: int = 0
    side_state_bytes: int = 0
    draft_layers: int = 0
    checkpoint_kv_dtype: str | None = None
    warnings: tuple[str, ...] = ()

    @staticmethod
    def from_config_json(config: Mapping[str, Any]) -> ModelSpec:
        """Read a Hugging Face config, nested text configs too. Raises ModelError: what is missing, wrong or unknown."""
        architecture = known_architecture(config)
        text = _text_config(config)
        reader, top, family = ConfigReader(text), ConfigReader(config), family_of(architecture)
        ssm_dtype, dtype_warnings = _ssm_dtype(config, text)
        chunk, layers = family.chunk_tokens, family.layers(reader)
        context_key = next((key for key in CONTEXT_KEYS if text.get(key) is not None), CONTEXT_KEYS[0])
        return ModelSpec(
            architecture=architecture,
            model_type=reader.text("model_type", default=""),
            family=family.name,
            hidden_size=reader.integer("hidden_size"),
            vocab_size=reader.integer("vocab_size"),
            context_len=reader.integer(context_key, default=32768),
            dtype=_dtype(text, config),
            ssm_dtype=ssm_dtype,
            chunk_tokens=chunk if family.chunk_key is None else top.integer(family.chunk_key, default=chunk),
            supports_extra_buffer=family.supports_extra_buffer,
            layers=layers,
            n_query_heads=reader.integer("num_attention_heads", default=0, least=0),
            side_state_bytes=family.side_state_bytes(reader),
            draft_layers=_draft_layers(config, text),
            checkpoint_kv_dtype=_checkpoint_kv_dtype(text) or _checkpoint_kv_dtype(config),
            warnings=(*dtype_warnings, *family.warnings(reader), *_window_warnings(layers)),
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
    def latent(self) -> bool:
        """Whether attention layers keep a latent (MLA): one number an element where others have a key and a value."""
        return any(isinstance(layer.attention, MlaSpec | DsaSpec) for layer in self.layers)

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

    def kv_bytes_per_token(
        self, *, kv_dtype: str, tp: int = 1, dcp: int = 1, layers: Iterable[int] | None = None
    ) -> int:
        """Keys and values of one token on one rank, in all attention layers or those among `layers` (reference 1.7).

        Raises ModelError on a kv_dtype that is not in shapes.KV_DTYPES.
        """
        numbers = range(len(self.layers)) if layers is None else layers
        attention = (self.layers[number].attention for number in numbers)
        return sum(spec.kv_bytes_per_token(kv_dtype, tp, dcp) for spec in attention if spec is not None)

    def draft_kv_bytes_per_token(self, *, kv_dtype: str, tp: int = 1, dcp: int = 1) -> int:
        """Keys and values of one token in the draft layers, which are as the last attention layer (reference 1.4).

        Raises ModelError on a kv_dtype that is not in shapes.KV_DTYPES.
        """
        last = self.attention_layers[-1:]
        return self.draft_layers * self.kv_bytes_per_token(kv_dtype=kv_dtype, tp=tp, dcp=dcp, layers=last)

    def with_exact_index(self, *, page_tokens: int) -> ModelSpec:
        """As it is kept here (models/attention/spec.py): keys of sparse indices are not fp8, and open pools are in the slots.

        So each layer with an index has a state, too, which comes between those of the linear layers before and behind it.
        """
        return replace(self, layers=tuple(with_exact_index(layer, page_tokens) for layer in self.layers))

    def check_tp(self, tp: int) -> None:
        """Raise ModelError when `tp` ranks cannot share the query heads or the linear heads evenly."""
        heads = self.n_query_heads
        if self.n_attention_layers and heads % tp:
            fitting = ", ".join(str(ranks) for ranks in range(1, heads + 1) if heads % ranks == 0)
            raise ModelError(f"--tp-size {tp} does not divide the model's {heads} query heads; use {fitting}.")
        self.state_shapes(tp=tp)

    def stages(self, pp: int) -> tuple[range, ...]:
        """Consecutive layers of each of `pp` pipeline stages. Raises ModelError when there are fewer layers.

        Layers left over by layers // pp go one each to the stages just before the last, which has the output head to
        hold (the choice of vLLM).
        """
        n_layers = len(self.layers)
        if not 1 <= pp <= n_layers:
            raise ModelError(
                f"--pp-size {pp} needs a layer for each stage; the model has {n_layers}, so 1 to {n_layers}."
            )
        each, left = divmod(n_layers, pp)
        sizes = [each + (pp - 1 - left <= stage < pp - 1) for stage in range(pp)]
        ends = list(accumulate(sizes))
        return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))

    def stage_share(self, pp: int) -> tuple[int, int]:
        """(Linear layers of the stage with most, all linear layers); (1, 1) without any. Raises ModelError as stages."""
        linear = set(self.linear_layers)
        largest = max(len(linear.intersection(stage)) for stage in self.stages(pp))
        return (largest, len(linear)) if linear else (1, 1)

    def stage_kv_bytes_per_token(self, *, pp: int, kv_dtype: str, tp: int = 1, dcp: int = 1) -> int:
        """Keys and values of one token on a rank of the stage with most of them. Raises ModelError as stages."""
        return max(
            self.kv_bytes_per_token(kv_dtype=kv_dtype, tp=tp, dcp=dcp, layers=stage) for stage in self.stages(pp)
        )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The nested config of the language model where there is one, else the config itself. Raises ModelError."""
    key = next((key for key in TEXT_KEYS if key in config), None)
    return config if key is None else ConfigReader(config).inner(key).values


def _draft_layers(config: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    """Layers of the draft heads, under whichever name; Inkling has them in an mtp_config of the whole config."""
    nested = config.get("mtp_config")
    places = (ConfigReader(text), ConfigReader(nested if isinstance(nested, Mapping) else {}))
    found = ((place, key) for place in places for key in DRAFT_KEYS if place.values.get(key) is not None)
    return next((place.integer(key, least=0) for place, key in found), 0)


def _window_warnings(layers: tuple[LayerSpec, ...]) -> tuple[str, ...]:
    """A sentence about sliding windows: memory per sequence that is neither state nor KV per token."""
    windows = [layer.window for layer in layers if layer.window is not None]
    if not windows:
        return ()
    return (
        f"{len(windows)} layers keep only the last {max(window.window_tokens for window in windows)} tokens: "
        f"{sum(map(_window_bytes, windows)):,} bytes of bfloat16 keys and values a sequence that are not counted here.",
    )


def _window_bytes(window: WindowSpec) -> int:
    """Keys and values of one full window in bfloat16 on a single rank."""
    return window.window_tokens * window.heads.kv_bytes_per_token("bfloat16", 1)


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
    """The config's state dtype, the text config's first, else float32, and what to warn of (reference 1.6).

    mamba_ssm_cache_dtype (Nemotron) is not read by the server that the reference describes.
    """
    name = text.get("mamba_ssm_dtype", config.get("mamba_ssm_dtype"))
    valid = name is None or name in STATE_DTYPES
    dtype = name if valid and name is not None else "float32"
    sentences = []
    if not valid:
        choices = ", ".join(f"'{choice}'" for choice in STATE_DTYPES)
        sentences.append(
            f"Invalid mamba_ssm_dtype '{name}' in config. Must be one of [{choices}]. Using default 'float32'."
        )
    ignored = text.get("mamba_ssm_cache_dtype")
    if ignored is not None and ignored != dtype:
        sentences.append(
            f"config.json says mamba_ssm_cache_dtype={ignored!r}, which is not read; states are {dtype} unless "
            "--mamba-ssm-dtype says otherwise."
        )
    return dtype, tuple(sentences)
