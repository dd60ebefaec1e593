"""Tiny random checkpoints of every adopted family, saved by unmodified transformers, with a byte-level tokenizer.

folder = tiny_checkpoint("qwen3_5", cache_dir)       # a Hugging Face folder
reference = load_reference(folder)                   # transformers' own model, float32, eager attention
reference_greedy(reference, prompt_ids, 12)          # token by token over one uncut pass each
"""

from __future__ import annotations

import json
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

FAMILIES = (
    "qwen3_5", "qwen3_5_moe", "qwen3_next", "granite", "granite_rope", "granite_moe", "lfm2", "lfm2_moe",
    "kimi", "kimi_narrow", "ling", "ling_narrow", "glm",
    "nemotron", "nemotron_latent", "falcon", "falcon_plain", "bamba", "zamba", "zamba_rope",
    "jamba", "falcon_mamba", "mamba", "olmo", "olmo_rope",
)  # fmt: skip
VOCAB = 260  # 256 bytes, <|endoftext|>, <|im_start|>, <|im_end|>, one that no text makes
EOS = 258
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_PLAIN: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 1024,
    "eos_token_id": EOS, "pad_token_id": 256, "bos_token_id": None, "tie_word_embeddings": False,
    # Large weights, so that greedy choices are far apart.
    "initializer_range": 0.3,
}  # fmt: skip
_HYBRID = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_COMMON: dict[str, Any] = {
    **_PLAIN, "head_dim": 16, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": _HYBRID,
}  # fmt: skip
_MOE: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
_GRANITE: dict[str, Any] = {
    **_PLAIN, "layer_types": _HYBRID, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 64, "shared_intermediate_size": 48, "num_local_experts": 0,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2, "logits_scaling": 2.0,
}  # fmt: skip
_GRANITE_ROPE: dict[str, Any] = {"position_embedding_type": "rope", "mamba_n_groups": 1, "attention_bias": True}
_GRANITE_MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}
_LFM2: dict[str, Any] = {
    **_PLAIN, "layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3, "conv_bias": True,
    "block_multiple_of": 8, "block_auto_adjust_ff_dim": True,
}  # fmt: skip
_LFM2_MOE: dict[str, Any] = {
    **_PLAIN, "layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "routed_scaling_factor": 1.5,
}  # fmt: skip
_NEMOTRON: dict[str, Any] = {
    **{key: value for key, value in _PLAIN.items() if key != "num_hidden_layers"},
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "moe"], "head_dim": 16,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4, "chunk_size": 64,
    "time_step_min": 0.3, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    **_PLAIN, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 64, "time_step_limit": (0.1, 2.0),
}  # fmt: skip
_FALCON: dict[str, Any] = {
    **_MAMBA, "num_hidden_layers": 3, "mamba_d_ssm": 64, "mamba_rms_norm": True, "mamba_norm_before_gate": True,
    "lm_head_multiplier": 0.5, "embedding_multiplier": 3.0, "mlp_multipliers": [0.7, 0.6], "key_multiplier": 0.4,
    "attention_in_multiplier": 0.8, "attention_out_multiplier": 0.9, "ssm_multipliers": [0.5, 0.6, 0.7, 1.2, 0.9],
    "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.7,
}  # fmt: skip
_FALCON_PLAIN: dict[str, Any] = {
    **_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 48, "mamba_d_head": 6, "mamba_rms_norm": False, "attention_bias": True,
    "mamba_proj_bias": True, "projectors_bias": True, "mlp_bias": True, "head_dim": 16,
}  # fmt: skip
_ZAMBA: dict[str, Any] = {
    **_PLAIN, "num_hidden_layers": 6, "layers_block_type": ["linear_attention", "hybrid"] * 3, "num_mem_blocks": 2,
    "mamba_d_state": 16, "n_mamba_heads": 8, "mamba_ngroups": 2, "adapter_rank": 4, "chunk_size": 64, "time_step_min": 0.3,
    "num_key_value_heads": 4, "tie_word_embeddings": True, "initializer_range": 0.15,
}  # fmt: skip
_ZAMBA_ROPE: dict[str, Any] = {"use_mem_rope": True, "use_shared_attention_adapter": True, "num_mem_blocks": 1}
_JAMBA: dict[str, Any] = {
    **_PLAIN, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 6,
    "mamba_dt_rank": 5, "mamba_proj_bias": True,
}  # fmt: skip
_MAMBA1: dict[str, Any] = {
    **{key: value for key, value in _PLAIN.items() if "heads" not in key and key not in ("intermediate_size", "max_position_embeddings")},
    "state_size": 6, "time_step_rank": 5, "time_step_min": 0.01, "time_step_max": 1.0, "use_bias": True,
}  # fmt: skip
_OLMO: dict[str, Any] = {
    **_PLAIN, "layer_types": _HYBRID, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
    "linear_value_head_dim": 12, "linear_a_log_min": 0.2, "linear_dt_max": 1.0,
}  # fmt: skip
_OLMO_ROPE: dict[str, Any] = {
    "linear_allow_neg_eigval": False, "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
_LATENT: dict[str, Any] = {
    **_PLAIN, "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": None, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 6, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_shared_experts": 1, "routed_scaling_factor": 1.5, "layer_types": _HYBRID,
}  # fmt: skip
_KIMI: dict[str, Any] = {**_LATENT, "linear_head_dim": 8, "linear_num_heads": 3}
_NARROW_QUERIES: dict[str, Any] = {"q_lora_rank": 10, "attention_bias": True}
_LING: dict[str, Any] = {
    **_LATENT, "head_dim": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    # The published ones have drafts, what transformers saves has none.
    "num_mtp_layers": 0,
}  # fmt: skip
_GLM: dict[str, Any] = {
    "text_config": {
        **{key: value for key, value in _LATENT.items() if key != "num_local_experts"}, "layer_types": None,
        "linear_head_dim": 8, "linear_num_heads": 3, "q_lora_rank": 10, "qk_rope_head_dim": 0, "n_routed_experts": 8,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "swiglu_limit": 0.5, "hc_mult": 3, "hc_sinkhorn_iters": 4,
        "index_topk": 40, "index_head_dim": 16, "index_n_heads": 10, "index_kpool": 4,
    },
    "vision_config": {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
        "projection_intermediate_size": 32,
    },
}  # fmt: skip
# Family -> configuration class, model class, what its config says.
_CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _COMMON),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _COMMON | _MOE),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _COMMON | _MOE),
    "granite": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", _GRANITE),
    "granite_rope": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", _GRANITE | _GRANITE_ROPE),
    "granite_moe": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", _GRANITE | _GRANITE_MOE),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", _LFM2),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM", _LFM2_MOE),
    "kimi": ("KimiLinearConfig", "KimiLinearForCausalLM", _KIMI),
    "kimi_narrow": ("KimiLinearConfig", "KimiLinearForCausalLM", _KIMI | _NARROW_QUERIES),
    "ling": ("BailingHybridConfig", "BailingHybridForCausalLM", _LING),
    "glm": ("Glm5NextConfig", "Glm5NextForConditionalGeneration", _GLM),
    "ling_narrow": (
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        _LING | _NARROW_QUERIES | {"kda_safe_gate": False},
    ),
    "nemotron": ("NemotronHConfig", "NemotronHForCausalLM", _NEMOTRON),
    "nemotron_latent": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        _NEMOTRON | {"moe_latent_size": 16, "mlp_bias": True},
    ),
    "falcon": ("FalconH1Config", "FalconH1ForCausalLM", _FALCON),
    "falcon_plain": ("FalconH1Config", "FalconH1ForCausalLM", _FALCON_PLAIN),
    "bamba": ("BambaConfig", "BambaForCausalLM", {**_MAMBA, "attn_layer_indices": [2]}),
    "zamba": ("Zamba2Config", "Zamba2ForCausalLM", _ZAMBA),
    "jamba": ("JambaConfig", "JambaForCausalLM", _JAMBA),
    "falcon_mamba": ("FalconMambaConfig", "FalconMambaForCausalLM", _MAMBA1 | {"mixer_rms_eps": 1e-3}),
    "mamba": ("MambaConfig", "MambaForCausalLM", _MAMBA1 | {"residual_in_fp32": False, "tie_word_embeddings": True}),
    "olmo": ("OlmoHybridConfig", "OlmoHybridForCausalLM", _OLMO),
    "olmo_rope": ("OlmoHybridConfig", "OlmoHybridForCausalLM", _OLMO | _OLMO_ROPE),
    "zamba_rope": ("Zamba2Config", "Zamba2ForCausalLM", _ZAMBA | _ZAMBA_ROPE),
}


def tiny_checkpoint(family: str, cache_dir: Path, *, dtype: str = "float32", seed: int = 0, **changes: Any) -> Path:
    """A folder with weights, config, tokenizer and chat template of a tiny random model; made once per cache_dir.

    changes: config keys to override.
    """
    name = "-".join([family, dtype, str(seed), *(f"{k}={v}" for k, v in sorted(changes.items()))])
    if len(name) > 200:  # a file system's limit is 255
        name = f"{family}-{sha256(name.encode()).hexdigest()}"
    folder = cache_dir / name
    if folder.is_dir():
        return folder
    config_name, model_name, values = _CLASSES[family]
    config = getattr(transformers, config_name)(**{**values, **changes}, dtype=dtype)
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(config).to(getattr(torch, dtype)).eval()
    with torch.no_grad():
        _spread(model)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS], "do_sample": False}))
    return folder


def _spread(model: torch.nn.Module) -> None:
    """Give what transformers initialises to constants random values, so that a term that is left out is seen."""
    for name, parameter in model.state_dict(keep_vars=True).items():
        if name.endswith("dt_bias"):
            parameter.copy_(torch.rand_like(parameter.float()) * 2 - 1)
        elif name.endswith("A_log"):
            parameter.copy_(torch.log(torch.rand_like(parameter.float()) * 4 + 0.2))
        elif name.endswith(("expert_bias", "correction_bias")):
            parameter.copy_(torch.randn_like(parameter) * 0.2)
        elif name.endswith(("compress_ape", "compress_gate")):
            parameter.copy_(torch.randn_like(parameter) * 0.5)
        elif "norm" in name or name.endswith((".D", ".bias", "_hc.base", "_hc.scale")):
            parameter.add_(torch.randn_like(parameter.float()).mul(0.1).to(parameter.dtype))


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json of one token per byte, and the chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE})
    )


@cache
def load_reference(folder: Path) -> Any:
    """Unmodified transformers, float32, eager attention."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """float32 [tokens, vocab] of one uncut pass."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def reference_greedy(model: Any, prompt: list[int], n_tokens: int, *, eos: int | None = EOS) -> list[int]:
    """Greedy continuation by uncut passes (some families resume a saved state wrongly in transformers itself)."""
    ids = list(prompt)
    while len(ids) < len(prompt) + n_tokens:
        ids.append(int(reference_logits(model, ids)[-1].argmax()))
        if ids[-1] == eos:
            break
    return ids[len(prompt) :]
