"""Flags and values of the reference that twinpool knows and does not honour (refused.toml): a sentence for each."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class Refusals:
    """flags: flag to reason; values: (honoured flag, value) to reason. Reasons end without a stop."""

    flags: dict[str, str]
    values: dict[tuple[str, str], str]


@functools.cache
def refusals() -> Refusals:
    """The table of refused.toml."""
    table = tomllib.loads(resources.files("twinpool.config").joinpath("refused.toml").read_text())
    return Refusals(
        flags={name: row["why"] for row in table["flags"] for name in row["names"]},
        values={(row["flag"], name): row["why"] for row in table["values"] for name in row["names"]},
    )


def refusal_of_flag(name: str) -> str | None:
    """The sentence that refuses a known flag of the reference, or None when the name is not one."""
    why = refusals().flags.get(name)
    return None if why is None else f"{name} is not supported: {why}."


def refusal_of_value(name: str, value: str) -> str | None:
    """The sentence that refuses a known value of an honoured flag, or None when it is not one."""
    why = refusals().values.get((name, value))
    return None if why is None else f"{name} {value} is not supported: {why}."
