"""Incremental decoding against the `tokenizers` library's own decoding of everything at once."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models

from detokenizer_proc.decoding import TextDecoder
from detokenizer_proc.vocabulary import VocabularyError, read_vocabulary
from proto.model import ModelManifest
from tests.tiny_tokenizers import SAMPLES, byte_level, sentence_piece, word_piece


def odd_sentence_piece(path: Path) -> Path:
    """The same tokens with a decoder that is no table: it ends in a regular expression over the whole text."""
    tokenizer = Tokenizer.from_file(str(sentence_piece(path)))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Replace(Regex("^ "), "")]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.save(str(path))
    assert read_vocabulary(str(path), 0).spelled is None
    return path


KINDS = {
    "byte_level": byte_level,
    "sentence_piece": sentence_piece,
    "word_piece": word_piece,
    "odd_sentence_piece": odd_sentence_piece,
}


class Pair:
    """Our decoder and the library's, of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = Tokenizer.from_file(str(path))
        self.decoder = TextDecoder(read_vocabulary(str(path), 0))

    def id(self, token: str) -> int:
        number = self.library.token_to_id(token)
        assert number is not None
        return number

    def stream(self, prompt: list[int], output: list[int], skip: bool = True, tail: int = 16) -> str:
        stream = self.decoder.open_stream(prompt[-tail:], len(prompt), skip)
        parts = [stream.feed_id(number) for number in output]
        assert not any("\ud800" <= character <= "\udfff" for part in parts for character in part)
        return "".join(parts) + stream.flush()

    def reference(self, prompt: list[int], output: list[int]) -> str | None:
        """What the output adds to the prompt's text; None where the library takes back complete characters.

        (SentencePiece: until a run of byte tokens is valid, each of its bytes is one U+FFFD.)
        """
        before = self.library.decode(prompt).removesuffix("\ufffd")
        return self.library.decode(prompt + output)[len(before) :] if "\ufffd" not in before else None


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {kind: Pair(make(folder / f"{kind}.json")) for kind, make in KINDS.items()}


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("kind", KINDS)
def test_output_after_any_prompt_is_what_the_library_adds(pairs: dict[str, Pair], kind: str, sample: str) -> None:
    pair = pairs[kind]
    ids = pair.library.encode(SAMPLES[sample]).ids
    expected = {cut: pair.reference(ids[:cut], ids[cut:]) for cut in range(1, len(ids))}
    comparable = {cut: text for cut, text in expected.items() if text is not None}
    assert len(comparable) > len(expected) / 8
    assert comparable == {cut: pair.stream(ids[:cut], ids[cut:]) for cut in comparable}


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("kind", KINDS)
def test_text_without_a_prompt_is_decoded_whole(pairs: dict[str, Pair], kind: str, sample: str) -> None:
    pair = pairs[kind]
    ids = pair.library.encode(SAMPLES[sample]).ids
    assert pair.decoder.decode(ids, True) == pair.library.decode(ids)
    assert pair.decoder.decode(ids, False) == pair.library.decode(ids, skip_special_tokens=False)


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_ids_of_a_byte_level_tokenizer_decode_as_in_the_library(
    pairs: dict[str, Pair], data: st.DataObject, skip: bool
) -> None:
    pair = pairs["byte_level"]
    ids = data.draw(st.lists(st.integers(0, pair.library.get_vocab_size() - 1), max_size=30))
    assert pair.decoder.decode(ids, skip) == pair.library.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.one_of(st.binary(max_size=6), st.sampled_from([b"\xed\xa0\x80", b"\xf0\x9f", "né".encode()]))))
@settings(max_examples=200, deadline=None)
def test_byte_tokens_decode_as_one_string_of_bytes(pairs: dict[str, Pair], runs: list[bytes]) -> None:
    """The rule for invalid bytes, where the library would give one U+FFFD for each byte of a bad run."""
    pair = pairs["sentence_piece"]
    data = b"".join(runs)
    ids = [pair.id(f"<0x{byte:02X}>") for byte in data]
    assert pair.stream([1], ids) == data.decode(errors="replace").removeprefix(" ")


def test_a_character_begun_by_the_prompt_is_completed_by_the_output(pairs: dict[str, Pair]) -> None:
    for kind in ("byte_level", "sentence_piece"):
        pair = pairs[kind]
        sentence = pair.library.encode("The fox").ids
        # The clef is in no sample: it is spelled in four bytes.
        clef = pair.library.encode("The fox𝄞").ids[len(sentence) :]
        assert len(clef) == 4
        assert pair.stream(sentence + clef[:2], clef[2:]) == "𝄞"
        letter = pair.id("o")
        assert pair.stream(sentence + clef[:2], [letter, letter]) == "\ufffdoo"
        assert pair.stream(sentence + clef, [letter]) == "o"


def test_an_incomplete_character_waits_and_is_flushed_as_one_replacement(pairs: dict[str, Pair]) -> None:
    pair = pairs["byte_level"]
    clef = pair.library.encode("𝄞").ids
    for count in range(1, 4):
        stream = pair.decoder.open_stream([], 0, True)
        assert [stream.feed_id(number) for number in clef[:count]] == [""] * count
        assert stream.flush() == "\ufffd"


def test_a_leading_space_is_kept_after_visible_text_only(pairs: dict[str, Pair]) -> None:
    pair = pairs["sentence_piece"]
    word = pair.library.encode("fox").ids[1:]
    assert (pair.library.id_to_token(word[0]) or "").startswith("▁")
    assert pair.stream([1, *word], word) == " fox"
    assert pair.stream([1], word) == "fox", "nothing visible precedes"
    assert pair.stream([1] * 40, word) == " fox", "more precedes than the tail shows"


def test_a_tokenizer_without_strip_keeps_its_first_space(tmp_path: Path) -> None:
    pair = Pair(sentence_piece(tmp_path / "t.json", strip=False))
    ids = pair.library.encode("fox").ids
    assert pair.decoder.decode(ids, True) == pair.library.decode(ids) == " fox"


def test_special_tokens_show_only_when_asked_for(pairs: dict[str, Pair]) -> None:
    pair = pairs["byte_level"]
    ids = [1, *pair.library.encode("fox<think>").ids, 2]
    assert pair.stream(ids[:1], ids[1:]) == "fox<think>"
    assert pair.stream(ids[:1], ids[1:], skip=False) == "fox<think><|im_end|>"


def test_ids_beyond_the_tokenizer_have_no_text(pairs: dict[str, Pair]) -> None:
    for pair in pairs.values():
        size = pair.library.get_vocab_size()
        decoder = TextDecoder(read_vocabulary(str(pair.path), size + 10))
        assert decoder.decode([size, size + 9], True) == ""
        first, *others = pair.library.encode("The fox is lazy").ids
        assert decoder.decode([first, size, *others], True) == "The fox is lazy"


def test_a_unigram_vocabulary_is_numbered_by_position(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0)], 0, False))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "t.json"))
    assert Pair(tmp_path / "t.json").decoder.decode([1, 2, 1], True) == " ab a"


@pytest.mark.parametrize("content", ["", "{", '{"model": {"vocab": 3}}'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(VocabularyError, match=r"broken\.json"):
        read_vocabulary(str(path), 0)


@pytest.mark.model
def test_the_demo_models_tokenizer(demo_manifest: ModelManifest) -> None:
    pair = Pair(Path(demo_manifest.tokenizer_json))
    for sample in SAMPLES.values():
        ids = pair.library.encode(sample * 3).ids
        for cut in (1, 2, len(ids) // 2, len(ids) - 3):
            assert pair.stream(ids[:cut], ids[cut:]) == pair.reference(ids[:cut], ids[cut:])
