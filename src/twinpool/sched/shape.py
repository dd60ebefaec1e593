"""What the scheduler must know of the machine and the options: plain numbers, fixed at boot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerShape:
    """Limits and rules of one scheduler.

    page_size: tokens per KV page; grid_tokens, track_tokens: checkpoint grids in prefill and decode (reference 3.2).
    strategy: name of the radix-cache strategy; track_slots: slots a request gets beside its working slot (reference 3.3).
    chunked_prefill_size: tokens of one step (decode rows and prefill chunks together), None when chunking is off.
    max_prefill_tokens: prefill tokens of one step; prefill_max_requests: prefill rows of one step, None for no limit.
    context_len: longest prompt + output, tokens.
    """

    page_size: int
    grid_tokens: int
    track_tokens: int
    strategy: str
    track_slots: int
    radix_cache: bool
    overlap: bool
    max_running_requests: int
    max_queued_requests: int | None
    chunked_prefill_size: int | None
    max_prefill_tokens: int
    prefill_max_requests: int | None
    context_len: int
    schedule_policy: str = "fcfs"
    schedule_conservativeness: float = 1.0
    retraction_policy: str = "length"

    @property
    def is_lazy(self) -> bool:
        """Whether a second track slot is taken only at a boundary (reference 4.7)."""
        return self.strategy == "extra_buffer_lazy"
