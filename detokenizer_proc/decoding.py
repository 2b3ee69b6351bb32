"""Incremental decoding: ids in, text out, each character once it is complete.

Invalid bytes become U+FFFD as in Unicode's recommended practice (Unicode 16, section 3.9, table 3-8; the same in
Python and in Rust's `from_utf8_lossy`): one for each maximal part of a character. A SentencePiece
tokenizer of the `tokenizers` library differs there: it cannot tell until a run of byte tokens has ended whether
it is valid, and then gives one U+FFFD for each byte of the whole run. Text that may still be streamed
cannot wait for that, so here the bytes of both kinds of tokenizer are decoded the same way.

The output continues the prompt. A character that the prompt begins and the output completes is output; what the
output does not complete becomes one U+FFFD. A leading "▁" is a space, except where a tokenizer strips it
and no visible prompt precedes it.
"""

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from detokenizer_proc.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, thus four tokens; whatever ends in U+FFFD longer than that is garbage.
_MOST_INCOMPLETE = 8
_MOST_OF_A_CHARACTER = 3  # ids of one that is incomplete
_WINDOW_CONTEXT = 8


class TextStream(Protocol):
    """One sequence being decoded."""

    def feed_id(self, token_id: int) -> str:
        """Add an id; return the text that it completes; "" while a character is incomplete."""

    def flush(self) -> str:
        """End the text: return what is still incomplete, as U+FFFD."""


class ByteStream:
    """Decodes by table. Its only state is the bytes of an incomplete character, at most three."""

    __slots__ = ("_pending", "_strip", "_table")

    def __init__(self, table: Sequence[bytes], pending: bytes, strip: bool) -> None:
        self._table = table
        self._pending = pending
        self._strip = strip  # drop the first character if it is a space

    def feed_id(self, token_id: int) -> str:
        data = self._pending + self._table[token_id]
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text


class WindowStream:
    """Decodes with a tokenizer whose decoder is not a table: a window of the last ids, returning what is new."""

    __slots__ = ("_context", "_hidden", "_new", "_tokenizer")

    def __init__(self, tokenizer: "Tokenizer", hidden: frozenset[int], context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        begin, end = self._whole_characters(context)
        self._context = context[begin:end]  # ids whose text is out, or belongs to the prompt
        self._new = context[end:]  # ids whose text is not

    def feed_id(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._new.append(token_id)
        text = self._text()
        if text.endswith(_REPLACEMENT) and len(self._new) < _MOST_INCOMPLETE:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._text())

    def _whole_characters(self, prompt: list[int]) -> tuple[int, int]:
        """Find where whole characters begin and end in the last ids of a prompt, which may be cut at both ends."""
        most = min(_MOST_OF_A_CHARACTER, len(prompt))
        for begin in range(most + 1):
            for end in range(len(prompt), max(begin, len(prompt) - most) - 1, -1):
                if _REPLACEMENT not in self._decode(prompt[begin:end]):
                    return begin, end
        return 0, len(prompt)

    def _text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._new)[len(before) :]

    def _show(self, text: str) -> str:
        # The newest ids are enough context, unless they spell nothing by themselves.
        self._context = self._new if text else self._context + self._new
        self._context = self._context[-_WINDOW_CONTEXT:]
        self._new = []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


class TextDecoder:
    """Opens streams; holds what all of them share."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._tokenizer = _load_tokenizer(vocabulary.path) if vocabulary.spelled is None else None

    def open_stream(self, prompt_tail: Sequence[int], prompt_tokens: int, skip_special_tokens: bool) -> TextStream:
        """Begin after a prompt of `prompt_tokens` ids, of which `prompt_tail` are the last."""
        hidden = self.vocabulary.special_ids if skip_special_tokens else frozenset()
        if self._tokenizer is not None:
            context = [number for number in prompt_tail if number not in hidden]
            return WindowStream(self._tokenizer, hidden, context[-_WINDOW_CONTEXT:])
        table = self.vocabulary.visible if skip_special_tokens else self.vocabulary.spelled
        assert table is not None
        before = b"".join([table[number] for number in prompt_tail])
        _, used = utf_8_decode(before, "replace", False)
        nothing_precedes = not before and prompt_tokens == len(prompt_tail)
        return ByteStream(table, before[used:], self.vocabulary.strips_first_space and nothing_precedes)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Decode ids that follow no prompt."""
        stream = self.open_stream((), 0, skip_special_tokens)
        return "".join([stream.feed_id(number) for number in ids]) + stream.flush()


def _load_tokenizer(path: str) -> "Tokenizer":
    # Imported here: with a table no process needs the library, nor its memory.
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)
