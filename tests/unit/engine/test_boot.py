"""From options to an engine: what is logged, what is wired, what is refused."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import torch

from tests.tiny_models import tiny_checkpoint
from twinpool import bootlog
from twinpool.config.flags import options_from_keywords
from twinpool.engine import boot as booting
from twinpool.engine import rank
from twinpool.engine.boot import boot_engine
from twinpool.engine.core import Engine
from twinpool.errors import ConfigError, MemoryRefusal, ModelError
from twinpool.units import GIB, MIB


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3_5", tmp_path_factory.mktemp("boot"))


def boot(folder: Path, **options: object) -> Engine:
    return boot_engine(options_from_keywords({"model_path": str(folder), "device_memory": "64MiB", **options}))


def test_the_boot_log_has_every_line_in_order(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(booting, "native", "there")  # or a line says that nothing is compiled here
    with caplog.at_level(logging.INFO, "twinpool.engine"):
        engine = boot(tiny)
    engine.close()
    order = [
        r"^Load weight begin\. avail mem=0\.06 GB$",
        r"^Load weight end\. elapsed=.* s, type=Qwen3_5ForCausalLM, avail mem=0\.06 GB, mem usage=0\.00 GB\.$",
        r"^max_running_requests is capped to \d+ by the mamba state cache",
        r"^Mamba Cache is allocated\. max_mamba_cache_size: \d+, conv_state size: .*GB, ssm_state size: .*GB $",
        r"^KV Cache is allocated\. dtype: torch\.float32, #tokens: \d+, K size: .* GB, V size: .* GB$",
        r"^Memory pool end\. avail mem=.* GB$",
        r"^Tree cache initialized: ",
        r"^max_total_num_tokens=\d+, chunked_prefill_size=2048, .*context_len=1024, available_cpu_mem=.* GB$",
        r"^Settings\nname ",
        r"^Memory\nmemory ",
    ]
    assert len(caplog.messages) == len(order)
    for message, pattern in zip(caplog.messages, order, strict=True):
        assert re.search(pattern, message), message
    (facts,) = bootlog.parse("\n".join(caplog.messages))
    assert facts.slots == engine.facts.ledger.max_mamba_cache_size
    assert facts.kv_tokens == engine.facts.ledger.kv_tokens


def test_what_a_config_lacks_is_said_once(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "mamba_ssm_dtype": "float8"}))
    boot(tmp_path).close()
    assert len([line for line in caplog.messages if "mamba_ssm_dtype" in line]) == 1


def test_pools_tree_and_scheduler_follow_the_ledger(tiny: Path) -> None:
    engine = boot(tiny, page_size=16, max_mamba_cache_size=30, max_total_tokens=1000, max_queued_requests=3)
    ledger, shape, book = engine.facts.ledger, engine.scheduler.shape, engine.scheduler.book
    assert (book.slots.count, book.pages.count) == (30, 62)
    assert (ledger.kv_tokens, shape.page_size, shape.max_queued_requests) == (992, 16, 3)
    assert shape.max_running_requests == 30 // 5
    assert sum(line.bytes for line in ledger.lines if not line.part_of) == 64 * MIB
    assert engine.facts.weight_bytes == ledger.line("weights").bytes
    engine.close()


def test_a_large_arena_boots_at_once(tiny: Path) -> None:
    engine = boot(tiny, device_memory="12GiB")
    # Nothing of it is touched; a machine with less memory than that boots as well.
    assert engine.facts.ledger.budget_bytes > 6 * GIB
    engine.close()


def test_pools_that_do_not_fit_are_refused_with_numbers(tiny: Path) -> None:
    with pytest.raises(MemoryRefusal, match="--mem-fraction-static"):
        boot(tiny, device_memory="300KiB")
    with pytest.raises(MemoryRefusal, match="too small to serve any requests"):
        boot(tiny, max_mamba_cache_size=4)


def test_models_that_cannot_be_served_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    config = {
        "architectures": ["MiniMaxForCausalLM"], "model_type": "minimax", "hidden_size": 32, "vocab_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match="MiniMaxForCausalLM can be planned but not served yet; served: Qwen3NextForCausalLM"
    ):
        boot(tmp_path)


CONFIGS = Path(__file__).parents[2] / "data" / "configs"


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("KimiK3ForConditionalGeneration", "moonshotai--Kimi-K3", "can be planned but not served yet; served: .*, Zamba2For"),
        ("InternS2PreviewForConditionalGeneration", "Qwen--Qwen3.5-27B", "can be planned but not served yet; served: .*, Zamba2For"),
        ("MadeUpForCausalLM", "Qwen--Qwen3.5-27B", "is not known; known: .*InternS2Preview.*, MambaForCausalLM"),
    ],
)  # fmt: skip
def test_families_that_transformers_does_not_have_are_refused_with_the_list(
    architecture: str, config: str, message: str, tmp_path: Path
) -> None:
    stored = json.loads((CONFIGS / f"{config}_config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stored, "architectures": [architecture]}))
    with pytest.raises(ModelError, match=rf"{architecture}'? {message}"):
        boot(tmp_path, device_memory="8GiB")


def test_a_chat_template_file_replaces_the_tokenizers(tiny: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    with pytest.raises(ConfigError, match="--chat-template"):
        boot(tiny, chat_template=str(template))
    template.write_text("{{ messages[0]['content'] }}!")
    engine = boot(tiny, chat_template=str(template))
    assert engine.tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi!"
    engine.close()


def test_a_tokenizer_of_its_own(tiny: Path) -> None:
    with pytest.raises(ModelError, match="--tokenizer-path"):
        boot(tiny, tokenizer_path="/no/tokenizer")
    engine = boot(tiny, tokenizer_path=str(tiny))
    assert engine.facts.eos_token_ids == frozenset({258})
    engine.close()


def test_a_dtype_of_the_cache_that_the_device_lacks(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "can_keep", lambda dtype, device: dtype != torch.float8_e4m3fn)
    with pytest.raises(ConfigError) as refused:
        boot(tiny, kv_cache_dtype="fp8_e4m3")
    assert str(refused.value) == (
        f"--kv-cache-dtype fp8_e4m3 is a type that torch {torch.__version__} cannot store and read on cpu; "
        "use --kv-cache-dtype float32, with 4 bytes an element instead of 1."
    )
    boot(tiny, kv_cache_dtype="bfloat16").close()


def test_a_boot_without_compiled_kernels_says_so(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(booting, "native", None)
    boot(tiny).close()
    assert caplog.messages[0].startswith("The compiled kernels are not there, so torch does their work, slowly: ")
