"""Make the wheels that scripts/gpu/check needs where there is no network: FlashInfer with its kernels, and two more.

    scripts/gpu/make_wheels FOLDER [--only NAME …]

Downloads flashinfer-python, apache-tvm-ffi and msgspec from the package index, compiles the modules of modules.py for
sm_90a (nvcc of CUDA 13, g++ and ninja; hours of one core, most of them for FA3; what is there is kept, so it can be
stopped and started again), and packs what the worker imports with the compiled modules. The result, FOLDER/wheels,
stays under 40 MB. Never commit it. Needs a Python with torch; which build of torch does not matter.
"""

import argparse
import base64
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

FLASHINFER = "flashinfer-python==0.7.4"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
TARGET = ("--python-version", "3.12", "--only-binary=:all:", *(f"--platform={name}" for name in PLATFORMS))
CARRIED = ("apache-tvm-ffi>=0.1.11,<0.2", "msgspec", "pyzmq", "safetensors", "gguf", "pyyaml", "tqdm")  # target lacks
IMPORTED = ("filelock", "tqdm", "requests", "nvidia-ml-py", "packaging", "jinja2", "numpy", "ninja")  # to build with
LIMIT = 40_000_000  # bytes of all wheels together
HEADERS = {"cublasLt.h": "nvidia-cublas", "curand.h": "nvidia-curand"}  # that some CUDA toolkits come without

# What imports need beyond the files that an import was seen to load: lazily imported modules and sources' templates.
_DROPPED = re.compile(
    r"flashinfer/(experimental|moe_ep|cake_|kda_kernels|gdn_kernels|prims_ts|mamba|msa_ops|topk_varlen/|cute_dsl"
    r"|attention/prims_ts|fused_moe/(backends|cute_dsl|cake)|diffusion_ops|qwen_|kimi_|tuning_configs"
    r"|batch_invariant|gemm/kernels|gemm/batch_invariant|jit/cake_|comm/(cake|mnnvl_cutedsl))"
)
_SOURCES = re.compile(r"flashinfer/data/csrc/(?!cake_|alphamoe|kda|gdn)[^/]+$")
_SOURCE_BYTES = 400_000


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the wheels of scripts/gpu/check.")
    parser.add_argument("folder", type=Path, help="to work in; the result is FOLDER/wheels")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="compile only these modules")
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    fetch(folder, wheels)
    environment = build_environment(folder)
    compiled = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("modules.py")), *args.only], env=environment, check=False
    )
    wheel = slim(folder / "source", folder / "aot", loaded_files(folder, environment), wheels)
    total = sum(path.stat().st_size for path in wheels.glob("*.whl"))
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; all wheels: {total:,} of {LIMIT:,}")
    return 1 if compiled.returncode or total > LIMIT else 0


def fetch(folder: Path, wheels: Path) -> None:
    """The packages, and what an import of FlashInfer needs here."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if not list(folder.glob("flashinfer_python-*.whl")):
        subprocess.run([*pip, "download", "--no-deps", FLASHINFER, "--dest", folder], check=True)
    subprocess.run([*pip, "download", "--no-deps", *TARGET, *CARRIED, "--dest", wheels], check=True)
    source = folder / "source"
    if not source.exists():
        (wheel,) = folder.glob("flashinfer_python-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(source)
    site = folder / "site"
    if not site.exists():
        packages = [CARRIED[0], *IMPORTED]
        subprocess.run([*pip, "install", "--target", site, *packages], check=True)


def build_environment(folder: Path) -> dict[str, str]:
    """What FlashInfer's build reads. Raises SystemExit without a CUDA toolkit."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if not Path(home, "bin/nvcc").exists():
        raise SystemExit(f"no nvcc in {home}/bin; set CUDA_HOME to a CUDA 13 toolkit")
    include, stubs = folder / "include", folder / "stubs"
    include.mkdir(exist_ok=True)
    stubs.mkdir(exist_ok=True)
    for header, package in HEADERS.items():
        if not Path(home, "include", header).exists() and not (include / header).exists():
            _fetch_headers(folder, package, include)
    if not (stubs / "libcuda.so").exists():  # linked against, never called, where there is no driver
        subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", stubs / "libcuda.so"], check=True)
    return os.environ | {
        "PYTHONPATH": f"{folder / 'source'}:{folder / 'site'}",
        "PATH": f"{folder / 'site/bin'}:{os.environ['PATH']}",
        "CUDA_HOME": home,
        "AOT": str(folder / "aot"),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{stubs}",
        "FLASHINFER_EXTRA_CUDAFLAGS": f"-isystem {include}",
        "MAX_JOBS": os.environ.get("MAX_JOBS", "1"),
    }


def _fetch_headers(folder: Path, package: str, include: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "download", "--no-deps", package, "--dest", folder], check=True)
    (wheel,) = folder.glob(f"{package.replace('-', '_')}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if "/include/" in name and name.endswith((".h", ".hpp")):
                (include / Path(name).name).write_bytes(archive.read(name))
    wheel.unlink()


def loaded_files(folder: Path, environment: dict[str, str]) -> set[str]:
    """Files below the source that an import loads, relative to it."""
    program = """
import sys, flashinfer
for module in list(sys.modules.values()):
    path = getattr(module, "__file__", None)
    if path: print(path)
"""
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    source = folder / "source"
    return {str(Path(p).relative_to(source)) for p in done.stdout.splitlines() if Path(p).is_relative_to(source)}


def slim(source: Path, aot: Path, loaded: set[str], wheels: Path) -> Path:
    """The wheel without what the worker never reaches, with the compiled modules. Returns its path."""
    (info,) = source.glob("flashinfer_python-*.dist-info")
    name, version = info.name.removesuffix(".dist-info").split("-")
    wheel = wheels / f"{name}-{version}-py3-none-any.whl"
    record = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:

        def add(relative: str, path: Path) -> None:
            data = path.read_bytes()
            archive.writestr(relative, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{relative},sha256={digest},{len(data)}")

        for path in sorted(p for p in source.rglob("*") if p.is_file()):
            relative = str(path.relative_to(source))
            if relative in loaded or _kept(relative, path.stat().st_size):
                add(relative, path)
        for path in sorted(aot.glob("*/*.so")):
            add(f"flashinfer/data/aot/{path.parent.name}/{path.name}", path)
        record.append(f"{info.name}/RECORD,,")
        archive.writestr(f"{info.name}/RECORD", "\n".join(record) + "\n")
    return wheel


def _kept(relative: str, size: int) -> bool:
    if relative.endswith((".pyc", "/RECORD")):
        return False
    if relative.startswith("flashinfer_python-"):
        return True
    if _SOURCES.match(relative):
        return size < _SOURCE_BYTES
    if relative.startswith("flashinfer/data/"):
        return False
    return relative.endswith((".py", ".json")) and not _DROPPED.match(relative)


if __name__ == "__main__":
    sys.exit(main())
