"""The scheduler in tiny worlds: conservation at every step, and tokens that depend on nothing but the request."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.failing import FAILED, LOST
from tests.worlds import VOCAB, expected_output, make_world
from twinpool.errors import BadRequest
from twinpool.request import Finish, Request
from twinpool.sched.requeue import MOST_RESTARTS
from twinpool.sched.scheduler import Scheduler

MODES = [
    ("extra_buffer", True, True), ("extra_buffer", False, True), ("extra_buffer_lazy", True, True),
    ("no_buffer", False, True), ("extra_buffer", True, False), ("extra_buffer", False, False),
]  # fmt: skip


class SchedulerMachine(RuleBasedStateMachine):
    """Random traffic: new conversations, next turns, forks, cancels, stops, flushes, over pools that are far too small."""

    @initialize(
        mode=st.sampled_from(MODES), page_size=st.sampled_from([1, 2, 4]), n_pages=st.integers(12, 40),
        n_running=st.integers(1, 4), spare_slots=st.integers(0, 6), chunk=st.sampled_from([4, 8, 13, None]),
        policy=st.sampled_from(["fcfs", "lpm"]), lazy=st.booleans(), cap=st.sampled_from([-1, 1, 2]),
    )  # fmt: skip
    def build(self, mode, page_size, n_pages, n_running, spare_slots, chunk, policy, lazy, cap) -> None:
        strategy, overlap, radix = mode
        if strategy == "no_buffer":
            page_size = 1
        self.world = make_world(
            n_pages=n_pages, n_slots=n_running * 3 + spare_slots, page_size=page_size, strategy=strategy, overlap=overlap,
            radix=radix, chunk=chunk, max_running=n_running, lazy=lazy, max_states_per_path=cap, schedule_policy=policy,
        )  # fmt: skip
        self.scheduler: Scheduler = self.world.scheduler
        self.requests: dict[int, Request] = {}
        self.said: dict[int, list[int]] = {}
        self.stopped: set[int] = set()
        self.history: list[list[int]] = [[]]

    def _collect(self, deltas) -> None:
        for delta in deltas:
            self.said[delta.request.rid].extend(delta.tokens)
            if delta.finish is not None:
                self.history.append([int(t) for t in delta.request.tokens[: delta.request.n_tokens]])

    @rule(
        data=st.data(), new=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14), max_tokens=st.integers(1, 12)
    )
    def add(self, data, new, max_tokens) -> None:
        base = data.draw(st.sampled_from(self.history))
        cut = data.draw(st.integers(0, len(base)))
        prompt = base[:cut] + new
        rid = len(self.requests)
        request = self.world.request(rid, prompt, max_tokens)
        try:
            self.scheduler.add(request)
        except BadRequest:
            assert len(prompt) + 1 > self.world.pages.count * self.scheduler.shape.page_size
            return
        self.requests[rid] = request
        self.said[rid] = []

    @rule(n=st.integers(1, 6))
    def step(self, n) -> None:
        for _ in range(n):
            self._collect(self.world.loop.step())

    @rule(data=st.data(), stop=st.booleans())
    def end_early(self, data, stop) -> None:
        live = [rid for rid, request in self.requests.items() if request.finish is None and rid not in self.stopped]
        if live:
            rid = data.draw(st.sampled_from(live))
            if self.scheduler.finish(rid, Finish("stop", matched="x")) if stop else self.scheduler.abort(rid):
                self.stopped.add(rid)

    @rule()
    def flush(self) -> None:
        assert self.scheduler.flush() == self.world.loop.idle

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "world"):
            self.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for _ in range(3000):
            if self.world.loop.idle:
                break
            self._collect(self.world.loop.step())
            self.scheduler.check()
        assert self.world.loop.idle
        self._collect(self.scheduler.take_deltas())
        for counts in self.scheduler.counts():
            assert counts.held == 0
            assert counts.protected == 0
        for rid, request in self.requests.items():
            assert request.finish is not None, "every request gets a reply"
            prompt = [int(t) for t in request.tokens[: request.prompt_len]]
            expected = expected_output(prompt, request.params.max_tokens)
            if rid in self.stopped or request.finish.reason == "error":
                assert self.said[rid] == expected[: len(self.said[rid])]
            else:
                assert self.said[rid] == expected
            if request.finish.reason == "error" and not is_made_to_fail(request):
                capacity = self.world.pages.count * self.scheduler.shape.page_size
                assert request.n_tokens + 1 > capacity - self.scheduler.shape.page_size
            reuse = request.reuse
            assert reuse.prompt == 0 or reuse.reused + sum(n for _, n in reuse.gaps) == reuse.prompt
        assert {str(failure) for failure in self.world.loop.failures} <= {FAILED, LOST}


def is_made_to_fail(request: Request) -> bool:
    """By the test itself, whose executor failed a step or lost its memory too often."""
    message = request.finish.message
    return message.endswith(FAILED) or (LOST in message and request.restarts >= MOST_RESTARTS)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
