"""The scheduler's door: add, abort, finish, schedule, commit. Wiring only; each rule is in the module named after it."""

from __future__ import annotations

from twinpool.clock import Clock
from twinpool.errors import BadRequest, QueueFull
from twinpool.memory.pools import Pool
from twinpool.memory.snapshot import PoolCounts
from twinpool.prefix.tree import PrefixTree
from twinpool.request import Finish, Phase, Request
from twinpool.sched.admission import check_can_ever_fit
from twinpool.sched.batch import build, build_run, pages_short_for_decode
from twinpool.sched.book import Book, Delta, Retraction
from twinpool.sched.commit import apply, release_if_finished, spoil
from twinpool.sched.fetch import look
from twinpool.sched.queue import WaitQueue
from twinpool.sched.requeue import begin_again, close_tiers_if_worn_out, give_up, send_back
from twinpool.sched.retract import RETRACT_DECODE_STEPS, NewTokenRatio, retraction_order
from twinpool.sched.shape import SchedulerShape
from twinpool.sched.storage import Storage
from twinpool.sched.stride import Horizon, pages_for, stride
from twinpool.step import HostCopy, Order, StepPlan, StepResult
from twinpool.units import ceil_div


class Scheduler:
    """Continuous batching over two pools. Not thread-safe: one thread calls it."""

    def __init__(
        self, *, shape: SchedulerShape, pages: Pool, slots: Pool, tree: PrefixTree, clock: Clock,
        orders: list[Order] | None = None, storage: Storage | None = None,
    ) -> None:  # fmt: skip
        """orders: the list that tree and pools write to as well, if they do; storage: a disk tier below the tree's host tier."""
        self.shape = shape
        self.book = Book(
            shape=shape, pages=pages, slots=slots, tree=tree, clock=clock,
            waiting=WaitQueue(shape.schedule_policy), ratio=NewTokenRatio(shape.schedule_conservativeness),
            orders=orders if orders is not None else [], storage=storage,
        )  # fmt: skip
        self._step = 0

    @property
    def has_work(self) -> bool:
        """Something waits, runs, or is in flight."""
        return bool(self.book.waiting or self.book.running)

    @property
    def n_running(self) -> int:
        """Requests that hold slots."""
        return len(self.book.running)

    @property
    def n_waiting(self) -> int:
        """Requests in the queue."""
        return len(self.book.waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Raises BadRequest if it can never fit, QueueFull beyond --max-queued-requests."""
        check_can_ever_fit(self.book, request)
        if request.rid in self.book.running or self.book.waiting.find(request.rid) is not None:
            raise BadRequest(f"request id {request.rid} is in use.", field="rid")
        limit = self.shape.max_queued_requests
        if limit is not None and len(self.book.waiting) >= limit:
            raise QueueFull(
                f"{len(self.book.waiting)} requests are waiting and --max-queued-requests allows {limit}: try again later."
            )
        self.book.waiting.push(request)
        look(self.book, request)

    def finish(self, rid: int, finish: Finish) -> bool:
        """End a request now (stop string found, client gone). What it has computed is published; False if it is not known."""
        waiting = self.book.waiting.find(rid)
        if waiting is not None:
            self.book.waiting.remove(waiting)
            self.book.fetched.pop(rid, None)
            if self.book.storage is not None:
                self.book.storage.forget(rid)
            waiting.phase = Phase.FINISHED
            self.book.tell(Delta(waiting, finish=finish))
            return True
        sequence = self.book.running.get(rid)
        if sequence is None or sequence.finish is not None:
            return False
        sequence.finish = finish
        release_if_finished(self.book, sequence)
        return True

    def abort(self, rid: int) -> bool:
        """End a request because nobody wants it any more; False if it is not known."""
        return self.finish(rid, Finish("abort", message="the request was cancelled"))

    def schedule(self, horizon: Horizon | None = None) -> StepPlan | None:
        """The next step, or None: nothing to do, or everything in flight must be committed first (before a retraction).

        horizon: allows a plan of several decode steps at once, for an executor that takes them (replay).
        """
        book = self.book
        steps = stride(book, horizon) if horizon is not None else 1
        if steps > 1:
            assert book.tree.room_pages(pages_for(list(book.running.values()), steps, self.shape.page_size))
            self._step += steps
            return build_run(book, self._step, steps)
        if not book.tree.room_pages(pages_short_for_decode(book)):
            if book.in_flight:
                return None
            self._retract()
        self._step += 1
        plan = build(book, self._step)
        if plan is None and not book.in_flight and book.running:
            # Prefills hold the pool between them and none can go on: the first one in may have what the others hold.
            self._retract(to_unblock=True)
            plan = build(book, self._step)
        if not self.has_work:
            book.ratio.reset()
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Delta]:
        """Apply a step's result. Returns all news since the last call."""
        if self.book.lost_in_a_row and any(isinstance(one, HostCopy) and not one.to_host for one in plan.orders):
            self.book.lost_in_a_row = 0
        apply(self.book, plan, result)
        return self.book.take_deltas()

    def fail(self, plan: StepPlan, message: str) -> list[Delta]:
        """A step could not be run at all: end its requests, publishing nothing of them."""
        for _, sequence in self.book.in_flight.pop(plan.step):
            sequence.in_flight -= 1
            spoil(sequence, message)
            release_if_finished(self.book, sequence)
        return self.book.take_deltas()

    def drop(self, plan: StepPlan) -> None:
        """A step counts as never planned; `begin_again` must follow."""
        for _, sequence in self.book.in_flight.pop(plan.step):
            sequence.in_flight -= 1

    def begin_again(self, why: str) -> list[Delta]:
        """What the pools hold is not what it should be: give up the cache, and send back to the queue what runs, to be computed from its
        tokens. When it happens too often the tiers below the device are given up; a request to which it happens even then ends with an
        error that says `why`. Nothing may be in flight.
        """
        begin_again(self.book, why)
        self.forget()
        close_tiers_if_worn_out(self.book)
        return self.book.take_deltas()

    def take_deltas(self) -> list[Delta]:
        """News that came without a step (aborted while waiting)."""
        return self.book.take_deltas()

    def take_retractions(self) -> list[Retraction]:
        """Retractions since the last call, for the log."""
        retractions, self.book.retractions = self.book.retractions, []
        return retractions

    def flush(self) -> bool:
        """Forget the prefix cache; False (and nothing happens) while there is work."""
        if self.has_work or self.book.in_flight:
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Empty the prefix cache, while nothing runs: requests that wait find nothing."""
        self.book.orders.clear()
        self.book.tree.reset()

    def _retract(self, *, to_unblock: bool = False) -> None:
        """Give back KV until the next decode step fits (or one prefill can go on), keeping at least one request."""
        book = self.book
        pages_before, slots_before, ratio_before = book.pages.available, book.slots.available, book.ratio.value
        if to_unblock:
            victims = list(reversed(book.running.values()))
        else:
            victims = retraction_order(book.running.values(), policy=self.shape.retraction_policy)
        n_retracted = 0
        while (to_unblock and n_retracted == 0) or not book.tree.room_pages(pages_short_for_decode(book)):
            if len(book.running) == 1:
                give_up(book, victims[n_retracted])
                break
            send_back(book, victims[n_retracted])
            n_retracted += 1
        if n_retracted:
            survivors = list(book.running.values())
            book.ratio.after_retraction(survivors)
            book.tree.evict(pages=ceil_div(len(survivors) * RETRACT_DECODE_STEPS, self.shape.page_size))
            gained_tokens = (book.pages.available - pages_before) * self.shape.page_size
            gained_slots = book.slots.available - slots_before
            book.retractions.append(
                Retraction(n_retracted, gained_tokens, gained_slots, ratio_before, book.ratio.value)
            )

    def counts(self) -> tuple[PoolCounts, PoolCounts]:
        """KV pages and state slots by owner: (pages, slots). `held` is what running requests own."""
        book, tree = self.book, self.book.tree
        held_pages = sum(len(s.own_pages(self.shape.page_size)) for s in book.running.values())
        held_slots = sum(1 + len(s.tracks) for s in book.running.values())
        pages = PoolCounts(
            total=book.pages.count, free=book.pages.available, evictable=tree.evictable_pages,
            protected=tree.protected_pages, held=held_pages,
        )  # fmt: skip
        slots = PoolCounts(
            total=book.slots.count, free=book.slots.available, evictable=tree.evictable_slots,
            protected=tree.protected_slots, held=held_slots,
        )  # fmt: skip
        return pages, slots

    def check(self) -> None:
        """Assert conservation of both pools and the tree's own invariants."""
        for counts in self.counts():
            counts.check()
        self.book.tree.check()
