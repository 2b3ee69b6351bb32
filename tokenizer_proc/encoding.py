"""Text to ids with a `tokenizers` file."""

import re
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import Metaspace

from proto.messages import I32

Ids = npt.NDArray[np.int32]


class TokenizerError(RuntimeError):
    """A tokenizer file that cannot be read; the message names it."""


class EncodingMode(Enum):
    """How the spellings of special tokens are read while a piece of text is encoded."""

    PROMPT = 0  # their spellings are recognised; the tokenizer adds its own (BOS)
    TEXT = 1  # their spellings are recognised; none is added
    PLAIN = 2  # no spelling has power, not even those of added tokens: all is characters
    PLAIN_INNER = 3  # the same for a piece inside a text: what a tokenizer puts before a text is left out


class TextPiece(NamedTuple):
    """A piece of text that is encoded on its own."""

    text: str
    mode: EncodingMode


class SpecialToken(NamedTuple):
    content: str
    eats_left: bool  # white space before it belongs to it
    eats_right: bool


def spelling_pattern(tokens: Iterable[SpecialToken]) -> re.Pattern[str]:
    """Matches the spelling of any of these tokens, the longest where several begin.

    Some tokenizers have a thousand: as a tree, so that no place of a text is compared with each of them.
    """
    spellings = {token.content for token in tokens if token.content}
    return re.compile(_tree(spellings) if spellings else "(?!)")


def _tree(spellings: set[str]) -> str:
    branches: dict[str, set[str]] = {}
    for spelling in spellings - {""}:
        branches.setdefault(spelling[0], set()).add(spelling[1:])
    if not branches:
        return ""
    choices = [re.escape(first) + _tree(rest) for first, rest in sorted(branches.items())]
    if len(choices) == 1 and "" not in spellings:
        return choices[0]
    return f"(?:{'|'.join(choices)}){'?' if '' in spellings else ''}"


class TextEncoder:
    """One tokenizer in all modes. It never changes, so two threads may call it."""

    def __init__(self, path: str) -> None:
        try:
            tokenizer = Tokenizer.from_file(path)
        except Exception as error:  # the library raises nothing more specific
            raise TokenizerError(f"{path} is not a readable tokenizer: {error}") from error
        # A file may ask for either, and a prompt must not be cut silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._plain = _without_added_tokens(tokenizer, inner=False)
        self._plain_inner = _without_added_tokens(tokenizer, inner=True)
        added = tokenizer.get_added_tokens_decoder()
        self.special_tokens = tuple(
            SpecialToken(token.content, token.lstrip, token.rstrip) for token in added.values() if token.special
        )
        self._special_ids = [number for number, token in added.items() if token.special]
        self._special_pattern = spelling_pattern(self.special_tokens)

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, texts: Sequence[Sequence[TextPiece]]) -> list[Ids]:
        """Ids of each text, whose pieces are encoded one by one and joined.

        All pieces of one mode go to the library in one call: it works without the GIL, on all cores.
        """
        parts: list[list[Ids]] = [[_NO_IDS] * len(pieces) for pieces in texts]
        for mode in EncodingMode:
            places = [(t, p) for t, pieces in enumerate(texts) for p, piece in enumerate(pieces) if piece.mode is mode]
            if not places:
                continue
            encodings = self._for(mode).encode_batch_fast(
                [texts[t][p].text for t, p in places], add_special_tokens=mode is EncodingMode.PROMPT
            )
            for (t, p), encoding in zip(places, encodings, strict=True):
                ids = np.array(encoding.ids, I32)
                if mode in (EncodingMode.PLAIN, EncodingMode.PLAIN_INNER) and np.isin(ids, self._special_ids).any():
                    ids = self._spelled_out(texts[t][p])
                parts[t][p] = ids
        return [np.concatenate(part) if part else _NO_IDS for part in parts]

    def _spelled_out(self, piece: TextPiece) -> Ids:
        """Plain ids by a model (Unigram) that has special tokens among its pieces and would find them in characters:
        the first character of each spelling is kept apart from the others.
        """
        cuts = [0, *(match.start() + 1 for match in self._special_pattern.finditer(piece.text)), len(piece.text)]
        ids: list[int] = []
        for begin, end in pairwise(cuts):
            tokenizer = self._for(piece.mode if begin == 0 else EncodingMode.PLAIN_INNER)
            ids += tokenizer.encode(piece.text[begin:end], add_special_tokens=False).ids
        return np.array(ids, I32)

    def spelling(self, ids: Ids) -> tuple[str, ...]:
        """The tokenizer's own spelling of each id."""
        return tuple(self._tokenizer.id_to_token(number) or "" for number in ids.tolist())

    def _for(self, mode: EncodingMode) -> Tokenizer:
        if mode is EncodingMode.PLAIN:
            return self._plain
        return self._plain_inner if mode is EncodingMode.PLAIN_INNER else self._tokenizer


_NO_IDS: Ids = np.empty(0, I32)


def _without_added_tokens(tokenizer: Tokenizer, inner: bool) -> Tokenizer:
    """A tokenizer that shares the model and knows no added token."""
    plain = Tokenizer(tokenizer.model)
    parts: dict[str, Any] = {"normalizer": tokenizer.normalizer, "pre_tokenizer": tokenizer.pre_tokenizer}
    metaspace = parts["pre_tokenizer"]
    if inner and isinstance(metaspace, Metaspace) and metaspace.prepend_scheme == "first":
        parts["pre_tokenizer"] = Metaspace(metaspace.replacement, prepend_scheme="never", split=metaspace.split)
    for name, part in parts.items():
        if part is not None:
            setattr(plain, name, part)
    return plain
