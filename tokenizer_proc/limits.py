"""Checks of a prompt and its parameters against the limits of the model that is served."""

import msgspec
import numpy as np

from proto.messages import I32, RejectCode, RequestParams, WorkerFacts
from tokenizer_proc.encoding import Ids


class RefusedError(Exception):
    """A request that cannot be served: the parts of a Reject."""

    def __init__(self, code: RejectCode, field: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.message = message


class Lengths(msgspec.Struct, frozen=True):
    """Resolved numbers of new tokens."""

    max_new_tokens: int
    min_new_tokens: int


def check_encoded(field: str, ids: Ids, vocab_size: int) -> None:
    """Raise RefusedError for an id that the tokenizer knows and the model does not: an added token, say."""
    wrong = (ids >= vocab_size).nonzero()[0]
    if wrong.size:
        place = int(wrong[0])
        raise RefusedError(
            RejectCode.INVALID,
            field,
            f"its token {place} has id {ids[place]}, which this model does not have: its ids are 0 to {vocab_size - 1}",
        )


def resolve_lengths(field: str, prompt_tokens: int, params: RequestParams, facts: WorkerFacts) -> Lengths:
    """Check a prompt's length and resolve how much may follow it.

    The rule: prompt + 1 ≤ max_model_len to generate; prompt = max_model_len only with max_new_tokens 0. What is
    asked for is never cut silently. `field` is the prompt's. Raises RefusedError.
    """
    limit = facts.max_model_len
    if prompt_tokens == 0:
        raise RefusedError(RejectCode.INVALID, field, "must have at least 1 token, not 0")
    if prompt_tokens > limit:
        raise RefusedError(
            RejectCode.INVALID, field, f"must have at most {limit} tokens (max_model_len), not {prompt_tokens}"
        )
    room = limit - prompt_tokens
    if room == 0 and params.max_new_tokens != 0:
        raise RefusedError(
            RejectCode.INVALID,
            field,
            f"must have at most {limit - 1} tokens, not {prompt_tokens}: max_model_len is {limit}, and one token must "
            "fit behind the prompt unless stopping.max_new_tokens is 0",
        )
    most = room if params.max_new_tokens < 0 else params.max_new_tokens
    why = f"max_model_len is {limit} and the prompt has {prompt_tokens} tokens"
    if most > room:
        raise RefusedError(RejectCode.INVALID, "stopping.max_new_tokens", f"must be at most {room}, not {most}: {why}")
    if params.min_new_tokens > most:
        least = params.min_new_tokens
        raise RefusedError(RejectCode.INVALID, "stopping.min_new_tokens", f"must be at most {most}, not {least}: {why}")
    return Lengths(most, params.min_new_tokens)


def stop_ids(params: RequestParams, eos_ids: tuple[int, ...], vocab_size: int) -> tuple[bytes, int]:
    """Ids that end a generation as i32 bytes, EOS ids first, and how many of them are EOS ids."""
    eos = () if params.ignore_eos else tuple(number for number in eos_ids if number < vocab_size)
    return np.array(eos, I32).tobytes() + params.stop_token_ids, len(eos)
