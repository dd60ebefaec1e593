"""What a family file hands over: where transformers has the model, what its weights are called, and how it is rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import nn

from twinpool.errors import ModelError
from twinpool.models.shard import Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A model in our parts.

    layers: modules `layer(hidden, step) -> hidden`, which may change hidden [T, hidden_size] in place; norm: before the head;
    embed_scale, logit_scale: factors on the embeddings and on the logits.
    """

    layers: tuple[nn.Module, ...]
    norm: nn.Module
    embed_scale: float = 1.0
    logit_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a family's build gets: transformers' model with its weights in place, and what layers of one kind share.

    table: float32 [positions, rotary], cos then sin; [positions, 0] where nothing is rotated. attention, linear: numbers of
    the next attention and linear layer, each kind counted through the model as the pools are.
    """

    model: Any
    table: torch.Tensor
    attention: Iterator[int] = field(default_factory=count)
    linear: Iterator[int] = field(default_factory=count)

    @property
    def base(self) -> Any:
        """The model below its head: embeddings, layers, last norm."""
        return self.model.base_model

    @property
    def config(self) -> Any:
        """transformers' config of the text part."""
        return self.model.config


class WithHead(nn.Module):
    """A transformers model that has no head of its own (the text part of a larger one), and a head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        tied = self.config.tie_word_embeddings
        self.all_tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}

    @property
    def base_model(self) -> Any:
        """The model below its head."""
        return self.model

    def get_input_embeddings(self) -> Any:
        """Its table of embeddings."""
        return self.model.get_input_embeddings()


def only_text(model_type: str) -> Callable[[Any], None]:
    """A check of models that may be built around any text model: raises ModelError for another than this."""

    def check(config: Any) -> None:
        if config.model_type != model_type:
            raise ModelError(
                f"config.json says model_type='{config.model_type}' of the text; only '{model_type}' runs here."
            )

    return check


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One architecture: its classes in transformers, the names of its weights, and its rebuilding.

    module: below transformers.models; config, model: classes of its configuration and modeling files, the model's with a head or
    without. ignored: prefixes of other modalities and draft layers; renamed: regular expression in a name of the checkpoint -> its
    replacement, applied in order; joined: end of a name -> ends of the names (after renaming) of the tensors that make it, one after
    another.
    check: raises ModelError for a config that our layers do not do; activation: the only hidden_act they do. sharding: how ranks
    share it. rotary: where the model below its head keeps its rotary module (which may be None or missing),
    None for models that have no such place.
    """

    module: str
    config: str
    model: str
    build: Callable[[Parts], Decoder]
    sharding: Sharding
    ignored: tuple[str, ...] = ("mtp.",)
    renamed: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    check: Callable[[Any], None] = lambda config: None
    activation: str = "silu"
    rotary: str | None = "rotary_emb"
