"""A real server on a scripted ring: callers that leave early, and callers that do not read."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from proto.messages import (
    Finish,
    TokenizeCall,
)
from quintet_client.v1 import inference_pb2
from tests.server_ring import (
    GENERATE,
    STREAM,
    FakeRing,
    calling,
    eventually,
    is_idle,
    make_delta,
    read,
    ring_and_client,
    run,
)

pytestmark = pytest.mark.slow


Leave = Callable[[FakeRing, int], Awaitable[None]]


async def leave_by_cancel(ring: FakeRing, deltas: int, method: str = STREAM) -> None:
    async with calling(ring) as channel:
        call = start(channel, method)
        await progress(ring, deltas)
        call.cancel()
        await eventually(lambda: ring.aborted)


async def leave_by_closing(ring: FakeRing, deltas: int) -> None:
    async with calling(ring) as channel:
        start(channel, STREAM)
        await progress(ring, deltas)
    await eventually(lambda: ring.aborted)


async def leave_by_deadline(ring: FakeRing, deltas: int) -> None:
    async with calling(ring) as channel:
        call = start(channel, STREAM, timeout=0.3)
        await progress(ring, deltas)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: ring.aborted)


async def leave_unary(ring: FakeRing, deltas: int) -> None:
    await leave_by_cancel(ring, deltas, GENERATE)


def start(channel: Any, method: str, timeout: float | None = None) -> Any:
    request = inference_pb2.GenerateRequest(text="hi", logprobs=5).SerializeToString()
    invoke = channel.unary_unary if method == GENERATE else channel.unary_stream
    return invoke(method)(request, timeout=timeout)


async def progress(ring: FakeRing, deltas: int) -> None:
    """Until the ring has the second request, and has answered it with so many tokens."""
    submit = (await ring.submitted(2))[-1]
    for position in range(deltas):
        ring.deltas(make_delta(submit, position, "x"))
    await asyncio.sleep(0.05)


@pytest.mark.parametrize("deltas", [0, 1, 5])
@pytest.mark.parametrize("leave", [leave_by_cancel, leave_by_closing, leave_by_deadline, leave_unary])
def test_leaving_stops_the_work(leave: Leave, deltas: int) -> None:
    """Before the first token and after some; each ends with an abort and nothing in flight."""

    async def main() -> None:
        async with ring_and_client() as (ring, client):
            ring.behave = ring.only_warm_up
            stays = asyncio.create_task(client.generate("other", request_id="other"))
            (other,) = await ring.submitted()
            await leave(ring, deltas)
            (left,) = [submit for submit in ring.submits if submit is not other]
            assert ring.aborted == [left.rid]
            ring.deltas(make_delta(left, deltas, "late"))
            ring.deltas(make_delta(other, 0, "alive", finish=Finish.STOP))
            assert (await stays).outputs[0].text == "alive"
            assert await is_idle(client)
            assert ring.aborted == [left.rid]

    run(main())


@pytest.mark.parametrize("method", [GENERATE, STREAM])
def test_leaving_at_once(method: str) -> None:
    """The call may be gone before its handler ran, or while it tells the id."""

    async def main() -> None:
        async with ring_and_client() as (ring, client), calling(ring) as channel:
            ring.behave = ring.only_warm_up
            await channel.channel_ready()
            for i in range(40):
                call = start(channel, method)
                await asyncio.sleep(i / 10_000)
                call.cancel()
            await eventually(lambda: sorted(ring.aborted) == sorted(submit.rid for submit in ring.submits))
            assert await is_idle(client)

    run(main())


def test_leaving_a_write_that_waits(caplog: pytest.LogCaptureFixture) -> None:
    """It is no bug, and not logged as one."""

    async def main() -> None:
        async with ring_and_client(max_stream_buffer_bytes=1 << 30) as (ring, client), calling(ring) as channel:
            ring.behave = ring.only_warm_up
            lazy = start(channel, STREAM)
            (submit,) = await ring.submitted()
            assert submit.params.deadline == 0
            block = "z" * 100_000
            for i in range(30):  # far more than the transport takes
                ring.deltas(make_delta(submit, i * len(block), block, logprobs=None))
            await asyncio.sleep(0.2)
            lazy.cancel()
            await eventually(lambda: ring.aborted == [submit.rid])
            assert await is_idle(client)

    run(main())
    assert [r for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")] == []


def test_leaving_a_tokenize_call() -> None:
    async def main() -> None:
        async with ring_and_client() as (ring, client):
            ring.behave = ring.only_warm_up
            task = asyncio.create_task(client.tokenize("hi"))
            await eventually(lambda: ring.of(TokenizeCall))
            assert not await is_idle(client)
            task.cancel()
            await asyncio.sleep(0.1)
            assert await is_idle(client)

    run(main())


def test_a_hundred_streams_left_at_once() -> None:
    async def main() -> None:
        async with ring_and_client() as (ring, client):
            ring.behave = ring.only_warm_up
            tasks = [asyncio.create_task(read(client)) for _ in range(100)]
            submits = await ring.submitted(100)
            for task in tasks:
                task.cancel()
            await eventually(lambda: len(ring.aborted) == 100)
            assert sorted(ring.aborted) == sorted(submit.rid for submit in submits)
            assert await is_idle(client)

    run(main())


def test_a_client_that_does_not_read_is_cut_off_alone() -> None:
    """Its bound is small beside what it is sent; a reader beside it gets everything."""

    async def main() -> None:
        window = ("grpc.http2.lookahead_bytes", 1 << 16), ("grpc.http2.bdp_probe", 0)
        async with ring_and_client() as (ring, client), calling(ring, *window) as channel:
            ring.behave = ring.only_warm_up
            lazy = start(channel, STREAM)
            (slow,) = await ring.submitted()
            reader = asyncio.create_task(read(client, "b"))
            fast = (await ring.submitted(2))[1]
            position, block = 0, "z" * 2000
            while not ring.aborted:
                assert position < 4_000_000, "it was never cut off"
                for submit in (slow, fast):
                    ring.deltas(make_delta(submit, position, block, logprobs=None))
                position += len(block)
                await asyncio.sleep(0.002)
            assert ring.aborted == [slow.rid]
            ring.deltas(make_delta(fast, position, "!", finish=Finish.LENGTH))
            chunks = await reader
            assert sum(len(chunk.text) for chunk in chunks) == position + 1
            await asyncio.sleep(0.05)
            assert await is_idle(client)
            # Once it reads again, it gets what was on its way, and then the reason.
            received = 0
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for raw in lazy:
                    received += len(inference_pb2.GenerateChunk.FromString(raw).text)
            assert await lazy.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "does not read" in await lazy.details()
            assert 0 < received < position

    run(main())


def test_deltas_that_are_ready_together_come_together() -> None:
    async def main() -> None:
        async with ring_and_client() as (ring, client):
            ring.behave = ring.only_warm_up
            task = asyncio.create_task(read(client))
            (submit,) = await ring.submitted()
            last = make_delta(submit, 50, "", finish=Finish.LENGTH)
            ring.deltas(*(make_delta(submit, i, "x") for i in range(50)), last)
            chunks = await task
            assert [chunk.text for chunk in chunks] == ["x" * 50]

    run(main())
