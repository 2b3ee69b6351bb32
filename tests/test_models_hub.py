"""Models by name: against a hub of our own on this machine, in processes of their own."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from proto.model import ModelManifest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


class Hub(ThreadingHTTPServer):
    """Serves one repository, org/tiny, by the hub's HTTP interface. Counts what is downloaded."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.downloads: list[str] = []
        self.mute = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if self.server.mute.is_set():
            time.sleep(60)
        elif path in ("/api/models/org/tiny", "/api/models/org/tiny/revision/main"):
            siblings = [{"rfilename": name} for name in self.server.files]
            self._json({"id": "org/tiny", "sha": COMMIT, "siblings": siblings, "private": False})
        elif path == f"/api/models/org/tiny/tree/{COMMIT}":
            self._json(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": _oid(name)}
                    for name, content in self.server.files.items()
                ]
            )
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            self._file(path.rsplit("/", 1)[1])
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET  # noqa: N815 - the base class's names

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str) -> None:
        if self.command == "GET":
            self.server.downloads.append(name)
        self._answer(200, self.server.files[name], {"ETag": f'"{_oid(name)}"', "X-Repo-Commit": COMMIT})

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _oid(name: str) -> str:
    return name.encode().hex().ljust(40, "0")[:40]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    directory = tmp_path / "repository"
    directory.mkdir()
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(directory / "tokenizer.json"))
    save_file({"w": np.zeros((64, 256), np.float32)}, str(directory / "model.safetensors"))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "pytorch_model.bin").write_bytes(b"not wanted")
    server = Hub({path.name: path.read_bytes() for path in directory.iterdir()})
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def run(hub: Hub, tmp_path: Path, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "engine.models", *words, "--out", str(tmp_path / "m.json")]
    around = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf"),
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_DISABLE_XET": "1",
    }
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=inherited | around | environment
    )


@pytest.mark.slow
def test_what_is_needed_is_fetched_once(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, tmp_path, "org/tiny")
    assert done.returncode == 0, done.stderr
    assert sorted(hub.downloads) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert f"fetching org/tiny from {hub.url}" in done.stderr
    manifest = msgspec.json.decode((tmp_path / "m.json").read_bytes(), type=ModelManifest)
    assert manifest.name == "org/tiny"
    assert Path(manifest.weight_files[0]).stat().st_size == len(hub.files["model.safetensors"])

    assert run(hub, tmp_path, "org/tiny").returncode == 0
    assert run(hub, tmp_path, "org/tiny", HF_HUB_OFFLINE="1").returncode == 0
    assert len(hub.downloads) == 3


@pytest.mark.slow
def test_without_weights_none_are_fetched(hub: Hub, tmp_path: Path) -> None:
    assert run(hub, tmp_path, "org/tiny", "--no-weights").returncode == 0
    assert sorted(hub.downloads) == ["config.json", "tokenizer.json"]
    offline = run(hub, tmp_path, "org/tiny", HF_HUB_OFFLINE="1")
    assert offline.returncode == 2
    assert "no complete copy in the hub's cache" in offline.stderr


@pytest.mark.slow
def test_a_repository_that_is_not_there(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, tmp_path, "org/other")
    assert done.returncode == 2
    for word in ("cannot get model org/other", str(tmp_path / "hf"), hub.url, "RepositoryNotFoundError"):
        assert word in done.stderr


@pytest.mark.slow
def test_a_mute_hub_is_given_up_within_seconds(hub: Hub, tmp_path: Path) -> None:
    hub.mute.set()
    start = time.monotonic()
    done = run(hub, tmp_path, "org/tiny")
    assert done.returncode == 2
    assert "timed out" in done.stderr
    assert time.monotonic() - start < 20
