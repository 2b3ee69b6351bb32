"""The contract between a GPU worker's steps and graphs and whichever backend attends.

A step first fills `DevicePageLists` on the device, then plans attention, then runs the model, eagerly or by replaying
graphs; all of it is queued on the current stream, and nothing may wait for the device. Lengths are known on the host
and reach `plan_eager` and `plan_graph` with the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from worker.layers.attention import AttentionBackend, AttentionShape
from worker.steps.batch import I32Array, PageLists, StepBatch


@dataclass(frozen=True, slots=True)
class Limits:
    """What buffers are made for."""

    max_rows: int  # of a step, padding of graphs included
    max_tokens: int  # of a step
    max_pages_per_row: int
    depth: int = 2  # steps in flight whose metadata may still be on its way
    workspace_bytes: int = 128 << 20  # for partial results of split K/V

    @property
    def max_page_ids(self) -> int:
        """Page ids that a step lists, at most."""
        return self.max_rows * self.max_pages_per_row


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How K and V are stored. With float8, stored = value / scale, one pair of scales for each layer."""

    dtype: torch.dtype
    scales: tuple[tuple[float, float], ...] = ()  # (K, V) by layer; () = 1.0

    def scale(self, layer: int) -> tuple[float, float]:
        return self.scales[layer] if self.scales else (1.0, 1.0)


class DevicePageLists:
    """Where a step's tokens and rows lie in one cache group, in device memory that graphs read at fixed addresses.

    The group has one page more than its pool, `dummy_page`, which belongs to nobody: padding rows read and write it.
    """

    def __init__(self, shape: AttentionShape, group: int, limits: Limits, device: torch.device | str) -> None:
        self.dummy_page = shape.window_pages if group else shape.num_pages
        self.dummy_slot = self.dummy_page * shape.page_size
        ids = torch.full((limits.max_page_ids,), self.dummy_page, dtype=torch.int32, device=device)
        self.kv_indices = ids  # [pages of all rows] page ids, row after row
        slots = torch.full((limits.max_tokens,), self.dummy_slot, dtype=torch.int32, device=device)
        self.kv_slots = slots  # [T] page × page_size + offset, where each token's K/V go


class CudaAttention(AttentionBackend, Protocol):
    """Attention that steps can plan from lists on the device, and that CUDA graphs can capture.

    `plan` (of `AttentionBackend`) takes lists from the host: the measurements and self-tests of a start use it.
    """

    @property
    def groups(self) -> Mapping[int, DevicePageLists]:
        """By the number of each cache group that the model has."""

    def plan_eager(self, batch: StepBatch) -> None:
        """Plan a step of any kind, to be run outside graphs; `groups` hold its lists when the stream gets there."""

    def plan_graph(self, batch: StepBatch | None, bucket: int) -> None:
        """Plan a step of decode rows, padded to `bucket`, for the graph of that bucket; None: padding only.

        Called before the capture and before each replay, on the stream of the replay. What `run` launches in between
        is captured once for a bucket, so all that differs from step to step must be read from device memory. Padding
        rows follow the batch's: of one page each, with lists as `pad_indptr` says; their output must be finite.
        """


class MakeBackend(Protocol):
    """Allocates KV memory and buffers. Raises DeviceError for what the backend cannot compute."""

    def __call__(
        self, shape: AttentionShape, limits: Limits, kv_format: KvFormat, *, deterministic: bool
    ) -> CudaAttention:
        """`deterministic`: a row's bits must not depend on the rest of the batch, whose chunks come cut into short rows
        (see `worker.cuda.tiles`)."""


def pad_indptr(lists: StepBatch | PageLists | None, bucket: int) -> I32Array:
    """Return kv_indptr [bucket + 1] of decode rows and, behind them, padding rows of one page each."""
    indptr = np.zeros(1, np.int32) if lists is None else lists.kv_indptr
    more = np.arange(1, bucket + 2 - len(indptr), dtype=np.int32) + indptr[-1]
    return np.concatenate([indptr, more])
