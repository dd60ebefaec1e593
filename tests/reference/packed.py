"""Driving an adopted model by hand: pages and slots of one or more sequences, steps cut anywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from twinpool.engine.checkpoint import read_spec
from twinpool.engine.inputs import LastTokens, pack
from twinpool.engine.tensors import Memory
from twinpool.memory.arena import Arena
from twinpool.models.adopt import AdoptedModel, load_model
from twinpool.step import Row, SlotOrder, StepPlan

CONTEXT = 256


class Bench:
    """A model with memory for a few sequences. Sequence i has slot i + 1; its pages are scattered on purpose."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str,
        page_size: int = 4,
        n_slots: int = 12,
        ssm_dtype: str = "float32",
        kv_dtype: str | None = None,
    ) -> None:
        spec, kv_dtype = read_spec(folder).with_exact_index(page_tokens=page_size), kv_dtype or dtype
        self.page_size = page_size
        self.model: AdoptedModel = load_model(folder, dtype=dtype, context_len=CONTEXT)
        per_sequence = CONTEXT // page_size
        n_pages = n_slots * per_sequence
        arena = Arena(
            page_bytes=spec.kv_bytes_per_token(kv_dtype=kv_dtype) * page_size,
            slot_bytes=spec.slot_bytes(ssm_dtype=ssm_dtype, conv_dtype=dtype), n_slots=n_slots, n_pages=n_pages,
        )  # fmt: skip
        self.memory = Memory(
            arena, page_size=page_size, kv_shapes=[layer.attention for layer in spec.layers if layer.attention is not None],
            state_shapes=spec.state_shapes(), kv_dtype=kv_dtype, ssm_dtype=ssm_dtype, conv_dtype=dtype,
        )  # fmt: skip
        order = np.random.default_rng(0).permutation(np.arange(1, n_pages + 1)).astype(np.int32)
        self.tables = order.reshape(n_slots, per_sequence)
        self.clear()

    def clear(self) -> None:
        """All memory is NaN but the slots' zeros: what is read before it is written is seen."""
        self.memory.poison(pages=range(self.memory.arena.n_pages + 1), slots=range(self.memory.arena.n_slots + 1))
        for slot in range(1, self.memory.arena.n_slots + 1):
            self.memory.tiers.move(SlotOrder(dst=slot), self.memory.tiers.whole)

    def row(
        self,
        sequence: int,
        tokens: list[int],
        start: int,
        *,
        checkpoint_at: int | None = None,
        checkpoint_slot: int = 0,
    ) -> Row:
        """A row of `sequence` over `tokens` at `start`."""
        return Row(
            rid=sequence, start=start, end=start + len(tokens), tokens=np.array(tokens, np.int32), slot=sequence + 1,
            pages=self.tables[sequence], checkpoint_at=checkpoint_at, checkpoint_slot=checkpoint_slot,
        )  # fmt: skip

    def run(self, *rows: Row) -> torch.Tensor:
        """Logits of each row's last token, float32 [rows, vocab]."""
        with torch.inference_mode():
            step = pack(StepPlan(0, rows), LastTokens())
            inputs, sample_at = torch.from_numpy(step.input_ids), torch.from_numpy(step.sample_at)
            return self.model.forward(inputs, step, self.memory, sample_at).clone()

    def logits(self, tokens: list[int], cuts: list[int], *, sequence: int = 0) -> torch.Tensor:
        """Logits after each cut of a sequence run in pieces, float32 [cuts, vocab]."""
        self.memory.tiers.move(SlotOrder(dst=sequence + 1), self.memory.tiers.whole)
        pieces, start = [], 0
        for cut in cuts:
            pieces.append(self.run(self.row(sequence, tokens[start:cut], start)))
            start = cut
        return torch.cat(pieces)

    def state(self, slot: int) -> list[torch.Tensor]:
        """A copy of everything in a slot."""
        return [view[slot].clone() for states in self.memory.states for view in (states.conv, states.ssm)]
