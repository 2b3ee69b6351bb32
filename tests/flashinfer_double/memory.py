"""Tensors of the simulated GPU: operations on them are queued, and their memory is poisoned when nobody holds it."""

import weakref
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tests.flashinfer_double.streams import CaptureError, SimulationError, Work, active

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten


@contextmanager
def quietly() -> Any:
    """For making tensors: outside autograd, but no inference tensors, which nobody could write to later."""
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
        yield


def poison(raw: torch.Tensor) -> None:
    """What freed or fresh memory holds: NaN, or numbers beyond any index."""
    with torch._C.DisableTorchFunction(), torch.inference_mode():
        if raw.is_floating_point():
            raw.fill_(float("nan"))
        elif raw.dtype == torch.bool:
            raw.fill_(True)
        else:
            raw.fill_(int.from_bytes(b"\x7f" * raw.itemsize))


class Block:
    """One allocation. When its last tensor dies, its stream may give the memory to somebody else."""

    def __init__(self, raw: torch.Tensor) -> None:
        gpu = active()
        self.raw = raw
        self.stream = gpu.timeline.current
        self.graph = self.stream.graph  # whose private memory it is
        self.shared = False  # record_stream was called
        self.size = raw.untyped_storage().nbytes()
        self.gpu = weakref.ref(gpu)
        gpu.allocated(self)
        if self.graph is not None:
            self.graph.own(self)

    def __del__(self) -> None:
        gpu = self.gpu()
        if gpu is None or not gpu.running:
            return
        gpu.freed(self.size)
        if self.graph is not None:
            self.graph.free(self.raw)
        elif not self.shared:
            gpu.reuse(self.stream, self.raw)


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on cuda:0. Its memory is read and written when the simulated device gets there."""

    raw: torch.Tensor
    block: Block
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def wrap(cls, raw: torch.Tensor, block: Block | None = None) -> "DeviceTensor":
        tensor: DeviceTensor = torch.Tensor._make_subclass(cls, raw)
        tensor.raw = raw
        tensor.block = block or Block(raw)
        return tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def tolist(self) -> Any:
        active().timeline.wait("Tensor.tolist")
        return self.raw.tolist()

    def record_stream(self, stream: Any) -> None:
        self.block.shared = True

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        with quietly():
            return dispatch(func, args, kwargs)


def allocate(size: Any, stride: Any, dtype: torch.dtype) -> DeviceTensor:
    with quietly():
        raw = torch.empty_strided(size, stride, dtype=dtype)
        tensor = DeviceTensor.wrap(raw)
        poison(raw)
        return tensor


def upload(value: torch.Tensor, name: str) -> DeviceTensor:
    """A tensor that the device itself fills, as by torch.zeros."""
    tensor = allocate(value.shape, value.stride(), value.dtype)
    raw = tensor.raw
    queue(name, lambda: raw.copy_(value), [tensor])
    return tensor


def queue(name: str, work: Callable[[], object], tensors: Any, bind: Callable[[], Work] | None = None) -> None:
    """Queue work that reads and writes the memory of `tensors`; bound anew at each replay if captured."""
    timeline = active().timeline
    graph = timeline.current.graph

    def quiet(work: Callable[[], object]) -> Work:
        def run() -> None:
            with torch._C.DisableTorchFunction(), torch.inference_mode():
                work()

        return run

    if graph is not None:
        graph.refer(name, [t.block for t in tensors])
    timeline.queue(name, quiet(work), None if bind is None else lambda: quiet(bind()))


# --------------------------------------------------------------------------- torch's operations

_WAITING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
_UNSUPPORTED = {aten.resize_.default, aten.set_.source_Storage, aten.t_.default, aten.transpose_.default}
_NOT_ON_CPU = {aten.mm.dtype: lambda a, b, dtype: a.to(dtype) @ b.to(dtype)}  # what CUDA alone has
_shapes: dict[Any, Any] = {}
_views: dict[Any, bool] = {}


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """An aten operation with a device tensor among its arguments."""
    if func in (aten.copy_.default, aten._to_copy.default):
        return _copy(func, args, kwargs)
    if func in _UNSUPPORTED:
        raise SimulationError(f"{func} is not emulated")
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    tensors = [a for a in _flat((args, kwargs)) if isinstance(a, torch.Tensor)]
    device = [t for t in tensors if isinstance(t, DeviceTensor)]
    for tensor in tensors:
        if not isinstance(tensor, DeviceTensor) and tensor.dim() > 0:
            raise SimulationError(f"{func}: expected all tensors on cuda:0, found one of {tuple(tensor.shape)} on cpu")
    raw_args, raw_kwargs = tree_map(_raw, args), tree_map(_raw, kwargs)
    if _is_view(func):
        block = device[0].block
        return tree_map(
            lambda r: DeviceTensor.wrap(r, block) if isinstance(r, torch.Tensor) else r, func(*raw_args, **raw_kwargs)
        )
    if func in _WAITING or _has_mask(func, args):
        active().timeline.wait(str(func))
        result = func(*raw_args, **raw_kwargs)
        return tree_map(lambda r: DeviceTensor.wrap(r) if isinstance(r, torch.Tensor) else r, result)
    written = _written(func, args, kwargs)
    if written:
        queue(str(func), lambda: func(*raw_args, **raw_kwargs), device)
        return written[0] if len(func._schema.returns) <= 1 else tuple(written)
    outs = tree_map(lambda m: allocate(m.shape, m.stride(), m.dtype), _shape_of(func, args, kwargs))
    compute = _NOT_ON_CPU.get(func, func)
    targets = [out.raw for out in _flat(outs)]  # not the tensors: they may die before this is done

    def work() -> None:
        for target, value in zip(targets, _flat(compute(*raw_args, **raw_kwargs)), strict=True):
            target.copy_(value)

    if func not in (aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default):
        queue(str(func), work, [*device, *_flat(outs)])
    return outs


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    if func is aten._to_copy.default:  # only changes of dtype come here; those of device are caught before
        (source,) = args
        if not isinstance(source, DeviceTensor):
            raise SimulationError("a host tensor came to the device's copy")
        target: torch.Tensor = allocate_like(source, kwargs.get("dtype") or source.dtype)
        non_blocking = False
    else:
        target, source = args[0], args[1]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
        to, of = target.raw, source.raw
        queue("copy_", lambda: to.copy_(of), [target, source])
    else:
        move(target, source, non_blocking)
    return target


def allocate_like(tensor: torch.Tensor, dtype: torch.dtype) -> DeviceTensor:
    with quietly():
        like = torch.empty_like(_raw(tensor), dtype=dtype)
    return allocate(like.shape, like.stride(), dtype)


def move(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    """A copy between host and device. Pinned memory is read or written when the device gets there."""
    host, device = (target, source) if isinstance(source, DeviceTensor) else (source, target)
    assert isinstance(device, DeviceTensor)
    name = "copy device to host" if host is target else "copy host to device"
    gpu = active()
    pinned = gpu.is_pinned(host)
    raw = device.raw
    if not pinned:
        gpu.timeline.pageable(name)
        if host is source:
            host = host.clone()  # the driver takes a copy before the call returns
    if host is target or pinned:
        work = (lambda: host.copy_(raw)) if host is target else (lambda: raw.copy_(host))
    else:
        work = lambda: raw.copy_(host)  # noqa: E731
    queue(name, work, [device])
    if not non_blocking or (host is target and not pinned):
        gpu.timeline.wait(name)


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, DeviceTensor) else value


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [x for item in value for x in _flat(item)]
    if isinstance(value, dict):
        return [x for item in value.values() for x in _flat(item)]
    return [value]


def _is_view(func: Any) -> bool:
    if func not in _views:
        returns = func._schema.returns
        _views[func] = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return _views[func]


def _has_mask(func: Any, args: Any) -> bool:
    """Indexing by a mask: its result's shape, or the places it writes, are found by the host."""
    if func not in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        return False
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if value is not None:
                found.append(value)
    return found


def _shape_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Meta tensors of the shapes that come out; remembered by the shapes that go in."""

    def key(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return (tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, (list, tuple)):
            return tuple(key(item) for item in value)
        if isinstance(value, dict):
            return tuple((name, key(item)) for name, item in value.items())
        return (type(value), value)

    def meta(value: Any) -> Any:
        if isinstance(value, DeviceTensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    known = (func, key(args), key(kwargs))
    if known not in _shapes:
        _shapes[known] = func(*tree_map(meta, args), **tree_map(meta, kwargs))
    return _shapes[known]


__all__ = ["CUDA", "CaptureError", "DeviceTensor", "SimulationError", "allocate", "move", "queue", "upload"]
