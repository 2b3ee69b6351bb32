"""`worker.cpu.sampler` in torch operations that neither wait for the device nor look at values: a graph can hold them.

Each row is computed on its own by the same arithmetic, and its random number comes from (seed, position) alone.
B rows, padding included; V ids.
"""

from enum import IntEnum

import torch

from proto.messages import RowStatus
from proto.parameters import GREEDY_TEMPERATURE
from worker.cuda.random import uniform
from worker.steps.random import Purpose
from worker.steps.sampling import SAMPLING

MOST_RANKED = 1024  # ids of a row that `Mode.CUT` puts in order
_BLOCK = 256  # ids whose mass is summed before any is looked at
_TORCH_TYPES = {"f8": torch.float64, "u8": torch.int64, "i4": torch.int32}


class Mode(IntEnum):
    """How much a step's sampling must do. Each does what those before it do."""

    GREEDY = 0  # every row takes its most likely id
    PLAIN = 1  # some rows draw, none filters
    CUT = 2  # some rows filter, by min_p alone or with a top_k of at most MOST_RANKED
    FILTERED = 3  # some rows filter, in any way: puts the whole vocabulary in order


class SamplingTable:
    """Each slot's record of SAMPLING, in device memory. Slot `slots` is of padding: greedy."""

    WORDS = SAMPLING.itemsize // 4  # int32 a record

    def __init__(self, slots: int, device: torch.device) -> None:
        self.words = torch.zeros(slots + 1, self.WORDS, dtype=torch.int32, device=device)
        assert SAMPLING.fields is not None
        self._fields = {
            name: self.words.view(_TORCH_TYPES[kind.str[1:]])[:, offset // kind.itemsize]
            for name, (kind, offset, *_) in SAMPLING.fields.items()
        }

    def __getitem__(self, field: str) -> torch.Tensor:
        """A view of one field of all slots."""
        return self._fields[field]


def finite_rows(logits: torch.Tensor) -> torch.Tensor:
    """bool [B] of logits [B, V]: are all of the row's finite?"""
    low, high = torch.aminmax(logits, dim=1)
    return torch.isfinite(low) & torch.isfinite(high)


def sample(
    logits: torch.Tensor,
    finite: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: SamplingTable,
    mode: Mode,
) -> torch.Tensor:
    """Draw one id a row: int32 [B, 2], id and RowStatus; the id is 0 where the status is not OK.

    `logits` [B, V] float32, -inf where an id may not be drawn; `finite` [B] of the logits before that; `slots` and
    `positions` [B] int32 of each row's last token, whose successor is drawn.
    """
    best = logits.argmax(dim=1)  # the lowest id among equals
    good = finite & torch.isfinite(logits.gather(1, best[:, None])[:, 0])  # else nothing is left to draw
    ids = best
    if mode is not Mode.GREEDY:
        temperatures = table["temperature"][slots]
        numbers = uniform(table["seed"][slots], positions + 1, Purpose.SAMPLE)
        # Greedy rows and rows without a finite logit compute along; what they get is not used.
        weights = _weights(logits, torch.where(temperatures < GREEDY_TEMPERATURE, 1.0, temperatures))
        if mode is Mode.PLAIN:
            drawn = _pick(weights, numbers)
        else:
            drawn = _filtered(weights, numbers, slots, table, MOST_RANKED if mode is Mode.CUT else weights.shape[1])
        ids = torch.where(temperatures < GREEDY_TEMPERATURE, best, drawn)
    statuses = torch.where(good, int(RowStatus.OK), int(RowStatus.NOT_FINITE))
    return torch.stack([torch.where(good, ids, 0), statuses], dim=1).to(torch.int32)


def _weights(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Unnormalised probabilities [B, V] float32; the likeliest id has 1."""
    return torch.exp((logits - logits.amax(dim=1, keepdim=True)) / temperatures.float()[:, None])


def _filtered(
    weights: torch.Tensor, numbers: torch.Tensor, slots: torch.Tensor, table: SamplingTable, most: int
) -> torch.Tensor:
    """Filters as `worker.cpu.sampler.draw`: top_k, of that top_p, of that min_p; then one id a row, [B] int64.

    A row that neither cuts by rank nor by mass is drawn from in the order of ids, like one without filters. Others need
    no more than their `most` likeliest ids.
    """
    size = weights.shape[1]
    top_ks, top_ps, min_ps = table["top_k"][slots], table["top_p"][slots], table["min_p"][slots].float()[:, None]
    limits = torch.where(top_ks > 0, top_ks.clamp(max=size), size)
    descending, order = _most_likely(weights, min(most, size))
    ranks = torch.arange(descending.shape[1], device=weights.device)
    mass = torch.where(ranks < limits[:, None], descending, 0.0)
    needed = _find(mass, top_ps, right=False) + 1  # the fewest most likely ids whose mass reaches top_p
    mass = torch.where((top_ps < 1.0)[:, None] & (ranks >= needed[:, None]), 0.0, mass)
    by_rank = _pick(torch.where(mass >= min_ps, mass, 0.0), numbers)
    by_id = _pick(torch.where(weights >= min_ps, weights, 0.0), numbers)
    return torch.where((limits < size) | (top_ps < 1.0), order.gather(1, by_rank[:, None])[:, 0], by_id)


def _most_likely(weights: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of weights [B, V], none negative, and their ids; lower ids first among equals."""
    size = weights.shape[1]
    if count == size:
        return weights.sort(dim=1, descending=True, stable=True)
    # topk leaves open which of equals it takes, so none are: a weight's bits, in order as it is, and its id below them.
    keys = weights.view(torch.int32).long()
    keys <<= 32
    keys |= torch.arange(size - 1, -1, -1, device=weights.device)
    order = size - 1 - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
    return weights.gather(1, order), order


def _pick(mass: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Index [B] of the item of mass [B, V] in which the fraction `numbers` [B] of the total falls."""
    return _find(mass, numbers, right=True)


def _find(mass: torch.Tensor, fractions: torch.Tensor, *, right: bool) -> torch.Tensor:
    """The first item of mass [B, V] whose cumulated mass reaches (`right`: exceeds) the fraction [B] of the total.

    The last one with any mass where rounding leaves none. By blocks first, in float64: the cumulated mass of a whole
    vocabulary would take twice the memory of the logits.
    """
    rows, size = mass.shape
    padded = torch.nn.functional.pad(mass, (0, -size % _BLOCK)).view(rows, -1, _BLOCK)
    blocks = padded.sum(dim=2, dtype=torch.float64).cumsum(dim=1)
    goals = fractions[:, None].double() * blocks[:, -1:]
    block = _interval(blocks, goals, right)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = padded.gather(1, block[:, :, None].expand(-1, 1, _BLOCK))[:, 0].double().cumsum(dim=1)
    return (block * _BLOCK + _interval(inside, goals - before, right))[:, 0]


def _interval(cumulated: torch.Tensor, goals: torch.Tensor, right: bool) -> torch.Tensor:
    """[B, 1] of cumulated [B, n] and goals [B, 1]."""
    at = torch.searchsorted(cumulated, goals, right=right)
    last = torch.searchsorted(cumulated, cumulated[:, -1:].contiguous(), right=False)
    # Of a row with NaN both lie behind the end, where a GPU must not look.
    return torch.minimum(at, last).clamp(max=cumulated.shape[1] - 1)


def token_logprobs(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of raw logits [n, V]: the `count` most likely ids [n, count] int32, lower ids first among equals, their natural
    log-probabilities float64 [n, count], and what to subtract from a logit to get its own, float64 [n]."""
    largest = logits.amax(dim=1, keepdim=True)
    sums = torch.exp(logits - largest).sum(dim=1, dtype=torch.float64).log()
    values, ids = logits.sort(dim=1, descending=True, stable=True)
    top = (values[:, :count] - largest).double() - sums[:, None]
    return ids[:, :count].to(torch.int32), top, sums + largest[:, 0].double()
