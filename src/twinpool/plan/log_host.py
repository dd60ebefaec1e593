"""The host tier's lines of a boot log: read back, and compared with what their own numbers and the flags make of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from twinpool.bootlines import HOST_AUTO, HOST_COVER, HOST_KV, HOST_SHARED, HOST_STATES
from twinpool.errors import MemoryRefusal
from twinpool.memory.host import HostArena
from twinpool.memory.host_advice import pools_bytes
from twinpool.memory.host_budget import host_arena
from twinpool.memory.host_cover import balanced_context_tokens, host_cover
from twinpool.plan.log_line import DIFFERS, EQUAL, ROUNDING, UNKNOWN, LogCheck, near
from twinpool.plan.sizing import Sizing
from twinpool.units import GB

_FIELD = re.compile(r"\{(\w+)(?::([^}]*))?\}")
_VALUES = {"": r".+?", "d": r"\d{1,18}"}
_COUNTED = frozenset({"host_states", "together"})  # printed with their noun


def _form(template: str) -> re.Pattern[str]:
    """A pattern for the lines that a format string prints, with a group for each of its fields."""
    names = iter(_FIELD.findall(template))
    plain = (re.escape(text) for text in _FIELD.split(template)[::3])
    return re.compile("".join(text + "".join(_group(*name) for name in itertools.islice(names, 1)) for text in plain))


def _group(name: str, kind: str) -> str:
    value = r"\d{1,18} [a-z]+" if name in _COUNTED else _VALUES.get(kind, r"\d{1,18}(?:\.\d+)?")
    return f"(?P<{name}>{value})"


_AUTO, _KV, _STATES, _SHARED, _COVER = FORMS = tuple(
    _form(template) for template in (HOST_AUTO, HOST_KV, HOST_STATES, HOST_SHARED, HOST_COVER)
)
_HALF_OF_RATIO = 0.0005
# Of older versions: without tokens nothing follows from its size.
_OTHER = re.compile(r"Allocating [\d.]+ GB host memory for hierarchical KV cache.*")
_HALF_CENT_BYTES = GB // 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedHost:
    """Lines of the host tier of one boot, by their form: groups as printed. others: lines of older versions that are only named."""

    lines: Mapping[re.Pattern[str], Mapping[str, str]] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    def number(self, form: re.Pattern[str], name: str) -> float:
        """A field's number, without the noun behind it. Raises KeyError where the log does not have the line."""
        return float(self.lines[form][name].split()[0])

    def counts(self, form: re.Pattern[str], *names: str) -> tuple[int, ...]:
        """Fields that count something."""
        return tuple(int(self.number(form, name)) for name in names)

    @property
    def total_gb(self) -> float | None:
        """Host memory of a rank for both kinds, GB (10^9 bytes); None where the log does not say it."""
        if _SHARED in self.lines:
            return self.number(_SHARED, "host_gb")
        if _KV in self.lines and _STATES in self.lines:
            return self.number(_KV, "host_kv_gb") + self.number(_STATES, "host_state_gb")
        return None


def read_host(text: str) -> LoggedHost:
    """The lines in a part of a log that holds one boot; ranks say the same, so the first of each form counts."""
    found = {form: match.groupdict() for form in FORMS if (match := form.search(text)) is not None}
    others = dict.fromkeys(other[0].strip() for other in _OTHER.finditer(text))
    return LoggedHost(lines=found, others=tuple(others))


def host_checks(host: LoggedHost, sizing: Sizing, *, known_total: bool) -> tuple[LogCheck, ...]:
    """Each line. sizing: of the log's own pools; known_total: whether a flag gave the size of the tier, else it is the log's."""
    found = [*_pools(host, sizing), *_chosen(host, sizing), *_shared(host, sizing, known_total=known_total)]
    found += [
        LogCheck(
            rank="", what="host tier", logged=other, ours="?", verdict=UNKNOWN, note="read, and compared with nothing"
        )
        for other in host.others
    ]
    return tuple(found)


def _pools(host: LoggedHost, sizing: Sizing) -> Iterator[LogCheck]:
    """Two pools: so many tokens and so many states are so many bytes. A version may count a padding state or not."""
    request = sizing.request
    if _KV in host.lines:
        (tokens,) = host.counts(_KV, "host_tokens")
        cell = request.kv_bytes_per_token - sizing.draft_kv_bytes_per_token
        what = f"host KV: {tokens} tokens × {cell:,} bytes"
        yield _sized(what, host.number(_KV, "host_kv_gb"), (tokens * cell,))
    if _STATES in host.lines:
        (slots,), slot = host.counts(_STATES, "host_slots"), request.stage_slot_bytes + request.stage_extra_bytes
        yield _sized(
            f"host states: {slots} slots", host.number(_STATES, "host_state_gb"), (slots * slot, (slots + 1) * slot)
        )


def _sized(what: str, logged_gb: float, sizes: tuple[int, ...]) -> LogCheck:
    """One size in GB against those that it may be, bytes; the first is shown unless another is the log's."""
    same = [size for size in sizes if near(size / GB, logged_gb) == EQUAL]
    ours = (same or sizes)[0]
    return LogCheck(
        rank="", what=what, logged=f"{logged_gb:.2f} GB", ours=f"{ours / GB:.2f} GB", verdict=EQUAL if same else DIFFERS,
        note="" if same else "another dtype, or a pool that other versions lay out otherwise",
    )  # fmt: skip


def _chosen(host: LoggedHost, sizing: Sizing) -> Iterator[LogCheck]:
    """The ratio that the host's memory allowed: what the tier takes over the device's pools."""
    if _AUTO not in host.lines or host.total_gb is None or sizing.ledger is None:
        return
    logged, pools = host.number(_AUTO, "ratio"), pools_bytes(sizing.ledger)
    ours = host.total_gb * GB / pools
    verdict = ROUNDING if abs(ours - logged) <= _HALF_OF_RATIO + _HALF_CENT_BYTES / pools else DIFFERS
    verdict = EQUAL if abs(ours - logged) <= _HALF_OF_RATIO else verdict
    what = "host tier: ratio to the device's pools"
    yield LogCheck(rank="", what=what, logged=f"{logged:.3f}", ours=f"{ours:.3f}", verdict=verdict)


def _shared(host: LoggedHost, sizing: Sizing, *, known_total: bool) -> Iterator[LogCheck]:
    """One memory for both (twinpool's): what it holds, and how many sessions that covers, at both ends of what the log leaves open."""
    ledger, resolved = sizing.ledger, sizing.resolved
    arenas = _arenas(host, sizing, known_total=known_total)
    if ledger is None or arenas is None:
        return
    if _SHARED in host.lines:
        ends = [(one.most_pages * ledger.page_size, one.most_slots) for one in arenas]
        yield _between("host tier: tokens or states", host.counts(_SHARED, "host_tokens", "host_states"), ends)
    if _COVER in host.lines:
        tokens = balanced_context_tokens(ledger, context_len=resolved.context_len)
        covers = [host_cover(one, page_size=ledger.page_size, context_tokens=tokens) for one in arenas]
        yield _between(
            f"host tier: sessions of {tokens:,} tokens, by KV, by states",
            host.counts(_COVER, "together", "by_kv", "by_states"),
            [(one.together, one.by_kv, one.by_states) for one in covers],
        )


def _between(what: str, logged: tuple[int, ...], ends: Sequence[tuple[int, ...]]) -> LogCheck:
    """Numbers that must be those of an arena, or lie between those of a smaller and a larger one."""
    low, high = ends
    within = all(a <= value <= b for a, value, b in zip(low, logged, high, strict=True))
    verdict = EQUAL if logged in ends else ROUNDING if within else DIFFERS
    ours = logged if logged in ends else low
    return LogCheck(rank="", what=what, logged=_numbers(logged), ours=_numbers(ours), verdict=verdict)


def _numbers(values: tuple[int, ...]) -> str:
    return " / ".join(f"{value:,}" for value in values)


def _arenas(host: LoggedHost, sizing: Sizing, *, known_total: bool) -> tuple[HostArena, HostArena] | None:
    """The smallest and the largest arena that the log leaves open; None where nothing says how large it is."""
    ledger, resolved = sizing.ledger, sizing.resolved
    if ledger is None or not resolved.enable_hierarchical_cache:
        return None
    try:
        planned = host_arena(resolved, ledger, memory=None)
    except MemoryRefusal:
        return None
    assert planned is not None
    if known_total:
        return planned, planned
    if host.total_gb is None:
        return None
    whole, slots = round(host.total_gb * GB), planned.most_slots if planned.has_quota else None
    low, high = (
        HostArena(
            total_bytes=max(0, size), page_bytes=planned.page_bytes, slot_bytes=planned.slot_bytes, max_slots=slots
        )
        for size in (whole - _HALF_CENT_BYTES, whole + _HALF_CENT_BYTES)
    )
    return low, high
