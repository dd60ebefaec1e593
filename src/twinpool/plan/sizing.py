"""Forward: a model on a machine under flags, through the server's own resolution and budget, to a ledger of one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinpool.config.deployment import Deployment
from twinpool.config.engines import EngineRules
from twinpool.config.resolve import DeviceFacts, Resolved, resolve
from twinpool.errors import ConfigError, MemoryRefusal
from twinpool.memory.budget import plan_memory
from twinpool.memory.inputs import attention_ranks, memory_request
from twinpool.memory.ledger import Ledger, MemoryRequest
from twinpool.memory.split import Split, split_with
from twinpool.models.gdn.spec import GdnSpec
from twinpool.models.kda.spec import KdaSpec
from twinpool.models.shapes import item_bytes
from twinpool.models.spec import ModelSpec
from twinpool.plan.machine import Machine
from twinpool.plan.model import PlannedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """A plan of one rank: what went in, what was resolved, and the ledger that came out (None: refused, and why)."""

    model: PlannedModel
    machine: Machine
    rules: EngineRules
    flags: Deployment
    resolved: Resolved
    request: MemoryRequest
    ledger: Ledger | None
    refusal: str | None

    @property
    def token_equivalents(self) -> float | None:
        """Tokens whose KV takes as much as one state (te of reference 1.5); None without attention layers."""
        cell = self.request.kv_bytes_per_token
        return None if cell == 0 else (self.request.stage_slot_bytes + self.request.stage_extra_bytes) / cell

    @property
    def fraction_to_write(self) -> float | None:
        """--mem-fraction-static of a launch line that shall divide so, as its default moves with other flags; None: not known."""
        return self.flags.mem_fraction_static if self.machine.pools_only else self.resolved.mem_fraction_static

    @property
    def draft_kv_bytes_per_token(self) -> int:
        """The part of a token's KV that belongs to the draft layers, on one rank."""
        if not self.request.draft_tokens:
            return 0
        resolved = self.resolved
        tp = attention_ranks(tp=resolved.tp_size, dp=resolved.dp_size)
        return self.model.spec.draft_kv_bytes_per_token(kv_dtype=resolved.kv_cache_dtype, tp=tp, dcp=resolved.dcp_size)


def size(model: PlannedModel, machine: Machine, flags: Deployment, rules: EngineRules) -> Sizing:
    """Divide one rank's memory as the engine would.

    Raises ConfigError or ModelError for flags that contradict each other or the model; a division that does not fit is
    a Sizing with its refusal.
    """
    if not model.spec.n_linear_layers:
        raise ConfigError(
            f"{model.name} has no linear-attention layer and so no state pool: "
            "there is nothing to split, and all that weights and slack leave is KV."
        )
    if rules.skip_decode_lock != flags.skip_decode_lock:
        rules = replace(rules, skip_decode_lock=flags.skip_decode_lock)
    kind = "cpu" if rules.name == "twinpool" or flags.device == "cpu" else flags.device
    resolved = resolve(
        replace(flags, dp_size=_dp(flags, rules)), model.spec, DeviceFacts(_capacity_bytes(machine), kind), rules=rules
    )
    if machine.pools_only and flags.mem_fraction_static is None:
        origins = {**resolved.origins, "mem_fraction_static": "derived"}
        resolved = replace(resolved, mem_fraction_static=1.0, origins=origins)
    keeps_drafts = not (flags.enable_linear_replayssm_spec or flags.disaggregation_mode == "prefill")
    request = memory_request(
        model.spec,
        replace(resolved, mem_fraction_static=1.0) if machine.pools_only else resolved,
        pre_load_bytes=machine.pre_load_bytes,
        available_bytes=machine.available_bytes,
        rules=rules,
        reserve_draft_states=keeps_drafts,
        fixed_bytes=_ring_bytes(model.spec, flags, resolved),
        weights_origin=machine.weights.origin if machine.weights is not None else machine.available_origin,
    )
    return sized(
        Sizing(
            model=model, machine=machine, rules=rules, flags=flags, resolved=resolved, request=request, ledger=None,
            refusal=None,
        )
    )  # fmt: skip


def sized(sizing: Sizing) -> Sizing:
    """The same with the ledger of its request, or the sentence that refuses it."""
    try:
        return replace(sizing, ledger=plan_memory(sizing.request), refusal=None)
    except MemoryRefusal as error:
        return replace(sizing, ledger=None, refusal=str(error))


def changed(sizing: Sizing, **values: object) -> Sizing:
    """The plan with other flags (fields of Deployment). Raises ConfigError where they contradict each other."""
    given = sizing.flags.given | frozenset(values)
    logged = sizing.flags.logged - frozenset(values)
    flags = replace(sizing.flags, **values, given=given, logged=logged)  # type: ignore[arg-type]
    return size(sizing.model, sizing.machine, flags, sizing.rules)


def pinned_split(sizing: Sizing, slots: int, *, running: int | None = None) -> Split:
    """The division with so many slots a worker (and so many running requests, where drafts are reserved for each)."""
    request = replace(sizing.request, max_mamba_cache_size=slots * sizing.request.dp)
    if running is not None:
        request = replace(request, max_running_requests=running * request.dp)
    return split_with(request, slots)


def _dp(flags: Deployment, rules: EngineRules) -> int:
    """Workers that slots are divided by; elsewhere data parallel replicas are servers of their own (reference 1.8)."""
    return flags.dp_size if rules.name == "twinpool" else flags.attention_dp


def _capacity_bytes(machine: Machine) -> int:
    """What defaults that depend on the size of the device look at: its whole memory."""
    known = machine.device.memory_bytes if machine.device is not None else 0
    return known or machine.pre_load_bytes


def _ring_bytes(spec: ModelSpec, flags: Deployment, resolved: Resolved) -> int:
    """Replay rings of all request rows (reference 1.3, 1.6), where a flag asks for them."""
    if not (flags.enable_linear_replayssm or flags.enable_linear_replayssm_spec):
        return 0
    running = resolved.max_running_requests
    if running is None:
        raise ConfigError("--enable-linear-replayssm needs --max-running-requests: a ring is kept for each of them.")
    records, conv = flags.linear_replayssm_cache_len, item_bytes(resolved.mamba_conv_dtype)
    tp = attention_ranks(tp=resolved.tp_size, dp=resolved.dp_size)
    linear = [layer.linear for layer in spec.layers if layer.linear is not None]
    ring = 0
    for layer in linear:
        if not isinstance(layer, GdnSpec | KdaSpec):
            raise ConfigError(
                f"--enable-linear-replayssm is for Gated DeltaNet and KDA layers, not {spec.architecture}."
            )
        ring += layer.replay_ring_bytes(records=records, conv_item_bytes=conv, tp=tp)
    largest, all_layers = spec.stage_share(resolved.pp_size)
    return ring * largest // all_layers * (max(1, running // resolved.dp_size) + 1)
