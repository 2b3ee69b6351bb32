"""The whole ring of processes with a simulated device whose rows gain up to five ids a step."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from engine.instance import Instance
from quintet_client import AsyncClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MODEL = str(Path(__file__).parents[1] / "scripts/shapes/qwen3-0.6b")


async def outputs(address: str) -> list[str]:
    """Text, ids, finish and logprobs of requests, while others are left in the middle."""
    async with AsyncClient(address, timeout=60) as client:
        leaving = [asyncio.create_task(leave(client, n)) for n in range(4)]
        calls = [
            client.generate(
                f"prompt {n}",
                max_new_tokens=20 + 7 * n,
                temperature=1.0,
                seed=n,
                stop_strings=["e ", "0"] if n % 2 else [],
                logprobs=n % 3,
            )
            for n in range(24)
        ]
        answers = await asyncio.gather(*calls)
        await asyncio.gather(*leaving)
        return [str(answer.outputs[0]) for answer in answers]


async def leave(client: AsyncClient, seed: int) -> None:
    async with contextlib.aclosing(client.generate_stream("leaves", max_new_tokens=2000, seed=seed)) as chunks:
        async for _ in chunks:
            break


def test_text_is_that_of_one_id_at_a_time_at_every_depth() -> None:
    found = []
    for step_ids, depth in ((1, 2), (5, 1), (5, 2), (5, 3)):
        flags = ["--model", MODEL, "--device", f"sim:h200,eos=0.005,max_step_ids={step_ids}"]
        flags += ["--pipeline-depth", str(depth), "--debug-preempt-every", "9", "--max-num-seqs", "16"]
        with Instance.start(flags) as instance:
            found.append(asyncio.run(outputs(instance.address)))
    assert found[0] == found[1] == found[2] == found[3]
