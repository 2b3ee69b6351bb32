"""The law at the forward pass (docs/architecture.md, 'The law'): logits' bits depend on a sequence's past alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.models import prepare
from tests.layer_cases import Player, load, prompt
from tests.marks import mark_rest
from tests.tiny_models import make_tiny
from worker.cpu.self_test import check_batch_invariance
from worker.cpu.step import CpuStep
from worker.device import BatchInvarianceError
from worker.steps.batch import I32Array


def histories(vocab_size: int, lengths: list[int]) -> list[I32Array]:
    return [prompt(length, vocab_size, seed) for seed, length in enumerate(lengths)]


def one_by_one(forward: CpuStep, ids: list[I32Array], prompts: list[int]) -> list[torch.Tensor]:
    """Logits from each prompt's last token on: the prompt in one step, then a token a step, nobody else there."""
    logits = []
    for sequence, (history, length) in enumerate(zip(ids, prompts, strict=True)):
        player = Player(forward, len(ids), max(map(len, ids)), seed=sequence)
        rows = [player.run({sequence: (history[:length], 0)})]
        rows += [player.run({sequence: (history[i : i + 1], i)}) for i in range(length, len(history))]
        logits.append(torch.cat(rows))
    return logits


def all_at_once(forward: CpuStep, ids: list[I32Array], prompts: list[int]) -> list[torch.Tensor]:
    """The same, all sequences in every step, in changing order, the last one joining late."""
    player = Player(forward, len(ids), max(map(len, ids)), seed=99)
    rows: list[list[torch.Tensor]] = [[] for _ in ids]
    at = [0] * len(ids)
    for turn in range(max(len(h) - p for h, p in zip(ids, prompts, strict=True)) + 4):
        step = {}
        for sequence in np.random.default_rng(turn).permutation(len(ids)):
            start = at[sequence]
            if start < len(ids[sequence]) and (turn > 2 or sequence < len(ids) - 1):
                at[sequence] = max(prompts[sequence], start + 1)
                step[int(sequence)] = (ids[sequence][start : at[sequence]], start)
        if step:
            for sequence, row in zip(step, player.run(step), strict=True):
                rows[sequence].append(row)
    return [torch.stack(r) for r in rows]


def recomputed(forward: CpuStep, ids: list[I32Array], prompts: list[int], chunk: int) -> list[torch.Tensor]:
    """The same, the whole history as a prompt in chunks, as after a preemption."""
    player = Player(forward, len(ids), max(map(len, ids)), seed=7)
    return [player.chunked(s, h, chunk)[p - 1 :] for s, (h, p) in enumerate(zip(ids, prompts, strict=True))]


def shared_prefix(forward: CpuStep, ids: list[I32Array], prompts: list[int]) -> list[torch.Tensor]:
    """The same, the pages of each prompt's first whole pages having been written for somebody else."""
    player = Player(forward, 2 * len(ids), max(map(len, ids)), seed=8)
    logits = []
    for sequence, (history, length) in enumerate(zip(ids, prompts, strict=True)):
        shared = (length - 1) // forward.facts.page_size
        other = len(ids) + sequence
        player.run({other: (history[:length], 0)})
        player.pages[sequence, :shared] = player.pages[other, :shared]
        start = shared * forward.facts.page_size
        logits.append(player.chunked(sequence, history[start:], 50, start)[length - 1 - start :])
    return logits


def assert_law(forward: CpuStep, lengths: list[int], prompts: list[int]) -> None:
    ids = histories(forward.facts.vocab_size, lengths)
    alone = one_by_one(forward, ids, prompts)
    variants = {
        "batch": all_at_once(forward, ids, prompts),
        "chunks of 16": recomputed(forward, ids, prompts, 16),
        "chunks of 512": recomputed(forward, ids, prompts, 512),
        "prefix cache": shared_prefix(forward, ids, prompts),
    }
    for name, logits in variants.items():
        for sequence, (expected, got) in enumerate(zip(alone, logits, strict=True)):
            assert torch.isfinite(expected).all()
            assert torch.equal(expected, got), f"{name}, sequence {sequence}: {(expected - got).abs().max()}"


@pytest.mark.parametrize("dtype", mark_rest(pytest.mark.slow, ["bfloat16", "float32"]))
@pytest.mark.parametrize(
    ("device", "case"),
    [
        ("cpu", {"family": "llama"}),
        ("cpu", {"family": "qwen3", "rope": "yarn"}),
        ("cpu", {"family": "mistral", "window": 37, "head_dim": 36}),
        ("cpu", {"family": "llama", "rope": "dynamic", "max_position_embeddings": 64, "num_key_value_heads": 1}),
        ("reference", {"family": "mistral", "window": 37}),
        ("reference", {"family": "qwen3", "rope": "dynamic"}),
    ],
)
def test_tiny_models(device: str, case: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **case)
    forward = load(prepare(str(directory)), device=device, dtype=dtype, max_model_len=512)
    lengths, prompts = [140, 75, 22, 70, 9], [130, 63, 3, 64, 1]
    if device == "reference":
        lengths, prompts = lengths[1:], prompts[1:]
    assert_law(forward, lengths, prompts)


@pytest.mark.parametrize("page_size", [1, 8, 24, 64, 128])
def test_page_sizes(page_size: int, tmp_path: Path) -> None:
    """Logits do not depend on the size of pages either."""
    manifest = prepare(str(make_tiny(tmp_path)))
    forward = load(manifest, page_size=page_size, num_pages=4096 // page_size)
    usual = load(manifest)
    ids, prompts = histories(320, [140, 70]), [100, 64]
    got, expected = one_by_one(forward, ids, prompts), one_by_one(usual, ids, prompts)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_two_threads_change_nothing(tmp_path: Path) -> None:
    manifest = prepare(str(make_tiny(tmp_path, hidden_size=192)))
    ids = histories(320, [300, 200, 100])
    logits = []
    for threads in (1, 2):
        forward = load(manifest, threads=threads)
        player = Player(forward, 3, 512)
        logits.append(player.run({i: (h, 0) for i, h in enumerate(ids)}, every_token=True))
    # oneDNN may cut a product differently for two threads; only attention and row kernels promise equality.
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=0)


def test_neighbours_with_nan_stay_alone(tmp_path: Path) -> None:
    """Pages full of NaN, left by someone else, and a neighbour that computes NaN: a row's logits do not move."""
    directory = make_tiny(tmp_path)
    forward = load(prepare(str(directory)))
    ids = prompt(30, 320, seed=1)
    player = Player(forward, 2, 64)
    model: Any = forward.model
    model.embedding.weight.tensor[7] = float("nan")  # token 7 poisons whoever says it
    clean = np.where(ids == 7, 8, ids)
    expected = player.run({0: (clean, 0)})
    poison = np.full(64, 7, np.int32)
    player.pages[1] = player.pages[0]
    assert torch.isnan(player.run({1: (poison, 0)})).all()
    assert torch.equal(player.run({0: (clean, 0)}), expected)
    other = Player(forward, 2, 64, seed=5)
    beside = other.run({1: (poison[:40], 0), 0: (clean, 0)})
    assert torch.isnan(beside[0]).all()
    assert torch.equal(beside[1:], expected)


def test_the_start_up_check_finds_a_breach(tmp_path: Path) -> None:
    forward = load(prepare(str(make_tiny(tmp_path))))
    check_batch_invariance(forward)
    model: Any = forward.model
    norm = model.norm
    model.norm = lambda x: norm(x) * (1 + 1e-6 * x.shape[0])
    with pytest.raises(BatchInvarianceError, match="in one batch"):
        check_batch_invariance(forward)
