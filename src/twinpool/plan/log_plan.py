"""From a boot log to a plan: the model's constants (known, or read off the log), the memory it measured, and the checks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from twinpool.bootlog import BootFacts
from twinpool.config.deployment import Deployment
from twinpool.config.engines import SGLANG, SGLANG_UNPADDED, TWINPOOL, EngineRules
from twinpool.config.launch import deployment_from
from twinpool.errors import ConfigError, ModelError, TwinpoolError
from twinpool.plan.command import Command
from twinpool.plan.log_checks import DIFFERS, EQUAL, LogCheck, check_boot
from twinpool.plan.logged import LoggedBoot, read_boots
from twinpool.plan.machine import Machine
from twinpool.plan.model import PlannedModel, find_model, manual_model
from twinpool.plan.outcome import Outcome, outcome
from twinpool.plan.run import planned_model
from twinpool.plan.sizing import Sizing, size
from twinpool.plan.workload import workload_of
from twinpool.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOutcome:
    """One boot: facts of its ranks, the checks, constants read off the log (bytes), and the plan from its numbers.

    explains: the engine whose rules explain the log best. notes: what was assumed.
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
    model = _model(command, boot, flags, notes)
    rules = _candidates(command)
    tried = [(rule, _sizing(model, boot, flags, rule)) for rule in rules]
    scored = [(rule, sizing, check_boot(boot.ranks, sizing)) for rule, sizing in tried]
    best, sizing, checks = max(scored, key=lambda one: _score(one[2]))
    line = replace(command.line, deployment=flags)
    workload = workload_of(command.options, sizing)
    result = outcome(sizing, line, workload, machine_of=_no_other_machine)
    return LogOutcome(
        ranks=boot.ranks, slot_bytes=_slot_bytes(boot.ranks[0]), kv_bytes_per_token=_token_bytes(boot.ranks[0], flags.page_size or 1),
        checks=checks, explains=best.name, notes=tuple(notes), outcome=result,
    )  # fmt: skip


def _score(checks: tuple[LogCheck, ...]) -> tuple[int, int]:
    """Fewest lines that differ, then most that are equal; the first of equals wins."""
    return -sum(check.verdict == DIFFERS for check in checks), sum(check.verdict == EQUAL for check in checks)


def _candidates(command: Command) -> tuple[EngineRules, ...]:
    """The engine that was asked for, else the versions that print such a log."""
    if command.engine == "vllm":
        raise ConfigError("--boot-log reads logs of engines with two pools; a vLLM log has none of their lines.")
    asked = command.options.engine or command.line.engine
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
    return deployment_from(given)


def _model(command: Command, boot: LoggedBoot, flags: Deployment, notes: list[str]) -> PlannedModel:
    """As named, else as the log names it, else the two constants that can be read off the log."""
    options = command.options
    if command.model is not None or options.state_bytes_per_slot is not None or options.kv_bytes_per_token is not None:
        return planned_model(command)
    if boot.model is not None:
        try:
            return find_model(boot.model)
        except (ModelError, ConfigError):
            notes.append(f"the log's model {boot.model} is not known here: its constants are read off the log")
    facts = boot.ranks[0]
    slot, token = _slot_bytes(facts), _token_bytes(facts, flags.page_size or 1)
    if token is None:
        raise ConfigError(
            "The boot log has no KV size: name the model, or give --kv-bytes-per-token and --state-bytes-per-slot."
        )
    notes.append("constants read off the log are as exact as its two decimals")
    context = facts.context_len or flags.context_length
    manual = manual_model(state_bytes_per_slot=slot // 4 * 4, kv_bytes_per_token=token, context_len=context)
    return replace(
        manual, name=facts.model_class or boot.model or "the log's model", source="constants of the boot log"
    )


def _slot_bytes(facts: BootFacts) -> int:
    """Conv and ssm of one slot, from K + 1 of them."""
    return round(((facts.conv_gb or 0) + (facts.ssm_gb or 0)) * GIB / ((facts.slots or 0) + 1))


def _token_bytes(facts: BootFacts, page_size: int) -> int | None:
    sizes = [facts.kv_gb] if facts.kv_gb is not None else [facts.k_gb, facts.v_gb]
    if facts.kv_tokens is None or any(size is None for size in sizes):
        return None
    return round(sum(size or 0.0 for size in sizes) * GIB / (facts.kv_tokens + page_size))


def _sizing(model: PlannedModel, boot: LoggedBoot, flags: Deployment, rules: EngineRules) -> Sizing:
    """With the memory that the log measured; where it did not, with what its pools take."""
    before, after = _least(boot, "load_begin_gb"), _least(boot, "load_end_gb")
    manual = not model.config
    plain = replace(flags, tp_size=1, dp_size=1, pp_size=1, given=flags.given - {"tp_size"}) if manual else flags
    fraction = flags.mem_fraction_static
    if before is None or after is None:
        total = _pools_bytes(boot.ranks[0])
        before_bytes = after_bytes = total
        plain = replace(plain, mem_fraction_static=1.0)
    else:
        before_bytes, after_bytes = round(before * GIB), round(after * GIB)
    machine = Machine(
        name="the log's device", device=None, ranks=flags.tp_size * flags.pp_size, pre_load_bytes=before_bytes,
        available_bytes=after_bytes, weights=None, note="as the log measured them",
    )  # fmt: skip
    sizing = size(model, machine, plain, rules)
    return sizing if fraction == plain.mem_fraction_static else replace(sizing, flags=flags)


def _pools_bytes(facts: BootFacts) -> int:
    sizes = (facts.conv_gb, facts.ssm_gb, facts.draft_ssm_gb, facts.draft_conv_gb, facts.kv_gb, facts.k_gb, facts.v_gb)
    return round(sum(size or 0.0 for size in sizes) * GIB)


def _least(boot: LoggedBoot, name: str) -> float | None:
    values: list[float] = [value for facts in boot.ranks if (value := getattr(facts, name)) is not None]
    return min(values, default=None)


def _no_other_machine(ranks: int) -> Machine:
    raise TwinpoolError(f"the log measured one machine, not one with {ranks} ranks")
