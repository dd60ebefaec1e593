"""Flags that were given and do nothing, because another one was not given or decides instead: one table for server, plan and replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from twinpool.config.field import options_of
from twinpool.config.options import ServeOptions

_TIER, _DISK = "enable_hierarchical_cache", "hicache_storage_backend"
_SHOWN = {_TIER: "--enable-hierarchical-cache", _DISK: "--hicache-storage-backend file"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """These fields do something only where all of `needs` are set, or where `beside` is not."""

    fields: tuple[str, ...]
    needs: tuple[str, ...] = ()
    beside: str | None = None


_RULES = (
    _Rule(
        fields=(
            "hicache_ratio", "hicache_size", "hicache_host_memory_fraction", "hicache_write_policy", "hicache_mamba_size_gb",
        ),
        needs=(_TIER,),
    ),
    _Rule(fields=("hicache_storage_size", "hicache_storage_prefetch_policy"), needs=(_TIER, _DISK)),
    _Rule(fields=("hicache_ratio", "hicache_host_memory_fraction"), beside="hicache_size"),
    _Rule(fields=("hicache_host_memory_fraction",), beside="hicache_ratio"),
)  # fmt: skip


def given_fields(options: ServeOptions) -> frozenset[str]:
    """Fields that the caller set, or that are not at their default."""
    kind: type = type(options)
    changed = {one.field for one in options_of(kind) if getattr(options, one.field) != one.default}
    return options.given | changed


def idle_flags(options: ServeOptions, *, among: Set[str], set_elsewhere: Set[str] = frozenset()) -> tuple[str, ...]:
    """A sentence for each reason why flags do nothing. among: the fields that were given; set_elsewhere: those that a sweep sets."""
    names = {option.field: option.name for option in options_of(ServeOptions)}
    found = []
    for idle, why in _idle(options, among, set_elsewhere):
        does, them = ("does", "it") if len(idle) == 1 else ("do", "them")
        found.append(f"{', '.join(names[field] for field in idle)} {does} nothing {why} leave {them} out.")
    return tuple(found)


def idle_fields(options: ServeOptions, *, among: Set[str]) -> frozenset[str]:
    """The fields of these that do nothing."""
    return frozenset(field for idle, _ in _idle(options, among, frozenset()) for field in idle)


def _idle(options: ServeOptions, among: Set[str], set_elsewhere: Set[str]) -> Iterator[tuple[list[str], str]]:
    """(fields that do nothing, why), each field once."""
    names = {option.field: option.name for option in options_of(ServeOptions)}
    told: set[str] = set()
    for rule in _RULES:
        idle = [field for field in rule.fields if field in among and field not in told]
        why = _why(rule, options, set_elsewhere, names) if idle else ""
        if why:
            told.update(idle)
            yield idle, why


def _why(rule: _Rule, options: ServeOptions, set_elsewhere: Set[str], names: Mapping[str, str]) -> str:
    """What stands between 'does nothing' and 'leave it out'; empty where the rule's flags do something."""

    def is_set(field: str) -> bool:
        return field in set_elsewhere or bool(getattr(options, field))

    if rule.beside is not None:
        return f"beside {names[rule.beside]}, which says how much:" if is_set(rule.beside) else ""
    missing = [_SHOWN[need] for need in rule.needs if not is_set(need)]
    if not missing:
        return ""
    return f"without {' and '.join(missing)}: give {'that' if len(missing) == 1 else 'both'}, too, or"
