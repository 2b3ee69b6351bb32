"""Ranks with a GPU each. Tensors cross from device to device on the current stream; host values go by gloo."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from worker.cuda.gpus import require_cuda
from worker.ranks.distributed import DistributedGroup, add_in_order
from worker.ranks.group import Group, PeerLostError

T = TypeVar("T")


def join_gpus(rank: int, size: int, rendezvous: Path, gpu: torch.device, *, deterministic: bool) -> Group:
    """Meet the other ranks, each of which has taken a GPU. Raises PeerLostError."""
    host = DistributedGroup(rank, size, rendezvous, gpu)
    return DeviceGroup(host, Nccl(size), deterministic=deterministic)


def take_gpu(number: int, workers: int) -> torch.device:
    """Make a GPU this thread's own, one of those that so many workers need. Raises DeviceError."""
    require_cuda(workers)
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


class Collectives(Protocol):
    """Exchanges between devices of contiguous tensors that have one shape and dtype on all ranks.

    Calls queue work on the current stream and wait for nothing, so a CUDA graph can hold them. All ranks make the same
    calls in the same order, capture the same graphs, and replay them in the same order.
    """

    def add(self, x: torch.Tensor) -> None:
        """Replace x by the sum of all ranks' x: the same bits on every rank, added in the library's own order."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' x in the order of ranks: [size, *x.shape]."""

    def send_from_0(self, x: torch.Tensor) -> None:
        """Replace x by that of rank 0."""


class DeviceGroup(Group):
    """A `Group` whose tensors lie on devices."""

    def __init__(self, host: Group, collectives: Collectives, *, deterministic: bool) -> None:
        """`host` connects the same ranks. `deterministic`: sums are batch-invariant, at `size` times the traffic."""
        super().__init__(host.rank, host.size)
        self._host = host
        self._collectives = collectives
        self._deterministic = deterministic

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if self._deterministic:
            return add_in_order(self._collectives.gather(x).unbind())
        self._collectives.add(x)
        return x

    def concatenate(self, x: torch.Tensor) -> torch.Tensor:
        return self._collectives.gather(x.contiguous()).transpose(0, 1).flatten(1)

    def of_rank_0(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        self._collectives.send_from_0(x)
        return x

    def minimum(self, value: int) -> int:
        return self._host.minimum(value)

    def agree(self, find: Callable[[], T]) -> T:
        return self._host.agree(find)

    def check_same(self, values: tuple[int, ...], what: str) -> None:
        self._host.check_same(values, what)


# torch 2.13 has a new name for it; 2.11 knows the old one only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Nccl:
    """`Collectives` of torch.distributed, whose default group has the tensors' devices.

    Not async_op, which would take a stream of its own. (torch before 2.8 took one in any case; captures hold that too.)
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def add(self, x: torch.Tensor) -> None:
        # Whatever the algorithm, one GPU has an element's sum first and passes it on unchanged; but which GPU, and so
        # the order of additions, follows from the element's place: github.com/NVIDIA/nccl issues 855 and 1055.
        with _failures():
            dist.all_reduce(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.new_empty(self._size * x.shape[0], *x.shape[1:])
        with _failures():
            _all_gather(parts, x)
        return parts.view(self._size, *x.shape)

    def send_from_0(self, x: torch.Tensor) -> None:
        with _failures():
            dist.broadcast(x, src=0)


@contextmanager
def _failures() -> Iterator[None]:
    """Turn NCCL's own errors into PeerLostError; others, as from a capture, are bugs. Most of NCCL's come late and
    end the process from inside."""
    try:
        yield
    except dist.DistBackendError as error:
        raise PeerLostError(f"NCCL failed: {error}") from error
