"""Backwards: what fits. Most users at a length, longest context at a number of users, fewest devices, sessions per GiB.

Each is the largest (or smallest) input for which the forward computation still holds the workload, with slots pinned at
what the workload needs, so that no state is bought that nobody uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from twinpool.errors import TwinpoolError
from twinpool.memory.split import one_slot_a_request, split
from twinpool.plan.machine import Machine
from twinpool.plan.sizing import Sizing, pinned_split, size
from twinpool.plan.workload import Workload, asked_running, slots_needed, tokens_needed
from twinpool.units import GIB

CEILING = 1 << 24  # users; beyond any machine, and small enough for a search by halves


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """--max-mamba-cache-size (of all workers) for a workload, and the logical tokens that stay on a worker beside it."""

    slots: int
    tokens: int


def pin_for(workload: Workload, sizing: Sizing) -> Pin | None:
    """The pin under which the workload fits, or None when no split of this memory holds it."""
    slots, dp = slots_needed(workload, sizing), sizing.request.dp
    running = asked_running(workload, sizing) // dp
    parts = pinned_split(sizing, slots, running=running)
    tokens = parts.tokens * sizing.request.dcp
    # A rank's tokens bound its requests even where no layer keeps KV (reference 1.5).
    fits = parts.kv_bytes > 0 and parts.tokens // 2 >= max(1, running)
    if sizing.request.kv_bytes_per_token:
        fits = fits and tokens >= tokens_needed(workload, sizing)
    return Pin(slots=slots * dp, tokens=tokens) if fits else None


def most_running(workload: Workload, sizing: Sizing) -> int:
    """Most requests at once at this length, with the same idle sessions; 0 when not even one fits."""
    return _largest(lambda n: pin_for(replace(workload, running=n), sizing) is not None, CEILING)


def most_idle(workload: Workload, sizing: Sizing) -> int:
    """Most idle sessions that stay resumable beside these running requests."""
    if not sizing.request.radix_cache:
        return 0
    if pin_for(replace(workload, idle_sessions=0), sizing) is None:
        return 0
    return _largest(lambda n: pin_for(replace(workload, idle_sessions=n), sizing) is not None, CEILING)


def longest_context(workload: Workload, sizing: Sizing) -> int:
    """Longest average context in tokens, up to the model's, at this many users; 0 when not even two tokens fit."""
    limit = sizing.resolved.context_len
    return _largest(lambda n: pin_for(replace(workload, tokens_per_request=n), sizing) is not None, limit)


def sessions_per_gib(workload: Workload, sizing: Sizing) -> float:
    """Idle sessions that one GiB of this rank holds: a checkpoint set and the KV of a context each; 0 without a cache."""
    request = sizing.request
    if not request.radix_cache:
        return 0.0
    one = replace(workload, running=0, idle_sessions=request.dp)
    state = (request.stage_slot_bytes + request.stage_extra_bytes) * workload.checkpoints_per_session
    kv = tokens_needed(one, sizing) * request.kv_bytes_per_token / request.dcp
    return GIB / (state + kv)


def fewest_ranks(
    workload: Workload, sizing: Sizing, *, machine_of: Callable[[int], Machine] | None, most: int = 64
) -> int | None:
    """The smallest --tp-size (a power of two) that holds the workload; None when none up to `most` does.

    machine_of: the machine with so many tensor parallel ranks; it raises TwinpoolError where weights do not fit. None: only
    this one is known, and so is the answer.
    """
    if machine_of is None:
        return None
    ranks = 1
    while ranks <= most:
        try:
            flags = replace(sizing.flags, tp_size=ranks, dp_size=min(sizing.flags.dp_size, ranks))
            candidate = size(sizing.model, machine_of(ranks), flags, sizing.rules)
        except TwinpoolError:  # heads do not divide, or the weights alone are too large
            candidate = None
        if candidate is not None and pin_for(workload, candidate) is not None:
            return ranks
        ranks *= 2
    return None


def ratio_for_slots(sizing: Sizing, slots: int) -> float | None:
    """The smallest ratio of three decimals that gives at least so many slots a worker; None when none does."""
    request = replace(sizing.request, max_mamba_cache_size=None)
    if one_slot_a_request(request):
        return None  # no ratio is looked at (reference 1.3, case b)

    def gives(thousandths: int) -> bool:
        return split(replace(request, ratio=thousandths / 1000)).slots >= slots

    low, high = 1, 10**7
    if not gives(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if gives(middle) else (middle + 1, high)
    return low / 1000


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest n in 1..most for which `holds`, which never turns true again once false; 0 when n = 1 fails."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
