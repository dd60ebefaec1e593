"""What one layer keeps (shapes, element counts, bytes), and strict reading of config.json values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from twinpool.errors import ModelError

ITEM_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1,
}  # fmt: skip


def item_bytes(dtype: str) -> int:
    """Bytes of one element. Raises ModelError on a name that is not in the table."""
    if dtype not in ITEM_BYTES:
        raise ModelError(f"dtype '{dtype}' is not one of {', '.join(ITEM_BYTES)}.")
    return ITEM_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class StateShapes:
    """Per slot and layer, on one rank: conv window [channels, kernel - 1] and temporal state; () for a missing part."""

    conv: tuple[int, ...]
    temporal: tuple[int, ...]

    @property
    def conv_elements(self) -> int:
        """Elements of the conv window."""
        return math.prod(self.conv) if self.conv else 0

    @property
    def temporal_elements(self) -> int:
        """Elements of the temporal state."""
        return math.prod(self.temporal) if self.temporal else 0


class LinearSpec(Protocol):
    """A linear-attention layer: fixed memory per sequence."""

    def states(self, tp: int) -> StateShapes:
        """Shapes on one of `tp` ranks. Raises ModelError when heads do not divide."""
        ...


class AttentionSpec(Protocol):
    """A full-attention layer: memory per token."""

    def kv_elements_per_token(self, tp: int, dcp: int = 1) -> int:
        """Elements of K and V (or of the latent) for one token on one of `tp` ranks, `dcp` of which split tokens."""
        ...


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: what it keeps per token (attention), per sequence (linear), both, or nothing."""

    attention: AttentionSpec | None = None
    linear: LinearSpec | None = None


def shard(count: int, tp: int, *, what: str) -> int:
    """count / tp; raises ModelError when that is not whole."""
    if count % tp:
        raise ModelError(f"--tp-size {tp} does not divide the model's {count} {what}; use a divisor of {count}.")
    return count // tp


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """A config.json dictionary whose values are checked when they are read."""

    values: Mapping[str, Any]

    def integer(self, key: str, *, default: int | None = None, least: int = 1) -> int:
        """An int >= least. Raises ModelError naming key and value."""
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"config.json has no '{key}', which this architecture needs.")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ModelError(f"config.json says {key}={value!r}; it must be a whole number of at least {least}.")
        return value

    def text(self, key: str, *, default: str) -> str:
        """A string. Raises ModelError naming key and value."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ModelError(f"config.json says {key}={value!r}; it must be a string.")
        return value

    def items(self, key: str) -> list[Any] | None:
        """A list, or None when the key is absent. Raises ModelError naming key and value."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, list):
            raise ModelError(f"config.json says {key}={value!r}; it must be a list.")
        return value

    def layers(self, key: str, kinds: Mapping[str, LayerSpec]) -> tuple[LayerSpec, ...] | None:
        """Layers by a list of their kinds, num_hidden_layers long if that is given; None without the list.

        Raises ModelError.
        """
        listed = self.items(key)
        if listed is None:
            return None
        n_layers = self.integer("num_hidden_layers", default=len(listed))
        if len(listed) != n_layers:
            raise ModelError(f"config.json lists {len(listed)} {key} for num_hidden_layers={n_layers}.")
        unknown = sorted({str(kind) for kind in listed} - kinds.keys())
        if unknown:
            raise ModelError(f"config.json lists layer type '{unknown[0]}' in {key}; known here: {', '.join(kinds)}.")
        return tuple(kinds[kind] for kind in listed)

    def layer_numbers(self, key: str, *, first: int) -> frozenset[int] | None:
        """Layers named by number, counted from `first`; None when the key is absent. Raises ModelError."""
        listed = self.items(key)
        if listed is None:
            return None
        last = first + self.integer("num_hidden_layers") - 1
        for number in listed:
            if isinstance(number, bool) or not isinstance(number, int) or not first <= number <= last:
                raise ModelError(f"config.json names layer {number!r} in {key}; layers here are {first} to {last}.")
        return frozenset(listed)
