"""Ids in, text out: the detokenizer's whole logic, without sockets.

The detokenizer is the authority on text and on stop strings. An end by id or by length arrives decided.
"""

import logging
from collections import deque

import msgspec

from detokenizer_proc.decoding import TextDecoder
from detokenizer_proc.sequence import OutputSequence
from detokenizer_proc.vocabulary import Vocabulary
from proto.channel import decode_as
from proto.ids import Address, StageKind, server_of
from proto.messages import (
    ID_BYTES,
    U32,
    U64,
    Delta,
    Deltas,
    DetokenizeCall,
    DetokenizeReply,
    Emit,
    Finish,
    Opening,
    Outgoing,
    Timing,
    TokenLogprobs,
    column,
)

log = logging.getLogger(__name__)

# Sequences that ended with a stop string and wait for the scheduler to close them, which it does unless it dies.
_MOST_STOPPED = 4096
_FINISHES = {int(finish): finish for finish in Finish}


class _Row(msgspec.Struct, frozen=True, gc=False):
    """One row of an Emit."""

    index: int
    start: int
    ids: list[int]
    id_bytes: bytes
    finish: Finish
    matched: int
    matched_eos: bool
    logprobs: bytes | None


class Detokenizer:
    """Every sequence in flight, by rid and index. The only writer of their records."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._decoder = TextDecoder(vocabulary)
        self._live: dict[int, dict[int, OutputSequence]] = {}
        self._stopped: deque[tuple[int, int, int]] = deque()  # (rid, index, attempt), oldest first
        self.tokens = 0
        self.unknown_rows = 0

    @property
    def live_requests(self) -> int:
        return len(self._live)

    def on_call(self, call: DetokenizeCall) -> Outgoing:
        """Decode ids that follow no prompt. The server has checked them."""
        text = self._decoder.decode(column(call.ids).tolist(), call.skip_special_tokens)
        return Outgoing(_server(server_of(call.rid)), DetokenizeReply(call.rid, text))

    def on_emit(self, emit: Emit) -> list[Outgoing]:
        """Decode one step; returns a message for each server that has rows in it."""
        rids: list[int] = column(emit.rids, U64).tolist()
        attempts: list[int] = column(emit.attempts, U32).tolist()
        for place, opening, timing in emit.openings:
            self._open_sequence(opening, emit.indexes[place] if emit.indexes else 0, timing)
        deltas: dict[int, list[Delta]] = {}
        for place, row in enumerate(_rows(emit, len(rids))):
            rid = rids[place]
            delta = self._on_row(rid, attempts[place], row)
            if delta is not None:
                deltas.setdefault(server_of(rid), []).append(delta)
        # Last: what an Emit opens it may close as well.
        for rid, attempt in zip(
            column(emit.closed_rids, U64).tolist(), column(emit.closed_attempts, U32).tolist(), strict=True
        ):
            self._close_request(rid, attempt)
        return [Outgoing(_server(server), Deltas(tuple(rows))) for server, rows in deltas.items()]

    def _open_sequence(self, body: bytes, index: int, timing: Timing) -> None:
        opening: Opening = decode_as(body, Opening)
        sequences = self._live.setdefault(opening.rid, {})
        older = sequences.get(index)
        if older is None or older.attempt < opening.attempt:
            sequences[index] = OutputSequence(opening, timing, self._decoder)

    def _close_request(self, rid: int, attempt: int) -> None:
        """Forget every sequence of a request up to this attempt."""
        left = {index: s for index, s in self._live.get(rid, {}).items() if s.attempt > attempt}
        if left:
            self._live[rid] = left
        else:
            self._live.pop(rid, None)

    def _forget(self, rid: int, index: int) -> None:
        sequences = self._live[rid]
        del sequences[index]
        if not sequences:
            del self._live[rid]

    def _stop(self, rid: int, index: int, sequence: OutputSequence) -> None:
        """Keep a sequence only so that its late rows are known and dropped."""
        sequence.stopped = True
        self._stopped.append((rid, index, sequence.attempt))
        if len(self._stopped) > _MOST_STOPPED:
            rid, index, attempt = self._stopped.popleft()
            oldest = self._live.get(rid, {}).get(index)
            if oldest is not None and oldest.attempt == attempt:
                self._forget(rid, index)

    def _on_row(self, rid: int, attempt: int, row: _Row) -> Delta | None:
        sequences = self._live.get(rid)
        sequence = sequences.get(row.index) if sequences is not None else None
        if sequence is None or sequence.attempt != attempt:
            self.unknown_rows += 1
            return None
        if sequence.stopped:
            if row.finish:
                self._forget(rid, row.index)
            return None
        delta = _advance(rid, sequence, row)
        self.tokens += len(row.ids)
        if row.finish:
            self._forget(rid, row.index)
        elif delta.finish:
            self._stop(rid, row.index, sequence)
        return delta


def _server(index: int) -> Address:
    return Address(StageKind.SERVER, index)


def _rows(emit: Emit, count: int) -> list[_Row]:
    """The columns of an Emit as rows; columns left empty have their default."""
    ids: list[int] = column(emit.ids).tolist()
    starts: list[int] = column(emit.starts).tolist()
    counts: list[int] = column(emit.counts).tolist() if emit.counts else [1] * count
    indexes = emit.indexes or bytes(count)
    finishes = emit.finishes or bytes(count)
    matched: list[int] = column(emit.matched).tolist() if emit.matched else [-1] * count
    matched_eos = emit.matched_eos or bytes(count)
    logprobs = dict(emit.logprobs)
    rows = []
    begin = 0
    for place in range(count):
        end = begin + counts[place]
        rows.append(
            _Row(
                indexes[place],
                starts[place],
                ids[begin:end],
                emit.ids[ID_BYTES * begin : ID_BYTES * end],
                _FINISHES[finishes[place]],
                matched[place],
                matched_eos[place] != 0,
                logprobs.get(place),
            )
        )
        begin = end
    return rows


def _advance(rid: int, sequence: OutputSequence, row: _Row) -> Delta:
    """Feed one row to its sequence and say what is new."""
    finish, matched, matched_eos = row.finish, row.matched, row.matched_eos
    ids = row.ids
    if finish is Finish.STOP and matched >= 0:
        ids = ids[:-1]  # the id that ended the output has no text in it
    stop = sequence.resumed_stop
    kept, text = 0, ""
    if not stop:
        kept, text, stop = sequence.append_ids(ids, row.start)
    if stop:
        finish, matched, matched_eos = Finish.STOP, -1, False
    else:
        kept = len(row.ids)
        if finish:
            sequence.has_output = sequence.has_output or kept > 0
            text += sequence.end()
    logprobs = None
    if sequence.logprobs >= 0:
        logprobs = _logprobs(row, kept)
        if logprobs is None:
            log.error("rid %d: a row of %d tokens came without as many logprobs", rid, len(row.ids))
            kept, finish, stop, matched, matched_eos = 0, Finish.ERROR, "", -1, False
            text = ""
    position, text = sequence.count_shown(text)
    timing, sequence.timing = sequence.timing, None
    return Delta(
        rid,
        sequence.attempt,
        row.index,
        row.start,
        row.id_bytes[: ID_BYTES * kept],
        text,
        position,
        finish,
        matched,
        matched_eos,
        stop,
        sequence.prompt_tokens,
        timing,
        logprobs,
    )


def _logprobs(row: _Row, kept: int) -> TokenLogprobs | None:
    """Those of the ids kept; None when the payload lacks some. It has too many where a stop id cut the row's run."""
    if not row.ids:
        return TokenLogprobs((), (), ())
    if row.logprobs is None:
        return None
    payload: TokenLogprobs = decode_as(row.logprobs, TokenLogprobs)
    if not len(payload.chosen) == len(payload.top_ids) == len(payload.top_logprobs) >= len(row.ids):
        return None
    if kept == len(payload.chosen):
        return payload
    return TokenLogprobs(payload.chosen[:kept], payload.top_ids[:kept], payload.top_logprobs[:kept])
