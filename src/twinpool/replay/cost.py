"""How long a step takes: a roofline over weights, KV, states and products of one rank, with a calibration on top.

All times that come out are modelled; counts (hits, evictions, retractions) do not come from here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from twinpool.errors import ConfigError
from twinpool.plan.devices import Device
from twinpool.replay.host_link import HostLink, Seconds
from twinpool.step import StepPlan

__all__ = ["Calibration", "CostModel", "Seconds", "device_rates", "host_link_rate", "read_calibration"]

UNKNOWN_LINK_BYTES_PER_S = 50e9  # between devices and to the host, where the device is not in the table

# Wide: nominal peaks may be far off both ways. What lies outside is a slip, and makes times that are no numbers.
_SHARES, _SECONDS = (1e-9, 1e3), (0.0, 3600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What peak figures must be multiplied with, and what a step costs beside them. Fitted by `twinpool replay calibrate`.

    flops_share, bandwidth_share: reached share of the peaks; step_s: launches and scheduling of a step; row_s: of each row.
    source: where the numbers are from.
    """

    flops_share: float = 0.5
    bandwidth_share: float = 0.7
    step_s: float = 0.003
    row_s: float = 0.00001
    source: str = "assumed"


def read_calibration(path: Path) -> Calibration:
    """A file written by `twinpool replay calibrate`. Raises ConfigError naming what is wrong with it."""
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--calibration {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--calibration {path} cannot be read: {error}.") from error
    names = {field.name for field in fields(Calibration)}
    if not isinstance(values, dict) or set(values) - names:
        raise ConfigError(f"--calibration {path} must be an object with {', '.join(sorted(names))}.")
    for name, value in values.items():
        _check(path, name, value)
    return Calibration(**values)


def _check(path: Path, name: str, value: object) -> None:
    if name == "source":
        if not isinstance(value, str):
            raise ConfigError(f"--calibration {path} says {name}={value!r}; it must be a text.")
        return
    low, high = _SHARES if name.endswith("share") else _SECONDS
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and low <= value <= high):  # type: ignore[operator]
        raise ConfigError(
            f"--calibration {path} says {name}={value!r:.40}; it must be a number from {low:g} to {high:g}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """One rank. weight_bytes: dense weights, read by every step; expert_bytes: of all routed experts, of which a step reads
    those that its tokens are sent to (experts_per_token of n_experts). flops_per_token: products of one token's active weights;
    attention_flops: per token and token of context; kv_bytes_per_token, slot_bytes: read for each decode row, states written back.
    reduce_bytes_per_token: sent to the other ranks. host: what copies to the host and back cost, None without a host tier.
    """

    weight_bytes: float
    expert_bytes: float
    n_experts: int
    experts_per_token: int
    flops_per_token: float
    attention_flops: float
    kv_bytes_per_token: float
    slot_bytes: float
    reduce_bytes_per_token: float
    flops_per_s: float
    bandwidth_bytes_per_s: float
    link_bytes_per_s: float
    calibration: Calibration
    host: HostLink | None = None

    def step_s(self, plan: StepPlan) -> Seconds:
        """Duration of each of the plan's steps (float64 [repeat])."""
        starts = [row.start for row in plan.rows]
        if plan.repeat > 1:
            return self.decode_s(starts, plan.repeat)
        new_tokens = sum(row.end - row.start for row in plan.rows)
        pairs = sum((row.end - row.start) * (row.start + row.end) for row in plan.rows) / 2
        read_tokens = sum(starts)
        forward_s = self._duration(np.array([0.0]), new_tokens, read_tokens, pairs, len(plan.rows))
        # A plan of several steps has no copies (sched/stride.py).
        return forward_s if self.host is None else self.host.step_s(forward_s, plan.orders)

    def decode_s(self, lengths: list[int], steps: int) -> Seconds:
        """Durations of so many decode steps of rows that now have these lengths (float64 [steps])."""
        rows = len(lengths)
        grown = np.arange(steps, dtype=np.float64) * rows
        return self._duration(grown, rows, sum(lengths), sum(lengths) + rows / 2, rows)

    def _duration(self, grown: Seconds, new_tokens: int, read_tokens: float, pairs: float, rows: int) -> Seconds:
        """grown: tokens of context that the step has more than the first of its plan."""
        kept = self.calibration
        moved = self.weight_bytes + self._expert_bytes(new_tokens) + rows * 2 * self.slot_bytes
        moved_bytes = moved + (read_tokens + grown) * self.kv_bytes_per_token
        flops = new_tokens * self.flops_per_token + (pairs + grown) * self.attention_flops
        compute_s = flops / (self.flops_per_s * kept.flops_share)
        memory_s = moved_bytes / (self.bandwidth_bytes_per_s * kept.bandwidth_share)
        link_s = (
            new_tokens * self.reduce_bytes_per_token / self.link_bytes_per_s if self.reduce_bytes_per_token else 0.0
        )
        duration: Seconds = np.maximum(compute_s, memory_s) + (link_s + kept.step_s + rows * kept.row_s)
        return duration

    def _expert_bytes(self, new_tokens: int) -> float:
        """Experts that at least one of the tokens is sent to, if routing were even."""
        if not self.n_experts:
            return 0.0
        missed = (1 - self.experts_per_token / self.n_experts) ** new_tokens
        return self.expert_bytes * (1 - missed)


def device_rates(device: Device | None, *, weight_dtype_bytes: float) -> tuple[float, float, float]:
    """(products a second, bytes a second, link bytes a second); an unknown device is an H100 by assumption of the report."""
    if device is None or not device.bandwidth_bytes_per_s:
        return 100e12, 1e12, UNKNOWN_LINK_BYTES_PER_S
    flops = device.fp8_flops if weight_dtype_bytes <= 1 and device.fp8_flops else device.bf16_flops
    return flops, device.bandwidth_bytes_per_s, device.link_bytes_per_s or device.host_link_bytes_per_s


def host_link_rate(device: Device | None) -> float:
    """Bytes a second to the host, one direction."""
    return (device.host_link_bytes_per_s if device is not None else 0.0) or UNKNOWN_LINK_BYTES_PER_S
