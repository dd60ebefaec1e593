"""How many sessions an arena covers, by hand and against an arena that is really filled."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from twinpool.memory.host import HostArena
from twinpool.memory.host_cover import HostCover, host_bytes_for, host_cover
from twinpool.units import ceil_div


def test_states_and_kv_share_what_is_not_divided() -> None:
    # A chunk is 4 pages of 2 tokens or one state; a session of 8 tokens takes one chunk for KV and one for its state.
    arena = HostArena(total_bytes=10 * 40, page_bytes=10, slot_bytes=40)
    assert host_cover(arena, page_size=2, context_tokens=8) == HostCover(8, by_kv=10, by_states=10, together=5)
    assert host_cover(arena, page_size=2, context_tokens=4) == HostCover(4, by_kv=20, by_states=10, together=6)


def test_a_quota_bounds_each_kind() -> None:
    arena = HostArena(total_bytes=10 * 40, page_bytes=10, slot_bytes=40, max_slots=2)
    assert host_cover(arena, page_size=2, context_tokens=8) == HostCover(8, by_kv=8, by_states=2, together=2)
    arena = HostArena(total_bytes=10 * 40, page_bytes=10, slot_bytes=40, max_slots=9)
    assert host_cover(arena, page_size=2, context_tokens=8) == HostCover(8, by_kv=1, by_states=9, together=1)


def test_small_states_share_a_chunk() -> None:
    arena = HostArena(total_bytes=12 * 40, page_bytes=40, slot_bytes=20)
    assert host_cover(arena, page_size=1, context_tokens=1) == HostCover(1, by_kv=12, by_states=24, together=8)


def test_sessions_without_kv_are_states() -> None:
    arena = HostArena(total_bytes=400, page_bytes=0, slot_bytes=40)
    assert host_cover(arena, page_size=1, context_tokens=100) == HostCover(100, 10, 10, 10)
    arena = HostArena(total_bytes=400, page_bytes=10, slot_bytes=40)
    assert host_cover(arena, page_size=1, context_tokens=0) == HostCover(0, 10, 10, 10)


@given(
    chunks=st.integers(2, 60), page_bytes=st.integers(1, 9), slot_bytes=st.integers(1, 40), page_size=st.integers(1, 4),
    context_tokens=st.integers(1, 30), quota=st.none() | st.integers(1, 20),
)  # fmt: skip
def test_so_many_sessions_fit(
    chunks: int, page_bytes: int, slot_bytes: int, page_size: int, context_tokens: int, quota: int | None
) -> None:
    def made() -> HostArena:
        return HostArena(
            total_bytes=chunks * max(page_bytes, slot_bytes),
            page_bytes=page_bytes,
            slot_bytes=slot_bytes,
            max_slots=quota,
        )

    cover = host_cover(made(), page_size=page_size, context_tokens=context_tokens)
    pages = ceil_div(context_tokens, page_size)
    arena, sessions = made(), 0
    while arena.alloc(pages=pages, slots=1) is not None:
        sessions += 1
    # Packing into whole chunks may cost a session; more than covered never fit.
    assert cover.together - 1 <= sessions <= cover.together


def test_a_session_with_several_states() -> None:
    arena = HostArena(total_bytes=12 * 40, page_bytes=10, slot_bytes=40)
    cover = host_cover(arena, page_size=2, context_tokens=8, states=3)
    assert cover == HostCover(8, by_kv=12, by_states=4, together=3)
    assert host_bytes_for(arena, 3, page_size=2, context_tokens=8, states=3) == 12 * 40


@given(
    sessions=st.integers(1, 50), page_bytes=st.integers(0, 9), slot_bytes=st.integers(1, 40), page_size=st.integers(1, 4),
    context_tokens=st.integers(1, 30), states=st.integers(1, 3),
)  # fmt: skip
def test_the_least_bytes_for_so_many_sessions(
    sessions: int, page_bytes: int, slot_bytes: int, page_size: int, context_tokens: int, states: int
) -> None:
    def covered(total_bytes: int) -> int:
        arena = HostArena(total_bytes=total_bytes, page_bytes=page_bytes, slot_bytes=slot_bytes)
        return host_cover(arena, page_size=page_size, context_tokens=context_tokens, states=states).together

    empty = HostArena(total_bytes=0, page_bytes=page_bytes, slot_bytes=slot_bytes)
    wanted = host_bytes_for(empty, sessions, page_size=page_size, context_tokens=context_tokens, states=states)
    assert covered(wanted) >= sessions > covered(wanted - empty.chunk_bytes)
