"""FlashInfer and our own GPU kernels: the one seam at which tests put their double.

Both are imported at the first call only, so a machine without CUDA can import everything else.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worker.device import DeviceError

if TYPE_CHECKING:
    import torch

VERSION = "0.7.4"  # whose contract `worker.cuda.flashinfer` is written to
_WRAPPER_FIELDS = ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer")


class FlashInferError(DeviceError):
    """FlashInfer is missing, or of a version that this worker does not know. The text says what to do."""


@dataclass(frozen=True, slots=True)
class Library:
    """Everything that the GPU worker calls."""

    flashinfer: Any  # the package
    kernels: Any  # worker.cuda.kernels, or what has its functions
    head_dims: frozenset[int]  # that attention has kernels for
    dtypes: "frozenset[torch.dtype]"  # of activations


_library: Library | None = None


def library() -> Library:
    """FlashInfer and our kernels, loaded at the first call. Raises FlashInferError."""
    global _library
    if _library is None:
        _library = _load()
    return _library


def replace(other: Library | None) -> Library | None:
    """Use `other` from now on (None: load at the next call). Returns what was used before."""
    global _library
    before, _library = _library, other
    return before


def check_wrapper(wrapper: Any) -> None:
    """The int workspaces of a wrapper have no public names; raise FlashInferError when they are not where they were."""
    missing = [name for name in _WRAPPER_FIELDS if not hasattr(wrapper, name)]
    if missing:
        raise FlashInferError(
            f"{type(wrapper).__name__} of this FlashInfer has no {', '.join(missing)}; use version {VERSION}"
        )


def _load() -> Library:
    try:
        import flashinfer
    except ImportError as error:
        raise FlashInferError(
            f"device cuda needs FlashInfer {VERSION}: {error}; pip install 'quintet-llm[cuda]'"
        ) from error
    import torch

    from worker.cuda import kernels as cuda_kernels

    return Library(flashinfer, cuda_kernels, frozenset({64, 128, 256}), frozenset({torch.bfloat16, torch.float16}))
