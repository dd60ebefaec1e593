"""How much the host tier takes, and its refusals, whose advice is followed to the letter (reference 3.4, 5.1)."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from twinpool.errors import MemoryRefusal
from twinpool.memory.budget import MemoryRequest, plan_memory
from twinpool.memory.host_budget import host_arena
from twinpool.units import GIB, MIB

LEDGER = plan_memory(
    MemoryRequest(
        pre_load_bytes=4 * GIB, available_bytes=2 * GIB, mem_fraction_static=0.75, context_len=8192, slots_per_request=3,
        conv_bytes=0, ssm_bytes=MIB, kv_bytes_per_token=4096, page_size=16,
    )
)  # fmt: skip
POOLS_BYTES = LEDGER.ssm_pool_bytes + LEDGER.kv_pool_bytes


def arena(available_bytes: int | None = None, **changes: object):
    """An arena for the ledger above with these settings."""
    settings = {
        "enable_hierarchical_cache": True, "hicache_size": 0.0, "hicache_ratio": None,
        "hicache_host_memory_fraction": 0.8, "hicache_mamba_size_gb": None, **changes,
    }  # fmt: skip
    return host_arena(SimpleNamespace(**settings), LEDGER, available_bytes=available_bytes)


def test_off_unless_asked_for() -> None:
    assert arena(enable_hierarchical_cache=False) is None


@pytest.mark.parametrize(
    ("changes", "available_bytes", "total_bytes"),
    [
        ({}, None, 2 * POOLS_BYTES),
        ({}, 100 * GIB, 2 * POOLS_BYTES),
        # The host is small: a fifth of it is held back, then the fraction of the rest.
        ({}, GIB, int((GIB - int(GIB * 0.2)) * 0.8)),
        ({"hicache_host_memory_fraction": 0.5}, GIB, int((GIB - int(GIB * 0.2)) * 0.5)),
        ({"hicache_ratio": 0.5}, GIB, POOLS_BYTES // 2),
        ({"hicache_size": 0.25}, GIB, 250_000_000),
        ({"hicache_size": 0.25, "hicache_ratio": 7.0}, GIB, 250_000_000),
    ],
)
def test_by_size_by_ratio_or_twice_the_pools_as_far_as_the_host_allows(changes, available_bytes, total_bytes) -> None:
    found = arena(available_bytes, **changes)
    assert (found.page_bytes, found.slot_bytes, found.chunk_bytes) == (65_536, MIB, MIB)
    assert found.total_bytes == total_bytes // MIB * MIB
    assert not found.has_quota


def test_one_budget_for_both_kinds() -> None:
    found = arena(hicache_size=0.1)
    assert (found.n_chunks, found.most_pages, found.most_slots) == (95, 95 * 16, 95)


def test_a_quota_for_states_is_taken_out_of_the_whole() -> None:
    found = arena(hicache_size=0.1, hicache_mamba_size_gb=0.03)
    assert (found.has_quota, found.most_slots, found.most_pages) == (True, 28, (95 - 28) * 16)


def test_more_than_the_host_has_is_refused() -> None:
    with pytest.raises(MemoryRefusal, match=r"Requesting 2\.00 GB but only have 1\.07 GB free\. Please reduce"):
        arena(GIB, hicache_size=2.0)
    with pytest.raises(MemoryRefusal, match="--hicache-ratio"):
        arena(GIB, hicache_ratio=3.0)


def test_too_little_for_a_page_and_a_state_names_what_would_do() -> None:
    with pytest.raises(MemoryRefusal, match=r"room for a page and a state, 2\.00 MiB: raise --hicache-size") as refused:
        arena(hicache_size=0.001)
    enough = float(re.search(r"at least ([\d.]+)\.", str(refused.value))[1])
    assert arena(hicache_size=enough).n_chunks == 2


@pytest.mark.parametrize(("quota_gb", "states"), [(0.0005, 0), (0.1, 95), (0.2, 190)])
def test_a_quota_that_leaves_one_kind_nothing_names_what_would_do(quota_gb, states) -> None:
    with pytest.raises(MemoryRefusal, match=f"is {states} states and leaves") as refused:
        arena(hicache_size=0.1, hicache_mamba_size_gb=quota_gb)
    least, most = (float(x) for x in re.search(r"between ([\d.]+) and ([\d.]+),", str(refused.value)).groups())
    assert arena(hicache_size=0.1, hicache_mamba_size_gb=least).most_slots == 1
    assert arena(hicache_size=0.1, hicache_mamba_size_gb=most).most_pages >= 16
