"""Finished points of a sweep on disk: one JSON line each, under a hash of everything that the numbers depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import TextIO

from twinpool.errors import ConfigError
from twinpool.replay.cost import Calibration
from twinpool.replay.disk_link import USUAL, DiskLink
from twinpool.replay.sweep import Measured, Point
from twinpool.replay.trace import Trace

LINE_SCHEMA = "twinpool-replay-sweep-point/1"
_HEAD = f'{{"schema": "{LINE_SCHEMA}"'


def fingerprint(trace: Trace) -> str:
    """A hash of what requests the trace has (hex), whatever its file is called or compressed with."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((trace.format, trace.block_size, trace.scope, trace.clock)).encode())
    for session in trace.sessions:
        digest.update(repr((session.id, session.namespace, session.parent, len(session.requests))).encode())
        for one in session.requests:
            numbers = (one.arrival_s, one.think_s, one.input_tokens, one.output_tokens, one.api_time_s, len(one.blocks))
            digest.update(repr(numbers).encode())
            digest.update(one.blocks.tobytes())
    return digest.hexdigest()


def point_key(point: Point, *, trace: str, calibration: Calibration, disk: DiskLink = USUAL) -> str:
    """The hash (hex) that a point's line is found by. trace: its fingerprint; disk: how fast one is. What is only shown is in it too:
    a key that is too narrow would give wrong numbers, one that is too wide a run too many.
    """
    parts = (LINE_SCHEMA, metadata.version("twinpool"), trace, point.sizing, point.traffic, calibration, disk)
    return hashlib.blake2b(repr(_plain(parts)).encode(), digest_size=16).hexdigest()


def _plain(value: object) -> object:
    """The value in parts whose repr is the same in every process: sets and mappings in order, dataclasses with their names."""
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, *((field.name, _plain(getattr(value, field.name))) for field in fields(value)))
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), repr(_plain(part))) for key, part in value.items()))
    if isinstance(value, set | frozenset):
        return tuple(sorted(repr(_plain(part)) for part in value))
    if isinstance(value, tuple | list):
        return tuple(_plain(part) for part in value)
    return value


@dataclass(frozen=True, slots=True)
class Stored:
    """measured: by key. torn: lines that could not be read, as a run that was killed leaves one."""

    measured: Mapping[str, Measured]
    torn: int = 0


def read_finished(path: Path) -> Stored:
    """What earlier runs left in the file; nothing where there is none. Raises ConfigError for a file of something else."""
    if not path.exists():
        return Stored({})
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be read: {error.strerror or error}.") from error
    if lines and not (lines[0].startswith(_HEAD) or _HEAD.startswith(lines[0])):
        raise ConfigError(f"--out {path} holds something else than results of a sweep; name another file.")
    found: dict[str, Measured] = {}
    torn = 0
    for line in lines:
        try:
            entry = json.loads(line)
            found[entry["key"]] = _measured(entry["measured"])
        except (ValueError, KeyError, TypeError):
            torn += bool(line.strip())
    return Stored(found, torn)


def _measured(values: dict[str, object]) -> Measured:
    gaps = values["gaps"]
    if not isinstance(gaps, dict):
        raise TypeError("gaps must be an object")
    return Measured(**{**values, "gaps": tuple(gaps.items())})  # type: ignore[arg-type]


def measured_object(measured: Measured) -> dict[str, object]:
    """As it stands in lines and in the document: fields by name, gaps by reason."""
    return {**asdict(measured), "gaps": dict(measured.gaps)}


def open_for_more(path: Path) -> TextIO:
    """The file, to append to; a torn last line is ended first. Raises ConfigError if it cannot be written."""
    try:
        file = path.open("a+")
        file.seek(0)
        if (before := file.read()) and not before.endswith("\n"):
            file.write("\n")
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--out {path} is no text: {error}.") from error
    return file


def append(file: TextIO, key: str, point: Point, measured: Measured) -> None:
    """One line, on disk before this returns."""
    entry = {
        "schema": LINE_SCHEMA, "key": key, "values": dict(point.values), "measured": measured_object(measured),
    }  # fmt: skip
    file.write(json.dumps(entry, allow_nan=False) + "\n")
    file.flush()
