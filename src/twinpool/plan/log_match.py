"""Which number of ranks or data type would make a model match a boot log that it does not match."""

from __future__ import annotations

import itertools

from twinpool.bootlog import BootFacts
from twinpool.errors import ConfigError, ModelError
from twinpool.memory.inputs import attention_ranks
from twinpool.plan.log_line import EQUAL, kv_gib, near
from twinpool.plan.sizing import Sizing
from twinpool.units import to_gib

_RANKS = (1, 2, 4, 8, 16, 32, 64)
_STATE_DTYPES = ("float32", "bfloat16")
_KV_DTYPES = ("bfloat16", "fp8_e4m3")


def mismatch_notes(facts: BootFacts, sizing: Sizing) -> tuple[str, ...]:
    """A sentence for each pool whose size the model does not explain: what would, or that it is probably another model."""
    if not sizing.model.config:
        return ()
    states = None if _states_fit(facts, sizing) else _state_note(facts, sizing)
    kv = None if _kv_fits(facts, sizing) else _kv_note(facts, sizing)
    return tuple(note for note in (states, kv) if note is not None)


def _own_ranks(sizing: Sizing) -> int:
    return attention_ranks(tp=sizing.resolved.tp_size, dp=sizing.resolved.dp_size)


def _states_fit(facts: BootFacts, sizing: Sizing) -> bool:
    resolved = sizing.resolved
    return _states_equal(
        facts, sizing, ranks=_own_ranks(sizing), dtypes=(resolved.mamba_conv_dtype, resolved.mamba_ssm_dtype)
    )


def _states_equal(facts: BootFacts, sizing: Sizing, *, ranks: int, dtypes: tuple[str, str]) -> bool:
    """Whether K + 1 slots of the model on so many ranks have the log's sizes. dtypes: of conv windows, of ssm states."""
    spec, (over, whole) = sizing.model.spec, sizing.request.stage_share
    slots = (facts.slots or 0) + 1
    try:
        conv = spec.conv_bytes_per_slot(conv_dtype=dtypes[0], tp=ranks) * over // whole
        ssm = (spec.ssm_bytes_per_slot(ssm_dtype=dtypes[1], tp=ranks) + spec.side_state_bytes) * over // whole
    except (ConfigError, ModelError):
        return False
    logged = ((facts.conv_gb, conv), (facts.ssm_gb, ssm))
    return all(size is None or near(to_gib(slots * each), size) == EQUAL for size, each in logged)


def _state_note(facts: BootFacts, sizing: Sizing) -> str:
    own, name = _own_ranks(sizing), sizing.model.name
    conv_dtype = sizing.resolved.mamba_conv_dtype
    nearest = sorted(_RANKS, key=lambda ranks: ranks != own)
    for ranks, dtype in itertools.product(nearest, _STATE_DTYPES):
        if _states_equal(facts, sizing, ranks=ranks, dtypes=(conv_dtype, dtype)):
            return f"the log's states are those of {name} with {_said(sizing, ranks, '--mamba-ssm-dtype', dtype)}"
    return (
        f"no number of ranks up to {_RANKS[-1]} and no state dtype gives {name} the log's states: "
        "the log is probably of another model"
    )


def _said(sizing: Sizing, ranks: int, flag: str, dtype: str) -> str:
    """The flags that would match, and what is assumed instead."""
    if ranks == _own_ranks(sizing):
        return f"{flag} {dtype}"
    return (
        f"--tp-size {ranks * sizing.resolved.dp_size} and {flag} {dtype}, not with --tp-size {sizing.resolved.tp_size}"
    )


def _kv_fits(facts: BootFacts, sizing: Sizing) -> bool:
    return _kv_equal(facts, sizing, ranks=_own_ranks(sizing), dtype=sizing.resolved.kv_cache_dtype)


def _kv_equal(facts: BootFacts, sizing: Sizing, *, ranks: int, dtype: str) -> bool:
    logged = kv_gib(facts)
    if logged is None or facts.kv_tokens is None:
        return True
    resolved, spec = sizing.resolved, sizing.model.spec
    try:
        cell = spec.stage_kv_bytes_per_token(pp=resolved.pp_size, kv_dtype=dtype, tp=ranks, dcp=resolved.dcp_size)
    except (ConfigError, ModelError):
        return False
    return near(to_gib((facts.kv_tokens + resolved.page_size) * cell), logged, 2) == EQUAL


def _kv_note(facts: BootFacts, sizing: Sizing) -> str | None:
    own, name = _own_ranks(sizing), sizing.model.name
    nearest = sorted(_RANKS, key=lambda ranks: ranks != own)
    for ranks, dtype in itertools.product(nearest, _KV_DTYPES):
        if _kv_equal(facts, sizing, ranks=ranks, dtype=dtype):
            return f"the log's KV is that of {name} with {_said(sizing, ranks, '--kv-cache-dtype', dtype)}"
    return f"no number of ranks up to {_RANKS[-1]} and no KV dtype gives {name} the log's bytes of a token"
