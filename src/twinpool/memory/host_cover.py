"""How many idle sessions the host tier's arena holds, by KV, by states and by both together."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from twinpool.memory.host import HostArena
from twinpool.memory.ledger import Ledger
from twinpool.units import ceil_div


@dataclass(frozen=True, slots=True)
class HostCover:
    """Sessions of `context_tokens` tokens each that fit an empty arena with their states.

    by_kv: if all memory that may hold KV did; by_states: the same for states; together: KV and state of each session.
    """

    context_tokens: int
    by_kv: int
    by_states: int
    together: int


def balanced_context_tokens(ledger: Ledger, *, context_len: int) -> int:
    """Tokens of an idle session at which both pools of the device hold the same number of them: KV tokens over slots.

    At most `context_len`, the longest there can be: past it, slots alone limit the sessions that the device holds.
    """
    return min(context_len, ledger.logical_tokens // max(1, ledger.max_mamba_cache_size))


def host_cover(arena: HostArena, *, page_size: int, context_tokens: int, states: int = 1) -> HostCover:
    """What an arena of pages of `page_size` tokens covers for sessions of `context_tokens` tokens (0: states alone), so many states each.

    A session takes its pages' and its states' shares of a chunk; a fixed quota bounds each kind by itself.
    """
    by_states = arena.most_slots // states
    pages = ceil_div(context_tokens, page_size)
    if not pages or not arena.page_bytes:
        return HostCover(context_tokens, by_states, by_states, by_states)
    by_kv = arena.most_pages // pages
    shared = int(arena.n_chunks / _chunks_a_session(arena, pages=pages, states=states))
    return HostCover(context_tokens, by_kv, by_states, min(by_kv, by_states, shared))


def host_bytes_for(arena: HostArena, sessions: int, *, page_size: int, context_tokens: int, states: int = 1) -> int:
    """The least bytes with which an arena of the same pages and states, without a quota, covers so many of these sessions."""
    pages = ceil_div(context_tokens, page_size) if arena.page_bytes else 0
    return ceil(sessions * _chunks_a_session(arena, pages=pages, states=states)) * arena.chunk_bytes


def quota_chunks_for(arena: HostArena, sessions: int, *, page_size: int, context_tokens: int) -> tuple[int, int]:
    """(chunks of KV, chunks of states) that so many of these sessions take with a state each, where each kind keeps to its own."""
    pages = ceil_div(context_tokens, page_size) if arena.page_bytes else 0
    return ceil_div(sessions * pages, arena.chunk_bytes // max(1, arena.page_bytes)), ceil_div(
        sessions, arena.slots_per_chunk
    )


def _chunks_a_session(arena: HostArena, *, pages: int, states: int) -> Fraction:
    pages_per_chunk = arena.chunk_bytes // arena.page_bytes if pages else 1
    return Fraction(pages, pages_per_chunk) + Fraction(states, arena.slots_per_chunk)
