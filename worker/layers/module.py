"""The base of every part of a model, which finds what the part consists of by walking its attributes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from worker.layers.gemm_shape import GemmShape
from worker.layers.ops import Ops
from worker.layers.parameter import Parameter
from worker.ranks.group import Group


@dataclass(frozen=True, slots=True)
class Target:
    """The device and ranks that a model's layers are built for."""

    ops: Ops
    group: Group  # the ranks that share the model
    dtype: torch.dtype  # of weights and activations


class Module:
    """A part of a model. Its attributes hold parameters, other modules, and lists of modules; others are ignored.

    Public attributes are for whoever assembles a step of its own from the layers: weights and what they are packed to,
    sizes, constants. Attributes are walked in the order in which they were first assigned, and their paths name the
    parameters: "layers.3.mlp.down.weight". A parameter that is reached twice, as a tied one, belongs to its first path.
    """

    def parameters(self) -> dict[str, Parameter]:
        """Everything that a checkpoint must fill, by path."""
        first_paths: dict[Parameter, str] = {}
        for path, parameter in self._walk(""):
            first_paths.setdefault(parameter, path)
        return {path: parameter for parameter, path in first_paths.items()}

    def pack(self) -> None:
        """Lay the weights out as the device wants them, once all parameters are filled."""
        for _, child in self._children():
            child.pack()

    def gemm_shapes(self, tokens: int, sampled: int) -> list[GemmShape]:
        """Return every matrix product of a step of up to `tokens` tokens and `sampled` rows of logits."""
        return [shape for _, child in self._children() for shape in child.gemm_shapes(tokens, sampled)]

    def _children(self) -> Iterator[tuple[str, "Module"]]:
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, list):
                yield from ((f"{name}.{index}", item) for index, item in enumerate(value) if isinstance(item, Module))

    def _walk(self, prefix: str) -> Iterator[tuple[str, Parameter]]:
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield prefix + name, value
        for name, child in self._children():
            yield from child._walk(f"{prefix}{name}.")
