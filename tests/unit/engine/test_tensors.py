"""One buffer: every layer's page and slot is where the geometry says, nothing overlaps, and nothing is touched before
its time.
"""

from __future__ import annotations

import resource

import numpy as np
import pytest
import torch

from twinpool.engine.tensors import Memory
from twinpool.memory.arena import Arena
from twinpool.models.attention.spec import GqaSpec, MlaSpec, PooledIndexSpec
from twinpool.models.shapes import StateShapes
from twinpool.step import SlotOrder
from twinpool.units import GIB

PAGE_SIZE = 2
KV = [GqaSpec(2, 3, 3), GqaSpec(1, 4, 4)]
STATES = [StateShapes(conv=(3, 5), temporal=(2, 3, 4)), StateShapes(conv=(3, 3), temporal=(1, 2, 2))]


def make(*, kv: str = "bfloat16", ssm: str = "float32", conv: str = "bfloat16") -> Memory:
    width = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}
    page_bytes = PAGE_SIZE * 2 * (6 + 4) * width[kv]
    slot_bytes = (24 + 4) * width[ssm] + (15 + 9) * width[conv]
    arena = Arena(page_bytes=page_bytes, slot_bytes=slot_bytes, n_slots=4, n_pages=7)
    return Memory(
        arena,
        page_size=PAGE_SIZE,
        kv_shapes=KV,
        state_shapes=STATES,
        kv_dtype=kv,
        ssm_dtype=ssm,
        conv_dtype=conv,
    )


def pieces(memory: Memory) -> list[torch.Tensor]:
    """Every view, one page or slot at a time, padding included."""
    views = [v for kv in memory.kv for v in (kv.keys, kv.values)] + [v for s in memory.states for v in (s.conv, s.ssm)]
    return [view[i] for view in views for i in range(len(view))]


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32", "bfloat16"), ("float32", "bfloat16", "float32")])
def test_pieces_do_not_overlap_and_lie_in_the_buffer(dtypes: tuple[str, str, str]) -> None:
    memory = make(kv=dtypes[0], ssm=dtypes[1], conv=dtypes[2])
    parts = pieces(memory)
    for number, part in enumerate(parts):
        part.fill_(number)
    for number, part in enumerate(parts):
        assert (part == number).all()
    assert memory.buffer.data_ptr() % 64 == 0


def test_shapes_are_what_kernels_expect() -> None:
    memory = make()
    assert memory.kv[0].keys.shape == (8, PAGE_SIZE, 2, 3)
    assert memory.states[0].ssm.shape == (5, 2, 3, 4)
    assert memory.states[1].conv.shape == (5, 3, 3)
    assert memory.kv[1].values[3].is_contiguous()
    assert memory.states[0].ssm[2].is_contiguous()


def test_a_page_holds_its_tokens_at_the_geometrys_offset() -> None:
    memory = make()
    memory.kv[0].keys[3] = 1.5
    start = memory.arena.page_offset_bytes(3)
    written = memory.buffer[start : start + 2 * PAGE_SIZE * 6].view(torch.bfloat16)
    assert (written == 1.5).all()
    assert int((memory.buffer != 0).sum()) <= 2 * PAGE_SIZE * 6


def test_slots_are_copied_and_zeroed_whole_and_alone() -> None:
    memory = make()
    for part in pieces(memory):
        part.copy_(torch.randn(part.shape))
    before = memory.buffer.clone()
    memory.tiers.move(SlotOrder(dst=4, src=2), memory.tiers.whole)
    for views in memory.states:
        assert torch.equal(views.ssm[4], views.ssm[2])
        assert torch.equal(views.conv[4], views.conv[2])
    memory.tiers.move(SlotOrder(dst=4), memory.tiers.whole)
    for views in memory.states:
        assert not views.ssm[4].any()
        assert not views.conv[4].any()
    memory._slot(4).copy_(before[memory.arena.slot_offset_bytes(4) :][: memory.arena.slot_bytes])
    assert torch.equal(memory.buffer, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "fp8_e4m3"])
def test_poison_is_nan_in_every_dtype_and_hits_nothing_else(dtype: str) -> None:
    memory = make(kv=dtype, ssm=dtype, conv=dtype)
    memory.poison(pages=np.array([2], np.int32), slots=[1])
    for view in (memory.kv[1].keys, memory.states[1].conv, memory.states[0].ssm):
        bad = torch.isnan(view).flatten(1)
        ids = bad.any(1).nonzero().flatten().tolist()
        assert ids == ([2] if view is memory.kv[1].keys else [1])
        assert bad[ids[0]].all()


def test_a_large_arena_takes_no_memory_before_it_is_used() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arena = Arena(page_bytes=80, slot_bytes=80, n_slots=1, n_pages=4 * GIB // 80)
    shapes = [GqaSpec(2, 3, 3), GqaSpec(1, 4, 4)]
    memory = Memory(
        arena,
        page_size=2,
        kv_shapes=shapes,
        state_shapes=[],
        kv_dtype="bfloat16",
        ssm_dtype="float32",
        conv_dtype="bfloat16",
    )
    assert not memory.kv[0].keys[-1].any()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_a_latent_is_one_view_and_keys_of_an_index_come_first() -> None:
    sparse = PooledIndexSpec(MlaSpec(6, 2), index_dim=16, pool_tokens=4, page_tokens=6)
    arena = Arena(
        page_bytes=6 * (8 * 2 + sparse.kv_bytes_per_token("bfloat16", 1)), slot_bytes=72, n_slots=1, n_pages=3
    )
    memory = Memory(
        arena,
        page_size=6,
        kv_shapes=[MlaSpec(6, 2), sparse],
        state_shapes=[],
        kv_dtype="bfloat16",
        ssm_dtype="float32",
        conv_dtype="bfloat16",
    )
    first, second = memory.kv
    assert first.keys is first.values
    assert first.keys.shape == second.keys.shape == (4, 6, 1, 8)
    assert (first.index.shape, second.index.shape) == ((4, 0), (4, 2, 16))
    assert first.keys.data_ptr() - second.index.data_ptr() == second.index[0].nbytes
    assert second.keys.data_ptr() - first.keys.data_ptr() == first.keys[0].nbytes
    # Two keys of 16 elements in a page of six tokens are six elements a token, four of the page's more than there are.
    assert arena.page_bytes - second.index[0].nbytes - 2 * first.keys[0].nbytes == 4 * 2
