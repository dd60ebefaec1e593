"""What an engine will do to a wish without asking: requests that are capped, slots nobody uses, prompts that cannot run."""

from __future__ import annotations

from collections.abc import Iterator

from twinpool.config.idle import idle_flags
from twinpool.config.launch import LaunchLine
from twinpool.memory.budget import overrun_warnings
from twinpool.memory.ledger import Ledger
from twinpool.memory.split import one_slot_a_request
from twinpool.plan.sizing import Sizing
from twinpool.units import count, format_bytes


def clamps(sizing: Sizing, line: LaunchLine) -> tuple[str, ...]:
    """A sentence for each; the engine's own warnings first, then what it does not say."""
    found = [*sizing.resolved.warnings]
    if sizing.ledger is not None:
        # Where only the pools are known there is no slack, and none that could be changed.
        noise = overrun_warnings(sizing.ledger.lines) if sizing.machine.pools_only else ()
        found += [warning for warning in sizing.ledger.warnings if warning not in noise]
        found += _effective_requests(sizing, sizing.ledger)
        found += _lengths(sizing, sizing.ledger)
        found += _idle_memory(sizing, sizing.ledger)
    found += _unused_flags(sizing)
    found += [f"{flag} changes memory and is not part of this plan." for flag in line.not_modelled]
    return tuple(dict.fromkeys(found))


def _effective_requests(sizing: Sizing, ledger: Ledger) -> Iterator[str]:
    """The number that /server_info shows is the wish; this one is what runs."""
    request, dp = sizing.request, sizing.request.dp
    asked, wanted = request.max_running_requests, request.requests_per_worker
    runs = ledger.max_running_requests * dp
    if asked is None or wanted is None:
        yield f"--max-running-requests is not given: {count(runs, 'request')} may run at once."
    elif ledger.max_running_requests < wanted:
        yield (
            f"--max-running-requests {asked} becomes {runs}: {_cap(ledger)} on each of {dp} worker{'s' * (dp > 1)}; "
            "the rest of the requests wait in the queue."
        )
    elif runs != asked:
        yield f"--max-running-requests {asked} is divided by {dp} workers, at least one each and rounded down: {runs} run."
    pin = request.max_mamba_cache_size
    if pin is not None and pin % dp:
        yield f"--max-mamba-cache-size {pin} is divided by {dp} workers and rounded down: {pin // dp * dp} slots."


def _cap(ledger: Ledger) -> str:
    """What holds the requests of a worker down (reference 1.5)."""
    by_states = ledger.max_mamba_cache_size // ledger.slots_per_request
    if by_states <= ledger.max_running_requests:
        return f"{ledger.max_mamba_cache_size} slots / {ledger.slots_per_request} a request = {by_states}"
    return f"{ledger.kv_tokens:,} tokens of KV / 2 = {ledger.max_running_requests}"


def _lengths(sizing: Sizing, ledger: Ledger) -> Iterator[str]:
    """Contexts that the KV pool cannot hold, and prompts too short to be reused."""
    limit = sizing.resolved.context_len
    if sizing.request.kv_bytes_per_token and ledger.logical_tokens < limit:
        yield (
            f"The context of {limit:,} tokens is longer than the KV pool of {ledger.logical_tokens:,}: "
            "a request that grows beyond the pool is refused or ended."
        )
    grids = sizing.resolved.grids
    if sizing.resolved.radix_cache and sizing.resolved.track_slots:
        yield (
            f"A prefix is reused only up to a checkpoint: nothing below {grids.checkpoint_tokens} tokens, and while "
            f"decoding one every {grids.track_tokens} tokens."
        )


def _idle_memory(sizing: Sizing, ledger: Ledger) -> Iterator[str]:
    """Bytes that no request of this configuration can use."""
    needed = ledger.max_running_requests * ledger.slots_per_request
    spare = ledger.max_mamba_cache_size - needed
    if not sizing.request.radix_cache and spare > 0:
        yield (
            f"{spare} of {ledger.max_mamba_cache_size} slots ({format_bytes(spare * ledger.slot_bytes)}) are never used: "
            f"without the radix cache {ledger.max_running_requests} requests take one each."
        )
    elif spare > 4 * needed:
        yield (
            f"{spare} of {ledger.max_mamba_cache_size} slots ({format_bytes(spare * ledger.slot_bytes)}) are beyond what "
            f"{ledger.max_running_requests} running requests take; they only hold checkpoints of idle sessions."
        )


def _unused_flags(sizing: Sizing) -> Iterator[str]:
    """Flags that lose against others (reference 1.3), or do nothing without others; a log has all of them, said or not."""
    flags = sizing.flags
    yield from idle_flags(flags, among=flags.given - flags.logged)
    if flags.max_mamba_cache_size is not None and flags.mamba_full_memory_ratio is not None:
        yield "--mamba-full-memory-ratio is ignored: --max-mamba-cache-size beats it."
    elif one_slot_a_request(sizing.request) and flags.mamba_full_memory_ratio is not None:
        yield "--mamba-full-memory-ratio is ignored: without the radix cache each running request gets one slot."
    if flags.replicas > 1 and sizing.rules.name != "twinpool":
        yield (
            f"--dp-size {flags.replicas} without --enable-dp-attention starts separate replicas: slots and requests are "
            "those of each replica."
        )
