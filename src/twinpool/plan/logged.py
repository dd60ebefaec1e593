"""What a boot log says: facts of each rank, grouped by boot, and the flags that the engine printed at its start."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from twinpool import bootlog
from twinpool.bootlog import BootFacts
from twinpool.config.deployment import deployment_options
from twinpool.config.field import options_of
from twinpool.config.launch import deployment_from
from twinpool.config.options import ServerOptions
from twinpool.errors import ConfigError

_ARGUMENTS = re.compile(r"server_args\s*=\s*ServerArgs\(")
_VALUE = r"(?P<value>'[^']*'|\"[^\"]*\"|-?\d+(?:\.\d+)?(?:e-?\d+)?|True|False|None)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedBoot:
    """ranks: facts of each rank that logged its pools; flags: fields of Deployment that server_args names; model: its path."""

    ranks: tuple[BootFacts, ...]
    flags: dict[str, Any]
    model: str | None


def read_boots(text: str) -> tuple[LoggedBoot, ...]:
    """Every boot of a log with anything around it.

    Raises ConfigError: no boot line at all, or the log of a model without a state pool.
    """
    boots = tuple(_boots(text))
    if boots:
        return boots
    facts = bootlog.parse(text)
    if not facts:
        raise ConfigError(
            "The boot log holds none of the lines that a boot prints ('Load weight end', 'Mamba Cache is allocated', "
            "'KV Cache is allocated'): give the server's own output, from its start."
        )
    if any(one.kv_tokens is not None for one in facts):
        raise ConfigError(
            "The boot log has 'KV Cache is allocated' and no 'Mamba Cache is allocated': the model is not a hybrid one, "
            "and all that weights and slack leave is KV."
        )
    raise ConfigError(
        "The boot log ends before 'Mamba Cache is allocated': the pools of this boot are not in it, so plan it from the "
        "model and the launch line."
    )


def _boots(text: str) -> Iterator[LoggedBoot]:
    starts = [found.start() for found in _ARGUMENTS.finditer(text)]
    edges = [0, *starts, len(text)] if not starts or starts[0] > 0 else [*starts, len(text)]
    flags: dict[str, Any] = {}
    model = None
    for begin, end in itertools.pairwise(edges):
        segment = text[begin:end]
        if _ARGUMENTS.match(segment):
            flags, model = _flags(segment.splitlines()[0])
        for ranks in _by_boot(bootlog.parse(segment)):
            yield LoggedBoot(ranks=ranks, flags=flags, model=model)


def _by_boot(facts: tuple[BootFacts, ...]) -> Iterator[tuple[BootFacts, ...]]:
    """Ranks of the same boot together: the k-th boot of each rank belongs to the k-th boot of the log."""
    boots: list[list[BootFacts]] = []
    seen: dict[str, int] = {}
    for one in facts:
        if one.slots is None:
            continue
        number = seen.get(one.label, 0)
        seen[one.label] = number + 1
        if number == len(boots):
            boots.append([])
        boots[number].append(one)
    yield from (tuple(boot) for boot in boots)


def _flags(line: str) -> tuple[dict[str, Any], str | None]:
    """(fields of Deployment, model path) that a server_args line names; what does not concern memory is left out."""
    server = {option.field for option in options_of(ServerOptions)}
    values: dict[str, Any] = {}
    for option in deployment_options():
        if option.field in server:
            continue
        names = "|".join(sorted({name.lstrip("-").replace("-", "_") for name in (option.name, *option.flag.aliases)}))
        found = re.search(rf"\b(?:{names})={_VALUE}", line)
        value = ast.literal_eval(found["value"]) if found else None
        if value is None or (option.kind is bool and not isinstance(value, bool)):
            continue
        values[option.field] = float(value) if option.kind is float else value
    model = values.pop("model_path", None)
    for private in ("tokenizer_path", "served_model_name", "chat_template", "revision", "random_seed"):
        values.pop(private, None)
    if values.get("speculative_num_draft_tokens") is None:
        values.pop("speculative_algorithm", None)
    deployment_from(values)  # refuses a value that no version takes, by the flag's name
    return values, model
