"""What the scheduler asks of a disk tier: to look for a request's prefix when it arrives, and whether that is read by now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from twinpool.prefix.stored import StoredSegment
from twinpool.request import Int32Array


@dataclass(slots=True)
class Fetched:
    """What a waiting request has of the disk. start, end: tokens that came from there, memory could be resumed from `start` before that;
    expected_tokens: what memory could resume when it was last looked for, or more if more was read.
    """

    start: int = 0
    end: int = 0
    expected_tokens: int = 0
    n_looks: int = 0
    is_reading: bool = False


class Lost(NamedTuple):
    """A prefix (int32 tokens) that the disk was given and has not, or has no more; it has the first kept_tokens of it."""

    tokens: Int32Array
    kept_tokens: int


class Storage(Protocol):
    """Reads beside the engine. One thread calls it, the engine's."""

    def look(self, rid: int, tokens: Int32Array, *, in_memory_tokens: int, kv_tokens: int) -> None:
        """Begin to read what the disk has of a waiting request's prefix beyond what device and host can resume; of the first kv_tokens
        they have KV, so that only a state can be missing.
        """
        ...

    def poll(self, rid: int) -> Sequence[StoredSegment] | None:
        """What was read, in order; empty when there is nothing; None: wait for it. Answers once, then the request is forgotten."""
        ...

    def wanted(self, rid: int) -> int | None:
        """How far a request's prefix is being read (tokens); None: nothing is read for it, or not any more."""
        ...

    def lost(self) -> Sequence[Lost]:
        """What was found out to be missing since the last call."""
        ...

    def forget(self, rid: int) -> None:
        """The request has left the queue."""
        ...
