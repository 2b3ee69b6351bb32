"""The exchanges between ranks that share a model, each a process that holds the part `proto.division` gives it.

All ranks run the same plans.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from proto.division import Division, Share

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class PeerLostError(Exception):
    """Another rank ended or fell silent in the middle of an exchange."""


class Group(Division):
    """The ranks that share a model. This class is of a rank that holds a model alone, and exchanges nothing.

    Every rank must call the same operations in the same order, with tensors of the same shape.
    `worker.ranks.distributed` has that of several processes, `worker.cuda.group` that of several GPUs. Operations
    raise PeerLostError.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__(rank, size)

    def sum(self, x: "torch.Tensor") -> "torch.Tensor":
        """Return Σ of all ranks' x: the same bits on every rank and, where rows are batch-invariant, in any company.

        x may be overwritten.
        """
        return x

    def concatenate(self, x: "torch.Tensor") -> "torch.Tensor":
        """Return all ranks' x [N, part], side by side in the order of ranks: [N, size × part]."""
        return x

    def gather(self, x: "torch.Tensor", share: Share) -> "torch.Tensor":
        """Put all ranks' shares of each row together: x [N, size] → [N, total] on every rank, exactly as it was.

        Shares may be unequal or copied, unlike those of `concatenate`.
        """
        if share.whole:
            return x
        whole = x.new_zeros(x.shape[0], share.total)
        if not share.copy:
            whole[:, share.start : share.stop] = x
        return self.sum(whole)

    def minimum(self, value: int) -> int:
        """Return the smallest of all ranks' values."""
        return value

    def agree(self, find: Callable[[], T]) -> T:
        """Return what rank 0 finds, on every rank."""
        return find()

    def check_same(self, values: tuple[int, ...], what: str) -> None:
        """Raises RuntimeError when this rank's values are not those of rank 0; `what` names them."""

    def of_rank_0(self, x: "torch.Tensor") -> "torch.Tensor":
        """Return rank 0's x on every rank; the other ranks' x may hold anything and may be overwritten."""
        return x


ALONE = Group()
