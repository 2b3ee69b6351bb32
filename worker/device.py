"""What the loop asks of a device, real or simulated, and the account of its time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from proto.messages import Desync, StepPlan, StepResult


class DeviceError(ValueError):
    """The device or model that was asked for cannot be had. The text names the flag or file at fault."""


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer to the scheduler, and the monotonic ns before which it must not leave."""

    message: StepResult | Desync
    due: int


@dataclass(frozen=True, slots=True)
class Deferred:
    """An answer that the device has yet to give: `wait`, called by the output thread, returns when it is there."""

    wait: Callable[[], StepResult]


class Device(Protocol):
    """Runs plans in order. All calls come from one thread."""

    num_pages: int  # of layers that attend to all positions; 0 = there are none
    window: int  # of the other layers, the largest, if these have pages of their own
    window_pages: int
    max_step_ids: int  # that a decode row may gain in one step
    page_size: int
    max_model_len: int
    vocab_size: int
    kv_bytes_per_token: int
    device: str
    dtype: str
    clock: "StepClock"

    def reset(self, epoch: int) -> None:
        """Forget all slots; the next plan is the first of `epoch`."""

    def launch(self, plan: StepPlan) -> Completion | Deferred | None:
        """Start a step; None when the plan is refused in silence."""


class StepClock:
    """When the device is free, and how it spent its time. Monotonic ns; one instance a device."""

    def __init__(self) -> None:
        self.free_at = 0
        self.steps = 0
        self.tokens = 0  # sampled
        self.busy_ns = 0
        self.idle_ns = 0  # waiting for a plan while rows were running
        self.last_ns = 0  # duration of the last step

    def record(self, start: int, end: int, rows_were_running: bool, tokens: int) -> int:
        """Enter a step. Returns the ns that the device waited for it with rows to run."""
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
