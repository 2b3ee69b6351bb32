"""A real server on a scripted ring: what it loses, when it serves, how it ends."""

import asyncio
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proto.ids import StageKind
from proto.messages import (
    Census,
    CensusReply,
    Drained,
    DrainRequest,
    Finish,
    Message,
    RejectCode,
    Serving,
    StageState,
    Submit,
    TokenizeCall,
)
from quintet_client import AsyncClient
from quintet_client.v1 import control_pb2
from tests.server_ring import (
    calling,
    error_of,
    eventually,
    make_delta,
    make_world,
    read,
    ring_and_client,
    run,
    serving,
)

pytestmark = pytest.mark.slow


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
