"""What a prompt and its parameters may ask of the model that runs."""

import msgspec
import numpy as np

from proto.messages import RejectCode, RequestParams, WorkerFacts, column
from tokenizer_proc.encoding import Ids


class Refusal(Exception):  # noqa: N818 - an answer, not a fault of ours
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


def check_ids(field: str, ids: Ids, vocab_size: int) -> None:
    """Raise Refusal unless 0 ≤ id < vocab_size for all of them."""
    wrong = ((ids < 0) | (ids >= vocab_size)).nonzero()[0]
    if wrong.size:
        place = int(wrong[0])
        raise Refusal(
            RejectCode.INVALID, field, f"{field}[{place}] is token {ids[place]}; the model has 0 to {vocab_size - 1}"
        )


def resolve_lengths(field: str, prompt_tokens: int, params: RequestParams, facts: WorkerFacts) -> Lengths:
    """Check a prompt's length and resolve how much may follow it.

    The rule: prompt + 1 ≤ max_model_len to generate; prompt = max_model_len only with max_new_tokens 0. What is
    asked for is never cut in silence. `field` names the prompt. Raises Refusal.
    """
    limit = facts.max_model_len
    if prompt_tokens == 0:
        raise Refusal(RejectCode.INVALID, field, f"{field} has no tokens; at least 1 is needed")
    if prompt_tokens > limit:
        raise Refusal(
            RejectCode.INVALID, field, f"{field} is {prompt_tokens} tokens; the limit (max_model_len) is {limit}"
        )
    room = limit - prompt_tokens
    if room == 0 and params.max_new_tokens != 0:
        raise Refusal(
            RejectCode.INVALID,
            field,
            f"{field} is {prompt_tokens} tokens; the limit is {limit - 1}, max_model_len {limit} less one token to "
            "generate (it may be as long only with stopping.max_new_tokens 0)",
        )
    most = room if params.max_new_tokens < 0 else params.max_new_tokens
    if most > room:
        name = "stopping.max_new_tokens"
        raise Refusal(
            RejectCode.INVALID,
            name,
            f"{name} is {most}; the limit is {room}, max_model_len {limit} less {prompt_tokens} prompt tokens",
        )
    if params.min_new_tokens > most:
        name = "stopping.min_new_tokens"
        raise Refusal(
            RejectCode.INVALID,
            name,
            f"{name} is {params.min_new_tokens}; the limit is {most}, the largest number of new tokens",
        )
    return Lengths(most, params.min_new_tokens)


def stop_ids(params: RequestParams, eos_ids: tuple[int, ...], vocab_size: int) -> tuple[bytes, int]:
    """Ids that end a generation as i32 bytes, EOS ids first, and how many of them are EOS ids. Raises Refusal."""
    own = column(params.stop_token_ids)
    check_ids("stopping.stop_token_ids", own, vocab_size)
    eos = () if params.ignore_eos else tuple(number for number in eos_ids if number < vocab_size)
    return np.array(eos, "<i4").tobytes() + own.tobytes(), len(eos)
