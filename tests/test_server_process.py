"""The server as a process of its own."""

import asyncio
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from proto.messages import SCHEMA_HASH, Ready, Serving
from quintet_client import AsyncClient
from tests.server_ring import FakeRing, eventually, make_config, make_world, run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent


@asynccontextmanager
async def started(**options: object) -> AsyncIterator[tuple[FakeRing, asyncio.subprocess.Process]]:
    run_dir = tempfile.mkdtemp(prefix="quintet-")
    ring = FakeRing(run_dir)
    config = Path(run_dir) / "server-0.json"
    config.write_bytes(msgspec.json.encode(make_config(run_dir, **options)))
    arguments = ("-P", "-m", "server", str(config))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
    pump = asyncio.create_task(ring.pump())
    try:
        yield ring, process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)
        ring.close()
        shutil.rmtree(run_dir)


def test_it_serves_small_and_without_torch_and_stops() -> None:
    async def main() -> None:
        async with started() as (ring, process):
            await eventually(lambda: ring.of(Ready), 20)
            await ring.take_address()
            (ready,) = ring.of(Ready)
            assert (ready.pid, ready.schema) == (process.pid, SCHEMA_HASH)
            ring.tell_world(make_world())
            await eventually(lambda: ring.of(Serving))
            async with AsyncClient(ring.address, timeout=10) as client:
                answers = await asyncio.gather(*(client.generate("hi", logprobs=3) for _ in range(50)))
            assert {answer.outputs[0].text for answer in answers} == {"hello"}
            proc = Path(f"/proc/{process.pid}")
            assert proc.joinpath("cmdline").read_bytes().startswith(b"quintet server 0")
            assert "libtorch" not in proc.joinpath("maps").read_text()
            rss_kb = int(proc.joinpath("status").read_text().split("VmRSS:")[1].split()[0])
            assert rss_kb < 100 * 1024
            ring.stop()
            assert await asyncio.wait_for(process.wait(), 5) == 0

    run(main())


def test_sigterm_by_hand_ends_it() -> None:
    async def main() -> None:
        async with started() as (ring, process):
            await eventually(lambda: ring.of(Ready), 20)
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 5) == 0

    run(main())


def test_a_taken_port_is_named_on_stderr() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            async with started(port=port) as (_ring, process):
                _, stderr = await asyncio.wait_for(process.communicate(), 20)
                assert process.returncode == 2
                assert f"cannot serve on 127.0.0.1:{port}" in stderr.decode()

    run(main())
