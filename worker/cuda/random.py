"""`worker.steps.random` in integer operations of torch, so that a device draws the numbers that the CPU draws."""

import torch

from worker.steps.random import MULTIPLIERS, ROUNDS, WEYL, Purpose

_LOW = 0xFFFFFFFF
_MULTIPLIER0, _MULTIPLIER1 = (int(m) for m in MULTIPLIERS)

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Philox4x32-10 of each row; words of 32 bits in int64 tensors [N].

    Products wrap to 64 bits; shifts right keep the sign, which the masks take off again.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_ in range(ROUNDS):
        key0 = (k0 + round_ * WEYL[0]) & _LOW
        key1 = (k1 + round_ * WEYL[1]) & _LOW
        product0 = c0 * _MULTIPLIER0
        product1 = c2 * _MULTIPLIER1
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _LOW) ^ c1 ^ key0,
            product1 & _LOW,
            ((product0 >> 32) & _LOW) ^ c3 ^ key1,
            product0 & _LOW,
        )
    return c0, c1, c2, c3


def uniform(seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """One number in [0, 1) with 53 random bits for each row, float64 [N].

    `seeds` [N] int64 with the bits of the uint64 seed; `positions` [N] of the tokens that are drawn.
    """
    zeros = torch.zeros_like(seeds)
    counter = (positions.to(torch.int64), zeros, zeros + int(purpose), zeros)
    words = philox4x32(counter, (seeds & _LOW, (seeds >> 32) & _LOW))
    return ((words[0] >> 5).double() * 67108864.0 + (words[1] >> 6).double()) / 9007199254740992.0
