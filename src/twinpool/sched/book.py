"""The scheduler's state: who waits, who runs, what is in flight, and what must be told to whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinpool.clock import Clock
from twinpool.memory.pools import Pool
from twinpool.prefix.tree import PrefixTree
from twinpool.request import Finish, Request
from twinpool.sched.queue import WaitQueue
from twinpool.sched.retract import NewTokenRatio
from twinpool.sched.sequence import Sequence
from twinpool.sched.shape import SchedulerShape
from twinpool.sched.storage import Fetched, Storage
from twinpool.step import Joined, Order, Row, TokenLogprob


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """News of one request: tokens that became known, their log-probabilities (empty unless asked for), and how it ended, if it did."""

    request: Request
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None


@dataclass(slots=True)
class Totals:
    """Counters since boot, in requests, tokens or slots as named."""

    retracted_requests: int = 0
    retracted_input_tokens: int = 0
    retracted_output_tokens: int = 0
    aborted_out_of_memory_requests: int = 0
    skipped_checkpoints: int = 0
    failed_restores: int = 0
    restarted_requests: int = 0
    published_checkpoints: int = 0
    finished_requests: int = 0


@dataclass(frozen=True, slots=True)
class Retraction:
    """One retraction, as its log line reports it (reference 2.3)."""

    n_requests: int
    n_new_tokens_gained: int
    n_slots_gained: int
    ratio_before: float
    ratio_after: float


@dataclass(slots=True, eq=False)
class Book:
    """Everything the scheduling functions share. `running` keeps admission order.

    fetched: with a disk tier, what each waiting request has of it. lost_in_a_row: how often memory was
    lost to a copy that failed since one last came back from the host.
    """

    shape: SchedulerShape
    pages: Pool
    slots: Pool
    tree: PrefixTree
    clock: Clock
    waiting: WaitQueue
    ratio: NewTokenRatio
    running: dict[int, Sequence] = field(default_factory=dict)
    in_flight: dict[int, list[tuple[Row, Sequence]]] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    joined: list[Joined] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    retractions: list[Retraction] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    storage: Storage | None = None
    fetched: dict[int, Fetched] = field(default_factory=dict)
    lost_in_a_row: int = 0

    def tell(self, delta: Delta) -> None:
        """Queue news for the request's owner; a finish stamps the request."""
        if delta.finish is not None:
            delta.request.finish = delta.finish
            delta.request.finished_s = self.clock.now_s()
            self.totals.finished_requests += 1
        self.deltas.append(delta)

    def take_orders(self) -> tuple[Order, ...]:
        """All orders since the last call. The list stays the same one: tree and pools write to it, too."""
        orders = tuple(self.orders)
        self.orders.clear()
        return orders

    def take_deltas(self) -> list[Delta]:
        """All news since the last call."""
        deltas, self.deltas = self.deltas, []
        return deltas
