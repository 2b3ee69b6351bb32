"""CUDA graphs of the simulated GPU: the list of operations, with the memory that each had at capture."""

import weakref
from typing import Any

import torch

from tests.flashinfer_double.memory import Block, poison
from tests.flashinfer_double.streams import CaptureError, Item, Node, SimulationError, Stream, active


class Pool:
    """Memory that graphs share. What one graph has freed, another may have got."""

    def __init__(self) -> None:
        self.free: list[torch.Tensor] = []


class CUDAGraph:
    """torch.cuda.CUDAGraph.

    A replay runs the operations of the capture on the memory of the capture. It fails when memory from outside
    the graph has died since, as a GPU would then compute on somebody else's tensors; and when the graph was
    captured before those operations could know their buffers (see `bind` of `memory.queue`).
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self.nodes: list[Node] = []
        self.captured = False
        self._pool = Pool()
        self._outside: dict[int, tuple[str, weakref.ref[Block]]] = {}  # by address: who reads or writes it
        self._mine: set[int] = set()  # addresses allocated in the capture
        self._stream: Stream | None = None

    def pool(self) -> Pool:
        return self._pool

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        stream = active().timeline.current
        if stream is active().timeline.default:
            raise CaptureError("the default stream cannot be captured")
        if stream.graph is not None or self.captured:
            raise CaptureError("a capture has begun, or has been done, already")
        self._pool = pool or self._pool
        self._stream, stream.graph = stream, self

    def capture_end(self, failed: bool = False) -> None:
        assert self._stream is not None
        self._stream.graph, self.captured = None, not failed

    def refer(self, name: str, blocks: list[Block]) -> None:
        """An operation that is being captured uses these blocks."""
        for block in blocks:
            if block.graph is not self:
                self._outside.setdefault(block.raw.untyped_storage().data_ptr(), (name, weakref.ref(block)))

    def own(self, block: Block) -> None:
        self._mine.add(block.raw.untyped_storage().data_ptr())

    def free(self, raw: torch.Tensor) -> None:
        """A tensor of the capture has died: its memory is the pool's, to be used by the next graph."""
        self._pool.free.append(raw)

    def reads(self, tensor: Any) -> bool:
        """Is the tensor's memory among that of the captured operations, from outside or inside?"""
        address = tensor.raw.untyped_storage().data_ptr()
        return address in self._outside or address in self._mine

    def replay(self) -> None:
        timeline = active().timeline
        if not self.captured:
            raise SimulationError("a graph is replayed that was not captured")
        if timeline.current.graph is not None:
            raise CaptureError("a graph is replayed inside a capture")
        for name, block in self._outside.values():
            if block() is None:
                raise SimulationError(f"the graph's {name} uses a tensor that died after the capture")
        with timeline.lock:
            timeline.account.replays.append(self)
            items = timeline.current.items
            items.append(Item("pool", self._spoil))
            items.extend(Item(node.name, node.bind()) for node in self.nodes)
            timeline.advance(timeline.random.randrange(4))

    def reset(self) -> None:
        self.nodes.clear()
        self.captured = False
        self._outside.clear()

    def _spoil(self) -> None:
        """Freed memory of the pool holds what another graph left there."""
        for raw in self._pool.free:
            poison(raw)


class graph:  # noqa: N801 - torch's name
    """torch.cuda.graph."""

    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global"
    ) -> None:
        self._graph, self._pool = cuda_graph, pool
        self._stream = stream or Stream(active().timeline)

    def __enter__(self) -> None:
        active().timeline.wait("graph capture", asked=True)
        self._context = active().timeline.on(self._stream)
        self._context.__enter__()
        self._graph.capture_begin(self._pool)

    def __exit__(self, *error: Any) -> None:
        self._graph.capture_end(failed=error[0] is not None)
        self._context.__exit__(None, None, None)
