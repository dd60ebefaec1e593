"""The boot log (reference 2.1): what a rank says about its boot, printed and read back out of noise; and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from twinpool.bootlines import (
    DISK,
    HOST_AUTO,
    HOST_COVER,
    HOST_FEW_BYTES,
    HOST_FEW_STATES,
    HOST_FEW_TOKENS,
    HOST_KV,
    HOST_SHARED,
    HOST_STATES,
    HOST_TOO_SMALL,
    LINES,
    LOAD_BEGIN,
    LOAD_END,
    POOL_END,
    RESIZED,
    SCHEDULER,
    Line,
    found_lines,
)
from twinpool.config.resolve import Resolved
from twinpool.memory.host import HostArena
from twinpool.memory.host_advice import DEFAULT_RATIO, HostMemory, cover_advice, pools_bytes
from twinpool.memory.host_budget import allowed_bytes, is_automatic
from twinpool.memory.host_cover import balanced_context_tokens, host_cover
from twinpool.memory.ledger import Ledger
from twinpool.tables import table_text
from twinpool.units import GB, count, format_bytes, format_decimal_bytes, to_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class BootFacts:
    """What the log of one rank says about one boot; None for what it does not say. *_gb are GiB with two decimals.

    label: the rank as the log prefix names it ('DP0 TP1'), empty without one. Sizes include the padding slot or page,
    `slots` does not. cap, slots_per_request: from the warning that states limit concurrency; requested, granted: from
    the one that KV does. dist_gb: what setting up the ranks took before the load. weights_gb and load_end_gb include a
    draft model that is loaded before the pools. resized: KV was sized once more after graphs were captured.
    """

    label: str = ""
    dist_s: float | None = None
    dist_gb: float | None = None
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
    resized: bool = False


# What torch calls dtypes that a flag calls otherwise.
_TORCH_NAMES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
_COLOUR = re.compile(r"(?:\x1b|\\u001b|\\x1b|\\033)\[[0-9;]*[A-Za-z]")
_BRACKETS = re.compile(r"\[[^\[\]]*\]")
_RANK = re.compile(r"\b(?:DP|PP|TP|EP|CP)\d+\b")


def boot_lines(facts: BootFacts) -> tuple[str, ...]:
    """Every line of which all fields are known, in order of appearance (reference 2.1)."""
    values = {name: value for name in facts.__slots__ if (value := getattr(facts, name)) is not None}
    lines: list[str] = []
    printed: set[str] = set()
    for line in LINES:
        if line.kinds.keys() <= values.keys() and not _is_short_form(line, printed):
            lines.append(line.render(values))
            printed |= line.kinds.keys()
    return tuple(lines)


def _is_short_form(line: Line, printed: set[str]) -> bool:
    """Whether everything the line says was already printed by its longer form."""
    return line.kinds.keys() <= printed


def pool_facts(ledger: Ledger, *, kv_dtype: str, latent: bool = False) -> BootFacts:
    """The pool lines' numbers: K, and sizes with padding slot and page. latent: MLA, one size for keys and values."""
    kv_gb = _gb(ledger.kv_pool_bytes)
    half = _gb(ledger.kv_pool_bytes / 2)
    facts = BootFacts(
        kv_dtype=f"torch.{_TORCH_NAMES.get(kv_dtype, kv_dtype)}", kv_tokens=ledger.kv_tokens,
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
    """`Mamba Cache is allocated` and `KV Cache is allocated`."""
    return boot_lines(pool_facts(ledger, kv_dtype=kv_dtype, latent=latent))


def load_begin_line(available_bytes: int) -> str:
    """Before the weights are loaded."""
    return LOAD_BEGIN.format(load_begin_gb=to_gib(available_bytes))


def load_end_line(*, elapsed_s: float, model_class: str, available_bytes: int, used_bytes: int) -> str:
    """After the weights are loaded."""
    return LOAD_END.format(
        load_s=elapsed_s, model_class=model_class, load_end_gb=to_gib(available_bytes), weights_gb=to_gib(used_bytes)
    )


def pool_end_line(available_bytes: int) -> str:
    """After both pools are allocated."""
    return POOL_END.format(pool_end_gb=to_gib(available_bytes))


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
    return SCHEDULER.format(
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


def host_lines(arena: HostArena, ledger: Ledger, *, context_len: int) -> tuple[str, ...]:
    """What the host tier takes, and for how many sessions that is enough (reference 2.1).

    The sessions are of the length of host_cover.balanced_context_tokens.
    """
    host_tokens = arena.most_pages * ledger.page_size
    context_tokens = balanced_context_tokens(ledger, context_len=context_len)
    cover = host_cover(arena, page_size=ledger.page_size, context_tokens=context_tokens)
    covered = HOST_COVER.format(
        together=_number(cover.together, "session"), context_tokens=cover.context_tokens, by_kv=cover.by_kv, by_states=cover.by_states,
        device_sessions=ledger.max_mamba_cache_size,
    )  # fmt: skip
    if not arena.has_quota:
        taken = HOST_SHARED.format(
            host_gb=arena.total_bytes / GB, host_tokens=host_tokens, host_states=_number(arena.most_slots, "state")
        )
        return taken, covered
    state_bytes = arena.most_slots * arena.slot_bytes
    return (
        HOST_KV.format(pool="full", host_tokens=host_tokens, host_kv_gb=arena.most_pages * arena.page_bytes / GB),
        # A state lies on the host as it does on the device: all layers of a slot together.
        HOST_STATES.format(host_state_gb=state_bytes / GB, host_slots=arena.most_slots, layout="page_first"),
        covered,
    )


def _number(number: int, noun: str) -> str:
    """As units.count, with plain digits as in every line of the boot."""
    return f"{number} {noun}{'s' * (number != 1)}"


def host_auto_lines(arena: HostArena, ledger: Ledger, *, resolved: Resolved, memory: HostMemory) -> tuple[str, ...]:
    """How large the host tier was made when nobody said it: the ratio to the device's pools, wanted and got (reference 2.1)."""
    if not is_automatic(resolved):
        return ()
    line = HOST_AUTO.format(
        wanted_ratio=DEFAULT_RATIO, ratio=arena.total_bytes / pools_bytes(ledger),
        allowed_gib=to_gib(allowed_bytes(resolved, ledger, memory)), fraction=resolved.hicache_host_memory_fraction,
        ranks=_number(resolved.tp_size, "rank"), host_gib=to_gib(arena.total_bytes),
    )  # fmt: skip
    return (line,)


def host_warnings(arena: HostArena, ledger: Ledger, *, resolved: Resolved, memory: HostMemory) -> tuple[str, ...]:
    """What to do when the host tier covers no more sessions than the device itself (reference 5.1), else nothing."""
    context_tokens = balanced_context_tokens(ledger, context_len=resolved.context_len)
    cover = host_cover(arena, page_size=ledger.page_size, context_tokens=context_tokens)
    if cover.together > ledger.max_mamba_cache_size:
        return ()
    host_tokens = arena.most_pages * ledger.page_size
    if arena.has_quota and cover.by_states < cover.by_kv:
        what = HOST_FEW_STATES.format(host_states=_number(arena.most_slots, "state"))
    elif host_tokens <= ledger.kv_tokens:
        what = HOST_FEW_TOKENS.format(host_tokens=host_tokens, device_tokens=ledger.kv_tokens)
    else:
        what = HOST_FEW_BYTES.format(host_gb=arena.total_bytes / GB)
    warning = HOST_TOO_SMALL.format(
        what=what, together=_number(cover.together, "session"), context_tokens=context_tokens,
        device_sessions=ledger.max_mamba_cache_size,
        advice=cover_advice(arena, ledger, resolved, memory, context_tokens=context_tokens),
    )  # fmt: skip
    return (warning,)


def disk_line(path: str, *, segments: int, used_bytes: int, limit_bytes: int) -> str:
    """What the disk tier found in its folder, and how much it may hold."""
    used, limit = format_decimal_bytes(used_bytes), format_decimal_bytes(limit_bytes)
    return DISK.format(path=path, segments=count(segments, "segment"), used=used, limit=limit)


_WARNINGS = {"cap", "requested"}
_BEFORE_POOLS = {"dist_gb", "load_begin_gb", "load_end_gb", "multimodal_gb", *_WARNINGS}
# A draft model begins to load where the target ended, a second boot where the first one began.
_SAME_LOAD_GB = 0.5


def without_colours(text: str) -> str:
    """The text without the codes that colour a terminal, as they are or as JSON writes them."""
    return _COLOUR.sub("", text)


def parse(text: str) -> tuple[BootFacts, ...]:
    """Read boot lines back from a log with anything around them: prefixes, colours, several ranks, several boots.

    One BootFacts per rank and boot, in order of first appearance; () when no line is known. The first of several equal
    lines of a boot counts, as a draft model's pools come after the target's; of several loads the last.
    """
    boots: list[BootFacts] = []
    current: dict[str, int] = {}
    waiting: dict[str, BootFacts] = {}  # seen after pools, and said before them: of a draft model or the next boot
    for before, found, head in found_lines(without_colours(text)):
        label = _label(before)
        if not found:
            continue
        facts = boots[current[label]] if label in current else None
        if facts is not None and _comes_too_late(facts, found):
            waiting[label] = _with(waiting.get(label, BootFacts(label=label)), found)
            continue
        if facts is None or _starts_again(facts, found):
            current[label] = len(boots)
            facts = waiting.pop(label, BootFacts(label=label))
            boots.append(facts)
        boots[current[label]] = _resized(facts, found) if head == RESIZED.head else _with(facts, found)
    return tuple(boots)


def _has_pools(facts: BootFacts) -> bool:
    return facts.conv_gb is not None or facts.kv_tokens is not None


def _comes_too_late(facts: BootFacts, found: Mapping[str, Any]) -> bool:
    """Whether a line says what is said before pools, and the rank has its pools; warnings may follow them directly."""
    warning = facts.max_total_tokens is None and found.keys() & _WARNINGS
    return _has_pools(facts) and bool(found.keys() & _BEFORE_POOLS) and not warning


def _starts_again(facts: BootFacts, found: Mapping[str, Any]) -> bool:
    """Whether a line can only belong to a later boot of the same rank."""
    done = facts.max_total_tokens is not None
    return ("conv_gb" in found and facts.conv_gb is not None) or (done and "kv_tokens" in found)


def _with(facts: BootFacts, found: Mapping[str, Any]) -> BootFacts:
    """The facts with a line's; before the pools a second load adds a draft model, or is a boot after one that failed."""
    if "dist_gb" in found and facts.load_begin_gb is not None and not _has_pools(facts):
        return BootFacts(label=facts.label, **found)
    if "load_begin_gb" in found and facts.load_begin_gb is not None and not _has_pools(facts):
        drafts = facts.load_end_gb is not None and found["load_begin_gb"] <= facts.load_end_gb + _SAME_LOAD_GB
        return facts if drafts else BootFacts(label=facts.label, **found)
    if "load_end_gb" in found and facts.load_end_gb is not None and not _has_pools(facts):
        weights_gb = round((facts.weights_gb or 0.0) + found.get("weights_gb", 0.0), 2)
        return replace(facts, load_end_gb=found["load_end_gb"], weights_gb=weights_gb)
    return replace(facts, **{name: value for name, value in found.items() if getattr(facts, name) is None})


def _resized(facts: BootFacts, found: Mapping[str, Any]) -> BootFacts:
    """The facts with the final KV pool instead of what was said about it before graphs were captured."""
    return replace(facts, **{"k_gb": None, "v_gb": None, "kv_gb": None, "pool_end_gb": None, **found}, resized=True)


def _label(before: str) -> str:
    """The rank in the last brackets before a line that name one; others are of time, of Docker or of a progress bar."""
    for bracket in reversed(_BRACKETS.findall(before)):
        if ranks := _RANK.findall(bracket):
            return " ".join(ranks)
    return ""


def ledger_table(ledger: Ledger, *, host: tuple[int, str] | None = None) -> str:
    """Every byte of the ledger: what, size, origin, note; parts of another line are indented below it.

    host: (bytes, origin) of the host tier, a row below the whole, since it is not the device's.
    """
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
    if host is not None:
        rows.append(("host tier", format_bytes(host[0]), host[1], "host memory, beside the whole"))
    return table_text(("memory", "size", "origin", "note"), rows, right={1})


def values_table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Resolved values: (name, value, origin), aligned."""
    return table_text(("name", "value", "origin"), tuple(rows))
