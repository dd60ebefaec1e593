"""One rank's memory before and after the weights: from a device and an estimate, or as given."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.config.deployment import Deployment
from twinpool.errors import ConfigError
from twinpool.models.spec import ModelSpec
from twinpool.plan.devices import Device, find_device
from twinpool.plan.model import PlannedModel
from twinpool.plan.options import MachineOptions
from twinpool.plan.weights import WeightEstimate, estimate_weights, index_weight_bytes
from twinpool.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """name; device: None when only sizes are known; ranks: devices of one replica.

    pre_load_bytes, available_bytes: free on one rank before and after the weights. weights: None when the memory after
    them was given. note: how weights were found.
    """

    name: str
    device: Device | None
    ranks: int
    pre_load_bytes: int
    available_bytes: int
    weights: WeightEstimate | None
    note: str = ""


def find_machine(model: PlannedModel, flags: Deployment, options: MachineOptions) -> Machine:
    """The rank that this model is planned on. Raises ConfigError or ModelError: what is missing, or what does not fit."""
    device = find_device(options.gpu) if options.gpu else None
    pre_load = _pre_load_bytes(device, flags, options)
    ranks = flags.tp_size * flags.pp_size
    name = device.name if device else "the device"
    if options.post_weights_memory is not None:
        return Machine(
            name=name, device=device, ranks=ranks, pre_load_bytes=pre_load,
            available_bytes=options.post_weights_memory, weights=None, note="as given by --post-weights-memory",
        )  # fmt: skip
    weights = _weights(model, flags, options)
    charged = weights.bytes + (_draft_weight_bytes(weights, flags) if flags.speculative_num_draft_tokens else 0)
    if charged >= pre_load:
        least = -(-charged * ranks // pre_load)
        raise ConfigError(
            f"The weights take {format_bytes(charged)} on each of {ranks} rank{'s' * (ranks > 1)} and {name} has "
            f"{format_bytes(pre_load)} before they are loaded; use at least {max(least, ranks + 1)} ranks (--tp-size), "
            "a quantised checkpoint, or give the real size with --weights."
        )
    return Machine(
        name=name, device=device, ranks=ranks, pre_load_bytes=pre_load, available_bytes=pre_load - charged,
        weights=weights, note=weights.note,
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


def _weights(model: PlannedModel, flags: Deployment, options: MachineOptions) -> WeightEstimate:
    if options.weights is not None:
        size = options.weights
        return WeightEstimate(size, size * flags.tp_size * flags.pp_size, 0, "flag", "as given by --weights")
    spec: ModelSpec = model.spec
    dtype = spec.dtype if flags.dtype == "auto" else flags.dtype
    estimate = estimate_weights(
        model.config, spec, tp=flags.tp_size, pp=flags.pp_size, ep=flags.ep_size, dtype=dtype, params_b=model.params_b
    )
    in_files = index_weight_bytes(model.folder) if model.folder is not None else None
    return estimate if in_files is None else estimate.rescaled(in_files, origin="index")


def _draft_weight_bytes(weights: WeightEstimate, flags: Deployment) -> int:
    """MTP layers on one rank; a separate draft model is not known here."""
    return weights.mtp_bytes // (flags.tp_size * flags.pp_size)
