"""A disk tier for tiny worlds: what it was given it returns late, in part, or not at all."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from twinpool.prefix.stored import StoredSegment
from twinpool.request import Int32Array
from twinpool.sched.storage import Lost
from twinpool.step import StoreCopy


@dataclass
class FakeStorage:
    """sched.storage.Storage over a dictionary.

    most_polls: a request is told to wait so often at most; lost_percent: puts that never arrive; cut_percent: reads that end early;
    threshold_tokens: less is not read.
    """

    dice: random.Random = field(default_factory=lambda: random.Random(0))
    most_polls: int = 0
    lost_percent: int = 0
    cut_percent: int = 0
    threshold_tokens: int = 1
    segments: dict[bytes, StoredSegment] = field(default_factory=dict)  # by the tokens of the whole prefix
    given: list[StoreCopy] = field(default_factory=list)
    waiting: dict[int, tuple[int, list[StoredSegment]]] = field(default_factory=dict)
    read_tokens: int = 0
    unheard: list[Lost] = field(default_factory=list)

    def put(self, order: StoreCopy, kv: memoryview, state: memoryview) -> None:
        """A segment is kept if what it stands on is here."""
        self.given.append(order)
        assert len(order.tokens) == order.end
        key = order.tokens.tobytes()
        parent_is_here = not order.start or key[: 4 * order.start] in self.segments
        if parent_is_here and self.dice.randrange(100) >= self.lost_percent:
            self.segments.setdefault(key, StoredSegment(order.start, order.end, kv, state))
        elif key not in self.segments:
            chain = self.chain(order.tokens)
            self.unheard.append(Lost(order.tokens, chain[-1].end if chain else 0))

    def lost(self) -> list[Lost]:
        lost, self.unheard = self.unheard, []
        return lost

    def chain(self, tokens: Int32Array) -> list[StoredSegment]:
        """The segments of the longest prefix that is here with all that it stands on, root first."""
        key = tokens.tobytes()
        for end in range(len(tokens), 0, -1):
            found: list[StoredSegment] = []
            while end and key[: 4 * end] in self.segments:
                found.insert(0, self.segments[key[: 4 * end]])
                end = found[0].start
            if found and not end:
                return found
        return []

    def look(self, rid: int, tokens: Int32Array, *, in_memory_tokens: int, kv_tokens: int) -> None:
        assert rid not in self.waiting
        chain = self.chain(tokens)
        if chain and chain[-1].end - in_memory_tokens >= self.threshold_tokens:
            missing = [one for one in chain if one.end > kv_tokens] or [chain[-1]]
            if self.dice.randrange(100) < self.cut_percent:
                missing = missing[: self.dice.randrange(len(missing))]
            self.waiting[rid] = (self.dice.randint(0, self.most_polls), missing)

    def wanted(self, rid: int) -> int | None:
        if rid not in self.waiting:
            return None
        _, missing = self.waiting[rid]
        return missing[-1].end if missing else 0

    def poll(self, rid: int) -> list[StoredSegment] | None:
        if rid not in self.waiting:
            return []
        left, missing = self.waiting[rid]
        if left:
            self.waiting[rid] = (left - 1, missing)
            return None
        del self.waiting[rid]
        self.read_tokens += sum(one.end - one.start for one in missing)
        return missing

    def forget(self, rid: int) -> None:
        self.waiting.pop(rid, None)
