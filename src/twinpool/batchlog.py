"""Lines printed while serving: prefill batches, decode steps now and then, retractions, tiers (reference 2.2, 2.3)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.units import count


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBatch:
    """One prefill forward. Usages are shares from 0 to 1 in which evictable cached data counts as free.

    pending_tokens: prompt tokens that still wait; iteration: None prints none.
    """

    new_seqs: int
    new_tokens: int
    cached_tokens: int
    full_usage: float
    mamba_usage: float
    running: int
    queued: int
    pending_tokens: int
    tokens_per_s: float
    iteration: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatch:
    """Decode steps since the last line. full_tokens: KV tokens, mamba_slots: state slots, in use and not evictable."""

    running: int
    full_tokens: int
    full_usage: float
    mamba_slots: int
    mamba_usage: float
    tokens_per_s: float
    queued: int
    iteration: int | None = None


def _iteration(number: int | None) -> str:
    return "" if number is None else f" [{number}]"


def prefill_line(batch: PrefillBatch) -> str:
    """The line of one prefill forward of a hybrid model (reference 2.2)."""
    return (
        f"Prefill batch{_iteration(batch.iteration)}, #new-seq: {batch.new_seqs}, #new-token: {batch.new_tokens}, "
        f"#cached-token: {batch.cached_tokens}, full token usage: {batch.full_usage:.2f}, "
        f"mamba usage: {batch.mamba_usage:.2f}, #running-req: {batch.running}, #queue-req: {batch.queued}, "
        f"#pending-token: {batch.pending_tokens}, cuda graph: False, "
        f"input throughput (token/s): {batch.tokens_per_s:.2f}"
    )


def decode_line(batch: DecodeBatch) -> str:
    """The line of --decode-log-interval decode steps of a hybrid model (reference 2.2)."""
    return (
        f"Decode batch{_iteration(batch.iteration)}, #running-req: {batch.running}, #full token: {batch.full_tokens}, "
        f"full token usage: {batch.full_usage:.2f}, mamba num: {batch.mamba_slots}, "
        f"mamba usage: {batch.mamba_usage:.2f}, cuda graph: False, "
        f"gen throughput (token/s): {batch.tokens_per_s:.2f}, #queue-req: {batch.queued}"
    )


def retract_line(*, requests: int, tokens: int, slots: int, ratio_before: float, ratio_after: float) -> str:
    """Requests went back to the queue, which freed KV tokens and state slots (reference 2.3)."""
    return (
        f"KV cache pool is full. Retract requests. #retracted_reqs: {requests}, #new_tokens_gained: {tokens}, "
        f"#mamba_num_gained: {slots}, #new_token_ratio: {ratio_before:.4f} -> {ratio_after:.4f}"
    )


def lost_line(*, nodes: int, tokens: int) -> str:
    """write_back had no room on the host for so many nodes of the tree that left the device, and dropped their KV (reference 2.3)."""
    return (
        f"write_back: KV subtree dropped without backup due to host memory pressure, {count(nodes, 'node')} of "
        f"{count(tokens, 'token')}"
    )


def prefetch_line(rid: int, *, completed_tokens: int, matched_tokens: int) -> str:
    """A request's prefix was read from the disk: how long it is then, and how much of it memory had (reference 2.3)."""
    loaded = completed_tokens - matched_tokens
    return f"HiCache prefetch success req={rid} completed={completed_tokens} matched={matched_tokens} loaded={loaded}"
