"""Shares of a checkpoint: what each rank holds, and that all of them together say what the whole model says."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny_models
from tests.tiny_models import tiny_checkpoint
from twinpool.engine.checkpoint import read_spec
from twinpool.engine.rank import allocate_buffer
from twinpool.errors import ModelError
from twinpool.memory.arena import Arena
from twinpool.models import native as models_native
from twinpool.models.adopt import load_model
from twinpool.models.group import Group
from twinpool.models.shard import Sharding, Share, cut, on_first, share_of_config, share_of_weights
from twinpool.models.step_batch import PackedStep

# Families, and what their tiny configs lack for four ranks.
FOUR_KEYS, FOUR_HEADS, FOUR_GROUPS = {"linear_num_key_heads": 4}, {"linear_num_heads": 4}, {"mamba_n_groups": 4}
SHARED: dict[str, dict[str, Any]] = {
    "qwen3_5": FOUR_KEYS,
    "qwen3_5_moe": FOUR_KEYS,
    "qwen3_next": FOUR_KEYS,
    "nemotron": {"n_groups": 4},
    "nemotron_latent": {"n_groups": 4},
    "granite": FOUR_GROUPS,
    "granite_rope": FOUR_GROUPS,
    "granite_moe": FOUR_GROUPS,
    "bamba": FOUR_GROUPS,
    "kimi": FOUR_HEADS,
    "kimi_narrow": FOUR_HEADS,
    "ling": {},
    "ling_narrow": {},
    "olmo": FOUR_KEYS,
    "olmo_rope": FOUR_KEYS,
    "lfm2": {},
    "lfm2_moe": {},
    "falcon": FOUR_GROUPS,
    "falcon_plain": FOUR_GROUPS,
    "zamba": {"mamba_ngroups": 4},
    "zamba_rope": {"mamba_ngroups": 4},
    "jamba": {},
    "falcon_mamba": {},
    "mamba": {},
}


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shard")


class Threads:
    """As many ranks as threads: a process group without processes."""

    def __init__(self, ranks: int) -> None:
        self.parts: list[torch.Tensor | None] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=30)

    def of(self, rank: int) -> Any:
        def gather(out: torch.Tensor, part: torch.Tensor) -> Any:
            self.parts[rank] = part
            self.barrier.wait()
            out.copy_(torch.cat([p for p in self.parts if p is not None]))
            self.barrier.wait()
            return SimpleNamespace(wait=lambda: None)

        return SimpleNamespace(_allgather_base=gather)


def step_of(tokens: list[int], *, page_size: int) -> PackedStep:
    """One row, from the start, every token of which is sampled; slot 1, pages from 1 on."""
    n, pages = len(tokens), -(-len(tokens) // page_size)
    return PackedStep(
        input_ids=np.array(tokens, np.int64),
        positions=np.arange(n, dtype=np.int64),
        row_offsets=np.array([0, n], np.int32),
        starts=np.zeros(1, np.int32),
        ends=np.array([n], np.int32),
        slots=np.ones(1, np.int32),
        checkpoint_offsets=np.zeros(1, np.int32),
        checkpoint_slots=np.zeros(1, np.int32),
        pages=(np.arange(1, pages + 1, dtype=np.int32),),
        sample_at=np.arange(n, dtype=np.int64),
    )


def logits_of_all(folder: Path, tokens: list[int], ranks: int, *, dtype: str = "float32") -> list[torch.Tensor]:
    """Logits of every token, of each rank."""
    threads = Threads(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        runs = [
            pool.submit(logits_of, folder, tokens, Share(rank, ranks), threads.of(rank), dtype=dtype)
            for rank in range(ranks)
        ]
        return [run.result() for run in runs]


def logits_of(
    folder: Path, tokens: list[int], share: Share | None = None, group: Any = None, *, dtype: str = "float32"
) -> torch.Tensor:
    """Logits of every token, of one rank."""
    spec, ranks = read_spec(folder).with_exact_index(page_tokens=16), share.ranks if share else 1
    arena = Arena(
        page_bytes=16 * spec.kv_bytes_per_token(kv_dtype="float32", tp=ranks),
        slot_bytes=spec.slot_bytes(ssm_dtype="float32", conv_dtype="float32", tp=ranks),
        n_slots=2,
        n_pages=8,
    )
    dtypes = {"kv_dtype": "float32", "ssm_dtype": "float32", "conv_dtype": "float32"}
    memory = allocate_buffer(spec, arena, ranks=ranks, page_size=16, device="cpu", host=None, **dtypes)
    model = load_model(folder, dtype=dtype, share=share)
    if share is not None:
        model.join(Group(share, group))
    step = step_of(tokens, page_size=16)
    with torch.inference_mode():
        return model.forward(torch.from_numpy(step.input_ids), step, memory, torch.from_numpy(step.sample_at))


@pytest.mark.parametrize("family", SHARED)
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_shares_say_what_the_whole_says(family: str, ranks: int, cache_dir: Path) -> None:
    folder = tiny_checkpoint(family, cache_dir, **SHARED[family])
    tokens = np.random.default_rng(0).integers(0, 256, 40).tolist()
    whole = logits_of(folder, tokens)
    shares = logits_of_all(folder, tokens, ranks)
    assert all(torch.equal(shares[0], other) for other in shares)
    torch.testing.assert_close(shares[0], whole, rtol=2e-4, atol=2e-4)


def test_shares_of_a_nested_config(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, model, values = tiny_models._CLASSES["glm"]
    wide = {**values, "text_config": {**values["text_config"], "linear_num_heads": 4}}
    monkeypatch.setitem(tiny_models._CLASSES, "glm_wide", (config, model, wide))
    folder, tokens = tiny_checkpoint("glm_wide", cache_dir), list(range(90))  # more than its index chooses
    whole, shares = logits_of(folder, tokens), logits_of_all(folder, tokens, 2)
    assert torch.equal(*shares)
    torch.testing.assert_close(shares[0], whole, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["granite", "granite_moe", "bamba", "falcon", "falcon_plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_over_all_ranks(family: str, dtype: str, cache_dir: Path) -> None:
    folder = tiny_checkpoint(family, cache_dir, mamba_n_groups=1)
    tokens = np.random.default_rng(1).integers(0, 256, 40).tolist()
    whole, shares = logits_of(folder, tokens, dtype=dtype), logits_of_all(folder, tokens, 4, dtype=dtype)
    assert all(torch.equal(shares[0], other) for other in shares)
    rounding = {"float32": 2e-4, "bfloat16": 0.1}[dtype]
    torch.testing.assert_close(shares[0], whole, rtol=rounding, atol=rounding * float(whole.abs().max()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_inside_a_layer(dtype: str, cache_dir: Path) -> None:
    """dt, B and C of Mamba1; what Zamba's shared block gives to its MLP and to the layer, and the norm over all ranks behind it."""
    tokens = np.random.default_rng(2).integers(0, 256, 40).tolist()
    rounding = {"float32": 2e-4, "bfloat16": 0.1}[dtype]
    for name, changes in (("zamba_rope", {"mamba_ngroups": 1, "add_bias_linear": True}), ("jamba", {}), ("mamba", {})):
        folder = tiny_checkpoint(name, cache_dir, **changes)
        whole, shares = logits_of(folder, tokens, dtype=dtype), logits_of_all(folder, tokens, 4, dtype=dtype)
        assert all(torch.equal(shares[0], other) for other in shares), name
        torch.testing.assert_close(shares[0], whole, rtol=rounding, atol=rounding * float(whole.abs().max()))


def test_sums_over_all_ranks_without_kernels(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_native, "native", None)
    one_group = {"mamba_n_groups": 1}
    for family, changes in (
        ("granite", one_group),
        ("falcon", one_group),
        ("jamba", {}),
        ("zamba", {"mamba_ngroups": 1}),
    ):
        folder, tokens = tiny_checkpoint(family, cache_dir, **changes), list(range(20))
        whole, shares = logits_of(folder, tokens), logits_of_all(folder, tokens, 2)
        assert torch.equal(*shares)
        torch.testing.assert_close(shares[0], whole, rtol=2e-4, atol=2e-4)


def test_groups_that_ranks_do_not_divide_are_named(cache_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"--tp-size 4 does not divide the model's 2 Mamba groups; use a divisor of 2"):
        load_model(tiny_checkpoint("bamba", cache_dir), dtype="float32", share=Share(0, 4))


@pytest.mark.parametrize(("rank", "part"), [(0, (0, 2)), (1, (2, 2))])
def test_units_in_equal_parts(rank: int, part: tuple[int, int]) -> None:
    assert Share(rank, 2).of(4) == part


def test_fewer_units_than_ranks_are_held_by_several() -> None:
    assert [Share(rank, 4).of(2) for rank in range(4)] == [(0, 1), (0, 1), (1, 1), (1, 1)]
    with pytest.raises(ModelError, match=r"--tp-size 4 and the model's 3 heads"):
        Share(0, 4).of(3)


def test_pieces_are_cut_on_their_own() -> None:
    pieces = cut(0, lambda config: ((2, 2), (2, 1)))
    assert pieces(torch.arange(6), None, Share(1, 2)).tolist() == [2, 3, 5]
    with pytest.raises(ModelError, match=r"of \[5\] in the weights is cut as one of 6"):
        pieces(torch.arange(5), None, Share(1, 2))


def test_biases_of_sums_are_added_once() -> None:
    bias = torch.ones(2)
    assert [on_first(bias, None, Share(rank, 2)).sum().item() for rank in range(2)] == [2.0, 0.0]


def test_names_that_no_cut_matches_stay_whole() -> None:
    tensors = {"a.up.weight": torch.arange(4), "a.norm.weight": torch.arange(4)}
    share_of_weights(tensors, None, Sharding(divided=(), cuts={r"\.up\.weight": cut(0)}), Share(0, 2))
    assert {name: len(tensor) for name, tensor in tensors.items()} == {"a.up.weight": 2, "a.norm.weight": 4}


def test_sizes_that_do_not_divide_are_named() -> None:
    config = SimpleNamespace(width=6, num_key_value_heads=2)
    with pytest.raises(ModelError, match=r"--tp-size 4 does not divide the model's width=6; use a divisor of 6"):
        share_of_config(config, Sharding(divided=("width",)), Share(0, 4))
    part = share_of_config(config, Sharding(divided=("width", "missing")), Share(1, 2))
    assert (part.width, part.num_key_value_heads, config.width) == (3, 1, 6)


def test_a_share_alone_does_not_run(cache_dir: Path) -> None:
    folder = tiny_checkpoint("qwen3_5", cache_dir)
    model = load_model(folder, dtype="float32", share=Share(0, 2))
    with pytest.raises(AssertionError, match="sums over its ranks"):
        model.forward(torch.zeros(1, dtype=torch.int64), None, None, torch.zeros(0))


def test_weights_of_a_share_are_about_half(cache_dir: Path) -> None:
    folder = tiny_checkpoint("qwen3_5", cache_dir, intermediate_size=1024)
    whole, part = (load_model(folder, dtype="float32", share=share).weight_bytes for share in (None, Share(0, 2)))
    assert 0.5 < part / whole < 0.6
