"""Models by name from the Hugging Face hub."""

import os
import re
from pathlib import Path
from typing import Any

from engine.models.errors import ModelError
from engine.models.progress import Progress

_TEXT_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]
_WEIGHT_FILES = ["model*.safetensors", "model.safetensors.index.json"]
_CONNECT_SECONDS = 5.0
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def is_hub_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def fetch_from_hub(name: str, progress: Progress, *, weights_needed: bool) -> Path:
    """Download what a model needs, or find it in the hub's own cache. Raises ModelError saying what was tried."""
    import huggingface_hub
    from huggingface_hub import constants

    progress(f"fetching {name} from {constants.ENDPOINT}", 0, 0)
    refusal = _refusal(name)
    try:
        found = huggingface_hub.snapshot_download(
            name,
            local_files_only=refusal is not None,
            allow_patterns=_TEXT_FILES + (_WEIGHT_FILES if weights_needed else []),
            etag_timeout=_CONNECT_SECONDS,
            tqdm_class=_progress_bar(name, progress),
        )
    except Exception as error:  # the library lets its HTTP client's and the system's errors through
        reason = refusal or error
        raise ModelError(
            f"cannot get model {name}: no such file or directory here, no complete copy in the hub's cache "
            f"{constants.HF_HUB_CACHE}, and fetching it from {constants.ENDPOINT} failed: "
            f"{type(reason).__name__}: {_first_lines(reason)}"
        ) from error
    return Path(str(found))


def _refusal(name: str) -> Exception | None:
    """Return why the hub refuses this model, or None. Asks with a deadline, which the download functions lack."""
    import huggingface_hub

    try:
        huggingface_hub.HfApi().model_info(name, timeout=_CONNECT_SECONDS)
    except Exception as error:  # see above; HF_HUB_OFFLINE ends here too
        return error
    return None


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])


def _progress_bar(name: str, progress: Progress) -> type[Any]:
    """Return a tqdm that reports to `progress` instead of drawing."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._bytes = kwargs.get("unit") == "B"
            kwargs["file"] = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the bar
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> Any:
            drawn = super().update(n)
            if self._bytes:
                progress(f"fetching {name}", int(self.n), int(self.total or 0))
            return drawn

    return Bar
