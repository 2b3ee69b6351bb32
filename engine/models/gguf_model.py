"""A GGUF file → ModelManifest."""

from pathlib import Path

from engine.models.fields import Fields
from engine.models.gguf_config import gguf_config
from engine.models.gguf_file import read_header
from engine.models.gguf_tokenizer import gguf_tokenizer, token_texts
from engine.models.hf_config import check_ids
from proto.model import ModelConfig, ModelManifest

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# How chat models end a turn. Older files name only the end of the text; the template shows which is used.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")


def read_gguf_config(path: Path) -> ModelConfig:
    """Read only the model's shape. Raises ModelError."""
    return gguf_config(read_header(path))


def read_gguf_model(name: str, path: Path, *, weights_needed: bool) -> ModelManifest:
    """Read a model's metadata and write its tokenizer into the cache. Raises ModelError."""
    header = read_header(path)
    config = gguf_config(header)
    keys = Fields(path, header.metadata)
    tokens = token_texts(keys)
    template = keys.text("tokenizer.chat_template", "") or None
    eos_ids = _eos_ids(keys, tokens, template)
    check_ids(str(path), eos_ids, config.vocab_size)
    return ModelManifest(
        name=name,
        source=str(path),
        weight_format="gguf" if weights_needed else "none",
        weight_files=(str(path),) if weights_needed else (),
        config=config,
        tokenizer_json=str(gguf_tokenizer(header)),
        chat_template=template,
        bos_token=_token(keys, tokens, "bos_token_id"),
        eos_token=_token(keys, tokens, "eos_token_id"),
        eos_ids=eos_ids,
    )


def _token(keys: Fields, tokens: list[str], key: str) -> str:
    ids = keys.ids(f"tokenizer.ggml.{key}")
    if not ids:
        return ""
    if ids[0] >= len(tokens):
        raise keys.error(f"tokenizer.ggml.{key}", f"{ids[0]} is outside the vocabulary of {len(tokens)}")
    return tokens[ids[0]]


def _eos_ids(keys: Fields, tokens: list[str], template: str | None) -> tuple[int, ...]:
    ids = [i for key in _END_KEYS for i in keys.ids(f"tokenizer.ggml.{key}")]
    ids += [tokens.index(end) for end in _TURN_ENDS if end in (template or "") and end in tokens]
    return tuple(dict.fromkeys(ids))
