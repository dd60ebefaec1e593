"""A command line read against the options of a class: values by field, words that belong to no flag, and the help text."""

from __future__ import annotations

import argparse
import difflib
import itertools
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from twinpool.config.field import Option, Value, options_of
from twinpool.errors import ConfigError

HELP_WIDTH = 100
HELP_FLAGS = ("-h", "--help")


@dataclass(frozen=True, slots=True)
class FlagRow:
    """One flag as help and docs show it; field is its attribute in the options class."""

    group: str
    name: str
    aliases: tuple[str, ...]
    metavar: str
    default: str
    help: str
    field: str


def rows_of(groups: Iterable[type]) -> tuple[FlagRow, ...]:
    """Every flag of the groups, in the order of their fields; a group's docstring is its heading."""
    return tuple(
        FlagRow(
            (group.__doc__ or "").strip(), option.name, option.flag.aliases, option.metavar, option.default_text,
            option.flag.help, option.field,
        )
        for group in groups
        for option in options_of(group)
    )  # fmt: skip


def help_text(rows: Iterable[FlagRow], *, usage: str, footer: str = "") -> str:
    """The flags by group, with help and default; the same on every terminal."""
    lines = [usage]
    for group, members in itertools.groupby(rows, key=lambda row: row.group):
        lines.append(f"{group}:")
        for row in members:
            lines.append(f"  {', '.join((row.name, *row.aliases))} {row.metavar}".rstrip())
            text = row.help if row.default in ("off", "") else f"{row.help} (default: {row.default})"
            lines.append(paragraph(text, indent=6))
        lines.append("")
    return "\n".join([*lines, footer] if footer else lines).rstrip("\n") + "\n"


def paragraph(text: str, *, indent: int = 2) -> str:
    """Text in lines of the width of the help."""
    return textwrap.fill(
        text, HELP_WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent, break_on_hyphens=False
    )


def by_flag(options: Iterable[Option]) -> dict[str, Option]:
    """Flag or alias to its option."""
    return {name: option for option in options for name in (option.name, *option.flag.aliases)}


def read_command_line(
    options: Sequence[Option],
    argv: Sequence[str],
    *,
    prog: str,
    help_text: Callable[[], str],
    refusal: Callable[[str], str] | None = None,
) -> tuple[dict[str, Value], list[str]]:
    """(values of the fields that were given, words that belong to no flag).

    --help prints and exits 0. refusal: the sentence for a flag that is no option (default: the closest names).
    Raises ConfigError for an unknown flag or a value of the wrong type.
    """
    known = by_flag(options)
    parser = _Parser(prog, help_text)
    for option in options:
        names = (option.name, *option.flag.aliases)
        if option.kind is bool:
            parser.add_argument(*names, dest=option.field, action="store_true", default=argparse.SUPPRESS)
        else:
            parser.add_argument(*names, dest=option.field, default=argparse.SUPPRESS)
    for word in argv:
        name = word.split("=", 1)[0]
        if word.startswith("-") and word != "-" and not is_number(word) and name not in (*known, *HELP_FLAGS):
            raise ConfigError(refusal(name) if refusal else unknown_flag(name, known=tuple(known), prog=prog))
    found, words = parser.parse_known_args(list(argv))
    fields = {option.field: option for option in options}
    values = {name: fields[name].parse(text) if isinstance(text, str) else text for name, text in vars(found).items()}
    return values, words


def unknown_flag(name: str, *, known: Sequence[str], prog: str, whose: str = "") -> str:
    """The sentence for a name that is no flag, with the closest ones. whose: 'twinpool' unless it is a verb's."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.7)
    hint = f"did you mean {' or '.join(close)}?" if close else f"see {prog} --help."
    return f"{name} is not a flag of {whose or prog}; {hint}"


def is_number(word: str) -> bool:
    """Whether a word that starts with a dash is a negative number."""
    try:
        float(word)
    except ValueError:
        return False
    return True


class _Parser(argparse.ArgumentParser):
    """argparse, with our help and with errors raised instead of printed."""

    def __init__(self, prog: str, text: Callable[[], str]) -> None:
        super().__init__(prog=prog, allow_abbrev=False)
        self._text = text

    def format_help(self) -> str:
        return self._text()

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}; see {self.prog} --help.")
