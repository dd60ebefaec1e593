"""Bytes of one cached token of one attention layer (reference 1.7)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.errors import ModelError
from twinpool.models.layers import dtype_bytes, split_evenly
from twinpool.models.reader import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsSpec:
    """Keys and values per head (multi-head and grouped-query attention)."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int

    @staticmethod
    def read(config: ConfigReader) -> HeadsSpec:
        """From the usual keys; head_dim (or attention_head_dim) defaults to hidden_size / num_attention_heads."""
        n_heads = config.size("num_attention_heads")
        n_kv_heads = config.size("num_key_value_heads", n_heads)
        if n_heads % n_kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads={n_heads} is not a multiple of num_key_value_heads={n_kv_heads}."
            )
        if config.has("head_dim"):
            head_dim = config.size("head_dim")
        elif config.has("attention_head_dim"):
            head_dim = config.size("attention_head_dim")
        else:
            hidden = config.size("hidden_size")
            if hidden % n_heads:
                raise ModelError(f"config.json: hidden_size={hidden} is not a multiple of num_attention_heads={n_heads}.")
            head_dim = hidden // n_heads
        return HeadsSpec(n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, v_head_dim=head_dim)

    def kv_heads_per_rank(self, *, tp: int = 1, dcp: int = 1) -> int:
        """KV heads one rank holds, never below 1; decode context parallelism splits tokens instead of heads. Raises ModelError."""
        split_evenly(self.n_heads, tp, what="num_attention_heads")
        return max(1, self.n_kv_heads // split_evenly(tp, dcp, what="tp_size over --dcp-size ranks: tp_size"))

    def bytes_per_token(self, dtype: str, *, tp: int = 1, dcp: int = 1) -> int:
        """kv_heads_rank × (head_dim + v_head_dim) × item bytes."""
        return self.kv_heads_per_rank(tp=tp, dcp=dcp) * (self.head_dim + self.v_head_dim) * dtype_bytes(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """One latent per token shared by all heads (MLA); every rank of a tensor-parallel group holds all of it."""

    n_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int

    @staticmethod
    def read(config: ConfigReader) -> LatentSpec:
        """From num_attention_heads, kv_lora_rank and qk_rope_head_dim."""
        return LatentSpec(
            n_heads=config.size("num_attention_heads"),
            kv_lora_rank=config.size("kv_lora_rank"),
            qk_rope_head_dim=config.size("qk_rope_head_dim"),
        )

    def bytes_per_token(self, dtype: str, *, tp: int = 1, dcp: int = 1) -> int:
        """(kv_lora_rank + qk_rope_head_dim) × item bytes, whatever the number of ranks."""
        split_evenly(self.n_heads, tp, what="num_attention_heads")
        return (self.kv_lora_rank + self.qk_rope_head_dim) * dtype_bytes(dtype)
