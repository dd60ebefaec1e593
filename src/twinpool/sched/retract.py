"""Who gives its KV back when a decode step does not fit, and how cautious admission becomes afterwards (reference 6.1, 6.3)."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many

from twinpool.sched.sequence import Sequence

# Output tokens that admission reserves for one running request at most.
CLIP_NEW_TOKENS = 4096
# Share of the remaining output a running request is expected to use: at start, at least, and steps from one to the other.
_START_RATIO, _LEAST_RATIO, _DECAY_STEPS = 0.7, 0.14, 600
# Steps of decode that should fit after a retraction, so that the next one is not immediate.
RETRACT_DECODE_STEPS = 20


def retraction_order(sequences: Iterable[Sequence], *, policy: str) -> list[Sequence]:
    """Victims first: fewest output tokens, ties by longest prompt; policy 'priority' puts low priority before both."""

    def rank(sequence: Sequence) -> tuple[int, int, int]:
        request = sequence.request
        return (request.priority if policy == "priority" else 0, request.n_output, -request.prompt_len)

    return sorted(sequences, key=rank)


class NewTokenRatio:
    """Share of the running requests' remaining output that admission keeps free; falls while all goes well, rises on retraction."""

    def __init__(self, conservativeness: float) -> None:
        self._start = min(_START_RATIO * conservativeness, 1.0)
        self._least = min(_LEAST_RATIO * conservativeness, 1.0)
        self.value = self._start

    def decay(self) -> None:
        """After a decode step that fitted."""
        self.value = max(self._least, self.value - (self._start - self._least) / _DECAY_STEPS)

    def reset(self) -> None:
        """When idle."""
        self.value = self._start

    def after_retraction(self, survivors: Many[Sequence]) -> None:
        """Estimate anew from those that stay: what they have used, plus a few steps, over what they may use."""
        used = sum(s.planned_outputs for s in survivors) + RETRACT_DECODE_STEPS * len(survivors)
        allowed = sum(s.request.params.max_tokens for s in survivors) + 1
        self.value = min(1.0, used / allowed)


def reserved_tokens(sequences: Iterable[Sequence], ratio: float) -> int:
    """KV tokens that running sequences are expected to take yet: unplanned prompt in full, remaining output by `ratio`."""
    total = 0.0
    for sequence in sequences:
        total += max(0, sequence.prefill_end - sequence.planned)
        total += min(sequence.remaining_outputs, CLIP_NEW_TOKENS) * ratio
    return int(total)
