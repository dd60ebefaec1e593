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
FP4_DTYPES = ("fp4_e2m1", "nvfp4")
_MOST_LAYERS, _MOST = 1 << 12, 1 << 48  # beyond any model; layers are made one by one
KV_DTYPES = ("float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "mxfp8", *FP4_DTYPES)


def item_bytes(dtype: str) -> int:
    """Bytes of one element. Raises ModelError on a name that is not in the table."""
    if dtype not in ITEM_BYTES:
        raise ModelError(f"dtype '{dtype}' is not one of {', '.join(ITEM_BYTES)}.")
    return ITEM_BYTES[dtype]


def packed_bytes(elements: int, kv_dtype: str) -> int:
    """Bytes of that many elements of a KV cache, scales included, rounded up to whole bytes (reference 1.7).

    mxfp8: a byte an element and one per 32; fp4: half a byte and one per 16. Raises ModelError on an unknown name.
    """
    if kv_dtype == "mxfp8":
        return elements + -(-elements // 32)
    if kv_dtype in FP4_DTYPES:
        return -(-elements // 2) + -(-elements // 16)
    if kv_dtype not in KV_DTYPES:
        raise ModelError(f"KV dtype '{kv_dtype}' is not one of {', '.join(KV_DTYPES)}.")
    return elements * item_bytes(kv_dtype)


@dataclass(frozen=True, slots=True)
class StateShapes:
    """Per slot and layer, on one rank: conv window [channels, kernel - 1] and temporal state; () for a missing part.

    second_conv: another window of another length, which only Zaya keeps.
    """

    conv: tuple[int, ...]
    temporal: tuple[int, ...]
    second_conv: tuple[int, ...] = ()

    @property
    def conv_elements(self) -> int:
        """Elements of the conv windows."""
        return sum(math.prod(window) for window in (self.conv, self.second_conv) if window)

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

    def kv_bytes_per_token(self, kv_dtype: str, tp: int, dcp: int = 1) -> int:
        """Bytes of K and V (or of the latent) of one token on one of `tp` ranks, `dcp` of which split tokens.

        Raises ModelError on a kv_dtype that is not in KV_DTYPES.
        """
        ...


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """A sliding-window layer: keys and values of the last window_tokens, a third kind of memory of fixed size."""

    heads: AttentionSpec
    window_tokens: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: what it keeps per token (attention), per sequence (linear, window), several, or nothing."""

    attention: AttentionSpec | None = None
    linear: LinearSpec | None = None
    window: WindowSpec | None = None


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
        """An int >= least, and no larger than a model can have. Raises ModelError naming key and value."""
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"config.json has no '{key}', which this architecture needs.")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ModelError(f"config.json says {key}={value!r}; it must be a whole number of at least {least}.")
        most = _MOST_LAYERS if key.endswith("_layers") else _MOST
        if value > most:
            raise ModelError(f"config.json says {key} is above {most:,}; it must be a number that a model can have.")
        return value

    def number(self, key: str) -> float:
        """A number above zero. Raises ModelError naming key and value."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelError(f"config.json says {key}={value!r}; it must be a number above 0.")
        return value

    def inner(self, key: str) -> ConfigReader:
        """The object under that key. Raises ModelError when it is not one."""
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            raise ModelError(f"config.json says {key}={value!r}; it must be an object.")
        return ConfigReader(value)

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

    def numbered_layers(
        self, key: str, *, named: LayerSpec, others: LayerSpec, first: int = 0
    ) -> tuple[LayerSpec, ...] | None:
        """`named` for layers whose numbers are listed, counted from `first`, `others` for the rest; None without the list.

        Raises ModelError.
        """
        listed = self.items(key)
        if listed is None:
            return None
        last = first + self.integer("num_hidden_layers") - 1
        for number in listed:
            if isinstance(number, bool) or not isinstance(number, int) or not first <= number <= last:
                raise ModelError(f"config.json names layer {number!r} in {key}; layers here are {first} to {last}.")
        chosen = frozenset(listed)
        return tuple(named if number in chosen else others for number in range(first, last + 1))
