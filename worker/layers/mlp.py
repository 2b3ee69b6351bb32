"""Feed-forward networks with a gate (Shazeer 2020)."""

import torch

from worker.layers.linear import Linear, RowLinear
from worker.layers.module import Module, Target


class GatedMLP(Module):
    """down(activation(gate(x)) × up(x)): SwiGLU or GeGLU. Ranks share the inner features."""

    def __init__(self, target: Target, hidden: int, inner: int, activation: str, *, bias: bool = False) -> None:
        """`activation` is that of `ModelConfig.hidden_act`. Raises ValueError for an unknown one."""
        products = {"silu": target.ops.silu_mul, "gelu_pytorch_tanh": target.ops.gelu_mul}
        if activation not in products:
            raise ValueError(f"hidden_act {activation!r} is not supported; supported: {', '.join(products)}")
        self.activation = activation
        part = target.group.share_features(inner)
        self.gate_up = Linear(target, hidden, {"gate": part, "up": part}, bias=bias)
        self.down = RowLinear(target, part, hidden, bias=bias)
        self._activate = products[activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, hidden] → the same shape."""
        return self.down(self._activate(self.gate_up(x)))
