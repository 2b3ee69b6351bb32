"""On the real ring: clients that stop reading are cut off with a clear status, and those who read notice nothing."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from engine.instance import Instance
from quintet_client import AsyncClient, Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MODEL = str(Path(__file__).resolve().parent.parent / "scripts" / "shapes" / "qwen3-0.6b")
LIMIT = 1 << 16  # --max-stream-buffer-bytes
LAZY, READERS = 16, 4
TOKENS, ASKED = 500, 30000
# Beside the limit: gRPC's write buffer of 64 KiB, and what Python needs for a call.
BYTES_A_STREAM = LIMIT + (1 << 16) + (1 << 15)

# Streams of a client whose gRPC takes 64 KiB ahead, as that of most languages does; a stopped one of Python's own would
# have announced more, and its kernel would take that. It reads the first chunk of each stream, stands still until it is
# told to go on, then reads what is left.
LAZY_CLIENT = """
import json, sys
import grpc
from quintet_client import methods
from quintet_client.errors import from_rpc_error
from quintet_client.requests import generate_request

method, options = methods.GENERATE_STREAM, (("grpc.http2.lookahead_bytes", 1 << 16), ("grpc.http2.bdp_probe", 0))
with grpc.insecure_channel(sys.argv[1], options=options) as channel:
    invoke = channel.unary_stream(method.path, request_serializer=method.request.SerializeToString,
                                  response_deserializer=method.response.FromString)
    request = generate_request([5, 6, 7], {"max_new_tokens": int(sys.argv[3]), "ignore_eos": True, "logprobs": 20})
    calls = [invoke(request) for _ in range(int(sys.argv[2]))]
    tokens = [len(next(call).token_ids) for call in calls]
    print("reading", flush=True)
    sys.stdin.readline()
    ends = []
    for i, call in enumerate(calls):
        try:
            for chunk in call:
                tokens[i] += len(chunk.token_ids)
            ends.append(("OK", "", "", tokens[i]))
        except grpc.RpcError as error:
            typed = from_rpc_error(error.code(), error.details(), error.trailing_metadata())
            ends.append((typed.code.name, typed.reason, typed.message, tokens[i]))
    print(json.dumps(ends))
"""


async def gaps(address: str, tokens: int = TOKENS) -> tuple[float, float]:
    """Milliseconds between the chunks of streams that are read: median and p99."""

    async def stream(client: AsyncClient) -> list[float]:
        chunks = client.generate_stream([1, 2, 3], max_new_tokens=tokens, ignore_eos=True, temperature=0.0)
        return [time.monotonic() async for _ in chunks]

    async with AsyncClient(address, timeout=60) as client:
        streams = await asyncio.gather(*(stream(client) for _ in range(READERS)))
    p50, p99 = np.percentile(np.concatenate([np.diff(times) for times in streams]) * 1e3, [50, 99])
    return float(p50), float(p99)


def wait_idle(client: Client, seconds: float) -> None:
    """Until no call is in flight."""
    end = time.monotonic() + seconds
    while client.get_load().in_flight_requests:
        assert time.monotonic() < end, "they were never cut off"
        time.sleep(0.05)


def beside_stopped_client(ring: Instance, client: Client) -> tuple[tuple[float, float], list[list[str | int]]]:
    """`gaps` of streams beside those of a client that is stopped, and how the latter end once it goes on."""
    lazy = subprocess.Popen(
        [sys.executable, "-c", LAZY_CLIENT, ring.address, str(LAZY), str(ASKED)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert lazy.stdout is not None
        assert lazy.stdout.readline() == "reading\n"
        os.kill(lazy.pid, signal.SIGSTOP)
        found = asyncio.run(gaps(ring.address))
        wait_idle(client, 30)
        os.kill(lazy.pid, signal.SIGCONT)
        return found, json.loads(lazy.communicate("\n", timeout=20)[0])
    finally:
        lazy.kill()
        lazy.wait()


def test_a_stopped_client_is_cut_off_and_the_others_do_not_notice() -> None:
    flags = ["--model", MODEL, "--device", "sim:h200,launch=2e-3", "--max-stream-buffer-bytes", str(LIMIT)]
    with Instance.start(flags) as ring, Client(ring.address, timeout=30) as client:
        server = psutil.Process(next(stage["pid"] for stage in ring.stages if stage["kind"] == "server"))
        asyncio.run(gaps(ring.address, 50))  # caches and lazy imports
        before = server.memory_info().rss
        seen = []
        for _ in range(3):  # on a busy machine other work may have come between
            alone = asyncio.run(gaps(ring.address))
            beside, ends = beside_stopped_client(ring, client)
            assert server.memory_info().rss - before < LAZY * BYTES_A_STREAM
            for code, reason, message, tokens in ends:
                assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED.name, "SLOW_READER")
                assert f"the limit is {LIMIT}" in str(message)
                assert 1 < int(tokens) < ASKED
            seen.append((alone, beside))
            if beside[1] < 1.25 * alone[1] + 5:
                return
    pytest.fail(f"ms between others' chunks, p50 and p99, alone and beside: {seen}")
