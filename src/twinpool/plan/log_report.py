"""A boot log's comparison for people."""

from __future__ import annotations

from twinpool.plan.log_line import EQUAL
from twinpool.plan.log_plan import LogOutcome
from twinpool.plan.report import report_text
from twinpool.tables import table_text
from twinpool.units import format_bytes


def log_text(boots: tuple[LogOutcome, ...]) -> str:
    """Every boot: constants, checks, and the plan from its numbers."""
    return "\n".join(_boot(boot, number, len(boots)) for number, boot in enumerate(boots, 1))


def _boot(boot: LogOutcome, number: int, count: int) -> str:
    """One boot; rows that are equal on every rank are not repeated for each."""
    head = f"Boot {number} of {count}, {len(boot.ranks)} rank{'s' * (len(boot.ranks) > 1)} in the log; {boot.explains} explains it best"
    token = (
        "; it has no KV size" if boot.kv_bytes_per_token is None else f", a token of {boot.kv_bytes_per_token:,} bytes"
    )
    constants = f"  read off the log: a slot of {format_bytes(boot.slot_bytes)}{token}"
    rows = [(check.rank, check.what, check.logged, check.ours, check.verdict, check.note) for check in boot.checks]
    table = table_text(("rank", "line", "logged", "ours", "", ""), rows, right=(2, 3))
    equal = sum(check.verdict == EQUAL for check in boot.checks)
    notes = [f"  note: {note}" for note in boot.notes]
    summary = f"{equal} of {len(boot.checks)} lines are equal."
    return "\n".join([head, constants, *notes, "", table, summary, "", report_text(boot.outcome)])
