"""What a boot log says: facts of each rank, grouped by boot, and the flags that the engine printed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from twinpool import bootlog
from twinpool.bootlog import BootFacts
from twinpool.config.deployment import OtherValue, deployment_options, without_other_values
from twinpool.config.field import options_of
from twinpool.config.launch import deployment_from
from twinpool.config.options import ServerOptions
from twinpool.config.resolve import DEMO_NAME
from twinpool.errors import ConfigError
from twinpool.plan.log_host import LoggedHost, read_host
from twinpool.plan.own_log import OwnTables, read_own

# Versions print the flags as the call of a class or as a dictionary.
_ARGUMENTS = re.compile(r"server_args\s*[=:]\s*(?:ServerArgs\(|\{)")
_STATE_POOL = re.compile("Mamba Cache is allocated")
# What follows ends the value: one that was cut off is left out.
_VALUE = r"(?P<value>'[^'\n]*'|\"[^\"\n]*\"|-?\d{1,15}(?:\.\d{1,15})?(?:e-?\d{1,2})?|True|False)(?=\s*[,)}])"
# Fields of Deployment, the model's path, and values that twinpool does not take.
_Read = tuple[dict[str, Any], str | None, tuple[OtherValue, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedBoot:
    """ranks: facts of each rank that logged its pools; flags: fields of Deployment that server_args or the Settings table names;
    model: its path, or the demo's name; own: the tables of twinpool's own log, None in those of other engines. other_values: of flags
    that no pool depends on, which twinpool does not take; host: lines of the host tier.
    """

    ranks: tuple[BootFacts, ...]
    flags: dict[str, Any]
    model: str | None
    own: OwnTables | None = None
    other_values: tuple[OtherValue, ...] = ()
    host: LoggedHost = field(default_factory=LoggedHost)


def read_boots(text: str) -> tuple[LoggedBoot, ...]:
    """Every boot of a log with anything around it.

    Raises ConfigError: no boot with a state pool in it (and what there is instead), or impossible sizes.
    """
    text = text.replace("\x00", "")  # a file of two bytes a letter, or with a hole in it
    boots = tuple(_boots(text))
    for boot in boots:
        for facts in boot.ranks:
            _check_sizes(facts)
    if not boots:
        raise ConfigError(_what_is_missing(text))
    return boots


def _what_is_missing(text: str) -> str:
    """Why a log has no boot that can be read."""
    if not text.strip():
        return "The boot log is empty: give the server's own output, from its start."
    facts = bootlog.parse(text)
    if not facts:
        return (
            "The boot log holds none of the lines that a boot prints ('Load weight end', 'Mamba Cache is allocated', "
            "'KV Cache is allocated'): give the server's own output, from its start."
        )
    if any(one.conv_gb is not None or one.ssm_gb is not None for one in facts):
        return (
            "The boot log's 'Mamba Cache is allocated' does not say max_mamba_cache_size: it was cut off, or printed by a "
            "version before that number; plan it from the model and the launch line."
        )
    if any(one.kv_tokens is not None for one in facts):
        return (
            "The boot log has 'KV Cache is allocated' and no 'Mamba Cache is allocated': the model is not a hybrid one, "
            "and all that weights and slack leave is KV."
        )
    return (
        "The boot log ends before 'Mamba Cache is allocated': the pools of this boot are not in it, so plan it from the "
        "model and the launch line."
    )


def _check_sizes(facts: BootFacts) -> None:
    """Raises ConfigError for a pool of no slots, or with a size below zero."""
    slots = facts.slots or 0
    if slots < 1:
        raise ConfigError(
            f"The boot log's state pool has {slots} slots, where a server that started has at least 1: the log is of another "
            "model or was changed."
        )
    sizes = (facts.conv_gb, facts.ssm_gb, facts.kv_tokens, facts.kv_gb, facts.k_gb, facts.v_gb)
    least = min((size for size in sizes if size is not None), default=0)
    if least < 0:
        raise ConfigError(f"The boot log's pools have a size of {least}, where the smallest is 0: the log was changed.")


def _boots(text: str) -> Iterator[LoggedBoot]:
    starts = [found.start() for found in _ARGUMENTS.finditer(text)]
    edges = [0, *starts, len(text)]
    flags: dict[str, Any] = {}
    model: str | None = None
    others: tuple[OtherValue, ...] = ()
    for begin, end in itertools.pairwise(edges):
        segment = text[begin:end]
        if begin in starts:
            flags, model, others = _flags(segment.partition("\n")[0])
        parts = tuple(_by_boot(bootlog.parse(segment)))
        for ranks, region in zip(parts, _regions(segment, parts), strict=True):
            own = next(iter(read_own(region)), None)
            boot = LoggedBoot(ranks=ranks, flags=flags, model=model, other_values=others, host=read_host(region))
            yield boot if own is None else _with_own(boot, own)


def _with_own(boot: LoggedBoot, own: OwnTables) -> LoggedBoot:
    """A boot of `twinpool serve`: its flags are those of its Settings table."""
    values, model, others = _of_pools(own.flags())
    return replace(boot, flags=values, model=model or DEMO_NAME, own=own, other_values=others)


def _regions(segment: str, boots: tuple[tuple[BootFacts, ...], ...]) -> tuple[str, ...]:
    """The text of each boot from its first state pool on; where they cannot be told apart all of it belongs to the last."""
    starts = [found.start() for found in _STATE_POOL.finditer(segment)]
    firsts = list(itertools.accumulate((len(ranks) for ranks in boots), initial=0))
    if len(starts) != firsts[-1]:
        return (*("" for _ in boots[1:]), segment)[: len(boots)]
    edges = [*(starts[first] for first in firsts[:-1]), len(segment)]
    return tuple(segment[begin:end] for begin, end in itertools.pairwise(edges))


def _by_boot(facts: tuple[BootFacts, ...]) -> Iterator[tuple[BootFacts, ...]]:
    """Ranks of the same boot together: the k-th boot of each rank belongs to the k-th boot of the log.

    A server of one rank does not name it, so its boots are others than those of named ranks before and after them.
    """
    pools = [one for one in facts if one.slots is not None]
    for _, part in itertools.groupby(pools, key=lambda one: one.label == ""):
        boots: list[list[BootFacts]] = []
        seen: dict[str, int] = {}
        for one in part:
            number = seen.get(one.label, 0)
            seen[one.label] = number + 1
            if number == len(boots):
                boots.append([])
            boots[number].append(one)
        yield from (tuple(boot) for boot in boots)


def _flags(line: str) -> _Read:
    """(fields of Deployment, model path, values that twinpool does not take) that a server_args line names."""
    values: dict[str, Any] = {}
    for option in deployment_options():
        names = "|".join(sorted({name.lstrip("-").replace("-", "_") for name in (option.name, *option.flag.aliases)}))
        found = re.search(rf"\b(?:{names})['\"]?\s*[=:]\s*{_VALUE}", line)
        value = _literal(found["value"], option.kind) if found else None
        if value is not None:
            values[option.field] = value
    return _of_pools(values)


def _of_pools(values: dict[str, Any]) -> _Read:
    """(values, model path, values that twinpool does not take) without what does not concern memory.

    Raises ConfigError for a value of a pool's flag that no version takes, and for flags that contradict each other.
    """
    server = {option.field for option in options_of(ServerOptions)}
    values = {name: value for name, value in values.items() if name not in server}
    model = values.pop("model_path", None)
    for private in ("tokenizer_path", "served_model_name", "chat_template", "revision", "random_seed"):
        values.pop(private, None)
    if values.get("speculative_num_draft_tokens") is None:
        values.pop("speculative_algorithm", None)
    values, others = without_other_values(values)
    deployment_from(values)
    return values, model, others


def _literal(text: str, kind: Any) -> Any:
    """The value of a printed literal, or None where it is not of the flag's kind."""
    if text in ("True", "False"):
        return text == "True" if kind is bool else None
    if text[0] in "'\"":
        return text[1:-1] if kind not in (bool, int, float) else None
    if kind is float:
        return float(text)
    return int(text) if kind is int and text.lstrip("-").isdigit() else None
