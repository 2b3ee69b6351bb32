"""`quintet doctor`: what this machine can run, and why not.

Imports nothing but the standard library before it knows that the rest is there.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from engine.arguments import whole
from engine.port import DEFAULT_PORT

_DISTRIBUTION = "quintet-llm"
_MIN_PYTHON = (3, 11)
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_CPU_PACKAGES = ("torch", "safetensors", "numba")
_CUDA_PACKAGES = ("torch", "safetensors", "triton", "flashinfer-python")
_FLASHINFER = "0.7.4"  # the version that the worker is written for
_CUDA_MODULES = {"triton": "triton", "flashinfer-python": "flashinfer"}
_COMPILER = "nvcc"
_DRIVER = Path("/dev/nvidiactl")
_REQUIREMENT = re.compile(r"[A-Za-z0-9._-]+")
_PROBE_SECONDS = 10.0

State = Literal["ok", "note", "fail"]
_MARKS: dict[State, str] = {"ok": "ok  ", "note": "--  ", "fail": "FAIL"}


@dataclass(frozen=True)
class Check:
    """One finding. A note does not concern the CPU backend; a fail means that it cannot run."""

    group: str
    name: str
    state: State
    detail: str


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "doctor",
        description="Say what this machine can run, and what it lacks. The exit code is 0 if the CPU backend can run.",
    )
    parser.add_argument(
        "--port",
        type=whole(1, 65535),
        default=DEFAULT_PORT,
        metavar="N",
        help="port that should be free (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 if the CPU backend can run, else 1."""
    checks = examine(args.port)
    failed = [check.name for check in checks if check.state == "fail"]
    lacking = [check.name for check in checks if check.group == "cuda" and check.state != "ok"]
    if args.json:
        report = {"cpu": not failed, "lacking_for_cuda": lacking, "checks": [asdict(check) for check in checks]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        sys.stdout.write(_text(checks, failed, lacking))
    return 1 if failed else 0


def examine(port: int) -> list[Check]:
    """Look at everything; takes about a second, most of it for the demo model's digest."""
    checks = [*_python(), *_packages(), *_machine(), *_gpu()]
    if any(check.state == "fail" for check in checks):
        return [*checks, Check("instance", "cache, port", "note", "not checked until the failures above are fixed")]
    return [*checks, *_files(), _run_directory(), _port(port)]


def _text(checks: list[Check], failed: list[str], lacking: list[str]) -> str:
    lines: list[str] = []
    group = ""
    width = max(len(check.name) for check in checks)
    for check in checks:
        if check.group != group:
            group = check.group
            lines += ["", group]
        lines.append(f"  {_MARKS[check.state]} {check.name:<{width}}  {check.detail}")
    verdict = f"The CPU backend cannot run: see {', '.join(failed)}." if failed else "The CPU backend can run."
    needed = [name for name in lacking if name != _COMPILER]
    cuda = f"Device cuda cannot run: this machine lacks {', '.join(needed)}." if needed else "Device cuda can run."
    return "\n".join([*lines[1:], "", verdict, cuda]) + "\n"


def _python() -> Iterator[Check]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    wanted = ".".join(str(part) for part in _MIN_PYTHON)
    if sys.version_info >= _MIN_PYTHON:
        yield Check("python", "python", "ok", f"{version} at {sys.executable}")
    else:
        yield Check("python", "python", "fail", f"{version}; needs {wanted} or later")
    yield _clash()


def _clash() -> Check:
    """Look for another distribution's top-level `proto`, which would be imported in place of ours."""
    found = find_spec("proto")
    origin = Path(found.origin or "") if found else Path()
    owners = sorted(set(metadata.packages_distributions().get("proto", [])) - {_DISTRIBUTION})
    if not (origin.parent / "channel.py").exists():
        whose = ", ".join(owners) or "another distribution"
        return Check("python", "package proto", "fail", f"{origin} belongs to {whose}; use an environment without it")
    if owners:
        return Check(
            "python", "package proto", "note", f"{', '.join(owners)} installs one too; ours is found first for now"
        )
    return Check("python", "package proto", "ok", "ours")


def _packages() -> Iterator[Check]:
    """Check for the packages that our own metadata requires, and for those of the CPU backend."""
    try:
        needed = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield Check("packages", _DISTRIBUTION, "fail", "not installed; run `pip install -e .` in its folder")
        return
    yield Check("packages", _DISTRIBUTION, "ok", metadata.version(_DISTRIBUTION))
    base = [match[0] for line in needed if "extra ==" not in line and (match := _REQUIREMENT.match(line))]
    for name in (*base, *_CPU_PACKAGES):
        hint = "pip install 'quintet-llm[cpu]'" if name in _CPU_PACKAGES else "pip install quintet-llm"
        yield _package("packages", name, "fail", hint)


def _package(group: str, name: str, lacking: State, hint: str) -> Check:
    """Look for a package by its metadata: importing torch here would take seconds."""
    try:
        return Check(group, name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(group, name, lacking, f"not installed; {hint}")


def _machine() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0))
    yield Check("machine", "cores", "ok", f"{cores} usable of {os.cpu_count()}")
    total, available = _memory()
    yield Check("machine", "memory", "ok", f"{available / 2**30:.1f} GiB free of {total / 2**30:.1f}")
    limit = _memory_limit()
    if limit is not None and limit < total:
        yield Check("machine", "memory limit", "ok", f"{limit / 2**30:.1f} GiB, set by the control group")
    flags = _cpu_flags()
    have = [flag for flag in _CPU_FLAGS if flag in flags]
    lack = [flag for flag in _CPU_FLAGS if flag not in flags]
    detail = f"{', '.join(have) or 'none of those that matter'}{'; not ' + ', '.join(lack) if lack else ''}"
    yield Check("machine", "CPU features", "note" if "avx2" not in flags else "ok", detail)


def _memory() -> tuple[int, int]:
    """Return the total and the available bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemTotal"].split()[0]) << 10, int(fields["MemAvailable"].split()[0]) << 10


def _memory_limit() -> int | None:
    """Return the control group's limit in bytes, if there is one."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith(("flags", "Features"))), set())


def _gpu() -> Iterator[Check]:
    names = _probe(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    if names:
        for index, line in enumerate(names.splitlines()):
            yield Check("cuda", f"GPU {index}", "ok", line)
    elif _DRIVER.exists():
        yield Check("cuda", "GPU", "note", "the driver is loaded, but nvidia-smi lists no GPU")
    else:
        yield Check("cuda", "GPU", "note", "no NVIDIA GPU or no driver")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc") or (shutil.which("nvcc", path=f"{home}/bin") if home else None)
    detail = nvcc or "not in PATH or CUDA_HOME; FlashInfer needs it to compile kernels that are not shipped compiled"
    yield Check("cuda", _COMPILER, "ok" if nvcc else "note", detail)
    for name in _CUDA_PACKAGES:
        found = _package("cuda", name, "note", "pip install 'quintet-llm[cuda]'")
        if name == "flashinfer-python" and found.state == "ok" and found.detail != _FLASHINFER:
            found = Check("cuda", name, "note", f"{found.detail}; the worker is written for {_FLASHINFER}")
        yield found
    yield _torch_build()


def lacking_for_cuda() -> list[str]:
    """List what this machine lacks for `--device cuda`, in words.

    Only what is certain: kernels may be shipped compiled, a driver may lack nvidia-smi, a package its metadata.
    """
    doubtful = {_COMPILER}
    if _DRIVER.exists():
        doubtful.add("GPU")
    doubtful |= {name for name, module in _CUDA_MODULES.items() if find_spec(module)}
    return [f"{check.name}: {check.detail}" for check in _gpu() if check.state != "ok" and check.name not in doubtful]


def _torch_build() -> Check:
    """Read which CUDA torch was built for, without importing it."""
    found = find_spec("torch")
    path = Path(found.origin).parent / "version.py" if found and found.origin else None
    if path is None or not path.exists():
        return Check("cuda", "torch for CUDA", "note", "torch is not installed")
    match = re.search(r"^cuda[^=]*=\s*['\"]([\d.]+)['\"]", path.read_text(), re.MULTILINE)
    if match is None:
        return Check("cuda", "torch for CUDA", "note", "this torch was built for CPUs only")
    return Check("cuda", "torch for CUDA", "ok", match[1])


def _probe(command: list[str]) -> str:
    """Return a tool's output; "" when it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _files() -> Iterator[Check]:
    from engine.models.cache import cache_dir

    cache = cache_dir()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        yield Check("instance", "cache", "fail", f"{existing} is not writable; set QUINTET_CACHE to another directory")
    else:
        free = shutil.disk_usage(existing).free
        yield Check("instance", "cache", "ok", f"{cache}, {free / 2**30:.1f} GiB free on its disk")
    yield _demo_model()


def _demo_model() -> Check:
    from engine.models.demo import FILE_SHA256, demo_path, is_complete, sha256_of

    path = demo_path()
    if not path.exists():
        return Check("instance", "demo model", "note", f"not downloaded yet; `--model demo` downloads it to {path}")
    if not is_complete(path):
        return Check("instance", "demo model", "note", f"{path} is incomplete; `--model demo` downloads it again")
    digest = sha256_of(path)
    if digest != FILE_SHA256:
        return Check("instance", "demo model", "fail", f"{path} is damaged (its SHA-256 is {digest}): delete it")
    return Check("instance", "demo model", "ok", f"{path}, its SHA-256 is right")


def _run_directory() -> Check:
    from engine.rundir import RunDir, RunDirError

    try:
        directory = RunDir(None)
    except RunDirError as error:
        return Check("instance", "run directory", "fail", str(error))
    directory.remove()
    return Check("instance", "run directory", "ok", f"in {Path(directory.path).parent}")


def _port(number: int) -> Check:
    from engine.port import Port, PortError

    try:
        Port("127.0.0.1", number).close()
    except PortError as error:
        return Check("instance", "port", "note", str(error))
    return Check("instance", "port", "ok", f"{number} is free")
