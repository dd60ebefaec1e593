"""Architecture name → how its config describes its layers. One row a family; a miss lists what is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from twinpool.errors import ModelError
from twinpool.models.gdn.spec import qwen_layers
from twinpool.models.kda.spec import kimi_layers
from twinpool.models.mamba2.spec import falcon_layers, granite_layers, nemotron_layers
from twinpool.models.shapes import ConfigReader, LayerSpec
from twinpool.models.shortconv.spec import lfm2_layers

FLA_CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Family:
    """One row: name, architectures, how a config lists layers, kernel chunk in tokens, whether extra_buffer works.

    chunk_key: key of the whole config, not the nested one, that overrides the chunk (reference 1.6, 3.5).
    """

    name: str
    architectures: tuple[str, ...]
    layers: Callable[[ConfigReader], tuple[LayerSpec, ...]]
    chunk_tokens: int
    chunk_key: str | None = None
    supports_extra_buffer: bool = True


FAMILIES = (
    Family(
        "gdn",
        (
            "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
            "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
        ),
        qwen_layers,
        FLA_CHUNK_TOKENS,
    ),
    Family("kda", ("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"), kimi_layers, FLA_CHUNK_TOKENS),
    Family("shortconv", ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"), lfm2_layers, 1, supports_extra_buffer=False),
    Family("mamba2", ("NemotronHForCausalLM",), nemotron_layers, 256, "mamba_chunk_size"),
    Family("mamba2", ("GraniteMoeHybridForCausalLM",), granite_layers, 256, "mamba_chunk_size"),
    Family("mamba2", ("FalconH1ForCausalLM",), falcon_layers, 256, "mamba_chunk_size"),
)  # fmt: skip
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}


def known_architecture(config: Mapping[str, Any]) -> str:
    """The first name in config['architectures']. Raises ModelError when there is none or it is not in the table."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(f"config.json says architectures={names!r}; it must list the model's class name.")
    if names[0] not in _BY_ARCHITECTURE:
        raise ModelError(f"architecture '{names[0]}' is not known; known: {', '.join(_BY_ARCHITECTURE)}.")
    return names[0]


def family_of(architecture: str) -> Family:
    """The row of a known architecture."""
    return _BY_ARCHITECTURE[architecture]
