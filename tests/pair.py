"""Scheduler and worker in one process, in turns: what they say to each other is what they say in the ring.

Plans run as soon as they are made, as a stream runs what is launched on it; their results reach the scheduler
only when it has made as many plans ahead as its pipeline is deep.
"""

import hashlib
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from proto.cache import longest_sequence
from proto.config import WorkerOptions
from proto.ids import make_rid
from proto.messages import (
    U32,
    U64,
    Abort,
    Admit,
    Emit,
    Finish,
    Flush,
    FlushReply,
    Reject,
    Sampling,
    StepPlan,
    StepResult,
    WorkerFacts,
    column,
)
from scheduler.core import Scheduler
from tests.builders import GREEDY, i32, make_scheduler_options
from worker.cpu.device import CpuDevice
from worker.steps.batch import StepBatch

STEP_NS = 1_000_000
_SHORT_REQUESTS = 150


@dataclass
class Story:
    """What became of one request."""

    prompt: tuple[int, ...]
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    matched: int = -1
    reject: Reject | None = None
    logprobs: list[bytes] = field(default_factory=list)
    # of each position that was ever computed for sampling: digests of its logits, one for each time
    digests: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    logits: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)  # with keep_logits: the latest

    def digest(self, output: int) -> bytes:
        """Of the logits that output token `output` was drawn from. Equal each time, or AssertionError."""
        position = len(self.prompt) + output
        distinct = set(self.digests[position])
        assert len(distinct) == 1, f"position {position} had {len(distinct)} different logits"
        return next(iter(distinct))


def _smaller(facts: WorkerFacts, num_pages: int, window_pages: int) -> WorkerFacts:
    """A pool of so many pages; 0 = as it is. `num_pages` are of the one cache group where a model has but one."""
    full = (num_pages or facts.num_pages) if facts.num_pages else 0
    windowed = window_pages or (facts.window_pages if full else num_pages or facts.window_pages)
    limit = longest_sequence(full, facts.window, windowed, facts.page_size, facts.max_model_len)
    return msgspec.structs.replace(facts, num_pages=full, window_pages=windowed, max_model_len=limit)


class Pair:
    """One scheduler with one runner, which may be used by many pairs one after another."""

    def __init__(
        self,
        runner: CpuDevice,
        worker: WorkerOptions,
        *,
        depth: int = 2,
        prefix_caching: bool = False,
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int | None = None,
        debug_preempt_every: int = 0,
        num_pages: int = 0,
        window_pages: int = 0,
        keep_logits: bool = False,
        epoch: int = 1,
    ) -> None:
        facts = _smaller(runner.facts, num_pages, window_pages)
        options = make_scheduler_options(
            pipeline_depth=depth,
            prefix_caching=prefix_caching,
            max_num_batched_tokens=max_num_batched_tokens or worker.max_num_batched_tokens,
            max_num_seqs=max_num_seqs or worker.max_num_seqs,
            max_queue=10_000,
            debug_preempt_every=debug_preempt_every,
        )
        self.scheduler = Scheduler(options, facts, epoch)
        self.stories: dict[int, Story] = {}
        self.steps = 0
        self.deepest = 0  # most results that were awaited at once
        self._runner = runner
        self._keep_logits = keep_logits
        self._flight: deque[StepResult] = deque()
        self._now = STEP_NS
        self._slots: dict[int, int] = {}  # slot → rid
        runner.reset(self.scheduler.reset.epoch)

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        sampling: Sampling = GREEDY,
        min_new_tokens: int = 0,
        stop_ids: Sequence[int] = (),
        num_eos: int = 0,
    ) -> int:
        """Admit a request; returns its rid."""
        rid = make_rid(0, 1, len(self.stories) + 1)
        self.stories[rid] = Story(tuple(prompt), sampling)
        self.scheduler.on_message(
            Admit(
                rid=rid,
                attempt=1,
                prompt_ids=i32(*prompt),
                sampling=sampling,
                max_new_tokens=max_new_tokens,
                min_new_tokens=min_new_tokens,
                stop_ids=i32(*stop_ids),
                num_eos=num_eos,
                arrival=self._now,
            ),
            self._now,
        )
        return rid

    def abort(self, rid: int) -> None:
        message = Abort(rids=np.array([rid], U64).tobytes(), attempts=np.array([1], U32).tobytes())
        self.scheduler.on_message(message, self._now)
        self.stories[rid].finish = Finish.ABORT

    def promise_short_outputs(self) -> None:
        """Run requests of one token, so that admission expects as little of the next ones and must preempt."""
        for _ in range(_SHORT_REQUESTS):
            self.submit([1], 1)
        self.run()

    def step(self) -> bool:
        """Fill the pipeline, then deliver the oldest result; False when there was nothing to do."""
        while (due := self.scheduler.plan_due()) is not None:
            self._now = max(self._now, due)
            plan = self.scheduler.plan(self._now)
            if plan is None:
                break
            self._run(plan)
        if self._flight:
            self._now += STEP_NS
            self.scheduler.on_message(self._flight.popleft(), self._now)
        else:
            self._collect()
            return False
        self._collect()
        return True

    def run(self, limit: int = 100_000) -> None:
        """Until nothing is left to do. Raises AssertionError when `limit` steps do not suffice."""
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.counters()}")

    def check_idle(self) -> None:
        """Nothing runs, nothing waits, and after a flush every page is free."""
        assert not self.step()
        self.scheduler.on_message(Flush(rid=0), self._now)
        self._collect()
        counters = self.scheduler.counters()
        assert (counters["running"], counters["waiting"]) == (0, 0)
        assert counters["pages_free"] == counters["pages_total"]

    def _run(self, plan: StepPlan) -> None:
        self.steps += 1
        for slot in column(plan.released).tolist():
            del self._slots[slot]
        for row in plan.admits:
            self._slots[row.slot] = self._find(column(row.ids).tolist(), row.sampling)
        self._runner.on_logits = self._take_logits
        result = self._runner.step(plan)
        assert isinstance(result, StepResult), result
        self._flight.append(result)
        self.deepest = max(self.deepest, len(self._flight))

    def _find(self, ids: list[int], sampling: Sampling) -> int:
        """Which request an AdmitRow, which names none, is of: its ids are that one's prompt and tokens so far.

        Requests that this cannot tell apart are equals, and so must be their logits.
        """
        placed = set(self._slots.values())
        for rid, story in self.stories.items():
            if rid in placed or story.finish or story.reject is not None:
                continue
            if sampling == story.sampling and ids == [*story.prompt, *story.tokens]:
                return rid
        raise AssertionError(f"a row of {len(ids)} ids belongs to no request")

    def _take_logits(self, batch: StepBatch, logits: torch.Tensor) -> None:
        rows = np.searchsorted(batch.qo_indptr, batch.logit_tokens, side="right") - 1
        values = logits.numpy()
        for i, (row, token) in enumerate(zip(rows.tolist(), batch.logit_tokens.tolist(), strict=True)):
            story = self.stories[self._slots[int(batch.slots[row])]]
            position = int(batch.positions[token]) + 1
            story.digests[position].append(hashlib.blake2b(values[i].data, digest_size=16).digest())
            if self._keep_logits:
                story.logits[position] = values[i].copy()

    def _collect(self) -> None:
        for _, message in self.scheduler.outgoing():
            if isinstance(message, Emit):
                self._take_emit(message)
            elif isinstance(message, Reject):
                self.stories[message.rid].reject = message
            else:
                assert isinstance(message, FlushReply), message

    def _take_emit(self, emit: Emit) -> None:
        ids, rids = column(emit.ids).tolist(), column(emit.rids, U64).tolist()
        starts = column(emit.starts).tolist()
        counts = column(emit.counts).tolist() if emit.counts else [1] * len(rids)
        finishes = list(emit.finishes) or [0] * len(rids)
        matched = column(emit.matched).tolist() if emit.matched else [-1] * len(rids)
        payloads = dict(emit.logprobs)
        at = 0
        for row, rid in enumerate(rids):
            story = self.stories[rid]
            assert starts[row] == len(story.tokens), "a hole or a repetition in what was emitted"
            assert story.finish is Finish.NONE, "tokens after the end"
            story.tokens += ids[at : at + counts[row]]
            at += counts[row]
            story.finish = Finish(finishes[row])
            story.matched = matched[row]
            if row in payloads:
                story.logprobs.append(payloads[row])
