"""Every message of the ring, one union for each inbox.

Conventions
- Columns travel as little-endian bytes: `i32` token ids, page ids, slots and counts, `u64` rids, `u32`
  attempts, `u8` flags. Read them with `column`, write them with `numpy.ndarray.tobytes`.
- Times are CLOCK_MONOTONIC nanoseconds (`time.monotonic_ns`), comparable between processes of one host;
  0 means none.
- Sender and addressee, with their incarnations, stand in the frame's header (`proto.channel`), not here.
- Nothing is derived in `__post_init__`: decoding would run it again.
"""

import hashlib
from enum import IntEnum
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec
import numpy as np
import numpy.typing as npt

from proto.ids import Address, StageKind
from proto.message import Message as Message
from proto.parameters import RequestParams as RequestParams
from proto.parameters import Sampling as Sampling
from proto.parameters import WorkClass as WorkClass
from proto.supervision import Drained as Drained
from proto.supervision import DrainRequest as DrainRequest
from proto.supervision import Facts as Facts
from proto.supervision import Heartbeat as Heartbeat
from proto.supervision import Histogram as Histogram
from proto.supervision import Progress as Progress
from proto.supervision import Ready as Ready
from proto.supervision import ServerFacts as ServerFacts
from proto.supervision import Serving as Serving
from proto.supervision import StageInfo as StageInfo
from proto.supervision import StageState as StageState
from proto.supervision import Stop as Stop
from proto.supervision import TokenizerFacts as TokenizerFacts
from proto.supervision import WorkerFacts as WorkerFacts
from proto.supervision import World as World

I32 = np.dtype("<i4")
U32 = np.dtype("<u4")
U64 = np.dtype("<u8")
U8 = np.dtype("u1")
ID_BYTES = I32.itemsize  # of a token or page id in a column


def column(data: bytes, dtype: np.dtype[Any] = I32) -> npt.NDArray[Any]:
    """Read-only array over the bytes of a column; no copy."""
    return np.frombuffer(data, dtype)


class Outgoing(NamedTuple):
    """A message, and whose inbox it goes to."""

    to: Address
    message: Message


class Finish(IntEnum):
    """Why a request ended; 0 = it goes on."""

    NONE = 0
    STOP = 1  # an EOS id, a stop id or a stop string
    LENGTH = 2  # max_new_tokens, or the context is full
    ABORT = 3
    TIME_LIMIT = 4
    ERROR = 5


class RejectCode(IntEnum):
    """Reason of a Reject; the server maps it to a gRPC status."""

    INVALID = 1  # INVALID_ARGUMENT: field, limit and value are set
    EXHAUSTED = 2  # RESOURCE_EXHAUSTED with retry_after_ms
    DEADLINE = 3  # DEADLINE_EXCEEDED: would not finish its prefill in time, or expired in a queue
    UNAVAILABLE = 4
    INTERNAL = 5


# --------------------------------------------------------------------------- requests


class Resume(Message, frozen=True, tag="resume"):
    """Output that the caller already has of a request that is submitted again (docs/architecture.md, 'Supervision')."""

    output_ids: bytes  # i32, delivered output tokens
    characters: int  # delivered characters of text


class ChatMessage(Message, frozen=True, tag="chat"):
    role: str
    content: str


class Submit(Message, frozen=True, tag="submit"):
    """Server → tokenizer: one attempt of one request. Exactly one of text, token_ids, chat is set."""

    rid: int
    attempt: int
    text: str | None = None
    token_ids: bytes | None = None  # i32
    chat: tuple[ChatMessage, ...] | None = None
    now: float = 0.0  # Unix seconds, fixed once per request: templates that print a date replay equally
    arrival: int = 0  # monotonic ns when the server had read the call
    params: RequestParams = RequestParams()
    resume: Resume | None = None


class TokenizeCall(Message, frozen=True, tag="tokenize"):
    """Server → tokenizer: ids of a text or chat, for the Tokenize rpc. One of text, chat is set."""

    rid: int
    text: str | None = None
    chat: tuple[ChatMessage, ...] | None = None
    now: float = 0.0
    add_special_tokens: bool = True


class DetokenizeCall(Message, frozen=True, tag="detokenize"):
    """Server → detokenizer: text of ids, for the Detokenize rpc."""

    rid: int
    ids: bytes  # i32
    skip_special_tokens: bool = False


class TokenizeReply(Message, frozen=True, tag="tokenized"):
    """Tokenizer → server."""

    rid: int
    ids: bytes  # i32
    pieces: tuple[str, ...]  # the tokenizer's own spelling of each id


class DetokenizeReply(Message, frozen=True, tag="detokenized"):
    """Detokenizer → server."""

    rid: int
    text: str


class Accepted(Message, frozen=True, tag="accepted"):
    """Tokenizer → server: the request is on its way to a scheduler."""

    rid: int
    attempt: int
    replica: int
    prompt_tokens: int


class Reject(Message, frozen=True, tag="reject"):
    """Tokenizer, scheduler or detokenizer → server: the request ends here, unserved."""

    rid: int
    attempt: int
    code: RejectCode
    field: str  # path of the offending field in the .proto, "" when none
    message: str  # says limit and value
    retry_after_ms: int = 0  # with EXHAUSTED


class Opening(Message, frozen=True, tag="opening"):
    """What the detokenizer must know of a request.

    Written by the tokenizer, carried through the scheduler as opaque bytes, delivered with the
    request's first Emit: so no order between two senders matters.
    """

    rid: int
    attempt: int
    prompt_tokens: int
    prompt_tail: bytes = b""  # i32, last ids of the prompt: context of the first output characters
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    min_new_tokens: int = 0  # stop strings are not looked for in the text of earlier tokens
    skip_special_tokens: bool = True
    logprobs: int = -1  # as in Sampling
    resume: Resume | None = None


class Admit(Message, frozen=True, tag="admit"):
    """Tokenizer → scheduler: a request to run. A higher attempt supersedes a lower one."""

    rid: int
    attempt: int
    prompt_ids: bytes  # i32, without resumed output
    max_new_tokens: int  # resolved: ≥ 0 and prompt + max_new_tokens ≤ max_model_len
    output_ids: bytes = b""  # i32, resumed output: prefilled, but counted as output
    sampling: Sampling = Sampling()
    min_new_tokens: int = 0  # stop ids are masked before
    stop_ids: bytes = b""  # i32: the model's EOS ids first (none with ignore_eos), then the caller's
    num_eos: int = 0  # how many of stop_ids are EOS ids
    work_class: WorkClass = WorkClass.CHAT
    priority: int = 0
    cache_salt: str = ""
    deadline: int = 0
    arrival: int = 0
    opening: bytes = b""  # encoded Opening


class Abort(Message, frozen=True, tag="abort"):
    """Server → scheduler: forget these requests. May overtake its Admit, so a tombstone is kept."""

    rids: bytes  # u64
    attempts: bytes  # u32: every attempt up to this one


class Census(Message, frozen=True, tag="census"):
    """Server → scheduler, once a second: all requests that this server holds to be in the scheduler."""

    server: int
    rids: bytes  # u64
    attempts: bytes  # u32


class CensusReply(Message, frozen=True, tag="census_reply"):
    """Scheduler → server: those of the census that it does not know."""

    rids: bytes  # u64
    attempts: bytes  # u32


class Flush(Message, frozen=True, tag="flush"):
    """Server → scheduler: drop every cached prefix page that no request uses."""

    rid: int


class FlushReply(Message, frozen=True, tag="flushed"):
    """Scheduler → server."""

    rid: int
    pages: int  # freed


class Emit(Message, frozen=True, tag="emit"):
    """Scheduler → detokenizer: what one step gave. Row columns are parallel.

    A row with no tokens and a finish ends a request that generated nothing (max_new_tokens = 0).
    """

    step: int
    rids: bytes = b""  # u64
    attempts: bytes = b""  # u32
    indexes: bytes = b""  # u8, which of n sequences; empty = all 0
    starts: bytes = b""  # i32, output position of the row's first token
    counts: bytes = b""  # i32, tokens per row; empty = one each
    ids: bytes = b""  # i32, ragged by counts
    finishes: bytes = b""  # u8 Finish; empty = none ends
    matched: bytes = b""  # i32, the stop id that ended the row, else -1; empty = all -1
    matched_eos: bytes = b""  # u8, 1 where matched is an EOS id; empty = all 0
    openings: tuple[tuple[int, bytes, "Timing"], ...] = ()  # (row, Opening, times up to the first token)
    logprobs: tuple[tuple[int, bytes], ...] = ()  # (row, encoded TokenLogprobs of at least its tokens)
    closed_rids: bytes = b""  # u64: aborted, superseded or failed since the last Emit: forget them
    closed_attempts: bytes = b""  # u32


class Timing(Message, frozen=True, tag="timing"):
    """Durations of a request until its first Emit, in ns."""

    cached_tokens: int  # prompt tokens that the prefix cache spared
    queue: int  # arrival → first scheduled
    prefill: int  # first scheduled → first result


class TokenLogprobs(Message, frozen=True, tag="logprobs"):
    """Worker → (opaque to the scheduler) → detokenizer: of the raw distribution, natural log.

    One entry per token of the row: the chosen token's, and the k most likely (k may be 0).
    """

    chosen: tuple[float, ...]
    top_ids: tuple[bytes, ...]  # i32 each
    top_logprobs: tuple[tuple[float, ...], ...]


class Delta(Message, frozen=True, tag="delta"):
    """New output of one request: ids, text and logprobs that belong together."""

    rid: int
    attempt: int
    index: int = 0
    start: int = 0  # output position of the first id
    ids: bytes = b""  # i32; may be empty
    text: str = ""  # may be empty while characters or a possible stop string are held back
    text_start: int = 0  # characters of this index before `text`
    finish: Finish = Finish.NONE
    matched_id: int = -1  # -1 = none
    matched_is_eos: bool = False
    matched_string: str = ""  # "" = none
    prompt_tokens: int = 0
    timing: Timing | None = None  # with the first delta of an attempt
    logprobs: TokenLogprobs | None = None  # as long as ids


class Deltas(Message, frozen=True, tag="deltas"):
    """Detokenizer → server: one message a step, with the rows of that server."""

    rows: tuple[Delta, ...]


# --------------------------------------------------------------------------- the step protocol


class AdmitRow(Message, frozen=True, tag="row"):
    """A request enters a slot. It stays until the slot is released."""

    slot: int
    ids: bytes  # i32: all known ids (prompt and, after preemption or replay, output)
    start: int  # ids before this are in the KV cache already (a prefix hit)
    pages: bytes  # i32: pages of the slot from position 0 on, shared ones first
    sampling: Sampling
    min_len: int  # stop_ids are masked while prompt + output is shorter
    stop_ids: bytes  # i32
    window_pages: bytes = b""  # i32, of group 1: those before `start`, from the first that the id at `start` sees on


class StepPlan(Message, frozen=True, tag="plan"):
    """Scheduler → worker rank 0: one step, as a difference from the one before.

    Applied in the order of the fields. Rows run in this order: decode rows, then chunks; results come
    in the same order for rows that sample. A decode row computes the slot's newest token (which only
    the worker may know yet) and samples the next. Positions follow from what was planned before, so a
    steady decode step carries nothing but its number and the appended pages.

    A decode row with a limit of L > 1 computes L positions, its newest token's and those of L - 1 guesses of the
    worker's, and gains 0 to L tokens. It is planned again once the scheduler knows how many. Until told otherwise,
    every rank takes it to have gained L: the next plan that decodes it says so where it gained fewer (`rewinds`). So
    what a rank does follows from plans alone, and ranks need not see results.

    Pages are of two cache groups: 0 is of layers that attend to all positions, 1 of those behind a window. A model has
    one of them or both. Pages behind the window are never named again: from the plan on whose first id of the slot
    does not see them, they may be anybody's.
    """

    epoch: int
    step: int
    previous: int  # step before this one in this epoch; anything else is a Desync
    released: bytes = b""  # i32 slots
    admits: tuple[AdmitRow, ...] = ()
    append_slots: bytes = b""  # i32
    append_pages: bytes = b""  # i32, parallel: appended to the slot's page table
    append_groups: bytes = b""  # u8, parallel: cache group; empty = all in group 0
    rewinds: bytes = b""  # i32 × 2: slot, position that it computes next; of slots that gained less than assumed
    decode_slots: bytes | None = None  # i32 slots to decode, in row order; None = the same as before
    limits: bytes = b""  # i32, parallel to the decode rows: tokens that each gains at most; empty = exactly one each
    chunks: bytes = b""  # i32 × 3: slot, count of ids to prefill (from where the slot stands), sample (0/1)


class Reset(Message, frozen=True, tag="reset"):
    """Scheduler → worker: forget all slots and start a new epoch; the next plan has previous = 0."""

    epoch: int


class RowStatus(IntEnum):
    OK = 0
    NOT_FINITE = 1  # the row's logits hold NaN or infinity: the scheduler fails this request alone


class StepResult(Message, frozen=True, tag="result"):
    """Worker → scheduler: positional in plan order over rows that sampled."""

    epoch: int
    step: int
    ids: bytes  # i32, ragged by counts
    counts: bytes = b""  # i32 tokens per row, 0 to its limit where that is above 1, else 1; empty = one each
    statuses: bytes = b""  # u8 RowStatus; empty = all OK
    logprobs: tuple[tuple[int, bytes], ...] = ()  # (row, encoded TokenLogprobs)
    device_ns: int = 0  # time the device spent on the step
    idle_ns: int = 0  # time the device waited before it for a plan, while rows were running


class Desync(Message, frozen=True, tag="desync"):
    """Worker → scheduler: a plan did not follow the one before; refused until Reset."""

    epoch: int
    step: int
    expected_epoch: int
    expected_previous: int


# --------------------------------------------------------------------------- inboxes

ServerInbox = Accepted | Reject | Deltas | TokenizeReply | DetokenizeReply | CensusReply | FlushReply | World | Stop
TokenizerInbox = Submit | TokenizeCall | World | Stop
SchedulerInbox = Admit | Abort | Census | Flush | StepResult | Desync | World | Stop
WorkerInbox = StepPlan | Reset | World | Stop
DetokenizerInbox = Emit | DetokenizeCall | World | Stop
SupervisorInbox = Ready | Progress | Heartbeat | Serving | DrainRequest | Drained

INBOXES: dict[StageKind, Any] = {
    StageKind.SUPERVISOR: SupervisorInbox,
    StageKind.SERVER: ServerInbox,
    StageKind.TOKENIZER: TokenizerInbox,
    StageKind.SCHEDULER: SchedulerInbox,
    StageKind.WORKER: WorkerInbox,
    StageKind.DETOKENIZER: DetokenizerInbox,
}


def _describe() -> str:
    """Golden listing of every message: one line each, fields in wire order."""
    lines = []
    kinds: list[type[msgspec.Struct]] = [Address, *_subclasses(Message)]
    for kind in sorted(kinds, key=lambda c: c.__name__):
        fields = ", ".join(f"{f.name}: {_plain(f.type)}" for f in msgspec.structs.fields(kind))
        lines.append(f"{kind.__name__}[{kind.__struct_config__.tag}]({fields})")
    return "\n".join(lines) + "\n"


def _plain(kind: Any) -> Any:
    """A field's type without what `proto.parameters` says of it: ranges and help texts do not travel."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _subclasses(base: type[Message]) -> list[type[Message]]:
    return [c for sub in base.__subclasses__() for c in (sub, *_subclasses(sub))]


SCHEMA_LISTING = _describe()
SCHEMA_HASH = hashlib.sha256(SCHEMA_LISTING.encode()).hexdigest()[:16]
