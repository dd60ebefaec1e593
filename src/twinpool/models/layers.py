"""What one layer keeps in memory: attention keeps bytes for every token, a mixer keeps one state for every sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from twinpool.errors import ModelError

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
_SHORT_NAMES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8_e4m3": "float8_e4m3",
    "fp8_e5m2": "float8_e5m2",
    "float8_e4m3fn": "float8_e4m3",
}


def dtype_name(name: str) -> str:
    """The key of DTYPE_BYTES for a name as configs and flags write it ('torch.bfloat16', 'fp8_e4m3'). Raises ModelError."""
    short = name.removeprefix("torch.")
    long = _SHORT_NAMES.get(short, short)
    if long not in DTYPE_BYTES:
        raise ModelError(f"dtype '{name}' is not known; known are {', '.join(DTYPE_BYTES)}.")
    return long


def dtype_bytes(name: str) -> int:
    """Bytes of one element. Raises ModelError for an unknown name."""
    return DTYPE_BYTES[dtype_name(name)]


def split_evenly(value: int, parts: int, *, what: str) -> int:
    """value / parts. Raises ModelError that names `what` unless the division is exact."""
    if parts < 1:
        raise ModelError(f"--tp-size {parts} is not a number of ranks: use 1 or more.")
    if value % parts:
        fits = ", ".join(str(n) for n in range(1, min(value, 64) + 1) if value % n == 0)
        raise ModelError(f"{what}={value} does not split over {parts} ranks (--tp-size); use one of {fits}.")
    return value // parts


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of one slot. An empty shape holds nothing."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor; 0 for the empty shape."""
        return math.prod(self.shape) * dtype_bytes(self.dtype) if self.shape else 0


class LayerStates(NamedTuple):
    """The state of one layer: convolution windows and the temporal (recurrent) part; either may be an empty tuple."""

    conv: tuple[StateTensor, ...]
    temporal: tuple[StateTensor, ...]

    @property
    def conv_bytes(self) -> int:
        """Bytes of all windows."""
        return sum(tensor.size_bytes for tensor in self.conv)

    @property
    def temporal_bytes(self) -> int:
        """Bytes of the recurrent part."""
        return sum(tensor.size_bytes for tensor in self.temporal)


class AttentionSpec(Protocol):
    """Full attention of one layer."""

    def bytes_per_token(self, dtype: str, *, tp: int = 1, dcp: int = 1) -> int:
        """Bytes one token adds on one rank (reference 1.7). Raises ModelError if the heads do not split."""
        ...


class MixerSpec(Protocol):
    """Linear attention of one layer."""

    def states(self, *, ssm_dtype: str, conv_dtype: str, tp: int = 1) -> LayerStates:
        """The tensors of one slot on one rank (reference 1.6). Raises ModelError if the heads do not split."""
        ...


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: attention, a mixer, both side by side (Falcon-H1), or neither (a feed-forward layer of its own)."""

    attention: AttentionSpec | None = None
    mixer: MixerSpec | None = None

    @property
    def kind(self) -> str:
        """'attention', 'linear', 'both' or 'none'."""
        if self.attention is not None:
            return "attention" if self.mixer is None else "both"
        return "none" if self.mixer is None else "linear"

    def kv_bytes_per_token(self, dtype: str, *, tp: int = 1, dcp: int = 1) -> int:
        """Bytes one token adds on one rank; 0 without attention."""
        return 0 if self.attention is None else self.attention.bytes_per_token(dtype, tp=tp, dcp=dcp)

    def states(self, *, ssm_dtype: str, conv_dtype: str, tp: int = 1) -> LayerStates:
        """(conv, temporal) tensors of one slot on one rank; both empty without a mixer."""
        if self.mixer is None:
            return LayerStates((), ())
        return self.mixer.states(ssm_dtype=ssm_dtype, conv_dtype=conv_dtype, tp=tp)
