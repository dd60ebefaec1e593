"""From a sized plan to what replay runs on: the server's own scheduler over its ledger, and the cost model of one rank."""

from __future__ import annotations

from twinpool.clock import Clock
from twinpool.errors import MemoryRefusal, ModelError
from twinpool.memory.host import HostArena
from twinpool.memory.host_budget import host_arena
from twinpool.memory.inputs import attention_ranks
from twinpool.models.attention.spec import DsaSpec, GqaSpec, MlaSpec
from twinpool.models.shapes import ConfigReader
from twinpool.plan.sizing import Sizing
from twinpool.plan.weight_part import text_config
from twinpool.plan.weight_tree import model_parts
from twinpool.replay.cost import Calibration, CostModel, device_rates, host_link_rate
from twinpool.replay.disk import SimDisk
from twinpool.replay.disk_link import DiskLink
from twinpool.replay.host_link import HostLink
from twinpool.sched.scheduler import Scheduler
from twinpool.wiring import build_scheduler, disk_fingerprint, disk_limit_bytes

_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
_CHOSEN_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")


def scheduler_of(sizing: Sizing, clock: Clock, disk: SimDisk | None = None) -> Scheduler:
    """One worker's scheduler, over a disk if there is one. Raises MemoryRefusal where the engine would not start."""
    if sizing.ledger is None:
        raise MemoryRefusal(sizing.refusal or "the pools do not fit")
    return build_scheduler(sizing.resolved, sizing.ledger, clock=clock, host=arena_of(sizing), storage=disk)


def arena_of(sizing: Sizing) -> HostArena | None:
    """One rank's host tier, empty; None without one. Raises MemoryRefusal when it is too small; the host's own memory is not known."""
    if sizing.ledger is None:
        return None
    return host_arena(sizing.resolved, sizing.ledger, memory=None)


def disk_of(sizing: Sizing, clock: Clock, link: DiskLink) -> SimDisk | None:
    """A worker's disk tier, empty and this fast; None without one. Raises ConfigError when it is too small, MemoryRefusal as arena_of
    does.
    """
    resolved, arena = sizing.resolved, arena_of(sizing)
    if arena is None or resolved.hicache_storage_backend is None:
        return None
    ranks = attention_ranks(tp=resolved.tp_size, dp=resolved.dp_size)
    fingerprint = disk_fingerprint(
        resolved, model=sizing.model.name, ranks=ranks, page_bytes=arena.page_bytes, slot_bytes=arena.slot_bytes
    )
    return SimDisk(
        clock=clock, limit_bytes=disk_limit_bytes(resolved), fingerprint=fingerprint, link=link,
        policy=resolved.hicache_storage_prefetch_policy,
    )  # fmt: skip


def host_link(sizing: Sizing) -> HostLink | None:
    """What that tier's copies cost; None without one. Raises MemoryRefusal as arena_of does."""
    arena = arena_of(sizing)
    if arena is None:
        return None
    device = sizing.machine.device
    return HostLink(
        bytes_per_s=host_link_rate(device), page_bytes=arena.page_bytes, slot_bytes=arena.slot_bytes,
        n_layers=len(sizing.model.spec.layers), one_way=device is not None and device.unified,
        saves_beside=sizing.rules.name != "twinpool",
    )  # fmt: skip


def cost_model(sizing: Sizing, calibration: Calibration) -> CostModel:
    """Costs of one rank. A model whose modules cannot be counted is one dense matrix of its weights."""
    weights = sizing.machine.weights
    total_bytes = float(
        weights.bytes if weights is not None else sizing.machine.pre_load_bytes - sizing.machine.available_bytes
    )
    params, expert_params, n_experts, chosen = _parameters(sizing)
    ranks = sizing.machine.ranks
    params = params or total_bytes / 2 * ranks
    param_bytes = total_bytes * ranks / params if params else 2.0
    share = expert_params / params if params else 0.0
    active = params - expert_params * (1 - chosen / n_experts) if n_experts else params
    flops, bandwidth, link = device_rates(sizing.machine.device, weight_dtype_bytes=param_bytes)
    tp = attention_ranks(tp=sizing.resolved.tp_size, dp=sizing.resolved.dp_size)
    spec, request = sizing.model.spec, sizing.request
    growing_flops, fixed_flops = _attention_flops(sizing)
    reduce_bytes = 2 * 2 * spec.hidden_size * len(spec.layers) if tp > 1 else 0
    return CostModel(
        weight_bytes=total_bytes * (1 - share),
        expert_bytes=total_bytes * share,
        n_experts=n_experts,
        experts_per_token=chosen,
        flops_per_token=2 * active / ranks + fixed_flops / tp,
        attention_flops=growing_flops / tp,
        kv_bytes_per_token=float(request.kv_bytes_per_token),
        slot_bytes=float(request.stage_slot_bytes + request.stage_extra_bytes),
        reduce_bytes_per_token=reduce_bytes,
        flops_per_s=flops,
        bandwidth_bytes_per_s=bandwidth,
        link_bytes_per_s=link,
        calibration=calibration,
        host=host_link(sizing),
    )


def _parameters(sizing: Sizing) -> tuple[float, float, int, int]:
    """(all parameters, those of routed experts, experts of a layer, experts a token is sent to); zeros when unknown."""
    config = sizing.model.config
    if not config:
        return 0.0, 0.0, 0, 0
    try:
        parts = [part for part in model_parts(config, sizing.model.spec) if not part.name.startswith("mtp.")]
    except ModelError:
        return (sizing.model.params_b or 0.0) * 1e9, 0.0, 0, 0
    reader = ConfigReader(text_config(config))
    n_experts = _first(reader, _EXPERT_KEYS)
    chosen = _first(reader, _CHOSEN_KEYS) if n_experts else 0
    experts = sum(part.params for part in parts if part.name.endswith(".experts")) if n_experts and chosen else 0
    return float(sum(part.params for part in parts)), float(experts), n_experts if experts else 0, chosen


def _first(reader: ConfigReader, keys: tuple[str, ...]) -> int:
    return next(
        (reader.integer(key) for key in keys if isinstance(reader.values.get(key), int) and reader.values[key] > 0), 0
    )


def _attention_flops(sizing: Sizing) -> tuple[float, float]:
    """Over all attention layers: products of one new token with one token of its context, and those that do not grow with it.

    Heads: scores and values. A latent: every head against it, twice. A sparse index: its heads against the pooled keys; then
    every head against the tokens that it picks.
    """
    spec, reader = sizing.model.spec, ConfigReader(text_config(sizing.model.config))
    growing = fixed = 0.0
    for layer in spec.layers:
        attention = layer.attention
        if isinstance(attention, GqaSpec):
            growing += 2 * spec.n_query_heads * (attention.head_dim + attention.v_head_dim)
        elif isinstance(attention, MlaSpec):
            growing += 4 * spec.n_query_heads * (attention.kv_lora_rank + attention.qk_rope_head_dim)
        elif isinstance(attention, DsaSpec):
            heads, picked = reader.integer("index_n_heads", default=32), reader.integer("index_topk", default=2048)
            growing += 2 * heads * attention.index_dim / attention.pool_tokens
            latent = attention.latent
            fixed += 4 * spec.n_query_heads * (latent.kv_lora_rank + latent.qk_rope_head_dim) * picked
    return growing, fixed
