"""Draw one token for each row from its logits.

Every row is computed on its own, by the same arithmetic whatever else is in the batch, and its random number
comes from (seed, position) alone: a request draws the same tokens in any batch.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from proto.channel import encode
from proto.messages import RowStatus, TokenLogprobs
from proto.parameters import GREEDY_TEMPERATURE
from worker.steps.batch import I32Array
from worker.steps.random import Purpose, uniform
from worker.steps.sampling import SamplingRows

# top_p looks at this many of the most likely ids first and at more only if their mass falls short.
_NUCLEUS_GUESS = 1024
_BLOCK = 256

F32Array = npt.NDArray[np.float32]
F64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sampled:
    ids: I32Array  # [S]; 0 where the status is not OK
    statuses: npt.NDArray[np.uint8]  # [S] RowStatus
    logprobs: tuple[tuple[int, bytes], ...]  # (row, encoded TokenLogprobs) of rows that want them


def sample(logits: F32Array, rows: SamplingRows) -> Sampled:
    """Draw from `logits` [S, vocab], which are not changed.

    A row with NaN or infinity gets NOT_FINITE and harms no other. Log-probabilities are those of the raw
    logits: temperature, masks and filters do not touch them.
    """
    best = logits.argmax(axis=1)  # the lowest id among equals; NaN counts as the largest
    highest = logits[np.arange(len(logits)), best]
    finite = np.isfinite(highest) & np.isfinite(logits.min(axis=1))
    ids = np.where(finite, best, 0).astype(np.int32)
    statuses = np.where(finite, RowStatus.OK, RowStatus.NOT_FINITE).astype(np.uint8)
    drawn = rows.params["temperature"] >= GREEDY_TEMPERATURE
    masked = dict(rows.masked)
    numbers = uniform(rows.params["seed"], rows.positions, Purpose.SAMPLE) if drawn.any() else None
    for row in np.flatnonzero(finite & (drawn | _among(masked, len(ids)))).tolist():
        values = logits[row]
        if row in masked:
            values = values.copy()
            values[masked[row]] = -np.inf
        if not np.isfinite(values.max()):  # nothing is left to draw
            ids[row], statuses[row] = 0, RowStatus.NOT_FINITE
        elif numbers is not None and drawn[row]:
            ids[row] = draw(values, rows.params[row], float(numbers[row]))
        else:
            ids[row] = values.argmax()
    wanted = np.flatnonzero((rows.params["logprobs"] >= 0) & (statuses == RowStatus.OK))
    logprobs = tuple(
        (row, encode(token_logprobs(logits[row], int(ids[row]), int(rows.params["logprobs"][row]))))
        for row in wanted.tolist()
    )
    return Sampled(ids, statuses, logprobs)


def _among(rows: dict[int, Any], count: int) -> npt.NDArray[np.bool_]:
    flags = np.zeros(count, np.bool_)
    flags[list(rows)] = True
    return flags


def draw(values: F32Array, params: Any, number: float) -> int:
    """One id from logits [vocab] by inverse transform of `number` in [0, 1); `params` is an item of SAMPLING.

    Filters act on the distribution after temperature, each on what the one before left, renormalised:
    top_k keeps the k most likely (lower ids first among equals), top_p the fewest most likely whose mass
    reaches it, min_p those at least that fraction as likely as the likeliest.
    """
    weights = np.exp((values - values.max()) / np.float32(params["temperature"]))
    top_k, top_p, min_p = int(params["top_k"]), float(params["top_p"]), float(params["min_p"])
    kept: npt.NDArray[np.intp] | None = None  # ids, most likely first; None = all, by id
    if 0 < top_k < len(weights):
        kept = _most_likely(weights, top_k)
    if top_p < 1.0:
        kept = _nucleus(weights, top_p) if kept is None else kept[: _reach(weights[kept], top_p)]
    mass = weights if kept is None else weights[kept]
    if min_p > 0.0:
        enough = mass >= np.float32(min_p)  # the likeliest has weight 1
        kept = np.flatnonzero(enough) if kept is None else kept[enough]
        mass = weights[kept]
    at = _pick(mass, number)
    return at if kept is None else int(kept[at])


def _pick(mass: F32Array, number: float) -> int:
    """Index of the item in which the fraction `number` of the total mass falls.

    By blocks first: cumulating a whole vocabulary would take most of the time of a draw.
    """
    blocks = np.cumsum(np.add.reduceat(mass, np.arange(0, len(mass), _BLOCK), dtype=np.float64))
    goal = number * blocks[-1]
    block = _interval(blocks, goal)
    start = block * _BLOCK
    inside = np.cumsum(mass[start : start + _BLOCK], dtype=np.float64)
    return start + _interval(inside, goal - (blocks[block - 1] if block else 0.0))


def _interval(cumulated: F64Array, goal: float) -> int:
    """The first item that ends beyond `goal`; the last one with any mass where rounding leaves none."""
    at = int(np.searchsorted(cumulated, goal, side="right"))
    return min(at, int(np.searchsorted(cumulated, cumulated[-1], side="left")))


def _most_likely(weights: F32Array, count: int) -> npt.NDArray[np.intp]:
    """The `count` ids of the largest weights, descending, lower ids first among equals."""
    threshold = np.partition(weights, len(weights) - count)[len(weights) - count]
    ids = np.flatnonzero(weights >= threshold)  # more than count where several equal the threshold
    return ids[np.argsort(-weights[ids], kind="stable")[:count]]


def _reach(descending: F32Array, top_p: float, total: float | None = None) -> int:
    """How many of the largest weights are needed for the fraction `top_p` of `total` (None = of their sum)."""
    cumulated = np.cumsum(descending, dtype=np.float64)
    goal = top_p * (cumulated[-1] if total is None else total)
    return int(np.searchsorted(cumulated, goal, side="left")) + 1


def _nucleus(weights: F32Array, top_p: float) -> npt.NDArray[np.intp]:
    """The fewest most likely ids whose mass reaches `top_p` of the whole, descending."""
    total = float(np.sum(weights, dtype=np.float64))
    count = min(_NUCLEUS_GUESS, len(weights))
    while True:
        ids = _most_likely(weights, count)
        needed = _reach(weights[ids], top_p, total)
        if needed <= count or count == len(weights):
            return ids[:needed]
        count = min(count * 8, len(weights))


def token_logprobs(values: F32Array, chosen: int, count: int) -> TokenLogprobs:
    """Natural log-probabilities of raw logits [vocab]: the chosen id's and the `count` most likely ones'."""
    shifted = values - values.max()
    log_sum = np.log(np.sum(np.exp(shifted), dtype=np.float64))
    top = _most_likely(values, min(count, len(values))) if count else np.zeros(0, np.intp)
    return TokenLogprobs(
        chosen=(float(shifted[chosen] - log_sum),),
        top_ids=(top.astype(np.int32).tobytes(),),
        top_logprobs=(tuple((shifted[top] - log_sum).tolist()),),
    )
