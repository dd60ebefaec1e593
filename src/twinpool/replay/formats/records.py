"""Strict reading of trace records: fields by type and range, the rule for hash lists, and the list of rejects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from twinpool.errors import ConfigError
from twinpool.replay.files import Member
from twinpool.replay.trace import Blocks, Rejection
from twinpool.units import ceil_div

Tail = Literal["none", "partial", "either"]
_LARGEST = (1 << 63) - 1
_LONGEST_TOKENS = 100_000_000  # far beyond any context; one absurd length must not cost the memory of the whole run
_LATEST_S = 1e15  # far beyond any clock, in seconds or milliseconds, and exact in a float


class Unusable(ValueError):
    """This record cannot be used; the text is the reason. Readers turn it into a Rejection."""


@dataclass(slots=True)
class Rejects:
    """Records left out so far. strict: the first one is an error instead."""

    strict: bool = False
    items: list[Rejection] = field(default_factory=list)

    def add(self, where: str, reason: object) -> None:
        """Note one record. Raises ConfigError if strict."""
        if self.strict:
            raise ConfigError(f"{where}: {reason}.")
        self.items.append(Rejection(where, str(reason)))


def json_lines(members: Iterable[Member], rejects: Rejects) -> Iterator[tuple[Member, int, dict[str, Any]]]:
    """(file, line number, object) of every line of JSONL files; a line that is no JSON object is rejected."""
    for member in members:
        for line, text in member.lines():
            try:
                yield member, line, as_object(json.loads(text), "the line")
            except (ValueError, RecursionError) as error:
                rejects.add(f"{member.name}:{line}", _not_json(error))


def _not_json(error: Exception) -> str:
    return str(error) if isinstance(error, Unusable) else f"not JSON ({error})"


def as_object(value: object, what: str) -> dict[str, Any]:
    """A JSON object. Raises Unusable."""
    if not isinstance(value, dict):
        raise Unusable(f"{what} must be an object, got {_shown(value)}")
    return value


def integer(record: Mapping[str, Any], key: str, *, at_least: int = 0, at_most: int = _LARGEST) -> int:
    """An integer field within limits. Raises Unusable."""
    value = _present(record, key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Unusable(f"{key} must be an integer, got {_shown(value)}")
    if not at_least <= value <= at_most:
        raise Unusable(f"{key} must be {at_least} to {at_most}, got {_shown(value)}")
    return value


def length(record: Mapping[str, Any], key: str, *, at_least: int = 0) -> int:
    """The length of a prompt, an answer or a block, in tokens. Raises Unusable."""
    return integer(record, key, at_least=at_least, at_most=_LONGEST_TOKENS)


def seconds(record: Mapping[str, Any], key: str) -> float:
    """A time or duration field: a finite number that is not negative. Raises Unusable."""
    value = _present(record, key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unusable(f"{key} must be a number, got {_shown(value)}")
    if not 0 <= value <= _LATEST_S:
        raise Unusable(f"{key} must be a time from 0 to {_LATEST_S:g}, got {_shown(value)}")
    return float(value)


def optional_seconds(record: Mapping[str, Any], key: str) -> float | None:
    """As `seconds`, or None if the field is missing or null. Raises Unusable."""
    return None if record.get(key) is None else seconds(record, key)


def text(record: Mapping[str, Any], key: str) -> str:
    """A text field that is not empty. Raises Unusable."""
    value = _present(record, key)
    if not isinstance(value, str) or not value:
        raise Unusable(f"{key} must be a text, got {_shown(value)}")
    return value


def items(record: Mapping[str, Any], key: str) -> list[Any]:
    """A list field. Raises Unusable."""
    value = _present(record, key)
    if not isinstance(value, list):
        raise Unusable(f"{key} must be a list, got {_shown(value)}")
    return value


def block_ids(record: Mapping[str, Any], key: str, *, input_tokens: int, block_size: int, tail: Tail) -> Blocks:
    """The block ids of a prompt, read-only. Raises Unusable for ids that are no integers from 0 and for a wrong count.

    tail: what becomes of the tokens after the last full block. "none": no id; "partial": one more id; "either": both
    are accepted.
    """
    ids = items(record, key)
    # numpy would take 1.5, true and "1" for integers without a word.
    wrong = set(map(type, ids)) - {int}
    if wrong:
        raise Unusable(f"{key} must hold integers, got {' and '.join(sorted(kind.__name__ for kind in wrong))}")
    fewest = ceil_div(input_tokens, block_size) if tail == "partial" else input_tokens // block_size
    most = input_tokens // block_size if tail == "none" else ceil_div(input_tokens, block_size)
    if not fewest <= len(ids) <= most:
        wanted = str(most) if fewest == most else f"{fewest} or {most}"
        raise Unusable(
            f"{key} has {len(ids)} ids, but {input_tokens} input tokens in blocks of {block_size} take {wanted}"
        )
    try:
        blocks = np.array(ids, dtype=np.int64)
    except OverflowError:
        raise Unusable(f"{key} must hold ids of at most {_LARGEST}") from None
    if len(ids) and blocks.min() < 0:
        raise Unusable(f"{key} must hold ids from 0, got {blocks.min()}")
    blocks.flags.writeable = False
    return blocks


def _present(record: Mapping[str, Any], key: str) -> object:
    if key not in record:
        raise Unusable(f"{key} is missing")
    return record[key]


def _shown(value: object) -> str:
    """A value as JSON, cut to a few words."""
    shown = json.dumps(value, default=str)
    return shown if len(shown) <= 40 else shown[:37] + "..."
