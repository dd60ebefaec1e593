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
        return _boot_log(command, _read(options.boot_log))
    if command.sweep:
        return _sweep(command)
    return _plan(command)


def _plan(command: Command) -> int:
    from twinpool.plan import document, report
    from twinpool.plan.run import plan

    result = plan(command)
    print(document.text(result) if command.options.json else report.report_text(result), end="")
    return 0 if result.sizing.ledger is not None else MemoryRefusal.exit_code


def _read(name: str) -> str:
    """A file's text, or standard input's. Raises ConfigError."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"--boot-log {name} cannot be read: {error.strerror or error}.") from error
    return data.decode("utf-8", errors="replace")
