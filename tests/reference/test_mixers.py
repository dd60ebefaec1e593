"""Compiled mixers but Gated DeltaNet: against their references, and against themselves cut, batched, on more threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.reference.layers import N_SLOTS, Piece, Pools, State, step_of
from twinpool.models.bound import Step
from twinpool.models.kda import ops as kda
from twinpool.models.kda.ops import KdaKernel, KdaShape
from twinpool.models.mamba1 import ops as mamba1
from twinpool.models.mamba1.ops import Mamba1Kernel
from twinpool.models.mamba2 import ops as mamba2
from twinpool.models.mamba2.ops import Mamba2Kernel, Mamba2Shape
from twinpool.models.native import native, set_threads
from twinpool.models.shortconv import ops as shortconv
from twinpool.models.shortconv.ops import ShortConvKernel

pytestmark = pytest.mark.skipif(native is None, reason="the kernels are not compiled")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LENGTHS = (1, 3, 63, 64, 65, 200)
SHAPES = {
    "128": Mamba2Shape(heads=2, head_dim=64, state_size=128, groups=1, kernel=4, eps=1e-6),
    "groups": Mamba2Shape(heads=4, head_dim=16, state_size=32, groups=2, kernel=4, eps=1e-5, dt_limits=(0.1, 0.7)),
    "odd": Mamba2Shape(heads=3, head_dim=19, state_size=10, groups=3, kernel=3, eps=1e-5, norm_first=True),
}
WITHOUT_NORM = "odd, without norm"
SHORT = "short convolution"
KDA_SHAPES = {
    "delta 128": KdaShape(heads=2, head_dim=128, kernel=4, eps=1e-5),
    "delta 64, bound": KdaShape(heads=3, head_dim=64, kernel=4, eps=1e-5, lower_bound=-5.0),
    "delta odd": KdaShape(heads=3, head_dim=19, kernel=3, eps=1e-5),
}
SELECTIVE = {"selective 16": (96, 16), "selective odd": (83, 21)}  # channels, state size
NAMES = (*SHAPES, WITHOUT_NORM, SHORT, *KDA_SHAPES, *SELECTIVE)


@dataclass(frozen=True)
class Layer:
    """A layer with random constants: its mix function, and the sizes of what goes in and of its states."""

    kernel: Any
    mix: Callable[[Any, Step, int, torch.Tensor], torch.Tensor]
    width: int
    conv: tuple[int, int]
    ssm: tuple[int, ...]

    def run(self, pools: Pools, x: torch.Tensor, *pieces: Piece) -> torch.Tensor:
        return self.mix(self.kernel, step_of(pools, *pieces), 0, x)

    def in_torch(self, pools: Pools, x: torch.Tensor, *pieces: Piece) -> torch.Tensor:
        """The same by the reference, through the fallback."""
        slow = type(self.kernel).__new__(type(self.kernel))
        slow.__dict__.update(self.kernel.__dict__, conv=None, handle=None)
        return self.mix(slow, step_of(pools, *pieces), 0, x)

    def pools(self, conv: torch.dtype = F32, ssm: torch.dtype = F32) -> Pools:
        """Slots of NaN but 1..N_SLOTS - 2, which are zero."""
        views = [torch.full((N_SLOTS, *size), torch.nan, dtype=t) for size, t in ((self.conv, conv), (self.ssm, ssm))]
        for view in views:
            view[1 : N_SLOTS - 1] = 0
        return Pools(states=(State(*views),))

    def inputs(self, n: int, dtype: torch.dtype, seed: int = 5) -> torch.Tensor:
        """A projection."""
        return torch.randn(n, self.width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_of(name: str, dtype: torch.dtype) -> Layer:
    g = torch.Generator().manual_seed(1)

    def random(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=g) * scale).to(dtype)

    if name == SHORT:
        kernel = ShortConvKernel(weight=random(37, 3), bias=random(37))
        return Layer(kernel, shortconv.mix, 3 * 37, (37, 2), (0,))
    if name in KDA_SHAPES:
        return kda_layer(KDA_SHAPES[name], random)
    if name in SELECTIVE:
        return selective_layer(*SELECTIVE[name], random)
    shape = SHAPES["odd" if name == WITHOUT_NORM else name]
    mamba = Mamba2Kernel(
        shape,
        conv_weight=random(shape.channels, shape.kernel, scale=0.4),
        conv_bias=None if shape.groups == 1 else random(shape.channels, scale=0.2),
        a_log=torch.log(torch.rand(shape.heads, generator=g) * 0.9 + 0.02).to(dtype),
        dt_bias=(torch.rand(shape.heads, generator=g) * 3 - 2.5).to(dtype),
        skip=random(shape.heads),
        norm_weight=None if name == WITHOUT_NORM else 1 + random(shape.inner, scale=0.1),
    )
    states = (shape.heads, shape.head_dim, shape.state_size)
    width = shape.inner + shape.channels + shape.heads
    return Layer(mamba, mamba2.mix, width, (shape.channels, shape.kernel - 1), states)


def kda_layer(shape: KdaShape, random: Callable[..., torch.Tensor]) -> Layer:
    inner, sizes = shape.inner, (3 * shape.inner + shape.heads, shape.inner, shape.inner)

    def mix(kernel: KdaKernel, step: Step, layer: int, x: torch.Tensor) -> torch.Tensor:
        opened, decay, gate = x.split(sizes, -1)
        return kda.mix(kernel, step, layer, opened, decay=decay, gate=gate)

    norm_weight = 1 + random(shape.head_dim, scale=0.1)
    kernel = KdaKernel(
        shape,
        conv_weight=random(3 * inner, shape.kernel, scale=0.4),
        a_log=random(shape.heads),
        dt_bias=random(inner),
        norm_weight=norm_weight,
        dtype=norm_weight.dtype,
    )
    return Layer(kernel, mix, sum(sizes), (shape.kernel - 1, 3 * inner), (shape.heads, shape.head_dim, shape.head_dim))


def selective_layer(channels: int, size: int, random: Callable[..., torch.Tensor]) -> Layer:
    sizes = (channels, channels, size, size, channels)

    def mix(kernel: Mamba1Kernel, step: Step, layer: int, x: torch.Tensor) -> torch.Tensor:
        mixed, dt, b, c, gate = x.split(sizes, -1)
        return mamba1.scan(kernel, step, layer, (mamba1.convolve(kernel, step, layer, mixed), dt, b, c), gate)

    kernel = Mamba1Kernel(
        conv_weight=random(channels, 4, scale=0.4),
        conv_bias=random(channels, scale=0.2),
        a_log=random(channels, size),
        dt_bias=random(channels) - 1,
        skip=random(channels),
    )
    return Layer(kernel, mix, sum(sizes), (channels, 3), (channels, 1, size))


def slot(pools: Pools, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    return pools.states[0].conv[i].clone(), pools.states[0].ssm[i].clone()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", LENGTHS)
def test_output_and_state_equal_the_reference(name: str, length: int) -> None:
    layer = layer_of(name, F32)
    ours, theirs, x = layer.pools(), layer.pools(), layer.inputs(length, F32)
    piece = Piece(0, 0, length, mark=length // 2, copy_to=9)
    torch.testing.assert_close(layer.run(ours, x, piece), layer.in_torch(theirs, x, piece), atol=3e-5, rtol=3e-5)
    for i in (1, 9):
        for a, b in zip(slot(ours, i), slot(theirs, i), strict=True):
            torch.testing.assert_close(a, b, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "ssm"), [(BF16, F32), (BF16, BF16), (F16, F16)])
def test_low_precision_stays_near_the_reference(name: str, dtype: torch.dtype, ssm: torch.dtype) -> None:
    layer = layer_of(name, dtype)
    x, piece = layer.inputs(130, dtype), Piece(0, 0, 130)
    a = layer.run(layer.pools(dtype, ssm), x, piece).float()
    b = layer.in_torch(layer.pools(dtype, ssm), x, piece).float()
    assert (a - b).norm() < 0.01 * b.norm()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    dtypes=st.sampled_from([(F32, F32, F32), (BF16, BF16, F32), (BF16, BF16, BF16), (F16, F32, F16)]),
    compiled=st.booleans(),
    length=st.integers(4, 90),
    data=st.data(),
)
def test_the_same_bits_cut_anywhere(name, dtypes, compiled, length, data) -> None:
    dtype, conv, ssm = dtypes
    layer = layer_of(name, dtype)
    run = layer.run if compiled else layer.in_torch
    cut = data.draw(st.integers(1, length - 2))
    whole, parts, x = layer.pools(conv, ssm), layer.pools(conv, ssm), layer.inputs(length, dtype)
    out = run(whole, x, Piece(0, 0, length, mark=cut, copy_to=8))
    bounds = (0, cut, cut + 1, length)  # the middle one is a decode step
    pieces, kept = [], None
    for a, b in itertools.pairwise(bounds):
        pieces.append(run(parts, x[a:b], Piece(0, a, b)))
        kept = kept or slot(parts, 1)
    assert torch.equal(torch.cat(pieces), out)
    assert all(map(torch.equal, slot(whole, 1), slot(parts, 1)))
    assert all(map(torch.equal, slot(whole, 8), kept)), "a checkpoint is the state of a run that ended there"


@pytest.mark.parametrize(("dtype", "ssm"), [(F32, F32), (BF16, F32), (BF16, BF16)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compiled", [True, False])
def test_the_same_bits_alone_in_a_batch_of_eight_and_on_any_threads(
    name: str, dtype: torch.dtype, ssm: torch.dtype, compiled: bool
) -> None:
    layer = layer_of(name, dtype)
    run = layer.run if compiled else layer.in_torch
    lengths = (1, 65, 3, 1, 17, 70, 1, 64)
    x = [layer.inputs(n, dtype, seed=n + i) for i, n in enumerate(lengths)]
    together, alone = layer.pools(dtype, ssm), layer.pools(dtype, ssm)
    out = run(together, torch.cat(x), *(Piece(i, 0, n) for i, n in enumerate(lengths)))
    set_threads(1)
    assert torch.equal(out, torch.cat([run(alone, x[i], Piece(i, 0, n)) for i, n in enumerate(lengths)]))
    for i in range(1, len(lengths) + 1):
        assert all(map(torch.equal, slot(together, i), slot(alone, i)))
    assert out.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_rows_across_the_tokens_prepared_at_once_change_no_bit(name: str) -> None:
    layer, lengths = layer_of(name, BF16), (300, 5, 1100)
    whole, parts = (layer.pools(BF16, BF16) for _ in range(2))
    x = [layer.inputs(n, BF16, seed=n) for n in lengths]
    marked = Piece(2, 0, 1100, mark=900, copy_to=8)
    out = layer.run(whole, torch.cat(x), Piece(0, 0, 300, mark=300, copy_to=9), Piece(1, 0, 5), marked)
    pieces = [layer.run(parts, x[i], Piece(i, 0, n)) for i, n in enumerate(lengths[:2])]
    for first, last in ((0, 7), (7, 400), (400, 900)):
        pieces.append(layer.run(parts, x[2][first:last], Piece(2, first, last)))
    kept = slot(parts, 3)
    pieces.append(layer.run(parts, x[2][900:], Piece(2, 900, 1100)))
    assert torch.equal(out, torch.cat(pieces))
    assert all(map(torch.equal, slot(whole, 8), kept))
    assert all(map(torch.equal, slot(whole, 9), slot(parts, 1)))
    assert all(torch.equal(a, b) for i in (1, 2, 3) for a, b in zip(slot(whole, i), slot(parts, i), strict=True))


@pytest.mark.parametrize("name", [*KDA_SHAPES, *SELECTIVE])
def test_gates_far_out_equal_the_reference(name: str) -> None:
    layer, x = layer_of(name, F32), 40 * torch.linspace(-1, 1, 20)[:, None].repeat(1, layer_of(name, F32).width)
    x[:, ::3] = layer.inputs(20, F32)[:, ::3]
    ours, theirs, piece = layer.pools(), layer.pools(), Piece(0, 0, 20)
    torch.testing.assert_close(layer.run(ours, x, piece), layer.in_torch(theirs, x, piece), atol=3e-5, rtol=3e-5)
    torch.testing.assert_close(slot(ours, 1), slot(theirs, 1), atol=3e-5, rtol=3e-5)
