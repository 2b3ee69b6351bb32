"""A real server on a scripted ring: what callers get, and what the ring is told."""

import asyncio
import time
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from proto.ids import StageKind
from proto.messages import (
    Finish,
    Flush,
    Heartbeat,
    TokenizeCall,
)
from quintet_client import ChatMessage, GenerateOptions
from quintet_client.v1 import control_pb2, inference_pb2
from tests.metrics_check import assert_complete
from tests.server_ring import (
    EOS,
    GENERATE,
    STREAM,
    calling,
    error_of,
    eventually,
    is_idle,
    make_delta,
    read,
    ring_and_client,
    run,
    serving,
)

pytestmark = pytest.mark.slow


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
