"""What each id spells, read from a `tokenizers` file without loading the tokenizer.

For the two decoders that language models use, the text of a sequence is the concatenation of bytes that
belong to each id, so a table of those bytes decodes everything:

- *ByteLevel* (GPT-2, Llama 3, Qwen, SmolLM): a token is spelled in 256 printable stand-ins for bytes.
- *SentencePiece* (Llama 2, Mistral, Gemma; a Sequence of Replace, ByteFallback, Fuse and perhaps Strip): "▁" is
  a space and <0x00>…<0xFF> are bytes.

Any other decoder (WordPiece, BPEDecoder, …) is left to the `tokenizers` library, see `decoding.WindowStream`.
"""

import codecs
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

_Spell = Callable[[str], bytes]


class VocabularyError(RuntimeError):
    """A tokenizer file that cannot be read; the message names it."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]  # a list (Unigram) numbers its pieces by position


class _TokenizerFile(msgspec.Struct):
    """The parts of a tokenizer.json that decoding needs; merges, for one, are skipped unread."""

    model: _Model
    added_tokens: list[_AddedToken] = []
    decoder: dict[str, Any] | None = None


class Vocabulary(msgspec.Struct, frozen=True):
    """Bytes by id, or the path for those who must ask the tokenizer itself."""

    path: str
    spelled: list[bytes] | None  # bytes of every id; None = the decoder is not a table
    visible: list[bytes] | None  # the same with special tokens empty
    special_ids: frozenset[int]
    strips_first_space: bool  # of a text that follows nothing


def read_vocabulary(path: str, model_vocab_size: int) -> Vocabulary:
    """Read the table of a `tokenizers` file.

    `model_vocab_size` is the number of rows of the model's embedding: ids that the model may give but the
    tokenizer does not know have no text. Raises VocabularyError.
    """
    try:
        file = msgspec.json.decode(Path(path).read_bytes(), type=_TokenizerFile)
    except (OSError, msgspec.DecodeError) as error:
        raise VocabularyError(f"{path} is not a readable tokenizer: {error}") from error
    vocab = file.model.vocab
    pieces = vocab if isinstance(vocab, dict) else {piece: number for number, (piece, _) in enumerate(vocab)}
    known = [*pieces.values(), *(token.id for token in file.added_tokens)]
    size = max(model_vocab_size, max(known, default=-1) + 1)
    special_ids = frozenset(token.id for token in file.added_tokens if token.special)
    spell, strips = _speller(file.decoder)
    if spell is None:
        return Vocabulary(path, None, None, special_ids, False)
    spelled = [b""] * size
    for piece, number in pieces.items():
        spelled[number] = spell(piece)
    for token in file.added_tokens:
        spelled[token.id] = spell(token.content)
    visible = spelled.copy()
    for number in special_ids:
        visible[number] = b""
    return Vocabulary(path, spelled, visible, special_ids, strips)


def _speller(decoder: dict[str, Any] | None) -> tuple[_Spell | None, bool]:
    """How a decoder spells one token, and whether it strips a text's first space; None = not token by token."""
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level, False
    strips = False
    if kinds and kinds[-1] == "Strip" and "Fuse" in kinds:
        strip = steps.pop()
        strips = strip.get("content") == " " and strip.get("start") == 1 and strip.get("stop") == 0
        if not strips:
            return None, False
    replacements: list[tuple[str, str]] = []
    byte_fallback = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not byte_fallback:
                replacements.append((old, new))
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case _:
                return None, False
    if not byte_fallback:
        return None, False
    return _sentence_piece(replacements), strips


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return list(decoder.get("decoders", []))
    return [decoder]


def _byte_alphabet() -> dict[int, int]:
    """Code point of each stand-in → its byte: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + place: byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    """A token with any other character (an added one, such as "<|a b|>") is its own UTF-8, as in `tokenizers`."""
    try:
        return codecs.charmap_encode(token, "strict", _BYTE_OF)[0]
    except UnicodeEncodeError:
        return token.encode()


def _sentence_piece(replacements: list[tuple[str, str]]) -> _Spell:
    def spell(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                pass
        return token.encode()

    return spell
