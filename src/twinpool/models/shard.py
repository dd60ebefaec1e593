"""From a whole checkpoint to one rank's share of it: the config of the share, and slices of the weights by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from twinpool.errors import ModelError


@dataclass(frozen=True, slots=True)
class Share:
    """Rank `rank` of `ranks`, counted from 0."""

    rank: int
    ranks: int

    def of(self, units: int) -> tuple[int, int]:
        """(First, number) of the units that this rank holds: an equal part, or one that several ranks hold if there are fewer.

        Raises ModelError when neither divides the other (reference 1.7: KV heads are replicated rather than cut below one).
        """
        if units % self.ranks == 0:
            return self.rank * (units // self.ranks), units // self.ranks
        if self.ranks % units:
            raise ModelError(
                f"--tp-size {self.ranks} and the model's {units} heads or groups do not divide one another."
            )
        return self.rank // (self.ranks // units), 1


# Pieces that lie one after another in an axis: (units, elements of one), of the config of the whole model.
Pieces = Callable[[Any], tuple[tuple[int, int], ...]]
Cut = Callable[[torch.Tensor, Any, Share], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a family is shared by ranks.

    divided: config keys that are divided by the ranks, where the config has them; shared: keys of units that several ranks
    hold when there are fewer (KV heads); head_dim: of attention, for configs that would derive it from the divided heads.
    cuts: end of a name, as a regular expression -> the cut of that tensor; what no name matches is on every rank, whole.
    check: raises ModelError for a config that so many ranks cannot share; adjust: changes the share's config further,
    given the ranks; joint_norm: whether mixers have a norm that is over the columns of all ranks.
    narrowed: end of the names of tensors, as a regular expression, whose sizes no key of the config makes: they have those of
    their cuts.
    """

    divided: tuple[str, ...]
    shared: tuple[str, ...] = ("num_key_value_heads",)
    head_dim: Callable[[Any], int | None] = lambda config: None
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    check: Callable[[Any, Share], None] = lambda config, share: None
    adjust: Callable[[Any, int], None] = lambda part, ranks: None
    joint_norm: Callable[[Any], bool] = lambda config: False
    narrowed: str | None = None


def share_of_config(config: Any, sharding: Sharding, share: Share) -> Any:
    """The config of one rank's share, a copy. Raises ModelError for sizes that the ranks do not divide."""
    sharding.check(config, share)
    part = copy.deepcopy(config)
    head_dim = sharding.head_dim(config)
    if head_dim is not None:
        part.head_dim = head_dim
    for key in sharding.divided:
        size = getattr(config, key, None)
        if size is None:
            continue
        if size % share.ranks:
            raise ModelError(
                f"--tp-size {share.ranks} does not divide the model's {key}={size}; use a divisor of {size}."
            )
        setattr(part, key, size // share.ranks)
    for key in sharding.shared:
        setattr(part, key, share.of(getattr(config, key))[1])
    sharding.adjust(part, share.ranks)
    return part


def share_of_weights(tensors: dict[str, torch.Tensor], config: Any, sharding: Sharding, share: Share) -> None:
    """Replace every tensor by this rank's part of it. config: of the whole model. Raises ModelError as `cut` does."""
    cuts = [(re.compile(rf".*{pattern}"), run) for pattern, run in sharding.cuts.items()]
    for name, tensor in tensors.items():
        run = next((run for pattern, run in cuts if pattern.fullmatch(name)), None)
        if run is not None:
            tensors[name] = run(tensor, config, share)


def narrow(model: torch.nn.Module, tensors: dict[str, torch.Tensor], sharding: Sharding) -> None:
    """Have `model`, which has no weights yet, ask for the sizes that `narrowed` tensors were cut to."""
    if sharding.narrowed is None:
        return
    pattern = re.compile(rf".*{sharding.narrowed}")
    for name in (name for name in tensors if pattern.fullmatch(name)):
        path, _, leaf = name.rpartition(".")
        dtype = model.get_parameter(name).dtype
        asked = torch.nn.Parameter(torch.empty(tensors[name].shape, dtype=dtype, device="meta"), requires_grad=False)
        setattr(model.get_submodule(path), leaf, asked)


def cut(axis: int, pieces: Pieces | None = None) -> Cut:
    """The cut of an axis in equal parts, or of each of its pieces on its own.

    Raises ModelError when the tensor has not the size that the pieces make, or the ranks do not divide it.
    """

    def run(tensor: torch.Tensor, config: Any, share: Share) -> torch.Tensor:
        size = tensor.shape[axis]
        listed = ((size, 1),) if pieces is None else pieces(config)
        whole = sum(units * width for units, width in listed)
        if whole != size:
            raise ModelError(
                f"a tensor of {list(tensor.shape)} in the weights is cut as one of {whole} by config.json."
            )
        parts, at = [], 0
        for units, width in listed:
            first, n = share.of(units)
            parts.append(tensor.narrow(axis, at + first * width, n * width))
            at += units * width
        # A copy of its own, so that the whole tensor can go.
        return torch.cat(parts, axis) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)

    return run


def on_first(tensor: torch.Tensor, config: Any, share: Share) -> torch.Tensor:
    """A bias of what all ranks sum: it is added by rank 0 alone."""
    del config
    return tensor if share.rank == 0 else torch.zeros_like(tensor)


ROWS, COLUMNS = cut(0), cut(-1)
# Gate and up of each expert, one after the other.
EXPERTS_GATE_UP = cut(1, lambda config: ((config.moe_intermediate_size, 1),) * 2)


def kv_rows(config: Any) -> tuple[tuple[int, int], ...]:
    """Keys or values: the head of each is held by every rank whose queries use it."""
    heads, queries = config.num_key_value_heads, config.num_attention_heads
    return ((heads, getattr(config, "head_dim", None) or config.hidden_size // queries),)


ATTENTION: dict[str, Cut] = {
    r"\.q_proj\.(weight|bias)": ROWS,
    r"\.[kv]_proj\.(weight|bias)": cut(0, kv_rows),
    r"\.o_proj\.weight": COLUMNS,
    r"\.o_proj\.bias": on_first,
}
"""Cuts of the usual attention: queries (with their gates) by head, keys and values by head or replicated."""
