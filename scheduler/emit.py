"""What leaves the scheduler besides plans: collected as it happens, built into messages when the plan is out."""

from collections import defaultdict
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from proto.ids import Address, StageKind, server_of
from proto.messages import I32, U8, U32, U64, Emit, Finish, Message, Outgoing, Timing
from scheduler.pages import I32Array
from scheduler.request import Request
from scheduler.rows import RowView

_NO_COLUMNS = (b"", b"", b"")
_DETOKENIZER = Address(StageKind.DETOKENIZER, 0)


class End(msgspec.Struct):
    """A row of a step that ends its request."""

    row: int
    finish: Finish
    matched: int = -1
    matched_eos: bool = False


@dataclass(slots=True)
class StepRows:
    """The valid rows of one result, in order; columns are parallel to the view."""

    step: int
    view: RowView
    starts: I32Array
    ids: I32Array  # ragged by counts
    counts: I32Array | None = None  # ids of each row; None: one each
    ends: list[End] = field(default_factory=list)
    openings: list[tuple[int, bytes, Timing]] = field(default_factory=list)
    logprobs: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass(slots=True)
class BareRow:
    """The end of a request that got no token in this step."""

    request: Request
    end: End
    opening: tuple[bytes, Timing] | None


class Outbound:
    """Everything to be sent, in the order in which `build` returns it."""

    def __init__(self) -> None:
        self._messages: list[Outgoing] = []
        self._steps: list[StepRows] = []
        self._bare: dict[int, list[BareRow]] = defaultdict(list)  # by detokenizer
        self._closed: dict[int, list[tuple[int, int]]] = defaultdict(list)  # (rid, attempt) by detokenizer
        self._step = 0

    def send_to_server(self, rid: int, message: Message) -> None:
        """Tell the server that sent the request with this rid."""
        self._messages.append(Outgoing(Address(StageKind.SERVER, server_of(rid)), message))

    def add_rows(self, rows: StepRows) -> None:
        self._step = rows.step
        self._steps.append(rows)

    def add_bare(self, step: int, row: BareRow) -> None:
        self._step = step
        self._bare[row.request.detokenizer].append(row)

    def close(self, request: Request) -> None:
        """Tell the detokenizer to forget a request that it has open and that gets no end."""
        self._closed[request.detokenizer].append((request.rid, request.attempt))

    def build(self, detokenizers: int) -> list[Outgoing]:
        """Build the messages of everything since the last call."""
        built: list[Outgoing] = []
        for rows in self._steps:
            if detokenizers == 1:
                built.append(Outgoing(_DETOKENIZER, _emit(rows)))
            else:
                built.extend(_to_detokenizer(index, _emit(part)) for index, part in _split(rows))
        self._steps.clear()
        for index, bare in self._bare.items():
            built.append(_to_detokenizer(index, _bare_emit(self._step, bare)))
        self._bare.clear()
        # Last, since rows of results that came before the abort may stand above.
        for index, closed in self._closed.items():
            built.append(_to_detokenizer(index, _closing_emit(self._step, closed)))
        self._closed.clear()
        built += self._messages
        self._messages.clear()
        return built


def _to_detokenizer(index: int, emit: Emit) -> Outgoing:
    return Outgoing(Address(StageKind.DETOKENIZER, index), emit)


def _emit(rows: StepRows) -> Emit:
    view = rows.view
    finishes, matched, matched_eos = _end_columns(rows.ends, view.count) if rows.ends else _NO_COLUMNS
    return Emit(
        step=rows.step,
        rids=view.rids,
        attempts=view.attempts,
        starts=rows.starts.tobytes(),
        counts=b"" if rows.counts is None else rows.counts.tobytes(),
        ids=rows.ids.tobytes(),
        finishes=finishes,
        matched=matched,
        matched_eos=matched_eos,
        openings=tuple(rows.openings),
        logprobs=tuple(rows.logprobs),
    )


def _end_columns(ends: list[End], count: int) -> tuple[bytes, bytes, bytes]:
    """Return the columns finishes, matched and matched_eos; the latter two are empty when nothing matched."""
    finishes = bytearray(count)
    stops = []
    for end in ends:
        finishes[end.row] = end.finish
        if end.matched >= 0:
            stops.append(end)
    if not stops:
        return bytes(finishes), b"", b""
    matched = np.full(count, -1, I32)
    matched_eos = np.zeros(count, U8)
    for end in stops:
        matched[end.row] = end.matched
        matched_eos[end.row] = end.matched_eos
    return bytes(finishes), matched.tobytes(), matched_eos.tobytes()


def _split(rows: StepRows) -> list[tuple[int, StepRows]]:
    """Split a step's rows by detokenizer, and renumber them."""
    parts = []
    for index in np.unique(rows.view.detokenizers).tolist():
        mask = rows.view.detokenizers == index
        number: npt.NDArray[np.int64] = np.cumsum(mask) - 1
        parts.append(
            (
                index,
                StepRows(
                    step=rows.step,
                    view=rows.view.only(mask),
                    starts=rows.starts[mask],
                    ids=rows.ids[mask if rows.counts is None else mask.repeat(rows.counts)],
                    counts=None if rows.counts is None else rows.counts[mask],
                    ends=[
                        End(int(number[end.row]), end.finish, end.matched, end.matched_eos)
                        for end in rows.ends
                        if mask[end.row]
                    ],
                    openings=[
                        (int(number[row]), opening, timing) for row, opening, timing in rows.openings if mask[row]
                    ],
                    logprobs=[(int(number[row]), payload) for row, payload in rows.logprobs if mask[row]],
                ),
            )
        )
    return parts


def _bare_emit(step: int, bare: list[BareRow]) -> Emit:
    requests = [row.request for row in bare]
    for number, row in enumerate(bare):
        row.end.row = number
    finishes, matched, matched_eos = _end_columns([row.end for row in bare], len(bare))
    return Emit(
        step=step,
        rids=np.array([request.rid for request in requests], U64).tobytes(),
        attempts=np.array([request.attempt for request in requests], U32).tobytes(),
        starts=np.array([request.resumed for request in requests], I32).tobytes(),
        counts=np.zeros(len(bare), I32).tobytes(),
        finishes=finishes,
        matched=matched,
        matched_eos=matched_eos,
        openings=tuple((number, *row.opening) for number, row in enumerate(bare) if row.opening is not None),
    )


def _closing_emit(step: int, closed: list[tuple[int, int]]) -> Emit:
    return Emit(
        step=step,
        closed_rids=np.array([rid for rid, _ in closed], U64).tobytes(),
        closed_attempts=np.array([attempt for _, attempt in closed], U32).tobytes(),
    )
