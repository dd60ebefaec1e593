"""A sparse index over pools of tokens: the keys of full pools, which pools a query chooses, and attention to their tokens alone.

Tokens 0 .. P - 1 of a sequence are its first pool, the next P the second. A full pool has one key, a mean of its tokens' keys with a
weight for each token and element: softmax over the pool of the token's gate plus a constant of its place. A query chooses the best
S / P of the pools that are full by then, and attends to their tokens and to those of the pool that is not. Where scores are equal the
earlier pool is chosen (transformers leaves it open). Source: transformers' Glm5NextTextIndexer.

What is needed of an open pool's tokens is a window in the state slot, so a sequence can be cut and resumed at any token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch

from twinpool.models.attention.latent import LatentKernel, attend_stored, store
from twinpool.models.blocks import Linear
from twinpool.models.bound import Step, bind_kv
from twinpool.models.rows import by_rows, by_token
from twinpool.models.step_batch import Int32Array, KvLayer, StepBatch

_SCORES = 1 << 24  # held at once


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexShape:
    """Heads and sizes of an index: dim elements a key, pools of pool_tokens (P), chosen_tokens (S) out of full pools."""

    heads: int
    dim: int
    pool_tokens: int
    chosen_tokens: int

    @property
    def whole_tokens(self) -> int:
        """Tokens at positions below this one attend to every token: they do not see more full pools than they choose."""
        return self.chosen_tokens + self.pool_tokens - 1


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """What the late tokens of a step attend to, those at whole_tokens and beyond.

    late: bool [T], n of them true; rows: int32 [n, whole_tokens], the chosen tokens in ascending order, as pages of `rows_of`;
    counts: int32 [n], how many of them there are.
    """

    whole_tokens: int
    late: torch.Tensor
    rows: Int32Array
    counts: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A layer's latents as pages of one token each, where they lie.

    Token `offset` of page `page` is page page * per_page + offset * per_token: pages of this view start at each greatest common
    divisor of the two distances, so most of them are never used.
    """

    keys: torch.Tensor
    values: torch.Tensor
    index: torch.Tensor
    per_page: int
    per_token: int


def rows_of(layer: KvLayer) -> Rows:
    """The view of a layer whose keys are latents."""
    keys = layer.keys
    (n_pages, page_size, _, width), (per_page, per_token) = keys.shape, keys.stride()[:2]
    unit = math.gcd(per_page, per_token)
    count = ((n_pages - 1) * per_page + (page_size - 1) * per_token) // unit + 1
    assert count <= 1 << 31, "page tables are int32"
    rows = keys.as_strided((count, 1, 1, width), (unit, width, width, 1))
    return Rows(rows, rows, layer.index, per_page // unit, per_token // unit)


def keep_pools(
    shape: IndexShape, step: Step, *, layer: int, window: int, rows: torch.Tensor, places: torch.Tensor
) -> None:
    """Write the keys of pools that a step's tokens fill to their pages, and tokens of open pools to the slots.

    layer, window: numbers of the attention layer and of the state that is its window; rows: [T, 2 dim], key and gate of each token;
    places: float32 [P, dim].
    """
    batch, view = step.batch, step.memory.kv[layer].views.index
    row_of = np.repeat(np.arange(batch.n_rows), np.diff(batch.row_offsets))
    page_size = step.memory.kv[layer].views.keys.shape[1]

    def carry(at: torch.Tensor, held: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        first = int(at[0])
        pool, n_open = divmod(int(batch.positions[first]), shape.pool_tokens)
        tokens = torch.cat([held[:n_open], rows[at].to(held.dtype)])
        full = len(tokens) // shape.pool_tokens
        if full:
            pools = tokens[: full * shape.pool_tokens].unflatten(0, (full, shape.pool_tokens))
            keys = by_token(lambda one: _pool_key(one, places), pools)
            page, number = _key_places(shape, batch.pages[row_of[first]], page_size, range(pool, pool + full))
            view[page, number] = keys.to(view.dtype)
        left = tokens[full * shape.pool_tokens :]
        held[: len(left)] = left
        held[len(left) :] = 0
        return at

    by_rows(step, window, torch.arange(batch.n_tokens, device=rows.device), carry)


def choose(
    shape: IndexShape, step: Step, *, layer: int, queries: torch.Tensor, weights: torch.Tensor, late: torch.Tensor
) -> Chosen:
    """What late tokens attend to. queries: float32 [n, heads, dim]; weights: float32 [n, heads]; late: bool [T], n of them true."""
    batch, views = step.batch, step.memory.kv[layer].views
    page_size, begin, places = views.keys.shape[1], 0, rows_of(views)
    rows, positions = [], []
    for row, end in enumerate(batch.ends.tolist()):
        start = max(int(batch.starts[row]), shape.whole_tokens)
        if start >= end:
            continue
        at = np.arange(start, end)
        page, number = _key_places(shape, batch.pages[row], page_size, range(end // shape.pool_tokens))
        scored = Linear([views.index[page, number].float()])
        table = torch.from_numpy(batch.pages[row]).to(late.device).long() * places.per_page
        n_parts = min(len(at), -(-len(at) * shape.heads * scored.n // _SCORES))
        for part in torch.from_numpy(at).to(late.device).tensor_split(n_parts):
            here = slice(begin, begin + len(part))
            tokens = _tokens(shape, _best_pools(shape, scored, queries[here], weights[here], part), part)
            rows.append((table[tokens // page_size] + tokens % page_size * places.per_token).int().cpu())
            begin = here.stop
        positions.append(at)
    counts = shape.chosen_tokens + (np.concatenate(positions) + 1) % shape.pool_tokens
    return Chosen(shape.whole_tokens, late, torch.cat(rows).numpy(), counts.astype(np.int32))


def attend_chosen(
    kernel: LatentKernel, step: Step, layer: int, queries: torch.Tensor, latents: torch.Tensor, chosen: Chosen
) -> torch.Tensor:
    """As latent.attend, but late tokens attend to chosen tokens: one after another, as if the others were not there."""
    kv = step.memory.kv[layer]
    store(step, kv.views.keys, latents)
    out, late = torch.empty_like(queries), chosen.late
    ends = np.minimum(step.batch.ends, chosen.whole_tokens)
    early = np.flatnonzero(ends > step.batch.starts)
    if len(early):
        pages = [step.batch.pages[row] for row in early]
        part = Step.of(_rows(step.batch.starts[early], ends[early], pages), step.memory, device=queries.device)
        out[~late] = attend_stored(kernel, part, kv, queries[~late])
    alone = _rows(chosen.counts - 1, chosen.counts, list(chosen.rows))
    part = Step.of(alone, step.memory, device=queries.device)
    out[late] = attend_stored(kernel, part, bind_kv(rows_of(kv.views)), queries[late])
    return out


def _pool_key(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[dim]: the key of one full pool. tokens [P, 2 dim]; weights are rounded to the keys' dtype, as transformers does it."""
    keys, gates = tokens.chunk(2, -1)
    weights = (gates.float() + places).softmax(0).to(keys.dtype)
    return (weights * keys).sum(0)


def _key_places(
    shape: IndexShape, table: Int32Array, page_size: int, pools: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """(Page, number in the page) of the key of each of a sequence's pools; table: its pages."""
    last = (np.arange(pools.start, pools.stop) + 1) * shape.pool_tokens - 1
    return torch.from_numpy(table[last // page_size]).long(), torch.from_numpy(last % page_size // shape.pool_tokens)


def _best_pools(
    shape: IndexShape, scored: Linear, queries: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """[n, S / P], ascending: pools chosen by queries at those positions. scored: keys of the pools, as a product.

    The score of a pool is the sum over heads of weight times relu(query . key), scaled; heads are added in their order.
    """
    scores = scored.forward(queries.flatten(0, 1)).unflatten(0, queries.shape[:2])
    weighted = weights[..., None] * torch.relu(scores * shape.dim**-0.5)
    totals = reduce(torch.add, weighted.unbind(1))
    full = (positions + 1) // shape.pool_tokens
    open_ = torch.arange(scored.n, device=totals.device) >= full[:, None]
    # A request whose numbers have overflowed is ended by the sampler; here it must not end the step of all.
    totals = totals.masked_fill(open_ | totals.isnan(), float("-inf"))
    n_chosen = shape.chosen_tokens // shape.pool_tokens
    least = totals.topk(n_chosen, -1).values[:, -1:]
    above, equal = totals > least, totals == least
    taken = above | (equal & (equal.cumsum(-1) <= n_chosen - above.sum(-1, keepdim=True)))
    return taken.nonzero()[:, 1].reshape(len(queries), n_chosen)


def _tokens(shape: IndexShape, pools: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[n, whole_tokens], ascending: tokens of chosen pools [n, S / P], then those of the open one; behind them the query's own."""
    within = torch.arange(shape.pool_tokens, device=pools.device)
    of_pools = (pools[..., None] * shape.pool_tokens + within).flatten(1)
    first_open = (positions + 1) // shape.pool_tokens * shape.pool_tokens
    return torch.cat([of_pools, torch.minimum(first_open[:, None] + within[:-1], positions[:, None])], 1)


def _rows(starts: Int32Array, ends: Int32Array, pages: Sequence[Int32Array]) -> StepBatch:
    """Rows for attention alone: no slots."""
    nothing = np.zeros(len(starts), np.int32)
    return StepBatch(
        positions=np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)]),
        row_offsets=np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int32),
        starts=np.ascontiguousarray(starts, np.int32),
        ends=np.ascontiguousarray(ends, np.int32),
        slots=nothing,
        checkpoint_offsets=nothing,
        checkpoint_slots=nothing,
        pages=tuple(pages),
    )
