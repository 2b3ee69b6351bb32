"""The law (docs/architecture.md, 'The law'): a request's logits do not depend on its surroundings, bit for bit.

Scheduler and worker play together over a real forward pass; every variant must give the very logits that each
request gets alone.
"""

from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest

from proto.config import WorkerOptions
from proto.messages import Finish, Sampling
from proto.model import ModelConfig, RopeConfig
from tests.builders import GREEDY, make_worker_options
from tests.marks import mark_rest
from tests.pair import Pair, Story
from worker.cpu.device import CpuDevice
from worker.cpu.start import start as start_cpu

TINY = ModelConfig(
    family="llama",
    vocab_size=199,
    hidden_size=48,
    intermediate_size=96,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    max_position_embeddings=256,
    windows=(0, 24, 0),
    rope=RopeConfig(theta=10000.0),
)
PAGE = 8
PAGES = 160

VARIANTS: dict[str, dict[str, Any]] = {
    "together, depth 1": {"depth": 1},
    "together, depth 2": {"depth": 2},
    "together, depth 3": {"depth": 3},
    "chunks of 16": {"max_num_batched_tokens": 16, "depth": 2},
    "chunks of 512": {"max_num_batched_tokens": 512, "depth": 3},
    "prefix cache": {"prefix_caching": True, "depth": 2},
    "prefix cache, chunks of 16, depth 3": {"prefix_caching": True, "max_num_batched_tokens": 16, "depth": 3},
    "preempted every 2 steps": {"debug_preempt_every": 2, "depth": 1},
    "preempted every 3 steps, depth 3": {"debug_preempt_every": 3, "depth": 3},
    "preempted every 5 steps, prefix cache": {"debug_preempt_every": 5, "depth": 2, "prefix_caching": True},
    "tiny pool": {"num_pages": 20, "depth": 2},
    "tiny pool, prefix cache, depth 3": {"num_pages": 20, "depth": 3, "prefix_caching": True},
}


@cache
def load(dtype: str) -> tuple[CpuDevice, WorkerOptions]:
    options = make_worker_options(
        TINY,
        dtype=dtype,
        load_format="dummy",
        page_size=PAGE,
        num_pages=PAGES,
        max_num_seqs=12,
        max_num_batched_tokens=512,
        threads=1,
    )
    return start_cpu(options, lambda _text, _done, _total: None), options


def make_prompts(count: int) -> list[list[int]]:
    """Lengths around pages, KV blocks and chunks; a third share a beginning of five pages."""
    rng = np.random.default_rng(7)
    shared = rng.integers(0, TINY.vocab_size, 5 * PAGE).tolist()
    lengths = [1, 7, 8, 9, 16, 17, 63, 64, 65, 100]
    prompts = []
    for i in range(count):
        own = rng.integers(0, TINY.vocab_size, lengths[i % len(lengths)]).tolist()
        prompts.append([*shared, *own] if i % 3 == 0 else own)
    return prompts


PROMPTS = make_prompts(11)
NEW_TOKENS = 20
STOP_IDS = range(0, 199, 40)


def sampling_of(i: int) -> Sampling:
    """Greedy and drawn rows side by side."""
    if i % 2 == 0:
        return GREEDY
    return msgspec.structs.replace(GREEDY, temperature=0.9, top_k=50, top_p=0.95, seed=1000 + i, logprobs=2)


def submit_all(pair: Pair) -> list[Story]:
    rids = [
        pair.submit(prompt, NEW_TOKENS, sampling=sampling_of(i), min_new_tokens=3, stop_ids=STOP_IDS, num_eos=1)
        for i, prompt in enumerate(PROMPTS)
    ]
    return [pair.stories[rid] for rid in rids]


@cache
def alone(dtype: str) -> list[Story]:
    """Each request in an engine of its own, one step at a time."""
    runner, options = load(dtype)
    stories = []
    for i, prompt in enumerate(PROMPTS):
        pair = Pair(runner, options, depth=1)
        rid = pair.submit(prompt, NEW_TOKENS, sampling=sampling_of(i), min_new_tokens=3, stop_ids=STOP_IDS, num_eos=1)
        pair.run()
        pair.check_idle()
        stories.append(pair.stories[rid])
    return stories


def assert_same(stories: list[Story], expected: list[Story]) -> None:
    for i, (story, wanted) in enumerate(zip(stories, expected, strict=True)):
        assert story.reject is None
        assert (i, story.tokens, story.finish, story.matched) == (i, wanted.tokens, wanted.finish, wanted.matched)
        assert story.logprobs == wanted.logprobs
        for output in range(len(story.tokens)):
            assert story.digest(output) == wanted.digest(output), f"request {i}, output {output}"


@pytest.mark.parametrize("dtype", mark_rest(pytest.mark.slow, ["bfloat16", "float32"]))
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_bitwise_those_of_the_request_alone(dtype: str, variant: str) -> None:
    runner, options = load(dtype)
    pair = Pair(runner, options, **VARIANTS[variant])
    if "tiny" in variant:
        pair.promise_short_outputs()
    stories = submit_all(pair)
    pair.run()
    counters = pair.scheduler.counters()
    assert pair.deepest == VARIANTS[variant]["depth"]
    assert counters["preemptions"] >= (3 if "preempted" in variant else 1 if "tiny" in variant else 0)
    assert_same(stories, alone(dtype))
    if "prefix" in variant:
        again = submit_all(pair)  # now every prompt of a page or more is cached
        pair.run()
        assert pair.scheduler.counters()["prefix_hit_tokens"] > counters["prefix_hit_tokens"]
        assert_same(again, alone(dtype))
    pair.check_idle()


def test_the_requests_are_worth_the_comparison() -> None:
    """Some end by a stop id, some by length, and drawn rows differ from greedy ones."""
    stories = alone("float32")
    assert {story.finish for story in stories} == {Finish.STOP, Finish.LENGTH}
    assert all(len(story.tokens) >= 4 for story in stories)
    assert len({token for story in stories for token in story.tokens}) > 20


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_aborts_and_late_comers_leave_the_others_alone(depth: int) -> None:
    runner, options = load("float32")
    pair = Pair(runner, options, depth=depth, prefix_caching=True)
    rids = []
    for i, prompt in enumerate(PROMPTS):
        rids.append(
            pair.submit(prompt, NEW_TOKENS, sampling=sampling_of(i), min_new_tokens=3, stop_ids=STOP_IDS, num_eos=1)
        )
        pair.step()
        if i % 3 == 2:
            pair.abort(rids[i - 1])
    pair.run()
    expected = alone("float32")
    kept = [i for i in range(len(rids)) if pair.stories[rids[i]].finish is not Finish.ABORT]
    assert 0 < len(kept) < len(rids)
    assert_same([pair.stories[rids[i]] for i in kept], [expected[i] for i in kept])
    pair.check_idle()
