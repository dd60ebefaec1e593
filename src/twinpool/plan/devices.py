"""Devices by name: memory, bandwidths and peak rates, from devices.toml."""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from twinpool.errors import ConfigError
from twinpool.units import GB, GIB

_TERA = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One row of devices.toml, whose head says what each figure means; 0 is: unknown, or not in hardware.

    memory_bytes: total as the driver reports it; context_bytes: gone before weights load; *_flops: dense products a second;
    host_link and link: one direction.
    """

    name: str
    aliases: tuple[str, ...]
    memory_bytes: int
    context_bytes: int
    bandwidth_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float
    host_link_bytes_per_s: float
    link_bytes_per_s: float
    unified: bool
    source: str

    @property
    def pre_load_bytes(self) -> int:
        """Bytes that are free before the first weight is loaded: memory_bytes - context_bytes."""
        return self.memory_bytes - self.context_bytes


@functools.cache
def devices() -> tuple[Device, ...]:
    """Every device of devices.toml, in its order."""
    text = resources.files("twinpool.plan").joinpath("devices.toml").read_text()
    return tuple(_device(row) for row in tomllib.loads(text)["device"])


def find_device(name: str) -> Device:
    """The device of that name or alias; case, spaces, dashes and underscores do not matter.

    "CPU" has no memory of its own here: the caller needs --device-memory. Raises ConfigError with the nearest names and
    the whole list.
    """
    by_key = {_key(known): device for device in devices() for known in (device.name, *device.aliases)}
    found = by_key.get(_key(name))
    if found is not None:
        return found
    near = dict.fromkeys(by_key[key].name for key in difflib.get_close_matches(_key(name), by_key, n=3))
    hint = f"nearest: {', '.join(near)}; " if near else ""
    known = ", ".join(device.name for device in devices())
    raise ConfigError(
        f"--gpu {name!r} is not in the table of devices; {hint}known: {known}; for any other, give --device-memory."
    )


def _key(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).casefold()


def _device(row: Mapping[str, Any]) -> Device:
    return Device(
        name=row["name"],
        aliases=tuple(row["aliases"]),
        memory_bytes=round(row["memory_gib"] * GIB),
        context_bytes=round(row["context_gib"] * GIB),
        bandwidth_bytes_per_s=row["bandwidth_gb_s"] * GB,
        bf16_flops=row["bf16_tflops"] * _TERA,
        fp8_flops=row["fp8_tflops"] * _TERA,
        host_link_bytes_per_s=row["host_link_gb_s"] * GB,
        link_bytes_per_s=row["link_gb_s"] * GB,
        unified=row["unified"],
        source=row["source"],
    )
