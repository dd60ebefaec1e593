"""Plans on tensors with a toy model: orders, sampling, per-request memory, and errors that stay where they belong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from twinpool.engine.executor import TorchExecutor
from twinpool.engine.tensors import Memory
from twinpool.memory.arena import Arena
from twinpool.memory.host import HostArena
from twinpool.models.attention.spec import GqaSpec
from twinpool.models.shapes import StateShapes
from twinpool.models.step_batch import PackedStep
from twinpool.request import SamplingParams
from twinpool.step import Freed, HostCopy, Joined, Row, SlotOrder, StepPlan

VOCAB = 16
PAGES = np.arange(1, 9, dtype=np.int32)


def make_memory(host: HostArena | None = None) -> Memory:
    arena = Arena(page_bytes=16, slot_bytes=16, n_slots=3, n_pages=9)
    shapes = {"kv_shapes": [GqaSpec(1, 2, 2)], "state_shapes": [StateShapes(conv=(2,), temporal=(2,))]}
    dtypes = {"kv_dtype": "float32", "ssm_dtype": "float32", "conv_dtype": "float32"}
    return Memory(arena, page_size=1, **shapes, **dtypes, host=host)


def next_is_plus_one(step: PackedStep) -> torch.Tensor:
    """The most likely token is the last one plus one."""
    logits = torch.zeros(len(step.sample_at), VOCAB)
    for i, at in enumerate(step.sample_at):
        logits[i, (step.input_ids[at] + 1) % VOCAB] = 5.0
    return logits


def joined(rid: int, **params: object) -> Joined:
    values = SamplingParams(**{"temperature": 0.0, "seed": 1, **params})
    return Joined(rid, values, np.array([3], np.int32), np.array([], np.int32), frozenset())


def prefill(rid: int, *tokens: int, sample: bool = True) -> Row:
    return Row(rid=rid, start=0, end=len(tokens), tokens=np.array(tokens, np.int32), slot=1, pages=PAGES, sample=sample)


def decode(rid: int, at: int, position: int = 1) -> Row:
    return Row(rid=rid, start=at, end=at + 1, tokens=None, slot=1, pages=PAGES, position=position)


@pytest.fixture
def run() -> Callable[..., TorchExecutor]:
    made: list[TorchExecutor] = []

    def make(forward: object = next_is_plus_one, memory: Memory | None = None) -> TorchExecutor:
        made.append(TorchExecutor(forward=forward, memory=memory or make_memory()))
        return made[-1]

    yield make
    for executor in made:
        executor.close()


def test_a_decode_row_continues_with_the_token_sampled_last(run: Callable[..., TorchExecutor]) -> None:
    executor = run()
    first = executor.submit(StepPlan(1, (prefill(5, 3, 4),), joined=(joined(5),)))
    # Planned and submitted before the first result is known.
    second = executor.submit(StepPlan(2, (decode(5, 2), prefill(6, 9, sample=False)), joined=(joined(6),)))
    third = executor.submit(StepPlan(3, (decode(5, 3), prefill(6, 9, 1)), left=()))
    assert first.result().tokens == (5,)
    assert second.result().tokens == (6, None)
    assert third.result().tokens == (7, 2)
    assert third.result().logprobs == (None, None)


def test_orders_run_one_after_another_before_the_forward(run: Callable[..., TorchExecutor]) -> None:
    memory = make_memory()
    memory.states[0].ssm[1] = 7.0
    seen: list[list[float]] = []

    def forward(step: PackedStep) -> torch.Tensor:
        seen.append(memory.states[0].ssm[:, 0].tolist())
        return next_is_plus_one(step)

    orders = (SlotOrder(dst=2, src=1), SlotOrder(dst=1), SlotOrder(dst=3, src=2))
    plan = StepPlan(1, (prefill(1, 3),), orders=orders, joined=(joined(1),))
    run(forward, memory).submit(plan).result()
    assert seen == [[0.0, 0.0, 7.0, 7.0]]


def test_logprobs_come_only_for_rows_that_ask(run: Callable[..., TorchExecutor]) -> None:
    plan = StepPlan(1, (prefill(1, 3), prefill(2, 3)), joined=(joined(1, logprobs=1), joined(2)))
    result = run().submit(plan).result()
    assert result.logprobs[0].token == 4
    assert result.logprobs[0].top[0][0] == 4
    assert result.logprobs[1] is None


def test_a_row_that_is_not_finite_ends_alone(run: Callable[..., TorchExecutor]) -> None:
    def forward(step: PackedStep) -> torch.Tensor:
        logits = next_is_plus_one(step)
        logits[0, 2] = torch.nan
        return logits

    executor = run(forward)
    result = executor.submit(StepPlan(1, (prefill(1, 3), prefill(2, 8)), joined=(joined(1), joined(2)))).result()
    assert result.tokens == (None, 9)
    assert result.errors == ((0, "the model's logits are not finite at output token 0"),)
    # The row's next step is already planned: it runs, and nobody reads it.
    executor.submit(StepPlan(2, (decode(1, 1), decode(2, 1)))).result()


def test_what_a_step_raises_surfaces_in_its_handle_and_the_next_step_runs(run: Callable[..., TorchExecutor]) -> None:
    calls: list[int] = []

    def forward(step: PackedStep) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no such kernel")
        return next_is_plus_one(step)

    executor = run(forward)
    broken = executor.submit(StepPlan(1, (prefill(1, 3),), joined=(joined(1),)))
    # The failed request's next row is already planned: it must not take the others down.
    fine = executor.submit(StepPlan(2, (prefill(2, 4), decode(1, 1)), joined=(joined(2),)))
    with pytest.raises(RuntimeError, match="no such kernel"):
        broken.result()
    assert fine.result().tokens[0] == 5


def test_orders_are_obeyed_whatever_becomes_of_the_rows(run: Callable[..., TorchExecutor]) -> None:
    host = HostArena(total_bytes=64, page_bytes=16, slot_bytes=16)
    memory = make_memory(host)
    memory.states[0].ssm[2] = 7.0
    executor = run(memory=memory)
    (host_slot,) = host.alloc(pages=0, slots=1)[1].tolist()
    nothing = np.array([], np.int32)
    saves = HostCopy(True, nothing, nothing, slot=2, host_slot=host_slot)
    with pytest.raises(ValueError, match="could not convert"):
        executor.submit(StepPlan(1, (prefill(1, 3),), (saves,), joined=(joined(1, logit_bias=((5, "x"),)),))).result()
    with pytest.raises(KeyError):  # a decode row of nobody
        executor.submit(StepPlan(2, (decode(9, 1),), (SlotOrder(dst=2),))).result()
    loads = HostCopy(False, nothing, nothing, slot=3, host_slot=host_slot)
    executor.submit(StepPlan(3, (prefill(2, 4),), (loads,), joined=(joined(2),))).result()
    assert memory.states[0].ssm[2:, 0].tolist() == [0.0, 7.0]


def test_requests_that_left_are_forgotten_and_may_join_again(run: Callable[..., TorchExecutor]) -> None:
    executor = run()
    executor.submit(StepPlan(1, (prefill(1, 3),), joined=(joined(1),))).result()
    again = executor.submit(StepPlan(2, (prefill(1, 3, 4, 5),), joined=(joined(1),), left=(1,)))
    assert again.result().tokens == (6,)
    executor.submit(StepPlan(3, (prefill(2, 3),), joined=(joined(2),), left=(1,))).result()
    with pytest.raises(KeyError):
        executor.submit(StepPlan(4, (decode(1, 4),))).result()


def test_freed_memory_is_poisoned_after_the_steps_submitted_before(run: Callable[..., TorchExecutor]) -> None:
    memory = make_memory()
    seen: list[list[bool]] = []

    def forward(step: PackedStep) -> torch.Tensor:
        seen.append([bool(memory.states[0].ssm[2].isnan().any()), bool(memory.kv[0].keys[4].isnan().any())])
        return next_is_plus_one(step)

    executor = run(forward, memory)
    executor.submit(StepPlan(1, (prefill(1, 3),), joined=(joined(1),)))
    orders = (Freed("slots", np.array([2], np.int32)), Freed("pages", np.array([4], np.int32)))
    executor.submit(StepPlan(2, (decode(1, 1),), orders=orders)).result()
    assert seen == [[False, False], [True, True]]
