"""The per-batch log: an observer that prints each prefill, decode steps now and then, and retractions (reference 2.2,
2.3).
"""

from __future__ import annotations

import logging

from twinpool.batchlog import DecodeBatch, PrefillBatch, decode_line, prefill_line, retract_line
from twinpool.clock import Clock
from twinpool.engine.core import StepReport
from twinpool.request import Request
from twinpool.sched.book import Book, Retraction

log = logging.getLogger("twinpool.engine")


class BatchLog:
    """decode_log_interval: decode steps between two lines. Rates are tokens over the time since the line before."""

    def __init__(self, *, book: Book, clock: Clock, decode_log_interval: int) -> None:
        self._book = book
        self._interval = decode_log_interval
        self._prefill_since_s = self._decode_since_s = clock.now_s()
        self._decode_steps = 0
        self._decode_tokens = 0

    def on_step(self, report: StepReport) -> None:
        """A step was committed."""
        n_decode = report.plan.n_decode_rows
        if n_decode < len(report.plan.rows):
            self._prefill(report)
        if n_decode:
            if self._decode_steps == 0:
                # The time that nobody decoded is nobody's throughput.
                self._decode_since_s = report.now_s - report.result.duration_s
            self._decode_steps += 1
            self._decode_tokens += n_decode
            if self._decode_steps >= self._interval:
                self._decode(report)

    def on_finish(self, request: Request) -> None:
        """Nothing is printed for a single request."""

    def on_retraction(self, retraction: Retraction) -> None:
        """Requests went back to the queue because KV ran short."""
        log.info(
            retract_line(
                requests=retraction.n_requests,
                tokens=retraction.n_new_tokens_gained,
                slots=retraction.n_slots_gained,
                ratio_before=retraction.ratio_before,
                ratio_after=retraction.ratio_after,
            )
        )

    def _prefill(self, report: StepReport) -> None:
        rows = [row for row in report.plan.rows if row.tokens is not None]
        joined = {request.rid for request in report.plan.joined}
        snapshot = report.snapshot
        new_tokens = sum(row.end - row.start for row in rows)
        # A first line after a pause counts the step's own time only.
        elapsed_s = min(report.now_s - self._prefill_since_s, max(report.result.duration_s, 1e-9) * 10)
        self._prefill_since_s = report.now_s
        log.info(
            prefill_line(
                PrefillBatch(
                    new_seqs=sum(row.rid in joined for row in rows),
                    new_tokens=new_tokens,
                    cached_tokens=sum(row.start for row in rows if row.rid in joined),
                    full_usage=snapshot.pages.usage,
                    mamba_usage=snapshot.slots.usage,
                    running=snapshot.n_running,
                    queued=snapshot.n_waiting,
                    pending_tokens=self._pending_tokens(),
                    tokens_per_s=new_tokens / max(elapsed_s, 1e-9),
                )
            )
        )

    def _pending_tokens(self) -> int:
        """Prompt tokens that are in no plan yet, of running and of waiting requests."""
        running = sum(max(0, s.prefill_end - s.planned) for s in self._book.running.values())
        return running + sum(request.n_tokens for request in self._book.waiting)

    def _decode(self, report: StepReport) -> None:
        snapshot = report.snapshot
        elapsed_s = max(report.now_s - self._decode_since_s, 1e-9)
        log.info(
            decode_line(
                DecodeBatch(
                    running=snapshot.n_running,
                    full_tokens=snapshot.pages.used * snapshot.page_size,
                    full_usage=snapshot.pages.usage,
                    mamba_slots=snapshot.slots.used,
                    mamba_usage=snapshot.slots.usage,
                    tokens_per_s=self._decode_tokens / elapsed_s,
                    queued=snapshot.n_waiting,
                )
            )
        )
        self._decode_steps = self._decode_tokens = 0
