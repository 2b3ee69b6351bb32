"""Chunks cut so that attention's arithmetic for a token does not depend on who is in its step.

FlashInfer's FA2 takes the height of its tiles from the mean length of a step's rows, and another height adds up in
another order. Rows of at most 16 query heads × tokens get the lowest tiles in any company, as decode rows do. It costs
reading a row's K and V once for each such piece.
"""

import numpy as np

from proto.model import ModelConfig
from worker.batch import StepBatch

LOWEST_TILE = 16  # query heads × tokens


def tokens_of_a_tile(config: ModelConfig) -> int:
    """Of a row, at most. One with ALiBi, whose biases the kernels count from the row's first token."""
    return 1 if config.alibi else max(LOWEST_TILE * config.num_kv_heads // config.num_heads, 1)


def most_rows(rows: int, tokens: int, most: int) -> int:
    """Rows that a step of so many rows and tokens may have once it is cut."""
    return tokens // most + rows


def cut_chunks(batch: StepBatch, most: int, page_size: int) -> StepBatch:
    """The same tokens, with each chunk as rows of at most `most`; the batch itself if it has no chunks."""
    if batch.decode_rows == len(batch.slots):
        return batch
    pieces = -(-np.diff(batch.qo_indptr) // most)
    row = np.repeat(np.arange(len(batch.slots)), pieces)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    ends = np.minimum(batch.qo_indptr[row] + (nth + 1) * most, batch.qo_indptr[row + 1])
    lengths = batch.positions[ends - 1] + 1
    pages = -(-lengths // page_size)
    kv_indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    index = np.arange(kv_indptr[-1]) + np.repeat(batch.kv_indptr[row] - kv_indptr[:-1], pages)
    return StepBatch(
        token_ids=batch.token_ids,
        positions=batch.positions,
        kv_slots=batch.kv_slots,
        qo_indptr=np.concatenate([[0], ends]).astype(np.int32),
        kv_indptr=kv_indptr,
        kv_indices=batch.kv_indices[index] if len(batch.kv_indices) else batch.kv_indices,
        last_page_len=((lengths - 1) % page_size + 1).astype(np.int32),
        slots=batch.slots[row],
        decode_rows=batch.decode_rows,
        logit_tokens=batch.logit_tokens,
    )
