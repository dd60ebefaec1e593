"""`twinpool plan`: read flags, launch line or boot log, and print what follows from them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from twinpool.errors import ConfigError, MemoryRefusal
from twinpool.plan.command import Command, read_command

USAGE = """\
usage: twinpool plan MODEL --gpu NAME [options] [-- LAUNCH LINE]
       twinpool plan --boot-log FILE [MODEL] [options] [-- LAUNCH LINE]
       twinpool plan sweep MODEL --gpu NAME [--over slots|ratio] [--html FILE] [options]
       twinpool plan --list-models | --list-gpus

How the memory of a device is divided between weights, recurrent states and KV, before the device is rented: MODEL is a
built-in shape, a folder, a config.json or a hub id. Flags of a launch line are taken as they are, here or after --.
"""


def run(argv: Sequence[str]) -> int:
    """Print the plan and return the exit code: 0, or 3 when the engine would refuse to start.

    Raises ConfigError or ModelError for bad input (exit 2).
    """
    from twinpool.plan import report

    command = _with_trace(read_command(argv, usage=USAGE))
    options = command.options
    if options.list_models or options.list_gpus:
        print(report.models_table() if options.list_models else report.devices_table(), end="")
        return 0
    if options.boot_log is not None:
        return _boot_log(command, options.boot_log)
    if command.sweep:
        return _sweep(command)
    return _vllm(command) if command.engine == "vllm" else _plan(command)


def _with_trace(command: Command) -> Command:
    """The workload of a trace in place of --trace: its mean context, and the sessions that were open beside the running ones.

    What a flag says stands. Raises ConfigError for a trace that cannot be read.
    """
    options = command.options
    if options.trace is None:
        return command
    from twinpool.replay.describe import describe
    from twinpool.replay.formats import load_trace

    trace = load_trace(options.trace)
    if not trace.sessions:
        raise ConfigError(
            f"--trace {options.trace} has no usable request: {len(trace.rejected)} records were left out."
        )
    facts = describe(trace)
    mean = max(1, round(facts.context_tokens.mean))
    running = options.running or command.flags.max_running_requests or facts.median_sessions
    if running is None:
        raise ConfigError(f"--trace {options.trace} does not tell how many requests run at once: give --running.")
    idle = options.idle_sessions or max(0, (facts.peak_sessions or 0) - running)
    text = (
        f"{trace.name}: {facts.requests:,} requests, mean context {mean:,} tokens, P90 {facts.context_tokens.p90:,.0f}"
    )
    merged = replace(
        options,
        running=running,
        tokens_per_request=options.tokens_per_request or mean,
        idle_sessions=idle,
        workload_origin=text,
    )
    return replace(command, options=merged)


def _plan(command: Command) -> int:
    from twinpool.plan import document, report
    from twinpool.plan.run import plan

    result = plan(command)
    print(document.plan_json(result) if command.options.json else report.report_text(result), end="")
    starts = result.sizing.ledger is not None and (result.host is None or result.host.refusal is None)
    return 0 if starts else MemoryRefusal.exit_code


def _boot_log(command: Command, name: str) -> int:
    from twinpool.plan import document, log_report
    from twinpool.plan.log_plan import plan_log

    boots = plan_log(command, _read(name))
    print(document.log_json(boots) if command.options.json else log_report.log_text(boots), end="")
    return 0


def _sweep(command: Command) -> int:
    from twinpool.plan import document
    from twinpool.plan.run import plan
    from twinpool.plan.sweep import sweep
    from twinpool.plan.sweep_report import sweep_page, sweep_text

    result = plan(command)
    if result.workload is None:
        raise ConfigError("A sweep needs a workload: give --running and --tokens-per-request, or --trace.")
    found = sweep(result.workload, result.sizing, command.options)
    if command.options.html is not None:
        try:
            Path(command.options.html).write_text(sweep_page(result, found))
        except OSError as error:
            raise ConfigError(f"--html {command.options.html} cannot be written: {error.strerror or error}.") from error
    print(document.sweep_json(result, found) if command.options.json else sweep_text(result, found), end="")
    return 0


def _vllm(command: Command) -> int:
    from twinpool.plan import document
    from twinpool.plan.vllm_plan import plan_vllm_command, report_text

    result = plan_vllm_command(command)
    print(document.vllm_json(result) if command.options.json else report_text(result), end="")
    return 0 if result.ledger is not None else MemoryRefusal.exit_code


def _read(name: str) -> str:
    """A file's text, or standard input's. Raises ConfigError."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"--boot-log {name} cannot be read: {error.strerror or error}.") from error
    return data.decode("utf-8", errors="replace")
