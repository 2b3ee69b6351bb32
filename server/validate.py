"""From a request message to a checked `Ask`: every field has a range, and every default is resolved here."""

import math
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from proto.messages import I32, ChatMessage, RequestParams, Sampling, WorkClass
from quintet_client.v1 import inference_pb2 as pb
from server import limits
from server.limits import ModelFacts
from server.status import InvalidFieldError, NotBuiltError, UnknownModelError

# At this temperature the most likely token of two that differ by 0.5 in logit has probability 1 - 2e-22.
GREEDY_TEMPERATURE = 0.01
_MAX_TEMPERATURE = 100.0
_MAX_PRIORITY = 1000
_MAX_LOGIT_BIAS = 100.0
_MAX_INT32 = 2**31 - 1
# It travels in metadata, which holds visible ASCII.
_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{limits.MAX_REQUEST_ID_BYTES}}}")
_WORK_CLASSES = {
    pb.WORK_CLASS_UNSPECIFIED: WorkClass.CHAT,
    pb.WORK_CLASS_CHAT: WorkClass.CHAT,
    pb.WORK_CLASS_AGENT: WorkClass.AGENT,
    pb.WORK_CLASS_BATCH: WorkClass.BATCH,
}


class Ask(NamedTuple):
    """A generation that may run. Exactly one of text, token_ids, chat is set."""

    request_id: str  # "" = the caller gave none
    text: str | None
    token_ids: bytes | None  # i32
    chat: tuple[ChatMessage, ...] | None
    params: RequestParams


def check_generate(request: pb.GenerateRequest, facts: ModelFacts, served_names: Sequence[str], deadline: int) -> Ask:
    """Check everything that can be known without the tokenizer. `deadline` in monotonic ns, 0 = none.

    Raises InvalidFieldError, UnknownModelError, or NotBuiltError for what is in range but not supported.
    """
    if request.HasField("request_id") and not _REQUEST_ID.fullmatch(request.request_id):
        raise InvalidFieldError(
            "request_id",
            f"must be 1 to {limits.MAX_REQUEST_ID_BYTES} characters of visible ASCII, not {request.request_id!r}",
        )
    check_model(request.model, served_names)
    if request.WhichOneof("prompt") is None:
        raise InvalidFieldError("prompt", "one of text, token_ids, chat must be set")
    text = token_ids = chat = None
    if request.HasField("text"):
        text = check_text("text", request.text, facts)
    elif request.HasField("token_ids"):
        token_ids = _check_prompt_ids(request.token_ids.ids, facts)
    else:
        chat = check_chat("chat", request.chat, facts)
    params = _check_params(request, facts, deadline)
    _refuse_not_built(request, facts)
    return Ask(request.request_id, text, token_ids, chat, params)


def check_model(name: str, served_names: Sequence[str]) -> None:
    """Empty means whatever is served. Raises UnknownModelError."""
    if name and name not in served_names:
        raise UnknownModelError(f"model {name!r} is not served here, only {', '.join(served_names)}")


def check_text(field: str, text: str, facts: ModelFacts) -> str:
    """A plain text's size. Empty is for the tokenizer to judge: it may add a BOS."""
    _check_bytes(field, _utf8_length(text), facts.max_prompt_bytes)
    return text


def check_chat(field: str, chat: pb.Chat, facts: ModelFacts) -> tuple[ChatMessage, ...]:
    """A conversation's size and roles; the rest is for the template to judge."""
    count = len(chat.messages)
    if not 1 <= count <= limits.MAX_CHAT_MESSAGES:
        raise InvalidFieldError(f"{field}.messages", f"must hold 1 to {limits.MAX_CHAT_MESSAGES} messages, not {count}")
    for i, message in enumerate(chat.messages):
        length = _utf8_length(message.role)
        if not 1 <= length <= limits.MAX_ROLE_BYTES:
            raise InvalidFieldError(
                f"{field}.messages[{i}].role", f"must have 1 to {limits.MAX_ROLE_BYTES} bytes, not {length}"
            )
    size = sum(_utf8_length(message.role) + _utf8_length(message.content) for message in chat.messages)
    _check_bytes(f"{field}.messages", size, facts.max_prompt_bytes)
    return tuple(ChatMessage(role=message.role, content=message.content) for message in chat.messages)


def check_ids(field: str, ids: Sequence[int], most: int, facts: ModelFacts) -> bytes:
    """Ids as an i32 column: at most so many, each within the model's vocabulary."""
    if len(ids) > most:
        raise InvalidFieldError(field, f"must hold at most {most} ids, not {len(ids)}")
    values = np.fromiter(ids, np.int64, len(ids))
    wrong = np.flatnonzero((values < 0) | (values >= facts.worker.vocab_size))
    if len(wrong):
        i = int(wrong[0])
        raise InvalidFieldError(f"{field}[{i}]", f"must be 0 to {facts.worker.vocab_size - 1}, not {values[i]}")
    return values.astype(I32).tobytes()


def _check_prompt_ids(ids: Sequence[int], facts: ModelFacts) -> bytes:
    if not ids:
        raise InvalidFieldError("token_ids.ids", "must hold at least 1 id, not 0")
    return check_ids("token_ids.ids", ids, facts.worker.max_model_len, facts)


def _check_params(request: pb.GenerateRequest, facts: ModelFacts, deadline: int) -> RequestParams:
    stopping = request.stopping
    max_new_tokens = stopping.max_new_tokens if stopping.HasField("max_new_tokens") else -1
    if stopping.HasField("max_new_tokens"):
        _check_range("stopping.max_new_tokens", max_new_tokens, 0, _MAX_INT32)
    _check_range(
        "stopping.min_new_tokens",
        stopping.min_new_tokens,
        0,
        max_new_tokens if max_new_tokens >= 0 else facts.worker.max_model_len,
    )
    _check_range("priority", request.priority, -_MAX_PRIORITY, _MAX_PRIORITY)
    _check_bytes("cache_salt", _utf8_length(request.cache_salt), limits.MAX_CACHE_SALT_BYTES)
    if request.work_class not in _WORK_CLASSES:
        raise InvalidFieldError("work_class", f"{request.work_class} is not a WorkClass")
    return RequestParams(
        sampling=_check_sampling(request),
        max_new_tokens=max_new_tokens,
        min_new_tokens=stopping.min_new_tokens,
        stop_strings=_check_stop_strings(stopping.stop_strings),
        stop_token_ids=check_ids("stopping.stop_token_ids", stopping.stop_token_ids, limits.MAX_STOP_TOKEN_IDS, facts),
        include_stop=stopping.include_stop_str_in_output,
        ignore_eos=stopping.ignore_eos,
        skip_special_tokens=request.skip_special_tokens if request.HasField("skip_special_tokens") else True,
        work_class=_WORK_CLASSES[request.work_class],
        priority=request.priority,
        cache_salt=request.cache_salt,
        deadline=deadline,
    )


def _check_sampling(request: pb.GenerateRequest) -> Sampling:
    sampling = request.sampling
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    _check_range("sampling.temperature", temperature, 0, _MAX_TEMPERATURE)
    _check_range("sampling.top_k", sampling.top_k, -1, _MAX_INT32)
    if not 0 < top_p <= 1:  # false for NaN
        raise InvalidFieldError("sampling.top_p", f"must be above 0 and at most 1, not {top_p}")
    _check_range("sampling.min_p", sampling.min_p, 0, 1)
    if request.HasField("logprobs"):
        _check_range("logprobs", request.logprobs, 0, limits.MAX_LOGPROBS)
    return Sampling(
        temperature=temperature if temperature > GREEDY_TEMPERATURE else 0.0,
        top_k=max(sampling.top_k, 0),
        top_p=top_p,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        logprobs=request.logprobs if request.HasField("logprobs") else -1,
    )


def _check_stop_strings(strings: Sequence[str]) -> tuple[str, ...]:
    field = "stopping.stop_strings"
    if len(strings) > limits.MAX_STOP_STRINGS:
        raise InvalidFieldError(field, f"must hold at most {limits.MAX_STOP_STRINGS} strings, not {len(strings)}")
    for i, string in enumerate(strings):
        if not string:
            raise InvalidFieldError(f"{field}[{i}]", "must not be empty")
    _check_bytes(field, sum(map(_utf8_length, strings)), limits.MAX_STOP_STRING_BYTES)
    return tuple(strings)


def _refuse_not_built(request: pb.GenerateRequest, facts: ModelFacts) -> None:
    """Fields of features to come: a wrong value is wrong already, a neutral one is fine, others are refused."""
    sampling, penalties = request.sampling, request.penalties
    used: list[str] = []
    value: float
    for name, least in (("n", 1), ("best_of", 1), ("beam_width", 0)):
        value = getattr(sampling, name) if sampling.HasField(name) else least
        _check_range(f"sampling.{name}", value, least, _MAX_INT32)
        used += [f"sampling.{name}"] if value > 1 else []
    for name, neutral, low, high in (("repetition", 1, 0.01, 100), ("presence", 0, -2, 2), ("frequency", 0, -2, 2)):
        value = getattr(penalties, name) if penalties.HasField(name) else neutral
        _check_range(f"penalties.{name}", value, low, high)
        used += [f"penalties.{name}"] if value != neutral else []
    used += ["logit_bias"] if _check_logit_bias(request.logit_bias.items(), facts) else []
    if request.HasField("prompt_logprobs"):
        _check_range("prompt_logprobs", request.prompt_logprobs, 0, limits.MAX_LOGPROBS)
        used.append("prompt_logprobs")
    if request.constraint.WhichOneof("kind"):
        used.append(f"constraint.{request.constraint.WhichOneof('kind')}")
    used += [name for name in ("prefix_id", "partial_at_deadline") if getattr(request, name)]
    if used:
        raise NotBuiltError(f"this build does not support {', '.join(used)}")


def _check_logit_bias(entries: Iterable[tuple[int, float]], facts: ModelFacts) -> bool:
    """Whether there are any, all of them valid."""
    biases = list(entries)
    if len(biases) > limits.MAX_LOGIT_BIAS:
        raise InvalidFieldError("logit_bias", f"must hold at most {limits.MAX_LOGIT_BIAS} entries, not {len(biases)}")
    for token_id, bias in biases:
        if not 0 <= token_id < facts.worker.vocab_size:
            raise InvalidFieldError(
                f"logit_bias[{token_id}]", f"the id must be 0 to {facts.worker.vocab_size - 1}, not {token_id}"
            )
        _check_range(f"logit_bias[{token_id}]", bias, -_MAX_LOGIT_BIAS, _MAX_LOGIT_BIAS)
    return bool(biases)


def _check_range(field: str, value: float, least: float, most: float) -> None:
    """Closed range; NaN and infinities are outside of every one."""
    if not (math.isfinite(value) and least <= value <= most):
        raise InvalidFieldError(field, f"must be {least} to {most}, not {value}")


def _check_bytes(field: str, size: int, most: int) -> None:
    if size > most:
        raise InvalidFieldError(field, f"must have at most {most} bytes, not {size}")


def _utf8_length(text: str) -> int:
    """Protobuf's parser lets no lone surrogate in, so this cannot fail."""
    return len(text) if text.isascii() else len(text.encode())
