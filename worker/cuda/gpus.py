"""The GPUs that this machine must have."""

import torch

from worker.device import DeviceError


def require_cuda(workers: int = 1) -> None:
    """Raise DeviceError if this machine cannot give each of so many workers a GPU; the text says what is missing."""
    if not torch.cuda.is_available():
        lack = "this torch was built for CPUs only" if torch.version.cuda is None else "no GPU or no driver for it"
        raise DeviceError(f"--device cuda: {lack}; `quintet doctor` lists what is missing")
    if (gpus := torch.cuda.device_count()) < workers:
        raise DeviceError(
            f"{workers} workers (--tensor-parallel-size times --data-parallel-size) need a GPU each, and {gpus} can be "
            "seen here (CUDA_VISIBLE_DEVICES hides others)"
        )
