"""What one layer keeps: the arithmetic of element counts and bytes, and strict reading of config.json values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from twinpool.errors import ModelError

ITEM_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1,
}  # fmt: skip


def item_bytes(dtype: str) -> int:
    """Bytes of one element. Raises ModelError on a name that is not in the table."""
    if dtype not in ITEM_BYTES:
        raise ModelError(f"dtype '{dtype}' is not one of {', '.join(ITEM_BYTES)}.")
    return ITEM_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class StateShapes:
    """Per slot and layer, on one rank: conv window [channels, kernel - 1] and temporal state; () for a part that is not there."""

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

    def kv_elements_per_token(self, tp: int) -> int:
        """Elements of K and V (or of the latent) for one token on one of `tp` ranks."""
        ...


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
