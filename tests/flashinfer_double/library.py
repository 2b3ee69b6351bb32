"""FlashInfer 0.7.4, computed exactly when the simulated device gets there."""

import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tests.flashinfer_double import kernels
from tests.flashinfer_double.gpu import Gpu, simulate_gpu
from tests.flashinfer_double.memory import DeviceTensor, allocate, queue
from tests.flashinfer_double.streams import CaptureError, Work, active
from tests.flashinfer_double.strict import MetadataError, need
from worker.cuda import flashinfer_api

CUDA_CORE_GROUPS = {1, 2, 3, 4, 6, 8, 16}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # float32 is the double's own, for exact tests
_FP8 = torch.float8_e4m3fn


# --------------------------------------------------------------------------- paged attention


@dataclass(frozen=True, eq=False)
class Schedule:
    """What `plan` works out on the host and copies to the device. Each one is unlike all others."""

    number: int
    qo_indptr: list[int]
    kv_lens: list[int]


_numbers = itertools.count(1)
_schedules: weakref.WeakValueDictionary[int, Schedule] = weakref.WeakValueDictionary()
WORKSPACE = 16  # bytes, of which 8 hold the schedule's number


@dataclass(frozen=True)
class Shape:
    """What a captured kernel has built in."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    causal: bool
    pos_encoding_mode: str
    window_left: int
    logits_soft_cap: float
    sm_scale: float
    q_data_type: torch.dtype
    kv_data_type: torch.dtype
    disable_split_kv: bool
    backend: str


class _Paged:
    """Both wrappers: buffers, plan and run."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str, graph: bool, backend: str, buffers: tuple[Any, ...]
    ) -> None:
        need(kv_layout == "NHD", "the worker uses NHD")
        need(isinstance(float_workspace_buffer, DeviceTensor), "the float workspace must be on the device")
        need(float_workspace_buffer.dtype == torch.uint8, "the float workspace is bytes")
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
        self._pin_memory_int_workspace_buffer = torch.empty(WORKSPACE, dtype=torch.uint8, pin_memory=True)
        self._requested_backend = self._backend = backend
        self._graph = graph
        self._qo, self._indptr, self._indices, self._last = buffers
        self._shape: Shape | None = None
        self._schedule: Schedule | None = None
        self._rows = 0
        if graph:
            for name, buffer in zip(("indptr", "indices", "last_page_len"), buffers[1:], strict=True):
                need(isinstance(buffer, DeviceTensor), f"graph mode needs the buffer of {name} on the device")
                need(buffer.dtype == torch.int32, f"the buffer of {name} must be int32")
            need(self._indptr.numel() == self._last.numel() + 1, "the indptr buffer must be batch size + 1 long")

    def _plan(
        self,
        shape: Shape,
        qo: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last: torch.Tensor,
        non_blocking: bool,
    ) -> None:
        if active().timeline.current.graph is not None:
            raise CaptureError("plan() runs on the host and cannot be captured")
        for tensor, name in ((qo, "qo_indptr"), (indptr, "indptr"), (indices, "indices"), (last, "last_page_len")):
            need(tensor.dtype == torch.int32 and tensor.dim() == 1, f"{name} must be 1-D int32")
            need(tensor.is_contiguous(), f"{name} must be contiguous")
        for tensor, name in ((qo, "qo_indptr"), (indptr, "indptr"), (last, "last_page_len")):
            need(not isinstance(tensor, DeviceTensor), f"{name} on the device makes plan() wait for it")
        need(isinstance(indices, DeviceTensor), "indices on the host are copied blocking: build them on the device")
        need(shape.q_data_type in _FLOATS, f"q of {shape.q_data_type}")
        need(shape.kv_data_type in (shape.q_data_type, _FP8), f"K/V of {shape.kv_data_type}")
        need(shape.num_qo_heads % shape.num_kv_heads == 0, "query heads must be a multiple of KV heads")
        lens = self._check_rows(shape, qo.tolist(), indptr.tolist(), indices.numel(), last.tolist())
        if self._graph:
            need(last.numel() == self._last.numel(), f"the graph's batch is {self._last.numel()}, not {last.numel()}")
            need(indices.numel() <= self._indices.numel(), "indices exceed the graph's buffer")
            need(self._shape in (None, shape), f"the graph's shape is frozen: {self._shape}, not {shape}")
            self._indptr.copy_(indptr, non_blocking=non_blocking)
            self._last.copy_(last, non_blocking=non_blocking)
            target = self._indices[: indices.numel()]
            if target.data_ptr() != indices.data_ptr():
                target.copy_(indices, non_blocking=non_blocking)
        else:
            self._indptr = indptr.to("cuda", non_blocking=non_blocking)
            self._last = last.to("cuda", non_blocking=non_blocking)
            self._indices = indices
        self._shape, self._rows = shape, int(qo[-1])
        self._schedule = Schedule(next(_numbers), qo.tolist(), lens)
        _schedules[self._schedule.number] = self._schedule
        pinned, device = self._pin_memory_int_workspace_buffer, self._int_workspace_buffer
        need(pinned.is_pinned() and isinstance(device, DeviceTensor), "one int workspace pinned, one on the device")
        pinned.view(torch.int64)[0] = self._schedule.number
        device.copy_(pinned, non_blocking=True)

    def _check_rows(
        self, shape: Shape, qo: list[int], indptr: list[int], pages_given: int, last: list[int]
    ) -> list[int]:
        need(len(qo) == len(indptr) == len(last) + 1, "indptr must be one longer than last_page_len")
        need(qo[0] == 0 and indptr[0] == 0, "indptr must begin with 0")
        need(indptr[-1] <= pages_given, "indices are shorter than indptr says")
        lens = []
        for row, length in enumerate(last):
            pages, queries = indptr[row + 1] - indptr[row], qo[row + 1] - qo[row]
            need(pages >= 0 and queries >= 0, f"indptr decreases at row {row}")
            need(pages > 0, f"row {row} has no page: its output would be undefined")
            need(1 <= length <= shape.page_size, f"last_page_len {length} of row {row} is not 1..{shape.page_size}")
            lens.append((pages - 1) * shape.page_size + length)
            need(not shape.causal or lens[-1] >= queries, f"row {row} has {queries} queries and {lens[-1]} keys")
        return lens

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        window_left: int | None = None,
    ) -> torch.Tensor:
        shape, (keys, values) = self._shape, paged_kv_cache
        if shape is None:
            raise MetadataError("run() before plan()")
        need(isinstance(paged_kv_cache, tuple), "the cache is a tuple, not a list")
        need(window_left in (None, shape.window_left), "window_left differs from plan's")
        need(out is not None, "without out the prefill wrapper zeroes a new one")
        for tensor in (q, keys, values, out):
            need(isinstance(tensor, DeviceTensor), "tensors must be on the device")
        assert isinstance(out, torch.Tensor)
        need(keys.dim() == 4 and keys.stride() == values.stride(), "K and V need 4 dimensions and equal strides")
        need(q.dtype == shape.q_data_type and out.dtype == q.dtype, f"q of {q.dtype}, planned {shape.q_data_type}")
        need(keys.dtype == values.dtype == shape.kv_data_type, f"K/V of {keys.dtype}, planned {shape.kv_data_type}")
        need(q.stride(-1) == 1 and out.shape == q.shape, "q must be dense in its last dimension, out of its shape")
        wanted = (self._rows, shape.num_qo_heads, shape.head_dim)
        need(tuple(q.shape) == wanted, f"q is {tuple(q.shape)}, planned {wanted}")
        wanted = (shape.page_size, shape.num_kv_heads, shape.head_dim)
        need(tuple(keys.shape[1:]) == wanted, f"pages are {tuple(keys.shape[1:])}, planned {wanted}")
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            need(scale is None or isinstance(scale, float), f"{name} must be a Python float")
        captured = active().timeline.current.graph is not None
        need(self._graph or not captured, "a wrapper without fixed buffers cannot be captured")
        buffers = (self._indptr, self._indices, self._last)
        addresses = [b.data_ptr() for b in buffers]
        metadata = tuple(b.raw for b in buffers)
        workspace = self._int_workspace_buffer
        schedule_number = workspace.raw.view(torch.int64)  # type: ignore[attr-defined]
        raw = (q.raw, keys.raw, values.raw, out.raw)  # type: ignore[attr-defined]
        scales = (k_scale or 1.0, v_scale or 1.0)

        def bind() -> Work:
            """At the call, or at each replay: what must hold when the device gets there."""
            expected = self._schedule
            now = [b.data_ptr() for b in (self._indptr, self._indices, self._last)]
            need(now == addresses, "the wrapper's buffers moved since the capture")
            need(self._int_workspace_buffer is workspace, "the int workspace changed since the capture")

            def work() -> None:
                found = _schedules.get(int(schedule_number[0]))
                need(found is expected, "the schedule in the int workspace is not that of this wrapper's last plan()")
                assert found is not None
                assert shape is not None
                _attend(shape, found, metadata, *raw, *scales)

            return work

        def unbound() -> Work:
            raise AssertionError

        queue(f"{type(self).__name__}.run", unbound, [q, keys, values, out, workspace, *buffers], bind)
        return out


def _attend(
    shape: Shape,
    schedule: Schedule,
    metadata: tuple[torch.Tensor, ...],
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """Attention as the kernels do it, with the metadata that lies on the device now.

    In float64: then the bits of what is rounded hardly ever depend on how many rows are computed at once.
    """
    indptr, indices, last = metadata
    group = shape.num_qo_heads // shape.num_kv_heads
    starts, lasts = indptr.tolist(), last.tolist()
    for row, kv_len in enumerate(schedule.kv_lens):
        pages = starts[row + 1] - starts[row]
        found = (pages - 1) * shape.page_size + lasts[row]
        need(found == kv_len, f"row {row} has {found} keys on the device and {kv_len} in its plan: plan before replay")
        first, end = schedule.qo_indptr[row], schedule.qo_indptr[row + 1]
        ids = indices[starts[row] : starts[row + 1]].long()
        need(bool(((ids >= 0) & (ids < keys.shape[0])).all()), f"row {row} has a page outside the cache")
        k, v = (x[ids].flatten(0, 1)[:kv_len].double().repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[first:end].double(), k) * (shape.sm_scale * k_scale)
        query = torch.arange(end - first)[:, None]
        key = torch.arange(kv_len)[None]
        if shape.pos_encoding_mode == "ALIBI":  # the kernels count queries from 0: a constant less in each row
            scores += _slopes(shape.num_qo_heads)[:, None, None] * (key - query).double()
        if shape.logits_soft_cap > 0:
            scores = shape.logits_soft_cap * torch.tanh(scores / shape.logits_soft_cap)
        position = query + kv_len - (end - first)
        seen = key <= position if shape.causal else torch.ones(end - first, kv_len, dtype=torch.bool)
        if shape.window_left >= 0:
            seen = seen & (key + shape.window_left >= position)
        weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
        out[first:end] = (torch.einsum("hqk,khd->qhd", weights, v) * v_scale).to(out.dtype)


def _slopes(heads: int) -> torch.Tensor:
    """Of ALiBi, as FlashInfer's get_alibi_slopes."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 / power * (i + 1)) for i in range(power)]
    slopes += [2.0 ** (-4.0 / power * (2 * i + 1)) for i in range(heads - power)]
    return torch.tensor(slopes)


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, kv_layout, False, backend, (None, None, None, None))

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
        disable_split_kv: bool = False,
    ) -> None:
        kv_data_type = kv_data_type or q_data_type
        longest = max((qo_indptr[1:] - qo_indptr[:-1]).tolist(), default=0)
        fa3 = pos_encoding_mode == "NONE" and kv_data_type == q_data_type and longest > 64
        self._backend = self._requested_backend
        if self._backend == "auto":
            self._backend = "fa3" if fa3 and head_dim_qk in (64, 128, 256) else "fa2"
        need(self._backend != "fa3" or pos_encoding_mode == "NONE", "FA3 has no ALiBi")
        need(self._backend != "fa3" or not disable_split_kv, "FA3 takes no disable_split_kv")
        shape = Shape(
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            causal,
            pos_encoding_mode,
            window_left,
            logits_soft_cap or 0.0,
            sm_scale or head_dim_qk**-0.5,
            q_data_type,
            kv_data_type,
            disable_split_kv,
            self._backend,
        )
        need((o_data_type or q_data_type) == q_data_type, "the worker wants its output in the dtype of q")
        self._plan(shape, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, non_blocking)


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = (None, paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        need(backend == "fa2", "decode must name fa2: auto may choose others behind a graph")
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, buffers)
        self._use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
        disable_split_kv: bool = False,
    ) -> None:
        kv_data_type = kv_data_type or q_data_type
        group = num_qo_heads // num_kv_heads
        need(self._use_tensor_cores or group in CUDA_CORE_GROUPS, f"a group of {group} needs tensor cores")
        need(self._use_tensor_cores or kv_data_type == q_data_type, "fp8 K/V need tensor cores")
        need(self._use_tensor_cores or not disable_split_kv, "disable_split_kv is read by tensor cores only")
        shape = Shape(
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            False,
            pos_encoding_mode,
            window_left,
            logits_soft_cap or 0.0,
            sm_scale or head_dim**-0.5,
            q_data_type,
            kv_data_type,
            disable_split_kv,
            self._backend,
        )
        need((o_data_type or q_data_type) == q_data_type, "the worker wants its output in the dtype of q")
        qo = torch.arange(last_page_len.numel() + 1, dtype=torch.int32)
        self._plan(shape, qo, indptr, indices, last_page_len, non_blocking)


# --------------------------------------------------------------------------- row-wise operations


def _elementwise(name: str, function: Callable[..., torch.Tensor], out: torch.Tensor, *tensors: torch.Tensor) -> None:
    for tensor in (out, *tensors):
        need(isinstance(tensor, DeviceTensor), f"{name}: tensors must be on the device")
    raw = [t.raw for t in tensors]  # type: ignore[attr-defined]
    target = out.raw  # type: ignore[attr-defined]
    queue(name, lambda: target.copy_(function(*raw)), [out, *tensors])


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def rmsnorm(
    input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: torch.Tensor | None = None
) -> torch.Tensor:
    need(weight.dtype == input.dtype and input.dim() in (2, 3), "weight and input need one dtype, input 2 or 3 axes")
    need(input.stride(-1) == 1, "the last dimension must be dense")
    out = allocate(input.shape, torch.empty(input.shape).stride(), input.dtype) if out is None else out
    _elementwise("rmsnorm", lambda x, w: _rms(x, w, eps), out, input, weight)
    return out


def fused_add_rmsnorm(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    """In place: residual += input, then input = norm(residual), of the sum before it is rounded."""
    need(weight.dtype == input.dtype == residual.dtype and input.dim() == 2, "one dtype, 2 dimensions")
    x, r, w = (t.raw for t in (input, residual, weight))  # type: ignore[attr-defined]

    def work() -> None:
        total = x.float() + r.float()
        r.copy_(total)
        x.copy_(_rms(total, w, eps))

    queue("fused_add_rmsnorm", work, [input, residual, weight])


def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    need(input.shape[-1] * input.element_size() % 16 == 0, "rows must be a multiple of 16 bytes")
    need(out is not None and out.shape[-1] * 2 == input.shape[-1], "pass out, half as wide")
    assert out is not None

    def function(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.float().chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    _elementwise("silu_and_mul", function, out, input)
    return out


def gelu_tanh_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    need(input.shape[-1] * input.element_size() % 16 == 0, "rows must be a multiple of 16 bytes")
    need(out is not None and out.shape[-1] * 2 == input.shape[-1], "pass out, half as wide")
    assert out is not None

    def function(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.float().chunk(2, -1)
        return torch.nn.functional.gelu(gate, approximate="tanh") * up

    _elementwise("gelu_tanh_and_mul", function, out, input)
    return out


# --------------------------------------------------------------------------- the seam

FLASHINFER = SimpleNamespace(
    __version__=flashinfer_api.VERSION,
    BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
    BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
    rmsnorm=rmsnorm,
    fused_add_rmsnorm=fused_add_rmsnorm,
    silu_and_mul=silu_and_mul,
    gelu_tanh_and_mul=gelu_tanh_and_mul,
)


@contextmanager
def simulate(seed: int = 0) -> Iterator[Gpu]:
    """A simulated GPU, with FlashInfer and our kernels on it, for as long as the context lasts."""
    before = flashinfer_api.replace(
        flashinfer_api.Library(FLASHINFER, kernels, frozenset(range(4, 257, 4)), frozenset(_FLOATS))
    )
    try:
        with simulate_gpu(seed) as gpu:
            yield gpu
    finally:
        flashinfer_api.replace(before)
