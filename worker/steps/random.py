"""Random numbers without state: a function of (seed, index, position, purpose) and nothing else.

So a row's draw cannot depend on its neighbours, its place in the batch, chunking, preemption or replay.
"""

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

# Philox 4×32, 10 rounds: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

U64Array = npt.NDArray[np.uint64]


class Purpose(IntEnum):
    """What a number is for: two purposes at one position get independent numbers."""

    SAMPLE = 0


def philox4x32(counter: U64Array, key: U64Array) -> U64Array:
    """Philox4x32-10 of each row.

    `counter` [N, 4] and `key` [N, 2] hold 32-bit words in uint64, as does the result [N, 4].
    """
    c0, c1, c2, c3 = counter.T
    k0, k1 = key.T
    for round_ in range(ROUNDS):
        key0 = (k0 + np.uint64(round_ * WEYL[0])) & _LOW
        key1 = (k1 + np.uint64(round_ * WEYL[1])) & _LOW
        product0 = c0 * MULTIPLIERS[0]
        product1 = c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ key0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ key1,
            product0 & _LOW,
        )
    return np.stack([c0, c1, c2, c3], axis=1)


def uniform(
    seeds: U64Array, positions: npt.NDArray[Any], purpose: Purpose, indexes: npt.NDArray[Any] | None = None
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each row.

    `seeds` [N] uint64; `positions` [N] absolute position of the token that is drawn; `indexes` [N] which of
    n sequences (None = all 0).
    """
    counter = np.zeros((len(seeds), 4), np.uint64)
    counter[:, 0] = positions
    if indexes is not None:
        counter[:, 1] = indexes
    counter[:, 2] = int(purpose)
    words = philox4x32(counter, np.stack([seeds & _LOW, seeds >> _SHIFT], axis=1))
    high, low = words[:, 0] >> np.uint64(5), words[:, 1] >> np.uint64(6)
    return (high.astype(np.float64) * 67108864.0 + low.astype(np.float64)) / 9007199254740992.0
