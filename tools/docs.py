"""Write the generated pages of docs/ and the "Files" part of ARCHITECTURE.md; with --check, fail when one does not match.

python tools/docs.py            # write the pages
python tools/docs.py --check    # exit 1 and name the pages that drifted
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import docs_files
import docs_plan_json
from twinpool import errors
from twinpool.cli.trace import InfoOptions, SynthesizeOptions
from twinpool.config import command_line
from twinpool.config.command_line import FlagRow
from twinpool.config.deployment import Deployment
from twinpool.config.flags import flag_rows
from twinpool.config.refused import refusals
from twinpool.metrics import CATALOGUE, USUAL_LABELS
from twinpool.plan.options import GROUPS as PLAN_GROUPS
from twinpool.replay.calibrate import MeasureOptions
from twinpool.replay.options import ReplayOutputOptions, TimeOptions, TrafficOptions
from twinpool.replay.sweep_cli import AxisOptions, SpreadOptions

ROOT = Path(__file__).resolve().parents[1]
NOTE = "<!-- Written by tools/docs.py (make docs); edit the code it is made from, not this page. -->"


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[str]:
    lines = [head, tuple("-" for _ in head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines] + [""]


def flags_page() -> str:
    """Every flag of serve, plan and replay by group, and every refused flag and value with its reason."""
    lines = [NOTE, "# Flags", "", "## `twinpool serve`", ""]
    lines += ["`LLM(...)` takes the same names as keywords: `--page-size 16` is `page_size=16`.", ""]
    lines += _flag_tables(flag_rows())
    lines += ["## `twinpool plan`", "", "How they go together: [plan.md](plan.md).", ""]
    lines += _flag_tables(command_line.rows_of(PLAN_GROUPS))
    lines += [
        "## `twinpool replay`",
        "",
        "What they do together: [replay.md](replay.md). The machine is described by the flags of ",
    ]
    lines[-1] += "`twinpool plan` above, under *Machine and model*, and the launch line by those below."
    lines += ["", *_flag_tables(command_line.rows_of([ReplayOutputOptions, TrafficOptions, TimeOptions]))]
    lines += ["## `twinpool replay sweep`", "", "Beside those of `twinpool replay`: [replay.md](replay.md#sweep).", ""]
    lines += _flag_tables(command_line.rows_of([AxisOptions, SpreadOptions]))
    lines += [
        "## `twinpool replay calibrate`",
        "",
        "Beside the machine's: [replay-calibrate.md](replay-calibrate.md).",
        "",
    ]
    lines += _flag_tables(command_line.rows_of([MeasureOptions]))
    lines += ["## `twinpool trace`", "", "`info` describes files, `synthesize` writes an invented trace.", ""]
    lines += _flag_tables(command_line.rows_of([InfoOptions, SynthesizeOptions]))
    lines += ["## Flags of a launch line", ""]
    lines += [
        "A plan or a replay also reads the flags of `twinpool serve` above, and these, which other engines have or where they "
    ]
    lines[-1] += "allow more. A flag that changes no memory is named in the report; nothing is ignored in silence."
    lines += ["", *_rows_table(_launch_rows())]
    lines += ["## Known and refused", ""]
    lines += ["Flags of the reference that `twinpool serve` does not honour. None is ignored.", ""]
    by_reason = itertools.groupby(refusals().flags.items(), key=lambda item: item[1])
    lines += _table(
        ("Flags", "Why"), ((" ".join(f"`{name}`" for name, _ in items), f"{why}.") for why, items in by_reason)
    )
    by_value = itertools.groupby(refusals().values.items(), key=lambda item: (item[0][0], item[1]))
    values = ((f"`{flag}`", " ".join(f"`{key[1]}`" for key, _ in items), f"{why}.") for (flag, why), items in by_value)
    lines += _table(("Flag", "Values", "Why"), values)
    return "\n".join(lines).rstrip() + "\n"


def _flag_tables(rows: Iterable[FlagRow]) -> list[str]:
    lines = []
    for group, members in itertools.groupby(rows, key=lambda row: row.group):
        lines += [f"### {group}", "", *_rows_table(members)]
    return lines


def _rows_table(rows: Iterable[FlagRow]) -> list[str]:
    cells = (
        (
            " ".join(f"`{name}`" for name in (row.name, *row.aliases)),
            f"`{row.metavar}`" if row.metavar else "",
            row.default,
            row.help,
        )
        for row in rows
    )
    return _table(("Flag", "Value", "Default", "Meaning"), cells)


def _launch_rows() -> Iterator[FlagRow]:
    """Options of a launch line that the server lacks, or that have another text, value or default there."""
    served = {(row.name, row.aliases, row.metavar, row.default, row.help) for row in flag_rows()}
    for row in command_line.rows_of([Deployment]):
        if (row.name, row.aliases, row.metavar, row.default, row.help) not in served:
            yield row


def _classes(root: type[errors.TwinpoolError]) -> Iterator[type[errors.TwinpoolError]]:
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child
            yield from _classes(child)


def errors_page() -> str:
    """Every expected error with its exit code or HTTP status."""
    lines = [NOTE, "# Errors", ""]
    lines += ["An expected error is one sentence: what was needed, what there is, what would fit, which flag.", ""]
    lines += ["A traceback is a bug.", "", "## On the command line", ""]
    found = list(_classes(errors.TwinpoolError))
    lines += _table(
        ("Error", "Exit code", "When"),
        (
            (f"`{one.__name__}`", str(one.exit_code), one.__doc__ or "")
            for one in found
            if not issubclass(one, errors.RequestError)
        ),
    )
    lines += ["## In an answer of the server", ""]
    lines += _table(
        ("Error", "HTTP status", "`code`", "When"),
        (
            (f"`{one.__name__}`", str(one.status), f"`{one.code}`", one.__doc__ or "")
            for one in found
            if issubclass(one, errors.RequestError) and one is not errors.RequestError
        ),
    )
    lines += ["Flags that are known and refused: [flags.md](flags.md#known-and-refused).", ""]
    return "\n".join(lines).rstrip() + "\n"


def metrics_page() -> str:
    """Every metric with its kind, labels and meaning."""
    lines = [NOTE, "# Metrics", "", "Served at `/metrics` with `--enable-metrics`. Every metric also has the labels "]
    lines[-1] += f"{', '.join(f'`{name}`' for name in USUAL_LABELS)}."
    lines.append("")
    rows = ((f"`{one.name}`", one.kind, " ".join(f"`{label}`" for label in one.labels), one.help) for one in CATALOGUE)
    lines += _table(("Metric", "Kind", "Own labels", "Meaning"), rows)
    return "\n".join(lines).rstrip() + "\n"


# Path below the root: its text.
PAGES: dict[str, Callable[[], str]] = {
    "docs/flags.md": flags_page,
    "docs/errors.md": errors_page,
    "docs/metrics.md": metrics_page,
    "docs/plan-json.md": lambda: docs_plan_json.page(NOTE),
    "ARCHITECTURE.md": lambda: docs_files.architecture_page(ROOT),
}


def drifted(root: Path) -> list[str]:
    """Names of the pages below `root` that are missing or differ from the code. Raises ValueError as the pages do."""
    return [name for name, page in PAGES.items() if not (root / name).exists() or (root / name).read_text() != page()]


def main() -> int:
    """Write or check the pages; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page differs from the code")
    if not parser.parse_args().check:
        for name, page in PAGES.items():
            (ROOT / name).write_text(page())
        return 0
    found = drifted(ROOT)
    for name in found:
        print(f"{name} does not match the code; run: make docs", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
