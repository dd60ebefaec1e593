"""How long a disk takes to read and write, in replay."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLink:
    """A worker's disk: bytes a second in each direction, and what each file costs before its first byte."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float


# What twinpool's own threads reach where the disk is faster, as an NVMe disk is: two read and one writes, and each checks the sum of a
# file at about 1e9 bytes a second (docs/storage.md).
USUAL = DiskLink(read_bytes_per_s=2e9, write_bytes_per_s=1e9, latency_s=0.0001)
INSTANT = DiskLink(read_bytes_per_s=math.inf, write_bytes_per_s=math.inf, latency_s=0.0)  # where no step takes time
