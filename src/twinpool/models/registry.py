"""Architecture name → how its config describes its layers. One row a family; a miss lists what is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from twinpool.errors import ModelError
from twinpool.models.cca.spec import zaya_layers
from twinpool.models.gdn.spec import index_warnings, jet_layers, ngram_state_bytes, olmo_layers, qwen_layers
from twinpool.models.inkling.spec import inkling_layers
from twinpool.models.kda.spec import glm_layers, kimi_layers, ling_layers
from twinpool.models.lightning.spec import ling_lightning_layers, minimax_layers, sala_layers
from twinpool.models.mamba1.spec import jamba_layers, mamba_layers
from twinpool.models.mamba2.spec import (
    bamba_layers,
    falcon_layers,
    granite_layers,
    nemotron_layers,
    pure_mamba2_layers,
    zamba_layers,
)
from twinpool.models.shapes import ConfigReader, LayerSpec
from twinpool.models.shortconv.spec import lfm2_layers

FLA_CHUNK_TOKENS = 64
MAMBA_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Family:
    """One row: name, architectures, how a config lists layers, kernel chunk in tokens, whether extra_buffer works.

    chunk_key: key of the whole config, not the nested one, that overrides the chunk (reference 1.6, 3.5).
    supports_extra_buffer: False too for what the reference does not list, since no_buffer is right for every model.
    side_state_bytes: per slot, beside the states; warnings: about what the shapes leave out.
    """

    name: str
    architectures: tuple[str, ...]
    layers: Callable[[ConfigReader], tuple[LayerSpec, ...]]
    chunk_tokens: int = FLA_CHUNK_TOKENS
    chunk_key: str | None = None
    supports_extra_buffer: bool = True
    side_state_bytes: Callable[[ConfigReader], int] = lambda _: 0
    warnings: Callable[[ConfigReader], tuple[str, ...]] = lambda _: ()


def _mamba(
    name: str,
    architectures: tuple[str, ...],
    layers: Callable[[ConfigReader], tuple[LayerSpec, ...]],
    *,
    extra_buffer: bool = False,
) -> Family:
    """A row of Mamba1 or Mamba2, whose chunk a config may override."""
    return Family(name, architectures, layers, MAMBA_CHUNK_TOKENS, "mamba_chunk_size", extra_buffer)


FAMILIES = (
    Family(
        "gdn",
        (
            "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
            "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
            "InternS2PreviewForConditionalGeneration",
            "MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration",
        ),
        qwen_layers,
    ),
    Family(
        "gdn", ("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"), qwen_layers,
        side_state_bytes=ngram_state_bytes, warnings=index_warnings,
    ),
    Family("gdn", ("InternS2MobiusForConditionalGeneration",), qwen_layers, supports_extra_buffer=False),
    Family("gdn", ("OlmoHybridForCausalLM",), olmo_layers, supports_extra_buffer=False),
    Family(
        "gdn", ("JetNemotronForCausalLM", "JetVLMForConditionalGeneration"), jet_layers, supports_extra_buffer=False
    ),
    Family("kda", ("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"), kimi_layers),
    Family("kda", ("Glm5NextForConditionalGeneration",), glm_layers),
    Family(
        "kda",
        ("BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration", "BailingHybridForCausalLM"),
        ling_layers,
    ),
    Family("lightning", ("BailingMoeV2_5ForCausalLM",), ling_lightning_layers),
    Family(
        "lightning", ("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM", "MiniMaxForCausalLM"), minimax_layers,
        supports_extra_buffer=False,
    ),
    Family("lightning", ("MiniCPMSALAForCausalLM",), sala_layers, supports_extra_buffer=False),
    Family(
        "shortconv", ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration"), lfm2_layers, 1,
        supports_extra_buffer=False,
    ),
    Family("cca", ("ZayaForCausalLM",), zaya_layers, 1, supports_extra_buffer=False),
    Family("inkling", ("InklingForCausalLM", "InklingForConditionalGeneration"), inkling_layers),
    _mamba(
        "mamba2",
        (
            "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM",
            "NemotronH_Omni_Reasoning_V3", "NemotronH_Nano_Omni_Reasoning_V3",
        ),
        nemotron_layers,
        extra_buffer=True,
    ),
    _mamba("mamba2", ("GraniteMoeHybridForCausalLM",), granite_layers, extra_buffer=True),
    _mamba("mamba2", ("FalconH1ForCausalLM",), falcon_layers, extra_buffer=True),
    _mamba("mamba2", ("BambaForCausalLM",), bamba_layers),
    _mamba("mamba2", ("Zamba2ForCausalLM",), zamba_layers),
    _mamba("mamba2", ("Mamba2ForCausalLM",), pure_mamba2_layers),
    _mamba("mamba1", ("JambaForCausalLM",), jamba_layers),
    _mamba("mamba1", ("FalconMambaForCausalLM", "MambaForCausalLM"), mamba_layers),
)  # fmt: skip
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}


def known_architecture(config: Mapping[str, Any]) -> str:
    """The first name in config['architectures']. Raises ModelError when there is none or it is not in the table."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(f"config.json says architectures={names!r}; it must list the model's class name.")
    if names[0] not in _BY_ARCHITECTURE:
        raise ModelError(
            f"architecture '{names[0]}' is not known; known: {', '.join(_BY_ARCHITECTURE)}; the manual numbers "
            "--state-bytes-per-slot and --kv-bytes-per-token of 'twinpool plan' work for any model."
        )
    return names[0]


def family_of(architecture: str) -> Family:
    """The row of a known architecture."""
    return _BY_ARCHITECTURE[architecture]
