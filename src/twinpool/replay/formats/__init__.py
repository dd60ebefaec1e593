"""Trace formats, one file each: which one a file has, and reading it."""

from __future__ import annotations

import itertools
from pathlib import Path

from twinpool.errors import ConfigError
from twinpool.replay.files import Member, opened
from twinpool.replay.formats import agent, azure, bailian, mooncake, request_log
from twinpool.replay.formats.format import Format
from twinpool.replay.formats.records import Rejects
from twinpool.replay.trace import Trace

FORMATS: tuple[Format, ...] = (agent.FORMAT, bailian.FORMAT, mooncake.FORMAT, azure.FORMAT, request_log.FORMAT)


def load_trace(path: str, *, format: str | None = None, strict: bool = False) -> Trace:
    """Read a trace file, compressed or not, an archive of them, or standard input ("-").

    format: a name out of FORMATS; None: told from the first line. strict: the first record that cannot be used is an
    error; otherwise it is left out and listed in Trace.rejected.
    Raises ConfigError, naming file and line, if the file cannot be read, is of no known format or has no usable record.
    """
    rejects = Rejects(strict)
    name = "stdin" if path == "-" else Path(path).name
    with opened(path) as members:
        first = next(members, None)
        if first is None:
            raise ConfigError(f"{path} must hold a .json, .jsonl or .csv file, but the archive has none.")
        chosen = _named(format) if format is not None else _recognised(path, first)
        trace = chosen.read(name, itertools.chain([first], members), rejects)
    if trace.sessions:
        return trace
    why = "it has no request"
    if rejects.items:
        why = f"of {len(rejects.items)} rejected, the first is {rejects.items[0].where}: {rejects.items[0].reason}"
    raise ConfigError(f"{path} has no usable {chosen.name} record; {why}.")


def _named(name: str) -> Format:
    for known in FORMATS:
        if known.name == name:
            return known
    raise ConfigError(f"{name} is not a trace format; known are {', '.join(known.name for known in FORMATS)}.")


def _recognised(path: str, member: Member) -> Format:
    if not member.head:
        raise ConfigError(f"{path}: {member.name} is empty; a trace has at least one request.")
    for known in FORMATS:
        if known.recognises(member.head):
            return known
    names = ", ".join(known.name for known in FORMATS)
    raise ConfigError(f"{path}: {member.name}:1 starts like none of the trace formats ({names}); --format names one.")
