"""The options of a verb other than serve: a frozen dataclass whose annotated fields are its flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from twinpool.config import command_line
from twinpool.config.field import options_of
from twinpool.errors import ConfigError

T = TypeVar("T")


def parse_options(
    owner: type[T], argv: Sequence[str], *, prog: str, usage: str, positionals: str = ""
) -> tuple[T, list[str]]:
    """(an `owner` with the values that were given, the other words).

    positionals: what words without a flag are, such as 'FILE...'; empty: none are taken. --help prints and exits 0.
    Raises ConfigError for an unknown flag, a bad value, or a word that is not wanted.
    """
    kind: type = owner
    options, rows = options_of(kind), command_line.rows_of([kind])
    values, words = command_line.read_command_line(
        options, argv, prog=prog, help_text=lambda: command_line.help_text(rows, usage=usage)
    )
    if words and not positionals:
        raise ConfigError(f"'{words[0]}' belongs to no flag; see {prog} --help.")
    for option in options:
        if option.field in values:
            option.check(values[option.field])
    arguments: dict[str, Any] = values
    return owner(**arguments), words
