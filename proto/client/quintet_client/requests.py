"""Build request messages from plain Python values."""

from collections.abc import Sequence
from typing import Any, TypedDict, cast

from quintet_client.options import PATHS, GenerateOptions
from quintet_client.v1 import inference_pb2 as pb


class ChatMessage(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


# A text, token ids, or the messages of a chat. An empty sequence counts as token ids.
Prompt = str | Sequence[int] | Sequence[ChatMessage]


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The message for a prompt and options.

    Raises TypeError for an unknown option, and ValueError, with the option's name or "prompt", for what no message
    can hold.
    """
    unknown = options.keys() - PATHS.keys()
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    request = pb.GenerateRequest()
    for name, value in options.items():
        try:
            _set_field(request, PATHS[name], value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    try:
        _set_prompt(request, prompt)
    except ValueError as error:
        raise ValueError(f"prompt: {error}") from error
    return request


def _set_field(request: pb.GenerateRequest, path: str, value: Any) -> None:
    """Set the field at a path; None leaves it unset. Raises ValueError for what it cannot hold."""
    parent, _, name = path.rpartition(".")
    message: Any = getattr(request, parent) if parent else request
    enum = message.DESCRIPTOR.fields_by_name[name].enum_type
    if enum is not None and value is not None:
        value = _enum_number(enum, value)
    message.MergeFrom(type(message)(**{name: value}))


def _enum_number(enum: Any, name: str) -> int:
    """The value whose lower-case name, without the enum's prefix, is `name`. Raises ValueError."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    names = [value.name.removeprefix(prefix).lower() for value in enum.values[1:]]
    if name not in names:
        raise ValueError(f"must be one of {', '.join(names)}, not {name!r}")
    number: int = enum.values[1 + names.index(name)].number
    return number


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
