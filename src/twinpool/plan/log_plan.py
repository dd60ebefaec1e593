"""From a boot log to a plan: the model's constants (known, or read off the log), the memory it measured, and the checks."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from twinpool.bootlog import BootFacts
from twinpool.config.deployment import Deployment
from twinpool.config.engines import SGLANG, SGLANG_UNPADDED, TWINPOOL, EngineRules
from twinpool.config.launch import deployment_from
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.plan.command import Command
from twinpool.plan.log_booted import as_booted
from twinpool.plan.log_checks import check_boot
from twinpool.plan.log_host import host_checks
from twinpool.plan.log_line import DIFFERS, EQUAL, UNKNOWN, LogCheck, kv_gib, least
from twinpool.plan.log_match import mismatch_notes
from twinpool.plan.log_model import log_model, slot_bytes, token_bytes
from twinpool.plan.logged import LoggedBoot, read_boots
from twinpool.plan.machine import Machine
from twinpool.plan.model import PlannedModel
from twinpool.plan.outcome import Outcome, outcome
from twinpool.plan.sizing import Sizing, size
from twinpool.plan.workload import workload_of
from twinpool.units import GIB, to_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOutcome:
    """One boot: facts of its ranks, the checks, constants read off the log (bytes), and the plan from its numbers.

    explains: the engine whose rules explain the log best. notes: what was assumed. The plan has the log's slots, tokens and requests.
    """

    ranks: tuple[BootFacts, ...]
    slot_bytes: int
    kv_bytes_per_token: int | None
    checks: tuple[LogCheck, ...]
    explains: str
    notes: tuple[str, ...]
    outcome: Outcome


def plan_log(command: Command, text: str) -> tuple[LogOutcome, ...]:
    """Every boot of a log. Raises ConfigError or ModelError: no boot, no hybrid model, contradicting flags."""
    return tuple(_plan_boot(command, boot) for boot in read_boots(text))


def _plan_boot(command: Command, boot: LoggedBoot) -> LogOutcome:
    notes: list[str] = []
    flags = _flags(command, boot)
    model = log_model(command, boot, flags, notes)
    refused = _refused_pin(flags, boot.ranks[0])
    if refused is not None:
        flags = replace(flags, max_mamba_cache_size=None, given=flags.given - {"max_mamba_cache_size"})
    tried = _attempts(command, boot, model, flags)
    checked = [(one, check_boot(boot.ranks, one.sizing, missing=one.memory.missing)) for one in tried]
    best, checks = max(checked, key=lambda one: (*_score(one[1]), -_distance(boot.ranks[0], one[0])))
    booted = as_booted(best.sizing, boot.ranks[0])
    known_total = bool(boot.flags.get("hicache_size")) or boot.flags.get("hicache_ratio") is not None
    checks += host_checks(boot.host, booted.sizing, known_total=known_total)
    notes += filter(None, (best.memory.note, *mismatch_notes(boot.ranks[0], best.sizing), *booted.notes))
    result = outcome(
        booted.sizing,
        replace(
            command.line, deployment=booted.sizing.flags, other_values=(*command.line.other_values, *boot.other_values)
        ),
        workload_of(command.options, booted.sizing),
        machine_of=None,
    )
    return LogOutcome(
        ranks=boot.ranks, slot_bytes=sum(slot_bytes(boot)), kv_bytes_per_token=token_bytes(boot, flags.page_size or 1),
        checks=checks if refused is None else (refused, *checks), explains=best.rules.name, notes=tuple(notes), outcome=result,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """Free memory of a rank before and after the load, GiB. missing: what the log lacks of it; note: what was read into it."""

    before_gib: float
    after_gib: float
    missing: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Attempt:
    rules: EngineRules
    memory: _Memory
    sizing: Sizing


def _attempts(command: Command, boot: LoggedBoot, model: PlannedModel, flags: Deployment) -> list[_Attempt]:
    """The division by each engine that may have printed the log. Raises the first refusal when every one refuses the flags."""
    tried: list[_Attempt] = []
    refused: list[TwinpoolError] = []
    for rules, memory in itertools.product(_candidates(command, boot), _memories(boot, flags)):
        try:
            tried.append(_Attempt(rules, memory, _sizing(model, memory, flags, rules)))
        except TwinpoolError as error:
            refused.append(error)
    if not tried:
        raise refused[0]
    return tried


def _memories(boot: LoggedBoot, flags: Deployment) -> tuple[_Memory, ...]:
    """What the slack may be a share of, the likelier first; where the log lacks it, what its pools take.

    Versions differ: some measure after torch.distributed is set up, some before (the log of 2026-04 in
    tests/data/boot_logs.json is explained to 15 of 327,310 tokens by the latter only).
    """
    own = None if boot.own is None else boot.own.free_bytes()
    before, after = least(boot.ranks, "load_begin_gb"), least(boot.ranks, "load_end_gb")
    if own is not None:
        before, after = (to_gib(size) for size in own)
    note = ""
    if before is None and after is not None and (weights := least(boot.ranks, "weights_gb")) is not None:
        before, note = (
            after + weights,
            "free memory before the load is not in the log: what is free after it and the weights",
        )
    lacks = (
        ("free memory before the load", before),
        ("free memory after the load", after),
        ("mem_fraction_static", flags.mem_fraction_static),
    )
    missing = tuple(name for name, value in lacks if value is None)
    if missing or before is None or after is None:
        total = _pools_gib(boot.ranks[0])
        note = (
            ""
            if kv_gib(boot.ranks[0]) or boot.ranks[0].kv_tokens is not None
            else "the log has no KV size: what is planned divides the memory of its states alone"
        )
        return (_Memory(before_gib=total, after_gib=total, missing=missing, note=note),)
    reserved = boot.ranks[0].multimodal_gb or 0.0  # comes out of the pools' budget, as if it were not free (1.1)
    memory = _Memory(before_gib=before, after_gib=after - reserved, note=note)
    ranks_gib = least(boot.ranks, "dist_gb")
    if not ranks_gib:
        return (memory,)
    early = f"the slack is a share of what was free before torch.distributed was set up, {ranks_gib:.2f} GiB more"
    return memory, replace(memory, before_gib=before + ranks_gib, note="; ".join(filter(None, (early, note))))


def _score(checks: tuple[LogCheck, ...]) -> tuple[int, int, int]:
    """Fewest lines that differ, then fewest that are not determined, then most that are equal; the first of equals wins."""
    count = Counter(check.verdict for check in checks)
    return -count[DIFFERS], -count[UNKNOWN], count[EQUAL]


def _distance(facts: BootFacts, attempt: _Attempt) -> int:
    """Tokens between the log's division and ours; 0 where the log does not have the memory to tell."""
    ledger = attempt.sizing.ledger
    if facts.kv_tokens is None or ledger is None or attempt.memory.missing:
        return 0
    return abs(ledger.kv_tokens - facts.kv_tokens)


def _refused_pin(flags: Deployment, facts: BootFacts) -> LogCheck | None:
    """The line that says so when the log has other slots than its --max-mamba-cache-size (reference 1.3, case a)."""
    pin, slots = flags.max_mamba_cache_size, facts.slots or 0
    if pin is None or pin // flags.attention_dp == slots or pin == slots:
        return None
    return LogCheck(
        rank="", what="slots (K) as pinned", logged=f"{slots:,}", ours=f"{pin:,}", verdict=DIFFERS,
        note="the pin was not taken: the rest is checked without it",
    )  # fmt: skip


def _candidates(command: Command, boot: LoggedBoot) -> tuple[EngineRules, ...]:
    """The engine that was asked for, else the versions that print such a log; only twinpool prints its two tables."""
    if command.engine == "vllm":
        raise ConfigError("--boot-log reads logs of engines with two pools; a vLLM log has none of their lines.")
    asked = command.options.engine or command.line.engine
    if asked is None and boot.own is not None:
        return (TWINPOOL,)
    return (SGLANG, SGLANG_UNPADDED, TWINPOOL) if asked in (None, "sglang") else (command.rules,)


def _flags(command: Command, boot: LoggedBoot) -> Deployment:
    """The log's own flags, under those of the command line; what the log measured fills in what neither says."""
    given: dict[str, Any] = {**boot.flags, **{name: getattr(command.flags, name) for name in command.flags.given}}
    given.pop("model_path", None)
    facts = boot.ranks[0]
    if "page_size" not in given and facts.kv_tokens is not None and facts.max_running_requests is None:
        given.setdefault("page_size", 1)
    if facts.context_len is not None:
        given.setdefault("context_length", facts.context_len)
    sized = given.get("hicache_size") or given.get("hicache_ratio") is not None
    if given.get("enable_hierarchical_cache") and not sized and boot.host.total_gb:
        given["hicache_size"] = boot.host.total_gb  # what the host allowed
    chunk = facts.chunked_prefill_size
    if chunk is not None and (chunk == -1 or (chunk > 0 and chunk % _pages(given) == 0)):
        given.setdefault("chunked_prefill_size", chunk)
    if given.get("speculative_num_draft_tokens") and facts.max_running_requests is not None:
        given.setdefault("max_running_requests", facts.max_running_requests * _workers(given))
    deployment = deployment_from(given)
    return replace(deployment, logged=deployment.given - command.flags.given)


def _pages(given: dict[str, Any]) -> int:
    """Tokens that a chunk is a multiple of; where the log does not say the page, the largest that a model has of its own."""
    return int(given.get("page_size") or 64) * int(given.get("dcp_size") or 1)


def _workers(given: dict[str, Any]) -> int:
    """Workers that the requests of a launch line are divided by."""
    return int(given.get("dp_size") or 1) if given.get("enable_dp_attention") else 1


def _sizing(model: PlannedModel, memory: _Memory, flags: Deployment, rules: EngineRules) -> Sizing:
    """With the memory that the log measured; where it did not, with what its pools take.

    Raises ConfigError where that is nothing, or less.
    """
    if round(memory.before_gib * GIB) <= 0 or memory.after_gib < 0:
        lacks = f"lacks {' and '.join(memory.missing)}, and its pools have" if memory.missing else "has"
        raise ConfigError(
            f"The boot log {lacks} {min(memory.before_gib, memory.after_gib):.2f} GB to divide: plan it from the model and the launch line."
        )
    plain = flags
    if not model.config:  # numbers by hand are of one rank
        plain = replace(flags, tp_size=flags.attention_dp, pp_size=1, ep_size=1, dcp_size=1)
    machine = Machine(
        name="the log's device", device=None, ranks=flags.tp_size * flags.pp_size,
        pre_load_bytes=round(memory.before_gib * GIB), available_bytes=round(memory.after_gib * GIB), weights=None,
        note="as the log measured them", pools_only=bool(memory.missing), available_origin="log",
    )  # fmt: skip
    return size(model, machine, plain, rules)


def _pools_gib(facts: BootFacts) -> float:
    sizes = (facts.conv_gb, facts.ssm_gb, facts.draft_ssm_gb, facts.draft_conv_gb, kv_gib(facts))
    return sum(size or 0.0 for size in sizes)
