"""One module of a model as its weights see it, and what modules are counted from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinpool.models.shapes import ConfigReader
from twinpool.models.spec import TEXT_KEYS, ModelSpec

ANY_RANKS = 1 << 30  # of a module that any number of ranks can share


@dataclass(frozen=True, slots=True)
class Part:
    """A module: name as in a checkpoint, elements, ranks that can share it, whether quantisers take it."""

    name: str
    params: int
    ways: int = ANY_RANKS
    matrix: bool = True


@dataclass(frozen=True, slots=True)
class Source:
    """The config of a language model and the layers that were read from it."""

    reader: ConfigReader
    spec: ModelSpec

    @property
    def hidden(self) -> int:
        """Width of the residual stream, in elements."""
        return self.spec.hidden_size

    @property
    def nemotron(self) -> bool:
        """Whether every layer is one mixer without a feed-forward block beside it (Nemotron-H)."""
        return self.spec.architecture.startswith("NemotronH")

    def first(self, *keys: str, default: int = 0) -> int:
        """The first of these keys that the config has, else the default. Raises ModelError when it is no whole number."""
        return next((self.reader.integer(key, least=0) for key in keys if self.has(key)), default)

    def has(self, key: str) -> bool:
        """Whether the config gives this key a value."""
        return self.reader.values.get(key) is not None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The nested config of the language model where there is one, else the config itself."""
    nested = next((config[key] for key in TEXT_KEYS if key in config), None)
    return nested if isinstance(nested, Mapping) else config
