"""The batch of one step, as the model and the attention backends see it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I32Array = npt.NDArray[np.int32]


@dataclass(slots=True)  # not frozen: that would take longer to make than what is in it
class PageLists:
    """Where a step's K/V lie in the memory of one cache group. T tokens, R rows; host arrays, int32."""

    kv_slots: I32Array  # [T] page × page_size + offset, where the token's K/V go
    kv_indptr: I32Array  # [R+1] pages of row r are kv_indices[kv_indptr[r]:kv_indptr[r+1]]
    kv_indices: I32Array  # [kv_indptr[R]] page ids
    first_pages: I32Array  # [R] number of the row's first page: those before are behind its window
    list_version: int = 0  # same number as in an earlier step: same pages of the same rows; 0 = unknown


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Ragged rows packed along tokens, with paged KV metadata in FlashInfer's terms. Host arrays, int32.

    T tokens, R rows, S sampled tokens. Rows come in plan order: decode rows (one token each, where the plan sets no
    limits), then chunks. A decode row samples after each of its tokens, a chunk after its last one or not at all.
    The K/V of this step's tokens are part of the lengths: a backend writes them before it attends.
    """

    token_ids: I32Array  # [T]; of decode rows not yet known on the host of a GPU: see `decode_rows`
    positions: I32Array  # [T] absolute position of each token in its sequence
    kv_slots: I32Array  # [T] page × page_size + offset, where the token's K/V go
    qo_indptr: I32Array  # [R+1] tokens of row r are qo_indptr[r]:qo_indptr[r+1]
    kv_indptr: I32Array  # [R+1] pages of row r are kv_indices[kv_indptr[r]:kv_indptr[r+1]]
    kv_indices: I32Array  # [kv_indptr[R]] page ids, from position 0 on
    last_page_len: I32Array  # [R] 1..page_size
    slots: I32Array  # [R] the row's slot
    decode_rows: int  # the first rows are decode rows
    logit_tokens: I32Array  # [S] index along T whose logits are wanted, ascending
    # Of layers with a window, where these have pages of their own (then kv_* are of the other layers, if there are
    # any); None: all layers have the same.
    windowed: PageLists | None = None
    list_version: int = 0  # as in `PageLists`

    def of_group(self, group: int) -> "StepBatch | PageLists":
        """Return what holds kv_slots, kv_indptr, kv_indices and list_version of a cache group."""
        return self.windowed if group and self.windowed is not None else self

    def pages_of(self, window: int) -> PageLists:
        """Return the page lists of a layer with this window; 0 = none."""
        if window and self.windowed is not None:
            return self.windowed
        return PageLists(self.kv_slots, self.kv_indptr, self.kv_indices, np.zeros(len(self.slots), np.int32))
