"""Attention by FlashInfer's paged kernels (Ye et al. 2025), eager and in CUDA graphs.

Rows of a step are decode rows, then chunks (`StepBatch`). Decode rows go to the decode kernel. Prompts, chunks and what
follows a cached prefix go to one call of the prefill kernel, whose causal mask is aligned to the end of each row.

FlashInfer's metadata is made here and nowhere else. Lengths lie on the host (its `plan` is host code that would wait
for the device otherwise) in pinned buffers that are used in turn; page ids lie on the device. All of a step is queued
on the current stream, so one int workspace serves all batch sizes; layers with a window have wrappers and int
workspaces of their own, since both schedules are in use throughout the step.

Which kernels: decode is FA2 by name, as FA3 decodes more slowly and "auto" may choose others behind a graph; it uses
tensor cores for groups of 4 query heads or more, where they beat CUDA cores, and where CUDA cores cannot (other group
sizes, fp8 K/V). Prefill is "auto": FA3 on Hopper when some row has more than 64 tokens, FA2 below that, where FA3's
tiles stay mostly empty; and FA2 for fp8 K/V and ALiBi, which FA3 lacks. `deterministic` takes FA2 on tensor
cores throughout, without splitting K/V by what else is in the batch.

Each cache group has pages and lists of its own (`GroupPages`). Kernels need not know that rows' lists begin behind
position 0: windows and causal masks count from a row's end, and K is rotated before it is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from worker.cuda.attention import DevicePageLists, KvFormat, Limits, pad_indptr
from worker.cuda.flashinfer_api import check_wrapper, library
from worker.cuda.pinned import PinnedRing, PinnedTurn
from worker.device import DeviceError
from worker.layers.attention import AttentionShape, Rotation
from worker.steps.batch import StepBatch

CUDA_CORE_GROUPS = frozenset({1, 2, 3, 4, 6, 8, 16})  # query heads for each KV head
TENSOR_CORE_GROUP = 4
NOTHING = np.zeros(0, np.int32)


class GroupPages(DevicePageLists):
    """One cache group's K and V, and what its graphs read."""

    def __init__(
        self,
        shape: AttentionShape,
        group: int,
        limits: Limits,
        kv_dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(shape, group, limits, device)
        self.layers = shape.layers_of(group)
        self.windows = tuple(dict.fromkeys(shape.window_of(layer) for layer in self.layers))
        pages = (len(self.layers), self.dummy_page + 1, shape.page_size, shape.num_kv_heads, shape.head_dim)
        # Zeros: kernels multiply what lies behind a row's end by 0, and 0 × NaN is NaN.
        self.keys = torch.zeros(pages, dtype=kv_dtype, device=device)
        self.values = torch.zeros(pages, dtype=kv_dtype, device=device)
        self.kv_indptr = torch.zeros(limits.max_rows + 1, dtype=torch.int32, device=device)


class _Wrappers:
    """FlashInfer's wrappers of one kernel (decode or prefill) and one window, on one int workspace."""

    def __init__(self, window: int, eager: Any, depth: int) -> None:
        check_wrapper(eager)
        self.window_left = window - 1  # the token itself is not counted; -1 = all
        self.eager = eager
        self.graphs: dict[int, Any] = {}  # by bucket
        self.workspace = eager._int_workspace_buffer
        pinned = eager._pin_memory_int_workspace_buffer
        self.pinned = [torch.empty(pinned.shape, dtype=pinned.dtype, pin_memory=True) for _ in range(depth)]

    def add_graph(self, bucket: int, wrapper: Any) -> None:
        wrapper._int_workspace_buffer = self.workspace
        self.graphs[bucket] = wrapper


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens that one kernel attends for, and the planned wrapper for each window."""

    first: int
    end: int
    wrappers: dict[int, Any]


class FlashInferAttention:
    """See `CudaAttention`."""

    def __init__(
        self,
        shape: AttentionShape,
        limits: Limits,
        kv_format: KvFormat | None = None,
        *,
        deterministic: bool = False,
        device: torch.device | str = "cuda",
    ) -> None:
        """Allocate workspaces, and in each group one page more than the shape says. Raises DeviceError."""
        api = library()
        self.shape = shape
        self.limits = limits
        self.kv_format = kv_format or KvFormat(shape.dtype)
        _check(shape, api.head_dims, api.dtypes)
        self._kernels = api.kernels
        self._flashinfer = api.flashinfer
        self._deterministic = deterministic
        self._windows = tuple(dict.fromkeys(shape.windows)) or (0,)
        self.groups = {group: GroupPages(shape, group, limits, self.kv_format.dtype, device) for group in shape.groups}
        # By layer
        self._memory = {
            layer: (pages, pages.keys[nth], pages.values[nth])
            for pages in self.groups.values()
            for nth, layer in enumerate(pages.layers)
        }
        self._last_page_len = torch.ones(limits.max_rows, dtype=torch.int32, device=device)
        self._workspace = torch.zeros(limits.workspace_bytes, dtype=torch.uint8, device=device)
        each = limits.max_page_ids + limits.max_tokens + 2 * (limits.max_rows + 1)
        self._ring = PinnedRing(limits.depth, len(self.groups) * each + 3 * (limits.max_rows + 1))
        self._tensor_cores = self._wants_tensor_cores()
        self._decode = {w: self._make_wrappers(w, self._decode_wrapper()) for w in self._windows}
        self._prefill = {w: self._make_wrappers(w, self._prefill_wrapper()) for w in self._windows}
        self._parts: Sequence[_Part] = ()
        self._tokens = 0

    # ------------------------------------------------------------------ plans

    def plan(self, batch: StepBatch) -> None:
        """Plan an eager step with page ids and slots from the host. Raises ValueError for one beyond the limits."""
        turn = self._ring.begin()
        self._upload(turn, batch, bucket=0)
        self._plan_eager(turn, batch)
        self._ring.end()

    def plan_eager(self, batch: StepBatch) -> None:
        """Plan an eager step with page ids and slots that are on the device. Raises ValueError as `plan`."""
        self._plan_eager(self._ring.begin(), batch)
        self._ring.end()

    def plan_graph(self, batch: StepBatch | None, bucket: int, *, upload: bool = False) -> None:
        """See `CudaAttention.plan_graph`; with `upload`, page ids and slots are copied from the batch.

        Raises ValueError for a batch that the bucket cannot take.
        """
        rows = 0 if batch is None else len(batch.slots)
        if rows > bucket or bucket > self.limits.max_rows:
            raise ValueError(f"{rows} rows in a graph of {bucket}; {self.limits.max_rows} is the most")
        if batch is not None and batch.decode_rows != rows:
            raise ValueError(f"{rows - batch.decode_rows} chunks in a decode graph of {bucket} rows")
        turn = self._ring.begin()
        if upload:
            self._upload(turn, batch, bucket)
        last_page_len = NOTHING if batch is None else batch.last_page_len
        last = turn.put(last_page_len, np.ones(bucket - rows, np.int32))
        for group, pages in self.groups.items():
            indptr = pad_indptr(None if batch is None else batch.of_group(group), bucket)
            on_host, indices = turn.put(indptr), pages.kv_indices[: int(indptr[-1])]
            for window in pages.windows:
                wrappers = self._decode[window]
                if bucket not in wrappers.graphs:
                    wrappers.add_graph(bucket, self._decode_wrapper(pages, bucket))
                self._plan_decode(wrappers, wrappers.graphs[bucket], on_host, last, indices)
        self._ring.end()
        self._parts = (_Part(0, bucket, {w: self._decode[w].graphs[bucket] for w in self._windows}),)
        self._tokens = bucket

    def _upload(self, turn: PinnedTurn, batch: StepBatch | None, bucket: int) -> None:
        """Copy page ids and slots from the host, those of padding rows behind them."""
        rows = 0 if batch is None else len(batch.slots)
        padding = max(bucket - rows, 0)
        for group, pages in self.groups.items():
            lists = None if batch is None else batch.of_group(group)
            listed, slots = (NOTHING, NOTHING) if lists is None else (lists.kv_indices, lists.kv_slots)
            indices = turn.put(listed, np.full(padding, pages.dummy_page, np.int32))
            pages.kv_indices[: len(indices)].copy_(indices, non_blocking=True)
            written = turn.put(slots, np.full(padding, pages.dummy_slot, np.int32))
            pages.kv_slots[: len(written)].copy_(written, non_blocking=True)

    def _plan_eager(self, turn: PinnedTurn, batch: StepBatch) -> None:
        limits = self.limits
        if len(batch.token_ids) > limits.max_tokens or len(batch.slots) > limits.max_rows:
            raise ValueError(
                f"a step of {len(batch.token_ids)} tokens in {len(batch.slots)} rows; "
                f"{limits.max_tokens} in {limits.max_rows} are the most"
            )
        decodes, parts = batch.decode_rows, []
        if decodes:
            last_page_len = turn.put(batch.last_page_len[:decodes])
            for group, pages in self.groups.items():
                indptr = batch.of_group(group).kv_indptr
                kv_indptr, indices = turn.put(indptr[: decodes + 1]), pages.kv_indices[: int(indptr[decodes])]
                for window in pages.windows:
                    wrappers = self._decode[window]
                    self._plan_decode(wrappers, wrappers.eager, kv_indptr, last_page_len, indices)
            parts.append(_Part(0, decodes, {w: self._decode[w].eager for w in self._windows}))
        if len(batch.slots) > decodes:
            qo_indptr = turn.put(batch.qo_indptr[decodes:] - batch.qo_indptr[decodes])
            last_page_len = turn.put(batch.last_page_len[decodes:])
            for group, pages in self.groups.items():
                indptr = batch.of_group(group).kv_indptr
                indices = pages.kv_indices[int(indptr[decodes]) : int(indptr[-1])]
                kv_indptr = turn.put(indptr[decodes:] - indptr[decodes])
                for window in pages.windows:
                    self._plan_prefill(self._prefill[window], qo_indptr, kv_indptr, last_page_len, indices)
            parts.append(_Part(decodes, len(batch.token_ids), {w: self._prefill[w].eager for w in self._windows}))
        self._parts = parts
        self._tokens = len(batch.token_ids)

    def _plan_decode(
        self,
        wrappers: _Wrappers,
        wrapper: Any,
        kv_indptr: torch.Tensor,
        last_page_len: torch.Tensor,
        kv_indices: torch.Tensor,
    ) -> None:
        wrapper._pin_memory_int_workspace_buffer = wrappers.pinned[self._ring.index]
        wrapper.plan(kv_indptr, kv_indices, last_page_len, *self._sizes(), **self._options(wrappers))

    def _plan_prefill(
        self,
        wrappers: _Wrappers,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        last_page_len: torch.Tensor,
        kv_indices: torch.Tensor,
    ) -> None:
        wrapper = wrappers.eager
        wrapper._pin_memory_int_workspace_buffer = wrappers.pinned[self._ring.index]
        wrapper.plan(
            qo_indptr, kv_indptr, kv_indices, last_page_len, *self._sizes(), causal=True, **self._options(wrappers)
        )

    def _sizes(self) -> tuple[int, int, int, int]:
        return self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim, self.shape.page_size

    def _options(self, wrappers: _Wrappers) -> dict[str, Any]:
        return {
            "pos_encoding_mode": "ALIBI" if self.shape.alibi else "NONE",
            "window_left": wrappers.window_left,
            "logits_soft_cap": self.shape.logits_soft_cap,
            "sm_scale": self.shape.scale,
            "q_data_type": self.shape.dtype,
            "kv_data_type": self.kv_format.dtype,
            "o_data_type": self.shape.dtype,
            "non_blocking": True,
            "disable_split_kv": self._deterministic,
        }

    # ------------------------------------------------------------------ layers

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation | None = None
    ) -> torch.Tensor:
        tokens = self._tokens
        pages, keys, values = self._memory[layer]
        k_scale, v_scale = self.kv_format.scale(layer)
        to = k[:tokens], v[:tokens], pages.kv_slots[:tokens], keys, values, k_scale, v_scale
        if rotation is None:
            self._kernels.write_kv(*to)
        else:
            self._kernels.rotate_and_write(q[:tokens], rotation.positions[:tokens], rotation.cos, rotation.sin, *to)
        window = self.shape.window_of(layer)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in self._parts:
            rows = slice(part.first, part.end)
            part.wrappers[window].run(q[rows], (keys, values), k_scale=k_scale, v_scale=v_scale, out=out[rows])
        if tokens < len(out):
            out[tokens:].zero_()
        return out.view(len(out), -1)

    # ------------------------------------------------------------------ wrappers

    def _wants_tensor_cores(self) -> bool:
        group = self.shape.num_heads // self.shape.num_kv_heads
        return (
            self._deterministic
            or group >= TENSOR_CORE_GROUP
            or group not in CUDA_CORE_GROUPS
            or self.kv_format.dtype != self.shape.dtype
        )

    def _make_wrappers(self, window: int, eager: Any) -> _Wrappers:
        return _Wrappers(window, eager, self.limits.depth)

    def _decode_wrapper(self, pages: GroupPages | None = None, bucket: int = 0) -> Any:
        """A decode wrapper; with `pages`, of a graph of `bucket` rows in this group's."""
        fixed = {}
        if pages is not None:
            fixed = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": pages.kv_indptr[: bucket + 1],
                "paged_kv_indices_buffer": pages.kv_indices,
                "paged_kv_last_page_len_buffer": self._last_page_len[:bucket],
            }
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=self._tensor_cores, backend="fa2", **fixed
        )

    def _prefill_wrapper(self) -> Any:
        plain = self.kv_format.dtype == self.shape.dtype and not self.shape.alibi and not self._deterministic
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "NHD", backend="auto" if plain else "fa2"
        )


def _check(shape: AttentionShape, head_dims: frozenset[int], dtypes: frozenset[torch.dtype]) -> None:
    if shape.head_dim not in head_dims:
        known = ", ".join(map(str, sorted(head_dims)))
        raise DeviceError(f"head_dim {shape.head_dim} is not one of {known}, which FlashInfer's kernels are made for")
    if shape.dtype not in dtypes:
        known = " or ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise DeviceError(f"dtype {str(shape.dtype).removeprefix('torch.')} is not {known}, as device cuda needs it")
    if shape.alibi and shape.logits_soft_cap:
        # The kernels count queries of a row from 0: a constant that softmax does not see, but tanh does.
        raise DeviceError("ALiBi together with a soft cap of attention scores is not supported on device cuda")
