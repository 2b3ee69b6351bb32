"""A real server on a scripted ring: what callers see, and what the ring is told."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from proto.ids import StageKind
from proto.messages import (
    Census,
    CensusReply,
    Drained,
    DrainRequest,
    Finish,
    Flush,
    Heartbeat,
    Message,
    RejectCode,
    Serving,
    StageState,
    Submit,
    TokenizeCall,
)
from quintet_client import AsyncClient, ChatMessage, GenerateOptions, QuintetError
from quintet_client.v1 import control_pb2, inference_pb2
from tests.metrics_check import assert_complete
from tests.server_ring import EOS, FakeRing, calling, eventually, make_delta, make_world, run, serving

pytestmark = pytest.mark.slow

GENERATE = "/quintet.v1.Inference/Generate"
STREAM = "/quintet.v1.Inference/GenerateStream"


@contextlib.asynccontextmanager
async def ring_and_client(**options: Any) -> AsyncIterator[tuple[FakeRing, AsyncClient]]:
    async with serving(**options) as ring, AsyncClient(ring.address, timeout=10, retry=False) as client:
        yield ring, client


async def error_of(call: Awaitable[object]) -> QuintetError:
    with pytest.raises(QuintetError) as caught:
        await call
    return caught.value


async def read(client: AsyncClient, prompt: str = "hi", **options: Any) -> list[inference_pb2.GenerateChunk]:
    return [chunk async for chunk in client.generate_stream(prompt, **options)]


async def is_idle(client: AsyncClient) -> bool:
    load = await client.get_load()
    return (load.in_flight_requests, load.in_flight_bytes) == (0, 0)


# ------------------------------------------------------------------ answers


def test_stream_and_unary_agree() -> None:
    async def main() -> None:
        async with ring_and_client() as (ring, client):
            ring.text = "héllo 😀 wörld"
            cases: list[GenerateOptions] = [{}, {"logprobs": 0}, {"logprobs": 3}]
            for options in cases:
                chunks = await read(client, **options)
                answer = await client.generate("hi", **options)
                output = answer.outputs[0]
                assert "".join(chunk.text for chunk in chunks) == output.text == ring.text
                ids = [i for chunk in chunks for i in chunk.token_ids]
                assert ids == list(output.token_ids)
                parts: list[Any] = [*chunks, output]
                for part in parts:
                    alternatives = options.get("logprobs", -1)
                    assert len(part.logprobs.token_logprobs) == (len(part.token_ids) if alternatives >= 0 else 0)
                    assert len(part.logprobs.top) == (len(part.token_ids) if alternatives > 0 else 0)
                assert chunks[-1].usage == answer.usage
                assert answer.usage.completion_tokens == len(ids)
                assert chunks[-1].finish == output.finish
                assert output.finish.eos_token_id == EOS
                assert (answer.timings.queue_ms, answer.timings.prefill_ms) == (2.0, 3.0)

    run(main())


def test_first_chunk_has_the_prompt_and_the_last_the_end() -> None:
    async def main() -> None:
        async with ring_and_client() as (ring, client):
            ring.behave = ring.only_warm_up
            task = asyncio.create_task(read(client, seed=9, request_id="mine"))
            (submit,) = await ring.submitted()
            for start, character in enumerate("abc"):
                ring.deltas(make_delta(submit, start, character))
                await asyncio.sleep(0.05)
            ring.deltas(make_delta(submit, 3, "", finish=Finish.LENGTH, timing=None))
            chunks = await task
            assert [chunk.text for chunk in chunks] == ["a", "b", "c", ""]
            assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 3]
            assert [chunk.HasField("prompt") for chunk in chunks] == [True, False, False, False]
            assert [chunk.HasField("finish") for chunk in chunks] == [False, False, False, True]
            assert [chunk.HasField("timings") for chunk in chunks] == [False, False, False, True]
            facts = chunks[0].prompt
            assert (facts.request_id, facts.model, facts.seed) == ("mine", "tiny", 9)
            assert (facts.prompt_tokens, facts.cached_tokens) == (4, 1)

    run(main())


def test_what_is_submitted() -> None:
    async def main() -> None:
        async with ring_and_client() as (ring, client):
            before = time.monotonic_ns()
            await client.generate([1, 2], timeout=5, stop_strings=["x"], work_class="batch")
            await client.generate([ChatMessage(role="user", content="hey")])
            ids, chat = ring.submits
            assert (ids.token_ids, ids.text, ids.chat, ids.attempt) == (bytes([1, 0, 0, 0, 2, 0, 0, 0]), None, None, 1)
            grpc_clocks_differ = 50 * 10**6
            assert before < ids.arrival < ids.params.deadline
            assert ids.params.deadline <= time.monotonic_ns() + 5 * 10**9 + grpc_clocks_differ
            assert abs(ids.now - time.time()) < 60
            assert ids.params.stop_strings == ("x",)
            assert chat.chat is not None
            assert [(m.role, m.content) for m in chat.chat] == [("user", "hey")]

    run(main())


def test_tokenize_detokenize_flush() -> None:
    async def main() -> None:
        async with ring_and_client() as (ring, client):
            tokens = await client.tokenize("abc", add_special_tokens=False)
            assert (list(tokens.token_ids), list(tokens.pieces)) == ([0, 1, 2], ["a", "b", "c"])
            assert ring.of(TokenizeCall)[0].add_special_tokens is False
            assert await client.detokenize([5, 6]) == "[5, 6]"
            assert (await error_of(client.detokenize([100]))).violations[0].field == "token_ids[0]"
            assert await client.flush_cache() == 7
            assert len(ring.of(Flush)) == 1
            assert await is_idle(client)

    run(main())


# ------------------------------------------------------------------ errors


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


# ------------------------------------------------------------------ ids


def test_ids_are_echoed_and_unique_while_live() -> None:
    async def main() -> None:
        async with ring_and_client() as (ring, client), calling(ring) as channel:
            ring.behave = ring.only_warm_up
            first = channel.unary_stream(STREAM)(
                inference_pb2.GenerateRequest(text="a", request_id="me").SerializeToString()
            )
            assert dict(await first.initial_metadata())["x-request-id"] == "me"
            await ring.submitted()
            both = await asyncio.gather(*(error_of(client.generate("b", request_id="me")) for _ in range(2)))
            assert {error.code for error in both} == {grpc.StatusCode.ALREADY_EXISTS}
            (submit,) = ring.submits
            ring.deltas(make_delta(submit, 0, "unharmed", finish=Finish.STOP))
            chunk = inference_pb2.GenerateChunk.FromString(await first.read())
            assert chunk.text == "unharmed"
            assert await first.code() is grpc.StatusCode.OK
            ring.behave = ring.play
            await client.generate("again", request_id="me")
            made = channel.unary_unary(GENERATE)(inference_pb2.GenerateRequest(text="a").SerializeToString())
            answer = inference_pb2.GenerateResponse.FromString(await made)
            assert dict(await made.initial_metadata())["x-request-id"] == answer.prompt.request_id != ""

    run(main())


def test_abort_by_id_finishes_the_stream() -> None:
    async def main() -> None:
        async with ring_and_client() as (ring, client):
            ring.behave = ring.only_warm_up
            stream = asyncio.create_task(read(client, request_id="one"))
            unary = asyncio.create_task(client.generate("hi", request_id="two"))
            one, two = sorted(await ring.submitted(2), key=lambda submit: submit.rid)
            ring.deltas(make_delta(one, 0, "ab"), make_delta(two, 0, "cd"))
            await asyncio.sleep(0.05)
            reply = await client.abort(["one", "two", "one", "three"])
            assert (list(reply.aborted), list(reply.unknown)) == (["one", "two"], ["three"])
            chunks = await stream
            assert "".join(chunk.text for chunk in chunks) in ("ab", "cd")
            assert chunks[-1].finish.reason == inference_pb2.FINISH_REASON_ABORT
            assert (await unary).outputs[0].finish.reason == inference_pb2.FINISH_REASON_ABORT
            await eventually(lambda: sorted(ring.aborted) == [one.rid, two.rid])
            assert (await error_of(client.abort([]))).code is grpc.StatusCode.INVALID_ARGUMENT

    run(main())


# ------------------------------------------------------------------ leaving early

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


# ------------------------------------------------------------------ readers


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


# ------------------------------------------------------------------ losses


def test_a_hole_ends_the_stream() -> None:
    async def main() -> None:
        async with ring_and_client() as (ring, client):
            ring.behave = ring.only_warm_up
            task = asyncio.create_task(read(client))
            (submit,) = await ring.submitted()
            ring.deltas(make_delta(submit, 0, "ab"), make_delta(submit, 3, "d"))
            error = await error_of(task)
            assert (error.code, "lost" in error.message) == (grpc.StatusCode.UNAVAILABLE, True)
            await eventually(lambda: ring.aborted == [submit.rid])

    run(main())


def test_census_and_what_the_scheduler_does_not_know() -> None:
    async def main() -> None:
        async with ring_and_client() as (ring, client):
            ring.behave = ring.only_warm_up
            task = asyncio.create_task(client.generate("hi"))
            (submit,) = await ring.submitted()
            ring.accept(submit)
            await eventually(lambda: any(census.rids for census in ring.of(Census)))
            census = next(census for census in ring.of(Census) if census.rids)
            for _ in range(3):
                ring.send(CensusReply(rids=census.rids, attempts=census.attempts))
            assert (await error_of(task)).code is grpc.StatusCode.UNAVAILABLE

    run(main())


@pytest.mark.parametrize(
    "world",
    [
        make_world(failure="worker 0 died of signal 9"),
        make_world(dead=StageKind.DETOKENIZER),
        make_world(incarnation=2),
    ],
    ids=["failure", "dead", "replaced"],
)
def test_a_death_inside_ends_every_call_at_once(world: Any) -> None:
    async def main() -> None:
        async with ring_and_client() as (ring, client):
            ring.behave = lambda _: None
            stub = health_pb2_grpc.HealthStub(channel := grpc.aio.insecure_channel(ring.address))
            calls = [asyncio.create_task(error_of(read(client))) for _ in range(4)]
            calls += [asyncio.create_task(error_of(client.generate("hi")))]
            calls += [asyncio.create_task(error_of(client.tokenize("hi")))]
            await ring.submitted(5)
            await eventually(lambda: ring.of(TokenizeCall))
            ring.tell_world(world)
            started = time.monotonic()
            errors = await asyncio.gather(*calls)
            assert time.monotonic() - started < 0.5
            assert {error.code for error in errors} == {grpc.StatusCode.UNAVAILABLE}
            assert all("died" in error.message or "dead" in error.message for error in errors)
            assert (await error_of(client.generate("hi"))).code is grpc.StatusCode.UNAVAILABLE
            assert await check(stub, "") == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await check(stub, "live") == health_pb2.HealthCheckResponse.SERVING
            await channel.close()

    run(main())


# ------------------------------------------------------------------ life


async def check(stub: Any, service: str) -> int:
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status)


def test_not_serving_until_a_token_came_round() -> None:
    async def main() -> None:
        serving_status = health_pb2.HealthCheckResponse.SERVING
        async with serving(make_world(StageState.STARTING)) as ring, calling(ring) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            client = AsyncClient(ring.address, timeout=5, retry=False)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await check(stub, "live") == serving_status
            for call in (client.generate("hi"), client.tokenize("hi"), client.get_model_info()):
                error = await error_of(call)
                assert (error.code, "starting" in error.message) == (grpc.StatusCode.UNAVAILABLE, True)
            info = await client.get_server_info()
            while not info.processes:
                info = await client.get_server_info()
            assert info.processes[0].state == control_pb2.PROCESS_STATE_STARTING

            ring.behave = lambda _: None
            ring.tell_world(make_world())
            await eventually(lambda: ring.of(Submit))
            await asyncio.sleep(0.05)
            assert "starting" in (await error_of(client.generate("hi"))).message
            assert await check(stub, "quintet.v1.Inference") != serving_status
            (warm_up,) = ring.of(Submit)
            ring.deltas(make_delta(warm_up, 0, "x", finish=Finish.LENGTH))
            await eventually(lambda: ring.of(Serving))
            assert (await watch.read()).status == serving_status
            for service in ("", "live", "quintet.v1.Inference", "quintet.v1.Control"):
                assert await check(stub, service) == serving_status
            await client.close()

    run(main())


def test_warm_up_is_tried_again() -> None:
    async def main() -> None:
        async with serving(make_world(StageState.STARTING)) as ring:
            refused: list[Message] = []

            def refuse_once(message: Message) -> None:
                if isinstance(message, Submit) and not refused:
                    refused.append(message)
                    ring.reject(message, RejectCode.EXHAUSTED, "not now")
                else:
                    ring.play(message)

            ring.behave = refuse_once
            ring.tell_world(make_world())
            await eventually(lambda: ring.of(Serving))
            assert len(refused) == 1

    run(main())


def test_drain_finishes_what_runs_and_refuses_the_rest() -> None:
    async def main() -> None:
        async with ring_and_client() as (ring, client), calling(ring) as channel:
            ring.behave = ring.only_warm_up
            task = asyncio.create_task(read(client))
            (submit,) = await ring.submitted()
            await client.drain()
            await eventually(lambda: ring.of(DrainRequest))
            ring.tell_world(make_world(draining=True))
            stub = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
            while (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING:
                pass
            error = await error_of(client.generate("hi"))
            assert (error.code, "draining" in error.message) == (grpc.StatusCode.UNAVAILABLE, True)
            assert (await client.get_server_info()).draining
            ring.tell_world(make_world(draining=True))
            await asyncio.sleep(0.1)
            assert not ring.of(Drained)
            ring.deltas(make_delta(submit, 0, "done", finish=Finish.STOP))
            assert (await task)[-1].text == "done"
            await eventually(lambda: ring.of(Drained))
            ring.tell_world(make_world(draining=True))
            await asyncio.sleep(0.1)
            assert len(ring.of(Drained)) == 1

    run(main())


def test_an_idle_server_is_drained_at_once() -> None:
    async def main() -> None:
        async with serving() as ring:
            ring.tell_world(make_world(draining=True))
            await eventually(lambda: ring.of(Drained))

    run(main())


def test_stop_ends_streams_within_a_second() -> None:
    async def main() -> None:
        async with ring_and_client() as (ring, client):
            ring.behave = ring.only_warm_up
            task = asyncio.create_task(error_of(read(client)))
            await ring.submitted()
            ring.stop()
            started = time.monotonic()
            assert await ring.server == 0
            assert time.monotonic() - started < 1.5
            error = await task
            assert (error.code, error.message) == (grpc.StatusCode.UNAVAILABLE, "the server stops")

    run(main())


def test_a_taken_port_is_an_error() -> None:
    async def main() -> None:
        async with serving() as ring:
            with pytest.raises(RuntimeError, match="ended with 2"):
                async with serving(port=int(ring.address.rpartition(":")[2])):
                    pass

    run(main())


def test_heartbeats_count() -> None:
    async def main() -> None:
        async with ring_and_client() as (ring, client):
            await client.generate("hi")
            await eventually(lambda: any(beat.counters.get("finished") == 2 for beat in ring.of(Heartbeat)))
            assert_complete(StageKind.SERVER, ring.of(Heartbeat)[-1])

    run(main())


def test_control_tells_what_the_ring_found() -> None:
    async def main() -> None:
        async with ring_and_client() as (_ring, client):
            model = await client.get_model_info("alias")
            assert (model.model, model.max_model_len, model.vocab_size, model.page_size) == ("tiny", 512, 100, 16)
            assert (await error_of(client.get_model_info("other"))).code is grpc.StatusCode.NOT_FOUND
            info = await client.get_server_info()
            kinds = [process.kind for process in info.processes]
            assert kinds == [kind + 1 for kind in list(StageKind)[1:]]
            assert {process.state for process in info.processes} == {control_pb2.PROCESS_STATE_READY}
            assert info.versions.keys() == {"quintet", "python", "grpcio", "protobuf", "schema"}
            assert all(value for _, value in info.limits.ListFields())
            assert len(info.limits.ListFields()) == len(info.limits.DESCRIPTOR.fields)
            (replica,) = (await client.get_load()).replicas
            assert (replica.running, replica.waiting) == (3, 4)
            assert (replica.pages_total, replica.pages_free, replica.pages_cached) == (64, 40, 8)
            assert replica.cache_hit_rate == 0.25

    run(main())


def test_reflection_lists_the_services() -> None:
    async def main() -> None:
        async with serving() as ring, calling(ring) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            names = {service.name for service in (await call.read()).list_services_response.service}
            wanted = {"quintet.v1.Inference", "quintet.v1.Control", "grpc.health.v1.Health"}
            assert wanted <= names

    run(main())
