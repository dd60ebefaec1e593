"""What to set when the host tier does not fit, or covers no more than the device: sizes and flags for the sentences that say so."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.config.resolve import Resolved
from twinpool.memory.host import HostArena
from twinpool.memory.host_cover import host_bytes_for, host_cover, quota_chunks_for
from twinpool.memory.ledger import Ledger
from twinpool.units import GB, as_gb, ceil_div, count

DEFAULT_RATIO = 2.0
_MOVES = 0.03  # of free memory: another start may find so much less of it
HELD_BACK_SHARE = 0.2  # of the host's memory for everything else (host_budget.py: that, or less where there is much)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Free memory of the host for a rank before its pools are there, in bytes. pools_inside: the device's pools come out of it."""

    free_bytes: int
    pools_inside: bool = False

    def beside(self, ledger: Ledger) -> int:
        """Bytes that the device's pools leave, at least 0."""
        return max(0, self.free_bytes - pools_bytes(ledger)) if self.pools_inside else self.free_bytes


def pools_bytes(ledger: Ledger) -> int:
    """Both pools of the device as allocated: states with what lies beside them, and KV."""
    return ledger.conv_pool_bytes + ledger.ssm_pool_bytes + ledger.extra_pool_bytes + ledger.kv_pool_bytes


def _gb_up(size_bytes: int) -> str:
    """A size in GB (10^9 bytes) as a flag takes it, three digits, rounded up."""
    return _digits(ceil_div(size_bytes, step := 10 ** max(0, len(str(size_bytes)) - 3)) * step)


def _gb_down(size_bytes: int) -> str:
    """The same with two digits, rounded down: free memory is another one at the next start."""
    return _digits(size_bytes // (step := 10 ** max(0, len(str(size_bytes)) - 2)) * step)


def _digits(size_bytes: int) -> str:
    return f"{size_bytes / GB:.9f}".rstrip("0").rstrip(".")


def smaller_device(resolved: Resolved, ledger: Ledger, *, pools_at_most: int) -> str | None:
    """'--mem-fraction-static F or less (now G)' under which the pools take at most so many bytes; None where no request would fit.

    What both pools share is the fraction of the whole less the weights (reference 1.3), so it shrinks by what the fraction gives up.
    """
    pools, slots = pools_bytes(ledger), ledger.max_mamba_cache_size + 1
    least = (
        pools * (ledger.slots_per_request + 1) // slots
    )  # a request and the padding slot, the pools divided as they are
    fraction = resolved.mem_fraction_static - (ledger.budget_bytes - pools_at_most) / ledger.whole_bytes
    hundredths = int(fraction * 100)
    if pools_at_most < least or hundredths < 1:
        return None
    return f"--mem-fraction-static {hundredths / 100:g} or less (now {resolved.mem_fraction_static:g}) or a smaller --device-memory"


def fit_advice(resolved: Resolved, ledger: Ledger, memory: HostMemory, *, wanted_bytes: int) -> str:
    """How a tier that was asked for comes to fit: less of it, or less for the device, in a sentence."""
    room, pools = memory.beside(ledger), pools_bytes(ledger)
    by_size = bool(resolved.hicache_size)
    flag, fits = (
        ("--hicache-size", _gb_down(room)) if by_size else ("--hicache-ratio", f"{room * 100 // pools / 100:g}")
    )
    ways = [f"{flag} {fits} fits"] if float(fits) else []
    if memory.pools_inside:
        free = int(memory.free_bytes * (1 - _MOVES))
        left = free - wanted_bytes if by_size else int(free / (1 + wanted_bytes / pools))
        less = smaller_device(resolved, ledger, pools_at_most=left)
        pools_text = f"the device's pools take {pools / GB:.2f} GB of the same memory"
        ways.append(f"{pools_text}{f': give the device less with {less}' if less else ''}")
    return "; ".join(ways)


def cover_advice(
    arena: HostArena, ledger: Ledger, resolved: Resolved, memory: HostMemory, *, context_tokens: int
) -> str:
    """How the tier comes to cover one session more than the device, each of `context_tokens` tokens: what binds, what is needed and
    free, and which flag, in a sentence or two.
    """
    sessions, page_size = ledger.max_mamba_cache_size + 1, ledger.page_size
    first = ""
    if arena.has_quota:
        kv, states = quota_chunks_for(arena, sessions, page_size=page_size, context_tokens=context_tokens)
        if kv + states <= arena.n_chunks:
            least, most = sessions * arena.slot_bytes, (arena.n_chunks - kv) * arena.slots_per_chunk * arena.slot_bytes
            return (
                f"The quota binds, not the size: give --hicache-mamba-size-gb between {as_gb(least)} and {as_gb(most)}, or "
                "leave it out."
            )
        shared = HostArena(total_bytes=arena.total_bytes, page_bytes=arena.page_bytes, slot_bytes=arena.slot_bytes)
        now, without = (
            host_cover(one, page_size=page_size, context_tokens=context_tokens).together for one in (arena, shared)
        )
        if without > now:
            first = (
                f"The quota binds first: leave --hicache-mamba-size-gb out and it covers {count(without, 'session')}. "
            )
        if without >= sessions:
            return first.rstrip()
    needed = host_bytes_for(arena, sessions, page_size=page_size, context_tokens=context_tokens)
    return first + _size_advice(resolved, ledger, memory, needed_bytes=needed)


def _size_advice(resolved: Resolved, ledger: Ledger, memory: HostMemory, *, needed_bytes: int) -> str:
    room, pools = memory.beside(ledger), pools_bytes(ledger)
    text = f"To cover more than the device it needs {_gb_up(needed_bytes)} GB, and {room / GB:.2f} GB are free"
    if needed_bytes <= room:
        if resolved.hicache_ratio is not None and not resolved.hicache_size:
            return f"{text}: raise --hicache-ratio to {ceil_div(needed_bytes * 100, pools) / 100:g} or more."
        return f"{text}: raise --hicache-size to {_gb_up(needed_bytes)} or more."
    if not memory.pools_inside:
        return f"{text}."
    text += f" beside the device's pools, which take {pools / GB:.2f} GB of the same memory"
    # Twice its pools is what a tier gets by default, where this share of what they leave is that much.
    share = resolved.hicache_host_memory_fraction * (1 - HELD_BACK_SHARE)
    left = int(memory.free_bytes * share / (DEFAULT_RATIO + share))
    less = smaller_device(resolved, ledger, pools_at_most=left)
    if less is None:
        return f"{text}: there is no room for both, so leave --enable-hierarchical-cache out."
    sized = resolved.hicache_size or resolved.hicache_ratio is not None
    return f"{text}: give the device less with {less}{', and leave the size of the tier out' if sized else ''}."
