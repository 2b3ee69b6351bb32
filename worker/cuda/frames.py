"""Pinned host memory of steps in flight: what goes to the device in one copy, and what comes back in one."""

from collections import deque

import numpy as np
import numpy.typing as npt
import torch

from worker.steps.batch import I32Array

Span = tuple[int, int]  # first word and end


class Frame:
    """Pinned memory and events of one step. From `Frames.take` to `Frames.give` it belongs to that step alone."""

    def __init__(self, words: int, rows: int) -> None:
        self.words = torch.empty(words, dtype=torch.int32, pin_memory=True)
        self.drawn = torch.empty(rows, 2, dtype=torch.int32, pin_memory=True)  # as `sampling.sample` returns
        self.logprobs = torch.empty(0, dtype=torch.float64, pin_memory=True)
        self.on_device: torch.Tensor | None = None  # what the copy to `logprobs` reads, kept until it is done
        self.started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.used = 0
        self._host: I32Array = self.words.numpy()

    def put(self, values: npt.NDArray[np.int32], *, size: int = 0, fill: int = 0) -> Span:
        """Append words, filled up to `size`; returns where they lie, here and on the device.

        Raises ValueError when the step is larger than any that the buffers were made for.
        """
        first, end = self.used, self.used + max(len(values), size)
        if end > len(self._host):
            raise ValueError(f"a step of more than {len(self._host)} words of metadata")
        self._host[first : first + len(values)] = values
        self._host[first + len(values) : end] = fill
        self.used = end
        return first, end

    def logprobs_of(self, rows: int, columns: int) -> torch.Tensor:
        """Pinned float64 [rows, columns]. Grows when a step wants more than any before it."""
        if self.logprobs.numel() < rows * columns:
            self.logprobs = torch.empty(2 * rows * columns, dtype=torch.float64, pin_memory=True)
        return self.logprobs[: rows * columns].view(rows, columns)


class Frames:
    """Frames that no step uses. The launching thread takes them, the output thread gives them back."""

    def __init__(self, count: int, words: int, rows: int) -> None:
        self._size = (words, rows)
        self._free = deque(Frame(words, rows) for _ in range(count))

    def take(self) -> Frame:
        """Return a frame without waiting: with more steps in flight than expected, one more frame is made."""
        frame = self._free.popleft() if self._free else Frame(*self._size)
        frame.used = 0
        return frame

    def give(self, frame: Frame) -> None:
        """The step's copies are done and its result is read."""
        frame.on_device = None
        self._free.append(frame)
