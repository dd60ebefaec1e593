"""--json: one schema for every kind of plan, documented in docs/plan-json.md. Sizes in bytes, lengths in tokens."""

from __future__ import annotations

from typing import Any

from twinpool.memory.ledger import Ledger
from twinpool.plan.advice import Advice, Step
from twinpool.plan.log_plan import LogOutcome
from twinpool.plan.machine import Machine
from twinpool.plan.outcome import Outcome
from twinpool.plan.sizing import Sizing
from twinpool.plan.sweep import Sweep
from twinpool.plan.vllm_ledger import VllmLedger
from twinpool.plan.vllm_plan import VllmOutcome
from twinpool.reports.jsonio import json_text

SCHEMA = "twinpool-plan/1"


def plan_json(outcome: Outcome) -> str:
    """A plan of one model on one machine."""
    return _text("plan", {"plan": _outcome(outcome)})


def log_json(boots: tuple[LogOutcome, ...]) -> str:
    """Every boot of a log, with its checks."""
    return _text("boot_log", {"boots": [_boot(boot) for boot in boots]})


def sweep_json(outcome: Outcome, sweep: Sweep) -> str:
    """A plan and the points around it."""
    return _text("sweep", {"plan": _outcome(outcome), "sweep": sweep})


def vllm_json(outcome: VllmOutcome) -> str:
    """A plan of an engine with one pool of blocks."""
    return _text("vllm", {"plan": _vllm(outcome)})


def _text(kind: str, content: dict[str, Any]) -> str:
    return json_text({"schema": SCHEMA, "kind": kind, **content}) + "\n"


def _outcome(outcome: Outcome) -> dict[str, Any]:
    sizing = outcome.sizing
    return {
        "engine": sizing.rules.name,
        "model": _model(sizing),
        "machine": _machine(sizing.machine),
        "settings": {name: {"value": value, "origin": origin} for name, value, origin in sizing.resolved.rows()},
        "ledger": None if sizing.ledger is None else _ledger(sizing.ledger),
        "refusal": sizing.refusal,
        "clamps": outcome.clamps,
        "balance_tokens": outcome.balance_tokens,
        "workload": outcome.workload,
        "fit": outcome.fit,
        "balanced_ratio": outcome.balanced_ratio,
        "inverses": outcome.inverses,
        "advice": None if outcome.advice is None else _advice(outcome.advice),
        "host": outcome.host,
        "launch_flags": outcome.launch_flags,
        "flags_without_effect": outcome.line.no_effect,
        "flags_not_modelled": outcome.line.not_modelled,
        "values_not_modelled": [value.shown for value in outcome.line.other_values],
        "flags_unknown": outcome.line.unknown,
    }


def _model(sizing: Sizing) -> dict[str, Any]:
    request = sizing.request
    return {
        "name": sizing.model.name,
        "source": sizing.model.source,
        "architecture": sizing.model.spec.architecture,
        "linear_layers": sizing.model.spec.n_linear_layers,
        "attention_layers": sizing.model.spec.n_attention_layers,
        "slot_bytes": request.stage_slot_bytes + request.stage_extra_bytes,
        "conv_bytes": request.stage_conv_bytes,
        "kv_bytes_per_token": request.kv_bytes_per_token,
        "token_equivalents": sizing.token_equivalents,
        "slots_per_request": request.slots_per_request,
    }


def _machine(machine: Machine) -> dict[str, Any]:
    return {
        "name": machine.name,
        "ranks": machine.ranks,
        "pre_load_bytes": machine.pre_load_bytes,
        "available_bytes": machine.available_bytes,
        "weights": machine.weights,
        "note": machine.note,
    }


def _ledger(ledger: Ledger) -> dict[str, Any]:
    return {
        "whole_bytes": ledger.whole_bytes,
        "budget_bytes": ledger.budget_bytes,
        "max_mamba_cache_size": ledger.max_mamba_cache_size,
        "conv_pool_bytes": ledger.conv_pool_bytes,
        "ssm_pool_bytes": ledger.ssm_pool_bytes,
        "draft_rows": ledger.draft_rows,
        "kv_tokens": ledger.kv_tokens,
        "logical_tokens": ledger.logical_tokens,
        "kv_pool_bytes": ledger.kv_pool_bytes,
        "max_running_requests": ledger.max_running_requests,
        "lines": ledger.lines,
    }


def _advice(advice: Advice) -> dict[str, Any]:
    return {
        "holds": advice.holds,
        "steps": [_step(step) for step in advice.steps],
        "fit": advice.fit,
        "setting": advice.setting,
        "options": [_step(step) for step in advice.options],
        "host_tier": advice.host,
        "fewest_ranks": advice.ranks,
    }


def _step(step: Step) -> dict[str, Any]:
    ledger = step.sizing.ledger
    return {
        "flags": step.title,
        "why": step.why,
        "warning": step.warning,
        "max_mamba_cache_size": None if ledger is None else ledger.max_mamba_cache_size,
        "kv_tokens": None if ledger is None else ledger.kv_tokens,
    }


def _boot(boot: LogOutcome) -> dict[str, Any]:
    return {
        "ranks": boot.ranks,
        "explains": boot.explains,
        "slot_bytes_logged": boot.slot_bytes,
        "kv_bytes_per_token_logged": boot.kv_bytes_per_token,
        "checks": boot.checks,
        "notes": boot.notes,
        "plan": _outcome(boot.outcome),
    }


def _vllm(outcome: VllmOutcome) -> dict[str, Any]:
    return {
        "engine": "vllm",
        "model": outcome.model,
        "machine": _machine(outcome.machine),
        "activation_bytes": outcome.activation_bytes,
        "ledger": None if outcome.ledger is None else _vllm_ledger(outcome.ledger),
        "refusal": outcome.refusal,
        "workload": outcome.workload,
        "fit": outcome.fit,
        "flags_without_effect": outcome.line.no_effect,
        "flags_not_modelled": outcome.line.not_modelled,
        "flags_unknown": outcome.line.unknown,
    }


def _vllm_ledger(ledger: VllmLedger) -> dict[str, Any]:
    layout = ledger.layout
    return {
        "num_blocks": ledger.num_blocks,
        "block_tokens": layout.block_tokens,
        "attention_groups": layout.attention_groups,
        "state_groups": layout.state_groups,
        "layers_per_group": layout.layers_per_group,
        "padding_fraction": layout.padding_fraction,
        "kv_cache_size_tokens": ledger.kv_cache_size_tokens,
        "old_kv_cache_size_tokens": ledger.old_kv_cache_size_tokens,
        "max_concurrency": ledger.max_concurrency,
        "max_num_seqs": ledger.max_num_seqs,
        "max_num_seqs_bound": ledger.max_num_seqs_bound,
        "running_requests": ledger.running_requests,
        "smallest_prefix_tokens": ledger.smallest_prefix_tokens,
        "checkpoint_blocks": ledger.checkpoint_blocks,
        "usable_tokens": ledger.usable_tokens,
        "lines": [{"name": name, "bytes": size_bytes} for name, size_bytes in ledger.lines],
        "warnings": ledger.warnings,
    }
