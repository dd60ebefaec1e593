"""Built-in model shapes: config.json keys of models people ask about, by name, so that planning needs no download."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

# The model that ships with twinpool.
DEMO_FOLDER = Path(__file__).resolve().parents[1] / "demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    """One row of builtin.toml.

    config: the keys of its config.json that are known here, enough for ModelSpec.from_config_json; params_b:
    parameters in billions as its name or publisher rounds them, None where neither says; source: where the shapes come
    from; note: what to know before leaning on them, or "".
    """

    name: str
    aliases: tuple[str, ...]
    config: dict[str, Any]
    params_b: float | None
    source: str
    note: str

    def known_as(self, name: str) -> str | None:
        """The row's name or alias that a name is, in any case, with or without an organisation before a slash; None if neither."""
        short = name.rsplit("/", 1)[-1].casefold()
        return next((known for known in (self.name, *self.aliases) if known.casefold() == short), None)


@cache
def builtin_models() -> tuple[BuiltinModel, ...]:
    """All rows in the order of the file."""
    text = resources.files("twinpool.models").joinpath("builtin.toml").read_text(encoding="utf-8")
    return tuple(_row(entry) for entry in tomllib.loads(text)["model"])


def find_builtin(name: str) -> BuiltinModel | None:
    """The row of that name or alias (BuiltinModel.known_as); None if unknown."""
    return next((row for row in builtin_models() if row.known_as(name)), None)


def _row(entry: dict[str, Any]) -> BuiltinModel:
    """A row of the file with its optional keys filled in."""
    return BuiltinModel(
        name=entry["name"],
        aliases=tuple(entry.get("aliases", ())),
        config=entry["config"],
        params_b=entry.get("params_b"),
        source=entry["source"],
        note=entry.get("note", ""),
    )
