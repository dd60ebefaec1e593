"""Identity of tokens: (block id, offset) as one int32, so that pages, grids and chunks act on recorded blocks as on text.

A prompt's end behind its last full block, and the answer, are what the session's next prompt has in their place if it
extends this one, and so on along the session; where no later prompt says more they are a block id's or nobody else's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twinpool.errors import ConfigError
from twinpool.replay.reuse import common_blocks
from twinpool.replay.trace import Blocks, Session, Trace, TraceRequest
from twinpool.request import Int32Array

LARGEST_TOKEN = (1 << 31) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """prompt: int32 [input tokens]; answer: int32 [output tokens]."""

    prompt: Int32Array
    answer: Int32Array


class TokenSpace:
    """Numbers for every token of a trace. Made once; contents are expanded when a request arrives.

    Raises ConfigError for a trace with more different tokens than int32 has numbers.
    """

    def __init__(self, trace: Trace) -> None:
        self._block_size = trace.block_size or 1
        self._dense: dict[str, tuple[Blocks, int]] = {}  # namespace: (its sorted ids, number of its first block)
        first = 0
        by_namespace: dict[str, list[Blocks]] = {}
        for session in trace.sessions:
            by_namespace.setdefault(session.namespace, []).extend(request.blocks for request in session.requests)
        for namespace, blocks in by_namespace.items():
            ids = _unique(blocks)
            self._dense[namespace] = (ids, first)
            first += len(ids)
        self._own: dict[tuple[str, int], int] = {}
        token = first * self._block_size
        for session in trace.sessions:
            for request in session.requests:
                self._own[session.id, request.index] = token
                token += request.input_tokens + request.output_tokens - self._covered(request)
        if token > LARGEST_TOKEN:
            raise ConfigError(
                f"The trace has {token:,} different tokens, and replay tells at most {LARGEST_TOKEN:,} apart."
            )

    def content(self, session: Session, index: int) -> Content:
        """Prompt and answer of one request."""
        request, requests = session.requests[index], session.requests
        whole = np.empty(request.input_tokens + request.output_tokens, np.int32)
        known = 0
        for last in range(index, len(requests)):
            if last > index and not self._extends(requests[last - 1], requests[last]):
                break
            source = requests[last]
            until = min(len(whole), self._full_tokens(source))
            if until > known:
                whole[known:until] = self._expand(session.namespace, source.blocks, known, until)
                known = until
            if known == len(whole):
                break
        if known < len(whole):
            self._end(whole, known, session, [source, request])
        return Content(whole[: request.input_tokens], whole[request.input_tokens :])

    def _end(self, whole: Int32Array, known: int, session: Session, sources: list[TraceRequest]) -> None:
        """Tokens behind the last full block of a chain of prompts: its partial block, then what is the source's own."""
        for source in sources:
            covered = self._covered(source)
            until = min(len(whole), covered)
            if until > known:
                whole[known:until] = self._expand(session.namespace, source.blocks, known, until)
                known = until
            until = min(len(whole), source.input_tokens + source.output_tokens)
            if until > known:
                first = self._own[session.id, source.index] - covered
                whole[known:until] = np.arange(first + known, first + until, dtype=np.int32)
                known = until

    def _covered(self, request: TraceRequest) -> int:
        return min(len(request.blocks) * self._block_size, request.input_tokens)

    def _full_tokens(self, request: TraceRequest) -> int:
        """Prompt tokens in full blocks that have an id."""
        return min(len(request.blocks), request.input_tokens // self._block_size) * self._block_size

    def _extends(self, request: TraceRequest, follower: TraceRequest) -> bool:
        """Whether the next prompt goes on where this one and its answer end: it has all its full blocks, and more."""
        full = request.input_tokens // self._block_size
        longer = follower.input_tokens > request.input_tokens
        return longer and common_blocks(request.blocks[:full], follower.blocks[:full]) == full

    def _expand(self, namespace: str, blocks: Blocks, start: int, end: int) -> Int32Array:
        """Tokens [start, end) of a prompt with these blocks."""
        ids, first_block = self._dense[namespace]
        size = self._block_size
        first = start // size
        numbers = np.asarray(np.searchsorted(ids, blocks[first : -(-end // size)]) + first_block, np.int32)
        offsets = np.arange(size, dtype=np.int32)
        tokens: Int32Array = np.add(numbers[:, None] * np.int32(size), offsets, dtype=np.int32)
        return tokens.reshape(-1)[start - first * size : end - first * size]


def _unique(blocks: list[Blocks]) -> Blocks:
    """Sorted different ids; a session's prompts repeat each other, so each is reduced before all are joined."""
    joined = np.empty(0, np.int64)
    waiting: list[Blocks] = []
    size = 0
    for one in blocks:
        waiting.append(one)
        size += len(one)
        if size > 4_000_000:
            joined, waiting, size = np.unique(np.concatenate([joined, *waiting])), [], 0
    return np.unique(np.concatenate([joined, *waiting]))
