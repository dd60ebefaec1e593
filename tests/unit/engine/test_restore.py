"""Copies from the host beside the forward: every layer waits for its own, the outcome is that of copying first, trouble surfaces."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.agreement.llm_runs import checkpoint
from tests.tiny_models import FAMILIES
from twinpool.engine.checkpoint import read_spec
from twinpool.engine.copies import Part, TierCopies
from twinpool.engine.executor import TorchExecutor
from twinpool.engine.rank import allocate_buffer
from twinpool.engine.restore import LayerParts
from twinpool.engine.tensors import Memory
from twinpool.memory.arena import Arena
from twinpool.memory.host import HostArena
from twinpool.models.attention.spec import GqaSpec
from twinpool.models.shapes import StateShapes
from twinpool.models.step_batch import PackedStep
from twinpool.step import Freed, HostCopy, HostFill, Order, OrdersFailed, Row, SlotOrder, StepPlan

N_PAGES, N_SLOTS = 5, 4
PAGE_BYTES, SLOT_BYTES = 48, 40
# Two attention layers (24 bytes each) and two linear ones, as _spans finds them; the state's last 8 bytes belong to no layer.
LAYERS = LayerParts(
    parts=(
        Part(slot=((32, 40),)),
        Part(slot=((0, 8), (16, 24))),
        Part(page=((0, 24),)),
        Part(slot=((8, 16), (24, 32))),
        Part(page=((24, 48),)),
    ),
    kv=(2, 4),
    states=(1, 3),
)


def make_memory() -> Memory:
    """Every byte of device and host different, as far as there are bytes."""
    arena = Arena(page_bytes=PAGE_BYTES, slot_bytes=SLOT_BYTES, n_slots=N_SLOTS, n_pages=N_PAGES)
    host = HostArena(total_bytes=10 * PAGE_BYTES, page_bytes=PAGE_BYTES, slot_bytes=SLOT_BYTES)
    memory = Memory(
        arena, page_size=1, kv_shapes=[GqaSpec(1, 3, 3), GqaSpec(1, 3, 3)],
        state_shapes=[StateShapes(conv=(2,), temporal=(2,)), StateShapes(conv=(2,), temporal=(2,))],
        kv_dtype="float32", ssm_dtype="float32", conv_dtype="float32", host=host,
    )  # fmt: skip
    numbers = torch.Generator().manual_seed(1)
    for buffer in (memory.buffer, memory.tiers._host_buffer):
        buffer.copy_(torch.randint(0, 256, buffer.shape, generator=numbers, dtype=torch.uint8))
    return memory


def everything(memory: Memory) -> torch.Tensor:
    return torch.cat([memory.buffer, memory.tiers._host_buffer])


def plan(*orders: Order) -> StepPlan:
    row = Row(
        rid=1, start=0, end=1, tokens=np.array([3], np.int32), slot=1, pages=np.array([1], np.int32), sample=False
    )
    return StepPlan(1, (row,), orders=orders)


def run_step(memory: Memory, orders: tuple[Order, ...], forward: Callable[[PackedStep], None]) -> None:
    """One step; raises what it raises."""

    def whole(step: PackedStep) -> torch.Tensor:
        forward(step)
        return torch.empty(0, 1)

    executor = TorchExecutor(forward=whole, memory=memory, layers=LAYERS)
    try:
        executor.submit(plan(*orders)).result()
    finally:
        executor.close()


def ids(most: int, size: int) -> st.SearchStrategy[np.ndarray]:
    places = st.lists(st.integers(1, most), min_size=size, max_size=size, unique=True)
    return places.map(lambda found: np.array(found, np.int32))


@st.composite
def order(draw: st.DrawFn) -> Order:
    """Any order; device pages and slots from 1 on, host pages 0 to 4, host slots 6 to 9 (chunks of their own)."""
    kind = draw(st.sampled_from(["zero", "slot", "load", "load", "save", "freed pages", "freed slots", "fill"]))
    slot, other = draw(ids(N_SLOTS, 2)).tolist()
    if kind in ("zero", "slot"):
        return SlotOrder(dst=slot, src=other if kind == "slot" else None)
    size = draw(st.integers(0, 3))
    pages, host_pages = draw(ids(N_PAGES, size)), draw(ids(5, size)) - 1
    host_slot = draw(st.integers(7, 10))
    if kind == "fill":
        kv = draw(st.binary(min_size=size * PAGE_BYTES, max_size=size * PAGE_BYTES))
        state = draw(st.binary(min_size=SLOT_BYTES, max_size=SLOT_BYTES))
        return HostFill(host_pages, memoryview(kv), host_slot, memoryview(state))
    if kind.startswith("freed"):
        return Freed(kind[6:], pages if kind == "freed pages" else np.array([slot], np.int32))
    has_slot = draw(st.booleans())
    return HostCopy(kind == "save", pages, host_pages, slot if has_slot else 0, host_slot if has_slot else 0)


@given(st.lists(order(), max_size=8))
def test_layer_by_layer_is_the_same_as_one_after_another(orders: list[Order]) -> None:
    expected, memory = make_memory(), make_memory()
    executor = TorchExecutor(forward=lambda step: torch.empty(0, 1), memory=expected)
    executor.settle(tuple(orders))
    executor.close()
    layers = [("kv", layer, LAYERS.parts[at]) for layer, at in enumerate(LAYERS.kv)]
    layers += [("state", layer, LAYERS.parts[at]) for layer, at in enumerate(LAYERS.states)]
    np.random.default_rng(len(orders)).shuffle(layers)

    def forward(step: PackedStep) -> None:
        if step.arrivals is None:
            assert torch.equal(everything(memory), everything(expected))
            return
        for kind, layer, part in layers:
            (step.arrivals.await_kv if kind == "kv" else step.arrivals.await_state)(layer)
            for start, end in part.page:
                for page in range(1, N_PAGES + 1):
                    at = memory.arena.page_offset_bytes(page)
                    assert torch.equal(memory.buffer[at + start : at + end], expected.buffer[at + start : at + end])
            for start, end in part.slot:
                for slot in range(1, N_SLOTS + 1):
                    at = memory.arena.slot_offset_bytes(slot)
                    assert torch.equal(memory.buffer[at + start : at + end], expected.buffer[at + start : at + end])

    run_step(memory, tuple(orders), forward)
    assert torch.equal(everything(memory), everything(expected))


LOAD = HostCopy(False, np.array([2, 3], np.int32), np.array([4, 0], np.int32), 2, 7)


def test_the_forward_goes_on_while_later_layers_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, may_go_on = make_memory(), threading.Event()
    move = TierCopies.move

    def held(self: TierCopies, one: SlotOrder | HostCopy, part: Part) -> None:
        if part == LAYERS.parts[LAYERS.states[1]]:
            assert may_go_on.wait(10)
        move(self, one, part)

    monkeypatch.setattr(TierCopies, "move", held)
    before = memory.buffer.clone()
    second = memory.arena.slot_offset_bytes(2) + 8

    def forward(step: PackedStep) -> None:
        assert step.arrivals is not None
        step.arrivals.await_state(0)
        step.arrivals.await_kv(0)
        assert torch.equal(memory.buffer[second : second + 8], before[second : second + 8])  # not there yet
        may_go_on.set()
        step.arrivals.await_state(1)
        assert not torch.equal(memory.buffer[second : second + 8], before[second : second + 8])

    run_step(memory, (LOAD, SlotOrder(dst=1, src=2)), forward)


def test_all_of_it_is_there_after_a_step_that_asked_for_nothing_or_failed() -> None:
    memory, expected = make_memory(), make_memory()
    expected.tiers.move(LOAD, expected.tiers.whole)

    def forward(step: PackedStep) -> None:
        raise ArithmeticError("the model is broken")

    with pytest.raises(ArithmeticError, match="the model is broken"):
        run_step(memory, (LOAD,), forward)
    assert torch.equal(everything(memory), everything(expected))


def test_a_copy_that_fails_ends_its_step_and_all_later_ones_until_the_cache_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, move = make_memory(), TierCopies.move

    def broken(self: TierCopies, one: SlotOrder | HostCopy, part: Part) -> None:
        if part == LAYERS.parts[LAYERS.states[1]]:
            raise OSError("the link is down")
        move(self, one, part)

    monkeypatch.setattr(TierCopies, "move", broken)

    def forward(step: PackedStep) -> torch.Tensor:
        if step.arrivals is not None:
            step.arrivals.await_state(0)
            step.arrivals.await_state(1)
            raise AssertionError("the state is not there")
        return torch.empty(0, 1)

    executor = TorchExecutor(forward=forward, memory=memory, layers=LAYERS)
    try:
        for orders in ((LOAD,), ()):
            with pytest.raises(OrdersFailed, match="a copy from the host failed: the link is down"):
                executor.submit(plan(*orders)).result()
        executor.recover()
        executor.submit(plan()).result()
    finally:
        executor.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_cover_pages_and_slots_without_overlap(family: str) -> None:
    spec = read_spec(checkpoint(family)).with_exact_index(page_tokens=16)
    dtypes = {"kv_dtype": "bfloat16", "ssm_dtype": "float32", "conv_dtype": "bfloat16"}
    page_bytes = 16 * spec.kv_bytes_per_token(kv_dtype="bfloat16")
    slot_bytes = spec.slot_bytes(ssm_dtype="float32", conv_dtype="bfloat16")
    arena = Arena(page_bytes=page_bytes, slot_bytes=slot_bytes, n_slots=2, n_pages=2)
    memory = allocate_buffer(spec, arena, ranks=1, page_size=16, device="cpu", host=None, **dtypes)
    layers = LayerParts.of(spec, memory)
    # Every part but the first is one layer's.
    assert sorted((*layers.kv, *layers.states)) == list(range(1, len(layers.parts)))
    assert (len(layers.kv), len(layers.states)) == (len(memory.kv), len(memory.states))
    for name, width in (("page", page_bytes), ("slot", slot_bytes)):
        spans = sorted(span for part in layers.parts for span in getattr(part, name))
        assert all(start < end for start, end in spans)
        assert [0, *(end for _, end in spans)] == [*(start for start, _ in spans), width]
