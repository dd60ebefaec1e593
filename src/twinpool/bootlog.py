"""The boot log (reference 2.1): each line is one format string, from which it is printed and read back; and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from twinpool.memory.ledger import Ledger
from twinpool.memory.refusals import CAPPED_BY_KV, CAPPED_BY_STATES
from twinpool.tables import table_text
from twinpool.units import format_bytes, to_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class BootFacts:
    """What the log of one rank says about one boot; None for what it does not say. *_gb are GiB with two decimals.

    label: the rank as the log prefix names it ('DP0 TP1'), empty without one. Sizes include the padding slot or page,
    `slots` does not. cap, slots_per_request: from the warning that states limit concurrency; requested, granted: from
    the one that KV does.
    """

    label: str = ""
    load_begin_gb: float | None = None
    load_end_gb: float | None = None
    weights_gb: float | None = None
    load_s: float | None = None
    model_class: str | None = None
    quantization: str | None = None
    multimodal_gb: float | None = None
    cap: int | None = None
    slots_per_request: int | None = None
    requested: int | None = None
    granted: int | None = None
    slots: int | None = None
    conv_gb: float | None = None
    ssm_gb: float | None = None
    draft_ssm_gb: float | None = None
    draft_conv_gb: float | None = None
    kv_dtype: str | None = None
    kv_tokens: int | None = None
    k_gb: float | None = None
    v_gb: float | None = None
    kv_gb: float | None = None
    pool_end_gb: float | None = None
    max_total_tokens: int | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int | None = None
    max_running_requests: int | None = None
    context_len: int | None = None
    device: str | None = None
    available_gb: float | None = None


_FIELD = re.compile(r"\{(\w+)(?::([^}]*))?\}")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RANK = re.compile(r"\b(?:DP|PP|TP|EP)\d+\b")


class _Line:
    """One line: a format string, its fields, and the pattern that reads it back."""

    def __init__(self, template: str) -> None:
        self.template = template
        self.kinds = {found[1]: found[2] or "" for found in _FIELD.finditer(template)}
        pattern, at = "", 0
        for found in _FIELD.finditer(template):
            value = {"": r"[^,\s]+", "d": r"-?\d+"}.get(found[2] or "", r"-?\d+(?:\.\d+)?")
            pattern += re.escape(template[at : found.start()]) + f"(?P<{found[1]}>{value})"
            at = found.end()
        self.pattern = re.compile(pattern + re.escape(template[at:].rstrip()))

    def render(self, values: Mapping[str, Any]) -> str:
        """The line with its fields filled in."""
        return self.template.format_map(values)

    def read(self, text: str) -> dict[str, Any] | None:
        """Field values found in a line of text, or None when it is another line."""
        found = self.pattern.search(text)
        if found is None:
            return None
        return {name: _value(found[name], kind) for name, kind in self.kinds.items() if not name.startswith("_")}


def _value(text: str, kind: str) -> int | float | str:
    if kind == "":
        return text
    return int(text) if kind == "d" else float(text)


_LOAD_BEGIN = "Load weight begin. avail mem={load_begin_gb:.2f} GB"
_LOAD_END = (
    "Load weight end. elapsed={load_s:.2f} s, type={model_class}, "
    "avail mem={load_end_gb:.2f} GB, mem usage={weights_gb:.2f} GB."
)
_LOAD_END_QUANT = _LOAD_END.replace("avail mem", "quant={quantization}, avail mem")
_MULTIMODAL = (
    "Reserving {multimodal_gb:.2f} GB of the KV budget for post-sizing multimodal allocations "
    "(feature-transport pools + embedding cache)."
)
_MAMBA = (
    "Mamba Cache is allocated. max_mamba_cache_size: {slots:d}, "
    "conv_state size: {conv_gb:.2f}GB, ssm_state size: {ssm_gb:.2f}GB "
)
_MAMBA_DRAFTS = (
    f"{_MAMBA}intermediate_ssm_state_cache size: {{draft_ssm_gb:.2f}}GB "
    "intermediate_conv_window_cache size: {draft_conv_gb:.2f}GB "
)
_KV = "KV Cache is allocated. dtype: {kv_dtype}, #tokens: {kv_tokens:d}, K size: {k_gb:.2f} GB, V size: {v_gb:.2f} GB"
_KV_LATENT = "KV Cache is allocated. dtype: {kv_dtype}, #tokens: {kv_tokens:d}, KV size: {kv_gb:.2f} GB"
_POOL_END = "Memory pool end. avail mem={pool_end_gb:.2f} GB"
_SCHEDULER = (
    "max_total_num_tokens={max_total_tokens:d}, chunked_prefill_size={chunked_prefill_size:d}, "
    "max_prefill_tokens={max_prefill_tokens:d}, max_running_requests={max_running_requests:d}, "
    "context_len={context_len:d}, available_{device}_mem={available_gb:.2f} GB"
)

# In order of appearance; of two forms of a line the longer comes first, so that it is preferred.
_LINES = tuple(
    _Line(template)
    for template in (
        _LOAD_BEGIN,
        _LOAD_END_QUANT,
        _LOAD_END,
        _MULTIMODAL,
        CAPPED_BY_STATES,
        CAPPED_BY_KV,
        _MAMBA_DRAFTS,
        _MAMBA,
        _KV,
        _KV_LATENT,
        _POOL_END,
        _SCHEDULER,
    )
)

# Forms of other versions: read, never printed.
_TYPE = "type={model_class}, dtype={_dtype}, "
_READ_ONLY = tuple(
    _Line(template)
    for template in (
        _LOAD_END.replace("type={model_class}, ", f"{_TYPE}quant={{quantization}}, "),
        _LOAD_END.replace("type={model_class}, ", _TYPE),
        _LOAD_END.replace("elapsed={load_s:.2f} s, type={model_class}, ", f"{_TYPE}"),
        _LOAD_END.replace("elapsed={load_s:.2f} s, ", ""),
        _KV.replace("dtype: {kv_dtype}, ", ""),
        _KV_LATENT.replace("dtype: {kv_dtype}, ", ""),
        "Post-capture KV sizing: KV cache allocated. dtype: {kv_dtype}, #tokens: {kv_tokens:d}, KV size: {kv_gb:.2f} GB",
        _SCHEDULER.removesuffix(", available_{device}_mem={available_gb:.2f} GB"),
    )
)


def boot_lines(facts: BootFacts) -> tuple[str, ...]:
    """Every line of which all fields are known, in order of appearance (reference 2.1)."""
    values = {name: value for name in facts.__slots__ if (value := getattr(facts, name)) is not None}
    lines: list[str] = []
    printed: set[str] = set()
    for line in _LINES:
        if line.kinds.keys() <= values.keys() and not _is_short_form(line, printed):
            lines.append(line.render(values))
            printed |= line.kinds.keys()
    return tuple(lines)


def _is_short_form(line: _Line, printed: set[str]) -> bool:
    """Whether everything the line says was already printed by its longer form."""
    return line.kinds.keys() <= printed


def pool_facts(ledger: Ledger, *, kv_dtype: str, latent: bool = False) -> BootFacts:
    """The pool lines' numbers: K, and sizes with padding slot and page. latent: MLA, one size for keys and values."""
    kv_gb = _gb(ledger.kv_pool_bytes)
    half = _gb(ledger.kv_pool_bytes / 2)
    facts = BootFacts(
        kv_dtype=f"torch.{kv_dtype}", kv_tokens=ledger.kv_tokens,
        kv_gb=kv_gb if latent else None, k_gb=None if latent else half, v_gb=None if latent else half,
    )  # fmt: skip
    if not ledger.max_mamba_cache_size:
        return facts
    facts = replace(
        facts,
        slots=ledger.max_mamba_cache_size,
        conv_gb=_gb(ledger.conv_pool_bytes),
        ssm_gb=_gb(ledger.ssm_pool_bytes + ledger.extra_pool_bytes),
    )
    if not ledger.draft_ssm_bytes:
        return facts
    return replace(facts, draft_ssm_gb=_gb(ledger.draft_ssm_bytes), draft_conv_gb=_gb(ledger.draft_conv_bytes))


def _gb(size_bytes: float) -> float:
    return round(to_gib(size_bytes), 2)


def pool_lines(ledger: Ledger, *, kv_dtype: str, latent: bool = False) -> tuple[str, ...]:
    """The ledger's warnings (W1, W2 and ours), then `Mamba Cache is allocated` and `KV Cache is allocated`."""
    return (*ledger.warnings, *boot_lines(pool_facts(ledger, kv_dtype=kv_dtype, latent=latent)))


def load_begin_line(available_bytes: int) -> str:
    """Before the weights are loaded."""
    return _LOAD_BEGIN.format(load_begin_gb=to_gib(available_bytes))


def load_end_line(*, elapsed_s: float, model_class: str, available_bytes: int, used_bytes: int) -> str:
    """After the weights are loaded."""
    return _LOAD_END.format(
        load_s=elapsed_s, model_class=model_class, load_end_gb=to_gib(available_bytes), weights_gb=to_gib(used_bytes)
    )


def pool_end_line(available_bytes: int) -> str:
    """After both pools are allocated."""
    return _POOL_END.format(pool_end_gb=to_gib(available_bytes))


def scheduler_line(
    ledger: Ledger,
    *,
    chunked_prefill_size: int | None,
    max_prefill_tokens: int,
    context_len: int,
    available_bytes: int,
    device: str = "cpu",
) -> str:
    """The line of the scheduler; chunking off prints -1, and any device but 'cpu' is called gpu."""
    return _SCHEDULER.format(
        max_total_tokens=ledger.logical_tokens,
        chunked_prefill_size=-1 if chunked_prefill_size is None else chunked_prefill_size,
        max_prefill_tokens=max_prefill_tokens,
        max_running_requests=ledger.max_running_requests,
        context_len=context_len,
        device="cpu" if device == "cpu" else "gpu",
        available_gb=to_gib(available_bytes),
    )


def tree_line(*, hybrid_ssm: bool, hicache_attached: bool = False) -> str:
    """Which prefix cache runs."""
    return (
        f"Tree cache initialized: source=builtin impl=twinpool hybrid_swa=False hybrid_ssm={hybrid_ssm} "
        f"hicache_attached={hicache_attached}"
    )


_BEFORE_POOLS = {"load_begin_gb", "load_s", "multimodal_gb", "cap", "requested"}


def parse(text: str) -> tuple[BootFacts, ...]:
    """Read boot lines back from a log with anything around them: prefixes, colours, several ranks, several boots.

    One BootFacts per rank and boot, in order of first appearance; () when no line is known. The first of several equal
    lines of a boot counts: a draft model loads and allocates after the target.
    """
    boots: list[BootFacts] = []
    current: dict[str, int] = {}
    waiting: dict[
        str, dict[str, Any]
    ] = {}  # lines that come before pools, seen after them: a draft model, or the next boot
    for raw in text.splitlines():
        plain = _COLOUR.sub("", raw)
        found = next((values for line in (*_LINES, *_READ_ONLY) if (values := line.read(plain)) is not None), None)
        if found is None:
            continue
        label = _label(plain)
        facts = boots[current[label]] if label in current else None
        late = facts is not None and (facts.conv_gb is not None or facts.kv_tokens is not None)
        if late and found.keys() & _BEFORE_POOLS:
            waiting[label] = found if "load_begin_gb" in found else waiting.get(label, {}) | found
            continue
        if facts is None or _starts_again(facts, found):
            current[label] = len(boots)
            facts = BootFacts(label=label, **waiting.pop(label, {}))
            boots.append(facts)
        new = {name: value for name, value in found.items() if getattr(facts, name) is None}
        boots[current[label]] = replace(facts, **new)
    return tuple(boots)


def _starts_again(facts: BootFacts, found: Mapping[str, Any]) -> bool:
    """Whether a line can only belong to a later boot of the same rank."""
    done = facts.max_total_tokens is not None
    return ("conv_gb" in found and facts.conv_gb is not None) or (done and "kv_tokens" in found)


def _label(line: str) -> str:
    """The rank in the first brackets of a line's prefix."""
    bracket = re.search(r"\[[^\]]*\]", line)
    return " ".join(_RANK.findall(bracket[0])) if bracket else ""


def ledger_table(ledger: Ledger) -> str:
    """Every byte of the ledger: what, size, origin, note; parts of another line are indented below it."""
    rows: list[tuple[str, str, str, str]] = []
    for line in ledger.lines:
        if line.part_of:
            continue
        rows.append((line.name, format_bytes(line.bytes), line.origin, line.note))
        rows += [
            (f"  of it {part.name}", format_bytes(part.bytes), part.origin, part.note)
            for part in ledger.lines
            if part.part_of == line.name
        ]
    rows.append(("whole", format_bytes(ledger.whole_bytes), "measured", ""))
    return table_text(("memory", "size", "origin", "note"), rows, right={1})


def values_table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Resolved values: (name, value, origin), aligned."""
    return table_text(("name", "value", "origin"), tuple(rows))
