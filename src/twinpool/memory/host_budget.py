"""How much host memory the host tier takes, and its arena (reference 5.1, 3.4)."""

from __future__ import annotations

from twinpool.config.resolve import Resolved
from twinpool.errors import MemoryRefusal
from twinpool.memory.host import HostArena
from twinpool.memory.host_advice import DEFAULT_RATIO, HELD_BACK_SHARE, HostMemory, fit_advice, pools_bytes
from twinpool.memory.ledger import Ledger
from twinpool.units import GB, GIB, as_gb, ceil_div, count, format_bytes

HELD_BACK_BYTES = 10 * GIB  # for everything else: that, or HELD_BACK_SHARE of the host's memory, the less of the two


def host_arena(resolved: Resolved, ledger: Ledger, *, memory: HostMemory | None) -> HostArena | None:
    """The arena of a rank, or None without --enable-hierarchical-cache. memory: of the host; None: not checked.

    Raises MemoryRefusal when the host has less than was asked for, or too little for one page and one state.
    """
    if not resolved.enable_hierarchical_cache:
        return None
    slot_bytes = ledger.slot_bytes + ledger.extra_pool_bytes // max(1, ledger.max_mamba_cache_size + 1)
    total = _total_bytes(resolved, ledger, memory)
    max_slots = None
    if resolved.hicache_mamba_size_gb is not None:
        max_slots = int(resolved.hicache_mamba_size_gb * GB) // slot_bytes
    arena = HostArena(total_bytes=total, page_bytes=ledger.page_bytes, slot_bytes=slot_bytes, max_slots=max_slots)
    if arena.can_ever_hold(pages=int(arena.page_bytes > 0), slots=1):
        return arena
    if max_slots is not None and arena.n_chunks > 1:
        raise MemoryRefusal(
            f"--hicache-mamba-size-gb {resolved.hicache_mamba_size_gb:g} of {total / GB:.3f} GB is {count(max_slots, 'state')} and leaves "
            f"{count(arena.most_pages, 'KV page')}, and at least one of each is needed: give between {as_gb(slot_bytes)} and "
            f"{as_gb(slot_bytes * (arena.n_chunks - 1))}, or leave it out."
        )
    least = 2 * arena.chunk_bytes
    flag, value = "--hicache-size", as_gb(least)
    if not resolved.hicache_size and resolved.hicache_ratio is not None:
        flag, value = "--hicache-ratio", f"{ceil_div(least * 10**6, pools_bytes(ledger)) / 10**6:.6f}"
    raise MemoryRefusal(
        f"The host tier has {format_bytes(total)} and needs room for a page and a state, {format_bytes(least)}: "
        f"raise {flag} to at least {value}."
    )


def is_automatic(resolved: Resolved) -> bool:
    """Whether the tier's size is nobody's but ours: neither --hicache-size nor --hicache-ratio is given."""
    return not resolved.hicache_size and resolved.hicache_ratio is None


def allowed_bytes(resolved: Resolved, ledger: Ledger, memory: HostMemory) -> int:
    """Most that a tier of automatic size may take of the host's memory, for a rank."""
    available_bytes = memory.beside(ledger)
    held_back = min(HELD_BACK_BYTES, int(available_bytes * HELD_BACK_SHARE))
    return int((available_bytes - held_back) * resolved.hicache_host_memory_fraction)


def _total_bytes(resolved: Resolved, ledger: Ledger, memory: HostMemory | None) -> int:
    """By size, by ratio, or twice the device's pools as far as the host allows it."""
    pools = pools_bytes(ledger)
    if is_automatic(resolved):
        wanted = int(pools * DEFAULT_RATIO)
        return wanted if memory is None else min(wanted, allowed_bytes(resolved, ledger, memory))
    wanted = int(resolved.hicache_size * GB) if resolved.hicache_size else int(pools * (resolved.hicache_ratio or 0.0))
    if memory is not None and wanted > (available_bytes := memory.beside(ledger)):
        raise MemoryRefusal(
            f"Not enough host memory available. Requesting {wanted / GB:.2f} GB but only have {available_bytes / GB:.2f} GB "
            "free. Please reduce the size of the hierarchical cache: "
            f"{fit_advice(resolved, ledger, memory, wanted_bytes=wanted)}."
        )
    return wanted
