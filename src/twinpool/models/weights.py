"""Weights of a checkpoint folder, strictly: every tensor the model asks for, and none it does not know."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from twinpool.errors import ModelError

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_KV_SCALES = ("k_scale", "v_scale", "kv_scale")  # as quantisers name them
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def read_weights(
    folder: Path, *, ignored: Iterable[str], renamed: Mapping[str, str], joined: Mapping[str, tuple[str, ...]]
) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files.

    ignored: prefixes of names to leave out (other modalities, draft layers); renamed: regular expression -> replacement, in
    order; joined: end of a name -> ends of the names of its parts, after renaming, which come out one after another in its
    first axis. Experts that are stored one by one (under their names after renaming) come out stacked: `*.experts.gate_up_proj`
    [experts, 2 intermediate, hidden], or `*.experts.up_proj` without gates, and `*.experts.down_proj`. Raises ModelError if
    there are no files or one cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, torch.Tensor] = {}
    skip = tuple(ignored)
    for path in _files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    if skip and name.startswith(skip):
                        continue
                    tensors[_rename(name, renamed)] = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be read: {str(error).strip().splitlines()[0]}.") from error
    for end, parts in joined.items():
        _join(tensors, end, parts)
    return _stack_experts(tensors)


def assign_weights(
    model: torch.nn.Module, tensors: dict[str, torch.Tensor], *, wide: Iterable[str], folder: Path
) -> None:
    """Give `model`'s parameters and saved buffers the tensors of their names, in the dtype that each of them has.

    wide: regular expressions in names of parameters that are float32 all the same. Those that transformers ties to another get
    that one's, unless a tensor of their own is stored that differs, as transformers does it.

    Raises ModelError naming what is missing, unknown (scales of an fp8 cache, too), quantised or empty, or whose shape differs from the
    config's.
    """
    parameters, patterns = model.state_dict(keep_vars=True), tuple(wide)
    tied = _tied(model.all_tied_weights_keys, tensors)  # type: ignore[arg-type]
    for name in tied:
        parameters.pop(name, None)
    missing, unknown = sorted(parameters.keys() - tensors.keys()), sorted(tensors.keys() - parameters.keys())
    if missing:
        raise ModelError(f"the weights in {folder} lack {_list(missing)}, which config.json asks for.")
    if unknown and all(name.endswith(_KV_SCALES) for name in unknown):
        raise ModelError(
            f"the weights in {folder} hold scales of keys and values, {_list(unknown)}, which are not applied here; use a "
            "checkpoint without them."
        )
    if unknown:
        raise ModelError(f"the weights in {folder} hold {_list(unknown)}, which config.json does not ask for.")
    for name, parameter in parameters.items():
        tensor = tensors.pop(name)
        if tensor.dtype not in _FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(
                f"{name} in {folder} is {kind}; weights must be float32, bfloat16 or float16: none are unpacked here."
            )
        if parameter.numel() == 0:
            raise ModelError(f"{name} has no elements by config.json: {list(parameter.shape)}.")
        if tensor.shape != parameter.shape:
            shapes = f"{list(tensor.shape)} in the weights and {list(parameter.shape)} by config.json"
            raise ModelError(f"{name} in {folder} is {shapes}.")
        if isinstance(parameter, torch.nn.Parameter):
            kept = torch.float32 if any(re.search(pattern, name) for pattern in patterns) else parameter.dtype
            _place(model, name, torch.nn.Parameter(tensor.to(kept), requires_grad=False))
        else:
            _place(model, name, tensor.to(parameter.dtype))
    for name, source in tied.items():
        _place(model, name, model.get_parameter(source))


def _tied(names: Mapping[str, str], tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Those of `names` (a name -> the one it is tied to) that are one tensor, which then is stored under the second name only."""
    tied = {}
    for name, source in names.items():
        own = tensors.get(name)
        if own is not None and not torch.equal(own, tensors.setdefault(source, own)):
            continue
        tensors.pop(name, None)
        tied[name] = source
    return tied


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            files = [folder / name for name in sorted(names)]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} cannot be read: {error}.") from error
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no *.safetensors files: --model-path takes a folder with weights.")
    return files


def _rename(name: str, renamed: Mapping[str, str]) -> str:
    for pattern, replacement in renamed.items():
        name = re.sub(pattern, replacement, name)
    return name


def _join(tensors: dict[str, torch.Tensor], end: str, parts: tuple[str, ...]) -> None:
    """Put the tensors `<stem><part>` into one `<stem><end>`, for every stem that has any of them."""
    stems = {name.removesuffix(part) for name in tensors for part in parts if name.endswith(part)}
    for stem in stems:
        lacking = [stem + part for part in parts if stem + part not in tensors]
        if lacking:
            raise ModelError(f"the weights lack {_list(lacking)}.")
        _check_alike({stem + part: tensors[stem + part].shape[1:] for part in parts}, what="rows")
        tensors[stem + end] = torch.cat([tensors.pop(stem + part) for part in parts])


def _stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name in list(tensors):
        match = _EXPERT.fullmatch(name)
        if match:
            found.setdefault(match[1], {})[int(match[2]), match[3]] = tensors.pop(name)
    for prefix, parts in found.items():
        count = 1 + max(number for number, _ in parts)
        gates = ("gate_proj",) if any(kind == "gate_proj" for _, kind in parts) else ()
        wanted = [(i, kind) for i in range(count) for kind in (*gates, "up_proj", "down_proj")]
        lacking = [f"{prefix}.{i}.{kind}.weight" for i, kind in wanted if (i, kind) not in parts]
        if lacking:
            raise ModelError(f"the weights lack {_list(lacking)}.")
        for kinds in ((*gates, "up_proj"), ("down_proj",)):
            _check_alike({f"{prefix}.{i}.{kind}.weight": parts[i, kind].shape for i, kind in wanted if kind in kinds})
        opens = [torch.cat([parts[i, kind] for kind in (*gates, "up_proj")]) for i in range(count)]
        tensors[f"{prefix}.gate_up_proj" if gates else f"{prefix}.up_proj"] = torch.stack(opens)
        tensors[f"{prefix}.down_proj"] = torch.stack([parts[i, "down_proj"] for i in range(count)])
    return tensors


def _check_alike(shapes: Mapping[str, torch.Size], *, what: str = "tensors") -> None:
    first = next(iter(shapes))
    for name, shape in shapes.items():
        if shape != shapes[first]:
            alike = f"{what} of {list(shapes[first])} in {first} and of {list(shape)} in {name}"
            raise ModelError(f"the weights hold {alike}, which must be alike.")


def _place(model: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, value)


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} tensors ({names[0]}, ...)"
