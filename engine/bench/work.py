"""Requests of given lengths, the same for the same seed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import msgspec
import numpy as np

from quintet_client.options import WorkClassName

_CLASSES: tuple[WorkClassName, ...] = get_args(WorkClassName)


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens of one kind of request. The prefix is shared by all requests of a run."""

    work_class: WorkClassName
    prompt_tokens: int
    output_tokens: int
    prefix_tokens: int = 0


PRESETS: dict[str, Shape] = {
    "chat": Shape("chat", 512, 256),
    "agent": Shape("agent", 200, 100, prefix_tokens=8192),
    "batch": Shape("batch", 1024, 128),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send. `prompt` are token ids."""

    work_class: WorkClassName
    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Work:
    """Shapes of requests to draw from, each with its weight."""

    name: str
    shapes: Sequence[Shape]
    weights: Sequence[float]

    def jobs(self, vocab_size: int, seed: int) -> Iterator[Job]:
        """Yield requests without end."""
        lengths, ids = np.random.default_rng((seed, 0)), np.random.default_rng((seed, 1))
        longest = max(shape.prefix_tokens for shape in self.shapes)
        prefix = np.random.default_rng((seed, 2)).integers(0, vocab_size, longest).tolist()
        bounds = np.cumsum(self.weights) / np.sum(self.weights)
        while True:
            shape = self.shapes[int(np.searchsorted(bounds, lengths.random(), side="right"))]
            own: list[int] = ids.integers(0, vocab_size, shape.prompt_tokens).tolist()
            yield Job(shape.work_class, prefix[: shape.prefix_tokens] + own, shape.output_tokens)


def preset_work(text: str) -> Work:
    """Parse "chat", or a mix with weights such as "chat=3,batch=1". Raises ValueError."""
    shapes, weights = [], []
    for part in text.split(","):
        name, _, weight = part.partition("=")
        if name not in PRESETS:
            raise ValueError(f"must name {', '.join(PRESETS)} or a mix of these, got {name!r}")
        shapes.append(PRESETS[name])
        try:
            weights.append(float(weight or 1))
        except ValueError:
            raise ValueError(f"the weight of {name} must be a number, got {weight!r}") from None
        if not 0 < weights[-1] < float("inf"):
            raise ValueError(f"the weight of {name} must be finite and above 0, got {weight}")
    return Work(text, shapes, weights)


_LONGEST = 10_000_000  # tokens: more than any model takes, and few enough to draw


class _Lengths(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a file of lengths."""

    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=_LONGEST)]
    output_tokens: Annotated[int, msgspec.Meta(ge=1, le=_LONGEST)]
    work_class: str = "chat"


def work_of_file(path: Path) -> Work:
    """Read lengths of real requests, one JSON object a line, to draw with equal chances. Raises ValueError, OSError."""
    shapes = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=_Lengths)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        work_class = next((name for name in _CLASSES if name == entry.work_class), None)
        if work_class is None:
            raise ValueError(
                f"{path}, line {number}: work_class must be one of {', '.join(_CLASSES)}, got {entry.work_class!r}"
            )
        shapes.append(Shape(work_class, entry.prompt_tokens, entry.output_tokens))
    if not shapes:
        raise ValueError(f"{path} is empty")
    return Work(str(path), shapes, [1.0] * len(shapes))


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Draw when requests arrive, in seconds from the start, as a Poisson process of `rate` a second."""
    times: list[float] = np.cumsum(np.random.default_rng((seed, 3)).exponential(1 / rate, count)).tolist()
    return times
