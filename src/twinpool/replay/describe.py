"""A trace in numbers: lengths, times, turns, reuse with an infinite cache, and what the numbers leave out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from twinpool.replay.reuse import Match, matches
from twinpool.replay.trace import Session, Trace
from twinpool.units import share


@dataclass(frozen=True, slots=True)
class Spread:
    """How a quantity is spread over `count` values, in its own unit; percentiles are values that occur."""

    count: int
    mean: float
    p10: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class ReuseFacts:
    """What prompts share, with a cache that never forgets.

    blocks, tokens: in all prompts, and seen before in the same prefix chain; a share is 0 to 1, 0 for no blocks.
    duplicates: requests whose blocks and length an earlier prompt had.
    context_drops: requests that do not extend their session's previous prompt; dropped_tokens: those of that prompt
    after the common prefix, in full blocks.
    shared_prefix_tokens: of each session's first prompt, the tokens that other sessions had sent; None where block ids
    cannot tell.
    """

    blocks: int
    seen_blocks: int
    block_share: float
    tokens: int
    seen_tokens: int
    token_share: float
    duplicates: int
    context_drops: int
    dropped_tokens: Spread | None
    shared_prefix_tokens: Spread | None


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """A trace in numbers; None where the recorder did not keep what a number needs.

    duration_s: first to last arrival on the trace's clock. session_s: first arrival of a session to the end of its last
    answer (to its arrival, where the end is unknown). context_tokens: input plus output. growth_tokens: input minus the
    previous input of the session, where the prompt was extended. peak_sessions, median_sessions: sessions between first
    arrival and last answer at the same time; the median is over time.
    """

    name: str
    format: str
    block_size: int | None
    scope: str
    requests: int
    sessions: int
    sub_sessions: int
    rejected: int
    duration_s: float | None
    session_s: Spread | None
    peak_sessions: int | None
    median_sessions: int | None
    turns: Spread
    input_tokens: Spread
    output_tokens: Spread
    context_tokens: Spread
    growth_tokens: Spread | None
    think_s: Spread | None
    api_time_s: Spread | None
    preamble_tokens: Spread | None
    total_input_tokens: int
    total_output_tokens: int
    reuse: ReuseFacts | None
    notes: tuple[str, ...]


def describe(trace: Trace) -> TraceFacts:
    """The numbers of a trace that has at least one session."""
    found = list(matches(trace)) if trace.block_size is not None else []
    requests = list(trace.requests())
    inputs = [request.input_tokens for request in requests]
    outputs = [request.output_tokens for request in requests]
    spans = [_span_s(session) for session in trace.sessions]
    turned = any(len(session.requests) > 1 for session in trace.sessions)
    peak, median = concurrency(spans) if turned and trace.clock == "trace" else (None, None)
    arrivals_s = [request.arrival_s for request in requests]
    return TraceFacts(
        name=trace.name,
        format=trace.format,
        block_size=trace.block_size,
        scope=trace.scope,
        requests=len(requests),
        sessions=len(trace.sessions),
        sub_sessions=sum(session.parent is not None for session in trace.sessions),
        rejected=len(trace.rejected),
        duration_s=max(arrivals_s) - min(arrivals_s) if trace.clock == "trace" else None,
        session_s=spread(end - start for start, end in spans) if turned else None,
        peak_sessions=peak,
        median_sessions=median,
        turns=_spread([len(session.requests) for session in trace.sessions]),
        input_tokens=_spread(inputs),
        output_tokens=_spread(outputs),
        context_tokens=_spread([a + b for a, b in zip(inputs, outputs, strict=True)]),
        growth_tokens=spread(_growth_tokens(found)),
        think_s=spread(request.think_s for request in requests if request.think_s is not None),
        api_time_s=spread(request.api_time_s for request in requests if request.api_time_s is not None),
        preamble_tokens=spread(
            total for session in trace.sessions if (total := session.tool_tokens + session.system_tokens)
        ),
        total_input_tokens=sum(inputs),
        total_output_tokens=sum(outputs),
        reuse=_reuse(trace, found) if trace.block_size is not None else None,
        notes=trace.notes,
    )


def spread(values: Iterable[float]) -> Spread | None:
    """How values are spread, or None without any. Percentiles by nearest rank."""
    listed = list(values)
    return _spread(listed) if listed else None


def _spread(values: Sequence[float]) -> Spread:
    ordered = np.asarray(values)
    p10, p50, p90, p99 = np.percentile(ordered, [10, 50, 90, 99], method="inverted_cdf").tolist()
    return Spread(len(ordered), float(ordered.mean()), p10, p50, p90, p99, ordered.max().item())


def concurrency(spans: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """(most, median over time) of open (start_s, end_s) intervals; one that starts as another ends overlaps it."""
    starts = sorted((start, 1) for start, _ in spans)
    ends = sorted((end, -1) for _, end in spans)
    events = sorted([*starts, *ends], key=lambda event: (event[0], -event[1]))
    open_now, most = 0, 0
    lasted_s: dict[int, float] = {}
    for index, (at_s, step) in enumerate(events):
        open_now += step
        most = max(most, open_now)
        until_s = events[index + 1][0] if index + 1 < len(events) else at_s
        lasted_s[open_now] = lasted_s.get(open_now, 0.0) + until_s - at_s
    half_s = sum(lasted_s.values()) / 2
    passed_s = 0.0
    for count in sorted(lasted_s):
        passed_s += lasted_s[count]
        if passed_s >= half_s > 0:
            return most, count
    return most, most


def _span_s(session: Session) -> tuple[float, float]:
    ends = (request.arrival_s + (request.api_time_s or 0.0) for request in session.requests)
    return session.requests[0].arrival_s, max(ends)


def _growth_tokens(found: Iterable[Match]) -> list[int]:
    """Input minus previous input, of requests that extend the previous prompt."""
    return [
        match.request.input_tokens - match.previous.input_tokens
        for match in found
        if match.previous is not None and not match.lost_tokens
    ]


def _reuse(trace: Trace, found: Sequence[Match]) -> ReuseFacts:
    blocks = sum(len(match.request.blocks) for match in found)
    seen_blocks = sum(match.seen_blocks for match in found)
    tokens = sum(match.request.input_tokens for match in found)
    seen_tokens = sum(match.seen_tokens for match in found)
    drops = [match.lost_tokens for match in found if match.lost_tokens]
    firsts = [match.seen_tokens for match in found if match.previous is None]
    return ReuseFacts(
        blocks=blocks,
        seen_blocks=seen_blocks,
        block_share=share(seen_blocks, blocks),
        tokens=tokens,
        seen_tokens=seen_tokens,
        token_share=seen_tokens / tokens,
        duplicates=sum(match.duplicate for match in found),
        context_drops=len(drops),
        dropped_tokens=spread(drops),
        shared_prefix_tokens=spread(firsts) if trace.scope == "global" else None,
    )
