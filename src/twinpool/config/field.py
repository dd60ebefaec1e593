"""One option: the text, limits and type that a field of config/options.py carries, read back from the field."""

from __future__ import annotations

import functools
import math
import types
import typing
from dataclasses import dataclass, fields

from twinpool.config.refused import refusal_of_value
from twinpool.errors import ConfigError
from twinpool.units import format_bytes, parse_bytes

Value = str | int | float | bool | None
_INTEGER_LIMIT = 1 << 63  # beyond it neither engines nor floats hold the number
_TYPE_NAMES = {int: "int", float: "float", str: "text", bool: "switch"}


@dataclass(frozen=True, slots=True)
class Flag:
    """What stands beside a field, as `Annotated[type, Flag(...)]`.

    help: the text of --help and of docs/flags.md. name: the flag, where it is not the field's name. default_text: what
    a default that does not say so means. metavar: the word for the value. at_least, at_most: inclusive limits; above: exclusive one.
    minus_one: what -1 means, where it is accepted beside 1, 2, ... size: a number of bytes, written with a unit.
    choices: the words allowed for a text that a wider options class may allow more words for (else: a Literal type).
    unset: the word that stands for the default None on a command line.
    """

    help: str
    name: str = ""
    aliases: tuple[str, ...] = ()
    default_text: str = ""
    metavar: str = ""
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    minus_one: str = ""
    size: bool = False
    choices: tuple[str, ...] = ()
    unset: str = ""


@dataclass(frozen=True, slots=True)
class Option:
    """A field of an options class, with all that is known about it. kind: str, int, float or bool."""

    field: str
    flag: Flag
    kind: type
    choices: tuple[str, ...]
    optional: bool
    default: Value

    @property
    def name(self) -> str:
        """The flag, such as --page-size."""
        return self.flag.name or "--" + self.field.replace("_", "-")

    @property
    def keyword(self) -> str:
        """The flag as a Python keyword, such as page_size."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def metavar(self) -> str:
        """The word for the value in help: its choices, its own word, or its type; empty for a switch."""
        if self.kind is bool:
            return ""
        return ("|".join(self.choices) if self.choices else self.flag.metavar) or _TYPE_NAMES[self.kind].upper()

    @property
    def default_text(self) -> str:
        """The default, for people."""
        if self.kind is bool:
            return "off"
        if self.default is None or self.flag.default_text:
            return self.flag.default_text
        return str(self.default)

    def parse(self, text: str) -> Value:
        """The value a text stands for. Raises ConfigError naming the flag."""
        if self.flag.unset and text == self.flag.unset:
            return None
        if self.choices or self.kind is str:
            return text
        try:
            if self.flag.size:
                return parse_bytes(text)
            return float(text) if self.kind is float else int(text)
        except ValueError as error:
            wanted = (
                str(error) if self.flag.size else f"'{text}' is not a{'n integer' if self.kind is int else ' number'}"
            )
            raise ConfigError(f"{self.name}: {wanted}.") from None

    def check(self, value: object) -> None:
        """Raise ConfigError naming the flag if `value` has the wrong type, is not a choice, or is out of range."""
        if value is None and self.optional:
            return
        right = isinstance(value, int | float) if self.kind is float else isinstance(value, self.kind)
        if not right or (isinstance(value, bool) and self.kind is not bool):
            raise ConfigError(f"{self.name} takes {_TYPE_NAMES[self.kind]}, got {value!r}.")
        if self.choices and value not in self.choices:
            why = refusal_of_value(self.name, str(value))
            raise ConfigError(why or f"{self.name} {value} is not one of {', '.join(self.choices)}.")
        if value == "":
            # Most often a shell variable that is not set; an empty --api-key would leave the server open.
            raise ConfigError(f"{self.name} is empty: give it a value or leave the flag out.")
        if isinstance(value, str) and "\0" in value:
            raise ConfigError(f"{self.name} {value!r} has a NUL character, which no name on this machine has.")
        if isinstance(value, int | float) and not isinstance(value, bool):
            self._check_range(value)

    def _check_range(self, value: int | float) -> None:
        flag = self.flag
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{self.name} must be a finite number, got {value}.")
        if flag.minus_one and value != -1 and value < 1:
            raise ConfigError(f"{self.name} must be -1 ({flag.minus_one}) or a positive integer, got {value}.")
        rules = (
            (flag.at_least is None or value >= flag.at_least, "at least", flag.at_least),
            (flag.at_most is None or value <= flag.at_most, "at most", flag.at_most),
            (flag.above is None or value > flag.above, "above", flag.above),
        )
        for fine, words, limit in rules:
            if not fine:
                raise ConfigError(
                    f"{self.name} must be {words} {_plain(limit)}, got {format_bytes(value) if flag.size else value}."
                )
        if isinstance(value, int) and abs(value) >= _INTEGER_LIMIT:
            raise ConfigError(f"{self.name} must be below 2**63, got a number of {value.bit_length()} bits.")


def _plain(limit: float | None) -> str:
    """A limit with all its digits if it is an integer."""
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


@functools.cache
def options_of(owner: type) -> tuple[Option, ...]:
    """The options of a dataclass, in the order of its fields. Fields without a Flag are left out."""
    hints = typing.get_type_hints(owner, include_extras=True)
    found = []
    for field in fields(owner):
        flags = [extra for extra in getattr(hints[field.name], "__metadata__", ()) if isinstance(extra, Flag)]
        if flags:
            kind, choices, optional = _kind_of(typing.get_args(hints[field.name])[0])
            assert isinstance(field.default, Value), f"{field.name} has no plain default"
            found.append(Option(field.name, flags[0], kind, choices or flags[0].choices, optional, field.default))
    return tuple(found)


def _kind_of(hint: object) -> tuple[type, tuple[str, ...], bool]:
    """(value type, choices, whether None is allowed) of an annotation."""
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    optional = type(None) in parts
    (inner,) = [part for part in parts if part is not type(None)]
    if typing.get_origin(inner) is typing.Literal:
        return str, typing.get_args(inner), optional
    assert isinstance(inner, type)
    return inner, (), optional
