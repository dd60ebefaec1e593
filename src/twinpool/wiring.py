"""From resolved settings and a ledger to pools, tree and scheduler: what the server boots is what replay runs."""

from __future__ import annotations

from collections.abc import Callable

from twinpool.clock import Clock
from twinpool.config.resolve import Resolved
from twinpool.memory.host import HostArena
from twinpool.memory.ledger import Ledger
from twinpool.memory.pools import Pool
from twinpool.prefix.host import HostPlan
from twinpool.prefix.tree import PrefixTree
from twinpool.request import Int32Array
from twinpool.sched.scheduler import Scheduler
from twinpool.sched.shape import SchedulerShape
from twinpool.sched.storage import Storage
from twinpool.step import Freed, Order
from twinpool.storage.keys import Fingerprint
from twinpool.units import GB


def build_scheduler(
    resolved: Resolved,
    ledger: Ledger,
    *,
    clock: Clock,
    host: HostArena | None = None,
    storage: Storage | None = None,
    tell_freed: bool = False,
) -> Scheduler:
    """A scheduler over empty pools.

    host: memory for evicted prefixes; storage: a disk tier below it; tell_freed: plans name freed pages and slots (tests).
    """
    orders: list[Order] = []
    pages = Pool(
        name="pages", first=1, count=ledger.n_pages, on_free=telling_freed("pages", orders) if tell_freed else None
    )
    slots = Pool(
        name="slots", first=1, count=ledger.max_mamba_cache_size,
        on_free=telling_freed("slots", orders) if tell_freed else None,
    )  # fmt: skip
    grids = resolved.grids
    tree = PrefixTree(
        pages=pages,
        slots=slots,
        page_size=resolved.page_size,
        grid_tokens=grids.checkpoint_tokens if resolved.track_slots else resolved.page_size,
        eviction_policy=resolved.radix_eviction_policy,
        max_states_per_path=resolved.mamba_max_states_per_path,
        disabled=not resolved.radix_cache,
        host=HostPlan(host, resolved.hicache_write_policy, orders) if host is not None else None,
    )
    return Scheduler(
        shape=_shape(resolved, ledger), pages=pages, slots=slots, tree=tree, clock=clock, orders=orders, storage=storage
    )


def disk_fingerprint(
    resolved: Resolved, *, model: str, ranks: int, page_bytes: int, slot_bytes: int
) -> Fingerprint:  # fmt: skip
    """What the segments of these settings are of. model: a digest of its weights; page_bytes and slot_bytes: of a rank's arena.

    A segment holds the bytes of all ranks.
    """
    of_ranks = f" of {ranks} ranks" if ranks > 1 else ""
    return Fingerprint(
        # Weights in another dtype compute other values, even where KV and states are kept in the same ones.
        model=f"{model} as {resolved.dtype}{of_ranks}",
        kv_dtype=resolved.kv_cache_dtype,
        ssm_dtype=resolved.mamba_ssm_dtype,
        conv_dtype=resolved.mamba_conv_dtype,
        page_size=resolved.page_size,
        page_bytes=ranks * page_bytes,
        slot_bytes=ranks * slot_bytes,
    )


def disk_limit_bytes(resolved: Resolved) -> int:
    """Most that the disk tier may hold."""
    return int(resolved.hicache_storage_size * GB)


def telling_freed(kind: str, orders: list[Order]) -> Callable[[Int32Array], None]:
    """A Pool.on_free that puts freed 'pages' or 'slots' among the orders of the next plan."""
    return lambda ids: orders.append(Freed(kind, ids.copy()))


def _shape(resolved: Resolved, ledger: Ledger) -> SchedulerShape:
    grids = resolved.grids
    return SchedulerShape(
        page_size=resolved.page_size,
        grid_tokens=grids.checkpoint_tokens,
        track_tokens=grids.track_tokens,
        strategy=resolved.strategy,
        track_slots=resolved.track_slots,
        radix_cache=resolved.radix_cache,
        overlap=resolved.overlap,
        max_running_requests=ledger.max_running_requests,
        max_queued_requests=resolved.max_queued_requests,
        chunked_prefill_size=resolved.chunked_prefill_size,
        max_prefill_tokens=resolved.max_prefill_tokens,
        prefill_max_requests=resolved.prefill_max_requests,
        context_len=resolved.context_len,
        schedule_policy=resolved.schedule_policy,
        schedule_conservativeness=resolved.schedule_conservativeness,
        retraction_policy=resolved.retraction_policy,
    )
