"""`twinpool VERB ...`: finds the verb, and turns an expected error into one line on stderr and its exit code."""

from __future__ import annotations

import difflib
import io
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

from twinpool.errors import ConfigError, TwinpoolError

# verb: what it does. Its module, cli/VERB.py, is imported when it is used: `plan` should not pay for what `replay` needs.
VERBS = {
    "plan": "size the two pools from a model, a launch line or a boot log",
    "replay": "run recorded traffic through the scheduler in virtual time",
    "serve": "serve a model with an OpenAI-compatible API",
    "trace": "describe recorded requests, or invent a workload",
}


def help_text() -> str:
    """What `twinpool --help` prints."""
    lines = ["usage: twinpool VERB [options]", "", "Hybrid language models from two memory pools.", ""]
    lines += [f"  {verb:10}{text}" for verb, text in VERBS.items()]
    lines += ["", "  --help    this text; twinpool VERB --help for a verb's options", "  --version"]
    return "\n".join(lines) + "\n"


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. Raises ConfigError for an unknown verb."""
    if not argv or argv[0] in ("-h", "--help"):
        print(help_text(), end="")
        return 0 if argv else ConfigError.exit_code
    if argv[0] == "--version":
        print(f"twinpool {metadata.version('twinpool')}")
        return 0
    if argv[0] not in VERBS:
        close = difflib.get_close_matches(argv[0], VERBS, n=1)
        raise ConfigError(
            f"{argv[0]} is not a verb of twinpool; {f'did you mean {close[0]}?' if close else 'see twinpool --help.'}"
        )
    exit_code: int = import_module(f"twinpool.cli.{argv[0]}").run(argv[1:])
    return exit_code


def main() -> None:
    """Console entry point. A bug keeps its traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without our characters shows others
    try:
        sys.exit(run(sys.argv[1:]))
    except TwinpoolError as error:
        print(f"twinpool: error: {' '.join(str(error).splitlines())}", file=sys.stderr)  # a name may hold a line break
        sys.exit(error.exit_code)
