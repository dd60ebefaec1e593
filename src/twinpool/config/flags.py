"""From a command line, or from keywords of `LLM(...)`, to ServeOptions; what a flag is comes from config/options.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twinpool.config import command_line
from twinpool.config.command_line import FlagRow, read_command_line, unknown_flag
from twinpool.config.field import options_of
from twinpool.config.options import GROUPS, ParallelOptions, ServeOptions, all_options
from twinpool.config.refused import refusal_of_flag
from twinpool.errors import ConfigError

PROG = "twinpool serve"
_USAGE = """\
usage: twinpool serve [--model-path PATH] [options]

Serve a hybrid language model (full attention + linear attention) from two memory pools, with an OpenAI-compatible API.
"""
_FOOTER = "A flag of the reference that is not listed here is refused with the reason (docs/flags.md lists them all)."


def flag_rows() -> tuple[FlagRow, ...]:
    """Every honoured flag, in the order of config/options.py."""
    return command_line.rows_of(GROUPS)


def help_text() -> str:
    """What `twinpool serve --help` prints."""
    return command_line.help_text(flag_rows(), usage=_USAGE, footer=_FOOTER)


def parse_serve(argv: Sequence[str]) -> ServeOptions:
    """The options of `twinpool serve ARGV...`. --help prints and exits 0.

    Raises ConfigError for an unknown flag (with close matches), a known one that is not honoured, or a bad value.
    """
    known = tuple(command_line.by_flag(all_options()))
    values, words = read_command_line(
        all_options(), argv, prog=PROG, help_text=help_text, refusal=lambda name: _refusal(name, known=known)
    )
    if words:
        raise ConfigError(f"'{words[0]}' belongs to no flag; see twinpool serve --help.")
    return _build(values)


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
        if isinstance(value, str) and (option.flag.size or (value and value == option.flag.unset)):
            value = option.parse(value)
        values[option.field] = value
    return _build(values)


def _build(values: Mapping[str, Any]) -> ServeOptions:
    options = ServeOptions(**values, given=frozenset(values))
    check_servable(options)
    return options


def check_servable(options: ServeOptions) -> None:
    """Raise ConfigError for what the budget knows and the server cannot run: other ranks than tensor parallel ones, and draft
    tokens.
    """
    for option in options_of(ParallelOptions):
        value = getattr(options, option.field)
        if value != option.default and option.field != "tp_size":
            raise ConfigError(
                f"{option.name} {value} is not supported when serving: there is one worker of --tp-size ranks and no draft "
                f"model, so leave it at {option.default}."
            )


def _refusal(name: str, *, known: tuple[str, ...], shown: str = "") -> str:
    """The sentence for a flag that is not an option: why the reference's is not honoured, or what it may have meant."""
    return refusal_of_flag(name) or unknown_flag(shown or name, known=known, prog=PROG, whose="twinpool")
