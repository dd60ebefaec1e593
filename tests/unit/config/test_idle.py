"""Flags that do nothing: what is said about each, for a server and for a sweep."""

from __future__ import annotations

import pytest

from twinpool.config.idle import given_fields, idle_flags
from twinpool.config.options import ServeOptions

TIER = {"enable_hierarchical_cache": True}
DISK = {**TIER, "hicache_storage_backend": "file", "hicache_storage_path": "d"}


@pytest.mark.parametrize(
    ("values", "sentences"),
    [
        ({}, []),
        ({"hicache_size": 5.0}, ["--hicache-size does nothing without --enable-hierarchical-cache: give that, too, or leave it out."]),
        ({**TIER, "hicache_size": 5.0, "hicache_mamba_size_gb": 1.0, "hicache_write_policy": "write_back"}, []),
        ({**TIER, "hicache_ratio": 2.0}, []),
        ({**TIER, "hicache_host_memory_fraction": 0.5}, []),
        (
            {"hicache_storage_size": 5.0},
            [
                "--hicache-storage-size does nothing without --enable-hierarchical-cache and --hicache-storage-backend file: give "
                "both, too, or leave it out."
            ],
        ),
        (
            {**TIER, "hicache_storage_size": 5.0, "hicache_storage_prefetch_policy": "best_effort"},
            [
                "--hicache-storage-size, --hicache-storage-prefetch-policy do nothing without --hicache-storage-backend file: give "
                "that, too, or leave them out."
            ],
        ),
        ({**DISK, "hicache_storage_size": 5.0, "hicache_storage_prefetch_policy": "best_effort"}, []),
        (
            {**TIER, "hicache_size": 5.0, "hicache_ratio": 2.0, "hicache_host_memory_fraction": 0.5},
            ["--hicache-ratio, --hicache-host-memory-fraction do nothing beside --hicache-size, which says how much: leave them out."],
        ),
        (
            {**TIER, "hicache_ratio": 2.0, "hicache_host_memory_fraction": 0.5},
            ["--hicache-host-memory-fraction does nothing beside --hicache-ratio, which says how much: leave it out."],
        ),
        (
            {"hicache_ratio": 2.0, "hicache_size": 5.0},
            ["--hicache-ratio, --hicache-size do nothing without --enable-hierarchical-cache: give that, too, or leave them out."],
        ),
    ],
)  # fmt: skip
def test_each_is_told_once_with_what_it_lacks(values: dict[str, object], sentences: list[str]) -> None:
    options = ServeOptions(**values)
    assert list(idle_flags(options, among=given_fields(options))) == sentences


def test_a_default_that_is_written_down_is_given() -> None:
    options = ServeOptions(hicache_storage_size=10.0, given=frozenset({"hicache_storage_size"}))
    assert len(idle_flags(options, among=given_fields(options))) == 1
    assert idle_flags(options, among=frozenset()) == ()


def test_what_a_sweep_sets_is_there() -> None:
    options = ServeOptions(hicache_write_policy="write_back", hicache_storage_prefetch_policy="best_effort")
    among = given_fields(options)
    assert len(idle_flags(options, among=among, set_elsewhere={"enable_hierarchical_cache"})) == 1
    both = {"enable_hierarchical_cache", "hicache_storage_backend"}
    assert idle_flags(options, among=among, set_elsewhere=both) == ()
