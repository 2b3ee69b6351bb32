"""The contract between the loop and a device, real or simulated, and the account of a device's time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from proto.cache import longest_sequence
from proto.config import WorkerOptions
from proto.messages import Desync, StepPlan, StepResult, WorkerFacts


class DeviceError(Exception):
    """The worker cannot start as asked. The text names the flag or file at fault."""


class BatchInvarianceError(DeviceError):
    """Logits depend on the batch: a fault of this build on this machine, which should be reported."""


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer to the scheduler, and the monotonic ns before which it must not leave."""

    message: StepResult | Desync
    due: int


@dataclass(frozen=True, slots=True)
class Deferred:
    """An answer that the device has yet to give: `wait`, called by the output thread, returns it once it is there."""

    wait: Callable[[], StepResult]


class Device(Protocol):
    """Runs plans in order. All calls come from one thread."""

    facts: WorkerFacts
    clock: "StepClock"

    def reset(self, epoch: int) -> None:
        """Forget all slots; the next plan is the first of `epoch`."""

    def launch(self, plan: StepPlan) -> Completion | Deferred | None:
        """Start a step. Returns None when the plan is refused like the one before it."""


def wanted_length(options: WorkerOptions) -> int:
    """Return how long sequences may become if the KV cache has room. A flag beyond the model's own length is obeyed."""
    return options.max_model_len or options.manifest.config.max_position_embeddings


def facts_of(
    options: WorkerOptions,
    *,
    dtype: str,
    kv_element_bytes: int,
    pages: tuple[int, int],
    window: int,
    max_step_ids: int = 1,
) -> WorkerFacts:
    """Return the facts of a device with so many pages of each cache group. `window` 0: there is no group 1.

    `max_step_ids`: that a decode row may gain in one step.
    """
    config = options.manifest.config
    return WorkerFacts(
        num_pages=pages[0],
        page_size=options.page_size,
        max_model_len=longest_sequence(pages[0], window, pages[1], options.page_size, wanted_length(options)),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        vocab_size=config.vocab_size,
        device=options.device,
        dtype=dtype,
        kv_bytes_per_token=config.kv_bytes_per_token(kv_element_bytes),
        window=window,
        window_pages=pages[1],
        max_step_ids=max_step_ids,
    )


class StepClock:
    """When a device is free, and how it spent its time, in monotonic ns."""

    def __init__(self) -> None:
        self.free_at = 0
        self.steps = 0
        self.tokens = 0  # sampled
        self.busy_ns = 0
        self.idle_ns = 0  # waiting for a plan while rows were running
        self.last_ns = 0  # duration of the last step

    def record(self, start: int, end: int, rows_were_running: bool, tokens: int) -> int:
        """Record a step. Returns the ns that the device waited for it with rows to run."""
        idle = max(start - self.free_at, 0) if rows_were_running and self.free_at else 0
        self.free_at = end
        self.steps += 1
        self.tokens += tokens
        self.busy_ns += end - start
        self.idle_ns += idle
        self.last_ns = end - start
        return idle

    def counters(self) -> dict[str, float]:
        """For the heartbeat. A quiet night does not lower the busy share: time without work is neither."""
        worked = self.busy_ns + self.idle_ns
        return {
            "steps": float(self.steps),
            "tokens": float(self.tokens),
            "device_busy_seconds": self.busy_ns / 1e9,
            "device_idle_seconds": self.idle_ns / 1e9,
            "device_busy_share": self.busy_ns / worked if worked else 0.0,
            "step_seconds": self.last_ns / 1e9,
        }
