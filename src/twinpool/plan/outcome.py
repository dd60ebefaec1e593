"""One plan with everything that is said about it: sizing, clamps, the workload's fit, inverses, advice, flags to paste."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from twinpool.config.deployment import deployment_options
from twinpool.config.field import Value
from twinpool.config.flags import parse_serve
from twinpool.config.idle import idle_fields
from twinpool.config.launch import VARIABLES, LaunchLine
from twinpool.errors import ConfigError
from twinpool.plan import inverse
from twinpool.plan.advice import Advice, Setting, advise
from twinpool.plan.clamps import clamps
from twinpool.plan.host import HostPlan, host_plan
from twinpool.plan.machine import Machine
from twinpool.plan.sizing import Sizing
from twinpool.plan.workload import Fit, Workload, asked_running, balanced_ratio, fit

# Options of our own that a launch line of another engine does not have, and what nobody should find in a report.
_OURS = {
    "device_memory_bytes", "mamba_conv_dtype", "threads", "skip_decode_lock", "hicache_storage_path", "hicache_storage_size",
}  # fmt: skip
# Of a disk tier whose folder was not named: a server needs one, a plan does not.
_FOLDER = "./hicache"
_HIDDEN = {"api_key"}


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
    out of states first, longer ones of KV.
    other_machines: whether other numbers of ranks could be planned. balanced_ratio: r* for the workload. launch_flags: to paste, a
    line that starts and gives this plan (after the advice); empty where the engine would refuse it.
    host: the host tier, None where none is asked for.
    """

    sizing: Sizing
    line: LaunchLine
    clamps: tuple[str, ...]
    balance_tokens: float | None
    other_machines: bool
    workload: Workload | None
    fit: Fit | None
    balanced_ratio: float | None
    inverses: Inverses | None
    advice: Advice | None
    launch_flags: tuple[str, ...]
    host: HostPlan | None = None


def outcome(
    sizing: Sizing, line: LaunchLine, workload: Workload | None, *, machine_of: Callable[[int], Machine] | None
) -> Outcome:
    """Everything about one plan. machine_of: the machine with so many tensor parallel ranks; None: unknown."""
    ledger = sizing.ledger
    advice = advise(workload, sizing, machine_of=machine_of) if workload is not None else None
    host = host_plan(sizing, workload)
    flags, refused = _to_paste(sizing, advice, host)
    return Outcome(
        sizing=sizing,
        line=line,
        clamps=(*clamps(sizing, line), *refused),
        balance_tokens=_balance_tokens(sizing),
        other_machines=machine_of is not None,
        workload=workload,
        fit=fit(workload, sizing) if workload is not None and ledger is not None else None,
        balanced_ratio=balanced_ratio(sizing, workload.tokens_per_request) if workload is not None else None,
        inverses=_inverses(workload, sizing, machine_of) if workload is not None else None,
        advice=advice,
        launch_flags=flags,
        host=host,
    )


def _to_paste(sizing: Sizing, advice: Advice | None, host: HostPlan | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(flags of a line that starts, why there are none where only the server's own rules refuse it)."""
    starts = sizing.ledger is not None or (advice is not None and advice.final.ledger is not None)
    if not starts or (host is not None and host.refusal is not None):
        return (), ()  # told where the plan says so
    words = launch_flags(sizing, advice)
    if sizing.rules.name == "twinpool":
        try:
            parse_serve(shlex.split(" ".join(words)))
        except ConfigError as error:
            return (), (f"twinpool serve does not take this line: {error}",)
    return words, ()


def _balance_tokens(sizing: Sizing) -> float | None:
    """Tokens a request where K // S and T // L meet."""
    ledger = sizing.ledger
    if ledger is None or not sizing.request.kv_bytes_per_token:
        return None
    return ledger.logical_tokens * ledger.slots_per_request / ledger.max_mamba_cache_size


def _inverses(workload: Workload, sizing: Sizing, machine_of: Callable[[int], Machine] | None) -> Inverses:
    return Inverses(
        most_running=inverse.most_running(workload, sizing),
        most_idle=inverse.most_idle(workload, sizing),
        longest_context=inverse.longest_context(workload, sizing),
        sessions_per_gib=inverse.sessions_per_gib(workload, sizing),
        fewest_ranks=inverse.fewest_ranks(workload, sizing, machine_of=machine_of),
    )


def launch_flags(sizing: Sizing, advice: Advice | None) -> tuple[str, ...]:
    """The launch line's flags after the advice, quoted for a shell; variables of its environment come first.

    Flags that do nothing are left out. A disk tier of twinpool without a folder gets one.
    """
    final = advice.final if advice is not None else sizing
    values: dict[str, Value] = {name: getattr(final.flags, name) for name in final.flags.given}
    if advice is not None and advice.setting is not None:
        values |= _chosen(advice.setting, final)
    own = final.rules.name == "twinpool"
    if own and final.flags.hicache_storage_backend is not None:
        values.setdefault("hicache_storage_path", _FOLDER)
    idle = idle_fields(final.flags, among=frozenset(values))
    variables, words = [], []
    for option in deployment_options():
        value = None if option.field in idle else values.get(option.field)
        if value is None or value is False or value == option.default or option.field in _HIDDEN:
            continue
        if option.field in _OURS and not own:
            variables += [f"{name}={_plain(value)}" for name, field in VARIABLES.items() if field == option.field]
        else:
            words.append(option.name if value is True else f"{option.name} {_plain(value)}")
    return (*variables, *words)


def _chosen(setting: Setting, final: Sizing) -> dict[str, Value]:
    """The recommended split as flags. The fraction is written out: its default moves with the number of requests."""
    return {
        "max_mamba_cache_size": setting.pin.slots,
        "max_running_requests": asked_running(setting.workload, final),
        "mem_fraction_static": final.fraction_to_write,
        "mamba_full_memory_ratio": None,  # the pin beats it
    }


def _plain(value: Value) -> str:
    return "1" if value is True else shlex.quote(str(value))
