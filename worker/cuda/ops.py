"""Arithmetic of the cuda device: cuBLAS for matrix products, FlashInfer and Triton for what is fused, else torch."""

import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from worker.cuda.experts import GroupedExperts
from worker.cuda.flashinfer_api import library
from worker.layers.ops import Experts, Routes

ROWS = 128  # of a batch-invariant product: within one tile's height, where reading the weight still takes longest


class CudaOps:
    """See `Ops`. Nothing here waits for the device, so all of it can be captured in a CUDA graph.

    cuBLAS chooses kernels by the number of rows, so rows are batch-invariant with `deterministic` only: then every
    product has ROWS rows, padded, as many products as it takes.
    """

    row_multiple = 1

    def __init__(self, *, deterministic: bool = False) -> None:
        api = library()
        self._flashinfer = api.flashinfer
        self._kernels = api.kernels
        self._deterministic = deterministic

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Keep a float32 weight that holds only 16-bit numbers in 16 bits: half the memory, and tensor cores."""
        if weight.dtype == torch.float32:
            for dtype in (torch.bfloat16, torch.float16):
                narrow = weight.to(dtype)
                if torch.equal(narrow.float(), weight):
                    return narrow
        return weight

    def linear(self, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        """See `Ops`. A float32 x meets a narrowed weight only if it was widened from the weight's own dtype."""
        if not self._deterministic:
            return self._product(x, packed)
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -rows % ROWS)).contiguous()
        return torch.cat([self._product(part, packed) for part in torch.split(padded, ROWS)])[:rows]

    def _product(self, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        if x.dtype != packed.dtype:
            return torch.mm(x.to(packed.dtype), packed.t(), out_dtype=x.dtype)
        return F.linear(x, packed)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if weight.dtype != x.dtype:  # Gemma's; FlashInfer would read it as if it were of x's dtype
            return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
        normed: torch.Tensor = self._flashinfer.rmsnorm(x, weight, eps)
        return normed

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if weight.dtype != x.dtype:
            x = x + delta
            return x, self.rms_norm(x, weight, eps)
        self._flashinfer.fused_add_rmsnorm(delta, x, weight, eps)  # the sum into x, its norm into delta
        return x, delta

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._flashinfer.silu_and_mul(gate_up, out=out)
        return out

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._flashinfer.gelu_tanh_and_mul(gate_up, out=out)
        return out

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return cap * torch.tanh(x / cap)

    def route(self, logits: torch.Tensor, count: int, renormalise: bool) -> Routes:
        return Routes(*self._kernels.route(logits, count, renormalise))

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> Experts:
        return GroupedExperts(self, self._kernels, gate_up, down, deterministic=self._deterministic)
