"""`quintet serve --tensor-parallel-size 2` as users run it: the tokens of one rank, and the death of either."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from engine.instance import Instance, InstanceError
from quintet_client import Client
from tests.test_e2e_deaths import Streams, assert_all_gone
from tests.tiny_models import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FLAGS = ("--dtype", "float32", "--num-pages", "200", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
RANKS = ("quintet worker 0 rank 0", "quintet worker 0 rank 1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model"), "qwen3_moe"))


def start(model: str, ranks: int) -> Instance:
    return Instance.start(["--model", model, "--tensor-parallel-size", str(ranks), *FLAGS])


@pytest.fixture
def pair(model: str) -> Iterator[Instance]:
    instance = start(model, 2)
    yield instance
    instance.kill()


def pids(instance: Instance) -> dict[str, int]:
    return {stage["title"]: stage["pid"] for stage in instance.stages}


def tokens(model: str, ranks: int, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy for the first prompt, drawn with a seed for the others."""
    found = []
    with start(model, ranks) as instance:
        assert sum(title in RANKS for title in pids(instance)) == ranks
        with Client(instance.address, timeout=60) as client:
            for number, ids in enumerate(prompts):
                chunks = client.generate_stream(
                    ids, max_new_tokens=count, temperature=0.9 * (number > 0), seed=number, ignore_eos=True
                )
                found.append([token for chunk in chunks for token in chunk.token_ids])
        assert instance.stop() == 0
    return found


def test_two_ranks_give_the_tokens_of_one(model: str) -> None:
    prompts = [list(range(5, 45)), [9, 8, 7]]  # the first is longer than two pages
    assert tokens(model, 2, prompts, 24) == tokens(model, 1, prompts, 24)


@pytest.mark.model
def test_two_ranks_give_the_demo_models_tokens() -> None:
    prompts = [[504, 3575, 282, 4649, 314], [1, 2683, 198]]
    assert tokens("demo", 2, prompts, 8) == tokens("demo", 1, prompts, 8)


@pytest.mark.parametrize(
    ("rank", "how"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)], ids=["kill-0", "kill-1", "stop-1"]
)
def test_the_end_of_either_rank_ends_everything_soon(pair: Instance, rank: int, how: signal.Signals) -> None:
    before = pids(pair)
    streams = Streams(pair.address, 4, tokens=480)
    struck = time.monotonic()
    os.kill(before[RANKS[rank]], how)
    streams.join()
    for code, ended, _ in streams.ends:
        assert code is grpc.StatusCode.UNAVAILABLE
        assert ended - struck < 2.0
    assert pair.wait(10) not in (0, None)
    assert_all_gone(pair, before, 5)
    what = "was killed by SIGKILL" if how is signal.SIGKILL else "was stopped"
    assert f"error: {RANKS[rank]} (pid {before[RANKS[rank]]}) {what}" in pair.stderr_tail  # the right one is blamed
    assert not Path(pair.run_dir).exists()


def test_a_size_that_does_not_divide_is_refused_before_anything_starts(model: str) -> None:
    with pytest.raises(InstanceError, match=r"exit code 2:(.*\n)*.*--tensor-parallel-size 4 does not divide"):
        start(model, 4)
