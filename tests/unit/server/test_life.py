"""Life of a server: boot, health, clients that leave, full queue, drain, failure. Requests are ASGI calls by hand."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import Any

import pytest

from tests.unit.server.fakes import Call, Fake, make_fake, said
from twinpool.engine.core import Engine
from twinpool.errors import MemoryRefusal
from twinpool.server.bridge import State
from twinpool.server.run import _end

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True}


@asynccontextmanager
async def running(fake: Fake) -> AsyncIterator[None]:
    """The fake's engine thread, from boot to end; at the end nothing may be left in it."""
    fake.service.bridge.start()
    await fake.service.bridge.booted()
    try:
        yield
    finally:
        fake.valve.open.set()
        await fake.service.bridge.stop(timeout_s=5)


async def until(condition: Callable[[], bool]) -> None:
    """Wait, at most two seconds, for something that another thread does."""
    for _ in range(400):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


def idle(fake: Fake) -> bool:
    return not fake.service.engine.has_work and fake.service.engine.snapshot().n_running == 0


class DawdlingQueue(SimpleQueue[Any]):
    """Whoever reads it has run what was put before the one who put it goes on."""

    def put(self, item: Any, *args: Any) -> None:
        super().put(item, *args)
        time.sleep(0.05)


def test_a_flush_may_be_looked_at_before_it_is_wholly_queued() -> None:
    fake = make_fake()
    fake.service.bridge._commands = DawdlingQueue()

    async def run() -> None:
        async with running(fake):
            assert await fake.service.bridge.flush(timeout_s=1)

    asyncio.run(run())


def test_health_during_boot_and_after() -> None:
    started = threading.Event()
    fake = make_fake()
    boot = fake.service.bridge._boot

    def slow_boot() -> Engine:
        started.wait()
        return boot()

    fake = make_fake(boot=slow_boot)

    async def run() -> None:
        fake.service.bridge.start()
        early = await Call(fake.app, "/health", method="GET").run()
        assert (early.status, early.json()) == (503, {"status": "booting"})
        for path, body in ((COMPLETIONS, LONG), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
            refused = await Call(fake.app, path, body).run()
            assert (refused.status, refused.json()["error"]["code"]) == (503, "not_ready")
            assert refused.headers["retry-after"] == "1"
        for path in ("/v1/models", "/server_info", "/metrics", "/flush_cache", "/health_generate", "/v1/loads"):
            assert (await Call(fake.app, path, method="GET").run()).status == 503
        started.set()
        await fake.service.bridge.booted()
        ready = await Call(fake.app, "/health", method="GET").run()
        assert (ready.status, ready.json()) == (200, {"status": "ready"})
        await fake.service.bridge.stop(timeout_s=5)

    asyncio.run(run())


def test_boot_that_fails_keeps_its_error() -> None:
    def boot() -> Engine:
        raise MemoryRefusal("it does not fit.")

    fake = make_fake(boot=boot)

    async def run() -> None:
        fake.service.bridge.start()
        await fake.service.bridge.booted()
        assert fake.service.bridge.state is State.FAILED
        assert isinstance(fake.service.bridge.failure, MemoryRefusal)
        assert not fake.service.bridge.was_ready
        assert (await Call(fake.app, "/health", method="GET").run()).status == 503

    asyncio.run(run())


def test_health_while_the_engine_is_inside_a_step() -> None:
    fake = make_fake(is_open=False)

    async def run() -> None:
        async with running(fake):
            call = asyncio.create_task(Call(fake.app, COMPLETIONS, LONG).run())
            await until(lambda: fake.service.engine.has_work)
            start_s = time.monotonic()
            for path in ("/health", "/v1/models", "/server_info", "/metrics", "/v1/loads"):
                assert (await Call(fake.app, path, method="GET").run()).status == 200
            assert time.monotonic() - start_s < 0.5
            assert fake.valve.n_steps == 0
            fake.valve.open.set()
            assert (await call).json()["choices"][0]["text"] == said("abc", 200, ignore_eos=True)

    asyncio.run(run())


def test_long_prompts_are_tokenised_beside_the_event_loop() -> None:
    fake = make_fake(context_len=8192, n_pages=8192, chunk=4096)

    async def run() -> None:
        async with running(fake):
            tokenizer: Any = fake.service.engine.tokenizer
            plain, threads = tokenizer.encode, []

            def encode(text: str, *, special_tokens: bool = True) -> list[int]:
                threads.append(threading.current_thread() is threading.main_thread())
                return plain(text, special_tokens=special_tokens)

            tokenizer.encode = encode
            for prompt in ("abc", "a" * 4000):
                assert (await Call(fake.app, COMPLETIONS, {"prompt": prompt, "max_tokens": 2}).run()).status == 200
            assert threads == [True, False]

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, "/generate"])
def test_client_that_leaves_ends_its_request(path: str, stream: bool) -> None:
    fake = make_fake()
    fake.valve.delay_s = 0.002
    body = {**LONG, "stream": stream, "n": 2}
    if path == "/generate":
        sampling = {"max_new_tokens": 200, "ignore_eos": True, "n": 2}
        body = {"text": "abc", "stream": stream, "sampling_params": sampling}

    async def run() -> None:
        async with running(fake):
            call = Call(fake.app, path, body)
            task = asyncio.create_task(call.run())
            await until(lambda: fake.valve.n_steps > 3)
            if stream:
                await call.got_some.wait()
            call.gone.set()
            await task
            await until(lambda: idle(fake))
            assert fake.valve.n_steps < 150
            assert fake.world.scheduler.book.totals.finished_requests == 2
            finished = fake.service.meters.values("twinpool:finished_requests_total")
            assert finished == {("abort",): 2.0}
            fake.world.scheduler.check()

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_while_it_waits(stream: bool) -> None:
    fake = make_fake(is_open=False, max_running=1)

    async def run() -> None:
        async with running(fake):
            first = asyncio.create_task(Call(fake.app, COMPLETIONS, {**LONG, "max_tokens": 5}).run())
            await until(lambda: fake.service.engine.has_work)
            # This one is not even in the engine's queue: the engine sits in its first step.
            call = Call(fake.app, COMPLETIONS, {**LONG, "stream": stream})
            second = asyncio.create_task(call.run())
            await until(lambda: not fake.service.bridge._commands.empty())
            call.gone.set()
            await second
            fake.valve.open.set()
            assert (await first).status == 200
            await until(lambda: idle(fake))
            assert fake.valve.n_steps <= 6
            assert not fake.service.bridge._streams

    asyncio.run(run())


def test_full_queue_is_503_with_retry_after() -> None:
    fake = make_fake(is_open=False, max_running=1)
    object.__setattr__(fake.world.scheduler.shape, "max_queued_requests", 2)

    async def run() -> None:
        async with running(fake):
            calls = [asyncio.create_task(Call(fake.app, COMPLETIONS, {**LONG, "max_tokens": 5}).run())]
            await until(lambda: fake.service.engine.has_work)
            calls += [
                asyncio.create_task(Call(fake.app, COMPLETIONS, {**LONG, "max_tokens": 5}).run()) for _ in range(5)
            ]
            await asyncio.sleep(0.02)
            fake.valve.open.set()
            done = await asyncio.gather(*calls)
            assert sorted(call.status or 0 for call in done) == [200, 200, 200, 503, 503, 503]
            refused = next(call for call in done if call.status == 503)
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "queue_full"
            assert "--max-queued-requests" in refused.json()["error"]["message"]

    asyncio.run(run())


def test_a_batch_that_does_not_fit_the_queue_leaves_nothing() -> None:
    fake = make_fake(max_running=1)
    object.__setattr__(fake.world.scheduler.shape, "max_queued_requests", 3)

    async def run() -> None:
        async with running(fake):
            call = await Call(fake.app, COMPLETIONS, {**LONG, "prompt": ["abc", "cab"], "n": 2}).run()
            assert call.status == 503
            await until(lambda: idle(fake))
            assert fake.valve.n_steps == 0
            assert (await Call(fake.app, COMPLETIONS, {**LONG, "n": 3}).run()).status == 200

    asyncio.run(run())


def test_drain_finishes_what_runs_and_takes_no_more() -> None:
    fake = make_fake()
    fake.valve.delay_s = 0.001
    bridge = fake.service.bridge

    async def run() -> None:
        async with running(fake):
            call = Call(fake.app, COMPLETIONS, {**LONG, "stream": True})
            task = asyncio.create_task(call.run())
            await call.got_some.wait()
            bridge.drain()
            drained = asyncio.create_task(bridge.drained())
            await asyncio.sleep(0)
            assert not drained.done()
            refused = await Call(fake.app, COMPLETIONS, LONG).run()
            assert (refused.status, refused.json()["error"]["code"]) == (503, "shutting_down")
            health = await Call(fake.app, "/health", method="GET").run()
            assert (health.status, health.json()) == (503, {"status": "draining"})
            await drained
            await task
            assert call.events()[-1] == "[DONE]"
            text = "".join(event["choices"][0]["text"] for event in call.events()[:-1])
            assert text == said("abc", 200, ignore_eos=True)

    asyncio.run(run())


def test_stop_ends_what_runs_with_an_error() -> None:
    fake = make_fake()
    fake.valve.delay_s = 0.005

    async def run() -> None:
        async with running(fake):
            stream, whole = Call(fake.app, COMPLETIONS, {**LONG, "stream": True}), Call(fake.app, COMPLETIONS, LONG)
            tasks = [asyncio.create_task(call.run()) for call in (stream, whole)]
            await stream.got_some.wait()
            await fake.service.bridge.stop(timeout_s=5)
            await asyncio.gather(*tasks)
            assert stream.status == 200
            assert stream.events()[-1]["error"]["code"] == "shutting_down"
            assert (whole.status, whole.json()["error"]["code"]) == (503, "shutting_down")

    asyncio.run(run())


@pytest.mark.parametrize("hurry", [False, True])
def test_what_waits_for_the_disk_is_written_before_the_end_unless_somebody_is_in_a_hurry(hurry, monkeypatch) -> None:
    """The engine takes its time to close, longer than is waited for an engine that does not stop."""
    monkeypatch.setattr("twinpool.server.run._STOP_WAIT_S", 0.1)
    fake, written = make_fake(), threading.Event()

    async def run() -> None:
        bridge, at_once = fake.service.bridge, asyncio.Event()
        bridge.start()
        await bridge.booted()
        monkeypatch.setattr(bridge.engine, "close", lambda: written.wait(0.6))
        ending = asyncio.create_task(_end(bridge, at_once))
        if hurry:
            await asyncio.sleep(0.05)
            at_once.set()
        await ending
        assert bridge._ended.is_set() != hurry
        written.set()

    asyncio.run(run())


def test_failed_step_ends_its_requests_and_the_server_goes_on() -> None:
    fake = make_fake()

    async def run() -> None:
        async with running(fake):
            fake.valve.raise_at = RuntimeError("a kernel broke")
            whole = await Call(fake.app, COMPLETIONS, LONG).run()
            assert (whole.status, whole.json()["error"]["type"]) == (500, "server_error")
            assert "a kernel broke" in whole.json()["error"]["message"]
            stream = await Call(fake.app, CHAT, {"messages": [{"role": "user", "content": "a"}], "stream": True}).run()
            assert stream.status == 200
            assert "a kernel broke" in stream.events()[-1]["error"]["message"]
            fake.valve.raise_at = None
            assert (await Call(fake.app, COMPLETIONS, LONG).run()).status == 200

    asyncio.run(run())


def test_broken_invariant_answers_everybody_and_says_unhealthy() -> None:
    fake = make_fake()
    fake.valve.delay_s = 0.002

    async def run() -> None:
        async with running(fake):
            calls = [Call(fake.app, COMPLETIONS, {**LONG, "stream": stream}) for stream in (True, False)]
            tasks = [asyncio.create_task(call.run()) for call in calls]
            await calls[0].got_some.wait()

            def broken(plan: object, result: object) -> None:
                raise AssertionError("a page has two owners")

            fake.world.scheduler.commit = broken
            await asyncio.gather(*tasks)
            assert calls[0].events()[-1]["error"]["code"] == "engine_failed"
            assert (calls[1].status, calls[1].json()["error"]["code"]) == (500, "engine_failed")
            assert "two owners" in calls[1].json()["error"]["message"]
            assert (await Call(fake.app, "/health", method="GET").run()).json() == {"status": "failed"}
            for path, method in ((COMPLETIONS, "POST"), ("/flush_cache", "GET"), ("/health_generate", "GET")):
                late = await Call(fake.app, path, LONG if method == "POST" else None, method=method).run()
                assert (late.status, late.json()["error"]["code"]) == (500, "engine_failed")

    asyncio.run(run())


def test_bug_in_a_route_is_a_500_and_not_the_end() -> None:
    fake = make_fake()

    async def run() -> None:
        async with running(fake):
            tokenizer: Any = fake.service.engine.tokenizer
            call = Call(fake.app, COMPLETIONS, {"prompt": "XYZ"})  # the letter tokenizer asserts on it
            with pytest.raises(AssertionError):
                await call.run()
            assert (call.status, call.json()["error"]["code"]) == (500, "internal_error")
            assert tokenizer.encode("a") == [1]
            assert (await Call(fake.app, COMPLETIONS, LONG).run()).status == 200

    asyncio.run(run())
