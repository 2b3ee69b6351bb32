"""A real server on a scripted ring: how calls are refused and fail."""

import asyncio
from functools import partial

import grpc
import pytest

from proto.messages import (
    Finish,
    Message,
    RejectCode,
    Submit,
    TokenizeCall,
)
from tests.server_ring import (
    GENERATE,
    calling,
    error_of,
    is_idle,
    make_delta,
    read,
    ring_and_client,
    run,
    serving,
)

pytestmark = pytest.mark.slow


def test_errors_carry_details() -> None:
    async def main() -> None:
        async with ring_and_client() as (_ring, client):
            error = await error_of(client.generate("hi", top_p=0.0))
            assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
            assert error.violations[0].field == "sampling.top_p"
            assert "0.0" in error.violations[0].description
            error = await error_of(client.generate("hi", model="other"))
            assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL")

    run(main())


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        (RejectCode.INVALID, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
        (RejectCode.EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"),
        (RejectCode.DEADLINE, grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE"),
        (RejectCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"),
        (RejectCode.INTERNAL, grpc.StatusCode.INTERNAL, "BUG"),
    ],
)
def test_refusals_of_inner_stages(code: RejectCode, status: grpc.StatusCode, reason: str) -> None:
    async def main() -> None:
        async with ring_and_client() as (ring, client):

            def refuse(message: Message) -> None:
                if isinstance(message, Submit | TokenizeCall):
                    ring.reject(message, code, "said inside")

            ring.behave = refuse
            for call in (client.generate, partial(read, client), client.tokenize):
                error = await error_of(call("hi"))
                assert (error.code, error.reason) == (status, reason)
                assert "said inside" in error.message
                assert error.retry_after == (1.5 if code is RejectCode.EXHAUSTED else None)
            assert await is_idle(client)
            assert ring.aborted == []

    run(main())


@pytest.mark.parametrize("raw", [b"\xff\xff", b"\x1a\x02\xff\xfe", b"\x1a\x03\xed\xa0\x80"])
def test_bytes_that_are_no_message(raw: bytes) -> None:
    """Cut varints, invalid UTF-8 and a lone surrogate in `text`."""

    async def main() -> None:
        async with serving() as ring, calling(ring) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await channel.unary_unary(GENERATE)(raw, timeout=5)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert ring.submits == []

    run(main())


def test_messages_over_the_limit() -> None:
    async def main() -> None:
        async with ring_and_client(max_message_bytes=1 << 20) as (ring, client):
            limits = (await client.get_server_info()).limits
            assert limits.max_message_bytes == 1 << 20
            error = await error_of(client.generate([99] * (2 << 20)))
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(1 << 20) in error.message
            error = await error_of(client.generate("x" * (limits.max_prompt_bytes + 1)))
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert str(limits.max_prompt_bytes) in error.message
            assert ring.submits == []
            assert (await client.generate("hi")).outputs[0].text == "hello"

    run(main())


def test_what_is_not_built() -> None:
    async def main() -> None:
        async with serving() as ring, calling(ring) as channel:
            for method in (
                "Inference/PinPrefix",
                "Inference/UnpinPrefix",
                "Control/StartProfile",
                "Control/StopProfile",
            ):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await channel.unary_unary(f"/quintet.v1.{method}")(b"", timeout=5)
                assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
            watch = channel.unary_stream("/quintet.v1.Control/WatchMetrics")(b"", timeout=5)
            assert await watch.code() is grpc.StatusCode.UNIMPLEMENTED

    run(main())


def test_a_bug_has_an_id_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with ring_and_client() as (ring, client):
            ring.behave = ring.only_warm_up
            task = asyncio.create_task(client.generate("hi", logprobs=1))
            (submit,) = await ring.submitted()
            row = make_delta(submit, 0, "a", ids=b"\x01\x02\x03\x04\x05", finish=Finish.STOP)  # no whole ids
            ring.deltas(row)
            error = await error_of(task)
            assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "BUG")
            error_id = error.message.rpartition(" ")[2]
            assert f"error {error_id}" in caplog.text
            assert await is_idle(client)

    run(main())


def test_overload_tells_when_to_come_back() -> None:
    async def main() -> None:
        async with ring_and_client(max_in_flight_requests=1) as (ring, client):
            ring.behave = ring.only_warm_up
            task = asyncio.create_task(client.generate("hi"))
            (submit,) = await ring.submitted()
            for call in (client.generate("hi"), client.tokenize("hi")):
                error = await error_of(call)
                assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
                assert error.retry_after is not None
            ring.deltas(make_delta(submit, 0, "a", finish=Finish.STOP))
            await task
            ring.behave = ring.play
            assert (await client.generate("hi")).outputs[0].text == "hello"

    run(main())
