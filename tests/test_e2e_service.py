"""The whole ring with the demo model: what a caller sees, and what the machine sees."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from engine.instance import Instance
from quintet_client import AsyncClient, Client, GenerateOptions, QuintetError
from quintet_client.v1 import control_pb2, inference_pb2

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(300)]

PROMPTS = {
    "english": "Once upon a time in a small village",
    "korean": "대한민국의 수도는 어디인가요? 한국어로 답해 주세요:",
    "chinese": "请用中文介绍一下北京的历史:",
    "arabic": "اكتب جملة عن البحر باللغة العربية:",
    "emoji": "Repeat these: 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇰🇷 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇰🇷",
    "code": "def fibonacci(n):\n    if n < 2:\n",
}


@pytest.fixture(scope="module")
def ring() -> Iterator[Instance]:
    with Instance.start(["--model", "demo", "--max-num-seqs", "64"]) as instance:
        yield instance


@pytest.fixture
def client(ring: Instance) -> Iterator[Client]:
    with Client(ring.address, timeout=120) as client:
        yield client


def wait_idle(client: Client, seconds: float = 5.0) -> control_pb2.ReplicaLoad:
    """The load once nothing runs; fails when that takes longer."""
    end = time.monotonic() + seconds
    while True:
        load = client.get_load()
        replica = load.replicas[0]
        if not (load.in_flight_requests or replica.running or replica.waiting):
            return replica
        assert time.monotonic() < end, f"still busy: {load}"
        time.sleep(0.1)


def test_five_processes_and_only_the_worker_holds_torch(ring: Instance, client: Client) -> None:
    processes = client.get_server_info().processes
    assert len({p.pid for p in processes}) == len(processes)
    titles = {p.title for p in processes}
    for stage in ("server 0", "tokenizer 0", "scheduler 0", "worker 0 rank 0", "detokenizer 0"):
        assert f"quintet {stage}" in titles
    client.generate("warm every path", max_new_tokens=8)
    for process in processes:
        cmdline = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert cmdline.startswith(process.title.encode())
        has_torch = "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
        assert has_torch == (process.kind == control_pb2.PROCESS_KIND_WORKER)
        if not has_torch:
            status = Path(f"/proc/{process.pid}/status").read_text()
            rss_kb = int(status.split("VmRSS:")[1].split()[0])
            assert rss_kb < 100 * 1024, f"{process.title} holds {rss_kb} KiB"


@pytest.mark.parametrize("kind", sorted(PROMPTS))
def test_joined_deltas_are_the_unary_text(client: Client, kind: str) -> None:
    """All four calls run at once, in one batch."""
    options: list[GenerateOptions] = [
        {"max_new_tokens": 32, "temperature": temperature, "seed": 5, "ignore_eos": True} for temperature in (0.0, 1.5)
    ]
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda given: client.generate(PROMPTS[kind], **given), options)
        streams = pool.map(lambda given: list(client.generate_stream(PROMPTS[kind], **given)), options)
    for answer, chunks in zip(answers, streams, strict=True):
        assert "".join(c.text for c in chunks) == answer.outputs[0].text
        ids = [i for c in chunks for i in c.token_ids]
        assert ids == list(answer.outputs[0].token_ids)
        assert len(ids) == 32 == chunks[-1].usage.completion_tokens


def test_byte_garbage_is_valid_text(client: Client) -> None:
    ids = client.tokenize("👩‍👩‍👧‍👦 naïve ÿ").token_ids
    half = list(ids)[: len(ids) // 3]
    unary = client.generate(half, max_new_tokens=32, temperature=2.0, seed=9, ignore_eos=True)
    streamed = list(client.generate_stream(half, max_new_tokens=32, temperature=2.0, seed=9, ignore_eos=True))
    assert "".join(c.text for c in streamed) == unary.outputs[0].text
    assert len(unary.outputs[0].token_ids) == 32


def test_tokenize_round_trip(client: Client) -> None:
    text = "A naïve café: 한국어, 中文, العربية, 👩‍👩‍👧‍👦."
    reply = client.tokenize(text, add_special_tokens=False)
    assert client.detokenize(reply.token_ids) == text
    assert len(reply.pieces) == len(reply.token_ids)


def test_reflection_lists_the_services(ring: Instance) -> None:
    with grpc.insecure_channel(ring.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = set(database.get_services())
        assert {"quintet.v1.Inference", "quintet.v1.Control", "grpc.health.v1.Health"} <= services
        service = DescriptorPool(database).FindServiceByName("quintet.v1.Inference")
        assert service.file.name == "quintet/v1/inference.proto"
        assert "GenerateStream" in service.methods_by_name
        for name in ("", "live", "quintet.v1.Inference"):
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_a_bad_request_harms_no_neighbour(client: Client) -> None:
    alone = client.generate("The sea is", max_new_tokens=24, temperature=0).outputs[0].text
    stream = client.generate_stream("The sea is", max_new_tokens=24, temperature=0)
    first = next(stream)
    for options in (
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"stop_token_ids": [10**6]},
        {"stop_strings": [""]},
        {"max_new_tokens": 10**6},
    ):
        with pytest.raises(QuintetError) as caught:
            client.generate("The sea is", **options)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.violations, caught.value
    assert first.text + "".join(c.text for c in stream) == alone


def test_deadline_ends_the_work(client: Client) -> None:
    with pytest.raises(QuintetError) as caught:
        client.generate("A very long story:", max_new_tokens=2000, ignore_eos=True, timeout=0.4)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_idle(client)


CANCELLED_BY_DEATH = """
import sys
from quintet_client import Client
with Client(sys.argv[1]) as client:
    for _ in client.generate_stream("Tell me about " + sys.argv[2], max_new_tokens=400, ignore_eos=True):
        print("got", flush=True)
"""


def test_two_hundred_streams_a_third_cancelled(ring: Instance, client: Client) -> None:
    client.flush_cache()
    idle = wait_idle(client)
    rng = random.Random(20)
    jobs = [(f"Item {i}: {'word ' * rng.randrange(1, 30)}", rng.randrange(4, 24)) for i in range(200)]
    doomed = set(rng.sample(range(200), 66))
    killed = [
        subprocess.Popen(
            [sys.executable, "-c", CANCELLED_BY_DEATH, ring.address, str(i)], stdout=subprocess.PIPE, text=True
        )
        for i in range(4)
    ]
    results: dict[int, list[int]] = {}

    async def one(client: AsyncClient, i: int) -> None:
        prompt, count = jobs[i]
        stop_after = rng.random() * 3 if i in doomed else None
        stream = client.generate_stream(prompt, max_new_tokens=400 if i in doomed else count, temperature=0)
        ids: list[int] = []

        async def read() -> None:
            async for chunk in stream:
                ids.extend(chunk.token_ids)

        if stop_after is None:
            await read()
            results[i] = ids
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(read(), stop_after)

    async def everything() -> None:
        async with AsyncClient(ring.address, timeout=200) as client:
            await asyncio.gather(*(one(client, i) for i in range(200)))

    async def and_kill() -> None:
        task = asyncio.create_task(everything())
        for process in killed:
            assert process.stdout
            await asyncio.to_thread(process.stdout.readline)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        await task

    asyncio.run(and_kill())
    replica = wait_idle(client)
    assert sorted(results) == [i for i in range(200) if i not in doomed]
    client.flush_cache()
    end = time.monotonic() + 10  # counters come with the heartbeat and the snapshot after it
    while client.get_load().replicas[0].pages_free != idle.pages_total:
        assert time.monotonic() < end, replica
        time.sleep(0.2)
    for i in rng.sample(sorted(results), 15):
        prompt, count = jobs[i]
        alone = client.generate(prompt, max_new_tokens=count, temperature=0)
        assert results[i] == list(alone.outputs[0].token_ids), prompt


def test_duplicate_ids_and_abort(client: Client) -> None:
    stream = client.generate_stream("Count:", request_id="twin", max_new_tokens=300, ignore_eos=True)
    next(stream)
    with pytest.raises(QuintetError) as caught:
        client.generate("Count:", request_id="twin", max_new_tokens=2)
    assert caught.value.code is grpc.StatusCode.ALREADY_EXISTS
    assert list(client.abort(["twin", "nobody"]).aborted) == ["twin"]
    last = list(stream)[-1]
    assert last.finish.reason == inference_pb2.FINISH_REASON_ABORT
    assert client.generate("Count:", request_id="twin", max_new_tokens=2).usage.completion_tokens == 2
