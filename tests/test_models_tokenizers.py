"""Tokenizers from GGUF metadata: same ids as the tokenizers they were made from, kind by kind."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.models import ModelError, prepare
from engine.models.gguf_file import read_header
from engine.models.gguf_tokenizer import gguf_tokenizer
from proto.model import ModelManifest
from tests import tiny_gguf
from tests.tiny_tokenizers import SAMPLES, sentence_piece

TEXTS = [
    *SAMPLES.values(),
    "",
    " ",
    "a",
    "x = [\n    1,\n    22]\n",
    "1 2  3   4 12345 1,234,567.89",
    "½ ²³ ٣٤٥ Ⅻ",
    "I'm YOU'LL they'VE 's'S",
    "tabs\t\tand\r\nlines\n\n\n  end  ",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>",
    "\x00\x01\x7f\x85\u3000",
]
PIECES = ["a", "the", " ", "  ", "\n", "\t", "1", "23", "é", "e\u0301", "漢", "😀", "'s", "'S", "!?", "\u00a0", "▁"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


@pytest.fixture(autouse=True)
def _own_cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "model" not in request.keywords:
        monkeypatch.setenv("QUINTET_CACHE", str(tmp_path / "cache"))


def mixed_texts(count: int) -> Iterator[str]:
    """Words, spaces, digits, marks and specials in random order: what split rules and merges trip over."""
    rng = random.Random(7)
    for _ in range(count):
        yield "".join(rng.choice([*PIECES, "<|im_end|>"]) for _ in range(rng.randint(1, 12)))


def load(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(gguf_tokenizer(read_header(path))))


def convert_with_transformers(keys: dict[str, Any], architecture: str = "llama") -> Tokenizer:
    """What transformers makes of the same metadata."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    short = {key.removeprefix("tokenizer.ggml."): value for key, value in keys.items() if key.startswith("tokenizer.")}
    tokenizer: Tokenizer = convert_gguf_tokenizer(architecture, {names.get(k, k): v for k, v in short.items()})[0]
    return tokenizer


# Byte-level BPE


def own_form(pre: str) -> tuple[Any, Any]:
    """Normaliser and pre-tokenizer as the model's own tokenizer.json has them."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    unsplit = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def split(pattern: str) -> Any:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), unsplit])

    forms: dict[str, tuple[Any, Any]] = {
        "gpt-2": (None, plain),
        "smollm": (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])),
        "llama-bpe": (None, split(LLAMA3)),
        "qwen2": (normalizers.NFC(), split(QWEN2)),
    }
    return forms[pre]


def train_byte_level(pre: str) -> Tokenizer:
    """The reference: a tokenizer in the model's own form, trained on what is tested, so that merges are long."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    normalizer, pre_tokenizer = own_form(pre)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3 + list(mixed_texts(500)), trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def byte_level_metadata(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """What a converter writes of it."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIALS else 4 if t == "<think>" else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.eos_token_id": 0,
    }


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_ids_equal_the_original(tmp_path: Path, pre: str) -> None:
    reference = train_byte_level(pre)
    ours = load(tiny_gguf.write(tmp_path / "m.gguf", tokenizer=byte_level_metadata(reference, pre)))
    for text in [*TEXTS, *mixed_texts(1500), "<think>x</think>"]:
        assert ours.encode(text).ids == reference.encode(text).ids, text
        ids = ours.encode(text).ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
    assert [t.special for t in ours.get_added_tokens_decoder().values()] == [True, True, True, False]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken"])
def test_byte_level_agrees_with_transformers_conversion(tmp_path: Path, pre: str) -> None:
    """transformers leaves NFC out, which Qwen's own files have: composed texts only."""
    keys = byte_level_metadata(train_byte_level("llama-bpe"), pre)
    ours = load(tiny_gguf.write(tmp_path / "m.gguf", tokenizer=keys))
    theirs = convert_with_transformers(keys)
    if pre != "qwen2":  # a whole word in the vocabulary: their conversion does not set ignore_merges
        theirs.model.ignore_merges = True
    for text in [*TEXTS, *mixed_texts(500)]:
        if "\u0301" not in text:
            assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("default", "x==1234 a1", ["x", "==", "123", "4", "Ġa", "1"]),
        ("gpt-2", "x==1234 a1", ["x", "==", "1234", "Ġa", "1"]),
        ("smollm", "x  12", ["x", "ĠĠ", "1", "2"]),
        ("llama-bpe", "x.ab 1234I'LL", ["x", ".ab", "Ġ", "123", "4", "I", "'LL"]),
        ("qwen2", "12 ab", ["1", "2", "Ġab"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", "Ġ", "1", "2"]),
        ("deepseek-r1-qwen", "e\u0301 1", ["e", "Ìģ", "Ġ", "1"]),
    ],
)
def test_words_of_each_split_rule(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    """By hand, from the rule's regular expression."""
    keys = tiny_gguf.byte_level_tokens() | {"tokenizer.ggml.pre": pre}
    tokenizer = load(tiny_gguf.write(tmp_path / "m.gguf", tokenizer=keys))
    assert tokenizer.pre_tokenizer is not None
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_a_file_without_a_split_rule_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = tiny_gguf.byte_level_tokens()
    named = load(tiny_gguf.write(tmp_path / "named.gguf", tokenizer=keys | {"tokenizer.ggml.pre": "default"}))
    assert not caplog.records
    del keys["tokenizer.ggml.pre"]
    path = tiny_gguf.write(tmp_path / "old.gguf", tokenizer=keys)
    assert load(path).to_str() == named.to_str()
    assert f"{path}: tokenizer.ggml.pre is missing" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.pre": "somebody's"}, ["tokenizer.ggml.pre", "somebody's", "llama-bpe"]),
        ({"tokenizer.ggml.model": "t5"}, ["tokenizer.ggml.model", "t5"]),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": [1, 1, 1]}, ["'a'", "0 and 2"]),
        ({"tokenizer.ggml.merges": ["a b c"]}, ["merges", "a b c"]),
        ({"tokenizer.ggml.merges": ["a zz"]}, ["is inconsistent"]),
        ({"tokenizer.ggml.token_type": [1]}, ["token_type"]),
        ({"tokenizer.ggml.add_bos_token": True}, ["bos_token_id", "missing"]),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 999}, ["bos_token_id", "999"]),
    ],
)
def test_tokenizers_that_cannot_be_honoured_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", tokenizer=tiny_gguf.byte_level_tokens() | changes)
    with pytest.raises(ModelError) as caught:
        gguf_tokenizer(read_header(path))
    for word in [str(path), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, [256]),
        ({"tokenizer.ggml.bos_token_id": 257}, [256]),
        ({"tokenizer.ggml.bos_token_id": 257, "tokenizer.ggml.pre": "llama-bpe"}, [257, 256]),
        ({"tokenizer.ggml.bos_token_id": 257, "tokenizer.ggml.add_bos_token": True}, [257, 256]),
        (
            {"tokenizer.ggml.bos_token_id": 257, "tokenizer.ggml.pre": "llama3", "tokenizer.ggml.add_bos_token": False},
            [256],
        ),
        ({"tokenizer.ggml.add_eos_token": True}, [256, 257]),
    ],
)
def test_edges_of_text(tmp_path: Path, changes: dict[str, Any], ids: list[int]) -> None:
    tokenizer = load(tiny_gguf.write(tmp_path / "m.gguf", tokenizer=tiny_gguf.byte_level_tokens() | changes))
    assert tokenizer.encode("ab").ids == ids
    assert tokenizer.encode("ab", add_special_tokens=False).ids == [256]


def test_a_conversion_is_kept(tmp_path: Path) -> None:
    header = read_header(tiny_gguf.write(tmp_path / "m.gguf"))
    first = gguf_tokenizer(header)
    written = first.stat().st_mtime_ns
    assert gguf_tokenizer(header) == first
    assert first.stat().st_mtime_ns == written
    other = tiny_gguf.byte_level_tokens() | {"tokenizer.ggml.pre": "smollm"}
    assert gguf_tokenizer(read_header(tiny_gguf.write(tmp_path / "m.gguf", tokenizer=other))) != first


# SentencePiece BPE


def piece_metadata(tmp_path: Path, user_defined: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    """A Llama 2 kind of vocabulary: trained pieces, scored by rank."""
    trained = Tokenizer.from_file(str(sentence_piece(tmp_path / "trained.json")))
    vocab = trained.get_vocab()
    tokens = [*sorted(vocab, key=lambda token: vocab[token]), *user_defined]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(vocab) - 259) + [4] * len(user_defined)
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [float(-i) if kind == 1 else 0.0 for i, kind in enumerate(kinds)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return keys | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


class SentencePiece:
    """SentencePiece's BPE, plainly: join the neighbours whose whole scores most, the leftmost of equals."""

    def __init__(self, keys: dict[str, Any], prefix: bool) -> None:
        tokens, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
        scores = keys["tokenizer.ggml.scores"]
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.scores = {t: s for t, k, s in zip(tokens, kinds, scores, strict=True) if k == 1}
        self.whole = sorted((t for t, k in zip(tokens, kinds, strict=True) if k in (2, 3, 4)), key=len, reverse=True)
        self.prefix = prefix

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        start = place = 0
        while place < len(text):
            found = next((t for t in self.whole if text.startswith(t, place)), None)
            if found is None:
                place += 1
                continue
            ids += [*self._pieces(text[start:place]), self.ids[found]]
            start = place = place + len(found)
        return ids + self._pieces(text[start:])

    def _pieces(self, text: str) -> list[int]:
        if not text:
            return []
        symbols = list(("▁" if self.prefix else "") + text.replace(" ", "▁"))
        while True:
            joined = ["".join(symbols[i : i + 2]) for i in range(len(symbols) - 1)]
            best = max(
                (i for i, whole in enumerate(joined) if whole in self.scores),
                key=lambda i: (self.scores[joined[i]], -i),
                default=None,
            )
            if best is None:
                break
            symbols[best : best + 2] = [joined[best]]
        return [i for symbol in symbols for i in self._ids(symbol)]

    def _ids(self, symbol: str) -> list[int]:
        if symbol in self.scores:
            return [self.ids[symbol]]
        return [self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]


KINDS: dict[str, tuple[tuple[str, ...], bool]] = {
    "llama": ((), True),
    "llama with added words": (("<think>", "\n\n"), True),
    "gemma": (("  ", "   ", "\n\n", "<table>"), False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_sentencepiece_ids_equal_the_algorithm(tmp_path: Path, kind: str) -> None:
    user_defined, prefix = KINDS[kind]
    keys = piece_metadata(tmp_path, user_defined)
    if not prefix:
        keys["tokenizer.ggml.add_space_prefix"] = False
    tokenizer = load(tiny_gguf.write(tmp_path / "m.gguf", tokenizer=keys))
    reference = SentencePiece(keys, prefix)
    words = [*PIECES, *" \nthequickbrownfox", "<think>", "<table>", "</s>", "<0x0A>", "안녕", "\x00"]

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.sampled_from(words) | st.characters(exclude_categories=["Cs"]), max_size=30).map("".join))
    def compare(text: str) -> None:
        assert tokenizer.encode(text, add_special_tokens=False).ids == reference.encode(text)

    compare()


def test_sentencepiece_text_comes_back(tmp_path: Path) -> None:
    tokenizer = load(tiny_gguf.write(tmp_path / "m.gguf", tokenizer=piece_metadata(tmp_path)))
    for text in TEXTS:
        encoding = tokenizer.encode(text)
        assert encoding.ids[:1] == [1]
        assert tokenizer.decode(encoding.ids) == text.replace("▁", " ")


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_sentencepiece_agrees_with_transformers_conversion(tmp_path: Path, architecture: str) -> None:
    """Texts without a leading space or specials, where their conversion adds no prefix and SentencePiece does."""
    gemma = architecture == "gemma2"
    keys = piece_metadata(tmp_path)
    if gemma:
        keys["tokenizer.ggml.add_space_prefix"] = False
    ours = load(tiny_gguf.write(tmp_path / "m.gguf", tokenizer=keys, architecture=architecture))
    theirs = convert_with_transformers(keys, architecture)
    compared = 0
    for text in [*TEXTS, *mixed_texts(300)]:
        if text and not text.startswith((" ", "▁")):
            compared += 1
            ids = ours.encode(text, add_special_tokens=False).ids
            assert ids == theirs.encode(text, add_special_tokens=False).ids, text
    assert compared > 100


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": [1.0]}, "scores"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"unknown_token_id": 100000}, "unknown_token_id"),
    ],
)
def test_pieces_that_cannot_be_honoured_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", tokenizer=piece_metadata(tmp_path, **changes))
    with pytest.raises(ModelError, match=words):
        gguf_tokenizer(read_header(path))


# The demo model


@pytest.mark.slow
@pytest.mark.model
def test_demo_ids_equal_those_of_the_original_form(demo_manifest: ModelManifest) -> None:
    """transformers reads vocabulary and merges; SmolLM2's own tokenizer.json sets digits apart, which it does not."""
    reference = convert_with_transformers(read_header(Path(demo_manifest.source)).metadata)
    _, reference.pre_tokenizer = own_form("smollm")
    ours = Tokenizer.from_file(demo_manifest.tokenizer_json)
    for text in [*TEXTS, *mixed_texts(1500)]:
        assert ours.encode(text).ids == reference.encode(text).ids, text
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.model
def test_demo_manifest(demo_manifest: ModelManifest) -> None:
    """The shape of SmolLM2-135M-Instruct, from its model card."""
    config = demo_manifest.config
    assert (config.family, config.num_layers, config.hidden_size, config.vocab_size) == ("llama", 30, 576, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.tie_word_embeddings, config.rope.theta, config.dtype) == (True, 100000.0, "bfloat16")
    assert (demo_manifest.bos_token, demo_manifest.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert demo_manifest.eos_ids == (2,)
    assert demo_manifest.chat_template is not None
    assert prepare("demo") == demo_manifest
