"""What a run leaves behind: one record a request, and the pools over time at a bounded number of moments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

from twinpool.replay.disk import SimDisk
from twinpool.replay.traffic import Arrival
from twinpool.request import Request
from twinpool.sched.scheduler import Scheduler

MOST_SAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request. Times in virtual seconds; first_token_s and finished_s None for one that was refused (refusal: why).

    kv_matched, reused, from_host, from_storage, gaps: of its first match (request.Reuse), tokens. warm_up: counts in no summary.
    """

    session: str
    index: int
    warm_up: bool
    input_tokens: int
    output_tokens: int
    arrival_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    kv_matched: int = 0
    reused: int = 0
    from_host: int = 0
    from_storage: int = 0
    gaps: tuple[tuple[str, int], ...] = ()
    retractions: int = 0
    refusal: str = ""

    @property
    def is_served(self) -> bool:
        """Whether its reuse and its times count in summaries: no warm-up, ended, not refused."""
        return not self.warm_up and self.finished_s is not None and not self.refusal


@dataclass(frozen=True, slots=True)
class PoolSample:
    """Both pools at one moment: KV pages (of page_size tokens) and state slots by owner, and the requests; pages and states on the
    host, and bytes of files on the disk, 0 without such a tier.
    """

    now_s: float
    running: int
    waiting: int
    pages_free: int
    pages_evictable: int
    pages_protected: int
    pages_held: int
    slots_free: int
    slots_evictable: int
    slots_protected: int
    slots_held: int
    host_pages: int = 0
    host_states: int = 0
    disk_bytes: int = 0


def time_weights(samples: Sequence[PoolSample]) -> list[float]:
    """How much each sample counts in a mean over time: seconds up to the next one, or alike where no step took time."""
    spans = [later.now_s - sample.now_s for sample, later in itertools.pairwise(samples)] + [0.0] * bool(samples)
    return spans if any(spans) else [1.0] * len(samples)


class Means:
    """Means over time of every number of a PoolSample, over all samples that were taken: those that are kept for plots are too few
    where short requests have long pauses between them.
    """

    def __init__(self) -> None:
        self._last: PoolSample | None = None
        self._names = [field.name for field in fields(PoolSample)]
        self._seconds, self._count = 0.0, 0
        self._weighted = dict.fromkeys(self._names, 0.0)
        self._plain = dict.fromkeys(self._names, 0.0)

    def see(self, sample: PoolSample) -> None:
        """The next one in time; the one before it lasted until now."""
        last = self._last
        span_s = sample.now_s - last.now_s if last is not None else 0.0
        if last is not None and span_s:
            self._seconds += span_s
            for name in self._names:
                self._weighted[name] += getattr(last, name) * span_s
        for name in self._names:
            self._plain[name] += getattr(sample, name)
        self._count += 1
        self._last = sample

    def of(self, name: str) -> float:
        """The mean of a number; where no time passed all samples count alike, and 0 without any."""
        if self._seconds:
            return self._weighted[name] / self._seconds
        return self._plain[name] / self._count if self._count else 0.0


class Recorder:
    """Collects records and samples of one run."""

    def __init__(self, scheduler: Scheduler, disk: SimDisk | None = None) -> None:
        self.records: list[RequestRecord] = []
        self.samples: list[PoolSample] = []
        self.means = Means()
        self.peak_running = 0
        self._scheduler, self._disk = scheduler, disk
        self._every_s = 0.0
        self._next_s = 0.0

    def refused(self, arrival: Arrival, *, why: str) -> None:
        """A request that can never fit."""
        request = arrival.session.requests[arrival.index]
        self.records.append(
            RequestRecord(
                session=arrival.session.id, index=arrival.index, warm_up=arrival.warm_up, input_tokens=request.input_tokens,
                output_tokens=0, arrival_s=arrival.due_s, refusal=why,
            )
        )  # fmt: skip

    def finished(self, arrival: Arrival, request: Request) -> None:
        """A request that has ended, well or with an error."""
        reuse = request.reuse
        finish = request.finish
        self.records.append(
            RequestRecord(
                session=arrival.session.id, index=arrival.index, warm_up=arrival.warm_up, input_tokens=request.prompt_len,
                output_tokens=request.n_output, arrival_s=request.arrival_s, scheduled_s=request.first_scheduled_s,
                first_token_s=request.first_token_s, finished_s=request.finished_s, kv_matched=reuse.kv_matched,
                reused=reuse.reused, from_host=reuse.from_host, from_storage=reuse.from_storage, gaps=reuse.gaps,
                retractions=request.retractions,
                refusal=finish.message if finish is not None and finish.reason == "error" else "",
            )
        )  # fmt: skip

    def tick(self, now_s: float) -> None:
        """Look at the pools, unless the last look was a moment ago. Intervals double as the run grows."""
        self.peak_running = max(self.peak_running, self._scheduler.n_running)
        if now_s >= self._next_s:
            self._look(now_s)

    def pause(self, now_s: float) -> None:
        """Nothing runs from now until the next arrival: look before and right after it, however short the last look was ago."""
        if self.samples and self.samples[-1].now_s < now_s:
            self._look(now_s)
        self._next_s = now_s

    def _look(self, now_s: float) -> None:
        pages, slots = self._scheduler.counts()
        tier = self._scheduler.book.tree.tier
        self.samples.append(
            PoolSample(
                now_s, self._scheduler.n_running, self._scheduler.n_waiting, pages.free, pages.evictable, pages.protected,
                pages.held, slots.free, slots.evictable, slots.protected, slots.held,
                tier.arena.used_pages if tier is not None else 0, tier.arena.used_slots if tier is not None else 0,
                self._disk.stats.used_bytes if self._disk is not None else 0,
            )
        )  # fmt: skip
        self.means.see(self.samples[-1])
        if len(self.samples) >= MOST_SAMPLES:
            del self.samples[1::2]
            span_s = self.samples[-1].now_s - self.samples[0].now_s
            self._every_s = max(self._every_s * 2, 2 * span_s / MOST_SAMPLES)
        self._next_s = now_s + self._every_s
