"""defaults.toml, read once: what a model or the size of the device decides when a flag is not given."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from typing import Any

from twinpool.units import GIB, MIB


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files("twinpool.config").joinpath("defaults.toml").read_text())


def model_default(key: str, *, architecture: str, family: str, engine: str) -> tuple[Any, bool]:
    """(value, whether the model has its own) of a model default (reference 3.5); engine: name of its EngineRules."""
    models = _table()["models"]
    for table in (_table()["engines"].get(engine, {}), models):
        for name in (architecture, family):
            if key in table.get(name, {}):
                return table[name][key], True
    return models["default"][key], False


def chunked_prefill_tokens(capacity_bytes: int | None) -> int:
    """Default --chunked-prefill-size in tokens for a device of this size (reference 1.2)."""
    if capacity_bytes is None:
        return int(_table()["unknown_memory"]["chunked_prefill_size"])
    rows = _table()["chunked_prefill_size"]
    return next(int(row["tokens"]) for row in rows if capacity_bytes < row["below_gib"] * GIB)


def decode_graph_requests(capacity_bytes: int | None, *, tp: int, running: int | None) -> int:
    """Largest batch for which a decode graph is captured by default (reference 1.2); running: --max-running-requests."""
    if capacity_bytes is None:
        largest = int(_table()["unknown_memory"]["decode_graph_requests"])
    else:
        rows = _table()["decode_graph_requests"]
        row = next(row for row in rows if capacity_bytes < row["below_gib"] * GIB)
        largest = int(row["tp_4_or_more" if tp >= 4 else "tp_below_4"])
    return largest if running is None else min(largest, running)


def static_fraction(
    capacity_bytes: int | None, *, prefill_tokens: int, ranks: int, graph_requests: int | None = None
) -> float:
    """Default --mem-fraction-static for a device of this size and steps of up to `prefill_tokens` (reference 1.2).

    ranks: tp times pp. graph_requests: largest captured decode batch; None for an engine without graphs, which on a
    small device reserves less than the formula, see defaults.toml.
    """
    if capacity_bytes is None:
        return float(_table()["unknown_memory"]["mem_fraction_static"])
    rule = _table()["mem_fraction_static"]
    capacity_mib = capacity_bytes / MIB
    reserved_mib = rule["base_mib"] + rule["per_rank_mib"] * ranks
    reserved_mib += rule["per_prefill_token_mib"] * max(prefill_tokens, rule["min_prefill_tokens"])
    if graph_requests is not None:
        reserved_mib += rule["per_graph_request_mib"] * graph_requests
    if capacity_bytes > rule["large_above_gib"] * GIB:
        reserved_mib = max(reserved_mib, rule["large_reserved_mib"])
    if graph_requests is None:
        reserved_mib = min(reserved_mib, rule["largest_share"] * capacity_mib)
    return float(round((capacity_mib - reserved_mib) / capacity_mib, 3))
