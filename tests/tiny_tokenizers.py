"""Small tokenizers of each kind, trained on the spot, and manifests that name them."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from proto.model import ModelConfig, ModelManifest

SAMPLES = {
    "english": "The quick brown fox doesn't jump over the lazy dog. It's 3.14, isn't it?",
    "korean": "안녕하세요, 오늘 날씨가 참 좋네요. 훈민정음은 세종이 만들었다.",
    "chinese": "敏捷的棕色狐狸跳过了懒狗。今天天气很好，我们去公园吧！",
    "arabic": "مرحبا بالعالم، كيف حالك اليوم؟ السَّلامُ عَلَيْكُم",
    "emoji": "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb, 🇰🇷 and ❤️‍🔥!",
    "code": "def f(x):\n\treturn {k: v for k, v in x.items()  if v}  # ¬∀\n\n\n    \tpass\r\n",
    "odd": "\u00a0\u200b\ufeffzero\x00width\u2028e\u0301 \U0001f600\U0010ffff ﬁ",
}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(path: Path, vocab_size: int = 600) -> Path:
    """A GPT-2 kind of tokenizer: byte-level BPE. Ids 0 to 2 are SPECIALS, the last one is the added "<think>"."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES.values(), trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.save(str(path))
    return path


def sentence_piece(path: Path, strip: bool = True) -> Path:
    """A Llama 2 kind of tokenizer: BPE on "▁" with byte fallback, which adds <s> (id 1) to texts."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    # Emoji and most Chinese are left to the bytes.
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", "<s>", "</s>", *bytes_], limit_alphabet=80, show_progress=False
    )
    tokenizer.train_from_iterator([SAMPLES["english"], SAMPLES["korean"]] * 3, trainer)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] < 3]
    path.write_text(json.dumps(document))
    return path


def word_piece(path: Path) -> Path:
    """A BERT kind of tokenizer, whose decoder is not a table of bytes. Id 0 is [UNK]."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(SAMPLES.values(), trainer)
    tokenizer.save(str(path))
    return path


def large_byte_level(path: Path, small: Path, size: int = 150_000) -> Path:
    """A byte-level tokenizer grown to `size` ids by merging pairs of its longer tokens."""
    document = json.loads(small.read_text())
    vocab: dict[str, int] = document["model"]["vocab"]
    parts = [token for token, number in vocab.items() if number >= len(SPECIALS)]
    del document["added_tokens"][len(SPECIALS) :]
    for first in parts:
        for second in parts:
            if len(vocab) == size:
                break
            if first + second not in vocab:
                vocab[first + second] = len(vocab)
                document["model"]["merges"].append([first, second])
    assert len(vocab) == size, "too few parts"
    path.write_text(json.dumps(document, ensure_ascii=False))
    return path


def manifest(path: Path, chat_template: str | None = CHAT_TEMPLATE, eos_ids: tuple[int, ...] = (2,)) -> ModelManifest:
    """A model of which only the tokenizer exists."""
    config = ModelConfig(
        family="llama",
        vocab_size=Tokenizer.from_file(str(path)).get_vocab_size(),
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        norm_eps=1e-5,
        max_position_embeddings=128,
    )
    return ModelManifest(
        name="tiny",
        source=str(path),
        weight_format="none",
        weight_files=(),
        config=config,
        tokenizer_json=str(path),
        chat_template=chat_template,
        bos_token=SPECIALS[1],
        eos_token=SPECIALS[2],
        eos_ids=eos_ids,
    )
