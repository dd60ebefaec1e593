"""Bytes of a quantised element: from a quantization_config, a --quantization flag, or the ending of a model's name."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from twinpool.errors import ModelError
from twinpool.models.shapes import item_bytes
from twinpool.plan.weight_part import Part, text_config

_MOST_BYTES = 8  # a weight of 64 bits
_EVERY_MATRIX = re.compile(r"(?!.*lm_head)")  # quantisers leave the head alone unless they name it
_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "language_model.", "backbone.")
_IGNORED_KEYS = ("ignore", "exclude_modules", "ignored_layers", "modules_to_not_convert")
_PLAIN: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"quant_method": "fp8"},
    "int8": {"quant_algo": "INT8"},
    "mxfp8": {"quant_algo": "MXFP8"},
    "mxfp4": {"quant_algo": "MXFP4"},
    "nvfp4": {"quant_algo": "NVFP4", "group_size": 16},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "bitsandbytes": {"quant_method": "bitsandbytes", "bits": 4, "group_size": 64},
}
_FLAGS = {  # other values of --quantization that store the same bytes
    "modelopt_fp8": "fp8", "fbgemm_fp8": "fp8", "ptpc_fp8": "fp8", "w8a8_fp8": "fp8", "w8a8_int8": "int8",
    "modelopt_fp4": "nvfp4", "petit_nvfp4": "nvfp4", "awq_marlin": "awq", "gptq_marlin": "gptq", "moe_wna16": "gptq",
}  # fmt: skip
_WORDS = {  # words that end a name, the telling ones first: a GPTQ-Int8 has 8 bits; None: bytes are not known here
    "gguf": None, "exl2": None, "exl3": None, "mlx": None, "w4afp8": None, "w4a8": None,
    "nvfp4": "nvfp4", "fp4": "nvfp4", "mxfp4": "mxfp4", "mxfp8": "mxfp8", "fp8": "fp8",
    "int8": "int8", "w8a8": "int8", "w8a16": "int8", "8bit": "int8", "bnb": "bitsandbytes",
    "awq": "awq", "gptq": "gptq", "int4": "gptq", "w4a16": "gptq", "4bit": "gptq", "autoround": "gptq",
    "bf16": "", "dynamic": "", "block": "",
}  # fmt: skip
_ENDING = re.compile(rf"(?:[-_.](?:{'|'.join(_WORDS)}))+\Z", re.IGNORECASE)


def split_ending(name: str) -> tuple[str, str]:
    """(name without, and the words about quantisation that end it): ("Qwen3.6-27B", "-FP8"); the second may be ""."""
    found = _ENDING.search(name)
    return (name[: found.start()], found[0]) if found else (name, "")


@dataclass(frozen=True, slots=True)
class Scheme:
    """(pattern of module names, bytes per element) in order; what `ignored` matches, or no rule, has plain_bytes.

    note: where the scheme comes from when no file says it, or ""; while_loading: the checkpoint may still be plain.
    """

    plain_bytes: int
    rules: tuple[tuple[re.Pattern[str], float], ...] = ()
    ignored: re.Pattern[str] | None = None
    note: str = ""
    while_loading: bool = False

    @property
    def matrix_bytes(self) -> float:
        """Bytes of an element of most matrices, of the widest rule where rules differ."""
        return max((size for _, size in self.rules), default=float(self.plain_bytes))

    def part_bytes(self, part: Part) -> float:
        """Bytes of a part over all ranks, the scales of quantised blocks included."""
        names = [prefix + part.name for prefix in _PREFIXES]
        if not part.matrix or (self.ignored is not None and any(map(self.ignored.match, names))):
            return part.params * self.plain_bytes
        sizes = (size for pattern, size in self.rules if any(map(pattern.match, names)))
        return part.params * next(sizes, float(self.plain_bytes))


def read_scheme(config: Mapping[str, Any], *, dtype: str, flag: str | None = None, name: str = "") -> Scheme:
    """From quantization_config, the text config's too; else as the flag says; else as the model's name ends.

    dtype: of what is not quantised. Raises ModelError when it is broken or not known here.
    """
    plain = item_bytes(dtype)
    quantised = config.get("quantization_config") or text_config(config).get("quantization_config")
    if quantised:
        return _read(quantised, plain)
    if flag is not None:
        known = _FLAGS.get(flag, flag)
        if known not in _PLAIN:
            raise ModelError(f"--quantization {flag} does not tell how many bytes a weight takes; give --weights SIZE.")
        note = f"quantised as --quantization {flag} says"
        return Scheme(plain, tuple(_rules(_PLAIN[known])), note=note, while_loading=True)
    ending = split_ending(name)[1]
    known_by_name = _named(ending, name)
    if not known_by_name:
        return Scheme(plain)
    note = f"the quantisation ({known_by_name}) is taken from the ending {ending} of the name"
    return Scheme(plain, tuple(_rules(_PLAIN[known_by_name])), note=note)


def _read(quantised: Mapping[str, Any], plain_bytes: int) -> Scheme:
    try:
        ignored = [name for key in _IGNORED_KEYS for name in quantised.get(key) or ()]
        rules = tuple(_rules(quantised))
        for _, size in rules:
            if not 0 < size <= _MOST_BYTES:
                raise ValueError(f"weights of {size:g} bytes")
        return Scheme(plain_bytes, rules, _pattern(ignored) if ignored else None)
    except (ArithmeticError, AttributeError, KeyError, IndexError, TypeError, ValueError, re.error) as error:
        raise ModelError(
            f"config.json has a quantization_config that cannot be read ({error!r}); give --weights SIZE."
        ) from error


def _named(ending: str, name: str) -> str:
    """The scheme that the words of an ending tell of, "" for none. Raises ModelError for one whose bytes vary."""
    words = re.split(r"[-_.]", ending.casefold())
    found = next((scheme for word, scheme in _WORDS.items() if word in words), "")
    if found is None:
        raise ModelError(f"{name} is quantised in a way whose bytes are not known here; give --weights SIZE.")
    return found


def _pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Any of: a module and all inside it, a glob, or 're:' and a regular expression."""
    found = []
    for name in names:
        plain = fnmatch.translate(name) if "*" in name else re.escape(name) + r"(?:\.|\Z)"
        found.append(f"(?:{name[3:] if name.startswith('re:') else plain})")
    return re.compile("|".join(found))


def _rules(quantised: Mapping[str, Any]) -> Iterator[tuple[re.Pattern[str], float]]:
    """Rules of modelopt's quantized_layers, else compressed-tensors' config_groups, else one for every matrix.

    No rule where modelopt quantised the KV cache alone (quant_algo null).
    """
    named, groups = quantised.get("quantized_layers"), quantised.get("config_groups")
    if named:
        by_size: dict[float, list[str]] = {}
        for name, row in named.items():
            by_size.setdefault(_algorithm_bytes(row), []).append(name)
        yield from ((_pattern(names), size) for size, names in by_size.items())
    elif groups:
        for group in groups.values():
            targets = group.get("targets") or ["Linear"]
            yield _EVERY_MATRIX if targets == ["Linear"] else _pattern(targets), _bits_bytes(group["weights"])
    elif quantised.get("quant_algo") or quantised.get("quant_method") != "modelopt":
        yield _EVERY_MATRIX, _algorithm_bytes(quantised) if quantised.get("quant_algo") else _method_bytes(quantised)


def _algorithm_bytes(row: Mapping[str, Any]) -> float:
    """modelopt's quant_algo: 4 bits and a scale a group (8 bits for floats, 16 for integers), or 8 bits."""
    name, group = str(row["quant_algo"]), int(row.get("group_size") or 16)
    if "FP4" in name:
        return 0.5 + 1 / (32 if "MXFP4" in name else group)
    if "MXFP8" in name:
        return 1 + 1 / 32
    if "FP8" in name or "INT8" in name:
        return 1.0
    if "W4A" in name or "INT4" in name:
        return 0.5 + 2 / group
    raise ModelError(f"config.json says quant_algo={name!r}, whose bytes are not known here; give --weights SIZE.")


def _bits_bytes(weights: Mapping[str, Any]) -> float:
    """compressed-tensors' weights: num_bits and, a group, 8 bits of scale for floats of 4 bits, else 16."""
    bits, group = int(weights["num_bits"]), int(weights.get("group_size") or -1)
    scale_bytes = 1 if weights.get("type") == "float" and bits == 4 else 2
    return bits / 8 + (scale_bytes / group if group > 0 else 0)  # a scale a row or a 128 x 128 block is nothing


def _method_bytes(quantised: Mapping[str, Any]) -> float:
    """fp8 (4 bytes of scale a block), mxfp4; AWQ, GPTQ (16 bits of scale and a zero a group); bitsandbytes (32 bits)."""
    method, bits = str(quantised.get("quant_method")), quantised.get("bits", quantised.get("w_bit"))
    if method == "fp8":
        block = quantised.get("weight_block_size")
        return 1 + 4 / (int(block[0]) * int(block[1])) if block else 1.0
    if method == "mxfp4":
        return _algorithm_bytes({"quant_algo": "MXFP4"})
    if method in ("awq", "gptq") and isinstance(bits, int):
        return bits / 8 + (2 + bits / 8) / int(quantised.get("group_size") or 128)
    if method == "bitsandbytes" and isinstance(bits, int):
        return bits / 8 + 4 / int(quantised["group_size"])
    raise ModelError(f"config.json says quant_method={method!r}, whose bytes are not known here; give --weights SIZE.")
