"""A launch line as users have it, of any engine: what it says about memory, and which of its flags say nothing about it.

Lenient where a server is strict: an unknown flag is listed, not refused, because the line belongs to another program.
"""

from __future__ import annotations

import difflib
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twinpool.config.command_line import by_flag, is_number
from twinpool.config.deployment import (
    SYNONYMS,
    Deployment,
    OtherValue,
    bears_on_pools,
    deployment_options,
    without_other_values,
)
from twinpool.config.field import Option, Value, options_of
from twinpool.config.refused import refusals
from twinpool.config.vllm_flags import VllmFlags
from twinpool.errors import ConfigError

# The word that starts the engine, and the word that may follow it.
ENGINES = {
    "sglang.launch_server": "sglang", "sglang.serve": "sglang", "sglang": "sglang", "vllm": "vllm", "twinpool": "twinpool",
    "vllm.entrypoints.openai.api_server": "vllm",
}  # fmt: skip
# Images whose entry point is the engine, so that its flags follow the image's name.
IMAGES = {"vllm-openai": "vllm"}
_ENVIRONMENT = re.compile(r"[A-Z][A-Z0-9_]*=.*", re.DOTALL)
_CONTINUATION = re.compile(r"\\(?:[^\S\n]+#[^\n]*|[^\S\n]*)(?:\n|\Z)")
_SHELL_END = re.compile(r"\d*>.*|[&|;].*", re.DOTALL)
# Variables of the environment that change memory, and their fields (reference 1.6, 3.3).
VARIABLES = {
    "SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK": "skip_decode_lock", "SGLANG_MAMBA_CONV_DTYPE": "mamba_conv_dtype",
    "SGLANG_MAMBA_SSM_DTYPE": "mamba_ssm_dtype",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLine:
    """engine: None when the line does not say. model: the positional model, if any. flags: of a two-pool engine or of vLLM.

    no_effect: flags that are known and do not change the two pools. not_modelled: flags that do change memory, in a way
    that the plan leaves out. unknown: sentences about flags nobody knows. other_values: what another engine takes and twinpool does
    not, where no pool's size depends on it.
    """

    engine: str | None = None
    model: str | None = None
    deployment: Deployment = field(default_factory=Deployment)
    vllm: VllmFlags | None = None
    no_effect: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    other_values: tuple[OtherValue, ...] = ()

    def refuse_other_values(self) -> None:
        """For whom behaviour matters and not only sizes: raise ConfigError for the first value that twinpool does not take."""
        if self.other_values:
            raise ConfigError(self.other_values[0].why)


def split_words(text: str) -> list[str]:
    """The words of a pasted line: comments dropped, continuations joined. Raises ConfigError for an open quote."""
    # A commented line goes first: joined to the next one, it would hide that too.
    lines = (line for line in text.split("\n") if not line.lstrip().startswith("#"))
    joined = _CONTINUATION.sub(" ", "\n".join(lines))
    try:
        return shlex.split(joined, comments=True)
    except ValueError as error:
        raise ConfigError(f"The launch line cannot be split into words: {error}.") from error


def read_launch(words: Sequence[str], *, engine: str | None = None) -> LaunchLine:
    """Read the words of a launch line. engine: what it is for, where the line itself does not say.

    Raises ConfigError for a known flag with a bad value; of a line that does not start twinpool, only where a pool depends on it.
    """
    environment, rest = _environment(words)
    found, flags = _command(rest)
    engine = found or engine
    owner: type = VllmFlags if engine == "vllm" else Deployment
    values, stray, others = _read(options_of(owner), flags)
    named = values.get("model" if engine == "vllm" else "model_path")
    model = named or (stray.pop(0) if stray else None)
    line = _sort_out(LaunchLine(engine=engine, model=model), others, known=by_flag(options_of(owner)))
    line = replace(line, unknown=(*line.unknown, *(f"'{word}' belongs to no flag." for word in stray)))
    if engine == "vllm":
        return replace(line, vllm=VllmFlags(**values))
    others_taken: tuple[OtherValue, ...] = ()
    if engine != "twinpool":
        values, others_taken = without_other_values(values)
    return replace(line, deployment=deployment_from({**environment, **values}), other_values=others_taken)


def deployment_from(values: Mapping[str, Any]) -> Deployment:
    """A Deployment of these fields: synonyms of dtypes resolved, draft tokens of a speculative algorithm filled in.

    Raises ConfigError.
    """
    plain = {name: SYNONYMS.get(value, value) if name.endswith("dtype") else value for name, value in values.items()}
    Deployment(**values)  # checks what was written, before synonyms replace it
    algorithm = plain.get("speculative_algorithm")
    if algorithm is not None and plain.get("speculative_num_draft_tokens") is None:
        steps = plain.get("speculative_num_steps")
        if steps is None or (plain.get("speculative_eagle_topk") or 1) > 1:
            raise ConfigError(
                f"--speculative-algorithm {algorithm} needs --speculative-num-draft-tokens: "
                "a state is kept for each draft token, and without the number none of them can be counted."
            )
        plain["speculative_num_draft_tokens"] = steps + 1
    return Deployment(**plain, given=frozenset(plain))


def _environment(words: Sequence[str]) -> tuple[dict[str, Value], list[str]]:
    """Variables that change memory, and the words without any NAME=VALUE in front of the command."""
    values: dict[str, Value] = {}
    rest: list[str] = []
    for word in (word.removeprefix("--env=") for word in words):
        is_flag_value = bool(rest) and rest[-1].startswith("-") and rest[-1] not in ("-e", "--env")
        if is_flag_value or not _ENVIRONMENT.fullmatch(word):
            rest.append(word)
            continue
        name, _, value = word.partition("=")
        field_name = VARIABLES.get(name)
        if field_name == "skip_decode_lock":
            values[field_name] = value.lower() in ("1", "true", "yes", "on")
        elif field_name is not None:
            values[field_name] = value
    return values, rest


def _command(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """(engine, words after the command, up to what the shell takes). Without a command all words are flags."""
    names = [word.rsplit("/", 1)[-1] for word in words]
    for at, name in enumerate(names):
        if name not in ENGINES:
            continue
        follows = words[at + 1] if at + 1 < len(words) else ""
        if "." in name or follows in ("serve", "launch_server"):
            return ENGINES[name], _of_command(words[at + (1 if "." in name else 2) :])
    for at, name in enumerate(names):
        image = re.split("[:@]", name, maxsplit=1)[0]
        if image in IMAGES:
            return IMAGES[image], _of_command(words[at + 1 :])
    return None, _of_command(words)


def _of_command(words: Sequence[str]) -> list[str]:
    """The words before a redirection, a pipe or the next command."""
    return list(itertools.takewhile(lambda word: not _SHELL_END.fullmatch(word), words))


def _read(
    options: Sequence[Option], words: Sequence[str]
) -> tuple[dict[str, Any], list[str], list[tuple[str, list[str]]]]:
    """(values of known flags, words before any flag or after a switch, other flags with their words)."""
    known = by_flag(options)
    values: dict[str, Any] = {}
    stray: list[str] = []
    others: list[tuple[str, list[str]]] = []
    taking: list[str] = stray
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("-") or is_number(word) or word == "-":
            taking.append(word)
            continue
        name, has_value, inline = word.partition("=")
        option = known.get(_dashed(name))
        if option is None:
            others.append((name, [inline] if has_value else []))
            taking = others[-1][1]
            continue
        taking = stray
        if option.kind is bool:
            values[option.field] = inline.lower() not in ("false", "0")
        elif has_value or (waiting and (not waiting[0].startswith("-") or is_number(waiting[0]))):
            values[option.field] = _parsed(option, inline if has_value else waiting.pop(0))
        else:
            raise ConfigError(f"{name} in the launch line has no value.")
    return values, stray, others


def _parsed(option: Option, text: str) -> Value:
    """The value; of an option that no pool depends on, the text where it is none. Raises ConfigError for the others."""
    try:
        return option.parse(text)
    except ConfigError:
        if bears_on_pools(option.field):
            raise
        return text


def _sort_out(line: LaunchLine, others: Sequence[tuple[str, list[str]]], *, known: Mapping[str, Option]) -> LaunchLine:
    """The line with every flag that is no option in one of three lists."""
    no_effect: list[str] = []
    not_modelled: list[str] = []
    unknown: list[str] = []
    elsewhere = {*refusals().flags, *by_flag(deployment_options()), *NO_EFFECT}
    for written, words in others:
        name, shown = _dashed(written), " ".join((written, *words))
        if name in NOT_MODELLED:
            not_modelled.append(shown)
        elif name in elsewhere:
            no_effect.append(shown)
        else:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            hint = f"did you mean {close[0]}?" if close else "it was not taken into account."
            unknown.append(f"{shown} is not a flag that twinpool knows; {hint}")
    return replace(line, no_effect=tuple(no_effect), not_modelled=tuple(not_modelled), unknown=tuple(unknown))


def _dashed(name: str) -> str:
    """A flag as it is listed: both engines take underscores for dashes."""
    return name.replace("_", "-")


# Flags that change memory in ways the two pools do not show.
NOT_MODELLED = frozenset({
    "--enable-int8-mamba-checkpoint", "--int8-mamba-ckpt-size", "--enable-unified-memory", "--cpu-offload-gb", "--enable-lmcache",
    "--swa-full-tokens-ratio", "--enable-lora", "--max-loras-per-batch", "--max-lora-rank", "--cuda-graph-max-bs", "--cuda-graph-bs",
    "--disable-cuda-graph", "--enable-two-batch-overlap", "--enable-memory-saver", "--moe-a2a-backend", "--cpu-offload-params",
    "--kv-transfer-config", "--kv-offloading-size", "--swap-space", "--speculative-draft-model-path",
})  # fmt: skip
# Flags of other engines that change neither pool, beside those of refused.toml.
NO_EFFECT = frozenset({
    "--tool-call-parser", "--enable-auto-tool-choice", "--reasoning-parser", "--disable-log-requests", "--enable-log-requests",
    "--uvicorn-log-level", "--trust-remote-code", "--download-dir", "--seed", "--max-log-len", "--no-enable-log-requests",
    "--chat-template-content-format", "--generation-config", "--override-generation-config", "--distributed-executor-backend",
    "--async-scheduling", "--no-async-scheduling", "--limit-mm-per-prompt", "--mm-encoder-tp-mode", "--language-model-only",
    "--enforce-eager", "--compilation-config", "-O", "--hf-overrides", "--load-format", "--disable-custom-all-reduce",
    "--enable-expert-parallel", "--attention-backend", "--max-cudagraph-capture-size", "--cudagraph-capture-sizes",
    "--default-chat-template-kwargs", "--enable-prompt-tokens-details", "--allowed-origins", "--structured-outputs-config",
})  # fmt: skip
