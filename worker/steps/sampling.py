"""What is asked of each sampled row, whichever device draws its token."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.steps.batch import I32Array

# Below it a temperature means greedy: the quotient of logits would only amplify their rounding.
GREEDY_TEMPERATURE = 1e-5

# How a slot's tokens are drawn, as proto.messages.Sampling; `min_len`: stop ids are masked at positions before it.
SAMPLING = np.dtype(
    [
        ("temperature", "f8"),
        ("top_k", "i4"),
        ("top_p", "f8"),
        ("min_p", "f8"),
        ("seed", "u8"),
        ("logprobs", "i4"),
        ("min_len", "i4"),
    ]
)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What is asked of each sampled row of a step. S rows."""

    slots: I32Array  # [S]
    positions: I32Array  # [S] absolute position of the token that is drawn
    params: npt.NDArray[Any]  # [S] of SAMPLING
    masked: list[tuple[int, I32Array]]  # (row, ids that it may not draw)
