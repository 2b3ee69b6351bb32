"""The shape of a matrix product, which a device must know before it sees the weights."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GemmShape:
    """A matrix product that the model makes: weight [out, in] in `dtype`, with up to `rows` rows a step."""

    out_features: int
    in_features: int
    dtype: torch.dtype
    rows: int
