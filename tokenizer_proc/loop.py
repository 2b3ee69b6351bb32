"""The tokenizer's process: messages in and out, counters, and a thread for long texts."""

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from engine.runtime.stage import Stage, is_ready
from proto.config import TokenizerOptions
from proto.messages import Heartbeat, Message, Outgoing, Submit, TokenizeCall, WorkerFacts
from tokenizer_proc.encoding import Ids
from tokenizer_proc.requests import EncodingJob, RequestTokenizer

# Longer texts take tens of milliseconds. They go to a thread (the library releases the GIL), one at a time, so that
# short ones need not wait for them.
_LONG_CHARACTERS = 32 << 10
_POLL_SECONDS = 0.002
_LIBC = ctypes.CDLL(None)


class TokenizerLoop:
    """Handler of a tokenizer process (`engine.runtime.stage.Handler`)."""

    def __init__(self, stage: Stage) -> None:
        assert isinstance(stage.options, TokenizerOptions)
        self._stage = stage
        self._tokenizer = RequestTokenizer(stage.options.manifest, stage.options.template_timeout)
        self._waiting: list[Submit | TokenizeCall] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-texts")
        self._long: list[tuple[EncodingJob, Future[list[Ids]]]] = []
        self._requests = 0
        self._prompt_tokens = 0
        # Reading the file took several times the memory that is still in use.
        _LIBC.malloc_trim(0)
        stage.ready(self._tokenizer.facts)

    def on_message(self, message: Message) -> None:
        if isinstance(message, Submit | TokenizeCall):
            self._waiting.append(message)

    def step(self, now: int) -> float | None:
        """Encode all waiting short texts in one batch, and collect long ones that are done."""
        if self._waiting:
            self._encode_waiting(now)
        if self._long:
            self._collect()
        return _POLL_SECONDS if self._long else None

    def heartbeat(self) -> Heartbeat:
        counters = {
            "requests": float(self._requests),
            "prompt_tokens": float(self._prompt_tokens),
            "long_texts": float(len(self._long)),
        }
        return Heartbeat(counters)

    def _encode_waiting(self, now: int) -> None:
        requests, self._waiting = self._waiting, []
        self._requests += len(requests)
        short: list[EncodingJob] = []
        for request in requests:
            job = self._tokenizer.prepare(request, now)
            if not isinstance(job, EncodingJob):
                self._send([job])
            elif job.characters > _LONG_CHARACTERS:
                self._long.append((job, self._thread.submit(self._tokenizer.encode, [job])))
            else:
                short.append(job)
        for job, ids in zip(short, self._tokenizer.encode(short), strict=True):
            self._answer(job, ids)

    def _collect(self) -> None:
        done = [(job, future) for job, future in self._long if future.done()]
        if not done:
            return
        self._long = [(job, future) for job, future in self._long if not future.done()]
        for job, future in done:
            self._answer(job, future.result()[0])
        # An encoding takes the library about a hundred bytes per character, which libc would keep.
        _LIBC.malloc_trim(0)

    def _answer(self, job: EncodingJob, ids: Ids) -> None:
        self._prompt_tokens += len(ids)
        self._send(self._tokenizer.answer(job, ids, self._replicas()))

    def _replicas(self) -> dict[int, WorkerFacts]:
        """Facts of the worker of each replica that is up. Its ranks all report the same."""
        return {
            info.address.replica: info.facts
            for info in self._stage.world.stages
            if isinstance(info.facts, WorkerFacts) and is_ready(info)
        }

    def _send(self, letters: Sequence[Outgoing]) -> None:
        for to, message in letters:
            self._stage.outbox(to).send(message)
