"""How much a run could have reused at best: with a cache that never forgets, and with eviction that knows the future."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from twinpool.replay.bound_min import Ints, Stays, most_hits
from twinpool.replay.bound_prefixes import Edge, Prefixes, page_keys
from twinpool.replay.experiment import Experiment
from twinpool.replay.record import RequestRecord
from twinpool.replay.result import ReplayResult
from twinpool.replay.tokens import TokenSpace
from twinpool.replay.trace import Trace

MOST_DEPTHS = 160  # depths at which checkpoints are counted; more cost time and gain less than a hundredth

NOTE = (
    "Upper bounds for this run's order and times of admission, over the same requests; the clairvoyant one takes eviction, "
    "checkpoints and both capacities at their best, each on its own, so that no policy needs to reach it."
)
HOST_NOTE = (
    " With a host tier it may keep KV and checkpoints in all of the device's and all of the host's memory, each kind as if the "
    "other took nothing of the host, without duplicates, and copies are free."
)
DISK_NOTE = (
    " With a disk below it the same goes for the disk, and for the most that was on its way there or back at one time."
)
LPM_NOTE = " Requests admitted at one moment count in order of arrival, which --schedule-policy lpm may change."


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the cache of a run has room for, on device, host and disk together: KV pages of page_size tokens, state slots (None: the
    model has no state).
    """

    page_size: int
    pages: int
    slots: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Prompt tokens of the counted requests that could have been reused at most, and their share of all their prompt tokens.

    infinite: by a cache that never forgets and has a checkpoint at every page. clairvoyant: by any eviction and checkpoint policy
    within the run's capacities. limits: the capacity that makes it: "states", "kv", or "neither" where it is the
    infinite one. note: what the numbers mean.
    """

    infinite_tokens: int
    infinite_token_share: float
    clairvoyant_tokens: int
    clairvoyant_token_share: float
    limits: str
    note: str


class Span(NamedTuple):
    """Pages [begin, end) of one prompt that were computed before, by requests of which the last had ended at until_s.

    moment: when the prompt is matched, an index into the moments of admission.
    """

    begin: int
    end: int
    until_s: float
    moment: int


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What an endless cache knows of a run.

    prompt_tokens: of the counted requests. longest_pages: int64 [counted requests], the longest prefix of each that was computed
    before. spans: of the counted requests. times_s: float64 [moments], when something was admitted, ascending, each once.
    held_pages: int64 [moments], different pages of prompts that running requests hold then.
    """

    prompt_tokens: int
    longest_pages: Ints
    spans: tuple[Span, ...]
    times_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    held_pages: Ints


def bounds(experiment: Experiment, result: ReplayResult, tokens: TokenSpace | None = None) -> Bounds:
    """Upper bounds on the reuse of a run. tokens: the trace's, if they were numbered before."""
    setup, host, disk = result.setup, result.host, result.disk
    host_tokens, host_states = (host.most_tokens, host.most_states) if host is not None else (0, 0)
    disk_pages, disk_states = (disk.most_pages, disk.most_states) if disk is not None else (0, 0)
    capacity = Capacity(
        page_size=setup.page_size,
        pages=(setup.kv_tokens + host_tokens) // setup.page_size + disk_pages,
        slots=setup.slots + host_states + disk_states if experiment.sizing.request.hybrid else None,
    )
    note = NOTE + (HOST_NOTE if host is not None else "") + (DISK_NOTE if disk is not None else "")
    by_arrival = experiment.sizing.resolved.schedule_policy == "fcfs"
    return bounds_of(
        experiment.trace,
        result.records,
        capacity,
        tokens=tokens or TokenSpace(experiment.trace),
        note=note if by_arrival else note + LPM_NOTE,
    )


def bounds_of(
    trace: Trace, records: Sequence[RequestRecord], capacity: Capacity, *, tokens: TokenSpace, note: str = NOTE
) -> Bounds:
    """Upper bounds on the reuse of requests that were run on this trace within these capacities."""
    seen = look(trace, records, page_size=capacity.page_size, tokens=tokens)
    infinite = int(seen.longest_pages.sum())
    in_kv = kv_pages(seen, room_pages=capacity.pages)
    with_state = infinite if capacity.slots is None else state_pages(seen, room_slots(seen, records, capacity.slots))
    clairvoyant = min(in_kv, with_state)
    limits = "neither" if clairvoyant == infinite else "states" if with_state <= in_kv else "kv"
    infinite_tokens, clairvoyant_tokens = infinite * capacity.page_size, clairvoyant * capacity.page_size
    return Bounds(
        infinite_tokens=infinite_tokens,
        infinite_token_share=infinite_tokens / max(seen.prompt_tokens, 1),
        clairvoyant_tokens=clairvoyant_tokens,
        clairvoyant_token_share=clairvoyant_tokens / max(seen.prompt_tokens, 1),
        limits=limits,
        note=note,
    )


def kv_pages(seen: Seen, *, room_pages: int) -> int:
    """Prompt pages that can be found in KV at most.

    A page is found only if it was in memory from the end of the last request before that had it (nobody computed it after
    that) until it is matched. So each page that is found is a stay of one page; stays of one page never overlap, since a
    request that finds it has it too and ends the stay before. At every moment all stays have to fit beside the prompts that
    running requests hold: other pages, since a page that a running request has is in no stay. What MIN keeps of all
    possible stays is therefore at least what any policy can; that a page is of use only after all pages before it is left out.
    """
    first, last = _moments(seen)
    units = np.array([span.end - span.begin for span in seen.spans], np.int64)
    return most_hits(Stays(first, last, units), room_pages - seen.held_pages)


def state_pages(seen: Seen, room_slots: Ints) -> int:
    """Prompt pages before a checkpoint that can still be there, with room for so many checkpoints (int64 [moments]).

    Page d of a prompt is reused only if a checkpoint at or behind its end was kept since the last request before that had that
    page ended: a stay of one slot. A checkpoint serves one prefix of d pages only, so at each depth d different stays take
    different slots, and MIN gives the most requests that can reuse page d; the sum over all d bounds the pages reused. Deeper pages
    have fewer and longer stays, so where depths are skipped the count at the depth before is one for them, too.
    """
    first, last = _moments(seen)
    begin = np.array([span.begin for span in seen.spans], np.int64)
    end = np.array([span.end for span in seen.spans], np.int64)
    longest = np.sort(seen.longest_pages)
    depths = _depths(begin, end)
    total = 0
    for depth, below in zip(depths, [*depths[1:], int(longest[-1]) if len(longest) else 0], strict=True):
        there = (begin <= depth) & (depth < end)
        stays = Stays(first[there], last[there], np.ones(int(there.sum()), np.int64))
        hits = most_hits(stays, room_slots)
        long_enough = len(longest) - np.searchsorted(longest, np.arange(depth, below), side="right")
        total += int(np.minimum(long_enough, hits).sum())
    return total


def room_slots(seen: Seen, records: Sequence[RequestRecord], slots: int) -> Ints:
    """Slots that are no working slot of a running request (int64 [moments]).

    One that was retracted held none for a while, and nobody wrote down when: it counts for nothing.
    """
    spans_s = [
        (record.scheduled_s, record.finished_s)
        for record in records
        if record.scheduled_s is not None
        and record.finished_s is not None
        and record.scheduled_s < record.finished_s
        and not record.retractions
    ]
    begun = np.searchsorted(np.sort([begin for begin, _ in spans_s]), seen.times_s, side="left")
    ended = np.searchsorted(np.sort([end for _, end in spans_s]), seen.times_s, side="right")
    return np.asarray(slots - begun + ended, np.int64)


def look(trace: Trace, records: Sequence[RequestRecord], *, page_size: int, tokens: TokenSpace) -> Seen:
    """Go through a run in order of time: what each prompt has in common with those before, and what is held meanwhile."""
    sessions = {session.id: session for session in trace.sessions}
    prefixes = Prefixes()
    ends: dict[int, Edge] = {}
    times_s: list[float] = []
    held_pages: list[int] = []
    longest: list[int] = []
    spans: list[Span] = []
    for when_s, event, number in _events(trace, records):
        record = records[number]
        if event != _ADMITTED:
            (prefixes.hold if event == _COMPUTED else prefixes.let_go)(ends[number])
            continue
        if not times_s or times_s[-1] != when_s:
            times_s.append(when_s)
            held_pages.append(prefixes.held_pages)
        content = tokens.content(sessions[record.session], record.index)
        # A request without a recorded answer was given one token to say: the first of its prompt (replay/run.py).
        answer = content.answer if len(content.answer) else content.prompt[:1]
        keys = page_keys(content.prompt, answer, page_size=page_size, block_size=trace.block_size)
        parts, ends[number] = prefixes.add(
            keys, n_prompt_pages=record.input_tokens // page_size,
            ends_s=record.finished_s if record.finished_s is not None else np.inf,
        )  # fmt: skip
        if not record.is_served:
            continue
        limit = (record.input_tokens - 1) // page_size  # the last token is always computed
        own = [
            Span(begin, min(end, limit), until_s, len(times_s) - 1) for begin, end, until_s in parts if begin < limit
        ]
        spans += own
        longest.append(own[-1].end if own else 0)
    return Seen(
        prompt_tokens=sum(record.input_tokens for record in records if record.is_served),
        longest_pages=np.array(longest, np.int64), spans=tuple(spans), times_s=np.array(times_s),
        held_pages=np.array(held_pages, np.int64),
    )  # fmt: skip


_ENDED, _ADMITTED, _COMPUTED = range(3)  # in this order where they happen at one time: what is held is held for sure


def _events(trace: Trace, records: Sequence[RequestRecord]) -> Iterator[tuple[float, int, int]]:
    """(seconds, event, place in records) by time. Admissions of one moment go by arrival, and by the trace where that is one, too.

    Only where steps take no time can one of them see another, and there arrivals are those of the trace.
    """
    arrivals = sorted(trace.requests(), key=lambda request: request.arrival_s)
    place = {(request.session, request.index): number for number, request in enumerate(arrivals)}
    events = []
    for number, record in enumerate(records):
        if record.scheduled_s is None:
            continue
        order = (record.arrival_s, place[record.session, record.index])
        events.append((record.scheduled_s, _ADMITTED, order, number))
        first_s, end_s = record.first_token_s, record.finished_s
        if not record.retractions and first_s is not None and end_s is not None and first_s < end_s:
            events += [(first_s, _COMPUTED, order, number), (end_s, _ENDED, order, number)]
    return ((when_s, event, number) for when_s, event, _, number in sorted(events))


def _moments(seen: Seen) -> tuple[Ints, Ints]:
    """First and last moment of each span's stay (int64 [spans] each): after the last request that had it, to its match."""
    until_s = np.array([span.until_s for span in seen.spans])
    first = np.searchsorted(seen.times_s, until_s, side="right").astype(np.int64)
    return first, np.array([span.moment for span in seen.spans], np.int64)


def _depths(begin: Ints, end: Ints) -> list[int]:
    """Pages at which the stays change, from 0 on; of too many those that leave equally many ends between them."""
    edges = np.sort(np.concatenate((begin, end)))
    if len(np.unique(edges)) > MOST_DEPTHS:
        edges = edges[np.linspace(0, len(edges) - 1, MOST_DEPTHS).astype(np.int64)]
    return [int(depth) for depth in np.unique(np.append(edges, 0))]
