"""A directory in Hugging Face's layout → ModelManifest."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.models.errors import ModelError
from engine.models.fields import Fields, read_json, read_json_if_there
from engine.models.hf_config import check_ids, model_config
from engine.models.safetensors_files import check_files, find_weights
from engine.models.synthetic_tokenizer import CHAT_TEMPLATE, synthetic_tokenizer
from proto.model import ModelConfig, ModelManifest

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class _Text(msgspec.Struct):
    """The contents of a model's tokenizer files."""

    tokenizer_json: Path
    chat_template: str | None
    bos_token: str
    eos_token: str
    eos_ids: tuple[int, ...]


def read_directory(name: str, config_path: Path, *, weights_needed: bool) -> ModelManifest:
    """Read a config and the files beside it; of weights, if needed, only the headers. Raises ModelError."""
    directory = config_path.parent
    config_file = read_json(config_path)
    files = find_weights(directory) if weights_needed else ()
    config = model_config(config_file, check_files(files))
    if not weights_needed and not (directory / "tokenizer.json").exists():
        text = _synthetic_text(config_file, config)
    else:
        text = _text(directory, config_file)
    check_ids(str(directory), text.eos_ids, config.vocab_size)
    return ModelManifest(
        name=name,
        source=str(directory),
        weight_format="safetensors" if weights_needed else "none",
        weight_files=tuple(str(path) for path in files),
        config=config,
        tokenizer_json=str(text.tokenizer_json),
        chat_template=text.chat_template,
        bos_token=text.bos_token,
        eos_token=text.eos_token,
        eos_ids=text.eos_ids,
    )


def _text(directory: Path, config: Fields) -> _Text:
    path = directory / "tokenizer.json"
    tokenizer = load_tokenizer(path)
    tokenizer_config = read_json_if_there(directory / "tokenizer_config.json")
    special_tokens = read_json_if_there(directory / "special_tokens_map.json")
    generation = read_json_if_there(directory / "generation_config.json")
    bos_token, eos_token = (
        _token_text(tokenizer_config, key) or _token_text(special_tokens, key) for key in ("bos_token", "eos_token")
    )
    eos_ids = [*config.ids("eos_token_id"), *generation.ids("eos_token_id")]
    chat_eos = tokenizer.token_to_id(eos_token) if eos_token else None
    if chat_eos is not None:
        eos_ids.append(chat_eos)
    return _Text(
        tokenizer_json=path,
        chat_template=_chat_template(directory, tokenizer_config),
        bos_token=bos_token,
        eos_token=eos_token,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
    )


def load_tokenizer(path: Path) -> "Tokenizer":
    """Parse a tokenizer.json. Raises ModelError naming the file."""
    from tokenizers import Tokenizer

    if not path.is_file():
        raise ModelError(f"{path} is missing; tokenizer.json is the only tokenizer format read")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} is not a readable tokenizer: {error}") from error


def _token_text(document: Fields, key: str) -> str:
    """Read a special token, written as a string or as an object with its content."""
    value: Any = document.values.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise document.error(key, f"must be a token's text, is {value!r}")
    return value or ""


def _chat_template(directory: Path, tokenizer_config: Fields) -> str | None:
    """Return the chat template: chat_template.jinja first, as in transformers; of several named ones, "default"."""
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
    value = tokenizer_config.values.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    try:
        named = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError) as error:
        raise tokenizer_config.error("chat_template", "must be a string or a list of named templates") from error
    template = named.get("default", next(iter(named.values()), None) if len(named) == 1 else None)
    if not isinstance(template, str):
        raise tokenizer_config.error("chat_template", f"has no template named default, only {', '.join(named)}")
    return template


def _synthetic_text(config_file: Fields, config: ModelConfig) -> _Text:
    eos_ids = config_file.ids("eos_token_id")
    check_ids(str(config_file.path), eos_ids, config.vocab_size)
    return _Text(
        tokenizer_json=synthetic_tokenizer(config.vocab_size, eos_ids),
        chat_template=CHAT_TEMPLATE,
        bos_token="",
        eos_token="<|eos|>" if eos_ids else "",
        eos_ids=eos_ids,
    )
