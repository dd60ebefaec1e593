"""Reads config.json: every value is checked when it is asked for, and a refusal names the key and what was there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twinpool.errors import ModelError


class ConfigReader:
    """Typed access to one JSON object. `path` is where it lies in the file ('text_config.'), for messages."""

    def __init__(self, values: Mapping[str, Any], *, path: str = "") -> None:
        self._values = values
        self._path = path

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(key) is not None

    def raw(self, key: str) -> Any:
        """The value as it is; None when it is absent."""
        return self._values.get(key)

    def _wrong(self, key: str, rule: str) -> ModelError:
        if key not in self._values:
            return ModelError(f"config.json has no '{self._path}{key}': it {rule}.")
        shown = repr(self._values[key])
        return ModelError(f"config.json: {self._path}{key}={shown[:80]}: it {rule}.")

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; `default` when absent or null. Raises ModelError."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, "must be a whole number of at least 1")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; `default` when absent or null. Raises ModelError."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self._wrong(key, "must be a string")
        return value

    def names(self, key: str, *, known: Sequence[str], length: int | None = None) -> tuple[str, ...]:
        """A list of strings out of `known`, `length` of them if given. Raises ModelError."""
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) and item in known for item in value):
            raise self._wrong(key, f"must be a list of {', '.join(known)}")
        if length is not None and len(value) != length:
            raise ModelError(
                f"config.json: {self._path}{key} names {len(value)} layers, but num_hidden_layers={length}: they must agree."
            )
        return tuple(value)

    def indices(self, key: str) -> frozenset[int]:
        """A list of whole numbers of at least 0. Raises ModelError."""
        value = self._values.get(key)
        good = isinstance(value, list) and all(
            isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
        )
        if not good or value is None:
            raise self._wrong(key, "must be a list of layer numbers")
        return frozenset(value)

    def section(self, key: str) -> ConfigReader:
        """A nested object. Raises ModelError."""
        value = self._values.get(key)
        if not isinstance(value, Mapping):
            raise self._wrong(key, "must be an object")
        return ConfigReader(value, path=f"{self._path}{key}.")
