"""The model of a boot log: as named, as the log names it, or the constants that can be read off it."""

from __future__ import annotations

from dataclasses import replace

from twinpool.bootlog import BootFacts
from twinpool.config.deployment import Deployment
from twinpool.errors import ConfigError, ModelError
from twinpool.plan.command import Command
from twinpool.plan.log_line import HALF_CENT_GIB, LOG_CONSTANTS
from twinpool.plan.logged import LoggedBoot
from twinpool.plan.model import PlannedModel, find_model, manual_model
from twinpool.plan.run import planned_model
from twinpool.units import GIB, format_bytes


def log_model(command: Command, boot: LoggedBoot, flags: Deployment, notes: list[str]) -> PlannedModel:
    """As named, else as the log names it, else the two constants that can be read off the log. notes: grows by what was assumed.

    Raises ConfigError or ModelError: the log lacks the KV size, or contradicts what was named.
    """
    model = _model(command, boot, flags, notes)
    return _as_long_as_logged(model, boot.ranks[0], notes)


def _model(command: Command, boot: LoggedBoot, flags: Deployment, notes: list[str]) -> PlannedModel:
    options = command.options
    if options.state_bytes_per_slot is not None and options.kv_bytes_per_token is not None:
        by_hand = planned_model(command)
        slot = options.state_bytes_per_slot
        parted = manual_model(
            state_bytes_per_slot=slot, kv_bytes_per_token=options.kv_bytes_per_token,
            context_len=by_hand.spec.context_len, conv_bytes_per_slot=_conv_bytes(boot.ranks[0], slot),
        )  # fmt: skip
        return replace(by_hand, spec=parted.spec)
    if command.model is not None or options.state_bytes_per_slot is not None or options.kv_bytes_per_token is not None:
        return planned_model(command)
    if boot.model is not None:
        try:
            return find_model(boot.model)
        except (ModelError, ConfigError):
            notes.append(f"the log's model {boot.model} is not known here: its constants are read off the log")
    return _by_constants(boot, flags, notes)


def _by_constants(boot: LoggedBoot, flags: Deployment, notes: list[str]) -> PlannedModel:
    """A model of which only the log's own sizes are known."""
    facts = boot.ranks[0]
    parts, token = slot_bytes(boot), token_bytes(boot, flags.page_size or 1)
    if token is None:
        raise ConfigError(
            "The boot log has no KV size, so the model's constants cannot be read off it: name the model, or give "
            "--kv-bytes-per-token and --state-bytes-per-slot."
        )
    slot, conv = sum(parts), parts[0]
    if slot == 0:
        slot = max(4, int(HALF_CENT_GIB * GIB / ((facts.slots or 0) + 1) / 4) * 4)
        notes.append(
            f"the log's states are less than its two decimals show: a slot is taken as {format_bytes(slot)}, the most it can be"
        )
    notes.append("constants read off the log are as exact as its decimals")
    manual = manual_model(
        state_bytes_per_slot=slot, kv_bytes_per_token=token, context_len=facts.context_len or flags.context_length,
        conv_bytes_per_slot=conv,
    )  # fmt: skip
    return replace(manual, name=facts.model_class or boot.model or "the log's model", source=LOG_CONSTANTS)


def _as_long_as_logged(model: PlannedModel, facts: BootFacts, notes: list[str]) -> PlannedModel:
    """A server that runs a longer context than its config.json (scaled positions) is taken at its word."""
    logged, own = facts.context_len or 0, model.spec.context_len
    if logged <= own:
        return model
    notes.append(f"the log's context of {logged:,} tokens is longer than the model's {own:,}")
    return replace(model, spec=replace(model.spec, context_len=logged))


def slot_bytes(boot: LoggedBoot) -> tuple[int, int]:
    """(conv, ssm) of one slot in whole float32 elements: from the Memory table, else from K + 1 of them."""
    own = None if boot.own is None else boot.own.slot_bytes()
    if own is not None:
        return own
    facts = boot.ranks[0]
    slot = round(((facts.conv_gb or 0) + (facts.ssm_gb or 0)) * GIB / ((facts.slots or 0) + 1) / 4) * 4
    conv = _conv_bytes(facts, slot)
    return conv, slot - conv


def _conv_bytes(facts: BootFacts, slot_bytes: int) -> int:
    """The part of a slot that is convolution windows, by the log's two sizes."""
    conv, ssm = facts.conv_gb or 0.0, facts.ssm_gb or 0.0
    return round(slot_bytes * conv / (conv + ssm) / 4) * 4 if conv + ssm else 0


def token_bytes(boot: LoggedBoot, page_size: int) -> int | None:
    """KV of one token: from the Memory table, else from all tokens and a page; None without a KV size."""
    own = None if boot.own is None else boot.own.token_bytes()
    if own is not None:
        return own
    facts = boot.ranks[0]
    sizes = [facts.kv_gb] if facts.kv_gb is not None else [facts.k_gb, facts.v_gb]
    if facts.kv_tokens is None or any(size is None for size in sizes):
        return None
    return round(sum(size or 0.0 for size in sizes) * GIB / (facts.kv_tokens + page_size))
