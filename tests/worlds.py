"""Tiny worlds: pools of a few pages and slots, and an executor that keeps their contents honest.

FakeExecutor stores in every KV page and state slot *which* prefix it belongs to (a rolling hash of its tokens) and refuses to run
on anything else, so a page or slot that is handed out twice, freed too early, copied too late or restored wrongly is seen at once.
The next token is a function of that hash alone: what a request says can depend on nothing but its own tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from twinpool.clock import VirtualClock
from twinpool.loop import Loop
from twinpool.memory.host import HostArena
from twinpool.memory.pools import Pool
from twinpool.prefix.checkpoint import grids, track_slots
from twinpool.prefix.host import HostPlan
from twinpool.prefix.tree import PrefixTree
from twinpool.request import Request, SamplingParams
from twinpool.sched.scheduler import Scheduler
from twinpool.sched.shape import SchedulerShape
from twinpool.sched.storage import Storage
from twinpool.step import Freed, HostCopy, HostFill, Order, StepPlan, StepResult, StoreCopy
from twinpool.wiring import telling_freed

VOCAB = 11
EOS = 0
POISON = -1
_MASK = (1 << 61) - 1


def fold(state: int, token: int) -> int:
    """The state after one more token."""
    return (state * 1_000_003 + int(token) + 1) & _MASK


def next_token(state: int) -> int:
    """The token that follows a state; EOS about one time in eleven."""
    return (state >> 7) % VOCAB


def expected_output(prompt: list[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    """What a request must say, whatever happens to it."""
    state = 0
    for token in prompt:
        state = fold(state, token)
    said: list[int] = []
    while len(said) < max_tokens:
        token = next_token(state)
        said.append(token)
        if token == EOS and not ignore_eos:
            break
        state = fold(state, token)
    return said


@dataclass
class _Handle:
    executor: FakeExecutor
    step: int

    def result(self) -> StepResult:
        self.executor.run_until(self.step)
        return self.executor.results.pop(self.step)


class FakeExecutor:
    """Runs plans in order, as late as possible (`lazy`) or at once, over symbolic memory."""

    def __init__(self, *, page_size: int, lazy: bool) -> None:
        self.page_size = page_size
        self.lazy = lazy
        self.kv: dict[tuple[int, int], int] = {}
        self.slots: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.results: dict[int, StepResult] = {}
        self.plans: list[StepPlan] = []
        self.n_checked_tokens = 0
        self.host_kv: dict[tuple[int, int], int] = {}
        self.host_slots: dict[int, int] = {}
        self.n_copied = 0
        self.store: Callable[[StoreCopy, memoryview, memoryview], None] | None = None
        self._queue: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> _Handle:
        self.plans.append(plan)
        self._queue.append(plan)
        if not self.lazy:
            self.run_until(plan.step)
        return _Handle(self, plan.step)

    def run_until(self, step: int) -> None:
        while step not in self.results:
            plan = self._queue.popleft()
            self.results[plan.step] = self._run(plan)

    def _run(self, plan: StepPlan) -> StepResult:
        for rid in plan.left:
            self.last.pop(rid, None)
        for order in plan.orders:
            self._obey(order)
        written = [row.slot for row in plan.rows] + [
            r.checkpoint_slot for r in plan.rows if r.checkpoint_at is not None
        ]
        assert len(set(written)) == len(written), "two rows write one slot"
        return StepResult(plan.step, tuple(self._row(row) for row in plan.rows))

    def _obey(self, order) -> None:
        if isinstance(order, Freed):
            for identity in order.ids.tolist():
                if order.kind == "slots":
                    self.slots[identity] = POISON
                for offset in range(self.page_size if order.kind == "pages" else 0):
                    self.kv[identity, offset] = POISON
        elif isinstance(order, HostCopy):
            self._copy(order)
        elif isinstance(order, StoreCopy):
            self._give_to_disk(order)
        elif isinstance(order, HostFill):
            self._fill(order)
        else:
            assert order.dst != 0
            value = 0 if order.src is None else self.slots[order.src]
            assert value != POISON, f"slot {order.src} was copied after it was freed"
            self.slots[order.dst] = value

    def _copy(self, order: HostCopy) -> None:
        """Pages and a slot to the host or back; nothing that was freed or never written may be read."""
        for page, host_page in zip(order.pages.tolist(), order.host_pages.tolist(), strict=True):
            for offset in range(self.page_size):
                here, there = (self.kv, (page, offset)), (self.host_kv, (host_page, offset))
                source, target = (here, there) if order.to_host else (there, here)
                assert source[0][source[1]] != POISON, "a page was copied after it was freed"
                target[0][target[1]] = source[0][source[1]]
        if order.slot:
            here, there = (self.slots, order.slot), (self.host_slots, order.host_slot)
            source, target = (here, there) if order.to_host else (there, here)
            assert source[0][source[1]] != POISON, "a slot was copied after it was freed"
            target[0][target[1]] = source[0][source[1]]
        self.n_copied += 1

    def _give_to_disk(self, order: StoreCopy) -> None:
        """Pages and a slot in bytes, an int64 for each token and one for the state; they must be those of the order's tokens."""
        state, states = 0, []
        for token in order.tokens.tolist():
            state = fold(state, token)
            states.append(state)
        found = [self.kv[page, offset] for page in order.pages.tolist() for offset in range(self.page_size)]
        assert found == states[order.start : order.end], "the disk is given other pages than those of the tokens"
        assert self.slots[order.slot] == states[-1], "the disk is given another state than that of the tokens"
        assert self.store is not None
        self.store(order, _as_bytes(found), _as_bytes([state]))

    def _fill(self, order: HostFill) -> None:
        kv = np.frombuffer(order.kv, np.int64).reshape(-1, self.page_size) if len(order.host_pages) else ()
        assert len(kv) == len(order.host_pages)
        for host_page, values in zip(order.host_pages.tolist(), kv, strict=True):
            for offset, value in enumerate(values.tolist()):
                self.host_kv[host_page, offset] = value
        (self.host_slots[order.host_slot],) = np.frombuffer(order.state, np.int64).tolist()

    def _row(self, row) -> int | None:
        state = self.slots[row.slot]
        tokens = [self.last[row.rid]] if row.tokens is None else [int(t) for t in row.tokens]
        assert len(tokens) == row.end - row.start
        if row.start:
            assert self._kv(row, row.start - 1) == state, "slot and KV belong to different prefixes"
        for position in range(row.start):
            assert self._kv(row, position) != POISON
        self.n_checked_tokens += row.start
        for position, token in enumerate(tokens, start=row.start):
            state = fold(state, token)
            self.kv[int(row.pages[position // self.page_size]), position % self.page_size] = state
            if row.checkpoint_at == position + 1:
                self.slots[row.checkpoint_slot] = state
        self.slots[row.slot] = state
        if not row.sample:
            return None
        self.last[row.rid] = next_token(state)
        return self.last[row.rid]

    def _kv(self, row, position: int) -> int:
        return self.kv[int(row.pages[position // self.page_size]), position % self.page_size]


def _as_bytes(values: list[int]) -> memoryview:
    return memoryview(np.array(values, np.int64).tobytes())


@dataclass
class World:
    """A scheduler, its pools and a fake executor."""

    scheduler: Scheduler
    executor: FakeExecutor
    loop: Loop
    pages: Pool
    slots: Pool
    tree: PrefixTree

    def request(self, rid: int, prompt: list[int], max_tokens: int, **params: object) -> Request:
        return Request.new(
            rid=rid, prompt=prompt, params=SamplingParams(max_tokens=max_tokens, temperature=0.0, **params),
            eos_token_ids=frozenset({EOS}),
        )  # fmt: skip

    def run(self, *requests: Request, limit: int = 10_000) -> None:
        """Add requests and step until idle, checking conservation after every step."""
        for request in requests:
            self.scheduler.add(request)
        for _ in range(limit):
            if self.loop.idle:
                return
            self.loop.step()
            self.scheduler.check()
        raise AssertionError("the world did not come to rest")


def make_world(
    *,
    n_pages: int = 64,
    n_slots: int = 16,
    page_size: int = 1,
    strategy: str = "extra_buffer",
    overlap: bool = True,
    radix: bool = True,
    chunk: int | None = 8,
    grid: int = 4,
    track: int = 4,
    max_running: int = 4,
    lazy: bool = True,
    max_states_per_path: int = -1,
    eviction_policy: str = "lru",
    context_len: int = 4096,
    host: HostArena | None = None,
    host_policy: str = "write_through",
    storage: Storage | None = None,
    clock: VirtualClock | None = None,
    **shape: object,
) -> World:
    """A world with everything wired as engine/boot does it, at sizes where one can count on one's fingers."""
    executor = FakeExecutor(page_size=page_size, lazy=lazy)
    executor.store = getattr(storage, "put", None)
    orders: list[Order] = []
    pages = Pool(name="pages", first=1, count=n_pages, on_free=telling_freed("pages", orders))
    slots = Pool(name="slots", first=1, count=n_slots, on_free=telling_freed("slots", orders))
    grid_set = grids(page_tokens=page_size, chunk_tokens=grid, track_interval_tokens=track)
    n_tracks = track_slots(strategy, overlap=overlap) if radix else 0
    tree = PrefixTree(
        pages=pages, slots=slots, page_size=page_size, grid_tokens=grid_set.checkpoint_tokens if n_tracks else page_size,
        eviction_policy=eviction_policy, max_states_per_path=max_states_per_path, disabled=not radix,
        host=HostPlan(host, host_policy, orders) if host is not None else None,
    )  # fmt: skip
    full_shape = SchedulerShape(
        page_size=page_size, grid_tokens=grid_set.checkpoint_tokens, track_tokens=grid_set.track_tokens,
        strategy=strategy, track_slots=n_tracks, radix_cache=radix, overlap=overlap, max_running_requests=max_running,
        max_queued_requests=None, chunked_prefill_size=chunk, max_prefill_tokens=16384, prefill_max_requests=None,
        context_len=context_len, **shape,
    )  # fmt: skip
    scheduler = Scheduler(
        shape=full_shape, pages=pages, slots=slots, tree=tree, clock=clock or VirtualClock(), orders=orders, storage=storage
    )  # fmt: skip
    return World(scheduler, executor, Loop(scheduler=scheduler, executor=executor, overlap=overlap), pages, slots, tree)
