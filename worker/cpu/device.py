"""A CPU that runs one step after another while we wait: plan in, result out."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from proto.messages import Desync, StepPlan, StepResult, WorkerFacts
from worker.cpu.sampler import Sampled, sample
from worker.device import Completion, StepClock
from worker.ranks.group import ALONE, Group
from worker.steps.batch import StepBatch
from worker.steps.sampling import SamplingRows
from worker.steps.sequence import PlanSequence
from worker.steps.tables import SlotTables

_NOTHING_SAMPLED = Sampled(np.zeros(0, np.int32), np.zeros(0, np.uint8), ())


class CpuDevice:
    """Implements `worker.device.Device`. Made by `worker.cpu.start.start`.

    Every rank of `group` has one and gets the same plans; rank 0 samples.
    """

    def __init__(self, facts: WorkerFacts, logits: Callable[[StepBatch], torch.Tensor], group: Group = ALONE) -> None:
        """`logits`: the forward pass, see `CpuStep.logits`."""
        self.facts = facts
        self.clock = StepClock()
        self.on_logits: Callable[[StepBatch, torch.Tensor], None] | None = None  # for tests
        self._logits = logits
        self._group = group
        self._sequence = PlanSequence()
        self._tables = SlotTables.of(facts)
        self._last_token = np.zeros(facts.max_num_seqs, np.int32)

    def reset(self, epoch: int) -> None:
        """Forget all slots; the next plan is the first of `epoch`."""
        self._sequence.reset(epoch)
        self._tables.reset()

    def launch(self, plan: StepPlan) -> Completion | None:
        """As `step`; the answer may leave at once."""
        answer = self.step(plan)
        return None if answer is None else Completion(answer, due=0)

    def step(self, plan: StepPlan) -> StepResult | Desync | None:
        """Run a plan to its end; None when it is refused like the one before it. Raises PlanError, PeerLostError."""
        self._group.check_same((plan.epoch, plan.step), "a plan of (epoch, step)")
        if not self._sequence.follows(plan):
            return self._sequence.refuse(plan)
        waited = self._tables.running_through(plan)
        batch = self._tables.apply(plan)
        decodes = batch.decode_rows
        batch.token_ids[:decodes] = self._last_token[batch.slots[:decodes]]
        start = time.monotonic_ns()
        sampled = self._run(batch)
        idle = self.clock.record(start, time.monotonic_ns(), waited, len(sampled.ids))
        return StepResult(
            epoch=plan.epoch,
            step=plan.step,
            ids=sampled.ids.tobytes(),
            counts=b"",
            statuses=sampled.statuses.tobytes() if sampled.statuses.any() else b"",
            logprobs=sampled.logprobs,
            device_ns=self.clock.last_ns,
            idle_ns=idle,
        )

    def _run(self, batch: StepBatch) -> Sampled:
        if not len(batch.token_ids):
            return _NOTHING_SAMPLED
        logits = self._logits(batch)
        if self.on_logits is not None:
            self.on_logits(batch, logits)
        if not len(batch.logit_tokens):
            return _NOTHING_SAMPLED
        rows = self._tables.sampling_rows(batch)
        sampled = self._sample(logits, rows)
        self._last_token[rows.slots] = sampled.ids
        return sampled

    def _sample(self, logits: torch.Tensor, rows: SamplingRows) -> Sampled:
        """Sample on rank 0; the other ranks get its ids and nothing else."""
        if self._group.rank > 0:
            sampled = replace(_NOTHING_SAMPLED, ids=np.zeros(len(rows.slots), np.int32))
        else:
            sampled = sample(logits.numpy(), rows)
        return replace(sampled, ids=self._group.of_rank_0(torch.tensor(sampled.ids)).numpy())
