"""One engine step as values: the scheduler returns a StepPlan, an Executor obeys it and returns a StepResult.

Order inside a step: `orders` one after another, then one packed forward over `rows`, then sampling for rows with `sample`. Loads from
the host may run beside the forward as long as no layer sees the difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from twinpool.request import Int32Array, SamplingParams


@dataclass(frozen=True, slots=True)
class SlotOrder:
    """Before the forward: fill slot `dst` with zeros (src None) or with a copy of slot `src`."""

    dst: int
    src: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """Before the forward: copy pages (int32, as many host_pages) and a slot (0: none) to the host or back from it."""

    to_host: bool
    pages: Int32Array
    host_pages: Int32Array
    slot: int = 0
    host_slot: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Freed:
    """Before the forward: pages or slots (`kind`) have been freed, and a test wants to see who still reads them."""

    kind: str
    ids: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class StoreCopy:
    """Before the forward: give tokens [start, end) of a conversation to the disk tier: their pages (int32) and the state after them.

    tokens: int32 [end], the whole prefix.
    """

    tokens: Int32Array
    start: int
    end: int
    pages: Int32Array
    slot: int


@dataclass(frozen=True, slots=True, eq=False)
class HostFill:
    """Before the forward: what was read from the disk goes to the host. kv: bytes of the host_pages (int32); state: of host_slot."""

    host_pages: Int32Array
    kv: memoryview | bytes
    host_slot: int
    state: memoryview | bytes


Order = SlotOrder | HostCopy | Freed | StoreCopy | HostFill


class Row(NamedTuple):
    """Tokens [start, end) of one request in this step. Its state slot holds the state after `start` tokens before the step and
    after `end` tokens after it; KV of the tokens is written to its pages.

    tokens: int32 [end - start], or None for a decode row: the token this executor sampled last for `rid`.
    pages: int32 [>= ceil(end / page_size)], the request's page table; never changed once it is in a plan (its tail may grow).
    checkpoint_at: a length in (start, end] after which the state is also written to `checkpoint_slot`; None for no checkpoint.
    position: how many output tokens come before the one sampled here (seeds and penalties hang on it).
    """

    rid: int
    start: int
    end: int
    tokens: Int32Array | None
    slot: int
    pages: Int32Array
    checkpoint_at: int | None = None
    checkpoint_slot: int = 0
    sample: bool = True
    position: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """A request that runs for the first time (again, after a retraction) in this step.

    prompt: int32 tokens asked for; output: int32 tokens already generated (after a retraction), for the penalties.
    """

    rid: int
    params: SamplingParams
    prompt: Int32Array
    output: Int32Array
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What one step does. `left` names requests the executor may forget before it starts.

    repeat: steps in one (replay only): each decode row then stands for so many tokens, one after another.
    """

    step: int
    rows: tuple[Row, ...]
    orders: tuple[Order, ...] = ()
    joined: tuple[Joined, ...] = ()
    left: tuple[int, ...] = ()
    repeat: int = 1

    @property
    def n_tokens(self) -> int:
        """Tokens computed by the forward."""
        return sum(row.end - row.start for row in self.rows)

    @property
    def n_decode_rows(self) -> int:
        """Rows that carry one sampled token."""
        return sum(row.tokens is None for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of the chosen token and of the most likely alternatives (token, logprob), best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back: for each row of the plan, the sampled token (None where the row does not sample) and its log-probability
    (None unless asked for); errors: (row index, sentence) of rows that could not be computed, while the others are fine;
    runs: for a plan with repeat > 1 all tokens of each row (int32 [repeat]), and `tokens` the last of them. duration_s: of the
    step; save_s, load_s: of copies to the host and back, those of an idle time before it included."""

    step: int
    tokens: tuple[int | None, ...]
    logprobs: tuple[TokenLogprob | None, ...] = ()
    errors: tuple[tuple[int, str], ...] = ()
    duration_s: float = 0.0
    save_s: float = 0.0
    load_s: float = 0.0
    runs: tuple[Int32Array, ...] = ()


class OrdersFailed(Exception):
    """Not all orders were obeyed: memory is not what the scheduler believes it to be, until the cache has been emptied."""


class Handle(Protocol):
    """A step that runs or has run."""

    def result(self) -> StepResult:
        """Wait for the step and return what it gave; re-raises what it raised, OrdersFailed among others."""
        ...


class Executor(Protocol):
    """Touches tensors (or pretends to). Steps run in the order they were submitted."""

    def submit(self, plan: StepPlan) -> Handle:
        """Start (or queue) a step without waiting for it."""
        ...

    def recover(self) -> None:
        """After OrdersFailed, which every step raises from then on: nothing is in flight, and the cache has been emptied."""
        ...
