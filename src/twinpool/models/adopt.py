"""A transformers model with our layers inside.

The module tree, config and rotary frequencies are transformers'; layers are ours (families/ says how each is put together), and
take the step as an argument instead of cache, mask and position embeddings. So the loop over layers is ours as well: it adds
residuals inside the linear layers and makes no mask, which paged attention has no use for.

    model = load_model(folder, dtype="bfloat16", device="cpu")
    logits = model.forward(input_ids, step, memory, sample_at)
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from twinpool.errors import ModelError
from twinpool.models.attention.latent import LatentKernel, LatentShape
from twinpool.models.attention.ops import AttentionKernel
from twinpool.models.blocks import Linear
from twinpool.models.bound import BoundMemory, Step
from twinpool.models.config_file import read_config
from twinpool.models.families import (
    bamba,
    falcon,
    falcon_mamba,
    glm,
    granite,
    jamba,
    kimi,
    lfm2,
    ling,
    nemotron,
    olmo,
    qwen,
    zamba,
)
from twinpool.models.families.base import Decoder, Parts, Source, WithHead
from twinpool.models.group import Group
from twinpool.models.shard import Sharding, Share, narrow, share_of_config, share_of_weights
from twinpool.models.step_batch import MemoryViews, StepBatch
from twinpool.models.weights import assign_weights, read_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Every architecture that can be served.
SOURCES: dict[str, Source] = {
    **qwen.SOURCES,
    **granite.SOURCES,
    **lfm2.SOURCES,
    **kimi.SOURCES,
    **ling.SOURCES,
    **glm.SOURCES,
    **nemotron.SOURCES,
    **falcon.SOURCES,
    **bamba.SOURCES,
    **jamba.SOURCES,
    **olmo.SOURCES,
    **falcon_mamba.SOURCES,
    **zamba.SOURCES,
}
# Frequencies of the others, 'dynamic' and 'longrope', change with the length of the sequence, which a table made at boot cannot follow.
_ROPES = ("default", "linear", "yarn", "llama3", "proportional")
# What transformers' code raises of values in config.json that it did not check.
_OF_VALUES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
# A model is made under its dtype as torch's default, which is that of the whole process.
_LOADING = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Sharing:
    """A rank's share of a model: transformers' config of the whole and of the part."""

    sharding: Sharding
    share: Share
    whole: Any
    part: Any

    @staticmethod
    def of(sharding: Sharding, whole: Any, share: Share) -> _Sharing:
        """Raises ModelError for a model that cannot be shared so."""
        return _Sharing(sharding, share, whole, share_of_config(whole, sharding, share))

    @property
    def joint_norm(self) -> bool:
        """Whether gated norms are over the columns of all ranks."""
        return self.sharding.joint_norm(self.whole)


class AdoptedModel:
    """A model that runs packed steps over paged memory.

    weight_bytes: all weights in the form they are kept; vocab_size: columns of the logits.
    """

    def __init__(
        self, model: Any, decoder: Decoder, *, weight_bytes: int, device: torch.device, sharing: _Sharing | None = None
    ) -> None:
        self._embeddings: torch.Tensor = model.get_input_embeddings().weight
        self._layers = [layer.forward for layer in decoder.layers]
        self._norm = decoder.norm.forward
        self._head = model.lm_head.forward
        self._embed_scale, self._logit_scale = decoder.embed_scale, decoder.logit_scale
        self._device = device
        self._memory: BoundMemory | None = None
        self._sharing = sharing
        self.module = model
        self.weight_bytes = weight_bytes
        self.vocab_size = int(model.config.vocab_size)

    def join(self, group: Group) -> None:
        """Sum what this rank's share of every layer adds over all ranks; once, before the first step."""
        assert self._sharing is not None, "a share of a model"
        for layer in self.module.base_model.layers:
            layer.over_ranks(group.summed)
        if self._sharing.joint_norm:
            for mixer in (module for module in self.module.modules() if hasattr(module, "norm_over_ranks")):
                mixer.norm_over_ranks(group.rms)
        for mixer in (module for module in self.module.modules() if hasattr(module, "select_over_ranks")):
            mixer.select_over_ranks(group.total)
        self._sharing = None

    def check_pages(self, memory: MemoryViews) -> None:
        """Raise ModelError unless pages have the heads that the model writes: the planner reads config.json by itself."""
        for module in self.module.modules():
            kernel, layer = getattr(module, "kernel", None), getattr(module, "layer", None)
            if layer is None or not isinstance(kernel, AttentionKernel | LatentKernel):
                continue
            shape = kernel.shape
            own = (1, shape.width) if isinstance(shape, LatentShape) else (shape.kv_heads, shape.dim)
            heads, width = memory.kv[layer].keys.shape[2:]
            if (heads, width) != own:
                raise ModelError(
                    f"config.json gives attention {own[0]} key heads of {own[1]} in transformers' model, and pages {heads} of "
                    f"{width}; say num_key_value_heads and head_dim, and no other width of heads."
                )

    def forward(
        self, input_ids: torch.Tensor, step: StepBatch, memory: MemoryViews, sample_at: torch.Tensor
    ) -> torch.Tensor:
        """float32 [n, vocab_size], contiguous: logits of the packed tokens sample_at (int64 [n]).

        input_ids: int64 [T]. States, checkpoints and KV of all rows are written to memory. Call under torch.inference_mode().
        """
        assert self._sharing is None, "a share of a model sums over its ranks"
        bound = self._memory
        if bound is None or bound.source is not memory:
            bound = self._memory = BoundMemory.of(memory)
        ready = Step.of(step, bound, device=self._device)
        hidden = F.embedding(input_ids, self._embeddings)
        if self._embed_scale != 1.0:
            hidden = hidden * self._embed_scale
        for layer in self._layers:
            hidden = layer(hidden, ready)
        if len(sample_at) == 0:
            return torch.empty((0, self.vocab_size), device=self._device)
        logits: torch.Tensor = self._head(self._norm(hidden[sample_at]), wide=True)
        return logits if self._logit_scale == 1.0 else logits * self._logit_scale


def load_model(
    folder: Path, *, dtype: str, device: str = "cpu", context_len: int | None = None, share: Share | None = None
) -> AdoptedModel:
    """The text part of a checkpoint folder with our layers, weights in `dtype` (a name) on `device`.

    context_len: positions the rotary table covers, max_position_embeddings by default. share: only that rank's share of the
    weights, a model that has to `join` the others. From any thread; threads load one after another. Raises ModelError if the
    architecture is not adopted or cannot be shared, or weights are missing, unknown, unreadable or of another shape than
    config.json says.
    """
    with _LOADING:
        return _load(folder, dtype=dtype, device=device, context_len=context_len, share=share)


def _load(folder: Path, *, dtype: str, device: str, context_len: int | None, share: Share | None) -> AdoptedModel:
    from transformers.modeling_utils import local_torch_dtype

    config_json = read_config(folder)
    source = _source_of(config_json)
    modeling, configuration = (
        importlib.import_module(f"transformers.models.{source.module}.{kind}_{source.module}")
        for kind in ("modeling", "configuration")
    )
    config = _text_config(getattr(configuration, source.config), config_json, folder)
    _check_activation(config, source)
    source.check(config)
    sharing = None
    if share is not None:
        sharing = _Sharing.of(source.sharding, config, share)
        config = sharing.part
    # Parameters that transformers declares or keeps as float32 are so here: routers, decays.
    try:
        with torch.device("meta"), local_torch_dtype(DTYPES[dtype]):
            model = getattr(modeling, source.model)(config)
            model = model if hasattr(model, "lm_head") else WithHead(model)
    except _OF_VALUES as error:
        raise ModelError(f"{folder / 'config.json'} makes no {source.model}: {_one_line(error)}.") from error
    wide = model.base_model._get_dtype_plan(DTYPES[dtype])
    ignored = (*source.ignored, *_draft_layers(config))
    tensors = read_weights(folder, ignored=ignored, renamed=source.renamed, joined=source.joined)
    if sharing is not None:
        share_of_weights(tensors, sharing.whole, sharing.sharding, sharing.share)
        narrow(model, tensors, sharing.sharding)
    assign_weights(model, tensors, wide=wide, folder=folder)
    place = torch.device(device)
    with torch.inference_mode():
        model.to(place) if place.type != "cpu" else None
        positions = context_len or int(getattr(config, "max_position_embeddings", 0))
        rotary = None if source.rotary is None else getattr(model.base_model, source.rotary, None)
        table = torch.empty(positions, 0) if rotary is None else _rotary_table(type(rotary)(config), positions)
        decoder = source.build(Parts(model=model, table=table.to(place)))
        weight_bytes = _take_over(model, decoder) + table.numel() * table.element_size()
    return AdoptedModel(model.eval(), decoder, weight_bytes=weight_bytes, device=place, sharing=sharing)


def _source_of(config: Mapping[str, Any]) -> Source:
    names = config.get("architectures") or ["none"]
    if names[0] not in SOURCES:
        raise ModelError(f"architecture '{names[0]}' cannot be run here yet; these can: {', '.join(SOURCES)}.")
    return SOURCES[names[0]]


def _text_config(config_class: Any, config_json: Mapping[str, Any], folder: Path) -> Any:
    """transformers' config object of the text part; refuses what our layers do not do."""
    text = dict(config_json.get("text_config", config_json))
    if "text_config" in config_json:
        # The outer value counts, in LFM2-VL under its first name.
        said = [config_json[key] for key in ("tie_word_embeddings", "tie_embedding") if key in config_json]
        text |= {"tie_word_embeddings": said[0]} if said else {}
    try:
        config = config_class(**json.loads(json.dumps(text), object_hook=_plain_float))
        for field in fields(config):  # what came under another name of a key has not been checked yet
            setattr(config, field.name, getattr(config, field.name))
    except (*_OF_VALUES, StrictDataclassError) as error:
        raise ModelError(f"{folder / 'config.json'} is not a {config_class.__name__}: {_one_line(error)}.") from error
    _check_nulls(config)
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type not in _ROPES:
        raise ModelError(
            f"config.json says rope_type={rope_type!r}, which does not run here; use one of {', '.join(_ROPES)}."
        )
    return config


def _one_line(error: Exception) -> str:
    said = f"no {error}" if isinstance(error, KeyError) else str(error).split("\nException raised from")[0]
    return " ".join(said.split()).rstrip(".")


def _check_nulls(config: Any) -> None:
    """Some keys may be null by their type, and then nothing can be made of them. Tokens may be missing."""
    for field in fields(config):
        needed = field.default not in (None, MISSING) and not field.name.endswith("_token_id")
        if needed and getattr(config, field.name) is None:
            raise ModelError(f"config.json says {field.name}=null; it must have a value, such as {field.default}.")


def _check_activation(config: Any, source: Source) -> None:
    said = getattr(config, "hidden_act", source.activation)
    if said != source.activation:
        raise ModelError(f"config.json says hidden_act='{said}'; only '{source.activation}' runs here.")


def _draft_layers(config: Any) -> list[str]:
    """Prefixes of the names of draft layers that are numbered after the model's own."""
    drafts: int = getattr(config, "num_nextn_predict_layers", None) or 0
    numbers = range(config.num_hidden_layers, config.num_hidden_layers + drafts)
    return [f"{stem}.layers.{number}." for stem in ("model", "model.language_model") for number in numbers]


def _plain_float(value: dict[str, Any]) -> Any:
    """transformers writes an infinity as {"__float__": "Infinity"}."""
    return float(value["__float__"]) if set(value) == {"__float__"} else value


def _rotary_table(rotary: Any, positions: int) -> torch.Tensor:
    """float32 [positions, rotary dims]: cos of each frequency, then sin, from transformers' own module.

    It returns every frequency twice, side by side, and for text all three position axes are the same.
    """
    cos, sin = rotary(torch.empty(0), torch.arange(positions)[None])
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], -1).contiguous()


def _take_over(model: Any, decoder: Decoder) -> int:
    """Leave of `model` its embeddings and our parts; returns the bytes of all weights as they are kept now."""
    base, embeddings = model.base_model, model.get_input_embeddings()
    for name in [name for name, child in base.named_children() if child is not embeddings]:
        delattr(base, name)
    base.layers, base.norm = nn.ModuleList(decoder.layers), decoder.norm
    model.lm_head = Linear([model.lm_head.weight])
    packed = sum(module.size_bytes for module in model.modules() if isinstance(module, Linear))
    return int(packed + embeddings.weight.numel() * embeddings.weight.element_size())
