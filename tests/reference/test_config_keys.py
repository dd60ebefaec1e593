"""Every key of every family's config, changed: the model is transformers' with that key, or the change is refused in a sentence.

No key that transformers acts on can be overlooked here. Values that transformers itself cannot run are left out.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.reference.packed import Bench
from tests.tiny_models import _CLASSES, FAMILIES, VOCAB, tiny_checkpoint
from twinpool.errors import TwinpoolError

pytestmark = pytest.mark.full
LENGTH = 40
# Some random weights are so near a tie (of experts, say) that the last bit of an embedding moves transformers' own logits by more than
# we allow. A key that is overlooked differs whatever the weights.
SEEDS = (0, 1, 2)
TOKENS = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
# What says nothing about one pass over text, and what only training or sizes of the vocabulary read. `rescale_prenorm_residual` makes
# transformers divide weights that it has just loaded (Mamba, Falcon-Mamba).
OTHER = frozenset({
    "vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "initializer_range", "output_router_logits",
    "router_aux_loss_coef", "attention_dropout", "hidden_dropout", "max_position_embeddings", "num_logits_to_keep",
    "rescale_prenorm_residual",
})  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {**_YARN, "attention_factor": 1.3},
    {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, **_LLAMA},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
]


def others(key: str, value: Any) -> list[Any]:
    """Values that a key could have instead."""
    if key == "rope_parameters":
        return copy.deepcopy(ROPES)  # transformers writes its defaults into them
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return sorted({0, 1, 2, 3, value // 2, 2 * value, value + 4} - {value})
    if isinstance(value, float):
        return sorted({0.5 * value, 1.7 * value + 0.01, 1.0} - {value})
    if isinstance(value, str):
        return ["gelu", "relu", "relu2", "rope", "nope"]
    if isinstance(value, list | tuple) and value and all(isinstance(x, str) for x in value):
        return [[*reversed(value)]]
    if isinstance(value, list | tuple):
        return [[0.5 * x for x in value], [1.7 * x + 0.01 for x in value], [1], []]
    return [True, 1, 2, 16, 0.5, "gelu", [1]] if value is None else []


def keys_of(family: str) -> dict[str, Any]:
    """The config's own keys and their values."""
    name, _, values = _CLASSES[family]
    config = getattr(transformers, name)(**values).get_text_config()
    inherited = {field.name for field in fields(transformers.PreTrainedConfig)}
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name not in inherited | OTHER}


def changed(family: str, folder: Path, change: dict[str, Any], seed: int) -> tuple[Path, torch.Tensor] | None:
    """A checkpoint with the change and transformers' logits of it [tokens, vocab]; None where it has none."""
    nested = _CLASSES[family][2].get("text_config")
    try:
        values = {"text_config": nested | change} if nested else change
        made = tiny_checkpoint(family, folder, seed=seed, **values)
        (name,) = json.loads((made / "config.json").read_text())["architectures"]
        model = getattr(transformers, name).from_pretrained(made, dtype=torch.float32, attn_implementation="eager")
        with torch.inference_mode():
            return made, model.eval()(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].float()
    except Exception:  # whatever transformers makes of values that it cannot run
        return None


def outcomes(family: str, folder: Path) -> Iterator[str]:
    """For each change that transformers runs: "" if it gives the same here or is refused, else what it was."""
    for key, value in keys_of(family).items():
        for number, other in enumerate(others(key, value)):
            same = None
            for seed in SEEDS:
                same = is_same(family, folder / f"{key}-{number}", {key: other}, seed)
                if same is not False:
                    break
            if same is not None:
                yield "" if same else f"{key}={other!r} (was {value!r})"


def is_same(family: str, folder: Path, change: dict[str, Any], seed: int) -> bool | None:
    """Whether the changed model gives the same here or is refused; None where transformers cannot run it."""
    ran = changed(family, folder, change, seed)
    if ran is None:
        return None
    try:
        ours = Bench(ran[0], dtype="float32").logits(TOKENS, [17, LENGTH])
    except TwinpoolError:
        return True
    theirs = ran[1][[16, LENGTH - 1]]
    return torch.allclose(ours, theirs, atol=2e-4 * float(theirs.abs().max()), rtol=0, equal_nan=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_is_overlooked(family: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' about sizes of zero
        found = list(outcomes(family, tmp_path))
    assert [one for one in found if one] == []
    assert len(found) > 30, "transformers runs most of the changes"
