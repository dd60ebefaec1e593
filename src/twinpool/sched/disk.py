"""The disk tier's rules: what is worth reading for a request that waits, how long it waits for it, and what the disk is known to lack.

Served and simulated alike: only who writes, who reads and how long that takes differs (engine/disk.py, replay/disk.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from twinpool.clock import Clock
from twinpool.prefix.stored import StoredSegment
from twinpool.request import Int32Array
from twinpool.sched.storage import Lost
from twinpool.step import StoreCopy
from twinpool.storage.format import Segment
from twinpool.storage.keys import PrefixKeys, SegmentInfo
from twinpool.storage.shelf import Shelf
from twinpool.units import GIB

MAX_PENDING_BYTES = GIB  # of what waits to be written
MAX_FETCHED_BYTES = GIB  # of what was read and waits for its requests
PREFETCH_THRESHOLD_TOKENS = 256  # reference 5.5
_WAIT_BASE_S, _WAIT_PER_1024_TOKENS_S = 1.0, 0.25  # reference 5.5


class Writer(Protocol):
    """Writes segments one after another, while the engine goes on."""

    def offer(self, segment: Segment, *, refused: Callable[[], None]) -> bool:
        """Take a segment for writing; False: too much waits. refused: called when the store did not write what was taken."""
        ...


class Fetch(Protocol):
    """A chain being read. What was read is at every moment a prefix of the chain, and as such can be restored."""

    def poll(self) -> Sequence[Segment] | None:
        """The segments that could be read, root first, up to the first miss; None while it is still reading."""
        ...

    def wait(self, timeout_s: float) -> Sequence[Segment]:
        """Wait at most so long; returns what was read by then, and reads no more."""
        ...

    def cancel(self) -> None:
        """Read no more and let go of what was read."""
        ...


class Prefetcher(Protocol):
    """Reads chains while the engine goes on."""

    def start(self, infos: Sequence[SegmentInfo]) -> Fetch:
        """Begin to read a chain, or its end."""
        ...


@dataclass(slots=True)
class _Waiting:
    """A request's chain being read, without the segments whose KV is in memory (but the last, whose state is not). end: of it, tokens;
    wait_s: how long the request waits for it once it could start; until_s: when that is over.
    """

    fetch: Fetch
    end: int
    wait_s: float
    until_s: float = math.inf


class StorageTier:
    """sched.storage.Storage over a store, and the sink of StoreCopy orders.

    policy: a --hicache-storage-prefetch-policy; threshold_tokens: less than that is not worth reading. fetched_tokens: KV tokens
    read for requests; late_requests: those that went on before all of it was read.
    """

    def __init__(
        self, *, store: Shelf, writer: Writer, prefetcher: Prefetcher, clock: Clock, policy: str,
        threshold_tokens: int = PREFETCH_THRESHOLD_TOKENS,
    ) -> None:  # fmt: skip
        self.threshold_tokens = threshold_tokens
        self.fetched_tokens = self.late_requests = 0
        self._store, self._writer, self._prefetcher = store, writer, prefetcher
        self._clock, self._policy = clock, policy
        self._waiting: dict[int, _Waiting] = {}
        self._lost: deque[Lost] = deque()  # filled by other threads

    def put(self, order: StoreCopy, kv: memoryview, state: memoryview) -> None:
        """Queue a segment for writing (executor thread)."""
        hashes = self._store.hashes(order.tokens)
        segment = Segment(hashes.info(order.start, order.end), kv, state)
        if not self._writer.offer(segment, refused=lambda: self._refused(order.tokens, hashes)):
            self._lost.append(Lost(order.tokens, order.start))

    def _refused(self, tokens: Int32Array, hashes: PrefixKeys) -> None:
        """The store has not written what ends with these tokens (writer's thread): it has it, or has not what it stands on."""
        chain = self._store.longest(hashes)
        kept_tokens = chain[-1].end if chain else 0
        if kept_tokens < len(tokens):
            self._lost.append(Lost(tokens, kept_tokens))

    def lost(self) -> Sequence[Lost]:
        """What was dropped or refused since the last call."""
        return [self._lost.popleft() for _ in range(len(self._lost))]

    def look(self, rid: int, tokens: Int32Array, *, in_memory_tokens: int, kv_tokens: int) -> None:
        """Begin to read what goes on where memory's KV ends, or, when it does not end before the disk does, the last state."""
        chain = self._store.longest(self._store.hashes(tokens), at_most_tokens=len(tokens))
        if not chain or chain[-1].end - in_memory_tokens < self.threshold_tokens:
            return
        missing = [info for info in chain if info.end > kv_tokens] or [chain[-1]]
        self._waiting[rid] = _Waiting(self._prefetcher.start(missing), missing[-1].end, self._wait_s(missing))

    def _wait_s(self, infos: Sequence[SegmentInfo]) -> float:
        if self._policy == "wait_complete":
            return math.inf
        return longest_wait_s(infos) if self._policy == "timeout" else 0.0

    def wanted(self, rid: int) -> int | None:
        """How far a request's prefix is being read (tokens); None: nothing is read for it."""
        waiting = self._waiting.get(rid)
        return None if waiting is None else waiting.end

    def poll(self, rid: int) -> Sequence[StoredSegment] | None:
        """What was read; None: still reading, and the policy says wait, from the first time that it is asked for."""
        waiting = self._waiting.get(rid)
        if waiting is None:
            return ()
        read = waiting.fetch.poll()
        if read is None:
            if math.isinf(waiting.until_s):
                waiting.until_s = self._clock.now_s() + waiting.wait_s
            if self._clock.now_s() < waiting.until_s:
                return None
            read = waiting.fetch.wait(0)
            self.late_requests += 1
        del self._waiting[rid]
        if read:
            self.fetched_tokens += read[-1].info.end - read[0].info.start
        return [
            StoredSegment(one.info.start, one.info.end, memoryview(one.pages), memoryview(one.state)) for one in read
        ]

    def forget(self, rid: int) -> None:
        """Read no more for this request."""
        waiting = self._waiting.pop(rid, None)
        if waiting is not None:
            waiting.fetch.cancel()


def longest_wait_s(infos: Sequence[SegmentInfo]) -> float:
    """How long a request waits for a chain under the policy timeout: 1 s and 0.25 s for each 1024 tokens (reference 5.5)."""
    return _WAIT_BASE_S + _WAIT_PER_1024_TOKENS_S * (infos[-1].end - infos[0].start) / 1024
