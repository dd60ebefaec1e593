"""The two tables that a boot log of twinpool ends with, Settings and Memory, read back as flags, sizes and constants."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from twinpool.bootlog import without_colours
from twinpool.config.deployment import deployment_options
from twinpool.config.resolve import OPTION_OF, Origin
from twinpool.errors import ConfigError
from twinpool.memory.ledger import SLACK
from twinpool.units import parse_bytes

_ORIGINS = "|".join(sorted(typing.get_args(Origin), key=len, reverse=True))
_END = r"\s*(?:$|\\[rn].*$)"  # of a line, also inside a string of JSON
_SETTINGS = re.compile(rf"\bname +value +origin{_END}")
_SETTING = re.compile(rf"\b(?P<name>[a-z]\w*) {{2,}}(?P<value>\S.*?) {{2,}}(?P<origin>{_ORIGINS}){_END}")
_MEMORY = re.compile(rf"\bmemory +size +origin +note{_END}")
_SIZE = r"\d[\d,]*(?:\.\d+)? (?:B|[KMGT]iB)"
_ROW = re.compile(
    rf"\b(?P<name>[A-Za-z][\w ]*?) {{2,}}(?P<size>{_SIZE}) {{2,}}(?:{_ORIGINS})(?: {{2,}}(?P<note>\S.*?))?{_END}"
)
_ROW_NAMES = ("weights", SLACK, "conv states", "ssm states", "side states", "KV pool", "whole")
_EACH = re.compile(rf"(\d{{1,18}}) (?:slots|tokens)? ?(?:×|\\u00d7) ({_SIZE})")  # JSON may escape the sign
_OF = re.compile(rf"mem_fraction_static \S+ of ({_SIZE})$")
# Settings that the model or the machine decides, beside those that a flag gave: the plan must not decide them again.
_DECIDED = frozenset(
    {"mem_fraction_static", "mamba_full_memory_ratio", "page_size", "chunked_prefill_size", "strategy", "overlap"}
)
_FIRST_ROWS = 200  # of a table, at most: what follows is another part of the log


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTables:
    """settings: value and origin of each row as printed. memory: size and note of each row of the ledger as printed."""

    settings: Mapping[str, tuple[str, str]]
    memory: Mapping[str, tuple[str, str]]

    def flags(self) -> dict[str, Any]:
        """Fields of Deployment: every flag that was given, and what the model and the machine decided about the pools."""
        options = {option.field: option for option in deployment_options()}
        found: dict[str, Any] = {}
        for name, (text, origin) in self.settings.items():
            option = options.get(OPTION_OF.get(name, name))
            if option is None or text in ("-", "set") or origin == "measured":
                continue
            if origin not in ("flag", "log") and (name not in _DECIDED or origin == "default"):
                continue
            if option.kind is bool:
                value: Any = (text == "on") != (option.field != name)  # radix_cache on is disable_radix_cache off
            else:
                value = -1 if text == "off" and option.kind is int else option.parse(text)
            found[option.field] = value
        if found.get("disable_radix_cache"):
            found.pop("mamba_radix_cache_strategy", None)  # without a cache there is none
        return found

    def free_bytes(self) -> tuple[int, int] | None:
        """Free memory of a rank before and after the load, as exact as the table prints it; None without its rows. Raises ConfigError
        for a size that no server has, as its neighbours do.
        """
        whole, weights = self._bytes("whole"), self._bytes("weights")
        if whole is None or weights is None:
            return None
        share = _OF.search(self.memory.get(SLACK, ("", ""))[1])
        return _size_bytes(share[1]) if share else whole, whole - weights

    def slot_bytes(self) -> tuple[int, int] | None:
        """(conv, everything else) of one slot, in whole float32 elements; None without the rows of the state pool."""
        conv, ssm = self._each("conv states"), self._each("ssm states")
        if conv is None or ssm is None:
            return None
        conv_bytes, ssm_bytes = (round(size / 4) * 4 for size in (conv, ssm + (self._each("side states") or 0)))
        return conv_bytes, ssm_bytes

    def token_bytes(self) -> int | None:
        """One token of KV; None without the row of the KV pool."""
        each = self._each("KV pool")
        return None if each is None else round(each)

    def _bytes(self, name: str) -> int | None:
        return _size_bytes(self.memory[name][0]) if name in self.memory else None

    def _each(self, name: str) -> float | None:
        """Bytes of one slot or token of a row: of what the row says twice, the one that was rounded less."""
        text, note = self.memory.get(name, ("", ""))
        found = _EACH.match(note)
        if found is None or int(found[1]) == 0:
            return None
        count, each = int(found[1]), found[2]
        return _size_bytes(each) if _step(each) <= _step(text) / count else _size_bytes(text) / count


def read_own(text: str) -> tuple[OwnTables, ...]:
    """The tables of every boot in a log, in order; those of other engines have none."""
    lines = without_colours(text).splitlines()
    found = []
    for at, line in enumerate(lines):
        if _SETTINGS.search(line):
            settings = {row["name"]: (row["value"], row["origin"]) for row in _rows(lines, at + 1, _SETTING)}
            found.append(OwnTables(settings=settings, memory={}))
        elif found and _MEMORY.search(line):
            memory = {_row_name(row["name"]): (row["size"], row["note"] or "") for row in _rows(lines, at + 1, _ROW)}
            found[-1] = OwnTables(settings=found[-1].settings, memory=memory)
    return tuple(found)


def _rows(lines: list[str], begin: int, form: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Rows from a line on, up to the first line that is none."""
    for line in lines[begin : begin + _FIRST_ROWS]:
        row = form.search(line)
        if row is None:
            return
        yield row


def _row_name(text: str) -> str:
    """The name of a row of the ledger; what stands in front of a line may end in a word."""
    return next((name for name in _ROW_NAMES if text.endswith(name)), text)


def _size_bytes(size: str) -> int:
    """A printed size in bytes. Raises ConfigError for one that no server has."""
    try:
        return parse_bytes(size.replace(",", ""))
    except ValueError as error:
        raise ConfigError(
            f"The boot log's Memory table has a size of {size}: {error}, so the log was changed."
        ) from error


def _step(size: str) -> float:
    """The smallest difference that a printed size shows, in bytes."""
    return parse_bytes(f"1{size.partition(' ')[2]}") * (0.01 if "." in size else 1)
