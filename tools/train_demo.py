"""Trains the demo model: a small Qwen3.5-family hybrid (Gated DeltaNet 3 : 1 full attention) on public-domain English.

Why it exists: a command line that serves a model needs a model, and one that fits in the package, loads in
transformers and writes recognisable English shows what the two memory pools do better than random weights can.

    python tools/train_demo.py                # about an hour on two quiet cores; run again to resume
    python tools/train_demo.py --export-only  # tokenizer, config and the last checkpoint (or untrained weights)

Units: loss in nats per token, learning rate per step, one step = BATCH x SEQ_LEN tokens x ACCUMULATE.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers.models.qwen3_5.modeling_qwen3_5 as qwen3_5
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import demo_corpus
from demo_corpus import CHAT_TEMPLATE, SEQ_LEN, SPECIAL, VOCAB, bigram_loss, encode, make_tokenizer, windows

BATCH, ACCUMULATE = 4, 2
PEAK_LR, WARMUP_STEPS, DECAY_SHARE, WEIGHT_DECAY = 3e-3, 100, 0.4, 0.1
CHUNK = 32  # tokens solved at once by the training-time delta rule
PROMPTS = ("It was a fine morning when the captain", "And it came to pass in those days, that", "Elizabeth was")


def make_config() -> Qwen3_5TextConfig:
    """About 5.2 M parameters: 10.5 MB in bf16, two full-attention layers among six linear ones."""
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        num_hidden_layers=8,
        intermediate_size=320,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        eos_token_id=SPECIAL.index(demo_corpus.IM_END),
        pad_token_id=SPECIAL.index(demo_corpus.END_OF_TEXT),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100000.0,
            "partial_rotary_factor": 0.5,  # 32 of 64 dimensions rotate: 16 frequencies, 6 + 5 + 5
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    )
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.mamba_ssm_dtype = "float32"  # serving engines keep the recurrent state in float32
    config.dtype = torch.bfloat16
    return config


def init_model(seed: int) -> Qwen3_5ForCausalLM:
    """Fresh weights. Decays start slow (time steps 1e-3 to 1e-1), so the recurrent state carries text early on."""
    torch.manual_seed(seed)
    config = make_config()
    model = Qwen3_5ForCausalLM(config).float()
    shrink = 1 / math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.empty_like(p).uniform_(1, 16).log())
            elif name.endswith("dt_bias"):
                dt = torch.exp(torch.rand_like(p) * math.log(100) + math.log(1e-3))
                p.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
            elif name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                p.mul_(shrink)
    return model


def causal_conv(x, weight, bias=None, activation=None, **_):
    """Depthwise causal convolution + SiLU as shifted products: the general convolution is slow on a CPU."""
    width, length = weight.shape[1], x.shape[-1]
    x = F.pad(x, (width - 1, 0))
    return F.silu(sum(x[..., i : i + length] * weight[:, i : i + 1] for i in range(width)))


def delta_rule(query, key, value, g, beta, **_):
    """The gated delta rule of transformers for sequences of a multiple of CHUNK tokens, arranged for the CPU.

    Same mathematics: the unit lower-triangular system is inverted by repeated squaring ((I + L)^-1 is a finite
    product because L is nilpotent), in batched matrix products instead of one solve per chunk.
    """
    with torch.autocast("cpu", enabled=False):
        batch, length, heads, dim = key.shape
        n = length // CHUNK

        def chunked(x):
            return x.float().reshape(batch, n, CHUNK, heads, -1).permute(0, 3, 1, 2, 4)

        q, k = (F.normalize(chunked(x), dim=-1, eps=1e-6) for x in (query, key))
        q, v, beta, g = q * dim**-0.5, chunked(value), chunked(beta), chunked(g).squeeze(-1)
        cum = g.cumsum(-1)
        upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
        decay = (cum.unsqueeze(-1) - cum.unsqueeze(-2)).masked_fill(upper, float("-inf")).exp()
        kb, grown = k * beta, cum.exp().unsqueeze(-1)
        power = ((kb @ k.transpose(-1, -2)) * decay).tril(-1)
        inverse = torch.eye(CHUNK) - power
        for _ in range(CHUNK.bit_length() - 2):
            power = power @ power
            inverse = inverse + inverse @ power
        new, read = (inverse @ torch.cat([v * beta, kb * grown], -1)).split(dim, -1)
        within = (q @ k.transpose(-1, -2)) * decay
        to_end = (k * (cum[..., -1:] - cum).exp().unsqueeze(-1)).transpose(-1, -2)
        state, outs, news = torch.zeros(batch, heads, dim, dim), [], []
        for qi, ri, ni, ki, di in zip(
            *(x.unbind(2) for x in (q * grown, read, new, to_end, cum[..., -1:].exp().unsqueeze(-1))), strict=True
        ):
            news.append(ni - ri @ state)
            outs.append(qi @ state)
            state = state * di + ki @ news[-1]
        out = torch.stack(outs, 2) + within @ torch.stack(news, 2)
        return out.permute(0, 2, 3, 1, 4).reshape(batch, length, heads, dim), None


@contextlib.contextmanager
def fast_training_ops():
    """Swaps the two slow reference operators of transformers for the ones above, for training only."""
    kept = qwen3_5.causal_conv1d_fn, qwen3_5.torch_chunk_gated_delta_rule
    qwen3_5.causal_conv1d_fn, qwen3_5.torch_chunk_gated_delta_rule = causal_conv, delta_rule
    try:
        yield
    finally:
        qwen3_5.causal_conv1d_fn, qwen3_5.torch_chunk_gated_delta_rule = kept


def mean_loss(model: Qwen3_5ForCausalLM, rows: torch.Tensor, autocast: bool) -> float:
    """Mean nats per token over the rows; every row starts from an empty context."""
    total = 0.0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for part in rows.split(8):
            logits = model(input_ids=part[:, :-1], use_cache=False).logits.float()
            total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    return total / (rows.shape[0] * SEQ_LEN)


def learning_rate(step: int, steps: int) -> float:
    """Warm-up, plateau, then a linear fall over the last DECAY_SHARE of the steps: by step, never by clock."""
    fall = (steps - step) / (steps * DECAY_SHARE)
    return PEAK_LR * max(min((step + 1) / WARMUP_STEPS, 1.0, fall), 0.01)


def save_checkpoint(path: Path, model, optimizer, step: int, curve: list[dict]) -> None:
    """Writes everything a resumed run needs, atomically: a killed run loses minutes, never the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "curve": curve}
    torch.save(state, temporary)
    os.replace(temporary, path)


def make_optimizer(model: Qwen3_5ForCausalLM) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only (norms, decays and convolutions keep their scale)."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98), fused=True)


def train(args, model, train_ids: list[np.ndarray], dev: torch.Tensor) -> list[dict]:
    """Runs (or resumes) training to args.steps and returns the loss curve: one row per args.log_every steps."""
    optimizer, curve, step = make_optimizer(model), [], 0
    checkpoint = args.work / "train_ckpt" / "last.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        curve, step = state["curve"], state["step"]
    per_step, epoch, rows, recent = BATCH * ACCUMULATE, -1, None, []
    with fast_training_ops():
        network = torch.compile(model) if args.compile else model
        started, first = time.monotonic(), step
        while step < args.steps:
            per_epoch = (sum(map(len, train_ids)) - 1) // SEQ_LEN // per_step
            if step // per_epoch != epoch:
                epoch = step // per_epoch
                rows = windows(train_ids, seed=args.seed + epoch)
            at = step % per_epoch * per_step
            for part in rows[at : at + per_step].split(BATCH):
                with torch.autocast("cpu", torch.bfloat16):
                    logits = network(input_ids=part[:, :-1], use_cache=False).logits
                    loss = F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten())
                (loss / ACCUMULATE).backward()
                recent.append(loss.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args.steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % args.log_every == 0 or step == args.steps:
                row = {"step": step, "tokens": step * per_step * SEQ_LEN}
                row |= {"train_loss": round(sum(recent) / len(recent), 4)}
                row |= {"dev_loss": round(mean_loss(model, dev[:32], True), 4)}
                curve.append(row | {"learning_rate": round(learning_rate(step - 1, args.steps), 6)})
                recent = []
                rate = (step - first) * per_step * SEQ_LEN / (time.monotonic() - started)
                print(curve[-1], f"{rate:.0f} tokens/s {time.monotonic() - started:.0f} s", flush=True)
                save_checkpoint(checkpoint, model, optimizer, step, curve)
    return curve


def export(model: Qwen3_5ForCausalLM, tokenizer: Tokenizer, out: Path, extra: dict[str, str]) -> None:
    """Writes the Hugging Face directory file by file, each complete before it takes its name."""
    out.mkdir(parents=True, exist_ok=True)
    special = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": demo_corpus.IM_END,
        "pad_token": demo_corpus.END_OF_TEXT,
        "bos_token": None,
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {str(i): {"content": s} | special for i, s in enumerate(SPECIAL)},
    }
    generation = {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": True, "temperature": 0.8, "top_p": 0.95}
    files = {
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=1) + "\n",
        "chat_template.jinja": CHAT_TEMPLATE,
        "generation_config.json": json.dumps(generation, indent=1) + "\n",
        **extra,
    }
    weights = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    weights.pop("lm_head.weight", None)  # tied to the embedding
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        scratch = Path(name)
        model.config.save_pretrained(scratch)
        tokenizer.save(str(scratch / "tokenizer.json"))
        save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
        for file, text in files.items():
            (scratch / file).write_text(text)
        for path in scratch.iterdir():
            path.chmod(0o644)
            os.replace(path, out / path.name)


def sample(out: Path, prompt: str, temperature: float, tokens: int = 90) -> str:
    """Continues `prompt` with the exported files through transformers' own generate (0 = greedy)."""
    model = Qwen3_5ForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    torch.manual_seed(1)
    choice = {"do_sample": True, "temperature": temperature, "top_p": 0.95} if temperature else {"do_sample": False}
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=tokens, pad_token_id=0, **choice)
    return tokenizer.decode(ids[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def model_card(facts: dict[str, str], versions: dict[str, str], samples: list[tuple[str, str, str]]) -> str:
    """MODEL_CARD.md: what it is, what it was trained on, what was measured, and what it cannot do."""
    sources = [f"| `{p}` {versions[p]} | {what} | {licence} |" for p, (what, licence) in demo_corpus.SOURCES.items()]
    shown = [
        f"**{how}**, prompt: *{prompt}*\n\n> {text.strip().replace(chr(10), chr(10) + '> ')}\n"
        for how, prompt, text in samples
    ]
    reader = demo_corpus.READER_PACKAGE
    lines = [
        "# twinpool demo model\n",
        "A small hybrid language model of the Qwen3.5 family (six Gated DeltaNet layers, two full-attention layers),",
        "trained from scratch by `tools/train_demo.py`. It exists to show a server at work: it writes period English,",
        "knows nothing, and must not be asked for facts or advice. Weights: Apache-2.0, like the repository.\n",
        "## Training text\n",
        "| Debian package | text | licence |",
        "|---|---|---|",
        *sources,
        f"\n`{reader}` {versions[reader]} (GPL-2+) was run to decompress the King James text; none of it is included.",
        "One document of 25 (about 6,000 characters each) was held out and one kept for tuning. Part of the training",
        "text was also shown as two-turn chats (an opening, its continuation), so the chat format is familiar.\n",
        "## Measured\n",
        "| quantity | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.items()),
        "\nBoth held-out losses are over the same tokens, in windows of 512 that start from an empty context;",
        "the tokenizer saw the training split only. One run, one seed. The Bible repeats passages between books, so",
        "some held-out text has near copies in the training text; that flatters both models. `loss_curve.csv` has one",
        "row per 100 steps in nats per token; its `dev_loss` is over the first 32 windows of the tuning split only",
        "(novels), so it is not comparable with the held-out loss above.\n",
        "## Samples\n",
        *shown,
    ]
    return "\n".join(lines)


def finish(args, tokenizer: Tokenizer, splits: dict, corpus: demo_corpus.Corpus, curve: list[dict]) -> None:
    """Measures the exported (bf16-rounded) weights with transformers' own forward, then writes card and curve."""
    model = Qwen3_5ForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()
    ours = mean_loss(model, splits["heldout"], False)
    bigram = bigram_loss(splits["train_plain"], splits["dev"], splits["heldout"])
    tokens = splits["heldout"].shape[0] * SEQ_LEN
    size = len(tokenizer.decode(splits["heldout"][:, 1:].flatten().tolist(), skip_special_tokens=True).encode())
    bits = ours * tokens / math.log(2) / size
    samples = [(how, p, sample(args.out, p, t)) for p in PROMPTS for how, t in (("greedy", 0.0), ("T = 0.8", 0.8))]
    for how, prompt, text in samples:
        print(f"--- {how}: {prompt!r}\n{text}", flush=True)
    facts = {
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "training tokens seen": f"{curve[-1]['tokens']:,} ({args.steps:,} steps)",
        "tokens per pass over the training text": f"{sum(map(len, splits['train'])):,}",
        "held-out tokens": f"{tokens:,}",
        "held-out loss, nats per token": f"{ours:.4f}",
        "held-out bits per byte": f"{bits:.4f}",
        "bigram held-out loss, nats per token (interpolated Kneser-Ney)": f"{bigram:.4f}",
    }
    print(json.dumps(facts, indent=1), flush=True)
    with open(args.work / "loss_curve.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, list(curve[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(curve)
    shutil.copyfile(args.work / "loss_curve.csv", args.out / "loss_curve.csv")
    (args.out / "MODEL_CARD.md").write_text(model_card(facts, corpus.versions, [samples[1], samples[2]]))


def main() -> None:
    """Corpus, tokenizer, training, export, measurement: each stage reuses what an interrupted run left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "src/twinpool/demo")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "twinpool_demo")
    parser.add_argument("--steps", type=int, default=3200)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=shutil.which("g++") is not None)
    parser.add_argument("--export-only", action="store_true")
    parser.add_argument("--words", type=Path, help="only write the 4,000 most frequent training words to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    corpus = demo_corpus.build(args.work / "corpus", args.seed)
    tokenizer = make_tokenizer(corpus.train, args.out)
    model = init_model(args.seed)
    if args.words:
        args.words.write_text("\n".join(demo_corpus.common_words(corpus.train, 4000)) + "\n")
        return
    if args.export_only:
        checkpoint = args.work / "train_ckpt" / "last.pt"
        if checkpoint.exists():
            model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
        export(model, tokenizer, args.out, {})
        return
    plain = encode(tokenizer, corpus.train)
    splits = {"train_plain": plain, "train": plain + encode(tokenizer, corpus.chats)}
    splits |= {name: windows(encode(tokenizer, getattr(corpus, name))) for name in ("dev", "heldout")}
    print({name: sum(map(len, rows)) for name, rows in splits.items()}, flush=True)
    curve = train(args, model, splits["train"], splits["dev"])
    export(model, tokenizer, args.out, {})
    finish(args, tokenizer, splits, corpus, curve)


if __name__ == "__main__":
    main()
