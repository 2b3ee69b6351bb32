"""A place that the loader fills."""

from dataclasses import dataclass

import torch

from worker.ranks.group import Share


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the checkpoint as the model holds it, maybe a slice of a merged weight."""

    name: str  # the model's own, like "layers.0.attention.q.weight"
    tensor: torch.Tensor  # destination, of the shape that the checkpoint must have, but for `share`
    offset: float = 0.0  # added to what a Hugging Face checkpoint holds; GGUF files hold the sum
    share: Share | None = None  # which part of the checkpoint's tensor this rank holds; None = all
    dim: int = 0  # along which

    @property
    def shape(self) -> tuple[int, ...]:
        """That the checkpoint must have."""
        sizes = list(self.tensor.shape)
        if self.share is not None:
            sizes[self.dim] = self.share.total
        return tuple(sizes)
