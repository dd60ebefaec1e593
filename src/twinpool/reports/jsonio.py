"""JSON of values: dataclasses, tuples and numpy numbers, in their own order, so that equal results are equal files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import numpy as np


def json_text(value: object) -> str:
    """Indented JSON: a dataclass is an object with its fields in order, tuples and numpy arrays are lists.

    Raises ValueError for NaN or infinity, which JSON cannot say, and TypeError for anything else without one reading:
    a set (no order), bytes, a key that is not a string.
    """
    return json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False)


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {_key(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value


def _key(key: object) -> str:
    if isinstance(key, str):
        return key
    raise TypeError(f"a key of a JSON object is a string, not {key!r}")
