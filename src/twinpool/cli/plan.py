"""`twinpool plan`: read flags, launch line or boot log, and print what follows from them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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

    command = read_command(argv, usage=USAGE)
    options = command.options
    if options.list_models or options.list_gpus:
        print(report.models_table() if options.list_models else report.devices_table(), end="")
        return 0
    if options.boot_log is not None:
        return _boot_log(command, options.boot_log)
    if command.sweep:
        return _sweep(command)
    return _vllm(command) if command.engine == "vllm" else _plan(command)


def _plan(command: Command) -> int:
    from twinpool.plan import document, report
    from twinpool.plan.run import plan

    result = plan(command)
    print(document.plan_json(result) if command.options.json else report.report_text(result), end="")
    return 0 if result.sizing.ledger is not None else MemoryRefusal.exit_code


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
