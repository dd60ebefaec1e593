"""How many idle sessions the host tier's arena holds, by KV, by states and by both together."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from twinpool.memory.host import HostArena
from twinpool.memory.ledger import Ledger
from twinpool.units import ceil_div


@dataclass(frozen=True, slots=True)
class HostCover:
    """Sessions of `context_tokens` tokens each that fit an empty arena with one state each.

    by_kv: if all memory that may hold KV did; by_states: the same for states; together: KV and state of each session.
    """

    context_tokens: int
    by_kv: int
    by_states: int
    together: int


def balanced_context_tokens(ledger: Ledger) -> int:
    """Tokens of an idle session at which both pools of the device hold the same number of them: KV tokens over slots."""
    return ledger.kv_tokens // max(1, ledger.max_mamba_cache_size)


def host_cover(arena: HostArena, *, page_size: int, context_tokens: int) -> HostCover:
    """What an arena of pages of `page_size` tokens covers for sessions of `context_tokens` tokens (0: states alone).

    A session takes its pages' and its state's shares of a chunk; a fixed quota bounds each kind by itself.
    """
    by_states = arena.most_slots
    pages = ceil_div(context_tokens, page_size)
    if not pages or not arena.page_bytes:
        return HostCover(context_tokens, by_states, by_states, by_states)
    by_kv = arena.most_pages // pages
    pages_per_chunk, slots_per_chunk = arena.chunk_bytes // arena.page_bytes, arena.chunk_bytes // arena.slot_bytes
    shared = int(arena.n_chunks / (Fraction(pages, pages_per_chunk) + Fraction(1, slots_per_chunk)))
    return HostCover(context_tokens, by_kv, by_states, min(by_kv, by_states, shared))
