"""Text for the demo model: public-domain English out of three Debian packages, cleaned, split and tokenized.

Why these packages: they carry whole public-domain works, their licences allow redistribution of what is trained on
them, and `apt-get download` fetches them by name on any Debian machine, so the demo weights can be rebuilt without a
data-set host. Nothing is installed: packages are unpacked with `dpkg-deb -x` below a work directory.

Units: a *paragraph* is one line of text; a *document* is a run of paragraphs of about BLOCK_CHARS characters.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import subprocess
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BLOCK_CHARS = 6000  # characters per document: the unit of the train / dev / held-out split
SPLIT_EVERY = 25  # of every 25 documents one is held out and one is kept for tuning (4 % each)
HELDOUT_SLOT, DEV_SLOT = 7, 19
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB, SEQ_LEN = 3072, 512  # tokens in the vocabulary; tokens per training window
SPECIAL = [END_OF_TEXT, IM_START, IM_END]  # ids 0, 1, 2
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Debian binary package -> (what it carries, licence of that text). Versions are read from the packages themselves.
SOURCES = {
    "r-cran-janeaustenr": ("six novels by Jane Austen", "text: public domain; package: MIT"),
    "r-cran-tokenizers": ("Moby-Dick by Herman Melville", "text: public domain; package: MIT"),
    "bible-kjv-text": (
        "King James Version of the Bible",
        "text: public domain (copyright expired); packaged data: unrestricted use",
    ),
}
# Needed only to decompress bible-kjv-text's own format; its program (GPL-2+) adds no text.
READER_PACKAGE = "bible-kjv"


@dataclass(frozen=True)
class Corpus:
    """The split corpus: documents per split, chat conversations made from the train split, package versions."""

    train: list[str]
    dev: list[str]
    heldout: list[str]
    chats: list[str]
    versions: dict[str, str]


def unpack(package: str, work: Path) -> tuple[Path, str]:
    """Downloads `package` with apt (once) and returns its unpacked root and its version."""
    root = work / "root" / package
    debs = sorted(work.glob(f"{package}_*.deb"))
    if not debs:
        work.mkdir(parents=True, exist_ok=True)
        command = ["apt-get", "download", package]
        if subprocess.run(command, cwd=work, check=False).returncode:
            subprocess.run(["apt-get", "update"], check=True)  # an image without package lists knows no names yet
            subprocess.run(command, cwd=work, check=True)
        debs = sorted(work.glob(f"{package}_*.deb"))
    if not root.exists():
        root.mkdir(parents=True)
        subprocess.run(["dpkg-deb", "-x", str(debs[-1]), str(root)], check=True)
    version = subprocess.run(["dpkg-deb", "-f", str(debs[-1]), "Version"], check=True, capture_output=True, text=True)
    return root, version.stdout.strip()


def r_strings(path: Path) -> Iterator[list[str]]:
    """Yields the strings of each object in an R lazy-load database, in order.

    The format is a 4-byte length, then a zlib stream of R's XDR serialisation. Only what these two packages need is
    read: a CHARSXP is a 4-byte flag word whose low byte is 9, a 4-byte length and the bytes.
    """
    data, at = path.read_bytes(), 0
    while at + 6 < len(data):
        stream = zlib.decompressobj()
        blob = stream.decompress(data[at + 4 :])
        at = len(data) - len(stream.unused_data)
        strings, pos = [], 0
        while pos + 8 <= len(blob):
            size = int.from_bytes(blob[pos + 4 : pos + 8], "big")
            flags = blob[pos : pos + 4]
            if flags[0] == 0 and flags[3] == 9 and flags[2] in (0, 0x80) and pos + 8 + size <= len(blob):
                strings.append(blob[pos + 8 : pos + 8 + size].decode("utf-8", "replace"))
                pos += 8 + size
            else:
                pos += 1
        yield strings


def clean(text: str) -> str:
    """One paragraph on one line, ASCII quotes, without the underscores that mark italics in plain-text books."""
    for old, new in (("‘", "'"), ("’", "'"), ("“", '"'), ("”", '"'), ("—", "--"), ("_", ""), ("\ufeff", "")):
        text = text.replace(old, new)
    return re.sub(r"\s+", " ", text).strip()


def novel_paragraphs(lines: list[str]) -> list[str]:
    """Paragraphs of a book given as wrapped lines: headings, title pages and publisher boilerplate are dropped."""
    text = "\n".join(line.rstrip("\r") for line in "\n".join(lines).split("\n"))
    start = re.search(r"\*\*\* ?START OF.*?\*\*\*", text)
    end = re.search(r"\*\*\* ?END OF|\nEnd of (the )?Project Gutenberg", text)
    text = text[start.end() if start else 0 : end.start() if end else len(text)]
    first = text.find("Call me Ishmael.")  # Moby-Dick's prose begins after a long table of contents
    paragraphs = [clean(p) for p in re.split(r"\n\s*\n", text[max(first, 0) :])]
    return [p for p in paragraphs if len(p) > 40 and "gutenberg" not in p.lower() and not p.isupper()]


def kjv_paragraphs(reader: Path, data_dir: Path) -> list[str]:
    """The KJV as prose: verse numbers are dropped and about five verses of one chapter form a paragraph."""
    command = [str(reader / "usr/bin/bible"), "-p", str(data_dir), "gen1:1-rev22:21"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    paragraphs: list[str] = []
    for chapter in re.split(r"\n\n+(?=[1-3]? ?[A-Z][A-Za-z ]* \d+\n)", out):
        verses = [clean(v) for v in re.split(r"(?:^|\n) +\d+ ", chapter)[1:]]
        paragraphs += [" ".join(verses[i : i + 5]) for i in range(0, len(verses), 5)]
    return paragraphs


def blocks(paragraphs: list[str]) -> list[str]:
    """Documents of about BLOCK_CHARS characters: consecutive paragraphs, a blank line between two."""
    out, run, size = [], [], 0
    for paragraph in paragraphs:
        run.append(paragraph)
        size += len(paragraph)
        if size >= BLOCK_CHARS:
            out.append("\n\n".join(run))
            run, size = [], 0
    return [*out, "\n\n".join(run)] if run else out


def chat(user: str, assistant: str) -> str:
    """One conversation exactly as the chat template of the exported tokenizer writes it."""
    return f"{IM_START}user\n{user}{IM_END}\n{IM_START}assistant\n{assistant}{IM_END}\n"


def chats_from(documents: list[str], share: float, seed: int) -> list[str]:
    """Conversations whose answer continues the question: a paragraph (or two) split after a sentence or mid-sentence.

    They put the chat format, and the end of a turn, into what the model has seen. `share` is the fraction of
    paragraphs used.
    """
    rng, out = random.Random(seed), []
    for document in documents:
        paragraphs = document.split("\n\n")
        for i, paragraph in enumerate(paragraphs):
            if rng.random() >= share or len(paragraph) < 120:
                continue
            cuts = [m.end() for m in re.finditer(r"[.;:?!]['\"]? ", paragraph) if m.end() < 240]
            words = [m.end() for m in re.finditer(r" ", paragraph) if 20 < m.end() < 90]
            cut = rng.choice(cuts) if cuts and rng.random() < 0.6 else rng.choice(words or [0])
            opening, rest = paragraph[:cut].strip(), paragraph[cut:].strip()
            if not opening or len(rest) < 40:
                continue
            if len(rest) < 300 and i + 1 < len(paragraphs):
                rest += "\n\n" + paragraphs[i + 1]
            prefix = rng.choice(("", "", "Continue: ", "Continue this text: ", "Go on: "))
            out.append(chat(prefix + opening, rest[: rest.rfind(".", 0, 1600) + 1] or rest))
    return out


def build(work: Path, seed: int = 0) -> Corpus:
    """Downloads, cleans and splits everything. The split depends on document order alone, never on chance."""
    roots, versions = {}, {}
    for package in (*SOURCES, READER_PACKAGE):
        roots[package], versions[package] = unpack(package, work)
    books: list[list[str]] = []
    for package in ("r-cran-janeaustenr", "r-cran-tokenizers"):
        name = package.removeprefix("r-cran-")
        database = roots[package] / f"usr/lib/R/site-library/{name}/data/Rdata.rdb"
        books += [novel_paragraphs(lines) for lines in r_strings(database)]
    books.append(kjv_paragraphs(roots[READER_PACKAGE], roots["bible-kjv-text"] / "usr/lib"))
    documents = [block for book in books for block in blocks(book)]
    slots = {HELDOUT_SLOT: "heldout", DEV_SLOT: "dev"}
    split: dict[str, list[str]] = {"train": [], "dev": [], "heldout": []}
    for i, document in enumerate(documents):
        split[slots.get(i % SPLIT_EVERY, "train")].append(document)
    return Corpus(**split, chats=chats_from(split["train"], 0.16, seed), versions=versions)


def make_tokenizer(texts: list[str], out: Path) -> Tokenizer:
    """Byte-level BPE trained on the training split; an existing tokenizer.json is kept (ids must stay stable)."""
    if (out / "tokenizer.json").exists():
        return Tokenizer.from_file(str(out / "tokenizer.json"))
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> list[np.ndarray]:
    """Token ids per document, each closed by <|endoftext|> (id 0)."""
    return [np.array([*e.ids, 0], dtype=np.int64) for e in tokenizer.encode_batch(documents)]


def windows(documents: list[np.ndarray], seed: int | None = None) -> torch.Tensor:
    """The documents (shuffled when a seed is given) as rows of SEQ_LEN + 1 ids; a row's last id starts the next."""
    if seed is not None:
        documents = random.Random(seed).sample(documents, len(documents))
    ids = torch.from_numpy(np.concatenate(documents))
    rows = (len(ids) - 1) // SEQ_LEN
    return torch.stack([ids[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(rows)])


def bigram_loss(train: list[np.ndarray], dev: torch.Tensor, heldout: torch.Tensor) -> float:
    """Nats per token of an interpolated Kneser-Ney bigram on the held-out targets, its discount tuned on dev."""
    ids = np.concatenate(train)
    pairs = Counter(zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True))
    count, followers, preceders = Counter(), Counter(), Counter()
    for (a, b), n in pairs.items():
        count[a] += n
        followers[a] += 1
        preceders[b] += 1

    def loss(rows: torch.Tensor, discount: float) -> float:
        total = 0.0
        for row in rows.tolist():
            for a, b in itertools.pairwise(row):
                p = (preceders[b] + 1) / (len(pairs) + VOCAB)  # add-one: no token is impossible
                if count[a]:
                    seen = max(pairs[a, b] - discount, 0) / count[a]
                    p = seen + min(discount * followers[a] / count[a], 1) * p
                total -= math.log(p)
        return total / (rows.shape[0] * SEQ_LEN)

    best = min((0.5, 0.6, 0.7, 0.8, 0.9), key=lambda d: loss(dev, d))
    return loss(heldout, best)


def common_words(documents: list[str], count: int) -> list[str]:
    """The most frequent words of the text, lower-cased: what a test can hold generated text against."""
    words = Counter(w for d in documents for w in re.findall(r"[a-z]+", d.lower()) if len(w) > 1 or w in "aio")
    return sorted(w for w, _ in words.most_common(count))
