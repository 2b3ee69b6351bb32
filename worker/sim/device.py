"""A GPU that only takes the time: the metadata of every step is built for real, its arithmetic is not done.

Steps queue on a virtual clock as on a stream: a step starts when it is launched or when the one before it
ends, whichever is later, so that late wake-ups of this process never stretch the device's own time.
"""

import math
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from proto.cache import CacheGroups
from proto.channel import encode
from proto.config import WorkerOptions
from proto.messages import I32, StepPlan, StepResult, TokenLogprobs, column
from worker.device import Completion, DeviceError, StepClock, facts_of, wanted_length
from worker.sim.roofline import ELEMENT_BYTES, Roofline, parse_gpu
from worker.steps.batch import I32Array
from worker.steps.random import U64Array
from worker.steps.sampling import SamplingRows
from worker.steps.sequence import PlanSequence
from worker.steps.tables import SlotTables


class SimulatedDevice:
    """Implements `worker.device.Device`. `clock_ns` gives monotonic ns (tests put their own in)."""

    def __init__(self, options: WorkerOptions, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        model = options.manifest.config
        gpu = parse_gpu(options.device)
        dtype = model.dtype if options.dtype == "auto" else options.dtype
        if dtype not in ELEMENT_BYTES:
            raise DeviceError(f"--dtype {dtype}: simulated devices support auto, {', '.join(ELEMENT_BYTES)}")
        element_bytes = ELEMENT_BYTES[dtype]
        self._roofline = Roofline(model, gpu, element_bytes)
        token_bytes = model.kv_bytes_per_token(element_bytes)
        groups = CacheGroups.of(model, options.page_size, token_bytes, wanted_length(options))
        pages = self._pool_pages(options, gpu.memory, groups)
        self.facts = facts_of(
            options,
            dtype=dtype,
            kv_element_bytes=element_bytes,
            pages=pages,
            window=groups.window,
            max_step_ids=int(gpu.max_step_ids),
        )
        self.clock = StepClock()
        self._clock_ns = clock_ns
        self._sequence = PlanSequence()
        self._tables = SlotTables.of(self.facts, lists_pages=False)
        eos_ids = [i for i in options.manifest.eos_ids if i < model.vocab_size]
        self._words = np.setdiff1d(np.arange(model.vocab_size, dtype=np.int32), np.array(eos_ids, np.int32))
        self._eos_id = eos_ids[0] if eos_ids else None
        self._eos_below = np.uint64(int(gpu.eos * (2**32)))

    def _pool_pages(self, options: WorkerOptions, memory: float, groups: CacheGroups) -> tuple[int, int]:
        if options.num_pages is not None:
            return groups.resolve_num_pages(options.num_pages)
        room = options.kv_bytes
        if room is None:
            room = int(memory * options.gpu_memory_utilization) - self._roofline.weight_bytes
        pages = groups.divide(max(room, 0))
        if (groups.full_layers and not pages[0]) or (groups.window and not pages[1]):
            raise DeviceError(
                f"--device {options.device}: {memory / 1e9:.1f} GB × {options.gpu_memory_utilization} leave no page of "
                f"KV cache beside {self._roofline.weight_bytes / 1e9:.1f} GB of weights"
            )
        return pages

    def reset(self, epoch: int) -> None:
        self._sequence.reset(epoch)
        self._tables.reset()

    def launch(self, plan: StepPlan) -> Completion | None:
        """Queue a step behind those launched before; its result is due when the device would be done."""
        if not self._sequence.follows(plan):
            refusal = self._sequence.refuse(plan)
            return None if refusal is None else Completion(refusal, due=0)
        waited = self._tables.running_through(plan)
        batch = self._tables.apply(plan)
        rows = self._tables.sampling_rows(batch)
        # Here a real device gets the step. What follows is the simulation's own work, which must not count as waiting.
        launched = self._clock_ns()
        ids = self._invent(rows)
        counts = self._draw_counts(plan, rows) if plan.limits else None
        logprobs = self._uniform_logprobs(rows, ids, plan, counts)
        if counts is not None:
            ids = ids[_is_gained(plan, counts)]
        duration = int(self._roofline.seconds(batch) * 1e9)
        start = max(launched, self.clock.free_at)
        idle = self.clock.record(start, start + duration, waited, len(ids))
        result = StepResult(
            epoch=plan.epoch,
            step=plan.step,
            ids=ids.tobytes(),
            counts=b"" if counts is None else counts.tobytes(),
            logprobs=logprobs,
            device_ns=duration,
            idle_ns=idle,
        )
        return Completion(result, due=start + duration)

    def _invent(self, rows: SamplingRows) -> I32Array:
        """Return ids as a function of position and, unless greedy, seed; an EOS only with the probability asked for."""
        seeds = np.where(rows.params["temperature"] > 0, rows.params["seed"], np.uint64(0))
        numbers = scramble(seeds + rows.positions.astype(np.uint64) * _ODD)
        ids: I32Array = self._words[(numbers >> np.uint64(32)) % np.uint64(len(self._words))]
        if self._eos_below and self._eos_id is not None:
            ends = ((numbers & np.uint64(0xFFFFFFFF)) < self._eos_below) & (rows.positions >= rows.params["min_len"])
            ids[ends] = self._eos_id
        return ids

    def _draw_counts(self, plan: StepPlan, rows: SamplingRows) -> I32Array:
        """Draw how many ids each row gains, 0 to its limit. Which ids they are does not depend on it."""
        limits, firsts = _row_limits(plan, len(rows.slots))
        seeds = rows.params["seed"].take(firsts) + rows.positions.take(firsts).astype(np.uint64) * _ODD
        numbers = scramble(seeds ^ scramble(np.full(len(limits), plan.step, np.uint64)))
        counts: I32Array = (numbers >> np.uint64(32)).astype(np.int64) % (limits + 1)
        return np.where(limits > 1, counts, 1).astype(np.int32)

    def _uniform_logprobs(
        self, rows: SamplingRows, ids: I32Array, plan: StepPlan, counts: I32Array | None
    ) -> tuple[tuple[int, bytes], ...]:
        """Encode the log-probabilities of the rows that want them, as the real sampler does.

        All words are equally likely, so the chosen one and its successors stand for the top.
        """
        if not (rows.params["logprobs"] >= 0).any():
            return ()
        _, firsts = _row_limits(plan, len(ids))
        logprob = -math.log(len(self._words))
        encoded = []
        for row, first in enumerate(firsts.tolist()):
            top = min(int(rows.params["logprobs"][first]), self.facts.vocab_size)
            if top < 0:
                continue
            gained = ids[first : first + (1 if counts is None else int(counts[row]))]
            tops = ((gained[:, None] + np.arange(top)) % self.facts.vocab_size).astype(I32)
            found = TokenLogprobs(
                chosen=(logprob,) * len(gained),
                top_ids=tuple(line.tobytes() for line in tops),
                top_logprobs=((logprob,) * top,) * len(gained),
            )
            encoded.append((row, encode(found)))
        return tuple(encoded)


def _row_limits(plan: StepPlan, sampled: int) -> tuple[I32Array, npt.NDArray[np.int64]]:
    """Return how many of the `sampled` tokens belong to each row of a result, and which is its first."""
    limits = column(plan.limits)
    limits = np.concatenate([limits, np.ones(sampled - limits.sum(), np.int32)])
    return limits, limits.cumsum() - limits


def _is_gained(plan: StepPlan, counts: I32Array) -> npt.NDArray[np.bool_]:
    """Return whether each sampled token is among those that its row gains."""
    sampled = int(column(plan.limits).sum()) + len(counts) - len(column(plan.limits))
    limits, firsts = _row_limits(plan, sampled)
    mask: npt.NDArray[np.bool_] = np.arange(sampled) - firsts.repeat(limits) < counts.repeat(limits)
    return mask


_ODD = np.uint64(0x9E3779B97F4A7C15)


def scramble(values: U64Array) -> npt.NDArray[np.uint64]:
    """Finaliser of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
