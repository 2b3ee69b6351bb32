"""Chats to text by the model's own template, in which what callers write has no power.

The environment is what Hugging Face documents for chat templates ("Writing a chat template"): Jinja2, sandboxed
and immutable, blocks trimmed, `break` and `continue`, and the helpers below.
"""

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from proto.messages import ChatMessage
from tokenizer_proc.encoding import EncodingMode, SpecialToken, TextPiece, spelling_pattern

# Planes 15 and 16 are for private use: no template has them, and a text that fills them is not text.
_PRIVATE_FIRST, _PRIVATE_LAST = 0xF0000, 0x10FFFD
# A template adds some text to each message; one that produces more than this many times its input has run wild.
_MOST_GROWTH = 64
_MOST_CHARACTERS = 4 << 20


class ChatError(ValueError):
    """This chat cannot be rendered; the message says why, to the caller."""


class _OutOfTime(BaseException):
    """Not an Exception, so that Jinja cannot take it for an error of the template and go on."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses the two operators that can fill the memory, or the time, within one step of the interpreter."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if _result_size(operator, left, right) > _MOST_CHARACTERS:
            raise SecurityError(f"the result of {operator} in the chat template is too large")
        return super().call_binop(context, operator, left, right)


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Elements of a repeated sequence, or bits of a power; 0 where neither is asked for."""
    if operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
                return len(sequence) * times
        return 0
    return left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's words for training; here its body is rendered and nothing else."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template, compiled once."""

    def __init__(
        self, source: str, bos_token: str, eos_token: str, special_tokens: Sequence[SpecialToken], timeout: float
    ) -> None:
        """A syntax error is kept for those who use the template: text prompts need none. `timeout` in seconds."""
        self._variables = {"bos_token": bos_token, "eos_token": eos_token, "tools": None, "documents": None}
        self._specials = {token.content: token for token in special_tokens}
        self._special_pattern = spelling_pattern(special_tokens)
        self._timeout = timeout
        self._broken = ""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            self._broken = f"the model's chat template has a syntax error in line {error.lineno}: {error.message}"
        except Exception as error:  # Jinja computes constant expressions here
            self._broken = f"the model's chat template cannot be compiled: {type(error).__name__}: {error}"

    def pieces(self, messages: Sequence[ChatMessage], now: float) -> tuple[TextPiece, ...]:
        """Render a chat, open for the assistant's answer, into pieces to encode.

        Without the spelling of any special token in the messages that is one piece, so that ids equal
        transformers' `apply_chat_template`. Otherwise the spellings are hidden from template and
        tokenizer: each stretch between two special tokens of the template's own that holds one is
        encoded as plain characters. `now` in Unix seconds. Raises ChatError.
        """
        hidden = self._hide(messages)
        masks = {spelling: mask for mask, spelling in hidden.items()}
        plain = [
            {"role": self._mask(message.role, masks), "content": self._mask(message.content, masks)}
            for message in messages
        ]
        rendered = self._render(plain, now)
        if not hidden:
            return (TextPiece(rendered, EncodingMode.TEXT),)
        return tuple(self._split(rendered, hidden))

    def _hide(self, messages: Sequence[ChatMessage]) -> dict[str, str]:
        """A private character that occurs nowhere for each special token that callers have spelled out."""
        texts = [text for message in messages for text in (message.role, message.content)]
        spelled = sorted({match for text in texts for match in self._special_pattern.findall(text)})
        if not spelled:
            return {}
        taken = set().union(*texts)
        free = (chr(code) for code in range(_PRIVATE_FIRST, _PRIVATE_LAST + 1) if chr(code) not in taken)
        hidden = dict(zip(free, spelled, strict=False))
        if len(hidden) < len(spelled):
            raise ChatError("the messages use up the private-use characters of Unicode")
        return hidden

    def _mask(self, text: str, masks: dict[str, str]) -> str:
        return self._special_pattern.sub(lambda match: masks[match.group()], text) if masks else text

    def _render(self, messages: list[dict[str, str]], now: float) -> str:
        if self._broken:
            raise ChatError(self._broken)

        def strftime_now(form: str) -> str:
            return datetime.fromtimestamp(now).strftime(form)

        given = sum(len(message["role"]) + len(message["content"]) for message in messages)
        most = _MOST_CHARACTERS + _MOST_GROWTH * given
        variables = {"messages": messages, "add_generation_prompt": True, "strftime_now": strftime_now}
        parts = []
        size = 0
        try:
            with _time_limit(self._timeout):
                for part in self._template.generate(**self._variables, **variables):
                    parts.append(part)
                    size += len(part)
                    if size > most:
                        raise ChatError(f"the chat template produced more than {most} characters")
        except _OutOfTime:
            raise ChatError(f"the chat template did not finish within {self._timeout:g} s") from None
        except ChatError:
            raise
        except jinja2.TemplateError as error:
            raise ChatError(error.message or type(error).__name__) from error
        except Exception as error:  # whatever an expression of the template ran into
            raise ChatError(f"the chat template failed: {type(error).__name__}: {error}") from error
        return "".join(parts)

    def _split(self, rendered: str, hidden: dict[str, str]) -> Iterator[TextPiece]:
        """Cut at the template's special tokens around each stretch that has hidden spellings in it."""
        back = str.maketrans(hidden)
        masks = set(hidden)
        own = list(self._special_pattern.finditer(rendered))
        ends = [0, *(match.end() for match in own)]
        starts = [*(match.start() for match in own), len(rendered)]
        done = 0
        for number, (begin, end) in enumerate(zip(ends, starts, strict=True)):
            stretch = rendered[begin:end]
            if masks.isdisjoint(stretch):
                continue
            if begin > done:
                yield TextPiece(rendered[done:begin], EncodingMode.TEXT)
            if number > 0 and self._specials[own[number - 1].group()].eats_right:
                stretch = stretch.lstrip()
            if number < len(own) and self._specials[own[number].group()].eats_left:
                stretch = stretch.rstrip()
            yield TextPiece(stretch.translate(back), EncodingMode.PLAIN if begin == 0 else EncodingMode.PLAIN_INNER)
            done = end
        if done < len(rendered):
            yield TextPiece(rendered[done:], EncodingMode.TEXT)


def _environment() -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationTag])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Python writes JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _OutOfTime after this long. By signal, so in the main thread only; an outer timer is put back."""

    def ring(_signum: int, _frame: FrameType | None) -> None:
        raise _OutOfTime

    handler = signal.signal(signal.SIGALRM, ring)
    outer, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, outer, interval)
        signal.signal(signal.SIGALRM, handler)
