"""Chunks cut so that attention's arithmetic for a token does not depend on the rest of its step.

FlashInfer's FA2 takes the height of its tiles from the mean length of a step's rows, and another height adds up in
another order. Rows of at most 16 query heads × tokens always get the lowest tiles, as decode rows do. The cost is
reading a row's K and V once for each such piece.

Along K and V, tiles begin where a row's list of pages does. Behind a window, lists therefore begin at multiples of the
largest tile, and a piece ends where its next token's list would begin elsewhere: so where a token's list begins follows
from its position.
"""

import math

import numpy as np
import numpy.typing as npt

from proto.model import ModelConfig
from worker.steps.batch import I32Array, PageLists, StepBatch

LOWEST_TILE = 16  # query heads × tokens
LONGEST_TILE = 512  # tokens of K and V: four warps of at most eight times 16


def tokens_of_a_tile(config: ModelConfig) -> int:
    """Return the most tokens of a row; 1 with ALiBi, whose biases the kernels count from the row's first token."""
    return 1 if config.alibi else max(LOWEST_TILE * config.num_kv_heads // config.num_heads, 1)


def list_stride(page_size: int) -> int:
    """Return the number of pages at whose multiples lists of rows behind a window begin."""
    return math.lcm(LONGEST_TILE, page_size) // page_size


def most_rows(rows: int, tokens: int, most: int, page_size: int, window: int = 0) -> int:
    """Return the most rows that a step of so many rows and tokens has once it is cut."""
    begins = tokens // (list_stride(page_size) * page_size) + rows if window else 0
    return tokens // most + rows + begins


def cut_chunks(batch: StepBatch, most: int, page_size: int, window: int = 0) -> StepBatch:
    """Return the same tokens with each chunk cut into rows of at most `most`; the batch itself if it has no chunks.

    `window`: of the layers that have pages of their own; 0 = there are none.
    """
    if batch.decode_rows == len(batch.slots):
        return batch
    counts = np.diff(batch.qo_indptr)
    begins = (np.arange(len(batch.token_ids)) - np.repeat(batch.qo_indptr[:-1], counts)) % most == 0
    stride = list_stride(page_size)
    if window:
        begins |= (batch.positions - (window - 1)) % (stride * page_size) == 0
    starts = np.flatnonzero(begins)
    ends = np.append(starts[1:], len(begins))
    row = np.repeat(np.arange(len(batch.slots)), counts)[starts]
    lengths = batch.positions[ends - 1] + 1
    used = -(-lengths // page_size)
    windowed = None
    if window:
        seen = np.maximum((batch.positions[starts] - (window - 1)) // page_size, 0)
        windowed = _cut(batch.pages_of(window), row, seen - seen % stride, used)
    full = _cut(batch.pages_of(0), row, np.zeros(len(row), np.int32), used) if batch.kv_indptr[-1] else batch
    return StepBatch(
        token_ids=batch.token_ids,
        positions=batch.positions,
        kv_slots=batch.kv_slots,
        qo_indptr=np.concatenate([[0], ends]).astype(np.int32),
        kv_indptr=full.kv_indptr,
        kv_indices=full.kv_indices,
        last_page_len=((lengths - 1) % page_size + 1).astype(np.int32),
        slots=batch.slots[row],
        decode_rows=batch.decode_rows,
        logit_tokens=batch.logit_tokens,
        windowed=windowed,
    )


def _cut(lists: PageLists, row: npt.NDArray[np.intp], first: I32Array, used: I32Array) -> PageLists:
    """Return the lists of pieces of these rows, from page number `first` up to `used`."""
    pages = used - first
    kv_indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    kv_indices = lists.kv_indices
    if len(kv_indices):  # listed by the self-test, from page number 0 on; for other steps the device lists them
        begins = lists.kv_indptr[row] + first - kv_indptr[:-1]
        kv_indices = kv_indices[np.arange(kv_indptr[-1]) + np.repeat(begins, pages)]
    return PageLists(lists.kv_slots, kv_indptr, kv_indices, first)
