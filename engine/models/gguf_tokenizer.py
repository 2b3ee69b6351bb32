"""GGUF metadata → a `tokenizers` file in the cache.

Two kinds cover the supported models: byte-level BPE ("gpt2"), and SentencePiece BPE ("llama", which
Gemma's files name too), whose merges are implied by the pieces' scores.
"""

import logging
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from engine.models.cache import cache_dir, write_atomically
from engine.models.errors import ModelError
from engine.models.fields import Fields
from engine.models.gguf_file import GgufHeader
from engine.models.split_rules import SPLIT_RULES, SplitRule

log = logging.getLogger(__name__)

_FORMAT = 1  # counts up when what is written changes
_SPACE = "▁"  # how SentencePiece spells a space


class _Kind(IntEnum):
    """The token types of llama.cpp that need different treatment here."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


def gguf_tokenizer(header: GgufHeader) -> Path:
    """Convert a file's tokenizer, once. Returns the path of a `tokenizers` file; raises ModelError."""
    path = cache_dir() / "tokenizers" / f"gguf-{_FORMAT}-{header.fingerprint[:32]}.json"
    if not path.exists():
        content = msgspec.json.encode(_document(Fields(header.path, header.metadata)))
        _check(header.path, content)
        write_atomically(path, content)
    return path


def _check(source: Path, content: bytes) -> None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{source}: its tokenizer is inconsistent: {error}") from error


def _document(keys: Fields) -> dict[str, Any]:
    model = keys.text("tokenizer.ggml.model")
    tokens = token_texts(keys)
    kinds = keys.values.get("tokenizer.ggml.token_type") or [_Kind.NORMAL] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise keys.error("tokenizer.ggml.token_type", f"must be a list of {len(tokens)} types")
    _refuse_repeats(keys, tokens)
    if model == "gpt2":
        return _byte_level(keys, tokens, kinds)
    if model == "llama":
        return _sentencepiece(keys, tokens, kinds)
    raise keys.error("tokenizer.ggml.model", f"{model!r} is not supported; supported: gpt2, llama")


def token_texts(keys: Fields) -> list[str]:
    """Return the vocabulary as the file spells it, by id. Raises ModelError."""
    return _strings(keys, "tokenizer.ggml.tokens")


def _strings(keys: Fields, key: str) -> list[str]:
    values = keys.values.get(key)
    if not isinstance(values, list) or not values or not isinstance(values[0], str):
        raise keys.error(key, "must be a list of strings")
    return values


def _refuse_repeats(keys: Fields, tokens: list[str]) -> None:
    if len(set(tokens)) == len(tokens):
        return
    first: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if first.setdefault(token, token_id) != token_id:
            raise keys.error("tokenizer.ggml.tokens", f"repeats {token!r} as ids {first[token]} and {token_id}")


def _byte_level(keys: Fields, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    rule = _split_rule(keys)
    merges = [merge.split(" ") for merge in _strings(keys, "tokenizer.ggml.merges")]
    odd = next((m for m in merges if len(m) != 2), None)
    if odd is not None:
        raise keys.error("tokenizer.ggml.merges", f"contains {' '.join(odd)!r}, which is not a pair")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(tokens, kinds),
        "normalizer": {"type": "NFC"} if rule.nfc else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*map(_split, rule.patterns), byte_level | {"use_regex": False}],
        },
        "post_processor": _post_processor(keys, tokens, add_bos=rule.adds_bos),
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": rule.ignores_merges,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _split_rule(keys: Fields) -> SplitRule:
    if not keys.has("tokenizer.ggml.pre"):
        log.warning("%s: tokenizer.ggml.pre is missing, as in old files; text is split as llama.cpp would", keys.path)
    name = keys.text("tokenizer.ggml.pre", "default")
    rule = SPLIT_RULES.get(name)
    if rule is None:
        known = ", ".join(SPLIT_RULES)
        raise keys.error("tokenizer.ggml.pre", f"{name!r} is not supported; supported: {known}")
    return rule


def _sentencepiece(keys: Fields, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if keys.values.get(f"tokenizer.ggml.{key}"):
            raise keys.error(f"tokenizer.ggml.{key}", "is set, which is not supported")
    scores = keys.values.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not isinstance(scores[0], int | float):
        raise keys.error("tokenizer.ggml.scores", f"must be a list of {len(tokens)} numbers")
    prefix = keys.flag("tokenizer.ggml.add_space_prefix", True)
    unknown = keys.integer("tokenizer.ggml.unknown_token_id", 0, minimum=0)
    if unknown >= len(tokens):
        raise keys.error("tokenizer.ggml.unknown_token_id", f"{unknown} is outside the vocabulary of {len(tokens)}")
    normalizers = [
        *([{"type": "Prepend", "prepend": _SPACE}] if prefix else []),
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
    ]
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
    ]
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(tokens, kinds),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _post_processor(keys, tokens, add_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": _implied_merges(tokens, kinds, scores),
        },
    }


def _implied_merges(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Return every way to split a piece in two, best score first: SentencePiece joins the pair that scores most."""
    normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind == _Kind.NORMAL}
    order = sorted((i for i, kind in enumerate(kinds) if kind == _Kind.NORMAL), key=lambda i: (-scores[i], i))
    return [pair for i in order for pair in _halves(tokens[i]) if pair[0] in normal and pair[1] in normal]


def _halves(piece: str) -> Iterable[tuple[str, str]]:
    return ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))


def _added_tokens(tokens: list[str], kinds: list[int]) -> list[dict[str, Any]]:
    """Return the tokens that are looked for before text is split: control tokens are special, user-defined are not."""
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _Kind.USER_DEFINED,
        }
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_Kind.CONTROL, _Kind.UNKNOWN, _Kind.USER_DEFINED) and token
    ]


def _post_processor(keys: Fields, tokens: list[str], *, add_bos: bool) -> dict[str, Any] | None:
    """Add begin- and end-of-text tokens to a prompt, as the file says, or as its kind of tokenizer does."""
    front = _edge(keys, tokens, "bos", default=add_bos)
    back = _edge(keys, tokens, "eos", default=False)
    if not front and not back:
        return None

    def template(*sequences: tuple[str, int]) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for name, type_id in sequences:
            parts += [{"SpecialToken": {"id": token, "type_id": type_id}} for token, _ in front]
            parts.append({"Sequence": {"id": name, "type_id": type_id}})
            parts += [{"SpecialToken": {"id": token, "type_id": type_id}} for token, _ in back]
        return parts

    return {
        "type": "TemplateProcessing",
        "single": template(("A", 0)),
        "pair": template(("A", 0), ("B", 1)),
        "special_tokens": {
            token: {"id": token, "ids": [token_id], "tokens": [token]} for token, token_id in [*front, *back]
        },
    }


def _edge(keys: Fields, tokens: list[str], name: str, *, default: bool) -> list[tuple[str, int]]:
    flag, key = f"tokenizer.ggml.add_{name}_token", f"tokenizer.ggml.{name}_token_id"
    if not keys.flag(flag, default and keys.has(key)):
        return []
    token_id = keys.integer(key, minimum=0)
    if token_id >= len(tokens):
        raise keys.error(key, f"{token_id} is outside the vocabulary of {len(tokens)}")
    return [(tokens[token_id], token_id)]
