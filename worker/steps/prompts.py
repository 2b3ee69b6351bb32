"""Steps of whole prompts, made by hand: what self-tests and warm-ups run before anything is served."""

import numpy as np

from worker.steps.batch import I32Array, StepBatch

LENGTHS = (5, 70, 18)  # less than a KV block, more than one, more than a page
CHUNK = 16


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
