"""The simulated GPU as torch shows it: devices in factories, `.to`, pinned memory and torch.cuda."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from tests.flashinfer_double import streams
from tests.flashinfer_double.graphs import CUDAGraph, Pool, graph
from tests.flashinfer_double.memory import (
    CUDA,
    Block,
    DeviceTensor,
    allocate,
    allocate_like,
    move,
    poison,
    quietly,
    upload,
)
from tests.flashinfer_double.streams import Event, Item, SimulationError, Stream, Timeline

TOTAL = 1 << 30  # bytes of device memory
_EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}
_FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray}  # these copy values that lie in pageable memory


class Gpu:
    """One simulated device. Made by `simulate`."""

    def __init__(self, seed: int) -> None:
        self.timeline = Timeline(seed)
        self.running = True
        self.used = 0  # bytes allocated now
        self.peak = 0
        self._pinned: dict[int, torch.Tensor] = {}  # by address; kept, so that no address comes back unpinned

    # ------------------------------------------------------------------ memory

    def allocated(self, block: Block) -> None:
        self.used += block.size
        self.peak = max(self.peak, self.used)
        if self.used > TOTAL:
            raise torch.cuda.OutOfMemoryError(f"the simulated GPU has {TOTAL} bytes")

    def freed(self, size: int) -> None:
        self.used -= size

    def reuse(self, stream: Stream, raw: torch.Tensor) -> None:
        """The next to use freed memory does so in the order of the stream that allocated it."""

        stream.items.append(Item("reuse", lambda: poison(raw)))

    def pin(self, host: torch.Tensor) -> torch.Tensor:
        self._pinned[host.untyped_storage().data_ptr()] = host
        return host

    def is_pinned(self, host: torch.Tensor) -> bool:
        return host.untyped_storage().data_ptr() in self._pinned

    def peek(self, tensor: torch.Tensor) -> torch.Tensor:
        """For tests: a host copy of what the device holds when all queued work is done."""
        with self.timeline.lock:
            while any(stream.items for stream in self.timeline.streams):
                self.timeline._step()
            return raw_of(tensor).clone()


def raw_of(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DeviceTensor):
        raise SimulationError("not a tensor of the simulated GPU")
    return tensor.raw


class _Placement(TorchFunctionMode):
    """Puts tensors where `device=` and `pin_memory=` say."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _MOVES:
            return _MOVES[func](*args, **kwargs)
        if kwargs.pop("pin_memory", False):
            return streams.active().pin(func(*args, **kwargs))
        if "device" in kwargs and kwargs["device"] is not None and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
            return _make(func, args, kwargs)
        return func(*args, **kwargs)


def _make(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    with quietly():
        value = func(*args, **kwargs)
        if isinstance(value, DeviceTensor):
            return value
        if func in _EMPTY:
            return allocate(value.shape, value.stride(), value.dtype)
        if func in _FROM_HOST:
            streams.active().timeline.pageable(func.__name__)
        return upload(value.clone(), getattr(func, "__name__", "factory"))


def _is_cuda(device: Any) -> bool:
    return torch.device(device).type == "cuda" if not isinstance(device, int) else True


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Tensor.to in its forms: (device), (dtype), (device, dtype), (other)."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    positional = list(args)
    if positional and isinstance(positional[0], torch.Tensor):
        other = positional.pop(0)
        device, dtype = other.device, other.dtype
    elif positional and not isinstance(positional[0], (torch.dtype, bool)):
        device = positional.pop(0)
    if positional and isinstance(positional[0], torch.dtype):
        dtype = positional.pop(0)
    non_blocking = positional[0] if positional else kwargs.get("non_blocking", False)
    copy = positional[1] if len(positional) > 1 else kwargs.get("copy", False)
    dtype = dtype or tensor.dtype
    wanted = tensor.device.type if device is None else torch.device(device).type
    on_device = isinstance(tensor, DeviceTensor)
    if wanted == ("cuda" if on_device else "cpu"):
        if dtype == tensor.dtype and not copy:
            return tensor
        return torch.Tensor.to(tensor, dtype=dtype, copy=copy) if not on_device else _convert(tensor, dtype)
    if on_device:
        source = tensor if dtype == tensor.dtype else _convert(tensor, dtype)
        with quietly():
            host = torch.empty_like(raw_of(source))
            if non_blocking:
                streams.active().pin(host)
            move(host, source, non_blocking)
        return host
    with quietly():
        source = tensor.to(dtype) if dtype != tensor.dtype else tensor
        target = allocate_like(source, dtype)
        move(target, source, non_blocking)
    return target


def _convert(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return allocate_like(tensor, dtype).copy_(tensor)


def _pin_memory(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return streams.active().pin(tensor.clone())  # type: ignore[no-any-return]


_MOVES: dict[Any, Callable[..., Any]] = {
    torch.Tensor.to: _to,
    torch.Tensor.cuda: lambda tensor, device=None, non_blocking=False: _to(tensor, "cuda", non_blocking=non_blocking),
    torch.Tensor.cpu: lambda tensor: _to(tensor, "cpu"),
    torch.Tensor.pin_memory: _pin_memory,
    torch.Tensor.is_pinned: lambda tensor, device=None: streams.active().is_pinned(tensor),
}
# Attributes on the subclass, for calls that no mode sees (another thread, or inside a library).
for _name in ("to", "cuda", "cpu"):
    setattr(DeviceTensor, _name, _MOVES[getattr(torch.Tensor, _name)])


def _patches(gpu: Gpu) -> dict[str, Any]:
    """What of torch.cuda is replaced."""
    timeline = gpu.timeline

    def set_sync_debug_mode(mode: int | str) -> None:
        timeline.sync_debug = {"default": 0, "warn": 1, "error": 2}[mode] if isinstance(mode, str) else mode

    properties = SimpleNamespace(
        name="simulated GPU", major=9, minor=0, total_memory=TOTAL, multi_processor_count=132, L2_cache_size=50 << 20
    )
    return {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": Pool,
        "current_stream": lambda device=None: timeline.current,
        "default_stream": lambda device=None: timeline.default,
        "stream": timeline.on,
        "synchronize": lambda device=None: timeline.wait("torch.cuda.synchronize", asked=True),
        "is_current_stream_capturing": lambda: timeline.current.graph is not None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (TOTAL - gpu.used, TOTAL),
        "memory_allocated": lambda device=None: gpu.used,
        "memory_reserved": lambda device=None: gpu.used,
        "max_memory_allocated": lambda device=None: gpu.peak,
        "reset_peak_memory_stats": lambda device=None: setattr(gpu, "peak", gpu.used),
        "empty_cache": lambda: None,
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: timeline.sync_debug,
    }


@contextmanager
def simulate_gpu(seed: int = 0) -> Iterator[Gpu]:
    """A GPU for as long as the context lasts; see the package's docstring."""
    gpu = Gpu(seed)
    with ExitStack() as stack:
        streams._active.append(gpu)
        stack.callback(streams._active.pop)
        for name, value in _patches(gpu).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(_Placement())
        try:
            yield gpu
        finally:
            gpu.running = False
            gpu.timeline.close()


__all__ = ["CUDA", "Gpu", "simulate_gpu"]
