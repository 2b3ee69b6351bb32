"""Two ranks of a model against one that holds it alone (gloo, real processes)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.models import prepare
from proto.config import WorkerOptions
from proto.messages import Sampling, StepPlan
from tests import parallel_ranks
from tests.builders import i32, make_plan, make_row
from tests.layer_cases import prompt, worker_options
from tests.parallel_ranks import Ranks
from tests.tiny_models import make_tiny
from worker.ranks.group import ALONE, PeerLostError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TOLERANCE = 5e-4  # of logits, teacher-forced in float32
CASES: list[dict[str, Any]] = [
    {"family": "llama", "rope": "llama3"},
    {"family": "llama", "num_key_value_heads": 1, "tie": True},  # the KV head is copied
    {"family": "mistral", "window": 24, "num_key_value_heads": 3, "intermediate_size": 113},  # uneven shares
    {"family": "qwen2"},  # biases
    {"family": "qwen3", "device": "reference"},
    {"family": "mixtral"},
    {"family": "qwen3_moe", "mlp_only_layers": [1]},
    {"family": "gemma2"},
    {"family": "gemma3"},
    {"family": "bloom"},  # ALiBi, of 3 heads each
    {"family": "granite"},
    {"family": "olmo2"},  # norms over the heads of all ranks
    {"family": "olmo2", "num_key_value_heads": 1, "device": "reference"},
    {"family": "olmo2", "num_key_value_heads": 3},  # unequal shares
    {"family": "phi3"},  # fused tensors
    {"family": "phi3", "num_key_value_heads": 1},  # of which the KV head is copied
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()


def options_of(directory: Path, **changes: Any) -> WorkerOptions:
    return worker_options(prepare(str(directory)), **{"num_pages": 24, "max_num_batched_tokens": 64, **changes})


def two(options: WorkerOptions) -> WorkerOptions:
    return msgspec.structs.replace(options, tensor_parallel_size=2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_logits_are_those_of_one_rank(tmp_path: Path, ranks: Ranks, case: dict[str, Any]) -> None:
    made = {name: value for name, value in case.items() if name != "device"}
    options = options_of(make_tiny(tmp_path, **made), device=case.get("device", "cpu"))
    ids = prompt(50, 320, seed=4)
    alone = parallel_ranks.forced_logits(ALONE, options, ids, 50)
    first, second = ranks.run_same(parallel_ranks.forced_logits, two(options), ids, 50)
    assert np.abs(first - alone).max() <= TOLERANCE
    assert np.ptp(alone) > 1  # or the comparison would say little
    assert np.array_equal(first, second)


def test_dummy_weights_are_the_same_model_for_any_number_of_ranks(tmp_path: Path, ranks: Ranks) -> None:
    options = options_of(make_tiny(tmp_path, "qwen2"), load_format="dummy", seed=5)
    ids = prompt(20, 320, seed=1)
    alone = parallel_ranks.forced_logits(ALONE, options, ids, 20)
    first, _ = ranks.run_same(parallel_ranks.forced_logits, two(options), ids, 20)
    assert np.abs(first - alone).max() <= TOLERANCE


def plans(steps: int) -> list[StepPlan]:
    """Three rows, greedy and random; one is prefilled in chunks while the others decode."""
    greedy = make_row(0, prompt(20, 320, 1).tolist(), [0, 1, 2, 3])
    drawn = make_row(1, prompt(9, 320, 2).tolist(), [4, 5, 6, 7])
    drawn = msgspec.structs.replace(drawn, sampling=Sampling(0.8, 40, 0.9, 0.0, seed=7, logprobs=2))
    late = make_row(2, prompt(30, 320, 3).tolist(), [8, 9, 10, 11])
    chunks = [i32(0, 20, 1, 1, 9, 1, 2, 8, 0), i32(2, 8, 0), i32(2, 14, 1)]
    found = [make_plan(step=1, admits=(greedy, drawn, late), chunks=chunks[0], decode_slots=b"")]
    found += [make_plan(step=2, decode_slots=i32(0, 1), chunks=chunks[1]), make_plan(step=3, chunks=chunks[2])]
    found += [make_plan(step=4, decode_slots=i32(0, 1, 2))]
    return found + [make_plan(step=step) for step in range(5, steps + 1)]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_played_script_gives_the_tokens_of_one_rank_on_every_rank(tmp_path: Path, ranks: Ranks, family: str) -> None:
    options = options_of(make_tiny(tmp_path, family))
    alone = parallel_ranks.play(ALONE, options, plans(16))
    first, second = ranks.run_same(parallel_ranks.play, two(options), plans(16))
    assert first == alone
    assert second == alone
    assert len({tuple(row) for row in alone}) > 8


def test_another_plan_than_rank_0s_is_refused_loudly(tmp_path: Path, ranks: Ranks) -> None:
    options = two(options_of(make_tiny(tmp_path, "llama")))
    theirs, strange = make_plan(step=7), make_plan(step=8)
    _, error = ranks.run(parallel_ranks.play, [(options, [theirs]), (options, [strange])])
    assert isinstance(error, RuntimeError)
    assert "rank 1 has a plan of (epoch, step) (1, 8), and rank 0 (1, 7)" in str(error)


def test_all_ranks_have_the_pages_of_the_one_that_has_fewest(tmp_path: Path, ranks: Ranks) -> None:
    options = two(options_of(make_tiny(tmp_path, "llama")))
    fewer = msgspec.structs.replace(options, num_pages=9)
    first, second = ranks.run(parallel_ranks.facts, [(options,), (fewer,)])
    assert first == second == (9, 9 * 16, 3 * 2 * 16 * 2 * 4)  # of the whole model's KV heads


def test_three_add_in_one_order_and_miss_one_that_ends(tmp_path: Path) -> None:
    """Sums do not depend on the rows around: gloo's all-reduce would add in another order at another place."""
    three = Ranks(3, tmp_path)
    try:
        rng = np.random.default_rng(0)
        parts = [rng.standard_normal((257, 48)).astype(np.float32) for _ in range(3)]
        together = three.run_same(parallel_ranks.sums, parts)
        alone = three.run_same(parallel_ranks.sums, [part[200:201] for part in parts])
        three.send(parallel_ranks.lose_the_last)
        errors = [three.receive(rank) for rank in range(2)]
    finally:
        three.close()
    assert np.array_equal(together[0][200:201], alone[0])
    assert all(np.array_equal(together[0], other) for other in together[1:])
    np.testing.assert_allclose(together[0], sum(parts), rtol=1e-5, atol=1e-5)
    assert [type(error) for error in errors] == [PeerLostError] * 2
