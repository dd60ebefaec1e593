"""One rank's memory before and after the weights: from a device and an estimate, or as given."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from twinpool.config.deployment import Deployment
from twinpool.errors import ConfigError, ModelError
from twinpool.memory.inputs import attention_ranks
from twinpool.plan.devices import Device, find_device
from twinpool.plan.model import PlannedModel
from twinpool.plan.options import MachineOptions
from twinpool.plan.weight_files import index_weight_bytes
from twinpool.plan.weights import Ranks, WeightEstimate, estimate_weights
from twinpool.units import format_bytes

_MOST_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """name; device: None when only sizes are known; ranks: devices of one replica.

    pre_load_bytes, available_bytes: free on one rank before and after the weights. weights: None when the memory after
    them was given; available_origin: by what, "flag" or "log". note: how weights were found. pools_only: all of it is for
    the two pools, without weights and slack, so that no fraction of it is one that a launch line could have.
    """

    name: str
    device: Device | None
    ranks: int
    pre_load_bytes: int
    available_bytes: int
    weights: WeightEstimate | None
    note: str = ""
    pools_only: bool = False
    available_origin: str = "flag"


def find_machine(model: PlannedModel, flags: Deployment, options: MachineOptions) -> Machine:
    """The rank that this model is planned on. Raises ConfigError or ModelError: what is missing, or what does not fit."""
    device = find_device(options.gpu) if options.gpu else None
    _refuse_contradictions(options)
    if options.pool_memory is not None:
        return _pools_only(model, flags, options, device)
    pre_load = _pre_load_bytes(device, flags, options)
    ranks = flags.tp_size * flags.pp_size
    name = device.name if device else "the device"
    if options.post_weights_memory is not None:
        if options.post_weights_memory > pre_load:
            raise ConfigError(
                f"--post-weights-memory {format_bytes(options.post_weights_memory)} is more than the "
                f"{format_bytes(pre_load)} that were free before the weights."
            )
        return Machine(
            name=name, device=device, ranks=ranks, pre_load_bytes=pre_load,
            available_bytes=options.post_weights_memory, weights=None, note="as given by --post-weights-memory",
        )  # fmt: skip
    weights = _given_weights(options.weights, ranks) if options.weights is not None else _weights(model, flags)
    charged = _charged_bytes(weights, flags)
    if charged >= pre_load:
        raise ConfigError(
            f"The weights take {format_bytes(charged)} on each of {ranks} rank{'s' * (ranks > 1)} and {name} has "
            f"{format_bytes(pre_load)} before they are loaded; {_what_would_fit(model, flags, options, pre_load)}."
        )
    return Machine(
        name=name, device=device, ranks=ranks, pre_load_bytes=pre_load, available_bytes=pre_load - charged,
        weights=weights, note=weights.note,
    )  # fmt: skip


def _refuse_contradictions(options: MachineOptions) -> None:
    """Raise ConfigError where two flags say the same amount of memory in two ways."""
    if options.pool_memory is not None:
        for name, size in (("pre-load", options.pre_load_memory), ("post-weights", options.post_weights_memory)):
            if size is not None:
                raise ConfigError(
                    f"--pool-memory contradicts --{name}-memory: it is for both pools, whatever else is free."
                )
    if options.weights is not None and options.post_weights_memory is not None:
        raise ConfigError(
            "--weights contradicts --post-weights-memory: what is free after the weights is given already."
        )


def _what_would_fit(model: PlannedModel, flags: Deployment, options: MachineOptions, pre_load_bytes: int) -> str:
    """The least number of ranks that holds the weights, by doubling, or that none does."""
    if options.weights is not None:
        return "use more ranks (--tp-size) and give what --weights is on each of them, or a quantised checkpoint"
    tp = 1
    while tp * flags.pp_size <= _MOST_RANKS:
        wider = replace(flags, tp_size=tp)
        if (
            tp > flags.tp_size
            and _divides(model, wider)
            and _charged_bytes(_weights(model, wider), wider) < pre_load_bytes
        ):
            return (
                f"use at least {tp * flags.pp_size} ranks (--tp-size {tp}), a quantised checkpoint, "
                "or give the real size with --weights"
            )
        tp *= 2
    return (
        f"no number of ranks up to {_MOST_RANKS} holds them: use a quantised checkpoint, a larger device, "
        "or give the real size with --weights"
    )


def _divides(model: PlannedModel, flags: Deployment) -> bool:
    """Whether the ranks can share the model's heads."""
    try:
        model.spec.check_tp(attention_ranks(tp=flags.tp_size, dp=flags.attention_dp))
    except (ConfigError, ModelError):
        return False
    return True


def _pools_only(model: PlannedModel, flags: Deployment, options: MachineOptions, device: Device | None) -> Machine:
    """Nothing but the two pools; weights are still estimated where that works, because replay's times depend on them."""
    memory = options.pool_memory or 0
    ranks = flags.tp_size * flags.pp_size
    weights: WeightEstimate | None = None
    if options.weights is not None:
        weights = _given_weights(options.weights, ranks)
    elif model.config:  # else a manual model: times are then those of no weights at all
        with contextlib.suppress(ModelError):
            weights = _weights(model, flags)
    return Machine(
        name=device.name if device else "the device", device=device, ranks=ranks, pre_load_bytes=memory,
        available_bytes=memory, weights=weights, note="not charged: --pool-memory is for both pools alone",
        pools_only=True,
    )  # fmt: skip


def _pre_load_bytes(device: Device | None, flags: Deployment, options: MachineOptions) -> int:
    """Free memory before the weights: as given, or the device's without what its context takes."""
    given = options.pre_load_memory or flags.device_memory_bytes
    if given is not None:
        return given
    if device is not None and device.memory_bytes:
        return device.pre_load_bytes
    if device is None and options.post_weights_memory is not None:
        raise ConfigError(
            "--post-weights-memory also needs --gpu or --pre-load-memory: "
            "the slack is a share of what was free before the weights."
        )
    raise ConfigError(
        "The memory of a device is not known: give --gpu (twinpool plan --list-gpus), --device-memory or --pre-load-memory."
    )


def _given_weights(size_bytes: int, ranks: int) -> WeightEstimate:
    return WeightEstimate(size_bytes, size_bytes * ranks, 0, "flag", "as given by --weights")


def _weights(model: PlannedModel, flags: Deployment) -> WeightEstimate:
    if not model.config:
        raise ConfigError("The weights of a model that is given by its bytes are not known: give --weights SIZE.")
    return estimate_weights(
        model.config,
        model.spec,
        Ranks(tp=flags.tp_size, pp=flags.pp_size, ep=flags.ep_size),
        dtype=model.spec.dtype if flags.dtype == "auto" else flags.dtype,
        name=model.name,
        quantization=flags.quantization,
        params_b=model.params_b,
        checkpoint_bytes=index_weight_bytes(model.folder) if model.folder is not None else None,
    )


def _charged_bytes(weights: WeightEstimate, flags: Deployment) -> int:
    """Weights of one rank, and under speculation the MTP layers; a separate draft model is not known here."""
    if not flags.speculative_num_draft_tokens:
        return weights.bytes
    return weights.bytes + weights.mtp_bytes // (flags.tp_size * flags.pp_size)
