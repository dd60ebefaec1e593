"""How ranks share Kimi Delta Attention and attention over a latent: by heads; the latent is on every rank."""

from __future__ import annotations

from typing import Any

from twinpool.models.shard import COLUMNS, EXPERTS_GATE_UP, ROWS, Cut, Sharding, cut, on_first


def _qkv(config: Any) -> tuple[tuple[int, int], ...]:
    """Heads of q | k | v, which are convolved."""
    return ((config.linear_num_heads, config.linear_head_dim),) * 3


_CUTS: dict[str, Cut] = {
    # What comes out of a narrow matrix or of the latent is of heads; what goes in is of all of them.
    r"\.self_attn\.(q|k|v|b|g|q_b|kv_b|g_b)_proj\.weight": ROWS,
    r"\.self_attn\.forget_gate\.(f_proj\.weight|f_b_proj\.weight|dt_bias)": ROWS,
    r"\.self_attn\.conv1d\.weight": cut(0, _qkv),
    r"\.self_attn\.o_proj\.weight": COLUMNS,
    r"\.self_attn\.o_proj\.bias": on_first,
    r"\.(gate|up)_proj\.weight": ROWS,
    r"\.experts\.gate_up_proj": EXPERTS_GATE_UP,
    r"\.(down_proj\.weight|experts\.down_proj)": COLUMNS,
}


def delta_sharding(*, decay_axis: int = 0) -> Sharding:
    """Of Kimi, Ling-3 and GLM-5-Next. decay_axis: of the heads in A_log."""
    return Sharding(
        divided=(
            "num_attention_heads",
            "num_key_value_heads",
            "linear_num_heads",
            "intermediate_size",
            "moe_intermediate_size",
        ),
        shared=(),
        cuts={**_CUTS, r"\.self_attn\.forget_gate\.A_log": cut(decay_axis)},
    )
