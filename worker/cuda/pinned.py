"""Pinned host buffers that copies to the device read, used in turn."""

import torch

from worker.steps.batch import I32Array


class PinnedTurn:
    """The host buffers of one step; their content stays until the device has copied it."""

    def __init__(self, words: int) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._buffer = torch.empty(words, dtype=torch.int32, pin_memory=True)
        self._host: I32Array = self._buffer.numpy()
        self._used = 0

    def clear(self) -> None:
        self._used = 0

    def put(self, *parts: I32Array) -> torch.Tensor:
        """Return the parts, one after another, as a pinned int32 tensor."""
        start = self._used
        for part in parts:
            self._host[self._used : self._used + len(part)] = part
            self._used += len(part)
        return self._buffer[start : self._used]


class PinnedRing:
    """`depth` turns: the host fills the next one while copies from the others are on their way."""

    def __init__(self, depth: int, words: int) -> None:
        self._turns = [PinnedTurn(words) for _ in range(depth)]
        self.index = 0  # of the turn in use

    def begin(self) -> PinnedTurn:
        """Return the next turn, empty. Waits for the device only when it is `depth` steps behind."""
        self.index = (self.index + 1) % len(self._turns)
        turn = self._turns[self.index]
        if not turn.event.query():  # type: ignore[no-untyped-call]
            turn.event.synchronize()
        turn.clear()
        return turn

    def end(self) -> None:
        """Call this once all copies from the turn are queued on the current stream."""
        self._turns[self.index].event.record()
