"""How much the host tier takes, and its refusals, whose advice is followed to the letter (reference 3.4, 5.1)."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from twinpool.errors import MemoryRefusal
from twinpool.memory.budget import MemoryRequest, plan_memory
from twinpool.memory.host_advice import HostMemory
from twinpool.memory.host_budget import host_arena
from twinpool.units import GIB, MIB

REQUEST = MemoryRequest(
    pre_load_bytes=4 * GIB, available_bytes=2 * GIB, mem_fraction_static=0.75, context_len=8192, slots_per_request=3,
    conv_bytes=0, ssm_bytes=MIB, kv_bytes_per_token=4096, page_size=16,
)  # fmt: skip
LEDGER = plan_memory(REQUEST)
POOLS_BYTES = LEDGER.ssm_pool_bytes + LEDGER.kv_pool_bytes


def arena(available_bytes: int | None = None, **changes: object):
    """An arena for the ledger above with these settings, on a host with so much memory of its own."""
    memory = None if available_bytes is None else HostMemory(free_bytes=available_bytes)
    return host_arena(settings(**changes), LEDGER, memory=memory)


def settings(**changes: object) -> SimpleNamespace:
    """What the tier looks at, at the defaults unless changed."""
    return SimpleNamespace(**{
        "enable_hierarchical_cache": True, "hicache_size": 0.0, "hicache_ratio": None, "mem_fraction_static": 0.75,
        "hicache_host_memory_fraction": 0.8, "hicache_mamba_size_gb": None, "context_len": 8192, **changes,
    })  # fmt: skip


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
    with pytest.raises(
        MemoryRefusal, match=r"Requesting 2\.00 GB but only have 1\.07 GB free\. Please reduce"
    ) as refused:
        arena(GIB, hicache_size=2.0)
    assert str(refused.value).endswith(" of the hierarchical cache: --hicache-size 1 fits.")
    with pytest.raises(MemoryRefusal, match=r"the hierarchical cache: --hicache-ratio 0\.99 fits\."):
        arena(GIB, hicache_ratio=3.0)
    assert arena(GIB, hicache_ratio=0.99) is not None


@pytest.mark.parametrize(
    ("asked", "flag", "value"), [({"hicache_size": 1.5}, "size", 0.93), ({"hicache_ratio": 3.0}, "ratio", 0.87)]
)
def test_where_the_device_takes_of_the_same_memory_less_of_either_fits(asked, flag, value) -> None:
    memory = HostMemory(free_bytes=2 * GIB, pools_inside=True)
    with pytest.raises(MemoryRefusal, match=r"the device's pools take 1\.\d\d GB of the same memory") as refused:
        host_arena(settings(**asked), LEDGER, memory=memory)
    fits = float(re.search(rf"--hicache-{flag} ([\d.]+) fits", str(refused.value))[1])
    assert fits == pytest.approx(value, rel=0.15)
    assert host_arena(settings(**{f"hicache_{flag}": fits}), LEDGER, memory=memory) is not None
    fraction = float(re.search(r"--mem-fraction-static ([\d.]+) or less \(now 0\.75\)", str(refused.value))[1])
    smaller = plan_memory(replace(REQUEST, mem_fraction_static=fraction))
    assert host_arena(settings(**asked), smaller, memory=memory) is not None
    more = plan_memory(replace(REQUEST, mem_fraction_static=fraction + 0.04))
    with pytest.raises(MemoryRefusal):  # a little more for the device, and it is too much
        host_arena(settings(**asked), more, memory=memory)


def test_no_fraction_is_named_where_no_request_would_fit() -> None:
    with pytest.raises(MemoryRefusal) as refused:
        host_arena(settings(hicache_size=2.147), LEDGER, memory=HostMemory(free_bytes=2 * GIB, pools_inside=True))
    assert str(refused.value).endswith("of the same memory.")


def test_too_little_for_a_page_and_a_state_names_what_would_do() -> None:
    with pytest.raises(MemoryRefusal, match=r"room for a page and a state, 2\.00 MiB: raise --hicache-size") as refused:
        arena(hicache_size=0.001)
    enough = float(re.search(r"at least ([\d.]+)\.", str(refused.value))[1])
    assert arena(hicache_size=enough).n_chunks == 2
    with pytest.raises(MemoryRefusal, match="raise --hicache-ratio to at least") as refused:
        arena(hicache_ratio=0.001)
    enough = float(re.search(r"at least ([\d.]+)\.", str(refused.value))[1])
    assert arena(hicache_ratio=enough).n_chunks == 2


@pytest.mark.parametrize(("quota_gb", "states"), [(0.0005, 0), (0.1, 95), (0.2, 190)])
def test_a_quota_that_leaves_one_kind_nothing_names_what_would_do(quota_gb, states) -> None:
    with pytest.raises(MemoryRefusal, match=f"is {states} states and leaves") as refused:
        arena(hicache_size=0.1, hicache_mamba_size_gb=quota_gb)
    least, most = (float(x) for x in re.search(r"between ([\d.]+) and ([\d.]+),", str(refused.value)).groups())
    assert arena(hicache_size=0.1, hicache_mamba_size_gb=least).most_slots == 1
    assert arena(hicache_size=0.1, hicache_mamba_size_gb=most).most_pages >= 16
