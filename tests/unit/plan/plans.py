"""Plans of made-up machines, for tests: all that is free after the weights goes to the pools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twinpool.config.engines import SGLANG, EngineRules
from twinpool.config.launch import deployment_from
from twinpool.plan.machine import Machine
from twinpool.plan.model import PlannedModel, find_model, manual_model
from twinpool.plan.sizing import Sizing, size
from twinpool.units import GIB, MIB


def builtin(name: str, *, draft_layers: int | None = None) -> PlannedModel:
    """A built-in shape; draft_layers: instead of the model's own."""
    model = find_model(name)
    return model if draft_layers is None else replace(model, spec=replace(model.spec, draft_layers=draft_layers))


def manual(state_bytes: int, kv_bytes: int, *, context_len: int | None = None) -> PlannedModel:
    """A model of two numbers: bytes of a slot and of a token."""
    return manual_model(state_bytes_per_slot=state_bytes, kv_bytes_per_token=kv_bytes, context_len=context_len)


def machine(available_bytes: int, *, pre_load_bytes: int | None = None, ranks: int = 1) -> Machine:
    """One rank with so much memory after the weights, and as much before them unless it is given."""
    return Machine(
        name="a device", device=None, ranks=ranks, pre_load_bytes=pre_load_bytes or available_bytes,
        available_bytes=available_bytes, weights=None,
    )  # fmt: skip


def plan(model: PlannedModel, where: Machine, *, rules: EngineRules = SGLANG, **flags: Any) -> Sizing:
    """The forward plan; --mem-fraction-static is 1 unless it is given."""
    return size(model, where, deployment_from({"mem_fraction_static": 1.0, **flags}), rules)


def round_plan(**flags: Any) -> Sizing:
    """A slot of 1 MiB (256 tokens), a token of 4 KiB, 1 GiB; five slots a request."""
    return plan(manual(MIB, 4096), machine(GIB), **{"mamba_radix_cache_strategy": "extra_buffer", **flags})
