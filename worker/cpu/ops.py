"""Arithmetic on CPUs: oneDNN for matrix products, numba for the rest."""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from worker.cpu import kernels
from worker.cpu.experts import PlainExperts
from worker.cpu.gemm import GemmRule
from worker.layers.ops import Experts, Routes

PARALLEL_ELEMENTS = 100_000  # fewer are done before a second thread wakes up


def bits(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return the tensor's memory as kernels want it, without a copy: float32, or bfloat16 bits as uint16."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


class CpuOps:
    """See `Ops`; float32 and bfloat16."""

    def __init__(self, gemm: GemmRule, threads: int) -> None:
        self.gemm = gemm
        self.threads = threads
        self.row_multiple = gemm.multiple

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return self.gemm.pack(weight)

    def linear(self, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        return self.gemm(x, packed)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._share(x)
        kernels.rms_norm(bits(x), bits(weight), np.float32(eps), bits(out))
        return out

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + delta
        return x, self.rms_norm(x, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._share(gate_up)
        kernels.silu_mul(bits(gate_up), bits(out))
        return out

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._share(gate_up)
        kernels.gelu_mul(bits(gate_up), bits(out))
        return out

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._share(x)
        kernels.gelu(bits(x), bits(out))
        return out

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._share(x)
        kernels.layer_norm(bits(x), bits(weight), bits(bias), np.float32(eps), bits(out))
        return out

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._share(x)
        kernels.soft_cap(bits(x), np.float32(cap), bits(out))
        return out

    def route(self, logits: torch.Tensor, count: int, renormalise: bool) -> Routes:
        chosen = torch.empty(logits.shape[0], count, dtype=torch.int32)
        weights = torch.empty(logits.shape[0], count)
        self._share(logits)
        kernels.route(bits(logits), renormalise, chosen.numpy(), bits(weights))
        return Routes(chosen, weights)

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> Experts:
        return PlainExperts(self, gate_up, down)

    def _share(self, x: torch.Tensor) -> None:
        """Choose how many threads the next kernel runs on; its result does not depend on that."""
        numba.set_num_threads(self.threads if x.numel() >= PARALLEL_ELEMENTS else 1)
