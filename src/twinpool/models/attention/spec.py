"""Elements one token adds to the KV cache of one attention layer (reference 1.7)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GqaSpec:
    """Keys and values per head; grouped-query when there are fewer KV heads than query heads."""

    kv_heads: int
    head_dim: int
    v_head_dim: int

    def kv_heads_per_rank(self, tp: int, dcp: int = 1) -> int:
        """max(1, kv_heads // (tp / dcp)): heads are replicated rather than cut below one."""
        return max(1, self.kv_heads // max(1, tp // dcp))

    def kv_elements_per_token(self, tp: int, dcp: int = 1) -> int:
        """kv_heads_per_rank × (head_dim + v_head_dim)."""
        return self.kv_heads_per_rank(tp, dcp) * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """One latent per token, shared by all heads; every rank holds all of it."""

    kv_lora_rank: int
    qk_rope_head_dim: int

    def kv_elements_per_token(self, tp: int, dcp: int = 1) -> int:
        """kv_lora_rank + qk_rope_head_dim, whatever the number of ranks."""
        del tp, dcp  # the latent is not split
        return self.kv_lora_rank + self.qk_rope_head_dim
