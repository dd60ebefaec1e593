"""From a command to an outcome: find the model and the machine, size, and look at the workload."""

from __future__ import annotations

from dataclasses import replace

from twinpool.errors import ConfigError
from twinpool.plan.command import Command
from twinpool.plan.machine import Machine, find_machine
from twinpool.plan.model import PlannedModel, find_model, manual_model
from twinpool.plan.outcome import Outcome, outcome
from twinpool.plan.sizing import Sizing, size
from twinpool.plan.workload import workload_of


def planned_model(command: Command) -> PlannedModel:
    """The model of a command. Raises ConfigError or ModelError: none is named, or too much about it is said."""
    options = command.options
    by_hand = (options.state_bytes_per_slot, options.kv_bytes_per_token)
    if by_hand == (None, None):
        if command.model is None:
            raise ConfigError(
                "No model is named: give MODEL (twinpool plan --list-models, a folder, a config.json or a hub id), "
                "or --state-bytes-per-slot and --kv-bytes-per-token."
            )
        return find_model(command.model, revision=command.flags.revision)
    if by_hand[0] is None or by_hand[1] is None:
        raise ConfigError(
            "--state-bytes-per-slot and --kv-bytes-per-token go together: a slot is weighed against tokens."
        )
    if command.flags.mamba_ssm_dtype is not None:
        raise ConfigError("--mamba-ssm-dtype contradicts --state-bytes-per-slot: the bytes already have a data type.")
    manual = manual_model(
        state_bytes_per_slot=by_hand[0], kv_bytes_per_token=by_hand[1], context_len=command.flags.context_length
    )
    return manual if command.model is None else replace(manual, name=command.model)


def sizing_of(command: Command) -> Sizing:
    """The plan of a command's model, machine and flags. Raises ConfigError or ModelError."""
    model, flags = planned_model(command), command.flags
    if command.options.pool_memory is not None and flags.mem_fraction_static is not None:
        raise ConfigError("--pool-memory contradicts --mem-fraction-static: all of it is for the pools.")
    return size(model, find_machine(model, flags, command.options), flags, command.rules)


def plan(command: Command) -> Outcome:
    """All that is said about a command. Raises ConfigError or ModelError."""
    sizing = sizing_of(command)
    options = command.options

    def machine_of(ranks: int) -> Machine:
        return find_machine(sizing.model, replace(command.flags, tp_size=ranks), options)

    for_this_rank = (options.post_weights_memory, options.weights, options.pool_memory)
    only_this = any(size is not None for size in for_this_rank) or not sizing.model.config
    return outcome(sizing, command.line, workload_of(options, sizing), machine_of=None if only_this else machine_of)
