"""Invented sessions with known numbers: turns, lengths, think times, a shared system prompt and forks; seeded."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from twinpool.config.field import Flag, options_of
from twinpool.replay.formats.assemble import Draft, build_session
from twinpool.replay.trace import Session, Trace, TraceRequest

FORMAT = "synthetic"
MOST_TOKENS = 10_000_000  # a length beyond any context would take all memory instead of telling so


@dataclass(frozen=True, kw_only=True)
class SyntheticOptions:
    """Workload. Raises ConfigError naming the flag whose value is out of range."""

    sessions: Annotated[int, Flag("Sessions.", metavar="N", at_least=1, at_most=1_000_000)] = 16
    turns: Annotated[int, Flag("Requests of a session.", metavar="N", at_least=1, at_most=1_000_000)] = 10
    system_tokens: Annotated[
        int, Flag("System prompt that all sessions share.", metavar="TOKENS", at_least=0, at_most=MOST_TOKENS)
    ] = 2048  # fmt: skip
    input_tokens: Annotated[
        int, Flag("New tokens that a turn adds to the prompt, on average.", metavar="TOKENS", at_least=1, at_most=MOST_TOKENS)
    ] = 512  # fmt: skip
    output_tokens: Annotated[
        int, Flag("Tokens of an answer, on average.", metavar="TOKENS", at_least=1, at_most=MOST_TOKENS)
    ] = 256
    think_s: Annotated[
        float, Flag("Seconds from an answer to the session's next request, on average.", metavar="S", at_least=0, at_most=1e9)
    ] = 10.0  # fmt: skip
    interval_s: Annotated[
        float, Flag("Seconds between the starts of sessions, on average.", metavar="S", at_least=0, at_most=1e9)
    ] = 5.0  # fmt: skip
    tokens_per_s: Annotated[
        float, Flag("Speed of answers that arrival times assume.", metavar="N", at_least=1e-3)
    ] = 50.0  # fmt: skip
    variation: Annotated[
        float,
        Flag("Spread of lengths and think times: sigma of a log-normal; 0: all are average.",
            metavar="F", at_least=0, at_most=5),
    ] = 0.5  # fmt: skip
    fork_share: Annotated[
        float,
        Flag("Share of sessions that fork off an earlier one's turn.", metavar="F", at_least=0, at_most=1),
    ] = 0.0  # fmt: skip
    block_size: Annotated[int, Flag("Tokens of a block.", metavar="TOKENS", at_least=1, at_most=MOST_TOKENS)] = 16
    seed: Annotated[int, Flag("Seed; the same one gives the same trace.", metavar="N", at_least=0)] = 0

    def __post_init__(self) -> None:
        for option in options_of(SyntheticOptions):
            option.check(getattr(self, option.field))


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a session's first prompt extends: ids of full blocks, tokens, and when that was answered."""

    ids: list[int]
    tokens: int
    end_s: float
    session: str | None


def _origin_of(request: TraceRequest) -> _Origin:
    """A request to fork off."""
    end_s = request.arrival_s + (request.api_time_s or 0.0)
    return _Origin(request.blocks.tolist(), request.input_tokens, end_s, request.session)


def synthesize(options: SyntheticOptions) -> Trace:
    """Sessions that start at random (exponential gaps) and extend their prompt each turn by the answer and new tokens.

    Answers are taken to last output / tokens_per_s. Blocks that lie whole in the system prompt are shared by all
    sessions; a fork also shares the full blocks of one prompt of the session it forks from, and adds its own tokens.
    """
    draw = _Draws(options)
    system_ids = [draw.block() for _ in range(options.system_tokens // options.block_size)]
    root = _Origin(system_ids, options.system_tokens, 0.0, None)
    sessions: list[Session] = []
    start_s = 0.0
    for index in range(options.sessions):
        forks = index > 0 and draw.random.random() < options.fork_share
        origin = _origin_of(draw.random.choice(draw.random.choice(sessions).requests)) if forks else root
        drafts = _conversation(options, draw, origin, begin_s=max(start_s, origin.end_s))
        sessions.append(build_session(f"s{index}", drafts, origin_s=0.0, parent=origin.session))
        start_s += draw.gap_s()
    ordered = sorted(sessions, key=lambda session: session.requests[0].arrival_s)
    return Trace(f"synthetic seed {options.seed}", FORMAT, options.block_size, "global", "trace", tuple(ordered))


def _conversation(options: SyntheticOptions, draw: _Draws, origin: _Origin, *, begin_s: float) -> list[Draft]:
    """One session's requests, the first at begin_s, its prompt an extension of the origin's."""
    ids, tokens, at_s = list(origin.ids), origin.tokens, begin_s
    drafts: list[Draft] = []
    think_s = None
    for turn in range(options.turns):
        tokens += draw.length(options.input_tokens)
        ids += [draw.block() for _ in range(tokens // options.block_size - len(ids))]
        output_tokens = draw.length(options.output_tokens)
        duration_s = output_tokens / options.tokens_per_s
        blocks = np.array(ids, dtype=np.int64)
        blocks.flags.writeable = False
        drafts.append(Draft(FORMAT, turn, at_s, tokens, output_tokens, blocks, think_s, duration_s))
        tokens += output_tokens
        think_s = draw.varied(options.think_s)
        at_s += duration_s + think_s
    return drafts


class _Draws:
    """Every random choice, from one generator; and fresh block ids."""

    def __init__(self, options: SyntheticOptions) -> None:
        self.random = random.Random(options.seed)
        self._variation = options.variation
        self._interval_s = options.interval_s
        self._ids: Iterator[int] = itertools.count()

    def block(self) -> int:
        """A block id that was not used yet."""
        return next(self._ids)

    def varied(self, mean: float) -> float:
        """A log-normal value with this mean."""
        if self._variation == 0:
            return mean
        return mean * self.random.lognormvariate(-(self._variation**2) / 2, self._variation)

    def length(self, mean_tokens: int) -> int:
        """A length in tokens, at least 1."""
        return max(1, round(self.varied(mean_tokens)))

    def gap_s(self) -> float:
        """Seconds to the next session's start."""
        return self.random.expovariate(1 / self._interval_s) if self._interval_s else 0.0
