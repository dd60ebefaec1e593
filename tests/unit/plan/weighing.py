"""Configs that the tests of weights count, and a short way to count one."""

import json
from pathlib import Path
from typing import Any

from twinpool.models.spec import ModelSpec
from twinpool.plan.weights import Ranks, WeightEstimate, estimate_weights

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
DEMO = Path(__file__).parents[3] / "src" / "twinpool" / "demo"
KIMI_LINEAR = {  # transformers' KimiLinearConfig defaults
    "architectures": ["KimiLinearForCausalLM"], "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
    "moe_intermediate_size": 1024, "num_hidden_layers": 27, "num_attention_heads": 32, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_experts": 256, "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "linear_attn_config": {"num_heads": 32, "head_dim": 128, "full_attn_layers": [4, 8, 12, 16, 20, 24, 27]},
}  # fmt: skip
GRANITE_MICRO = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 8192,
    "shared_intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 0,
    "mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128, "tie_word_embeddings": True,
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
}  # fmt: skip
QWEN_9B = {
    "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_value_heads": 32, "tie_word_embeddings": False, "mtp_num_hidden_layers": 1,
}  # fmt: skip
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"], "vocab_size": 65536, "hidden_size": 2048, "block_ff_dim": 12288,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}  # fmt: skip
LFM2_MOE = {
    "architectures": ["Lfm2MoeForCausalLM"], "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168,
    "moe_intermediate_size": 1792, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_dense_layers": 2, "num_experts": 32, "full_attn_idxs": [2, 6, 10, 14, 18, 21],
}  # fmt: skip
FALCON = {
    "architectures": ["FalconH1ForCausalLM"], "vocab_size": 65537, "hidden_size": 2048, "intermediate_size": 4096,
    "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "mamba_n_heads": 48,
    "mamba_d_head": 64, "mamba_d_state": 256,
}  # fmt: skip


JAMBA = {  # transformers' JambaConfig defaults, and so the next ones of theirs
    "architectures": ["JambaForCausalLM"], "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 16,
    "mamba_dt_rank": "auto",
}  # fmt: skip
MAMBA = {
    "architectures": ["FalconMambaForCausalLM"], "vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 32,
    "time_step_rank": 48,
}  # fmt: skip
MINIMAX = {
    "architectures": ["MiniMaxForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "layer_types": ["linear_attention", "full_attention"] * 16,
}  # fmt: skip
ZAYA = {
    "architectures": ["ZayaForCausalLM"], "vocab_size": 262272, "hidden_size": 2048, "num_hidden_layers": 40,
    "num_attention_heads": 8, "num_key_value_heads": 2, "moe_intermediate_size": 2048, "num_experts": 16,
}  # fmt: skip
INKLING = {
    "architectures": ["InklingForCausalLM"], "vocab_size": 201024, "hidden_size": 6144, "num_hidden_layers": 66,
    "num_attention_heads": 64, "num_key_value_heads": 8, "moe_intermediate_size": 3072, "n_routed_experts": 256,
    "n_shared_experts": 2, "mlp_layer_types": ["sparse"] * 66,
}  # fmt: skip
GLM = {
    "architectures": ["Glm5NextForConditionalGeneration"], "vocab_size": 154880, "hidden_size": 4096,
    "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 45, "num_attention_heads": 64,
    "n_routed_experts": 288, "n_shared_experts": 1, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 0,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
}  # fmt: skip
LING = {
    "architectures": ["BailingHybridForCausalLM"], "vocab_size": 157184, "hidden_size": 2560, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 42, "num_attention_heads": 32, "num_experts": 512,
    "num_shared_experts": 1, "first_k_dense_replace": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "layer_group_size": 6,
}  # fmt: skip
LING_2_5 = {
    **LING, "architectures": ["BailingMoeV2_5ForCausalLM"], "head_dim": 128, "layer_group_size": 8, "num_hidden_layers": 32,
}  # fmt: skip


def real(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}_config.json").read_text())
    return config


def weigh(config: dict[str, Any], *, tp: int = 1, pp: int = 1, ep: int = 1, **more: Any) -> WeightEstimate:
    spec = ModelSpec.from_config_json(config)
    return estimate_weights(config, spec, Ranks(tp=tp, pp=pp, ep=ep), dtype=spec.dtype, **more)
