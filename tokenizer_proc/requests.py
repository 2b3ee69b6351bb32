"""Requests in, admissions or refusals out: the tokenizer's whole logic, without sockets.

Three acts, so that the middle one, which is long for long texts, may run elsewhere: `prepare` says what is to be
encoded, `encode` encodes it, `answer` turns ids into messages.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from proto.channel import encode
from proto.ids import Address, StageKind, server_of
from proto.messages import (
    Accepted,
    Admit,
    ChatMessage,
    Message,
    Opening,
    Reject,
    RejectCode,
    Submit,
    TokenizeCall,
    TokenizeReply,
    TokenizerFacts,
    WorkerFacts,
    column,
)
from proto.model import ModelManifest
from tokenizer_proc.chat import ChatError, ChatTemplate
from tokenizer_proc.encoding import Ids, Mode, Piece, TextEncoder
from tokenizer_proc.limits import Refusal, check_ids, resolve_lengths, stop_ids

# Ids of the prompt that the detokenizer gets to see. A character has four bytes, thus at most four tokens, with
# perhaps a few that have no text between them.
_TAIL = 16

Letter = tuple[Address, Message]


class Job(msgspec.Struct, frozen=True):
    """A request on its way: what is to be encoded for it."""

    request: Submit | TokenizeCall
    field: str  # where its prompt stands in the .proto
    pieces: tuple[Piece, ...]
    ids: Ids | None = None  # of a prompt that came as ids

    @property
    def characters(self) -> int:
        """How long encoding will take, in proportion."""
        return sum(len(piece.text) for piece in self.pieces)


class RequestTokenizer:
    """Turns what servers send into messages for schedulers and servers. Holds nothing between requests."""

    def __init__(self, manifest: ModelManifest, template_timeout: float) -> None:
        """Loads the tokenizer. Raises TokenizerError."""
        self._encoder = TextEncoder(manifest.tokenizer_json)
        self._eos_ids = manifest.eos_ids
        self._template: ChatTemplate | None = None
        if manifest.chat_template is not None:
            self._template = ChatTemplate(
                manifest.chat_template,
                manifest.bos_token,
                manifest.eos_token,
                self._encoder.special_tokens,
                template_timeout,
            )

    @property
    def facts(self) -> TokenizerFacts:
        return TokenizerFacts(self._encoder.vocab_size, self._eos_ids, self._template is not None)

    def prepare(self, request: Submit | TokenizeCall, now: int) -> Job | Letter:
        """Say what is to be encoded, or refuse at once. `now` is monotonic ns. Main thread only (templates)."""
        try:
            if isinstance(request, TokenizeCall):
                return self._prepare_call(request)
            return self._prepare_submit(request, now)
        except Refusal as refusal:
            return _refused(request, refusal)

    def encode(self, jobs: Sequence[Job]) -> list[Ids]:
        """Ids of each job, many at a time. Any thread."""
        encoded = self._encoder.encode([job.pieces for job in jobs])
        return [ids if job.ids is None else job.ids for job, ids in zip(jobs, encoded, strict=True)]

    def answer(self, job: Job, ids: Ids, replicas: Mapping[int, WorkerFacts]) -> list[Letter]:
        """What is to be sent for a job: exactly one Admit with its Accepted, one reply, or one Reject.

        `replicas` are those that can take requests, with what their workers can do.
        """
        request = job.request
        if isinstance(request, TokenizeCall):
            return [(_server(request.rid), TokenizeReply(request.rid, ids.tobytes(), self._encoder.spelling(ids)))]
        try:
            return self._admit(request, job.field, ids, replicas)
        except Refusal as refusal:
            return [_refused(request, refusal)]

    def _prepare_call(self, call: TokenizeCall) -> Job:
        if call.chat is not None:
            return Job(call, "chat", self._render("chat", call.chat, call.now))
        mode = Mode.PROMPT if call.add_special_tokens else Mode.TEXT
        return Job(call, "text", (Piece(call.text or "", mode),))

    def _prepare_submit(self, submit: Submit, now: int) -> Job:
        deadline = submit.params.deadline
        if deadline and now >= deadline:
            raise Refusal(RejectCode.DEADLINE, "", "the deadline passed before the prompt was tokenized")
        if submit.token_ids is not None:
            return Job(submit, "prompt.token_ids", (), column(submit.token_ids))
        if submit.chat is not None:
            return Job(submit, "prompt.chat", self._render("prompt.chat", submit.chat, submit.now))
        return Job(submit, "prompt.text", (Piece(submit.text or "", Mode.PROMPT),))

    def _render(self, field: str, messages: tuple[ChatMessage, ...], now: float) -> tuple[Piece, ...]:
        if self._template is None:
            raise Refusal(RejectCode.INVALID, field, f"{field} needs a chat template, which this model does not have")
        try:
            return self._template.pieces(messages, now)
        except ChatError as error:
            raise Refusal(RejectCode.INVALID, field, f"{field}: {error}") from error

    def _admit(self, submit: Submit, field: str, ids: Ids, replicas: Mapping[int, WorkerFacts]) -> list[Letter]:
        if not replicas:
            raise Refusal(RejectCode.UNAVAILABLE, "", "no worker is ready")
        replica = _choose_replica(submit.rid, replicas)
        worker, params = replicas[replica], submit.params
        lengths = resolve_lengths(field, len(ids), params, worker)
        check_ids(field, ids, worker.vocab_size)
        stops, num_eos = stop_ids(params, self._eos_ids, worker.vocab_size)
        opening = Opening(
            rid=submit.rid,
            attempt=submit.attempt,
            prompt_tokens=len(ids),
            prompt_tail=ids[-_TAIL:].tobytes(),
            stop_strings=params.stop_strings,
            include_stop=params.include_stop,
            min_new_tokens=lengths.min_new_tokens,
            skip_special_tokens=params.skip_special_tokens,
            logprobs=params.sampling.logprobs,
            resume=submit.resume,
        )
        admit = Admit(
            rid=submit.rid,
            attempt=submit.attempt,
            prompt_ids=ids.tobytes(),
            output_ids=submit.resume.output_ids if submit.resume is not None else b"",
            sampling=params.sampling,
            max_new_tokens=lengths.max_new_tokens,
            min_new_tokens=lengths.min_new_tokens,
            stop_ids=stops,
            num_eos=num_eos,
            work_class=params.work_class,
            priority=params.priority,
            cache_salt=params.cache_salt,
            deadline=params.deadline,
            arrival=submit.arrival,
            opening=encode(opening),
        )
        accepted = Accepted(submit.rid, submit.attempt, replica, len(ids))
        return [(Address(StageKind.SCHEDULER, replica), admit), (_server(submit.rid), accepted)]


def _refused(request: Submit | TokenizeCall, refusal: Refusal) -> Letter:
    attempt = request.attempt if isinstance(request, Submit) else 0
    return _server(request.rid), Reject(request.rid, attempt, refusal.code, refusal.field, refusal.message)


def _server(rid: int) -> Address:
    return Address(StageKind.SERVER, server_of(rid))


def _choose_replica(rid: int, replicas: Iterable[int]) -> int:
    """Give requests to the replicas in turn."""
    numbers = sorted(replicas)
    return numbers[rid % len(numbers)]
