"""One line of a boot log's comparison, and when two of its numbers are the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from twinpool.bootlog import BootFacts

EQUAL, ROUNDING, DIFFERS, UNKNOWN = "equal", "within the log's rounding", "differs", "not determined"
HALF_CENT_GIB = 0.005
# Source of a model of which only the log is known.
LOG_CONSTANTS = "constants of the boot log"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCheck:
    """One line of the comparison. verdict: equal, within the log's rounding, differs, or not determined (note: what is missing)."""

    rank: str
    what: str
    logged: str
    ours: str
    verdict: str
    note: str = ""


def gib(value: float) -> str:
    """A size in GiB as the log prints it."""
    return f"{value:.2f} GiB"


def near(a: float, b: float, steps: float = 1) -> str:
    """Whether two sizes in GiB are the same when one of them was rounded to two decimals `steps` times."""
    return EQUAL if abs(a - b) <= steps * HALF_CENT_GIB + 1e-9 else DIFFERS


def kv_gib(facts: BootFacts) -> float | None:
    """Size of the KV pool, GiB; None where the log does not say it."""
    if facts.kv_gb is not None:
        return facts.kv_gb
    return None if facts.k_gb is None or facts.v_gb is None else facts.k_gb + facts.v_gb


def least(ranks: Iterable[BootFacts], name: str) -> float | None:
    """The smallest value of a fact over ranks; None where no rank says it."""
    values: list[float] = [value for facts in ranks if (value := getattr(facts, name)) is not None]
    return min(values, default=None)
