"""Experts one after another, on devices whose host knows at once which of them are in use."""

import torch

from worker.layers.ops import Ops, Routes


class PlainExperts:
    """See `Ops.experts`; parts are added in the order of the experts.

    Each expert computes its tokens in one product, padded as `Ops.linear` wants, so that a token's part does not
    depend on who else chose the expert.
    """

    def __init__(self, ops: Ops, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._ops = ops
        self._gate_up = [ops.pack(weight) for weight in gate_up]
        self._down = [ops.pack(weight) for weight in down]

    def __call__(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        ops = self._ops
        out = torch.zeros(x.shape, dtype=torch.float32)
        for index in torch.unique(routes.experts).tolist():
            tokens, choices = (routes.experts == index).nonzero(as_tuple=True)
            count = len(tokens)
            padded = torch.nn.functional.pad(tokens, (0, -count % ops.row_multiple))  # with token 0 again
            inner = ops.silu_mul(ops.linear(x[padded], self._gate_up[index]))
            part = ops.linear(inner, self._down[index])[:count]
            out[tokens] += routes.weights[tokens, choices].unsqueeze(1) * part.float()
        return out
