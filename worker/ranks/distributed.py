"""Ranks as processes of one machine, joined by torch.distributed."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from worker.ranks.group import Group, PeerLostError

T = TypeVar("T")

# The supervisor sees a rank that ended at once, and one that hangs soon. This bounds the wait of ranks that were
# started by hand; while loading, one may wait for another that reads its files more slowly.
_TIMEOUT = timedelta(minutes=10)


class DistributedGroup(Group):
    """See `Group`. One instance a process. Its tensors lie on the host."""

    def __init__(self, rank: int, size: int, rendezvous: Path, device: torch.device | None = None) -> None:
        """Meet the other ranks at a file that none of them has used before; it need not exist yet.

        With a `device`, a GPU of this rank's own, torch.distributed also takes tensors that lie there, by NCCL.
        Raises PeerLostError when not all of them come.
        """
        super().__init__(rank, size)
        # All ranks are on this machine; the host's own name may lead anywhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        with lost_peers():
            dist.init_process_group(
                "gloo" if device is None else "cpu:gloo,cuda:nccl",
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=size,
                timeout=_TIMEOUT,
                device_id=device,
            )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        # Not gloo's all-reduce, which adds in an order that depends on an element's place: no batch invariance.
        return add_in_order(self._gather(x))

    def concatenate(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._gather(x), dim=-1)

    def minimum(self, value: int) -> int:
        return min(int(part) for part in self._gather(torch.tensor([value])))

    def agree(self, find: Callable[[], T]) -> T:
        found: list[T | None] = [find() if self.rank == 0 else None]
        with lost_peers():
            dist.broadcast_object_list(found, src=0)
        (value,) = found
        return value  # type: ignore[return-value]

    def check_same(self, values: tuple[int, ...], what: str) -> None:
        theirs = torch.tensor(values)
        with lost_peers():
            dist.broadcast(theirs, src=0)
        if tuple(theirs.tolist()) != values:
            raise RuntimeError(f"rank {self.rank} has {what} {values}, and rank 0 {tuple(theirs.tolist())}")

    def of_rank_0(self, x: torch.Tensor) -> torch.Tensor:
        with lost_peers():
            dist.broadcast(x, src=0)
        return x

    def _gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with lost_peers():
            dist.all_gather(parts, x.contiguous())
        return parts


def add_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Σ of ranks' parts, in float32 and in the order of ranks, in the dtype of the parts."""
    first, *rest = parts
    total = first.float()
    for part in rest:
        total = total + part.float()
    return total.to(first.dtype)


@contextmanager
def lost_peers() -> Iterator[None]:
    """Errors of an exchange are those of the other side: the operations have no others here."""
    try:
        yield
    except RuntimeError as error:
        what, _, _ = str(error).partition(". ")  # its advice and backtrace come after
        raise PeerLostError(f"the exchange with the other ranks broke off: {what}") from error
