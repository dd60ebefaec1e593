"""The host tier as the engine reports it: counts after a step, and the check that nothing of it is lost."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from twinpool.batchlog import lost_line
from twinpool.memory.host_cover import HostCover, balanced_context_tokens, host_cover
from twinpool.memory.ledger import Ledger
from twinpool.prefix.host import HostTier, HostTotals
from twinpool.prefix.tree import PrefixTree

log = logging.getLogger("twinpool.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCounts:
    """KV tokens and states on the host: in use, and what there is or could be as the memory is divided now.

    is_closed: given up because copies failed; total_bytes: of both together; saved_bytes, loaded_bytes: copied to the
    host and back since boot; totals: counters since boot in tokens and states.
    """

    is_closed: bool
    total_bytes: int
    used_tokens: int
    total_tokens: int
    used_states: int
    total_states: int
    saved_bytes: int
    loaded_bytes: int
    totals: HostTotals


class HostWatch:
    """Counts the tier of a tree, which may be given up one day. Belongs to the engine's thread."""

    def __init__(self, tree: PrefixTree, tier: HostTier) -> None:
        self._tree, self._tier = tree, tier
        self._page_size = tree.page_size
        self._said_closed = False
        self._said_lost_nodes = self._said_lost_tokens = 0

    def say_if_lost(self) -> None:
        """Log what write_back has dropped since the last call because the host had no room for it."""
        totals = self._tier.totals
        nodes, tokens = totals.lost_nodes - self._said_lost_nodes, totals.lost_tokens - self._said_lost_tokens
        if nodes:
            log.warning(lost_line(nodes=nodes, tokens=tokens))
        self._said_lost_nodes, self._said_lost_tokens = totals.lost_nodes, totals.lost_tokens

    def say_if_closed(self) -> None:
        """Log once that the tier has been given up."""
        if self._tree.tier is None and not self._said_closed:
            self._said_closed = True
            log.error(
                "Copies between the tiers have failed too often: host and disk tier are not used any more, and prefixes that leave the "
                "device are computed again. Start again to use them."
            )

    def counts(self) -> HostCounts:
        """Counts now."""
        arena, totals = self._tier.arena, self._tier.totals
        return HostCounts(
            is_closed=self._tree.tier is None,
            total_bytes=arena.total_bytes,
            used_tokens=arena.used_pages * self._page_size,
            total_tokens=arena.page_capacity * self._page_size,
            used_states=arena.used_slots,
            total_states=arena.slot_capacity,
            saved_bytes=self._bytes(tokens=totals.saved_tokens, states=totals.saved_states),
            loaded_bytes=self._bytes(tokens=totals.loaded_tokens, states=totals.loaded_states),
            totals=replace(totals),
        )

    def cover(self, ledger: Ledger, *, context_len: int) -> HostCover:
        """Sessions that fit an empty arena, of the length of host_cover.balanced_context_tokens."""
        context_tokens = balanced_context_tokens(ledger, context_len=context_len)
        return host_cover(self._tier.arena, page_size=self._page_size, context_tokens=context_tokens)

    def check(self) -> None:
        """Assert that the arena holds what was copied and not dropped since: no more (a leak), no less (a double free)."""
        arena, totals = self._tier.arena, self._tier.totals
        tokens = totals.saved_tokens + totals.filled_tokens - totals.evicted_tokens - totals.flushed_tokens
        states = totals.saved_states + totals.filled_states - totals.evicted_states - totals.flushed_states
        for name, used, kept in (
            ("tokens", arena.used_pages * self._page_size, tokens),
            ("states", arena.used_slots, states),
            ("states", len(self._tier.states), states),
        ):
            assert used == kept, (
                f"[host] pool memory leak detected! {name} in use={used}, copied and not dropped={kept}"
            )

    def _bytes(self, *, tokens: int, states: int) -> int:
        return self._tier.arena.bytes_of(pages=tokens // self._page_size, slots=states)
