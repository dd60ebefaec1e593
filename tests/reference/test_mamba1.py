"""The Mamba1 mixer: its reference against a closed form, compiled against torch, checkpoints against shorter runs."""

from __future__ import annotations

import pytest
import torch

from tests.reference.layers import N_SLOTS, Piece, Pools, State, step_of
from twinpool.models.blocks import Linear, RmsNorm
from twinpool.models.mamba1 import reference
from twinpool.models.mamba1.layer import Mamba1Mixer, SelectionNorms
from twinpool.models.mamba1.ops import Mamba1Kernel
from twinpool.models.native import native

HIDDEN, CHANNELS, SIZE, RANK = 10, 19, 5, 3
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def random(*size: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * scale


def mixer_of(dtype: torch.dtype) -> Mamba1Mixer:
    kernel = Mamba1Kernel(
        conv_weight=random(CHANNELS, 4, seed=1, scale=0.5).to(dtype),
        conv_bias=random(CHANNELS, seed=2, scale=0.2).to(dtype),
        a_log=random(CHANNELS, SIZE, seed=3).to(dtype),
        dt_bias=random(CHANNELS, seed=4).to(dtype),
        skip=random(CHANNELS, seed=5).to(dtype),
    )
    shapes = ((2 * CHANNELS, HIDDEN), (RANK + 2 * SIZE, CHANNELS), (CHANNELS, RANK), (HIDDEN, CHANNELS))
    linears = [Linear([random(n, k, seed=6 + i, scale=0.4).to(dtype)]) for i, (n, k) in enumerate(shapes)]
    norms = [RmsNorm(1 + random(n, seed=11, scale=0.1).to(dtype), 1e-5) for n in (RANK, SIZE, SIZE)]
    return Mamba1Mixer(
        in_proj=linears[0], x_proj=linears[1], dt_proj=linears[2], norms=SelectionNorms(*norms), kernel=kernel,
        out_proj=linears[3], layer=0,
    )  # fmt: skip


def pools(conv: torch.dtype, ssm: torch.dtype) -> Pools:
    """Slots of NaN but 1..N_SLOTS - 2, which are zero."""
    views = (
        torch.full((N_SLOTS, CHANNELS, 3), torch.nan, dtype=conv),
        torch.full((N_SLOTS, CHANNELS, 1, SIZE), torch.nan, dtype=ssm),
    )
    for view in views:
        view[1 : N_SLOTS - 1] = 0
    return Pools(states=(State(*views),))


def run(mixer: Mamba1Mixer, memory: Pools, x: torch.Tensor, *pieces: Piece) -> torch.Tensor:
    return mixer.forward(x, step_of(memory, *pieces), torch.zeros_like(x))


def slot(memory: Pools, number: int) -> list[torch.Tensor]:
    return [memory.states[0].conv[number].clone(), memory.states[0].ssm[number].clone()]


def test_the_scan_is_the_sum_of_decayed_inputs() -> None:
    n = 12
    x, b, c, dt = (random(n, w, seed=s) for w, s in ((CHANNELS, 1), (SIZE, 2), (SIZE, 3), (CHANNELS, 4)))
    dt, rate, skip = dt.exp() * 0.3, -random(CHANNELS, SIZE, seed=5).exp(), random(CHANNELS, seed=6)
    first = random(CHANNELS, SIZE, seed=7)
    y, state = reference.scan((x, b, c), dt, rate, skip, first)
    total = dt.cumsum(0)[:, :, None] * rate
    for t in range(n):
        inputs = sum(torch.exp(total[t] - total[s]) * (dt[s] * x[s])[:, None] * b[s] for s in range(t + 1))
        expected = torch.exp(total[t]) * first + inputs
        torch.testing.assert_close(y[t], expected @ c[t] + skip * x[t], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(native is None, reason="the kernels are not compiled")
@pytest.mark.parametrize(("dtype", "atol"), [(F32, 2e-5), (BF16, 0.03), (F16, 0.005)])
@pytest.mark.parametrize("ssm", [F32, BF16])
def test_compiled_and_torch_agree(dtype: torch.dtype, atol: float, ssm: torch.dtype) -> None:
    fast, slow = mixer_of(dtype), mixer_of(dtype)
    slow.kernel.conv = slow.kernel.handle = None
    ours, theirs = pools(dtype, ssm), pools(dtype, ssm)
    x = random(70, HIDDEN, seed=9).to(dtype)
    pieces = (Piece(0, 0, 40, mark=16, copy_to=8), Piece(2, 0, 30))
    torch.testing.assert_close(run(fast, ours, x, *pieces), run(slow, theirs, x, *pieces), atol=atol, rtol=atol)
    for number in (1, 3, 8):
        torch.testing.assert_close(slot(ours, number), slot(theirs, number), atol=atol, rtol=max(atol, 0.01))


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.skipif(native is None, reason="none"))]
)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_cuts_batch_mates_and_checkpoints_change_no_bit(dtype: torch.dtype, compiled: bool) -> None:
    mixer, x = mixer_of(dtype), random(60, HIDDEN, seed=9).to(dtype)
    if not compiled:
        mixer.kernel.conv = mixer.kernel.handle = None
    whole, cut = pools(dtype, BF16), pools(dtype, BF16)
    expected = run(mixer, whole, x, Piece(0, 0, 60))
    first = run(mixer, cut, torch.cat([x[:25], x[7:20]]), Piece(0, 0, 25, mark=16, copy_to=8), Piece(4, 0, 13))[:25]
    rest = run(mixer, cut, torch.cat([x[3:4], x[25:]]), Piece(4, 13, 14), Piece(0, 25, 60))[1:]
    assert torch.equal(torch.cat([first, rest]), expected)
    assert all(map(torch.equal, slot(cut, 1), slot(whole, 1)))
    short = pools(dtype, BF16)
    run(mixer, short, x[:16], Piece(0, 0, 16))
    assert all(map(torch.equal, slot(cut, 8), slot(short, 1))), "a checkpoint is the state of a run that ended there"


def test_without_norms_nothing_is_normed() -> None:
    mixer, x = mixer_of(F32), random(5, HIDDEN, seed=9)
    plain = Mamba1Mixer(
        in_proj=mixer.in_proj, x_proj=mixer.x_proj, dt_proj=mixer.dt_proj, norms=None, kernel=mixer.kernel,
        out_proj=mixer.out_proj, layer=0,
    )  # fmt: skip
    piece = Piece(0, 0, 5)
    assert not torch.equal(run(mixer, pools(F32, F32), x, piece), run(plain, pools(F32, F32), x, piece))
