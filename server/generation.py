"""One generation as the server sees it: what was delivered, what waits to be written, how it ends."""

from collections.abc import Callable

import msgspec

from proto.messages import ID_BYTES, Delta, Finish, TokenLogprobs
from server.errors import CallError, SlowReaderError

# What a delta takes beside its text and ids, and a logprob: objects of Python's.
_DELTA_BYTES = 320
_LOGPROB_BYTES = 48


class Ending(msgspec.Struct, frozen=True):
    """How an output ended."""

    finish: Finish
    matched_id: int = -1  # -1 = none
    matched_is_eos: bool = False
    matched_string: str = ""  # "" = none


class OutputPiece(msgspec.Struct, frozen=True):
    """What one write takes: every delta that was ready, joined."""

    first: bool
    text: str
    ids: bytes  # i32
    logprobs: TokenLogprobs | None  # as long as ids
    ending: Ending | None


class Generation:
    """A request in flight. Written only by `Record` and, through `take`, by its one handler."""

    def __init__(self, rid: int, client_id: str, size: int, seed: int, arrival: int) -> None:
        self.rid = rid
        self.client_id = client_id
        self.size = size  # bytes in flight that it counts for
        self.seed = seed
        self.attempt = 1
        self.replica = -1  # -1 = not accepted by a tokenizer yet
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.arrival = arrival  # monotonic ns, as all times here
        self.queue = 0
        self.prefill = 0
        self.first_at = 0
        self.last_at = 0
        self.ids_received = 0  # output position that the next delta must start at
        self.characters = 0  # of text; the next delta's text must start there
        self.times_unknown = 0  # census replies without it since the last delta
        self.ending: Ending | None = None
        self.error: CallError | None = None
        self.notify: Callable[[], None] = _ignore  # something can be taken, or the error is set
        self.interrupt: Callable[[], object] = _ignore  # leave a write that the client does not take
        self.max_buffer: int | None = None  # bytes that may wait for a client; None = its handler always reads
        self.writing_since = 0  # monotonic ns, 0 = no write waits for the client
        self._buffered = 0
        self._deltas: list[Delta] = []
        self._taken = False  # whether the first piece is out

    @property
    def over(self) -> bool:
        """Whether its one terminal event has come."""
        return self.ending is not None or self.error is not None

    @property
    def ready(self) -> bool:
        """Whether `take` would not return None."""
        return bool(self._deltas) or self.over

    def append(self, delta: Delta, now: int) -> None:
        """Take a delta in its turn. Ends with SlowReaderError when too much waits for the client."""
        self.times_unknown = 0
        self.ids_received += len(delta.ids) // ID_BYTES
        self.characters += len(delta.text)
        self.prompt_tokens = delta.prompt_tokens
        if delta.timing is not None:
            self.cached_tokens = delta.timing.cached_tokens
            self.queue, self.prefill = delta.timing.queue, delta.timing.prefill
        self.first_at = self.first_at or now
        self.last_at = now
        self._deltas.append(delta)
        self._buffered += _size(delta)
        if self.max_buffer is not None and self._buffered > self.max_buffer:
            self.cut(f"{self._buffered} bytes of output wait, the limit is {self.max_buffer}")
            return
        if delta.finish is not Finish.NONE:
            self.ending = Ending(delta.finish, delta.matched_id, delta.matched_is_eos, delta.matched_string)
        self.notify()

    def finish(self, ending: Ending) -> None:
        """End in good order without a delta."""
        self.ending = ending
        self.notify()

    def fail(self, error: CallError) -> None:
        """End with an error, after what waits was written."""
        self.error = error
        self.notify()

    def cut(self, why: str) -> None:
        """End at once because of the client; what waits is lost."""
        self.error = SlowReaderError(f"the client does not read: {why}")
        self._deltas.clear()
        self.interrupt()
        self.notify()

    def take(self) -> OutputPiece | None:
        """All that can be written now, or None. Raises the error once nothing waits before it."""
        deltas, self._deltas = self._deltas, []
        self._buffered = 0
        if not deltas and self.ending is None:
            if self.error is not None:
                raise self.error
            return None
        first, self._taken = not self._taken, True
        if len(deltas) == 1:
            delta = deltas[0]
            return OutputPiece(first, delta.text, delta.ids, delta.logprobs, self.ending)
        return OutputPiece(
            first=first,
            text="".join(delta.text for delta in deltas),
            ids=b"".join(delta.ids for delta in deltas),
            logprobs=_joined([delta.logprobs for delta in deltas if delta.logprobs is not None]),
            ending=self.ending,
        )


def _joined(parts: list[TokenLogprobs]) -> TokenLogprobs | None:
    if not parts:
        return None
    return TokenLogprobs(
        chosen=tuple(value for part in parts for value in part.chosen),
        top_ids=tuple(ids for part in parts for ids in part.top_ids),
        top_logprobs=tuple(values for part in parts for values in part.top_logprobs),
    )


def _size(delta: Delta) -> int:
    size = _DELTA_BYTES + len(delta.text) + len(delta.ids)
    if delta.logprobs is not None:
        size += sum(_LOGPROB_BYTES * (1 + len(values)) for values in delta.logprobs.top_logprobs)
        size += _LOGPROB_BYTES * len(delta.logprobs.chosen)
    return size


def _ignore() -> None:
    """Nobody listens yet."""
