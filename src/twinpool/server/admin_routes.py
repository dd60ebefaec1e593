"""Health, facts, loads, metrics and the cache flush."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from twinpool.engine.core import Engine
from twinpool.errors import BadRequest
from twinpool.request import SamplingParams
from twinpool.server.answer import collect
from twinpool.server.bridge import State
from twinpool.server.exporter import make_registry
from twinpool.server.http_errors import NotEnabled
from twinpool.server.openai_routes import service_of
from twinpool.server.service import Ask, Service
from twinpool.server.stats import state_pool_bytes
from twinpool.server.stream import unless_client_leaves
from twinpool.units import to_gib

log = logging.getLogger("twinpool.server")

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while requests are taken, 503 otherwise; asks nothing of the engine's thread."""
    state = service_of(request).bridge.state
    return JSONResponse({"status": state.value}, status_code=200 if state is State.READY else 503)


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """200 once one token has gone through the engine."""
    service = service_of(request)
    service.check_ready()
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    ask = Ask(prompts=([0],), params=params, max_tokens=1)

    async def one_token() -> None:
        await collect(await service.submit(ask))

    await unless_client_leaves(request, one_token())
    return JSONResponse({"status": service.bridge.state.value})


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    """Resolved options, the ledger and the internal states (reference 7.1)."""
    service = service_of(request)
    info = _server_info(service)
    info["internal_states"][0]["hicache"] = await _hicache(service)
    info["internal_states"][0]["hicache_storage"] = _plain(service.engine.view_disk())
    return JSONResponse(info)


@router.get("/get_model_info")
@router.get("/model_info")
async def model_info(request: Request) -> Response:
    """What is served."""
    facts = service_of(request).engine.facts
    resolved = facts.resolved
    return JSONResponse(
        {
            "model_path": resolved.model_path,
            "tokenizer_path": resolved.tokenizer_path,
            "served_model_name": facts.model_name,
            "model_type": facts.spec.model_type,
            "architectures": [facts.spec.architecture],
            "is_generation": True,
        }
    )


@router.get("/v1/loads")
async def loads(request: Request) -> Response:
    """How busy the one worker is."""
    service = service_of(request)
    snapshot = service.engine.snapshot()
    load = {
        "dp_rank": 0,
        "num_running_reqs": snapshot.n_running,
        "num_waiting_reqs": snapshot.n_waiting,
        "max_running_requests": service.engine.scheduler.shape.max_running_requests,
        "token_usage": round(max(snapshot.pages.usage, snapshot.slots.usage), 2),
        "full_token_usage": snapshot.pages.usage,
        "mamba_usage": snapshot.slots.usage,
        "cache_hit_rate": service.meters.values("sglang:cache_hit_rate")[()],
        "gen_throughput": service.stats.gen_throughput,
        "memory": _memory(service),
    }
    return JSONResponse({"loads": [load]})


@router.get("/flush_cache")
@router.post("/flush_cache")
async def flush_cache(request: Request) -> Response:
    """Forget the prefix cache; 400 if there is work for longer than ?timeout seconds (reference 7.1)."""
    service = service_of(request)
    timeout_s = _timeout_s(request.query_params.get("timeout", "0"))
    if not await service.bridge.flush(timeout_s=timeout_s):
        snapshot = service.engine.snapshot()
        message = (
            "Cache not flushed because there are pending requests. "
            f"#queue-req: {snapshot.n_waiting}, #running-req: {snapshot.n_running}"
        )
        log.warning(message)
        raise BadRequest(message)
    log.info("Cache flushed successfully!")
    return PlainTextResponse("Cache flushed.\nIt works only while no request waits or runs: see ?timeout=SECONDS.\n")


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """The catalogue in Prometheus' text format; 404 without --enable-metrics (reference 7.1)."""
    service = service_of(request)
    if not service.options.enable_metrics:
        raise NotEnabled("there are no metrics here: start the server with --enable-metrics.")
    registry: CollectorRegistry | None = getattr(request.app.state, "registry", None)
    if registry is None:
        registry = make_registry(meters=service.meters, model_name=service.model_name, refresh=service.refresh_gauges)
        request.app.state.registry = registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _timeout_s(text: str) -> float:
    """?timeout as seconds. Raises BadRequest unless it is a finite number >= 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise BadRequest(f"timeout={text!r} is not a number of seconds, 0 or more.", field="timeout")
    return value


def _server_info(service: Service) -> dict[str, Any]:
    facts, ledger = service.engine.facts, service.engine.facts.ledger
    resolved = {
        item.name: _plain(getattr(facts.resolved, item.name))
        for item in dataclasses.fields(facts.resolved)
        if item.name not in ("api_key", "origins")
    }
    shape = service.engine.scheduler.shape
    decided = {
        "max_mamba_cache_size": service.engine.snapshot().slots.total,
        "max_running_requests": shape.max_running_requests,
        "max_total_num_tokens": service.engine.snapshot().pages.total * shape.page_size,
        "api_key": "set" if facts.resolved.api_key else None,
    }
    lines = [_plain(line) for line in ledger.lines]
    state = {
        "memory_usage": _memory(service),
        "effective_max_running_requests_per_dp": shape.max_running_requests,
        "last_gen_throughput": service.stats.gen_throughput,
    }
    return {**resolved, **decided, "ledger": lines, "internal_states": [state], "status": service.bridge.state.value}


async def _hicache(service: Service) -> dict[str, Any] | None:
    """The host tier now, None without one: sizes and traffic in bytes, tokens and states, and what it can resume.

    covers: the sessions of the boot log's line, those that fit when nothing else is there (memory.host_cover.HostCover).
    coverage: of the KV that is there, and of the sessions it belongs to (prefix.host_view.HostView); None unless the
    server is ready. The walk over the tree is the engine's, between two steps.
    """
    counts, facts = service.engine.snapshot().host, service.engine.facts
    if counts is None:
        return None
    ready = service.bridge.state is State.READY
    view = await service.bridge.ask(Engine.view_host) if ready else None
    coverage = {**_plain(view), "resumable_share": round(view.resumable_share, 4)} if view is not None else None
    covers = {**_plain(service.engine.cover_host()), "device_sessions": facts.ledger.max_mamba_cache_size}
    return {"policy": facts.resolved.hicache_write_policy, **_plain(counts), "covers": covers, "coverage": coverage}


def _memory(service: Service) -> dict[str, Any]:
    """Sizes in GiB; token_capacity in tokens, state_capacity in slots. No graphs are captured here."""
    facts, snapshot = service.engine.facts, service.engine.snapshot()
    return {
        "weight": round(to_gib(facts.weight_bytes), 3),
        "kvcache": round(to_gib(facts.ledger.kv_pool_bytes), 3),
        "statecache": round(to_gib(state_pool_bytes(facts.ledger)), 3),
        "token_capacity": snapshot.pages.total * snapshot.page_size,
        "state_capacity": snapshot.slots.total,
        "startup_available": round(to_gib(facts.startup_available_bytes), 3),
        "graph": 0.0,
    }


def _plain(value: Any) -> Any:
    """A value of an options or ledger object as JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
