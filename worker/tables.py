"""The worker's memory of every slot, in columns, and how a plan becomes the batch of a step.

A plan is a difference, so what a steady decode step costs here is a handful of numpy calls over rows and
Python only for what changed.
"""

import numpy as np
import numpy.typing as npt

from proto.messages import AdmitRow, StepPlan, column
from worker.batch import I32Array, StepBatch
from worker.sampler import SAMPLING, SamplingRows

_NOTHING = np.zeros(0, np.int32)


class PlanError(RuntimeError):
    """A plan that contradicts what came before it: a bug in the scheduler or here."""


class SlotTables:
    """Page tables, lengths and sampling parameters by slot.

    `max_slots` is the number of slots, `num_pages` that of the KV pool's pages, each of `page_size` tokens.
    """

    def __init__(self, *, max_slots: int, num_pages: int, page_size: int, max_model_len: int, vocab_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.vocab_size = vocab_size
        # One page to spare: a row that has reached its end may hold the page of a token that never comes.
        width = -(-max_model_len // page_size) + 1
        self._pages = np.zeros((max_slots, width), np.int32)  # page ids, from position 0 on
        self._page_counts = np.zeros(max_slots, np.int32)
        self._lengths = np.zeros(max_slots, np.int32)  # tokens whose K/V are written once the planned steps ran
        self._live = np.zeros(max_slots, np.bool_)
        self._decodable = np.zeros(max_slots, np.bool_)  # its last id was sampled here, nothing is left to prefill
        self._sampling = np.zeros(max_slots, SAMPLING)
        self._stop_ids: dict[int, I32Array] = {}
        self._known_ids: dict[int, I32Array] = {}  # of slots with ids to prefill
        self._arange = np.arange(max_slots + 1, dtype=np.int32)
        self._rows = self._start_decode(_NOTHING)  # the decode rows of the last plan
        self._rows_sampling = self._sampling[:0]
        # Of the last plan's appended pages: the place of each in its slot's page table.
        self.append_at = _NOTHING

    def reset(self) -> None:
        """Free every slot."""
        self._live[:] = False
        self._decodable[:] = False
        self._stop_ids.clear()
        self._known_ids.clear()
        self._rows = self._start_decode(_NOTHING)
        self._rows_sampling = self._sampling[:0]

    def running_through(self, plan: StepPlan) -> bool:
        """Was a slot in use before the plan that stays in use after its releases?"""
        return int(np.count_nonzero(self._live)) > len(plan.released) // 4

    def apply(self, plan: StepPlan) -> StepBatch:
        """Apply a plan in the order of its fields. Raises PlanError.

        `token_ids` of decode rows are left 0: their values live with whoever samples.
        """
        try:
            self._release(column(plan.released))
            for row in plan.admits:
                self._admit(row)
            self._append(plan)
            decode = self._decode(plan)
            return self._add_chunks(decode, column(plan.chunks)) if plan.chunks else decode
        except PlanError as error:
            raise PlanError(f"plan {plan.step} of epoch {plan.epoch}: {error}") from None

    def sampling_rows(self, batch: StepBatch) -> SamplingRows:
        """Parameters of the sampled rows of the batch that was made last, in the order of `logit_tokens`."""
        if len(batch.slots) == batch.decode_rows:
            slots, params = batch.slots, self._rows_sampling
        else:
            rows = np.searchsorted(batch.qo_indptr, batch.logit_tokens, side="right") - 1
            slots = batch.slots[rows]
            params = self._sampling[slots]
        positions = batch.positions[batch.logit_tokens] + np.int32(1)
        stops = [(int(row), self._stop_ids[int(slots[row])]) for row in np.flatnonzero(positions < params["min_len"])]
        return SamplingRows(slots, positions, params, stops)

    # ------------------------------------------------------------------ the fields of a plan

    def _check_slots(self, slots: I32Array, doing: str) -> None:
        if len(slots) and not (slots.min() >= 0 and slots.max() < len(self._live) and self._live[slots].all()):
            inside = (slots >= 0) & (slots < len(self._live))
            bad = int(slots[~(inside & self._live[np.where(inside, slots, 0)])][0])
            raise PlanError(f"{doing} slot {bad}, which holds no request (slots are 0..{len(self._live) - 1})")

    def _check_pages(self, pages: I32Array) -> None:
        if len(pages) and not (pages.min() >= 0 and pages.max() < self.num_pages):
            bad = int(pages[(pages < 0) | (pages >= self.num_pages)][0])
            raise PlanError(f"page {bad} is outside the pool 0..{self.num_pages - 1}")

    def _release(self, slots: I32Array) -> None:
        if not len(slots):
            return
        self._check_slots(slots, "releases")
        self._live[slots] = False
        self._decodable[slots] = False
        for slot in slots.tolist():
            self._stop_ids.pop(slot, None)
            self._known_ids.pop(slot, None)

    def _admit(self, row: AdmitRow) -> None:
        slot, ids, pages = row.slot, column(row.ids), column(row.pages)
        if not 0 <= slot < len(self._live):
            raise PlanError(f"admits to slot {slot}; slots are 0..{len(self._live) - 1}")
        if self._live[slot]:
            raise PlanError(f"admits to slot {slot}, which is in use")
        if not 0 <= row.start < len(ids):
            raise PlanError(f"admits slot {slot} with {row.start} of {len(ids)} ids cached: one must be computed")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise PlanError(f"admits slot {slot} with a token id outside 0..{self.vocab_size - 1}")
        if row.start > len(pages) * self.page_size:
            raise PlanError(f"admits slot {slot} with {row.start} ids cached in {len(pages)} pages")
        if len(pages) > self._pages.shape[1]:
            raise PlanError(f"admits slot {slot} with {len(pages)} pages; {self._pages.shape[1]} is the most")
        self._check_pages(pages)
        self._live[slot] = True
        self._pages[slot, : len(pages)] = pages
        self._page_counts[slot] = len(pages)
        self._lengths[slot] = row.start
        self._known_ids[slot] = ids
        # An id that the model does not have cannot be sampled, so masking it means nothing.
        stop_ids = column(row.stop_ids)
        self._stop_ids[slot] = stop_ids[(stop_ids >= 0) & (stop_ids < self.vocab_size)]
        s = row.sampling
        self._sampling[slot] = (s.temperature, s.top_k, s.top_p, s.min_p, s.seed, s.logprobs, row.min_len)

    def _append(self, plan: StepPlan) -> None:
        if any(plan.append_groups):
            raise PlanError("appends a page to a cache group other than 0, the only one")
        slots, pages = column(plan.append_slots), column(plan.append_pages)
        if len(slots) != len(pages):
            raise PlanError(f"appends {len(pages)} pages to {len(slots)} slots")
        self.append_at = _NOTHING
        if not len(slots):
            return
        self._check_slots(slots, "appends a page to")
        self._check_pages(pages)
        order = _rank_among_equals(slots)
        at = self._page_counts[slots] + order
        if at.max() >= self._pages.shape[1]:
            raise PlanError(f"appends more than {self._pages.shape[1]} pages to slot {int(slots[at.argmax()])}")
        self._pages[slots, at] = pages
        self.append_at = at
        np.add.at(self._page_counts, slots, 1)

    def _decode(self, plan: StepPlan) -> StepBatch:
        if plan.decode_slots is None:
            if len(plan.released) or plan.admits:
                self._check_still_decoding(self._rows.slots)
            self._rows = self._next_decode(self._rows)
        else:
            slots = column(plan.decode_slots).copy()  # of a read-only column, which torch would warn of
            self._check_slots(slots, "decodes")
            chosen = np.zeros(len(self._live), np.bool_)  # ten times as fast as np.unique
            chosen[slots] = True
            if np.count_nonzero(chosen) != len(slots):
                raise PlanError("decodes a slot twice")
            self._rows = self._start_decode(slots)
            self._rows_sampling = self._sampling[slots]
        self._lengths[self._rows.slots] += 1
        return self._rows

    def _check_still_decoding(self, slots: I32Array) -> None:
        if not self._decodable[slots].all():
            raise PlanError(f"goes on decoding slot {int(slots[~self._decodable[slots]][0])}, which was released")

    # ------------------------------------------------------------------ rows

    def _start_decode(self, slots: I32Array) -> StepBatch:
        """Decode rows of a new list of slots, at their present lengths."""
        count = len(slots)
        if not self._decodable[slots].all():
            bad = int(slots[~self._decodable[slots]][0])
            raise PlanError(f"decodes slot {bad}, which has ids left to prefill or never sampled")
        positions = self._lengths[slots]
        page_index, offset = np.divmod(positions, self.page_size)
        pages = self._pages_at(slots, positions, page_index)
        indptr = np.zeros(count + 1, np.int32)
        np.cumsum(page_index + 1, out=indptr[1:])
        return StepBatch(
            token_ids=np.zeros(count, np.int32),
            positions=positions,
            kv_slots=pages * np.int32(self.page_size) + offset,
            qo_indptr=self._arange[: count + 1],
            kv_indptr=indptr,
            kv_indices=self._gather_pages(slots, page_index + 1, indptr),
            last_page_len=offset + np.int32(1),
            slots=slots,
            decode_rows=count,
            logit_tokens=self._arange[:count],
        )

    def _next_decode(self, before: StepBatch) -> StepBatch:
        """The same rows one token on. Only rows that enter a page are looked at one by one."""
        positions = before.positions + np.int32(1)
        kv_slots = before.kv_slots + np.int32(1)
        last_page_len = before.last_page_len + np.int32(1)
        kv_indptr, kv_indices = before.kv_indptr, before.kv_indices
        entering = np.flatnonzero(last_page_len > self.page_size)
        if len(entering):
            slots, at = before.slots[entering], positions[entering]
            pages = self._pages_at(slots, at, at // self.page_size)
            kv_slots[entering] = pages * np.int32(self.page_size)
            last_page_len[entering] = 1
            kv_indices = np.insert(kv_indices, kv_indptr[entering + 1], pages)
            entered = np.zeros(len(kv_indptr), np.int32)
            entered[entering + 1] = 1
            kv_indptr = kv_indptr + np.cumsum(entered, dtype=np.int32)
        return StepBatch(
            token_ids=np.zeros(before.decode_rows, np.int32),
            positions=positions,
            kv_slots=kv_slots,
            qo_indptr=before.qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            last_page_len=last_page_len,
            slots=before.slots,
            decode_rows=before.decode_rows,
            logit_tokens=before.logit_tokens,
        )

    def _pages_at(self, slots: I32Array, positions: I32Array, page_index: I32Array) -> I32Array:
        """The page that holds each slot's position."""
        missing = page_index >= self._page_counts[slots]
        if missing.any():
            row = int(missing.argmax())
            raise PlanError(f"decodes slot {int(slots[row])} at position {int(positions[row])}, which has no page")
        return self._pages[slots, page_index]

    def _gather_pages(self, slots: I32Array, counts: npt.NDArray[np.int32], indptr: I32Array) -> I32Array:
        """The first `counts` pages of each slot, one slot after another; `indptr` says where each begins."""
        first = slots * np.intp(self._pages.shape[1]) - indptr[:-1]
        pages: I32Array = self._pages.ravel()[np.repeat(first, counts) + np.arange(indptr[-1])]
        return pages

    def _add_chunks(self, decode: StepBatch, chunks: I32Array) -> StepBatch:
        token_ids, positions, kv_slots, kv_indices = [decode.token_ids], [decode.positions], [decode.kv_slots], []
        counts, page_counts, last_page_lens, slots, logit_tokens = [], [], [], [], []
        total = len(decode.token_ids)
        for slot, count, sample in chunks.reshape(-1, 3).tolist():
            start, ids = self._take_chunk(slot, count, bool(sample))
            position = np.arange(start, start + count, dtype=np.int32)
            page_index, offset = np.divmod(position, self.page_size)
            pages = self._pages[slot]
            token_ids.append(ids)
            positions.append(position)
            kv_slots.append(pages[page_index] * np.int32(self.page_size) + offset)
            used = int(page_index[-1]) + 1
            kv_indices.append(pages[:used].copy())
            counts.append(count)
            page_counts.append(used)
            last_page_lens.append(int(offset[-1]) + 1)
            slots.append(slot)
            total += count
            if sample:
                logit_tokens.append(total - 1)
        return StepBatch(
            token_ids=np.concatenate(token_ids),
            positions=np.concatenate(positions),
            kv_slots=np.concatenate(kv_slots),
            qo_indptr=_extend_indptr(decode.qo_indptr, counts),
            kv_indptr=_extend_indptr(decode.kv_indptr, page_counts),
            kv_indices=np.concatenate([decode.kv_indices, *kv_indices]),
            last_page_len=_extend(decode.last_page_len, last_page_lens),
            slots=_extend(decode.slots, slots),
            decode_rows=decode.decode_rows,
            logit_tokens=_extend(decode.logit_tokens, logit_tokens),
        )

    def _take_chunk(self, slot: int, count: int, sample: bool) -> tuple[int, I32Array]:
        """Advance a slot over its next `count` ids. Returns their first position and the ids."""
        ids = self._known_ids.get(slot)
        if ids is None:
            raise PlanError(f"prefills slot {slot}, which holds no ids to prefill")
        start = int(self._lengths[slot])
        end = start + count
        if count < 1 or end > len(ids):
            raise PlanError(f"prefills {count} ids of slot {slot} from position {start}; it has {len(ids)} ids")
        if sample and end < len(ids):
            raise PlanError(f"samples slot {slot} at position {end} before the end of its {len(ids)} ids")
        if end > int(self._page_counts[slot]) * self.page_size:
            raise PlanError(f"prefills slot {slot} up to position {end}; it has {int(self._page_counts[slot])} pages")
        self._lengths[slot] = end
        if end == len(ids):
            del self._known_ids[slot]
            self._decodable[slot] = sample
        return start, ids[start:end]


def _rank_among_equals(slots: I32Array) -> I32Array:
    """For each element, how many equal ones stand before it."""
    listed = slots.tolist()
    ranks = np.zeros(len(listed), np.int32)
    if len(set(listed)) < len(listed):
        seen: dict[int, int] = {}
        for i, slot in enumerate(listed):
            ranks[i] = seen.get(slot, 0)
            seen[slot] = int(ranks[i]) + 1
    return ranks


def _extend(array: I32Array, more: list[int]) -> I32Array:
    return np.concatenate([array, np.array(more, np.int32)])


def _extend_indptr(indptr: I32Array, counts: list[int]) -> I32Array:
    return np.concatenate([indptr, indptr[-1] + np.cumsum(np.array(counts, np.int32), dtype=np.int32)])
