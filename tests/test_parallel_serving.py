"""`quintet serve --tensor-parallel-size 2` as users run it: the tokens of one rank, and the death of either."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from engine.instance import Instance, InstanceError
from engine.models import prepare
from quintet_client import Client
from tests.layer_cases import Player, load
from tests.test_e2e_deaths import Streams, assert_all_gone
from tests.tiny_models import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FLAGS = ("--dtype", "float32", "--num-pages", "200", "--max-num-seqs", "8", "--max-num-batched-tokens", "16")
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


def generate(instance: Instance, ids: list[int], count: int, temperature: float = 0.0) -> list[int]:
    with Client(instance.address, timeout=60) as client:
        chunks = client.generate_stream(ids, max_new_tokens=count, temperature=temperature, seed=3, ignore_eos=True)
        return [token for chunk in chunks for token in chunk.token_ids]


def alone(model: str, ids: list[int], count: int) -> list[int]:
    """The greedy tokens of one rank."""
    player = Player(load(prepare(model), dtype="float32", max_num_batched_tokens=64), 1, len(ids) + count)
    logits = player.run({0: (np.array(ids, np.int32), 0)})
    found = [int(logits.argmax())]
    while len(found) < count:
        logits = player.run({0: (np.array(found[-1:], np.int32), len(ids) + len(found) - 1)})
        found.append(int(logits.argmax()))
    return found


def test_two_ranks_give_the_tokens_of_one_and_stop_in_good_order(model: str, pair: Instance) -> None:
    assert [title for title in pids(pair) if title in RANKS] == list(RANKS)
    ids = list(range(5, 45))  # several chunks, and more than two pages
    assert generate(pair, ids, 24) == alone(model, ids, 24)
    with start(model, 1) as one:
        assert generate(pair, ids, 24, temperature=0.9) == generate(one, ids, 24, temperature=0.9)
    assert pair.stop(20) == 0


@pytest.mark.model
def test_two_ranks_give_the_demo_models_tokens() -> None:
    ids = [504, 3575, 282, 4649, 314]
    with start("demo", 2) as two:
        assert generate(two, ids, 8) == alone("demo", ids, 8)


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
