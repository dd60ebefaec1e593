"""Elements one token adds to the KV cache of one attention layer (reference 1.7)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.errors import ModelError
from twinpool.models.shapes import ConfigReader


@dataclass(frozen=True, slots=True)
class GqaSpec:
    """Keys and values per head; grouped-query when there are fewer KV heads than query heads."""

    kv_heads: int
    head_dim: int
    v_head_dim: int

    @staticmethod
    def read(reader: ConfigReader, *, head_dim: int | None = None) -> GqaSpec:
        """From the usual keys; without head_dim in the config: the argument, else hidden_size / num_attention_heads."""
        heads = reader.integer("num_attention_heads")
        kv_heads = reader.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise ModelError(
                f"config.json says num_attention_heads={heads} and num_key_value_heads={kv_heads}; "
                "the first must be a multiple of the second."
            )
        plain = max(1, reader.integer("hidden_size") // heads)
        dim = reader.integer("head_dim", default=reader.integer("attention_head_dim", default=head_dim or plain))
        return GqaSpec(kv_heads, dim, dim)

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

    @staticmethod
    def read(reader: ConfigReader) -> MlaSpec:
        """From kv_lora_rank and qk_rope_head_dim."""
        return MlaSpec(reader.integer("kv_lora_rank"), reader.integer("qk_rope_head_dim"))

    def kv_elements_per_token(self, tp: int, dcp: int = 1) -> int:
        """kv_lora_rank + qk_rope_head_dim, whatever the number of ranks."""
        del tp, dcp  # the latent is not split
        return self.kv_lora_rank + self.qk_rope_head_dim
