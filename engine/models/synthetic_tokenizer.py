"""A tokenizer for models of which only the shape is known: simulated devices and random weights.

Text becomes one id a byte, and every id of the vocabulary decodes to something, so that whatever a
model without knowledge emits streams like real text.
"""

from itertools import product
from pathlib import Path
from string import ascii_lowercase

import msgspec

from engine.models.cache import cache_dir, write_atomically

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
_FORMAT = 1  # counts up when what is written changes


def synthetic_tokenizer(vocab_size: int, eos_ids: tuple[int, ...]) -> Path:
    """Write (once) a `tokenizers` file with ids 0..vocab_size-1; ids in `eos_ids` are special.

    A vocabulary with room for fewer than 256 bytes maps those that it lacks to "?", or to its first
    token. Returns the file's path in the cache.
    """
    name = "-".join(str(part) for part in (_FORMAT, vocab_size, *eos_ids))
    path = cache_dir() / "tokenizers" / f"synthetic-{name}.json"
    if not path.exists():
        write_atomically(path, msgspec.json.encode(_document(vocab_size, eos_ids)))
    return path


def _document(vocab_size: int, eos_ids: tuple[int, ...]) -> dict[str, object]:
    special = {token_id: "<|eos|>" if n == 0 else f"<|eos-{n}|>" for n, token_id in enumerate(eos_ids)}
    alphabet = byte_alphabet()
    space = alphabet[ord(" ")]
    words = (space + "".join(letters) for length in (3, 4, 5) for letters in product(ascii_lowercase, repeat=length))
    plain = iter([*alphabet, *(word for word, _ in zip(words, range(vocab_size), strict=False))])
    tokens = [special[i] if i in special else next(plain) for i in range(vocab_size)]
    unknown = "?" if "?" in tokens else next(token for i, token in enumerate(tokens) if i not in special)
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": token_id,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token_id, text in sorted(special.items())
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [],
        },
    }


def byte_alphabet() -> list[str]:
    """Return the printable character by which byte-level BPE spells each byte (Radford et al. 2019, GPT-2)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(256)]
