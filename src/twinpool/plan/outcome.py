"""One plan with everything that is said about it: sizing, clamps, the workload's fit, inverses, advice, flags to paste."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twinpool.config.deployment import Deployment, deployment_options
from twinpool.config.field import Option
from twinpool.config.launch import LaunchLine
from twinpool.plan import inverse
from twinpool.plan.advice import Advice, advise
from twinpool.plan.clamps import clamps
from twinpool.plan.machine import Machine
from twinpool.plan.sizing import Sizing
from twinpool.plan.workload import Fit, Workload, balanced_ratio, fit

# Options of our own that a launch line of another engine does not have.
_OURS = {"device_memory_bytes", "mamba_conv_dtype", "threads", "skip_decode_lock"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inverses:
    """What would fit this memory under the best split: see plan/inverse.py."""

    most_running: int
    most_idle: int
    longest_context: int
    sessions_per_gib: float
    fewest_ranks: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A plan. workload and what follows from it are None when none was described.

    balance_tokens: the average context at which both pools run out together under the present split; shorter ones run
    out of states first, longer ones of KV. balanced_ratio: r* for the workload. launch_flags: to paste.
    """

    sizing: Sizing
    line: LaunchLine
    clamps: tuple[str, ...]
    balance_tokens: float | None
    workload: Workload | None
    fit: Fit | None
    balanced_ratio: float | None
    inverses: Inverses | None
    advice: Advice | None
    launch_flags: tuple[str, ...]


def outcome(
    sizing: Sizing, line: LaunchLine, workload: Workload | None, *, machine_of: Callable[[int], Machine]
) -> Outcome:
    """Everything about one plan. machine_of: the machine with so many tensor parallel ranks."""
    ledger = sizing.ledger
    advice = advise(workload, sizing, machine_of=machine_of) if workload is not None else None
    return Outcome(
        sizing=sizing,
        line=line,
        clamps=clamps(sizing, line),
        balance_tokens=_balance_tokens(sizing),
        workload=workload,
        fit=fit(workload, sizing) if workload is not None and ledger is not None else None,
        balanced_ratio=balanced_ratio(sizing, workload.tokens_per_request) if workload is not None else None,
        inverses=_inverses(workload, sizing, machine_of) if workload is not None else None,
        advice=advice,
        launch_flags=launch_flags(sizing.flags, advice),
    )


def _balance_tokens(sizing: Sizing) -> float | None:
    """Tokens a request where K // S and T // L meet."""
    ledger = sizing.ledger
    if ledger is None or not sizing.request.kv_bytes_per_token:
        return None
    return ledger.logical_tokens * ledger.slots_per_request / ledger.max_mamba_cache_size


def _inverses(workload: Workload, sizing: Sizing, machine_of: Callable[[int], Machine]) -> Inverses:
    return Inverses(
        most_running=inverse.most_running(workload, sizing),
        most_idle=inverse.most_idle(workload, sizing),
        longest_context=inverse.longest_context(workload, sizing),
        sessions_per_gib=inverse.sessions_per_gib(workload, sizing),
        fewest_ranks=inverse.fewest_ranks(workload, sizing, machine_of=machine_of),
    )


def launch_flags(flags: Deployment, advice: Advice | None) -> tuple[str, ...]:
    """The memory flags of the launch line after the advice, as words to paste."""
    final = advice.final.flags if advice is not None else flags
    words = []
    setting = advice.setting if advice is not None else None
    chosen = (
        {"max_mamba_cache_size": setting.pin.slots, "max_running_requests": setting.workload.running} if setting else {}
    )
    for option in deployment_options():
        value = chosen.get(option.field, getattr(final, option.field))
        if setting is not None and option.field == "mamba_full_memory_ratio":
            continue  # the pin beats it
        if (option.field in final.given or option.field in chosen) and option.field not in _OURS:
            words += _words(option, value)
    return tuple(words)


def _words(option: Option, value: object) -> list[str]:
    if value is None or value is False or value == option.default:
        return []
    return [option.name] if value is True else [f"{option.name} {value}"]
