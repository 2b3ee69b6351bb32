"""Layers behind a window let go of the pages behind it: small pools suffice, and nothing else changes, bit for bit."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from engine.models import prepare
from proto.config import WorkerOptions
from proto.messages import StepPlan, column
from scheduler.kv_cache import WindowedKvCache
from tests.layer_cases import prompt, worker_options
from tests.pair import Pair, Story
from tests.test_layers_models import TOLERANCE, reference_logits
from tests.tiny_models import make_tiny
from worker.cpu.device import CpuDevice
from worker.cpu.start import start as start_cpu
from worker.steps.batch import StepBatch

PAGE, WINDOW, NEW_TOKENS = 8, 24, 30
LEAST = 4  # pages that a window and a new page take
FAMILIES = {
    "mistral": {"family": "mistral", "window": WINDOW},  # all layers
    "gemma3": {"family": "gemma3", "sliding_window": WINDOW},  # two of three
}
LENGTHS = (100, 51, 9, 130, 64)


@cache
def load(family: str) -> tuple[CpuDevice, WorkerOptions, list[torch.Tensor]]:
    """A runner of a tiny model, and transformers' logits of each prompt and what follows it."""
    with TemporaryDirectory() as directory:
        path = make_tiny(Path(directory), **FAMILIES[family])  # type: ignore[arg-type]
        options = worker_options(prepare(str(path)), page_size=PAGE, num_pages=128)
        runner = start_cpu(options, lambda _text, _done, _total: None)
        alone = play(runner, options, depth=1, max_num_seqs=1, keep_logits=True)
        expected = [reference_logits(path, np.array([*s.prompt, *s.tokens], np.int32)) for s in alone]
    return runner, options, expected


def play(runner: CpuDevice, options: WorkerOptions, **settings: Any) -> list[Story]:
    pair = Pair(runner, options, **settings)
    rids = submit(pair)
    pair.run()
    pair.check_idle()
    return [pair.stories[rid] for rid in rids]


def submit(pair: Pair) -> list[int]:
    shared = prompt(40, 320, seed=99).tolist()
    prompts = [[*shared[: n // 2], *prompt(n - n // 2, 320, seed=n).tolist()] for n in LENGTHS]
    return [pair.submit(ids, NEW_TOKENS) for ids in prompts]


@cache
def alone(family: str) -> list[Story]:
    runner, options, _ = load(family)
    return play(runner, options, depth=1, max_num_seqs=1, keep_logits=True)


def assert_same(stories: list[Story], expected: list[Story]) -> None:
    for story, wanted in zip(stories, expected, strict=True):
        assert story.tokens == wanted.tokens
        for output in range(NEW_TOKENS):
            assert story.digest(output) == wanted.digest(output)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str) -> None:
    _, _, expected = load(family)
    for story, logits in zip(alone(family), expected, strict=True):
        for position, ours in story.logits.items():
            torch.testing.assert_close(torch.from_numpy(ours), logits[position - 1], atol=TOLERANCE, rtol=0)


SETTINGS: list[dict[str, Any]] = [
    {"window_pages": LEAST, "max_num_seqs": 1},
    {"window_pages": LEAST, "depth": 3, "prefix_caching": True},
    {"window_pages": LEAST + 2, "max_num_batched_tokens": 16, "depth": 2, "prefix_caching": True},
    {"window_pages": 3 * LEAST, "depth": 3, "prefix_caching": True, "debug_preempt_every": 5},
    {"window_pages": 3 * LEAST, "depth": 2, "max_num_batched_tokens": 20},
    {"depth": 2, "prefix_caching": True, "max_num_batched_tokens": 33},
]


@pytest.mark.parametrize(
    "settings", [SETTINGS[0], *(pytest.param(s, marks=pytest.mark.slow) for s in SETTINGS[1:])], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_small_pools_give_the_same_bits(family: str, settings: dict[str, Any]) -> None:
    """Prompts of up to 17 pages and 4 pages behind the window."""
    runner, options, _ = load(family)
    pair = Pair(runner, options, **settings)
    for _ in range(2):  # the second time, prompts may be cached
        rids = submit(pair)
        pair.run()
        assert_same([pair.stories[rid] for rid in rids], alone(family))
    pair.check_idle()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_reads_what_the_window_holds_and_no_more(family: str) -> None:
    runner, options, _ = load(family)
    pair = Pair(runner, options, depth=2)
    most, used = [], []
    take, run = pair._take_logits, pair._run

    def watch_batch(batch: StepBatch, logits: torch.Tensor) -> None:
        assert batch.windowed is not None
        counts = np.diff(batch.windowed.kv_indptr)
        tokens = np.diff(batch.qo_indptr)
        assert (counts <= -(-(WINDOW - 1 + tokens) // PAGE) + 1).all()
        most.append(int(counts.max()))
        take(batch, logits)

    def watch_plan(plan: StepPlan) -> None:
        cache = pair.scheduler._cache
        assert isinstance(cache, WindowedKvCache)
        used.append(cache.window.pool.used)
        assert not plan.append_groups or len(plan.append_groups) == len(column(plan.append_slots))
        run(plan)

    pair._take_logits, pair._run = watch_batch, watch_plan  # type: ignore[method-assign]
    rid = pair.submit(prompt(130, 320, seed=5).tolist(), 100)
    pair.run()
    assert len(pair.stories[rid].tokens) == 100
    assert most[0] == 17  # a whole prompt in one step
    assert max(most[1:]) == LEAST
    assert max(used[5:]) <= LEAST + 1


def test_a_prompt_far_larger_than_the_pool_is_prefilled_in_chunks_of_what_there_is() -> None:
    runner, options, _ = load("mistral")
    played = []
    for pages in (0, 6):
        pair = Pair(runner, options, window_pages=pages, max_num_batched_tokens=512)
        story = pair.stories[pair.submit(prompt(400, 320, seed=6).tolist(), 20)]
        pair.run()
        played.append((story.tokens, story.digest(19)))
        pair.check_idle()
    assert played[0] == played[1]
    assert pair.steps > 20  # of 24 ids and fewer; in the large pool it took one
