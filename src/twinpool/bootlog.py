"""The boot log and the per-batch lines: same wording and units as operators know them (reference 2.1–2.3), written and read here.

GB in these lines is 2**30 bytes. Sizes include the padding slot and page; max_mamba_cache_size does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twinpool.memory.ledger import Ledger
from twinpool.units import format_bytes, to_gib


def load_begin_line(*, available_bytes: int) -> str:
    """Before the weights are loaded."""
    return f"Load weight begin. avail mem={to_gib(available_bytes):.2f} GB"


def load_end_line(*, elapsed_s: float, model_class: str, available_bytes: int, used_bytes: int) -> str:
    """After the weights are loaded."""
    return (
        f"Load weight end. elapsed={elapsed_s:.2f} s, type={model_class}, avail mem={to_gib(available_bytes):.2f} GB, "
        f"mem usage={to_gib(used_bytes):.2f} GB."
    )


def mamba_cache_line(ledger: Ledger) -> str:
    """The state pool. No space before GB and a trailing space, as there."""
    n_slots = ledger.max_mamba_cache_size + 1
    line = (
        f"Mamba Cache is allocated. max_mamba_cache_size: {ledger.max_mamba_cache_size}, "
        f"conv_state size: {to_gib(n_slots * ledger.conv_bytes):.2f}GB, ssm_state size: {to_gib(n_slots * ledger.ssm_bytes):.2f}GB "
    )
    if ledger.draft_scratch_bytes:
        conv = ledger.draft_scratch_bytes * ledger.conv_bytes // ledger.slot_bytes
        line += (
            f"intermediate_ssm_state_cache size: {to_gib(ledger.draft_scratch_bytes - conv):.2f}GB "
            f"intermediate_conv_window_cache size: {to_gib(conv):.2f}GB "
        )
    return line


def kv_cache_line(ledger: Ledger, *, dtype: str) -> str:
    """The KV pool, half keys and half values."""
    half = to_gib(ledger.kv_bytes / 2)
    return f"KV Cache is allocated. dtype: torch.{dtype}, #tokens: {ledger.kv_tokens}, K size: {half:.2f} GB, V size: {half:.2f} GB"


def pool_end_line(*, available_bytes: int) -> str:
    """Both pools are allocated."""
    return f"Memory pool end. avail mem={to_gib(available_bytes):.2f} GB"


def tree_line(*, implementation: str) -> str:
    """The prefix cache."""
    return f"Tree cache initialized: source=builtin impl={implementation} hybrid_swa=False hybrid_ssm=True hicache_attached=False"


def scheduler_line(
    ledger: Ledger, *, chunked_prefill_size: int | None, max_prefill_tokens: int, context_len: int, available_bytes: int
) -> str:
    """What the scheduler works with; chunked_prefill_size -1 when chunking is off."""
    return (
        f"max_total_num_tokens={ledger.kv_tokens}, chunked_prefill_size={chunked_prefill_size or -1}, "
        f"max_prefill_tokens={max_prefill_tokens}, max_running_requests={ledger.max_running_requests}, context_len={context_len}, "
        f"available_cpu_mem={to_gib(available_bytes):.2f} GB"
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Aligned text columns; indices in `right` are right-aligned."""
    cells = [list(headings), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    lines = []
    for row in cells:
        parts = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(parts).rstrip())
    return lines


def ledger_table(ledger: Ledger) -> list[str]:
    """Every byte of the device, one line each, and the whole."""
    rows = [(line.name, format_bytes(line.size_bytes), line.origin, line.note) for line in ledger.lines]
    rows.append(("device", format_bytes(ledger.total_bytes), "measured", "free memory before the weights, the sum of the above"))
    return table(("memory", "size", "origin", "note"), rows, right=frozenset({1}))


def values_table(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    """Resolved options: name, value, origin."""
    return table(("option", "value", "origin"), rows)


def prefill_line(
    *,
    n_new_seqs: int,
    n_new_tokens: int,
    n_cached_tokens: int,
    full_usage: float,
    mamba_usage: float,
    n_running: int,
    n_queued: int,
    n_pending_tokens: int,
    tokens_per_s: float,
) -> str:
    """One prefill batch of a hybrid model (reference 2.2)."""
    return (
        f"Prefill batch, #new-seq: {n_new_seqs}, #new-token: {n_new_tokens}, #cached-token: {n_cached_tokens}, "
        f"full token usage: {full_usage:.2f}, mamba usage: {mamba_usage:.2f}, #running-req: {n_running}, #queue-req: {n_queued}, "
        f"#pending-token: {n_pending_tokens}, cuda graph: False, input throughput (token/s): {tokens_per_s:.2f}"
    )


def decode_line(
    *, n_running: int, n_full_tokens: int, full_usage: float, n_mamba: int, mamba_usage: float, tokens_per_s: float, n_queued: int
) -> str:
    """A decode batch of a hybrid model, every --decode-log-interval steps (reference 2.2)."""
    return (
        f"Decode batch, #running-req: {n_running}, #full token: {n_full_tokens}, full token usage: {full_usage:.2f}, "
        f"mamba num: {n_mamba}, mamba usage: {mamba_usage:.2f}, cuda graph: False, gen throughput (token/s): {tokens_per_s:.2f}, "
        f"#queue-req: {n_queued}"
    )


def retract_line(
    *, n_requests: int, n_new_tokens_gained: int, n_slots_gained: int, ratio_before: float, ratio_after: float
) -> str:
    """Requests were sent back because KV ran short (reference 2.3)."""
    return (
        f"KV cache pool is full. Retract requests. #retracted_reqs: {n_requests}, #new_tokens_gained: {n_new_tokens_gained}, "
        f"#mamba_num_gained: {n_slots_gained}, #new_token_ratio: {ratio_before:.4f} -> {ratio_after:.4f}"
    )


@dataclass(frozen=True, slots=True)
class BootFacts:
    """What one boot of one rank says of itself; None where the log has no such line. Sizes in GiB as printed."""

    max_mamba_cache_size: int | None = None
    conv_gib: float | None = None
    ssm_gib: float | None = None
    draft_ssm_gib: float | None = None
    kv_dtype: str | None = None
    kv_tokens: int | None = None
    kv_gib: float | None = None
    max_running_requests: int | None = None
    context_len: int | None = None
    chunked_prefill_size: int | None = None
    available_gib: float | None = None


_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_PATTERNS = {
    "mamba": re.compile(
        rf"Mamba Cache is allocated\. max_mamba_cache_size: (\d+), conv_state size: {_NUMBER}GB, ssm_state size: {_NUMBER}GB"
        rf"(?: intermediate_ssm_state_cache size: {_NUMBER}GB)?"
    ),
    "mha": re.compile(
        rf"KV Cache is allocated\. dtype: ([\w.]+), #tokens: (\d+), K size: {_NUMBER} GB, V size: {_NUMBER} GB"
    ),
    "mla": re.compile(rf"KV Cache is allocated\. dtype: ([\w.]+), #tokens: (\d+), KV size: {_NUMBER} GB"),
    "scheduler": re.compile(
        r"max_total_num_tokens=(\d+), chunked_prefill_size=(-?\d+), max_prefill_tokens=(\d+), max_running_requests=(\d+), "
        rf"context_len=(\d+)(?:, available_[cg]pu_mem={_NUMBER} GB)?"
    ),
}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)


def parse(text: str) -> BootFacts:
    """Read one rank's boot lines back, whatever stands before or between them; of several boots the last wins."""
    facts: dict[str, int | float | str | None] = {}
    for line in _COLOUR.sub("", text).splitlines():
        if found := _PATTERNS["mamba"].search(line):
            facts.update(
                max_mamba_cache_size=int(found[1]), conv_gib=float(found[2]), ssm_gib=float(found[3]), draft_ssm_gib=_number(found[4])
            )
        elif found := _PATTERNS["mha"].search(line):
            facts.update(
                kv_dtype=found[1].removeprefix("torch."), kv_tokens=int(found[2]), kv_gib=round(float(found[3]) + float(found[4]), 2)
            )
        elif found := _PATTERNS["mla"].search(line):
            facts.update(kv_dtype=found[1].removeprefix("torch."), kv_tokens=int(found[2]), kv_gib=float(found[3]))
        elif found := _PATTERNS["scheduler"].search(line):
            facts.update(
                chunked_prefill_size=int(found[2]), max_running_requests=int(found[4]), context_len=int(found[5]),
                available_gib=_number(found[6]),
            )  # fmt: skip
    return BootFacts(**facts)  # type: ignore[arg-type]  # each key is written with its own type above
