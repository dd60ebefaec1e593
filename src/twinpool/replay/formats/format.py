"""What a trace format is: its name, how its first line looks, and its reader."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from twinpool.replay.files import Member
from twinpool.replay.formats.records import Rejects
from twinpool.replay.trace import Trace

_KEY = re.compile(rb'"(\w+)"\s*:')


@dataclass(frozen=True, slots=True)
class Format:
    """name: the word of --format. about: what it is, for people.

    recognises: whether a file with this first line has the format. read: (name of the trace, its files, where rejects
    go) to a Trace; raises ConfigError only for what --strict forbids.
    """

    name: str
    about: str
    recognises: Callable[[bytes], bool]
    read: Callable[[str, Iterable[Member], Rejects], Trace]


def keys_of(line: bytes) -> set[str]:
    """The words that stand as keys in a line of JSON, even in one that is cut short."""
    return {key.decode() for key in _KEY.findall(line)}
