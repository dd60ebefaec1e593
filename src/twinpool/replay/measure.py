"""Measuring a live endpoint: time to the first token over prompt lengths, time of a decode step over batches and contexts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from twinpool.clock import Clock
from twinpool.replay.endpoint import Answer, Endpoint
from twinpool.units import ceil_div

BATCHES = (1, 2, 4, 8)
_SHORT_TOKENS = 64
_GROWTH = 4
_STEPS = 32
_LEAST_STEPS = 4
_PREFILL_SHARE = 0.5  # of the time, for prompts; the rest is for decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """context_tokens: prompt and answer; pool_tokens: of all requests together; running: requests at once; vocab_size: token ids;
    chunk_tokens: of one prefill step (None: prompts are whole); seconds: for everything; repeats: of each point.
    """

    context_tokens: int
    pool_tokens: int
    running: int
    vocab_size: int
    chunk_tokens: int | None
    seconds: float
    repeats: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Time to the first token of a prompt of so many tokens that was alone: the median, in seconds."""

    tokens: int
    measured_s: float


@dataclass(frozen=True, slots=True)
class Decode:
    """Time of a decode step of a batch, the median of means over about `steps` steps from the context on, in seconds."""

    context_tokens: int
    batch: int
    steps: int
    measured_s: float


class Measurement:
    """One session with an endpoint. seed: of the prompts, which must never have been sent before.

    say: hears of each point as it is measured.
    """

    def __init__(
        self, endpoint: Endpoint, limits: Limits, *, clock: Clock, seed: int, say: Callable[[str], None] = lambda _: None
    ) -> None:  # fmt: skip
        self._endpoint, self._limits, self._clock, self._say = endpoint, limits, clock, say
        self._random = random.Random(seed)
        self._began_s = clock.now_s()

    def run(self) -> tuple[list[Prefill], list[Decode]]:
        """Measure until everything is measured or the next point would take too long. Raises TwinpoolError."""
        self._ask(_SHORT_TOKENS, 1, output_tokens=2)  # connections, buffers, compilation
        prefills = list(self._prefills())
        return prefills, list(self._decodes(prefills))

    def _prefills(self) -> Iterator[Prefill]:
        limits = self._limits
        most_tokens = min(limits.context_tokens, limits.pool_tokens) - 1
        tokens, expected_s = min(_SHORT_TOKENS, most_tokens), 0.0
        while tokens <= most_tokens and self._has_time(expected_s * limits.repeats, _PREFILL_SHARE):
            times_s = [_first_s(self._ask(tokens, 1, output_tokens=1)[0]) for _ in range(limits.repeats)]
            yield Prefill(tokens, median(times_s))
            self._say(f"prefill of {tokens:,}: {median(times_s) * 1e3:.1f} ms")
            expected_s = median(times_s) * _GROWTH
            tokens *= _GROWTH

    def _decodes(self, prefills: Sequence[Prefill]) -> Iterator[Decode]:
        """Short contexts first, then the longest that a batch of its size finds room and time for."""
        if not prefills:
            return
        shortest = prefills[0]
        step_s = shortest.measured_s
        for batch in BATCHES:
            if self._fits(batch, shortest, step_s) and (point := self._decode(shortest.tokens, batch)) is not None:
                step_s = point.measured_s
                yield point
        for batch in BATCHES:
            fitting = [one for one in prefills[1:] if self._fits(batch, one, step_s)]
            if fitting and (point := self._decode(fitting[-1].tokens, batch)) is not None:
                step_s = max(step_s, point.measured_s)
                yield point

    def _fits(self, batch: int, prefill: Prefill, step_s: float) -> bool:
        limits = self._limits
        steps = self._steps(prefill.tokens, batch)
        tokens = prefill.tokens + steps
        room = batch <= limits.running and tokens <= limits.context_tokens and batch * tokens <= limits.pool_tokens
        expected_s = limits.repeats * (batch * prefill.measured_s + steps * step_s)
        # A point takes at most a quarter of what is left: several contexts and batches are worth more than the longest.
        return room and self._has_time(expected_s * 4 if prefill.tokens > _SHORT_TOKENS else expected_s, 1.0)

    def _steps(self, context_tokens: int, batch: int) -> int:
        """Answers long enough that all rows decode together for a while after the last prompt is done."""
        return _STEPS + (batch - 1) * ceil_div(context_tokens, self._limits.chunk_tokens or context_tokens)

    def _decode(self, context_tokens: int, batch: int) -> Decode | None:
        """None if the rows were never all decoding at once."""
        steps = self._steps(context_tokens, batch)
        runs = (self._ask(context_tokens, batch, output_tokens=steps) for _ in range(self._limits.repeats))
        times_s = [found for answers in runs if (found := together_s(answers)) is not None]
        if not times_s:
            return None
        self._say(f"decode of {batch} at {context_tokens:,}: {median(times_s) * 1e3:.2f} ms a step")
        return Decode(context_tokens, batch, steps, median(times_s))

    def _ask(self, tokens: int, batch: int, *, output_tokens: int) -> list[Answer]:
        """Answers to prompts that nobody has sent: random ids, away from both ends of the vocabulary, where special tokens are."""
        low, high = self._limits.vocab_size // 8, max(2, self._limits.vocab_size // 2)
        prompts = [[self._random.randrange(low, high) for _ in range(tokens)] for _ in range(batch)]
        return self._endpoint.ask(prompts, output_tokens=output_tokens)

    def _has_time(self, expected_s: float, share: float) -> bool:
        return self._clock.now_s() - self._began_s + expected_s <= self._limits.seconds * share


def _first_s(answer: Answer) -> float:
    return answer.events_s[0] - answer.sent_s


def together_s(answers: Sequence[Answer]) -> float | None:
    """Seconds of a step while all answers were being decoded: from the last first event to the first last one.

    An event may hold several tokens (characters that were not complete), so tokens are spread over an answer's events. None if there
    were fewer than a few steps.
    """
    begin_s = max(answer.events_s[0] for answer in answers)
    end_s = min(answer.events_s[-1] for answer in answers)
    shares = []
    for answer in answers:
        inside = sum(begin_s < when_s <= end_s for when_s in answer.events_s)
        shares.append(inside * (answer.output_tokens - 1) / max(1, len(answer.events_s) - 1))
    steps = sum(shares) / len(shares)
    return (end_s - begin_s) / steps if steps >= _LEAST_STEPS and end_s > begin_s else None
