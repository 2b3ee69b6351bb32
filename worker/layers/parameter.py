"""A place that the loader fills."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the checkpoint as the model holds it, maybe a slice of a merged weight."""

    name: str  # the model's own, like "layers.0.attention.q.weight"
    tensor: torch.Tensor  # destination, of the shape that the checkpoint must have
    offset: float = 0.0  # added to what a Hugging Face checkpoint holds; GGUF files hold the sum
