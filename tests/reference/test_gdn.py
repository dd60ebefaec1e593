"""The compiled gated delta rule layer: against its reference, and against itself cut, batched and on more threads."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.reference.layers import N_SLOTS, Piece, Pools, gdn_kernel, gdn_pools, step_of
from twinpool.models.gdn.ops import GdnKernel, GdnShape, mix
from twinpool.models.native import native, set_threads

pytestmark = pytest.mark.skipif(native is None, reason="the kernels are not compiled")

SHAPES = {
    "128": GdnShape(key_heads=1, value_heads=2, key_dim=128, value_dim=128, kernel=4, eps=1e-6),
    "64": GdnShape(key_heads=2, value_heads=2, key_dim=64, value_dim=48, kernel=4, eps=1e-6),
    "negative eigenvalues": GdnShape(
        key_heads=2, value_heads=2, key_dim=24, value_dim=48, kernel=4, eps=1e-6, beta_scale=2.0
    ),
    "odd": GdnShape(key_heads=2, value_heads=4, key_dim=10, value_dim=19, kernel=3, eps=1e-6),
}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LENGTHS = (1, 3, 63, 64, 65, 200)


def inputs(shape: GdnShape, n: int, dtype: torch.dtype, seed: int = 5) -> torch.Tensor:
    """A projection with columns to spare."""
    width = shape.channels + shape.values + 2 * shape.value_heads + 3
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_torch(kernel: GdnKernel, pools: Pools, x: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The same by the reference, through the fallback."""
    slow = GdnKernel.__new__(GdnKernel)
    slow.__dict__.update(kernel.__dict__, handle=None)
    return mix(slow, step_of(pools, piece), 0, x)


def slots(pools: Pools, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    return pools.states[0].conv[i].clone(), pools.states[0].ssm[i].clone()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_output_and_state_equal_the_reference(name: str, length: int) -> None:
    shape = SHAPES[name]
    kernel, x = gdn_kernel(shape, F32), inputs(shape, length, F32)
    ours, theirs = (gdn_pools(shape, conv=F32, ssm=F32) for _ in range(2))
    piece = Piece(0, 0, length)
    torch.testing.assert_close(
        mix(kernel, step_of(ours, piece), 0, x), in_torch(kernel, theirs, x, piece), atol=2e-5, rtol=2e-5
    )
    for a, b in zip(slots(ours, 1), slots(theirs, 1), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("dtype", "conv", "ssm"), [(BF16, BF16, F32), (BF16, F16, BF16), (F16, F16, F16), (F32, BF16, BF16)]
)
def test_low_precision_stays_near_the_reference(dtype: torch.dtype, conv: torch.dtype, ssm: torch.dtype) -> None:
    shape = SHAPES["128"]
    kernel, x = gdn_kernel(shape, dtype), inputs(shape, 70, dtype)
    ours, theirs = (gdn_pools(shape, conv=conv, ssm=ssm) for _ in range(2))
    piece = Piece(0, 0, 70)
    a, b = mix(kernel, step_of(ours, piece), 0, x).float(), in_torch(kernel, theirs, x, piece).float()
    assert (a - b).norm() < 0.02 * b.norm()
    a, b = slots(ours, 1)[1].float(), slots(theirs, 1)[1].float()
    assert (a - b).norm() < 0.02 * b.norm()
    assert torch.equal(slots(ours, 1)[0], slots(theirs, 1)[0])


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(sorted(SHAPES)),
    dtypes=st.sampled_from([(F32, F32, F32), (BF16, BF16, F32), (BF16, BF16, BF16), (F16, F32, F16)]),
    length=st.integers(2, 90),
    data=st.data(),
)
def test_the_same_bits_cut_anywhere_with_a_checkpoint_at_each_cut(name, dtypes, length, data) -> None:
    shape, (dtype, conv, ssm) = SHAPES[name], dtypes
    cut = data.draw(st.integers(1, length - 1))
    kernel, x = gdn_kernel(shape, dtype), inputs(shape, length, dtype)
    whole, parts = (gdn_pools(shape, conv=conv, ssm=ssm) for _ in range(2))
    out = mix(kernel, step_of(whole, Piece(0, 0, length, mark=cut, copy_to=N_SLOTS - 1)), 0, x)
    first = mix(kernel, step_of(parts, Piece(0, 0, cut)), 0, x[:cut])
    assert all(map(torch.equal, slots(whole, N_SLOTS - 1), slots(parts, 1)))
    # A decode step and a chunk are the same code.
    middle = mix(kernel, step_of(parts, Piece(0, cut, cut + 1)), 0, x[cut : cut + 1])
    pieces = [first, middle]
    if cut + 1 < length:
        pieces.append(mix(kernel, step_of(parts, Piece(0, cut + 1, length)), 0, x[cut + 1 :]))
    assert torch.equal(torch.cat(pieces), out)
    assert all(map(torch.equal, slots(whole, 1), slots(parts, 1)))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("name", SHAPES)
def test_the_same_bits_alone_in_a_batch_of_eight_and_on_any_threads(name: str, dtype: torch.dtype) -> None:
    shape = SHAPES[name]
    kernel = gdn_kernel(shape, dtype)
    lengths = (1, 65, 3, 1, 17, 130, 1, 64)
    together, alone = (gdn_pools(shape, conv=BF16, ssm=F32) for _ in range(2))
    x = [inputs(shape, n, dtype, seed=n + i) for i, n in enumerate(lengths)]
    out = mix(kernel, step_of(together, *(Piece(i, 0, n) for i, n in enumerate(lengths))), 0, torch.cat(x))
    set_threads(1)
    singles = [mix(kernel, step_of(alone, Piece(i, 0, n)), 0, x[i]) for i, n in enumerate(lengths)]
    assert torch.equal(out, torch.cat(singles))
    for i in range(N_SLOTS - 1):
        assert all(
            a.equal(b) or (a.isnan().all() and b.isnan().all())
            for a, b in zip(slots(together, i), slots(alone, i), strict=True)
        )


def test_other_slots_are_neither_read_nor_written() -> None:
    shape = SHAPES["64"]
    pools = gdn_pools(shape, conv=BF16, ssm=F32)
    for i in (0, 2, N_SLOTS - 1):
        for view in (pools.states[0].conv, pools.states[0].ssm):
            view[i] = torch.nan
    out = mix(gdn_kernel(shape, F32), step_of(pools, Piece(0, 0, 9), Piece(2, 0, 9)), 0, inputs(shape, 18, F32))
    assert out.isfinite().all()
    assert all(
        view[i].isnan().all() for i in (0, 2, N_SLOTS - 1) for view in (pools.states[0].conv, pools.states[0].ssm)
    )
