"""From a command line, or from keywords of `LLM(...)`, to ServeOptions; what a flag is comes from config/options.py."""

from __future__ import annotations

import argparse
import difflib
import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from twinpool.config.field import Option, options_of
from twinpool.config.options import GROUPS, ParallelOptions, ServeOptions, all_options
from twinpool.config.refused import refusal_of_flag
from twinpool.errors import ConfigError

HELP_WIDTH = 100
_USAGE = """\
usage: twinpool serve [--model-path PATH] [options]

Serve a hybrid language model (full attention + linear attention) from two memory pools, with an OpenAI-compatible API.
"""


@dataclass(frozen=True, slots=True)
class FlagRow:
    """One flag as help and docs/flags.md show it; field is its attribute in ServeOptions."""

    group: str
    name: str
    aliases: tuple[str, ...]
    metavar: str
    default: str
    help: str
    field: str


def flag_rows() -> tuple[FlagRow, ...]:
    """Every honoured flag, in the order of config/options.py."""
    return tuple(
        FlagRow(
            (group.__doc__ or "").strip(), option.name, option.flag.aliases, option.metavar, option.default_text,
            option.flag.help, option.field,
        )
        for group in GROUPS
        for option in options_of(group)
    )  # fmt: skip


def help_text() -> str:
    """What `twinpool serve --help` prints: the flags by group, with help and default; the same on every terminal."""
    lines = [_USAGE]
    for group, rows in itertools.groupby(flag_rows(), key=lambda row: row.group):
        lines.append(f"{group}:")
        for row in rows:
            lines.append(f"  {', '.join((row.name, *row.aliases))} {row.metavar}".rstrip())
            text = row.help if row.default == "off" else f"{row.help} (default: {row.default})"
            lines += textwrap.wrap(
                text, HELP_WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False
            )
        lines.append("")
    lines.append(
        "A flag of the reference that is not listed here is refused with the reason (docs/flags.md lists them all)."
    )
    return "\n".join(lines) + "\n"


class _Parser(argparse.ArgumentParser):
    """argparse, with our help and with errors raised instead of printed."""

    def format_help(self) -> str:
        return help_text()

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}; see twinpool serve --help.")


def _by_flag() -> dict[str, Option]:
    return {name: option for option in all_options() for name in (option.name, *option.flag.aliases)}


def parse_serve(argv: Sequence[str]) -> ServeOptions:
    """The options of `twinpool serve ARGV...`. --help prints and exits 0.

    Raises ConfigError for an unknown flag (with close matches), a known one that is not honoured, or a bad value.
    """
    options = _by_flag()
    parser = _Parser(prog="twinpool serve", allow_abbrev=False)
    for option in all_options():
        names = (option.name, *option.flag.aliases)
        if option.kind is bool:
            parser.add_argument(*names, dest=option.field, action="store_true", default=argparse.SUPPRESS)
        else:
            parser.add_argument(*names, dest=option.field, default=argparse.SUPPRESS)
    for word in argv:
        name = word.split("=", 1)[0]
        if word.startswith("-") and not _is_number(word) and name not in options and name not in ("-h", "--help"):
            raise ConfigError(_refusal(name, known=tuple(options)))
    found, extra = parser.parse_known_args(list(argv))
    if extra:
        raise ConfigError(f"'{extra[0]}' belongs to no flag; see twinpool serve --help.")
    by_field = {option.field: option for option in all_options()}
    return _build(
        {name: by_field[name].parse(text) if isinstance(text, str) else text for name, text in vars(found).items()}
    )


def options_from_keywords(keywords: Mapping[str, object]) -> ServeOptions:
    """The options of `LLM(**keywords)`: flags without dashes, such as page_size=16 or device_memory="4GiB".

    Raises ConfigError as `parse_serve` does.
    """
    by_keyword = {option.keyword: option for option in all_options()}
    values: dict[str, object] = {}
    for keyword, value in keywords.items():
        option = by_keyword.get(keyword)
        if option is None:
            raise ConfigError(_refusal("--" + keyword.replace("_", "-"), known=tuple(by_keyword), shown=keyword))
        values[option.field] = option.parse(value) if isinstance(value, str) and option.flag.size else value
    return _build(values)


def _build(values: Mapping[str, Any]) -> ServeOptions:
    options = ServeOptions(**values, given=frozenset(values))
    check_servable(options)
    return options


def check_servable(options: ServeOptions) -> None:
    """Raise ConfigError for sizes that the budget knows and the server cannot run: parallel ranks and draft tokens."""
    for option in options_of(ParallelOptions):
        value = getattr(options, option.field)
        if value != option.default:
            raise ConfigError(
                f"{option.name} {value} is not supported when serving: there is one rank on one device and no draft "
                f"model, so leave it at {option.default}."
            )


def _refusal(name: str, *, known: tuple[str, ...], shown: str = "") -> str:
    """The sentence for a flag that is not an option: why the reference's is not honoured, or what it may have meant."""
    why = refusal_of_flag(name)
    if why is not None:
        return why
    shown = shown or name
    close = difflib.get_close_matches(shown, known, n=3, cutoff=0.7)
    if close:
        return f"{shown} is not a flag of twinpool; did you mean {' or '.join(close)}?"
    return f"{shown} is not a flag of twinpool; see twinpool serve --help."


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
