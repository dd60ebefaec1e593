"""What the host tier did in a run: what was copied, brought back and dropped, and how its memory was used."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.prefix.host_view import host_view
from twinpool.prefix.tree import PrefixTree
from twinpool.replay.record import Means
from twinpool.units import share


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUse:
    """One rank's host tier. total_bytes, most_tokens, most_states: of an empty one; fixed_split: KV and states have quotas.

    saved: copied to the host; loaded: brought back; dropped: to make room there; unsaved: not copied, because no room could be
    made. kv_share, states_share: of its bytes, mean over time. kv_free, states_free: mean free shares of what each of the two
    may take, which without quotas is the same memory. resumable_share: part of its KV with a state at its end or below it, when the
    run ended. failed_restores: requests that the device had no room to restore for.
    """

    total_bytes: int
    most_tokens: int
    most_states: int
    fixed_split: bool
    saved_tokens: int
    saved_states: int
    saved_bytes: int
    loaded_tokens: int
    loaded_states: int
    loaded_bytes: int
    dropped_tokens: int
    dropped_states: int
    unsaved_tokens: int
    unsaved_states: int
    failed_restores: int
    kv_share: float
    states_share: float
    kv_free: float
    states_free: float
    resumable_share: float

    @property
    def free_share(self) -> float:
        """Of its bytes, mean over time."""
        return max(0.0, 1 - self.kv_share - self.states_share)

    @property
    def ran_out(self) -> bool:
        """Whether something went from the host, or did not get there, for want of room."""
        return bool(self.dropped_tokens or self.dropped_states or self.unsaved_tokens or self.unsaved_states)


def host_use(tree: PrefixTree, means: Means, *, failed_restores: int) -> HostUse | None:
    """Of a run that has ended; None without a host tier."""
    tier = tree.tier
    if tier is None:
        return None
    arena, totals, page_size = tier.arena, tier.totals, tree.page_size
    pages, states = means.of("host_pages"), means.of("host_states")
    kv_share = share(pages * arena.page_bytes, arena.total_bytes)
    states_share = share(states * arena.slot_bytes, arena.total_bytes)
    kv_free = states_free = max(0.0, 1 - kv_share - states_share)
    if arena.has_quota:
        kv_free, states_free = 1 - share(pages, arena.most_pages), 1 - share(states, arena.most_slots)
    return HostUse(
        total_bytes=arena.total_bytes, most_tokens=arena.most_pages * page_size, most_states=arena.most_slots,
        fixed_split=arena.has_quota, saved_tokens=totals.saved_tokens, saved_states=totals.saved_states,
        saved_bytes=arena.bytes_of(pages=totals.saved_tokens // page_size, slots=totals.saved_states),
        loaded_tokens=totals.loaded_tokens, loaded_states=totals.loaded_states,
        loaded_bytes=arena.bytes_of(pages=totals.loaded_tokens // page_size, slots=totals.loaded_states),
        dropped_tokens=totals.evicted_tokens, dropped_states=totals.evicted_states, unsaved_tokens=totals.unsaved_tokens,
        unsaved_states=totals.unsaved_states, failed_restores=failed_restores, kv_share=kv_share, states_share=states_share,
        kv_free=kv_free, states_free=states_free, resumable_share=host_view(tree.root, page_size=page_size).resumable_share,
    )  # fmt: skip
