"""The detokenizer's process: messages in and out, counters."""

import ctypes

from detokenizer_proc.detokenizer import Detokenizer
from detokenizer_proc.vocabulary import read_vocabulary
from engine.runtime.stage import Stage
from proto.config import DetokenizerOptions
from proto.messages import DetokenizeCall, Emit, Heartbeat, Message, Outgoing


class DetokenizerLoop:
    """Handler of a detokenizer process (`engine.runtime.stage.Handler`)."""

    def __init__(self, stage: Stage) -> None:
        assert isinstance(stage.options, DetokenizerOptions)
        manifest = stage.options.manifest
        self._stage = stage
        self._detokenizer = Detokenizer(read_vocabulary(manifest.tokenizer_json, manifest.config.vocab_size))
        # Reading the file took several times the memory that is still in use.
        ctypes.CDLL(None).malloc_trim(0)
        stage.ready()

    def on_message(self, message: Message) -> None:
        out: list[Outgoing] = []
        if isinstance(message, Emit):
            out = self._detokenizer.on_emit(message)
        elif isinstance(message, DetokenizeCall):
            out = [self._detokenizer.on_call(message)]
        for to, answer in out:
            self._stage.outbox(to).send(answer)

    def step(self, now: int) -> float | None:
        return None

    def heartbeat(self) -> Heartbeat:
        counters = {
            "live_requests": float(self._detokenizer.live_requests),
            "tokens": float(self._detokenizer.tokens),
            "unknown_rows": float(self._detokenizer.unknown_rows),
        }
        return Heartbeat(counters)
