"""Limits on requests: the fixed ones, and those that follow from the options and from what the ring found."""

from collections.abc import Sequence

import msgspec

from proto.config import ServerOptions
from proto.messages import StageInfo, TokenizerFacts, WorkerFacts

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_BYTES = 4096  # of all together
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_REQUEST_ID_BYTES = 256
MAX_CACHE_SALT_BYTES = 256
MAX_CHAT_MESSAGES = 4096
MAX_ROLE_BYTES = 64
# How long a write may wait for a client that reads nothing.
MAX_STALL_SECONDS = 30
# No text of a language comes near this many bytes a token; it bounds the tokenizer's time on one prompt.
_PROMPT_BYTES_PER_TOKEN = 32
_LEAST_PROMPT_BYTES = 1 << 16


class ModelFacts(msgspec.Struct, frozen=True):
    """Facts about the model, from the Ready messages of the stages."""

    worker: WorkerFacts
    tokenizer: TokenizerFacts

    @property
    def max_prompt_bytes(self) -> int:
        """Most bytes of a text, or of all messages of a chat, in UTF-8."""
        return max(_LEAST_PROMPT_BYTES, self.worker.max_model_len * _PROMPT_BYTES_PER_TOKEN)


def facts_of(stages: Sequence[StageInfo]) -> ModelFacts | None:
    """The model's facts, or None until a worker and a tokenizer are ready. Of several workers, the smallest."""
    workers = [stage.facts for stage in stages if isinstance(stage.facts, WorkerFacts)]
    tokenizers = [stage.facts for stage in stages if isinstance(stage.facts, TokenizerFacts)]
    if not workers or not tokenizers:
        return None
    return ModelFacts(worker=min(workers, key=lambda facts: facts.max_model_len), tokenizer=tokenizers[0])


class InFlight:
    """The requests and bytes in flight in this process: what bounds the memory of the whole ring."""

    def __init__(self, options: ServerOptions) -> None:
        self._max_requests = options.max_in_flight_requests
        self._max_bytes = options.max_in_flight_bytes
        self.requests = 0
        self.bytes = 0

    def obstacle(self, size: int) -> str:
        """Why a request of so many bytes cannot be added now; empty = it can."""
        if self.requests >= self._max_requests:
            return f"{self.requests} requests are in flight, the limit is {self._max_requests}"
        # A request that is larger than the limit alone may run alone.
        if self.requests and self.bytes + size > self._max_bytes:
            return f"{self.bytes} bytes are in flight, and {size} more would exceed the limit of {self._max_bytes}"
        return ""

    def add(self, size: int) -> None:
        self.requests += 1
        self.bytes += size

    def remove(self, size: int) -> None:
        self.requests -= 1
        self.bytes -= size
