"""docs/plan-json.md from plan_json.toml, after plans of every kind were run and had exactly the keys and types it names."""

from __future__ import annotations

import contextlib
import io
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from twinpool.cli.main import run

Schema = dict[str, dict[str, list[str]]]
TABLE = Path(__file__).with_name("plan_json.toml")
LOG = str(Path(__file__).parents[1] / "tests" / "golden" / "boot_log.txt")
SWITCH = "kind"

_MODEL = "Qwen3.5-35B-A3B --gpu H100"
_TWO = f"{_MODEL} --tp-size 2 --running 16 --tokens-per-request 16384 --idle-sessions"
_SWEEP = "--running 16 --tokens-per-request 16384 --points 4"
_VLLM = "-- vllm serve Qwen/Qwen3.5-35B-A3B"
# Between them: workloads that fit, do not fit and are absent, refusals, speculation, constants by hand, every kind.
RUNS = (
    f"{_TWO} 100",
    f"{_TWO} 900",
    f"{_MODEL} --running 16 --tokens-per-request 16384 --idle-sessions 100",
    f"{_TWO} 9 --enable-hierarchical-cache --hicache-size 40 --hicache-mamba-size-gb 10",
    f"{_TWO} 9 --enable-hierarchical-cache --hicache-size 0.01",
    f"{_MODEL} --mem-fraction-static 0.7 --running 16 --tokens-per-request 16384",
    f"{_TWO} 9 --speculative-algorithm EAGLE --speculative-num-draft-tokens 4 --max-running-requests 32",
    f"{_MODEL} --tp-size 2 --post-weights-memory 40GiB -- python -m sglang.launch_server --log-level info --mystery 1",
    "--gpu L4 --weights 1GiB --state-bytes-per-slot 1000000 --kv-bytes-per-token 0 --running 4 --tokens-per-request 100",
    "Qwen3.5-9B --gpu cpu --device-memory 32GiB --running 2 --tokens-per-request 1000",
    f"--boot-log {LOG}",
    f"--boot-log {LOG} --running 16 --tokens-per-request 16384 --idle-sessions 20",
    f"sweep {_MODEL} --tp-size 2 {_SWEEP}",
    f"sweep {_MODEL} --tp-size 2 {_SWEEP} --over ratio",
    f"{_TWO} 10 --engine vllm",
    f"--gpu H100 {_VLLM} --max-num-seqs 100000 --mystery 1",
    f"--gpu H200 {_VLLM} --no-enable-prefix-caching --mamba-cache-mode none",
)


def page(note: str) -> str:
    """The page. Raises ValueError when a plan has a key or a type that plan_json.toml does not name, or the reverse."""
    found = problems()
    if found:
        raise ValueError(f"twinpool plan --json and {TABLE.name} differ: " + "; ".join(sorted(found)))
    about, schema = _table()
    lines = [note, "# `twinpool plan --json`: twinpool-plan/1", ""]
    lines += [
        "One object, whose `kind` says which of the first four it is. Sizes are bytes, lengths tokens, and a key "
    ]
    lines[-1] += "is always there; null says that there is nothing to say. [plan.md](plan.md) explains the numbers."
    for name, keys in schema.items():
        lines += ["", f"## {name}", "", about[name], "", "| Key | Type | Meaning |", "| - | - | - |"]
        lines += [f"| `{key}` | {_linked(kind, schema)} | {text} |" for key, (kind, text) in keys.items()]
    return "\n".join(lines) + "\n"


@cache
def problems() -> frozenset[str]:
    """What differs between the plans of RUNS and plan_json.toml, one sentence each."""
    about, schema = _table()
    found, seen = set(), set()
    for line in RUNS:
        document = _document(line)
        for path, name, problem in _compare(
            document, f"{document[SWITCH]}_document", schema, path=str(document[SWITCH])
        ):
            seen.add(name)
            if problem:
                found.add(f"{path}: {problem}")
    found |= {f"[{name}] is an object of no plan" for name in {*schema} - seen}
    found |= {f"[{name}] is not in both [about] and the tables" for name in {*schema} ^ {*about}}
    return frozenset(found)


def _table() -> tuple[dict[str, str], Schema]:
    tables = tomllib.loads(TABLE.read_text())
    return tables.pop("about"), tables


def _document(line: str) -> dict[str, object]:
    """The JSON of one command line."""
    words, printed = line.split(), io.StringIO()
    at = words.index("--") if "--" in words else len(words)
    with contextlib.redirect_stdout(printed):
        run(["plan", *words[:at], "--json", *words[at:]])
    document = json.loads(printed.getvalue())
    assert isinstance(document, dict)
    return document


def _compare(value: object, kind: str, schema: Schema, *, path: str) -> Iterator[tuple[str, str, str]]:
    """(path, object of the schema that was met there, problem or '') of a value that should be of a kind."""
    if " or " in kind:
        fitting = [one for one in kind.split(" or ") if (one == "null") == (value is None)]
        yield from _compare(value, fitting[0], schema, path=path) if len(fitting) == 1 else [(path, "", f"not {kind}")]
    elif kind.startswith("array of "):
        yield from _parts(enumerate(value) if isinstance(value, list) else None, kind, schema, path=path)
    elif kind.startswith("map of "):
        yield from _parts(value.items() if isinstance(value, dict) else None, kind, schema, path=path)
    elif kind in schema:
        yield from _object(value, kind, schema, path=path)
    elif not _is(value, kind):
        yield path, "", f"{value!r} is not {kind}"


def _parts(
    parts: Iterable[tuple[object, object]] | None, kind: str, schema: Schema, *, path: str
) -> Iterator[tuple[str, str, str]]:
    if parts is None:
        yield path, "", f"not {kind}"
        return
    for _, part in parts:
        yield from _compare(part, kind.partition(" of ")[2], schema, path=f"{path}[]")


def _object(value: object, name: str, schema: Schema, *, path: str) -> Iterator[tuple[str, str, str]]:
    if not isinstance(value, Mapping):
        yield path, name, f"not an object ({name})"
        return
    yield path, name, ""
    for key in sorted({*value} ^ {*schema[name]}):
        yield f"{path}.{key}", name, f"in [{name}] and not printed" if key in schema[name] else f"not in [{name}]"
    for key, (kind, _) in schema[name].items():
        if key in value:
            yield from _compare(value[key], kind, schema, path=f"{path}.{key}")


def _is(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    types: dict[str, tuple[type, ...]] = {
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "null": (type(None),),
    }
    return isinstance(value, types.get(kind, ()))


def _linked(kind: str, schema: Schema) -> str:
    """A type whose objects link to their table."""
    return " ".join(f"[{word}](#{word})" if word in schema else word for word in kind.split())
