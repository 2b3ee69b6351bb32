"""All experts in two grouped products, without asking the device which of them are in use.

Each use of an expert by a token is a pair. Pairs are sorted by expert on the device; a product's tiles find out there
whose rows they have. Shapes follow from the number of tokens alone, so a CUDA graph can hold all of it. Padding tokens
take part like others and change nothing but what is read.
"""

from typing import Any

import torch

from worker.layers.ops import Ops, Routes

FEW_ROWS, MANY_ROWS = 16, 64  # of a tile: the height of the smallest and of the widest instruction of tensor cores


class GroupedExperts:
    """See `Ops.experts`; parts are added in the order in which the router names them.

    A row's bits depend on the height of the tiles, which follows from the number of tokens, unless `deterministic`.
    """

    def __init__(
        self, ops: Ops, kernels: Any, gate_up: torch.Tensor, down: torch.Tensor, *, deterministic: bool
    ) -> None:
        self._ops = ops
        self._kernels = kernels
        self._gate_up = gate_up
        self._down = down
        self._numbers = torch.arange(len(gate_up), dtype=torch.int32, device=gate_up.device)
        self._deterministic = deterministic

    def __call__(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        product, count = self._kernels.grouped_product, routes.experts.shape[1]
        experts, order = routes.experts.flatten().sort()  # pair token × count + choice; [pairs]
        ends = torch.searchsorted(experts, self._numbers, right=True, out_int32=True)
        few = len(order) <= FEW_ROWS * len(self._numbers) and not self._deterministic
        rows = FEW_ROWS if few else MANY_ROWS
        gate_up = product(x, self._gate_up, ends, order, count, rows)
        parts = product(self._ops.silu_mul(gate_up), self._down, ends, order, 1, rows)
        total: torch.Tensor = self._kernels.weighted_sum(parts, routes.weights)
        return total
