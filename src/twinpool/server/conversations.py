"""A prompt as keyed hashes of its blocks, and the earlier sequence that it goes on from; no token is kept."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np

from twinpool.replay.trace import Blocks
from twinpool.request import Int32Array

_TOKEN_BYTES = 4
_MOST_ENDS = 10_000
_LARGEST_ID = (1 << 63) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a request belongs. session: its name; index: its turn, from 0; parent: on turn 0, the session it was forked from.

    blocks: int64 [full blocks of the prompt], the hash of each block and of all before it.
    """

    session: str
    index: int
    parent: str | None
    blocks: Blocks


@dataclass(slots=True)
class _End:
    """How a sequence ended: whose it is, its turns so far, whether a prompt went on from it; where it is found again: the id of
    its last full block and the tokens after that."""

    session: str
    turns: int
    block: int
    tail_tokens: int
    continued: bool = False


class Conversations:
    """Places requests in the order in which they end. salt: 1 to 64 secret bytes; block_size: tokens.

    prefix: what session names begin with. most_ends: ended sequences that a later prompt can go on from; the oldest is forgotten.
    """

    def __init__(self, *, salt: bytes, block_size: int, prefix: str, most_ends: int = _MOST_ENDS) -> None:
        self._salt, self._block_size, self._prefix, self._most_ends = salt, block_size, prefix, most_ends
        self._ends: OrderedDict[int, _End] = OrderedDict()
        self._tails: dict[int, Counter[int]] = {}
        self._n_sessions = 0

    def place(self, tokens: Int32Array, prompt_tokens: int) -> Place:
        """Place a request whose prompt is the first so many of its tokens (int32 [prompt and answer]).

        It is the next turn of a session if its prompt begins with everything the session's last request had, but for that one's
        last token: no KV of it was ever computed, and clients leave it out (an end token).
        """
        blocks, before = self._walk(tokens[:prompt_tokens])
        parent, turn = None, 0
        if before is None or before.continued:
            parent = before.session if before is not None else None
            session = f"{self._prefix}-{self._n_sessions}"
            self._n_sessions += 1
        else:
            session, turn, before.continued = before.session, before.turns, True
        self._remember(tokens[: max(prompt_tokens, len(tokens) - 1)], session, turn + 1)
        return Place(session, turn, parent, blocks)

    def _walk(self, prompt: Int32Array) -> tuple[Blocks, _End | None]:
        """The prompt's block ids, and the longest known sequence that it begins with and is longer than."""
        raw, width = _raw(prompt), self._block_size * _TOKEN_BYTES
        chain = self._chain()
        ids = [_id(chain)]
        before = None
        for at in range(0, len(raw) + 1, width):
            for tail_tokens in sorted(self._tails.get(ids[-1], ())):
                end = at + tail_tokens * _TOKEN_BYTES
                if end < len(raw):
                    before = self._ends.get(_id(chain, raw[at:end])) or before
            if at + width <= len(raw):
                chain.update(raw[at : at + width])
                ids.append(_id(chain))
        return np.array(ids[1:], np.int64), before

    def _remember(self, tokens: Int32Array, session: str, turns: int) -> None:
        raw = _raw(tokens)
        tail_tokens = len(tokens) % self._block_size
        full = len(raw) - tail_tokens * _TOKEN_BYTES
        chain = self._chain(raw[:full])
        end = _End(session, turns, block=_id(chain), tail_tokens=tail_tokens)
        key = _id(chain, raw[full:])
        self._forget(self._ends.pop(key, None))
        self._ends[key] = end
        self._tails.setdefault(end.block, Counter())[tail_tokens] += 1
        if len(self._ends) > self._most_ends:
            self._forget(self._ends.popitem(last=False)[1])

    def _forget(self, end: _End | None) -> None:
        if end is None:
            return
        tails = self._tails[end.block]
        tails[end.tail_tokens] -= 1
        if not tails[end.tail_tokens]:
            del tails[end.tail_tokens]
        if not tails:
            del self._tails[end.block]

    def _chain(self, raw: bytes = b"") -> hashlib.blake2b:
        return hashlib.blake2b(raw, key=self._salt, digest_size=8)


def _raw(tokens: Int32Array) -> bytes:
    """Tokens as little-endian int32, so that hashes are the same on every machine."""
    return tokens.astype("<i4").tobytes()


def _id(chain: hashlib.blake2b, more: bytes = b"") -> int:
    """The hash of what the chain has seen and of `more`, 63 bits."""
    if more:
        chain = chain.copy()
        chain.update(more)
    return int.from_bytes(chain.digest(), "little") & _LARGEST_ID
