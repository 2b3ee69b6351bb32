"""The start-up self-test of the law: what a request gets does not depend on its surroundings."""

import numpy as np
import torch

from worker.batch import I32Array, StepBatch
from worker.forward import Forward

LENGTHS = (5, 70, 18)  # less than a KV block, more than one, more than a page
CHUNK = 16


class LawError(Exception):
    """Logits depend on the batch: a fault of this build on this machine, to be reported."""


def check_law(forward: Forward) -> None:
    """Compare logits bitwise: prompts alone, all in one step, and in chunks of 16. Raises LawError.

    Writes into the first pages; to be called before anything is served. Also the warm-up that compiles kernels.
    """
    generator = np.random.default_rng(0)
    lengths = [min(n, forward.max_model_len) for n in LENGTHS]
    if sum(-(-n // forward.page_size) for n in lengths) > pages_of_all_layers(forward):
        lengths = lengths[:1]
    prompts = [generator.integers(0, forward.vocab_size, n, dtype=np.int32) for n in lengths]
    alone = torch.cat([forward.forward(step([prompt], forward.page_size)) for prompt in prompts])
    together = forward.forward(step(prompts, forward.page_size))
    chunked = torch.cat([_in_chunks(forward, prompt) for prompt in prompts])
    for name, logits in (("in one batch", together), ("in chunks", chunked)):
        if not torch.equal(alone, logits):
            worst = (alone - logits).abs().max().item()
            raise LawError(f"logits of prompts {name} differ from those alone, by up to {worst:g}, on this machine")


def pages_of_all_layers(forward: Forward) -> int:
    """Pages that a step may name which has the same for all layers."""
    return min(pages for pages in (forward.num_pages, forward.window_pages) if pages)


def step(rows: list[I32Array], page_size: int, starts: list[int] | None = None) -> StepBatch:
    """A step that computes ids rows[i] from position starts[i] (0) on and wants the logits of each row's last one.

    Row i's pages follow those of row i - 1, from page 0 on.
    """
    starts = starts or [0] * len(rows)
    lengths = [start + len(ids) for start, ids in zip(starts, rows, strict=True)]
    pages = [-(-length // page_size) for length in lengths]
    positions = [np.arange(start, length) for start, length in zip(starts, lengths, strict=True)]
    kv_indptr = np.cumsum([0, *pages])
    slots = [first * page_size + at for first, at in zip(kv_indptr[:-1], positions, strict=True)]
    qo_indptr = np.cumsum([0, *(len(ids) for ids in rows)])
    return StepBatch(
        token_ids=np.concatenate(rows).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        kv_slots=np.concatenate(slots).astype(np.int32),
        qo_indptr=qo_indptr.astype(np.int32),
        kv_indptr=kv_indptr.astype(np.int32),
        kv_indices=np.arange(kv_indptr[-1], dtype=np.int32),
        last_page_len=np.array([(n - 1) % page_size + 1 for n in lengths], np.int32),
        slots=np.arange(len(rows), dtype=np.int32),
        decode_rows=0,
        logit_tokens=(qo_indptr[1:] - 1).astype(np.int32),
    )


def _in_chunks(forward: Forward, prompt: I32Array) -> torch.Tensor:
    for start in range(0, len(prompt), CHUNK):
        logits = forward.forward(step([prompt[start : start + CHUNK]], forward.page_size, [start]))
    return logits
