"""Attention with linear biases (Press et al. 2022)."""

import numpy as np
import numpy.typing as npt


def alibi_slopes(heads: int) -> npt.NDArray[np.float32]:
    """Slope of each head, [heads] float32: what a score loses for each position of distance.

    For n heads, a power of two, 2^(-8/n), 2^(-16/n), …, 2^-8. For other numbers those of the largest power of two
    below, then every second one of twice that power, as the paper's authors do.
    """
    power = 1 << (heads.bit_length() - 1)
    exponents = np.arange(1, power + 1) * (-8.0 / power)
    between = np.arange(1, 2 * (heads - power), 2) * (-4.0 / power)
    return (2.0 ** np.concatenate([exponents, between])).astype(np.float32)
