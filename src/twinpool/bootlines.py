"""Lines of a boot log (reference 2.1): one format string each, from which it is printed and its fields are read back."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from twinpool.memory.refusals import CAPPED_BY_KV, CAPPED_BY_STATES

_FIELD = re.compile(r"\{(\w+)(?::([^}]*))?\}")
# Something follows every number of a whole line: one at the very end may have lost digits.
_COUNT = r"-?(?:\d{1,3}(?:,\d{3})+|\d{1,15})(?=[^\d.])"
_SIZE = r"-?\d{1,9}(?:\.\d{1,9})?(?=[^\d.])"
_LONGEST_LINE = 2000


class Line:
    """One line: its first words, a format string that starts with them, and a pattern for each field.

    Fields are found by the words around them, so that a line reads the same with parts that other versions add or lack.
    """

    def __init__(self, head: str, template: str) -> None:
        self.head, self.template = head, template
        fields = list(_FIELD.finditer(template))
        self.kinds = {field[1]: field[2] or "" for field in fields}
        begins = [len(head), *(field.end() for field in fields)]
        ends = [*(field.start() for field in fields), len(template)]
        around = [template[begin:end] for begin, end in zip(begins, ends, strict=True)]
        self.patterns = {
            field[1]: _pattern(field[2] or "", around[at], around[at + 1]) for at, field in enumerate(fields)
        }

    def render(self, values: Mapping[str, Any]) -> str:
        """The line with its fields filled in."""
        return self.template.format_map(values)

    def read(self, text: str) -> dict[str, Any]:
        """Values of the fields that a text after the first words has."""
        found = {name: pattern.search(text) for name, pattern in self.patterns.items()}
        return {name: _value(match[1], self.kinds[name]) for name, match in found.items() if match is not None}


def _pattern(kind: str, before: str, after: str) -> re.Pattern[str]:
    """One field: its value behind the words before it, or in front of those after it when there are none before."""
    value = {"": r"[^,\s]+", "d": _COUNT}.get(kind, _SIZE)
    tail = re.match(r"\w+", after)
    if kind == "" and tail is not None:
        value = rf"[^,\s]+?(?={tail[0]})"
    words = re.split(r"[,.(] ?|GB ", before)[-1].lstrip()
    if re.search(r"[A-Za-z#]", words):
        edge = r"(?<![A-Za-z0-9_])" if words[0].isalnum() else ""
        return re.compile(f"{edge}{_loose(words)}({value})")
    plain = re.match(r"[\s\w]*", after)
    return re.compile(f"({value}){_loose(plain[0].rstrip() if plain else '')}")


def _loose(words: str) -> str:
    """A pattern for words with any white space between them: terminals and people wrap lines."""
    return r"\s*".join(re.escape(word) for word in re.split(r" +", words))


def _value(text: str, kind: str) -> int | float | str:
    if kind == "":
        return text
    return int(text.replace(",", "")) if kind == "d" else float(text)


LOAD_BEGIN = "Load weight begin. avail mem={load_begin_gb:.2f} GB"
LOAD_END = (
    "Load weight end. elapsed={load_s:.2f} s, type={model_class}, "
    "avail mem={load_end_gb:.2f} GB, mem usage={weights_gb:.2f} GB."
)
POOL_END = "Memory pool end. avail mem={pool_end_gb:.2f} GB"
SCHEDULER = (
    "max_total_num_tokens={max_total_tokens:d}, chunked_prefill_size={chunked_prefill_size:d}, "
    "max_prefill_tokens={max_prefill_tokens:d}, max_running_requests={max_running_requests:d}, "
    "context_len={context_len:d}, available_{device}_mem={available_gb:.2f} GB"
)
# Of the host tier, in 10^9 bytes but for the first, which has GiB; read back by plan/log_host.py.
HOST_AUTO = (
    "HiCache auto-sizing: ratio {wanted_ratio:.3f} -> {ratio:.3f}; {allowed_gib:.1f} GiB host memory per rank "
    "(fraction {fraction:.2f}, {ranks} on this host), host pools {host_gib:.1f} GiB."
)
HOST_KV = "Allocating {pool} hierarchical KV host pool: {host_tokens:d} tokens, {host_kv_gb:.2f} GB host memory."
HOST_STATES = (
    "Allocating {host_state_gb:.2f} GB host memory for hierarchical Mamba cache "
    "({host_slots:d} state slots, layout={layout})."
)
HOST_SHARED = (
    "Allocating {host_gb:.2f} GB host memory for KV and states together: at most {host_tokens:d} tokens or "
    "{host_states}, no fixed split."
)
HOST_COVER = (
    "HiCache covers {together} of {context_tokens:d} tokens, each with its state ({by_kv:d} by KV alone, "
    "{by_states:d} by states alone); the device holds {device_sessions:d}."
)
HOST_FEW_TOKENS = (
    "HiCache host KV pool ({host_tokens:d} tokens) is smaller than the device pool ({device_tokens:d} tokens)"
)
HOST_FEW_STATES = "HiCache host state pool ({host_states}) is too small for the KV beside it"
HOST_FEW_BYTES = "HiCache host memory ({host_gb:.2f} GB) is too small for copies of both device pools"
HOST_TOO_SMALL = (
    "{what}: it covers {together} of {context_tokens:d} tokens and the device holds {device_sessions:d}, so hardly any outlives the "
    "device. {advice}"
)
DISK = "HiCache storage in {path}: {segments} of all models, {used} of {limit}."
_DIST_END = "Init torch distributed ends. elapsed={dist_s:.2f} s, mem usage={dist_gb:.2f} GB"
_LOAD_END_QUANT = LOAD_END.replace("avail mem", "quant={quantization}, avail mem")
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
_KV_LATENT = "KV Cache is allocated. dtype: {kv_dtype}, #tokens: {kv_tokens:d}, KV size: {kv_gb:.2f} GB"
_KV = _KV_LATENT.replace("KV size: {kv_gb:.2f}", "K size: {k_gb:.2f} GB, V size: {v_gb:.2f}")

# In order of appearance; of two forms of a line the longer comes first, so that it is preferred in print.
LINES = (
    Line("Init torch distributed ends", _DIST_END),
    Line("Load weight begin", LOAD_BEGIN),
    Line("Load weight end", _LOAD_END_QUANT),
    Line("Load weight end", LOAD_END),
    Line("Reserving", _MULTIMODAL),
    Line("max_running_requests is capped", CAPPED_BY_STATES),
    Line("max_running_requests was reduced", CAPPED_BY_KV),
    Line("Mamba Cache is allocated", _MAMBA_DRAFTS),
    Line("Mamba Cache is allocated", _MAMBA),
    Line("KV Cache is allocated", _KV),
    Line("KV Cache is allocated", _KV_LATENT),
    Line("Memory pool end", POOL_END),
    Line("max_total_num_tokens=", SCHEDULER),
)
# Read, never printed: the final KV of a version that sizes it after the graphs were captured.
RESIZED = Line("Post-capture KV sizing: KV cache allocated", _KV_LATENT.replace("Cache is", "cache"))

# A sliding window has a pool of its own, which is not the one that grows with the context.
_NOT_THE_POOL = re.compile(r"\bSWA\s+$")
_LINE_BREAK = re.compile(r"[\r\n]")
_WRAPPED = re.compile(r"\s+(?=\(?[#A-Za-z_]+(?: \w+)?[:=])")


def found_lines(text: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(what its line has in front of it, field values, first words) of each boot line in a text of any size, in order.

    Looks for first words only, so noise costs next to nothing; two lines that were written into one are told apart.
    """
    places = sorted((at, head) for head in _FORMS for at in _places(text, head))
    for (at, head), (following, _) in itertools.pairwise([*places, (len(text), "")]):
        before = _LINE_BREAK.split(text[max(0, at - _LONGEST_LINE) : at])[-1]
        if _NOT_THE_POOL.search(before):
            continue
        body = text[at + len(head) : min(_line_end(text, at), following)]
        values: dict[str, Any] = {}
        for form in _FORMS[head]:
            values |= form.read(body)
        yield before, values, head


# All forms of a line, the longest last: what it has counts.
_FORMS = {
    line.head: tuple(form for form in (RESIZED, *reversed(LINES)) if form.head == line.head)
    for line in (RESIZED, *LINES)
}


def _places(text: str, head: str) -> Iterator[int]:
    at = text.find(head)
    while at >= 0:
        yield at
        at = text.find(head, at + len(head))


def _line_end(text: str, at: int) -> int:
    """Where the line ends; one that ends in a comma goes on when the next one begins with another field."""
    limit = min(len(text), at + _LONGEST_LINE)
    while True:
        found = _LINE_BREAK.search(text, at, limit)
        if found is None:
            return limit
        wrapped = _WRAPPED.match(text, found.start(), limit) if text[found.start() - 1] == "," else None
        if wrapped is None:
            return found.start()
        at = wrapped.end()
