"""`twinpool VERB ...`: finds the verb, and turns an expected error into one line on stderr and its exit code."""

from __future__ import annotations

import difflib
import io
import os
import select
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


INTERRUPTED, READER_LEFT = 130, 141  # what a shell reports for a command that Ctrl-C or a closed pipe ended


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
        exit_code = run(sys.argv[1:])
        sys.stdout.flush()  # here, where somebody notices that nobody reads any more
        sys.exit(exit_code)
    except BrokenPipeError:
        if not _reader_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it exits
        sys.exit(READER_LEFT)
    except KeyboardInterrupt:
        print("twinpool: interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except TwinpoolError as error:
        print(f"twinpool: error: {' '.join(str(error).splitlines())}", file=sys.stderr)  # a name may hold a line break
        sys.exit(error.exit_code)


def _reader_left() -> bool:
    """Whether nobody reads standard output any more (`twinpool ... | head`), which is no bug; another broken pipe may be one."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":
    main()
