"""One generation as the server sees it: what was delivered, what waits to be written, how it ends."""

from collections.abc import Callable

import msgspec

from proto.messages import ID_BYTES, Delta, Finish, TokenLogprobs
from server.errors import CallError, SlowReaderError

# Python objects that hold a delta, beside its text and ids, and a logprob.
_DELTA_BYTES = 320
_LOGPROB_BYTES = 48


class Ending(msgspec.Struct, frozen=True):
    """How an output ended."""

    finish: Finish
    matched_id: int = -1  # -1 = none
    matched_is_eos: bool = False
    matched_string: str = ""  # "" = none


class OutputPiece(msgspec.Struct, frozen=True):
    """One write: every delta that was ready, joined."""

    first: bool
    text: str
    ids: bytes  # i32
    logprobs: TokenLogprobs | None  # as long as ids
    ending: Ending | None


class Generation:
    """A request in flight. Its attributes are for others to read: it changes through its methods only.

    `Record` calls those that say what the ring did; the call's handler those that read and write the stream.
    """

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
        self.writing_since = 0  # monotonic ns, 0 = no write waits for the client
        self._notify: Callable[[], None] = _ignore
        self._interrupt: Callable[[], object] = _ignore
        self._max_buffer: int | None = None  # bytes that may wait for a client; None = its handler always reads
        self._buffered = 0
        self._deltas: list[Delta] = []
        self._taken = False  # whether the first piece is out

    @property
    def over(self) -> bool:
        """True once its one terminal event has happened."""
        return self.ending is not None or self.error is not None

    @property
    def ready(self) -> bool:
        """True when `take_piece` has something to return or to raise."""
        return bool(self._deltas) or self.over

    # ------------------------------------------------------------------ for the record

    def accept(self, replica: int, prompt_tokens: int) -> None:
        """Note that a tokenizer sent it to a replica's scheduler."""
        self.replica = replica
        self.prompt_tokens = prompt_tokens

    def miss(self) -> int:
        """Count a census reply that its scheduler does not know it; returns how many came in a row."""
        self.times_unknown += 1
        return self.times_unknown

    def append_delta(self, delta: Delta, now: int) -> None:
        """Add the next delta. Ends with SlowReaderError when too much waits for the client."""
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
        if self._max_buffer is not None and self._buffered > self._max_buffer:
            self.cut(f"{self._buffered} bytes of output wait, the limit is {self._max_buffer}")
            return
        if delta.finish is not Finish.NONE:
            self.ending = Ending(delta.finish, delta.matched_id, delta.matched_is_eos, delta.matched_string)
        self._notify()

    def finish(self, ending: Ending) -> None:
        """End normally, without a delta."""
        self.ending = ending
        self._notify()

    def fail(self, error: CallError) -> None:
        """End with an error, which is raised once everything before it has been written."""
        self.error = error
        self._notify()

    def cut(self, why: str) -> None:
        """End at once because of the client; what was not written yet is lost."""
        self.error = SlowReaderError(f"the client does not read: {why}")
        self._deltas.clear()
        self._interrupt()
        self._notify()

    # ------------------------------------------------------------------ for its handler

    def attach(self, notify: Callable[[], None]) -> None:
        """Call `notify` whenever there is a piece to take, or an error."""
        self._notify = notify

    def limit_buffer(self, max_buffer: int, interrupt: Callable[[], object]) -> None:
        """Let at most so many bytes wait for the client; `interrupt` ends a write that it does not take."""
        self._max_buffer = max_buffer
        self._interrupt = interrupt

    def begin_write(self, now: int) -> None:
        self.writing_since = now

    def end_write(self) -> None:
        self.writing_since = 0

    def take_piece(self) -> OutputPiece | None:
        """Return everything that can be written now, or None. Raises the error once nothing is left before it."""
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
    """Stands in until a handler listens."""
