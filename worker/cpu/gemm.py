"""Batch-invariant matrix products on kernels that promise no such thing.

BLAS libraries choose a kernel, and with it the order of additions, by the number of rows. Whether they agree
bitwise, and from which multiple of rows on, depends on the machine, the library, the dtype and the shape; so it is
measured at start-up on the model's own shapes, and rows are padded accordingly.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from worker.layers.gemm_shape import GemmShape

Shape = tuple[int, int]  # out features, in features
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

MULTIPLES = (2, 4, 8, 16, 32)
MOST_ROWS = 512
FALLBACK_TILE = 8
SECONDS_PER_SHAPE = 0.5  # a shape that is slower is verified for fewer rows, and run with no more


@dataclass(frozen=True, slots=True)
class GemmRule:
    """A way to multiply: rows come in multiples of `multiple`, and one call gets at most `most[shape]` of them."""

    onednn: bool  # packed weights through oneDNN, or plain torch
    multiple: int
    most: dict[Shape, int]

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return _pack_onednn(weight) if self.onednn else weight.contiguous()

    def __call__(self, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        """x [N, in], packed weight of [out, in] → [N, out]; N is a multiple of `multiple`."""
        product: Product = _onednn if self.onednn else F.linear
        most = self.most[packed.shape[0], packed.shape[1]]
        if x.shape[0] <= most:
            return product(x, packed)
        return torch.cat([product(x[i : i + most], packed) for i in range(0, x.shape[0], most)])


def find_rule(shapes: list[GemmShape]) -> GemmRule:
    """Return the cheapest rule under which every shape's rows are bitwise the same in any number and any place.

    Tried in order: oneDNN, then torch's own choice, each with growing row multiples; then tiles of a fixed
    number of rows, and last single rows, which no neighbour can change.
    """
    for onednn in (True, False):
        for multiple in MULTIPLES:
            most = _verified_rows(shapes, onednn, multiple, MOST_ROWS)
            if most:
                return GemmRule(onednn, multiple, most)
    most = _verified_rows(shapes, False, FALLBACK_TILE, FALLBACK_TILE)
    if most:
        return GemmRule(False, FALLBACK_TILE, most)
    return GemmRule(False, 1, {(shape.out_features, shape.in_features): 1 for shape in shapes})


def _verified_rows(shapes: list[GemmShape], onednn: bool, multiple: int, limit: int) -> dict[Shape, int]:
    """Return for each shape how many rows (≤ limit) agree with calls of `multiple` rows; {} when one does not."""
    most: dict[Shape, int] = {}
    for shape in shapes:
        try:
            rows = _agreeing_rows(shape, onednn, multiple, max(min(shape.rows, limit), multiple))
        except (RuntimeError, AttributeError):
            return {}  # this build of torch has no such kernel
        if not rows:
            return {}
        key = shape.out_features, shape.in_features  # for one size in two dtypes the stricter count holds for both
        most[key] = min(rows, most.get(key, rows))
    return most


def _agreeing_rows(shape: GemmShape, onednn: bool, multiple: int, limit: int) -> int:
    """Return the largest row count up to `limit` that was verified, with all smaller ones; 0 = one disagrees."""
    generator = torch.Generator().manual_seed(shape.out_features * 31 + shape.in_features)
    weight = torch.randn(shape.out_features, shape.in_features, generator=generator).to(shape.dtype)
    counts = _row_counts(multiple, limit)
    x = torch.randn(counts[-1], shape.in_features, generator=generator).to(shape.dtype)
    product: Product = _onednn if onednn else F.linear
    packed = _pack_onednn(weight) if onednn else weight
    deadline = time.perf_counter() + SECONDS_PER_SHAPE
    expected = product(x[:multiple], packed)
    verified = [multiple]
    for count in counts:
        # Calls of a verified number of rows stand for calls of `multiple` rows.
        missing = count - len(expected)
        piece = max(n for n in verified if missing % n == 0)
        expected = torch.cat(
            [expected, *(product(x[i : i + piece], packed) for i in range(len(expected), count, piece))]
        )
        order = torch.randperm(count, generator=generator)
        if not torch.equal(product(x[:count], packed), expected):
            return 0
        if not torch.equal(product(x[:count][order], packed), expected[order]):
            return 0
        verified.append(count)
        if time.perf_counter() > deadline:
            break
    return verified[-1]


def _row_counts(multiple: int, most: int) -> list[int]:
    """Return every small multiple, then ever sparser ones, and `most` rounded down to a multiple."""
    counts = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28, 31, 32, 36, 40, 48, 56, 64, 80, 96, 112, 128]
    counts += [160, 192, 224, 256, 320, 384, 448]
    return sorted({n for n in (count // multiple * multiple for count in [*counts, most]) if 0 < n <= most})


def _pack_onednn(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def _onednn(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return product
