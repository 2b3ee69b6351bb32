"""Ranks as processes of one machine, joined by torch.distributed."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from worker.parallel import Group, PeerLostError

T = TypeVar("T")

# The supervisor sees a rank that ended at once, and one that hangs soon. This bounds the wait of ranks that were
# started by hand; while loading, one may wait for another that reads its files more slowly.
_TIMEOUT = timedelta(minutes=10)


class DistributedGroup(Group):
    """See `Group`. One instance a process."""

    def __init__(self, rank: int, size: int, rendezvous: Path) -> None:
        """Meet the other ranks at a file that none of them has used before; it need not exist yet.

        Raises PeerLostError when not all of them come.
        """
        super().__init__(rank, size)
        # All ranks are on this machine; the host's own name may lead anywhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with _peers():
            dist.init_process_group(
                "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=_TIMEOUT
            )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        # Not gloo's all-reduce, which adds in an order that depends on an element's place: the law forbids it.
        first, *rest = self._gather(x)
        total = first.float()
        for part in rest:
            total = total + part.float()
        return total.to(x.dtype)

    def concatenate(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._gather(x), dim=-1)

    def minimum(self, value: int) -> int:
        return min(int(part) for part in self._gather(torch.tensor([value])))

    def agree(self, find: Callable[[], T]) -> T:
        found: list[T | None] = [find() if self.rank == 0 else None]
        with _peers():
            dist.broadcast_object_list(found, src=0)
        (value,) = found
        return value  # type: ignore[return-value]

    def check_same(self, values: tuple[int, ...], what: str) -> None:
        theirs = torch.tensor(values)
        with _peers():
            dist.broadcast(theirs, src=0)
        if tuple(theirs.tolist()) != values:
            raise RuntimeError(f"rank {self.rank} has {what} {values}, and rank 0 {tuple(theirs.tolist())}")

    def ids_of_rank_0(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        shared = torch.from_numpy(ids.copy())
        with _peers():
            dist.broadcast(shared, src=0)
        return shared.numpy()

    def _gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with _peers():
            dist.all_gather(parts, x.contiguous())
        return parts


@contextmanager
def _peers() -> Iterator[None]:
    """Errors of an exchange are those of the other side: the operations have no others here."""
    try:
        yield
    except RuntimeError as error:
        what, _, _ = str(error).partition(". ")  # its advice and backtrace come after
        raise PeerLostError(f"the exchange with the other ranks broke off: {what}") from error
