"""LFM2-VL: its text part is LFM2, under other names and with a word of its own on tied embeddings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.reference.packed import Bench
from tests.tiny_models import _LFM2, VOCAB
from twinpool.engine.checkpoint import read_spec
from twinpool.errors import ModelError
from twinpool.models.adopt import load_model

TOKENS = torch.randint(0, VOCAB, (20,), generator=torch.Generator().manual_seed(5)).tolist()
VISION = {
    "model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_patches": 16, "patch_size": 4,
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_the_text_part_of_lfm2_vl(tied: bool, tmp_path: Path) -> None:
    text = {**_LFM2, "model_type": "lfm2", "tie_word_embeddings": tied}
    config = transformers.Lfm2VlConfig(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    torch.manual_seed(0)
    whole = transformers.Lfm2VlForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    with torch.inference_mode():
        theirs = whole(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0, -1]
    ours = Bench(tmp_path, dtype="float32").logits(TOKENS, [len(TOKENS)])
    torch.testing.assert_close(ours[0], theirs, atol=1e-4, rtol=1e-4)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert read_spec(tmp_path).n_linear_layers == 3
    if tied:  # as the published configs say it, or do not say it
        for outer in ({"tie_embedding": True}, {}):
            (tmp_path / "config.json").write_text(
                json.dumps({k: v for k, v in stored.items() if k != "tie_word_embeddings"} | outer)
            )
            load_model(tmp_path, dtype="float32")
    stored["text_config"]["model_type"] = "lfm2_moe"
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ModelError, match="model_type='lfm2_moe' of the text; only 'lfm2' runs here"):
        load_model(tmp_path, dtype="float32")
