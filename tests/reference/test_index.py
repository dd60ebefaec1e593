"""The sparse index against transformers' own: which tokens each query attends to, for any pool, page and cut; and attention to them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

from tests.reference.layers import State
from twinpool.models.attention.index import attend_chosen, rows_of
from twinpool.models.attention.index_layer import SparseIndex, adopt_index
from twinpool.models.attention.latent import LatentKernel, LatentShape
from twinpool.models.bound import BoundMemory, Step
from twinpool.models.step_batch import StepBatch

LENGTH, HIDDEN, NARROW, DIM = 117, 24, 10, 12
LATENT = LatentShape(heads=3, rank=20, plain=8, rotary=0, value_dim=6, scale=0.3)


@dataclass(frozen=True)
class IndexedKv:
    keys: torch.Tensor
    values: torch.Tensor
    index: torch.Tensor


@dataclass(frozen=True)
class Pools:
    kv: tuple[IndexedKv, ...]
    states: tuple[State, ...]


class World:
    """One sequence with scattered pages; all of it is NaN but the window."""

    def __init__(self, *, page_size: int, pool: int) -> None:
        n_pages = -(-LENGTH // page_size)
        room = torch.full((n_pages + 1, -(-page_size // pool), DIM), float("nan"))
        latents = torch.full((n_pages + 1, page_size, 1, LATENT.width), float("nan"))
        window = torch.zeros(2, pool - 1, 2 * DIM)
        self.memory = Pools((IndexedKv(latents, latents, room),), (State(window, torch.zeros(2, 0)),))
        self.table = np.random.default_rng(0).permutation(np.arange(1, n_pages + 1)).astype(np.int32)
        self.page_size = page_size

    def step(self, start: int, end: int) -> Step:
        """Tokens [start, end)."""
        one = np.zeros(1, np.int32)
        batch = StepBatch(
            positions=np.arange(start, end), row_offsets=np.array([0, end - start], np.int32), starts=one + start, ends=one + end,
            slots=one + 1, checkpoint_offsets=one, checkpoint_slots=one, pages=(self.table,),
        )  # fmt: skip
        return Step.of(batch, BoundMemory.of(self.memory), device=torch.device("cpu"))

    def positions(self) -> dict[int, int]:
        """Where the row of each token lies: its page in the view of single tokens."""
        rows, size = rows_of(self.memory.kv[0]), self.page_size
        return {int(self.table[at // size]) * rows.per_page + at % size * rows.per_token: at for at in range(LENGTH)}


def indexer(*, pool: int, chosen: int, seed: int = 0) -> Glm5NextTextIndexer:
    """transformers' module with random weights."""
    config = Glm5NextTextConfig(
        hidden_size=HIDDEN, q_lora_rank=NARROW, index_n_heads=9, index_head_dim=DIM, index_kpool=pool, index_topk=chosen,
    )  # fmt: skip
    torch.manual_seed(seed)
    module = Glm5NextTextIndexer(config, 0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.eval()


def inputs(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LENGTH, HIDDEN, generator=generator), torch.randn(LENGTH, NARROW, generator=generator)


def theirs(module: Glm5NextTextIndexer) -> list[list[int]]:
    """Tokens that each query attends to, in one uncut pass."""
    hidden, narrow = inputs()
    mask = torch.ones(1, LENGTH, dtype=torch.bool)
    found = module(hidden_states=hidden[None], q_resid=narrow[None], attention_mask=mask, cache=None)[0]
    return [sorted(token for token in row if token >= 0) for row in found.tolist()]


def ours(index: SparseIndex, world: World, cuts: list[int]) -> list[list[int]]:
    """The same, cut; in the order of our gathering."""
    (hidden, narrow), tokens, place_of = inputs(), [], world.positions()
    with torch.inference_mode():
        for start, end in pairwise([0, *cuts]):
            chosen = index.forward(hidden[start:end], narrow[start:end], world.step(start, end))
            late = iter(range(0 if chosen is None else len(chosen.counts)))
            for position in range(start, end):
                if chosen is None or not chosen.late[position - start]:
                    tokens.append(list(range(position + 1)))
                    continue
                n = next(late)
                tokens.append([place_of[row] for row in chosen.rows[n, : chosen.counts[n]].tolist()])
    return tokens


@pytest.mark.parametrize(("pool", "chosen"), [(1, 7), (2, 8), (4, 40), (16, 32), (5, 10)])
@pytest.mark.parametrize("page_size", [1, 4, 6, 32])
def test_the_tokens_are_those_of_transformers(pool: int, chosen: int, page_size: int) -> None:
    module = indexer(pool=pool, chosen=chosen)
    expected = theirs(module)
    index = adopt_index(module, layer=0, window=0)
    assert len(expected[-1]) < LENGTH, "tokens are left out"
    for cuts in ([LENGTH], [1, 2, 3, 50, 51, 98, *range(LENGTH - 9, LENGTH + 1)]):
        assert ours(index, World(page_size=page_size, pool=pool), cuts) == expected


def test_of_equal_scores_the_earlier_pool_is_chosen() -> None:
    module = indexer(pool=4, chosen=8)
    nn.init.zeros_(module.weights_proj.weight)
    tokens = ours(adopt_index(module, layer=0, window=0), World(page_size=4, pool=4), [LENGTH])
    assert tokens[60] == [*range(8), 60]
    assert tokens[63] == [*range(8)], "a pool that the query fills is one of many"


@pytest.mark.parametrize("compiled", [True, False])
def test_attention_is_to_chosen_tokens_alone(compiled: bool) -> None:
    module, world = indexer(pool=4, chosen=12), World(page_size=6, pool=4)
    index = adopt_index(module, layer=0, window=0)
    kernel = LatentKernel(LATENT, dtype=torch.float32, device=torch.device("cpu"))
    if not compiled:
        kernel.handle = None
    generator = torch.Generator().manual_seed(5)
    queries = torch.randn(LENGTH, LATENT.heads, LATENT.width, generator=generator)
    latents = torch.randn(LENGTH, LATENT.width, generator=generator)
    (hidden, narrow), found = inputs(), []
    with torch.inference_mode():
        for start, end in pairwise([0, 20, 21, 70, LENGTH]):  # the first piece has tokens of both kinds
            step = world.step(start, end)
            chosen = index.forward(hidden[start:end], narrow[start:end], step)
            assert chosen is not None
            found.append(attend_chosen(kernel, step, 0, queries[start:end], latents[start:end], chosen))
    out = torch.cat(found)
    for position, tokens in enumerate(theirs(module)):
        rows = latents[tokens]
        weights = (queries[position] @ rows.T * LATENT.scale).softmax(-1)
        torch.testing.assert_close(out[position], weights @ rows, atol=1e-5, rtol=1e-5)
