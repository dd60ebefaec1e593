"""Bytes, tokens and shares: parsing, printing and integer rounding. The only place where 2**30 is written."""

from __future__ import annotations

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
GB = 10**9  # of bandwidths, and of the host flags and lines of the reference

_SIZE_LIMIT_BYTES = 1 << 63
_SUFFIXES = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 1000,
    "m": MIB, "mib": MIB, "mb": 1000**2,
    "g": GIB, "gib": GIB, "gb": 1000**3,
    "t": GIB << 10, "tib": GIB << 10, "tb": 1000**4,
}  # fmt: skip


def ceil_div(a: int, b: int) -> int:
    """Smallest integer >= a / b, for b > 0."""
    return -(-a // b)


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is >= value."""
    return ceil_div(value, multiple) * multiple


def round_down(value: int, multiple: int) -> int:
    """Largest multiple of `multiple` that is <= value."""
    return value // multiple * multiple


def parse_bytes(text: str) -> int:
    """'4GiB', '512 MiB', '8g', '1.5GB' or '4096' in bytes. Raises ValueError that says what was wrong."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _SUFFIXES:
        raise ValueError(f"'{text}' is not a size: write a number with an optional unit, such as 4GiB or 512MiB")
    size_bytes = float(found[1]) * _SUFFIXES[found[2].lower()]
    if size_bytes >= _SIZE_LIMIT_BYTES:
        raise ValueError("a size must be below 2**63 bytes")
    return int(size_bytes)


def as_gb(size_bytes: int) -> str:
    """Bytes as the value of a flag in GB (10**9), rounded up to a kilobyte."""
    return f"{ceil_div(size_bytes, 1000) / 10**6:.6f}"


def to_gib(size_bytes: int | float) -> float:
    """Bytes as GiB (2**30), the unit of every boot line that says GB."""
    return size_bytes / GIB


def format_bytes(size_bytes: int | float) -> str:
    """A size for people: '73.69 MiB'."""
    for unit, name in ((GIB << 10, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:,.2f} {name}"
    return f"{size_bytes:,.0f} B"


def format_decimal_bytes(size_bytes: int) -> str:
    """A size for people in the units of a disk's flag: '41.20 GB'."""
    for unit, name in ((GB, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes} B"


def count(number: int, noun: str) -> str:
    """'1 request', '2,048 requests'."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def share(part: float, whole: float) -> float:
    """The part over the whole; 0 of nothing."""
    return part / whole if whole else 0.0
