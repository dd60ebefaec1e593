"""`twinpool trace info` and `twinpool trace synthesize`: what a recorded workload holds, and an invented one."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from twinpool.cli.options import parse_options
from twinpool.config.field import Flag
from twinpool.errors import ConfigError
from twinpool.replay.describe import ReuseFacts, Spread, TraceFacts, describe
from twinpool.replay.formats import FORMATS, load_trace
from twinpool.replay.formats.request_log import write
from twinpool.replay.synthetic import SyntheticOptions, synthesize
from twinpool.replay.trace import Trace

_FORMAT_NAMES = ", ".join(known.name for known in FORMATS)
_SHOWN_REJECTS = 5
_INFO_USAGE = "usage: twinpool trace info FILE... [options]\n\nFILE: a trace, compressed or not, an archive, or - .\n"
_MAKE_USAGE = "usage: twinpool trace synthesize [options]\n"
_USAGE = """usage: twinpool trace VERB [options]

  info        lengths, times, turns and reuse of recorded requests
  synthesize  write an invented trace as a request log

  --help    this text; twinpool trace VERB --help for a verb's options
"""


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """Reading"""

    format: Annotated[
        str | None, Flag(f"One of {_FORMAT_NAMES}.", metavar="NAME", default_text="told from the first line")
    ] = None  # fmt: skip
    strict: Annotated[bool, Flag("Stop at the first record that cannot be used instead of leaving it out.")] = False
    json: Annotated[bool, Flag("Print JSON.")] = False


@dataclass(frozen=True, kw_only=True)
class SynthesizeOptions(SyntheticOptions):
    """Workload"""

    output: Annotated[str, Flag("File to write; - is standard output.", aliases=("-o",), metavar="FILE")] = "-"


def run(argv: Sequence[str]) -> int:
    """Run `twinpool trace ...` and return the exit code. Raises ConfigError for bad words, flags and input."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0 if argv else ConfigError.exit_code
    if argv[0] == "info":
        return _info(argv[1:])
    if argv[0] == "synthesize":
        return _synthesize(argv[1:])
    raise ConfigError(f"{argv[0]} is not a verb of twinpool trace; there are info and synthesize.")


def _info(argv: Sequence[str]) -> int:
    options, paths = parse_options(
        InfoOptions, argv, prog="twinpool trace info", usage=_INFO_USAGE, positionals="FILE..."
    )
    if not paths:
        raise ConfigError("twinpool trace info needs at least one FILE; - is standard input.")
    shown = []
    for path in paths:
        trace = load_trace(path, format=options.format, strict=options.strict)
        facts = describe(trace)
        if options.json:
            shown.append(_as_json(facts, trace))
        else:
            print("\n".join(_table(facts, trace)) + "\n")
    if options.json:
        print(json.dumps({"traces": shown}, indent=2))
    return 0


def _synthesize(argv: Sequence[str]) -> int:
    options, _ = parse_options(SynthesizeOptions, argv, prog="twinpool trace synthesize", usage=_MAKE_USAGE)
    trace = synthesize(options)
    if options.output == "-":
        write(trace, sys.stdout)
        return 0
    try:
        with open(options.output, "w", encoding="utf-8") as stream:
            count = write(trace, stream)
    except OSError as error:
        raise ConfigError(f"--output {options.output} cannot be written: {error.strerror}.") from error
    print(f"{count} requests in {options.output}")
    return 0


def _as_json(facts: TraceFacts, trace: Trace) -> dict[str, object]:
    """The facts, with every rejected record in place of their number."""
    rejected = [dataclasses.asdict(rejection) for rejection in trace.rejected]
    return dataclasses.asdict(facts) | {"rejected": len(rejected), "rejections": rejected}


def _table(facts: TraceFacts, trace: Trace) -> Iterator[str]:
    """Lines for people."""
    yield f"{facts.name}  ({facts.format})"
    yield from _counts(facts)
    yield ""
    yield f"  {'':24}{'count':>9}{'mean':>11}{'P10':>11}{'P50':>11}{'P90':>11}{'P99':>11}{'max':>11}"
    rows = (
        ("input tokens", facts.input_tokens), ("output tokens", facts.output_tokens),
        ("context (in+out) tokens", facts.context_tokens), ("growth per turn, tokens", facts.growth_tokens),
        ("turns per session", facts.turns), ("think time, s", facts.think_s), ("answer time, s", facts.api_time_s),
        ("session length, s", facts.session_s), ("tools + system, tokens", facts.preamble_tokens),
        ("shared prefix, tokens", facts.reuse.shared_prefix_tokens if facts.reuse else None),
        ("context drop, tokens", facts.reuse.dropped_tokens if facts.reuse else None),
    )  # fmt: skip
    for label, spread in rows:
        if spread is not None:
            yield _row(label, spread)
    yield ""
    yield from _reuse(facts.reuse, facts.block_size)
    for note in facts.notes:
        yield f"  note: {note}"
    for rejection in trace.rejected[:_SHOWN_REJECTS]:
        yield f"  rejected: {rejection.where}: {rejection.reason}"
    if facts.rejected > _SHOWN_REJECTS:
        yield f"  rejected: {facts.rejected - _SHOWN_REJECTS} more; --json lists them all"


def _counts(facts: TraceFacts) -> Iterator[str]:
    sub = f", {facts.sub_sessions} of them sub-agents or forks" if facts.sub_sessions else ""
    yield f"  {facts.requests:,} requests in {facts.sessions:,} sessions{sub}; {facts.rejected:,} rejected"
    yield f"  {facts.total_input_tokens:,} input tokens, {facts.total_output_tokens:,} output tokens"
    if facts.duration_s is None:
        yield "  every session has a clock of its own: duration and concurrent sessions are unknown"
        return
    yield f"  {facts.duration_s:,.1f} s from first to last arrival"
    if facts.peak_sessions is None:
        yield "  concurrent sessions: unknown"
    else:
        yield f"  concurrent sessions: at most {facts.peak_sessions:,}, median {facts.median_sessions:,}"


def _reuse(reuse: ReuseFacts | None, block_size: int | None) -> Iterator[str]:
    if reuse is None:
        yield "  reuse: unknown, the recorder kept lengths only"
        return
    yield "  reuse with a cache that never forgets:"
    yield (
        f"    {reuse.block_share:.1%} of blocks ({reuse.seen_blocks:,} of {reuse.blocks:,}, {block_size} tokens each), "
        f"{reuse.token_share:.1%} of input tokens ({reuse.seen_tokens:,} of {reuse.tokens:,})"
    )
    yield f"    {reuse.duplicates:,} duplicate prompts, {reuse.context_drops:,} context drops"


def _row(label: str, spread: Spread) -> str:
    values = (spread.mean, spread.p10, spread.p50, spread.p90, spread.p99, spread.max)
    return f"  {label:24}{spread.count:>9,}" + "".join(f"{_number(value):>11}" for value in values)


def _number(value: float) -> str:
    """Integers and large numbers without decimals."""
    return f"{value:,.0f}" if value == round(value) or value >= 1000 else f"{value:,.1f}"
