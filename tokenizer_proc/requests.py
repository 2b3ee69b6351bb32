"""Requests in, admissions or refusals out: the tokenizer's whole logic, without sockets.

It takes three steps, so that the middle one, which is slow for long texts, may run in a thread: `prepare` says what to
encode, `encode` encodes it, `answer` turns ids into messages.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from proto.channel import encode
from proto.ids import Address, StageKind, server_of
from proto.messages import (
    Accepted,
    Admit,
    ChatMessage,
    Opening,
    Outgoing,
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
from tokenizer_proc.encoding import EncodingMode, Ids, TextEncoder, TextPiece
from tokenizer_proc.limits import RefusedError, check_encoded, resolve_lengths, stop_ids

# Ids of the prompt that the detokenizer gets to see. A character has four bytes, thus at most four tokens, with
# perhaps a few that have no text between them.
_TAIL = 16


class EncodingJob(msgspec.Struct, frozen=True):
    """A request, and what to encode for it."""

    request: Submit | TokenizeCall
    field: str  # path of its prompt in the .proto
    pieces: tuple[TextPiece, ...]
    ids: Ids | None = None  # of a prompt that came as ids

    @property
    def characters(self) -> int:
        """Length of the text: encoding takes time in proportion."""
        return sum(len(piece.text) for piece in self.pieces)


class RequestTokenizer:
    """Turns servers' requests into messages for schedulers and servers. Keeps nothing between requests."""

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

    def prepare(self, request: Submit | TokenizeCall, now: int) -> EncodingJob | Outgoing:
        """Say what to encode, or refuse at once. `now` is monotonic ns. Main thread only (templates)."""
        try:
            if isinstance(request, TokenizeCall):
                return self._prepare_call(request)
            return self._prepare_submit(request, now)
        except RefusedError as refusal:
            return _refused(request, refusal)

    def encode(self, jobs: Sequence[EncodingJob]) -> list[Ids]:
        """Ids of each job, many at a time. Any thread."""
        encoded = self._encoder.encode([job.pieces for job in jobs])
        return [ids if job.ids is None else job.ids for job, ids in zip(jobs, encoded, strict=True)]

    def answer(self, job: EncodingJob, ids: Ids, replicas: Mapping[int, WorkerFacts]) -> list[Outgoing]:
        """The messages that a job ends in: an Admit with its Accepted, a reply, or a Reject.

        `replicas` are those that can take requests, with what their workers can do.
        """
        request = job.request
        if isinstance(request, TokenizeCall):
            reply = TokenizeReply(request.rid, ids.tobytes(), self._encoder.spelling(ids))
            return [Outgoing(_server(request.rid), reply)]
        try:
            return self._admit(request, job, ids, replicas)
        except RefusedError as refusal:
            return [_refused(request, refusal)]

    def _prepare_call(self, call: TokenizeCall) -> EncodingJob:
        if call.chat is not None:
            return EncodingJob(call, "chat", self._render(call.chat, call.now))
        mode = EncodingMode.PROMPT if call.add_special_tokens else EncodingMode.TEXT
        return EncodingJob(call, "text", (TextPiece(call.text or "", mode),))

    def _prepare_submit(self, submit: Submit, now: int) -> EncodingJob:
        deadline = submit.params.deadline
        if deadline and now >= deadline:
            raise RefusedError(RejectCode.DEADLINE, "", "the deadline passed before the prompt was tokenized")
        if submit.token_ids is not None:
            return EncodingJob(submit, "token_ids.ids", (), column(submit.token_ids))
        if submit.chat is not None:
            return EncodingJob(submit, "chat", self._render(submit.chat, submit.now))
        return EncodingJob(submit, "text", (TextPiece(submit.text or "", EncodingMode.PROMPT),))

    def _render(self, messages: tuple[ChatMessage, ...], now: float) -> tuple[TextPiece, ...]:
        if self._template is None:
            raise RefusedError(RejectCode.INVALID, "chat", "needs a chat template, which this model does not have")
        try:
            return self._template.pieces(messages, now)
        except ChatError as error:
            raise RefusedError(RejectCode.INVALID, "chat", str(error)) from error

    def _admit(self, submit: Submit, job: EncodingJob, ids: Ids, replicas: Mapping[int, WorkerFacts]) -> list[Outgoing]:
        if not replicas:
            raise RefusedError(RejectCode.UNAVAILABLE, "", "no worker is ready")
        replica = _choose_replica(submit.rid, replicas)
        worker, params = replicas[replica], submit.params
        lengths = resolve_lengths(job.field, len(ids), params, worker)
        if job.ids is None:
            check_encoded(job.field, ids, worker.vocab_size)
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
        scheduler = Address(StageKind.SCHEDULER, replica)
        return [Outgoing(scheduler, admit), Outgoing(_server(submit.rid), accepted)]


def _refused(request: Submit | TokenizeCall, refusal: RefusedError) -> Outgoing:
    attempt = request.attempt if isinstance(request, Submit) else 0
    reject = Reject(request.rid, attempt, refusal.code, refusal.field, refusal.message)
    return Outgoing(_server(request.rid), reject)


def _server(rid: int) -> Address:
    return Address(StageKind.SERVER, server_of(rid))


def _choose_replica(rid: int, replicas: Iterable[int]) -> int:
    """Give requests to the replicas in turn."""
    numbers = sorted(replicas)
    return numbers[rid % len(numbers)]
