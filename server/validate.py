"""Turn a request message into a checked `Ask`. Ranges and defaults of parameters are those of `proto.parameters`."""

import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from proto.messages import I32, ChatMessage, RequestParams, Sampling, WorkClass
from proto.parameters import MAX_INT32, MAX_LOGPROBS, Parameter, Spec, parameters_of
from quintet_client.v1 import inference_pb2 as pb
from server import limits
from server.errors import InvalidFieldError, NotBuiltError, UnknownModelError
from server.limits import ModelFacts

_MAX_LOGIT_BIAS = 100
# It is sent as metadata, which holds visible ASCII.
_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{limits.MAX_REQUEST_ID_BYTES}}}")
_WORK_CLASSES = {
    pb.WORK_CLASS_UNSPECIFIED: WorkClass.CHAT,
    pb.WORK_CLASS_CHAT: WorkClass.CHAT,
    pb.WORK_CLASS_AGENT: WorkClass.AGENT,
    pb.WORK_CLASS_BATCH: WorkClass.BATCH,
}

_SAMPLING = parameters_of(Sampling)
# Those of a single value; lists are checked item by item.
_PARAMS = tuple(p for p in parameters_of(RequestParams) if p.kind in (int, bool, str))
# Fields of features that are not built, and the values that leave them unused.
_NOT_BUILT: dict[Spec, tuple[float, ...]] = {
    Spec("sampling.n", 1, MAX_INT32): (1,),
    Spec("sampling.best_of", 1, MAX_INT32): (1,),
    Spec("sampling.beam_width", 0, MAX_INT32): (0, 1),
    Spec("penalties.repetition", 0.01, 100): (1,),
    Spec("penalties.presence", -2, 2): (0,),
    Spec("penalties.frequency", -2, 2): (0,),
    Spec("prompt_logprobs", 0, MAX_LOGPROBS): (),
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
    """Raise UnknownModelError unless the name is served; an empty one means whatever is served."""
    if name and name not in served_names:
        raise UnknownModelError(f"model {name!r} is not served here, only {', '.join(served_names)}")


def check_text(field: str, text: str, facts: ModelFacts) -> str:
    """Check a plain text's size. Whether it may be empty is the tokenizer's to judge, which may add a BOS."""
    _check_bytes(field, _utf8_length(text), facts.max_prompt_bytes)
    return text


def check_chat(field: str, chat: pb.Chat, facts: ModelFacts) -> tuple[ChatMessage, ...]:
    """Check a conversation's size and roles; the rest is for the template to judge."""
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
    """Return ids as an i32 column: at most `most` of them, each within the model's vocabulary."""
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
    given = _given(_PARAMS, request)
    most = given.get("max_new_tokens", MAX_INT32)
    if stopping.min_new_tokens > most:
        raise InvalidFieldError(
            "stopping.min_new_tokens", f"must be at most max_new_tokens ({most}), not {stopping.min_new_tokens}"
        )
    _check_bytes("cache_salt", _utf8_length(request.cache_salt), limits.MAX_CACHE_SALT_BYTES)
    if request.work_class not in _WORK_CLASSES:
        raise InvalidFieldError("work_class", f"{request.work_class} is not a WorkClass")
    return RequestParams(
        sampling=_check_sampling(request),
        stop_strings=_check_stop_strings(stopping.stop_strings),
        stop_token_ids=check_ids("stopping.stop_token_ids", stopping.stop_token_ids, limits.MAX_STOP_TOKEN_IDS, facts),
        work_class=_WORK_CLASSES[request.work_class],
        deadline=deadline,
        **given,
    )


def _check_sampling(request: pb.GenerateRequest) -> Sampling:
    given = _given(_SAMPLING, request)
    if "seed" not in given:
        given["seed"] = secrets.randbits(64)
    return Sampling(**given)


def _given(parameters: Iterable[Parameter], request: pb.GenerateRequest) -> dict[str, Any]:
    """Return the values that the caller set, by our own field names. Raises InvalidFieldError."""
    values = {}
    for parameter in parameters:
        value = _value_of(parameter.spec, request)
        if value is not None:
            values[parameter.field] = value
    return values


def _value_of(spec: Spec, request: pb.GenerateRequest) -> Any:
    """Return the value of a scalar field, None if it is unset. Raises InvalidFieldError when it is out of range."""
    message = getattr(request, spec.parent) if spec.parent else request
    if not message.HasField(spec.name):
        return None
    value = getattr(message, spec.name)
    if not spec.accepts(value):
        raise InvalidFieldError(spec.path, f"must be {spec.range}, not {value}")
    return value


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
    """Refuse what would change something: a value out of range is wrong already, a neutral one is fine."""
    used = []
    for spec, neutral in _NOT_BUILT.items():
        value = _value_of(spec, request)
        if value is not None and value not in neutral:
            used.append(spec.path)
    used += ["logit_bias"] if _check_logit_bias(request.logit_bias.items(), facts) else []
    if request.constraint.WhichOneof("kind"):
        used.append(f"constraint.{request.constraint.WhichOneof('kind')}")
    used += [name for name in ("prefix_id", "partial_at_deadline") if getattr(request, name)]
    if used:
        raise NotBuiltError(f"this build does not support {', '.join(used)}")


def _check_logit_bias(entries: Iterable[tuple[int, float]], facts: ModelFacts) -> bool:
    """Return whether there are any. Raises InvalidFieldError unless all of them are valid."""
    biases = list(entries)
    if len(biases) > limits.MAX_LOGIT_BIAS:
        raise InvalidFieldError("logit_bias", f"must hold at most {limits.MAX_LOGIT_BIAS} entries, not {len(biases)}")
    for token_id, bias in biases:
        if not 0 <= token_id < facts.worker.vocab_size:
            raise InvalidFieldError(
                f"logit_bias[{token_id}]", f"the id must be 0 to {facts.worker.vocab_size - 1}, not {token_id}"
            )
        if not -_MAX_LOGIT_BIAS <= bias <= _MAX_LOGIT_BIAS:  # false for NaN
            raise InvalidFieldError(
                f"logit_bias[{token_id}]", f"must be -{_MAX_LOGIT_BIAS} to {_MAX_LOGIT_BIAS}, not {bias}"
            )
    return bool(biases)


def _check_bytes(field: str, size: int, most: int) -> None:
    if size > most:
        raise InvalidFieldError(field, f"must have at most {most} bytes, not {size}")


def _utf8_length(text: str) -> int:
    """Protobuf's parser lets no lone surrogate in, so this cannot fail."""
    return len(text) if text.isascii() else len(text.encode())
