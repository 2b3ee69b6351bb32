"""The worker's memory of every slot, in columns, and how a plan becomes the batch of a step.

A plan is a difference, so what a steady decode step costs here is a handful of numpy calls over rows and
Python only for what changed.
"""

import numpy as np
import numpy.typing as npt

from proto.messages import ID_BYTES, U8, AdmitRow, StepPlan, WorkerFacts, column
from worker.steps.batch import I32Array, PageLists, StepBatch
from worker.steps.page_table import PageTable, outside
from worker.steps.sampling import SAMPLING, SamplingRows, sampling_records
from worker.steps.sequence import PlanError

_NOTHING = np.zeros(0, np.int32)
_NO_LISTS = PageLists(_NOTHING, np.zeros(1, np.int32), _NOTHING, _NOTHING)


class SlotTables:
    """Page tables, lengths and sampling parameters by slot.

    `max_slots` is the number of slots, `num_pages` that of the KV pool's pages, each of `page_size` tokens. With
    `window_pages`, layers behind a `window` have pages of their own; `num_pages` 0: all layers are.
    `stride`: see `PageTable`.
    `max_step_ids` is the highest limit of a decode row.
    `lists_pages`: whether batches list their rows' pages in `kv_indices` and their tokens' places in `kv_slots`. A
    device that keeps page tables of its own, up to date by `placed_pages`, makes both itself, and gets empty ones.
    """

    def __init__(
        self,
        *,
        max_slots: int,
        num_pages: int,
        page_size: int,
        max_model_len: int,
        vocab_size: int,
        window: int = 0,
        window_pages: int = 0,
        stride: int = 1,
        max_step_ids: int = 1,
        lists_pages: bool = True,
    ) -> None:
        self.page_size = page_size
        self._max_step_ids = max_step_ids
        self.vocab_size = vocab_size
        # One page to spare: a row that has reached its end may hold the page of a token that never comes.
        width = -(-max_model_len // page_size) + 1
        # By cache group; None: no layer is of it.
        self._groups = [
            PageTable(
                slots=max_slots,
                width=width,
                num_pages=pages,
                page_size=page_size,
                window=behind,
                stride=stride,
                lists_pages=lists_pages,
            )
            if pages
            else None
            for pages, behind in ((num_pages, 0), (window_pages, window))
        ]
        self._lengths = np.zeros(max_slots, np.int32)  # tokens whose K/V are written once the planned steps ran
        self._live = np.zeros(max_slots, np.bool_)
        self._decodable = np.zeros(max_slots, np.bool_)  # its last id was sampled here, nothing is left to prefill
        self._sampling = np.zeros(max_slots, SAMPLING)
        self._stop_ids: dict[int, I32Array] = {}
        self._known_ids: dict[int, I32Array] = {}  # of slots with ids to prefill
        self._arange = np.arange(max_slots + 1, dtype=np.int32)
        self._forget_rows()

    @classmethod
    def of(cls, facts: WorkerFacts, *, stride: int = 1, lists_pages: bool = True) -> "SlotTables":
        """Return the tables of a device."""
        return cls(
            max_slots=facts.max_num_seqs,
            num_pages=facts.num_pages,
            page_size=facts.page_size,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            window=facts.window,
            window_pages=facts.window_pages,
            max_step_ids=facts.max_step_ids,
            stride=stride,
            lists_pages=lists_pages,
        )

    def reset(self) -> None:
        """Free every slot."""
        self._live[:] = False
        self._decodable[:] = False
        self._stop_ids.clear()
        self._known_ids.clear()
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._slots = _NOTHING  # that decode, in row order
        self._params = self._sampling[:0]  # theirs
        self._steady: StepBatch | None = None  # the last batch, if it had these rows and no others
        self._lists: list[PageLists | None] = []  # of the last batch, by cache group
        self._sampled = self._slots, self._params  # of the last batch

    def running_through(self, plan: StepPlan) -> bool:
        """Return whether a slot was in use before the plan that stays in use after its releases."""
        return int(np.count_nonzero(self._live)) > len(plan.released) // ID_BYTES

    def apply(self, plan: StepPlan) -> StepBatch:
        """Apply a plan in the order of its fields. Raises PlanError.

        `token_ids` of decode rows are left 0: their values live with whoever samples.
        """
        for table in self._groups:
            if table is not None:
                table.forget_placed()
        try:
            self._release(column(plan.released))
            for row in plan.admits:
                self._admit(row)
            self._append(plan)
            self._rewind(column(plan.rewinds).reshape(-1, 2))
            self._take_order(plan)
            if plan.limits or plan.chunks:
                return self._mixed(self._limits(plan), column(plan.chunks).reshape(-1, 3))
            return self._decode()
        except PlanError as error:
            raise PlanError(f"plan {plan.step} of epoch {plan.epoch}: {error}") from None

    def sampling_rows(self, batch: StepBatch) -> SamplingRows:
        """Return the parameters of the sampled tokens of the last batch, in the order of `logit_tokens`."""
        slots, params = self._sampled
        positions = batch.positions.take(batch.logit_tokens) + np.int32(1)
        stops = [
            (row, self._stop_ids[int(slots[row])]) for row in (positions < params["min_len"]).nonzero()[0].tolist()
        ]
        return SamplingRows(slots, positions, params, stops)

    def placed_pages(self, group: int) -> tuple[I32Array, I32Array]:
        """Pages of a cache group that the last plan placed: where in the table of slots, and their ids."""
        return self._group(group).placed()

    # ------------------------------------------------------------------ the fields of a plan

    def _check_slots(self, slots: I32Array, doing: str) -> None:
        if outside(slots, len(self._live)) or np.count_nonzero(self._live.take(slots)) < len(slots):
            inside = (slots >= 0) & (slots < len(self._live))
            bad = int(slots[~(inside & self._live[np.where(inside, slots, 0)])][0])
            raise PlanError(f"{doing} slot {bad}, which holds no request (slots are 0..{len(self._live) - 1})")

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
        if outside(ids, self.vocab_size):
            raise PlanError(f"admits slot {slot} with a token id outside 0..{self.vocab_size - 1}")
        full, windowed = self._groups
        if (len(pages) and full is None) or (row.window_pages and windowed is None):
            raise PlanError(f"admits slot {slot} with pages of a cache group that this model does not have")
        if full is not None:
            if row.start > len(pages) * self.page_size:
                raise PlanError(f"admits slot {slot} with {row.start} ids cached in {len(pages)} pages")
            full.admit(slot, 0, pages)
        if windowed is not None:
            windowed.admit_behind(slot, row.start, column(row.window_pages))
        self._live[slot] = True
        self._lengths[slot] = row.start
        self._known_ids[slot] = ids
        # An id that the model does not have cannot be sampled, so masking it means nothing.
        stop_ids = column(row.stop_ids)
        if outside(stop_ids, self.vocab_size):
            stop_ids = stop_ids[(stop_ids >= 0) & (stop_ids < self.vocab_size)]
        self._stop_ids[slot] = stop_ids
        self._sampling[slot] = sampling_records([row])[0]

    def _append(self, plan: StepPlan) -> None:
        slots, pages = column(plan.append_slots), column(plan.append_pages)
        if len(slots) != len(pages):
            raise PlanError(f"appends {len(pages)} pages to {len(slots)} slots")
        if not len(slots):
            return
        self._check_slots(slots, "appends a page to")
        if not plan.append_groups:
            self._group(0).append(slots, pages)
            return
        groups = column(plan.append_groups, U8)
        if len(groups) != len(slots):
            raise PlanError(f"appends {len(pages)} pages of {len(groups)} cache groups")
        for group in sorted(set(plan.append_groups)):
            mine = groups == group
            self._group(group).append(slots[mine], pages[mine])

    def _group(self, group: int) -> PageTable:
        table = self._groups[group] if group < len(self._groups) else None
        if table is None:
            raise PlanError(f"appends a page of cache group {group}, which this model does not have")
        return table

    def _rewind(self, pairs: I32Array) -> None:
        """Set back slots that gained fewer ids than their limit was, to the position that they compute next."""
        if not len(pairs):
            return
        slots, positions = pairs[:, 0], pairs[:, 1]
        self._check_slots(slots, "rewinds")
        lengths = self._lengths.take(slots)
        wrong = (positions < 0) | (positions >= lengths)
        if wrong.any():
            row = int(wrong.argmax())
            raise PlanError(f"rewinds slot {slots[row]} to position {positions[row]}; it is at {lengths[row]}")
        self._lengths[slots] = positions
        self._steady = None

    def _take_order(self, plan: StepPlan) -> None:
        """Set which slots decode, in row order."""
        if plan.decode_slots is None:
            if len(plan.released) or plan.admits:
                self._check_decodable(self._slots, "goes on decoding", "was released")
            return
        slots = column(plan.decode_slots).copy()  # of a read-only column, which torch would warn of
        self._check_slots(slots, "decodes")
        self._check_decodable(slots, "decodes", "has ids left to prefill or never sampled")
        chosen = np.zeros(len(self._live), np.bool_)  # ten times as fast as np.unique
        chosen[slots] = True
        if np.count_nonzero(chosen) != len(slots):
            raise PlanError("decodes a slot twice")
        self._slots, self._params, self._steady = slots, self._sampling.take(slots), None

    def _check_decodable(self, slots: I32Array, doing: str, because: str) -> None:
        decodable = self._decodable.take(slots)
        if np.count_nonzero(decodable) < len(slots):
            raise PlanError(f"{doing} slot {int(slots[decodable.argmin()])}, which {because}")

    # ------------------------------------------------------------------ rows

    def _decode(self) -> StepBatch:
        """Make the batch of one more token of each row."""
        slots, before = self._slots, self._steady
        self._sampled = slots, self._params
        if before is not None:
            self._steady = batch = self._next(before)
        else:
            ones = self._arange[: len(slots) + 1]
            positions = self._lengths.take(slots)
            self._check_decode(slots, positions)
            token_ids = np.zeros(len(slots), np.int32)
            self._steady = batch = self._build(slots, token_ids, positions, slots, ones, ones[:-1])
        self._lengths[slots] = batch.positions + np.int32(1)
        return batch

    def _next(self, before: StepBatch) -> StepBatch:
        """Make the batch of the same rows one token on. Only rows that enter a page are looked at one by one."""
        slots = before.slots
        positions = before.positions + np.int32(1)
        last_page_len = before.last_page_len + np.int32(1)
        entering = (last_page_len > self.page_size).nonzero()[0]
        last_page_len[entering] = 1
        self._lists = [
            None if table is None or lists is None else table.advance(lists, slots, positions, entering)
            for table, lists in zip(self._groups, self._lists, strict=True)
        ]
        return self._batch(
            np.zeros(before.decode_rows, np.int32),
            positions,
            before.qo_indptr,
            last_page_len,
            slots,
            before.logit_tokens,
        )

    def _limits(self, plan: StepPlan) -> I32Array:
        """Return how many tokens each decode row computes, which is also how many ids it gains at most."""
        if not plan.limits:
            return np.ones(len(self._slots), np.int32)
        limits = column(plan.limits)
        if len(limits) != len(self._slots):
            raise PlanError(f"sets {len(limits)} limits for {len(self._slots)} decode rows")
        if outside(limits - np.int32(1), self._max_step_ids):
            raise PlanError(f"sets limits of {limits.min()} to {limits.max()} ids; the most is {self._max_step_ids}")
        return limits

    def _mixed(self, limits: I32Array, chunks: npt.NDArray[np.int32]) -> StepBatch:
        """Make the batch of decode rows with so many tokens each, and chunks [n, 3] after them: slot, count, sample."""
        decodes = len(self._slots)
        self._check_decode(self._slots, self._lengths.take(self._slots) + limits - np.int32(1))
        if len(set(chunks[:, 0].tolist())) < len(chunks):
            raise PlanError("prefills a slot twice")
        slots = np.concatenate([self._slots, chunks[:, 0]])
        counts = np.concatenate([limits, chunks[:, 1]])
        qo_indptr = np.zeros(len(slots) + 1, np.int32)
        counts.cumsum(out=qo_indptr[1:])
        decoded = np.zeros(int(qo_indptr[decodes]), np.int32)
        token_ids = np.concatenate([decoded, *[self._take_chunk(*c) for c in chunks.tolist()]])
        # A token's position is its row's start and as many as stand before it in the row.
        starts: I32Array = self._lengths.take(slots)
        positions = np.arange(len(token_ids), dtype=np.int32)
        positions += (starts - qo_indptr[:-1]).repeat(counts)
        token_slots = slots.repeat(counts)
        ends = qo_indptr[1 + decodes :].compress(chunks[:, 2]) - np.int32(1)
        logit_tokens = np.concatenate([np.arange(len(decoded), dtype=np.int32), ends])
        sampled = token_slots.take(logit_tokens)
        self._sampled = sampled, self._sampling.take(sampled)
        self._lengths[slots] = starts + counts
        self._steady = None
        return self._build(slots, token_ids, positions, token_slots, qo_indptr, logit_tokens)

    def _build(
        self,
        slots: I32Array,
        token_ids: I32Array,
        positions: I32Array,
        token_slots: I32Array,
        qo_indptr: I32Array,
        logit_tokens: I32Array,
    ) -> StepBatch:
        """Make the batch of rows whose tokens are given."""
        page_index = positions // self.page_size
        last = qo_indptr[1:] - np.int32(1)
        last_position, used = positions.take(last), page_index.take(last) + np.int32(1)
        starts = positions.take(qo_indptr[:-1])
        self._lists = [
            None if table is None else table.lists(slots, starts, used, token_slots, positions, page_index)
            for table in self._groups
        ]
        last_page_len = last_position + np.int32(1) - (used - np.int32(1)) * np.int32(self.page_size)
        return self._batch(token_ids, positions, qo_indptr, last_page_len, slots, logit_tokens)

    def _batch(
        self,
        token_ids: I32Array,
        positions: I32Array,
        qo_indptr: I32Array,
        last_page_len: I32Array,
        slots: I32Array,
        logit_tokens: I32Array,
    ) -> StepBatch:
        full, windowed = self._lists
        full = full or _NO_LISTS
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            kv_slots=full.kv_slots,
            qo_indptr=qo_indptr,
            kv_indptr=full.kv_indptr,
            kv_indices=full.kv_indices,
            last_page_len=last_page_len,
            slots=slots,
            decode_rows=len(self._slots),
            logit_tokens=logit_tokens,
            windowed=windowed,
            list_version=full.list_version,
        )

    def _check_decode(self, slots: I32Array, positions: I32Array) -> None:
        page_index = positions // self.page_size
        for table in self._groups:
            if table is not None:
                table.check_decode(slots, positions, page_index)

    def _take_chunk(self, slot: int, count: int, sample: int) -> I32Array:
        """Return the next `count` ids of a slot."""
        ids = self._known_ids.get(slot)
        if ids is None:
            raise PlanError(f"prefills slot {slot}, which holds no ids to prefill")
        start = int(self._lengths[slot])
        end = start + count
        if count < 1 or end > len(ids):
            raise PlanError(f"prefills {count} ids of slot {slot} from position {start}; it has {len(ids)} ids")
        if sample and end < len(ids):
            raise PlanError(f"samples slot {slot} at position {end} before the end of its {len(ids)} ids")
        for table in self._groups:
            if table is not None:
                table.check_prefill(slot, end)
        if end == len(ids):
            del self._known_ids[slot]
            self._decodable[slot] = bool(sample)
        return ids[start:end]
