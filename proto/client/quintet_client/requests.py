"""From plain Python values to request messages."""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, TypeVar, cast

from google.protobuf.message import Message

from quintet_client.v1 import inference_pb2 as pb

MessageT = TypeVar("MessageT", bound=Message)
WorkClassName = Literal["chat", "agent", "batch"]
_WORK_CLASSES: dict[str, pb.WorkClass] = {
    "chat": pb.WORK_CLASS_CHAT,
    "agent": pb.WORK_CLASS_AGENT,
    "batch": pb.WORK_CLASS_BATCH,
}


class ChatMessage(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


# A text, token ids, or the messages of a chat. An empty sequence counts as token ids.
Prompt = str | Sequence[int] | Sequence[ChatMessage]


class GenerateOptions(TypedDict, total=False):
    """Fields of GenerateRequest by name, flat; inference.proto says what each means and its default."""

    request_id: str
    model: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_new_tokens: int
    min_new_tokens: int
    stop_strings: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    logprobs: int
    work_class: WorkClassName
    priority: int
    cache_salt: str
    skip_special_tokens: bool


_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "seed")
_STOPPING_FIELDS = (
    "max_new_tokens",
    "min_new_tokens",
    "stop_strings",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
)
_OWN_FIELDS = ("request_id", "model", "logprobs", "priority", "cache_salt", "skip_special_tokens")


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The message for a prompt and options.

    Raises TypeError for an unknown option, and ValueError, with the option's name or "prompt", for what no message
    can hold.
    """
    given: dict[str, Any] = dict(options)
    work_class = given.pop("work_class", None)
    if work_class is not None and work_class not in _WORK_CLASSES:
        raise ValueError(f"work_class {work_class!r} is none of {', '.join(_WORK_CLASSES)}")
    request = _filled(pb.GenerateRequest, given, _OWN_FIELDS)
    request.sampling.CopyFrom(_filled(pb.Sampling, given, _SAMPLING_FIELDS))
    request.stopping.CopyFrom(_filled(pb.Stopping, given, _STOPPING_FIELDS))
    if given:
        raise TypeError(f"unknown options: {', '.join(sorted(given))}")
    if work_class is not None:
        request.work_class = _WORK_CLASSES[work_class]
    try:
        _set_prompt(request, prompt)
    except ValueError as error:
        raise ValueError(f"prompt: {error}") from error
    return request


def _filled(kind: type[MessageT], given: dict[str, Any], names: Sequence[str]) -> MessageT:
    """A message of those options that have these names; they are taken out of `given`."""
    message = kind()
    for name in names:
        if name in given:
            try:
                message.MergeFrom(kind(**{name: given.pop(name)}))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    return message


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], dict):
        request.chat.CopyFrom(chat(cast(Sequence[ChatMessage], prompt)))
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=cast(Sequence[int], prompt)))


def tokenize_request(
    prompt: str | Sequence[ChatMessage], add_special_tokens: bool | None, model: str | None
) -> pb.TokenizeRequest:
    """The message that asks for the ids of a text or chat."""
    request = pb.TokenizeRequest(add_special_tokens=add_special_tokens, model=model)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.chat.CopyFrom(chat(prompt))
    return request


def chat(messages: Sequence[ChatMessage]) -> pb.Chat:
    """The message for a conversation."""
    return pb.Chat(messages=[pb.ChatMessage(role=m["role"], content=m["content"]) for m in messages])
