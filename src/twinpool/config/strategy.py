"""Which radix-cache strategy runs, and whether scheduling overlaps (reference 3.2); extra_buffer works anywhere."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.config.options import ServeOptions
from twinpool.errors import ConfigError
from twinpool.models.spec import ModelSpec
from twinpool.units import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """strategy: a row of prefix/checkpoint.py; overlap: whether the next step is planned while one runs."""

    strategy: str
    overlap: bool


def wants_overlap(options: ServeOptions, *, device_kind: str) -> bool:
    """Whether overlap is on before the strategy is known: a pipeline, or speculation on a CPU, turns it off (3.4)."""
    speculates_on_cpu = options.speculative_num_draft_tokens > 0 and device_kind == "cpu"
    return not (options.disable_overlap_schedule or options.pp_size > 1 or speculates_on_cpu)


def choose_strategy(options: ServeOptions, spec: ModelSpec, *, page_size: int, device_kind: str) -> Choice:
    """Interpret --mamba-radix-cache-strategy for a model and a page size in tokens (reference 3.2).

    Raises ConfigError when the model, the page size or the overlap do not allow what was asked for.
    """
    _check_tiers(options)
    overlap = wants_overlap(options, device_kind=device_kind)
    name = options.mamba_radix_cache_strategy
    if options.disable_radix_cache:
        if options.enable_hierarchical_cache:
            raise ConfigError(
                "--enable-hierarchical-cache keeps evicted prefixes and --disable-radix-cache keeps none: leave one out."
            )
        return Choice(strategy="no_buffer", overlap=overlap)
    if name == "auto":
        can = spec.n_linear_layers > 0 and spec.supports_extra_buffer
        if can and (overlap or page_size > 1):
            name = "extra_buffer"
        else:
            name, overlap = "no_buffer", False
    if name == "no_buffer":
        _check_no_buffer(page_size=page_size, overlap=overlap)
    else:
        _check_extra_buffer(options, spec, name=name, page_size=page_size, overlap=overlap)
    return Choice(strategy=name, overlap=overlap)


def _check_tiers(options: ServeOptions) -> None:
    backend, path = options.hicache_storage_backend, options.hicache_storage_path
    if backend is not None and not options.enable_hierarchical_cache:
        raise ConfigError("--hicache-storage-backend is a tier below the host's: it needs --enable-hierarchical-cache.")
    if backend is None and path is not None:
        lacks = "" if options.enable_hierarchical_cache else " and --enable-hierarchical-cache"
        raise ConfigError(
            f"--hicache-storage-path is the folder of --hicache-storage-backend file: give that{lacks}, too."
        )


def _check_no_buffer(*, page_size: int, overlap: bool) -> None:
    if page_size != 1:
        raise ConfigError("no_buffer only supports page_size=1.")
    if overlap:
        raise ConfigError("no_buffer do not support overlap schedule. Try to set disable_overlap_schedule=True.")


def _check_extra_buffer(options: ServeOptions, spec: ModelSpec, *, name: str, page_size: int, overlap: bool) -> None:
    if spec.n_linear_layers == 0:
        raise ConfigError(f"--mamba-radix-cache-strategy {name} needs mamba state, got {spec.architecture}.")
    if not spec.supports_extra_buffer:
        raise ConfigError(f"extra_buffer is not supported for {spec.architecture}; use no_buffer.")
    if name == "extra_buffer_lazy" and not overlap:
        raise ConfigError("Lazy extra buffer requires overlap schedule (--disable-overlap-schedule is incompatible)")
    interval, drafts = options.mamba_track_interval, options.speculative_num_draft_tokens
    if interval < drafts:
        raise ConfigError(
            f"--mamba-track-interval {interval} is below the {drafts} draft tokens of a step; use {drafts} or more."
        )
    if interval % page_size:
        raise ConfigError(
            f"--mamba-track-interval {interval} is not a multiple of --page-size {page_size}; "
            f"use {round_up(interval, page_size)}."
        )
