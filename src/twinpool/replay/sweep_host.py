"""The tiers below the device in a sweep: sizes of host and disk, how the host is split, when copies are made; what goes together."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Annotated

from twinpool.config.field import Flag, Value
from twinpool.config.options import MOST_GB
from twinpool.errors import ConfigError
from twinpool.plan.sizing import Sizing, changed
from twinpool.replay.machine import arena_of
from twinpool.units import GB

AUTO = "auto"  # of the split: none
SIZE, SPLIT, POLICY, DISK = "hicache_size", "host_split", "hicache_write_policy", "disk_size"  # fields that are varied


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    """What no flag of the server says, or not so: there is no disk of size 0."""

    host_split: Annotated[float, Flag("Share of the host memory that is for states.", above=0, at_most=0.999)] = 0.5
    disk_size: Annotated[float, Flag("Most that the disk may hold, GB.", at_least=0, at_most=MOST_GB)] = 0.0


def check_tier(flag: str, field: str, *, varied: set[str], sizing: Sizing) -> None:
    """Raise ConfigError for an axis of these tiers without a host tier, or beside a flag that says the same."""
    if field not in (SIZE, SPLIT, POLICY, DISK):
        return
    if field != SIZE and SIZE not in varied and not sizing.flags.enable_hierarchical_cache:
        raise ConfigError(f"{flag} needs a host tier: give --host-sizes or --enable-hierarchical-cache.")
    if field == SPLIT and "hicache_mamba_size_gb" in sizing.flags.given:
        raise ConfigError(f"{flag} contradicts --hicache-mamba-size-gb: leave the single value out.")
    if field == DISK and "hicache_storage_size" in sizing.flags.given:
        raise ConfigError(f"{flag} contradicts --hicache-storage-size: leave the single value out.")
    if field == SIZE and "hicache_ratio" in sizing.flags.given:
        raise ConfigError(f"{flag} contradicts --hicache-ratio: leave the ratio out.")


def set_by_axes(varied: Set[str]) -> frozenset[str]:
    """The fields of Deployment that these axes set beside their own: a size is a tier."""
    host = {"enable_hierarchical_cache", SIZE} if SIZE in varied else set()
    return frozenset(host | ({"hicache_storage_backend"} if DISK in varied else set()))


def with_tier(sizing: Sizing, chosen: Mapping[str, Value]) -> Sizing:
    """The plan with the flags of one point (by field). A size of 0 is no such tier, and without a host tier there is no disk below it
    unless one is varied; a split other than auto becomes a quota of states.

    Raises ConfigError where they contradict each other, MemoryRefusal where the tier is too small.
    """
    flags: dict[str, object] = {name: value for name, value in chosen.items() if name not in (SPLIT, DISK)}
    if SIZE in flags:
        flags["enable_hierarchical_cache"] = bool(flags[SIZE])
    disk = chosen.get(DISK)
    if disk:
        flags |= {"hicache_storage_backend": "file", "hicache_storage_size": disk}
    elif disk is not None or flags.get(SIZE) == 0:
        flags |= {"hicache_storage_backend": None, "hicache_storage_path": None}
    sized = changed(sizing, **flags) if flags else sizing
    share = chosen.get(SPLIT, AUTO)
    arena = arena_of(sized)
    if share == AUTO or sized.ledger is None:
        return sized
    assert isinstance(share, float)
    if arena is None:
        raise ConfigError("without a host tier (--host-sizes 0) there is nothing to split.")
    sized = changed(sized, hicache_mamba_size_gb=share * arena.total_bytes / GB)
    arena_of(sized)  # refused where the quota leaves one kind nothing
    return sized
