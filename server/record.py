"""The record of requests in flight: calls and messages in, messages out; no I/O, no clock.

It alone decides what reaches a caller. A delta is taken only if its attempt is current and it starts where
the last one ended: an earlier one is a repetition and dropped, a later one means that something was lost.
Each generation gets exactly one terminal event; whatever else comes for it is dropped.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from proto.config import ServerOptions
from proto.ids import Address, StageKind, make_rid
from proto.messages import (
    U32,
    U64,
    Abort,
    Accepted,
    Census,
    CensusReply,
    Delta,
    Deltas,
    Finish,
    Outgoing,
    Reject,
    Submit,
    column,
)
from server.errors import CallError, DuplicateIdError, OverloadedError, UnavailableError, error_of
from server.generation import Ending, Generation
from server.limits import MAX_STALL_SECONDS, InFlight
from server.validate import Ask

# What a request counts for, beside its own bytes.
_OVERHEAD_BYTES = 1024
_RETRY_AFTER_MS = 500
# A second apart. The first may miss a request that is on its way, or whose last delta is.
_UNKNOWN_LIMIT = 3


class Record:
    """Owner of every generation in flight in this server process."""

    def __init__(self, index: int, incarnation: int, options: ServerOptions) -> None:
        self._index = index
        self._incarnation = incarnation
        self._options = options
        self._counter = 0
        self._open: dict[int, Generation] = {}  # until its handler closes it
        self._by_client_id: dict[str, Generation] = {}
        self._schedulers = [Address(StageKind.SCHEDULER, i) for i in range(options.num_schedulers)]
        self.in_flight = InFlight(options)
        self.finished = 0
        self.failed = 0
        self.abandoned = 0  # cancelled, past their deadline, or their client gone
        self.repeated_deltas = 0
        self.late_deltas = 0  # of generations that are over, or of older attempts

    def __len__(self) -> int:
        """Generations whose handlers have not closed them."""
        return len(self._open)

    def next_rid(self) -> int:
        """A new request id of this process."""
        self._counter += 1
        return make_rid(self._index, self._incarnation, self._counter)

    def reserve(self, size: int) -> int:
        """Count in a request of so many bytes; returns what to give to `in_flight.remove`. Raises OverloadedError."""
        size += _OVERHEAD_BYTES
        obstacle = self.in_flight.obstacle(size)
        if obstacle:
            raise OverloadedError(f"this server is full: {obstacle}", _RETRY_AFTER_MS)
        self.in_flight.add(size)
        return size

    def open_generation(self, ask: Ask, size: int, arrival: int, now: float) -> tuple[Generation, Outgoing]:
        """Begin the generation that a request of `size` bytes asks for.

        `arrival` in monotonic ns, `now` in Unix seconds. Raises DuplicateIdError or OverloadedError, and then
        nothing has changed.
        """
        if ask.request_id in self._by_client_id:
            raise DuplicateIdError(f"request_id {ask.request_id!r} belongs to a live request")
        size = self.reserve(size)
        rid = self.next_rid()
        client_id = ask.request_id or f"{rid:016x}"
        generation = Generation(rid, client_id, size, ask.params.sampling.seed, arrival)
        self._open[rid] = generation
        self._by_client_id[client_id] = generation
        submit = Submit(
            rid=rid,
            attempt=generation.attempt,
            text=ask.text,
            token_ids=ask.token_ids,
            chat=ask.chat,
            now=now,
            arrival=arrival,
            params=ask.params,
        )
        return generation, Outgoing(self.tokenizer_for(rid), submit)

    def tokenizer_for(self, rid: int) -> Address:
        """Pick a tokenizer, in turn."""
        return Address(StageKind.TOKENIZER, rid % self._options.num_tokenizers)

    def detokenizer_for(self, rid: int) -> Address:
        """Pick the detokenizer that answers a Detokenize call, in turn."""
        return Address(StageKind.DETOKENIZER, rid % self._options.num_detokenizers)

    def close_generation(self, generation: Generation) -> list[Outgoing]:
        """Forget a generation whose handler ends, for whatever reason. Aborts it unless it is over."""
        if self._open.pop(generation.rid, None) is None:
            return []
        del self._by_client_id[generation.client_id]
        self.in_flight.remove(generation.size)
        if generation.error is not None:
            self.failed += 1
        elif generation.ending is not None:
            self.finished += 1
        else:
            self.abandoned += 1
            return self._abort(generation)
        return []

    def abort_by_client_id(self, client_id: str) -> list[Outgoing] | None:
        """Finish a live generation with ABORT; None when no live request has that id."""
        generation = self._by_client_id.get(client_id)
        if generation is None or generation.over:
            return None
        generation.finish(Ending(Finish.ABORT))
        return self._abort(generation)

    def fail_all(self, error: CallError) -> list[Outgoing]:
        """End every generation: the ring is broken."""
        live = [generation for generation in self._open.values() if not generation.over]
        for generation in live:
            generation.fail(error)
        return self._abort(*live) if live else []

    def on_deltas(self, deltas: Deltas, now: int) -> list[Outgoing]:
        """Add deltas to their generations; returns aborts for those that this ends."""
        out: list[Outgoing] = []
        for delta in deltas.rows:
            generation = self._open.get(delta.rid)
            if generation is None or generation.over or delta.attempt != generation.attempt:
                self.late_deltas += 1
            else:
                out += self._on_delta(generation, delta, now)
        return out

    def _on_delta(self, generation: Generation, delta: Delta, now: int) -> list[Outgoing]:
        here = (generation.ids_received, generation.characters)
        found = (delta.start, delta.text_start)
        if found[0] < here[0] or (found[0] == here[0] and found[1] < here[1]):
            self.repeated_deltas += 1
            return []
        if found != here:
            generation.fail(
                UnavailableError(
                    f"output was lost inside the server after token {here[0]}, character {here[1]}: "
                    f"the next part begins at token {found[0]}, character {found[1]}"
                )
            )
            return self._abort(generation)
        generation.append_delta(delta, now)
        # The scheduler does not know of a stop string, of the detokenizer's faults, nor of clients that do not read.
        unknown_there = generation.error or delta.matched_string or delta.finish is Finish.ERROR
        return self._abort(generation) if unknown_there else []

    def on_accepted(self, accepted: Accepted) -> None:
        """Note that a tokenizer passed the request on."""
        generation = self._open.get(accepted.rid)
        if generation is not None and accepted.attempt == generation.attempt:
            generation.accept(accepted.replica, accepted.prompt_tokens)

    def on_reject(self, reject: Reject) -> None:
        """Fail the generation that an inner stage refused."""
        generation = self._open.get(reject.rid)
        if generation is not None and not generation.over and reject.attempt == generation.attempt:
            generation.fail(error_of(reject))

    def cut_stalled(self, now: int) -> list[Outgoing]:
        """End generations whose clients have read nothing for too long; `now` in monotonic ns."""
        limit = now - MAX_STALL_SECONDS * 10**9
        stalled = [g for g in self._open.values() if 0 < g.writing_since < limit and not g.over]
        for generation in stalled:
            generation.cut(f"a write has waited for {MAX_STALL_SECONDS} seconds")
        return self._abort(*stalled) if stalled else []

    def census(self) -> list[Outgoing]:
        """Tell each scheduler which requests this server believes it has.

        Those on their way are listed to all, so that a scheduler which has one already does not take it for an orphan.
        """
        live = [generation for generation in self._open.values() if not generation.over]
        out = []
        for scheduler in self._schedulers:
            rids, attempts = _columns(g for g in live if g.replica in (-1, scheduler.replica))
            out.append(Outgoing(scheduler, Census(server=self._index, rids=rids, attempts=attempts)))
        return out

    def on_census_reply(self, reply: CensusReply) -> None:
        """Count requests that a scheduler does not know, and fail them when that goes on."""
        for rid, attempt in zip(column(reply.rids, U64).tolist(), column(reply.attempts, U32).tolist(), strict=True):
            generation = self._open.get(rid)
            if generation is None or generation.over or generation.replica < 0 or attempt != generation.attempt:
                continue
            if generation.miss() >= _UNKNOWN_LIMIT:
                generation.fail(
                    UnavailableError("the request was lost inside the server: its scheduler does not know it")
                )

    def _abort(self, *generations: Generation) -> list[Outgoing]:
        """Abort at every scheduler: it may not be known yet which one has a generation."""
        rids, attempts = _columns(generations)
        return [Outgoing(scheduler, Abort(rids=rids, attempts=attempts)) for scheduler in self._schedulers]


def _columns(generations: Iterable[Generation]) -> tuple[bytes, bytes]:
    """rids and attempts as columns."""
    rows: Sequence[tuple[int, int]] = [(g.rid, g.attempt) for g in generations]
    return (
        np.array([rid for rid, _ in rows], U64).tobytes(),
        np.array([attempt for _, attempt in rows], U32).tobytes(),
    )
