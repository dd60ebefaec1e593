"""What a trace's prompts share, counted with a cache that never forgets; knows nothing of the radix tree."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinpool.replay.trace import Blocks, Trace, TraceRequest

_GOLDEN, _MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Match:
    """One request against all that came before it in its namespace.

    seen_blocks, seen_tokens: its longest prefix that was sent before. duplicate: an earlier prompt had the same blocks
    and length. previous: the request before it in its session. lost_tokens: full blocks of that one's prompt, in
    tokens, that this one does not continue.
    """

    request: TraceRequest
    seen_blocks: int
    seen_tokens: int
    duplicate: bool
    previous: TraceRequest | None
    lost_tokens: int


def matches(trace: Trace) -> Iterator[Match]:
    """Every request of a trace with blocks, each namespace in order of arrival.

    A block counts as seen if the same id stood at the same place after the same blocks. Requests that arrive together
    count in the order of the trace. Only prompts are cached: an answer is seen once the next prompt repeats it.
    """
    assert trace.block_size is not None
    by_namespace: dict[str, list[TraceRequest]] = defaultdict(list)
    for session in trace.sessions:
        by_namespace[session.namespace] += session.requests
    for requests in by_namespace.values():
        requests.sort(key=lambda request: request.arrival_s)
        yield from _matches_in_namespace(requests, trace.block_size)


def _matches_in_namespace(requests: Sequence[TraceRequest], block_size: int) -> Iterator[Match]:
    seen: set[int] = set()
    prompts: set[tuple[int, int]] = set()
    latest: dict[str, TraceRequest] = {}
    for request in requests:
        keys = prefix_keys(request.blocks)
        # Whoever sent a block sent all before it, so seen blocks are a prefix and bisection finds its end.
        count = bisect.bisect_left(keys, True, key=lambda key: int(key) not in seen)
        seen.update(keys[count:].tolist())
        prompt = (int(keys[-1]) if len(keys) else 0, request.input_tokens)
        previous = latest.get(request.session)
        yield Match(
            request=request,
            seen_blocks=count,
            seen_tokens=min(count * block_size, request.input_tokens),
            duplicate=len(keys) > 0 and prompt in prompts,
            previous=previous,
            lost_tokens=0 if previous is None else lost_tokens(previous, request, block_size=block_size),
        )
        prompts.add(prompt)
        latest[request.session] = request


def prefix_keys(blocks: Blocks) -> npt.NDArray[np.uint64]:
    """A 64-bit key for each prefix of a prompt: the running sum of its blocks, each mixed with its place.

    Equal prefixes have equal keys; two of n different ones collide with probability below n^2 / 2^65. The mixing is the
    finalizer of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
    """
    mixed = blocks.astype(np.uint64) + np.arange(1, len(blocks) + 1, dtype=np.uint64) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    keys: npt.NDArray[np.uint64] = np.cumsum(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)
    return keys


def lost_tokens(previous: TraceRequest, request: TraceRequest, *, block_size: int) -> int:
    """Tokens in full blocks of the previous prompt after the prefix that both share; 0 if it was extended."""
    full_blocks = previous.input_tokens // block_size
    return max(full_blocks - common_blocks(previous.blocks, request.blocks), 0) * block_size


def common_blocks(first: Blocks, second: Blocks) -> int:
    """Leading blocks that two prompts share."""
    shorter = min(len(first), len(second))
    different = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(different[0]) if len(different) else shorter
