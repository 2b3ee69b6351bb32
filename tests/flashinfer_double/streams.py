"""Streams and events of the simulated GPU: work is queued, and done late, in a random legal order."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Work = Callable[[], None]


class SimulationError(RuntimeError):
    """The program did what a GPU does not allow, or what goes wrong on one without a word."""


class CaptureError(SimulationError):
    """Something that a CUDA graph cannot hold ran while one was captured."""


@dataclass(eq=False)
class Marker:
    """A point in a stream. It is done when the stream has got there."""

    done: bool = False
    at: float = 0.0  # perf_counter

    def reach(self) -> None:
        self.done, self.at = True, time.perf_counter()


@dataclass(eq=False)
class Item:
    """One queued operation; it may begin when `after` is done."""

    name: str
    work: Work
    after: Marker | None = None


@dataclass(eq=False)
class Node:
    """One operation of a captured graph.

    `bind` is called on the host at each replay and returns what the device will do then.
    """

    name: str
    bind: Callable[[], Work]


@dataclass
class Account:
    """What the host asked of the device since the account was cleared."""

    eager: list[str] = field(default_factory=list)  # names of operations queued outside any graph
    replays: list[Any] = field(default_factory=list)  # graphs, in order
    waits: list[str] = field(default_factory=list)  # calls at which the host waited for the device
    pageable: list[str] = field(default_factory=list)  # copies from or to memory that is not pinned


class Timeline:
    """All streams of the device, and the dice that decide which of them gets on."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.default = Stream(self)
        self.account = Account()
        self.strict = False  # inside `launch_path`
        self.sync_debug = 0  # of torch.cuda.set_sync_debug_mode: 0, 1 or 2 ("error")
        self._current = threading.local()

    # ------------------------------------------------------------------ the host's side

    @property
    def current(self) -> "Stream":
        return getattr(self._current, "stream", self.default)

    @contextmanager
    def on(self, stream: "Stream | None") -> Iterator[None]:
        before = self.current
        self._current.stream = stream or before
        try:
            yield
        finally:
            self._current.stream = before

    def queue(self, name: str, work: Work, bind: Callable[[], Work] | None = None) -> None:
        """Put work into the current stream, or into the graph that captures it."""
        stream = self.current
        with self.lock:
            if stream.graph is not None:
                stream.graph.nodes.append(Node(name, bind or (lambda: work)))
                return
            self.account.eager.append(name)
            stream.items.append(Item(name, bind() if bind else work))
            if self.random.random() < 0.1:  # otherwise the device lags behind
                self.advance(self.random.randrange(16))

    def wait(self, name: str, done: Callable[[], bool] | None = None, *, asked: bool = False) -> None:
        """The host waits for the device until `done`, or until all is done.

        `asked`: the program said so by an event or a synchronise; else it is hidden in a copy or a value. Raises
        CaptureError while a graph is captured, and SimulationError for a hidden wait where it is forbidden.
        """
        with self.lock:
            if self.current.graph is not None:
                raise CaptureError(f"{name} waits for the device during a capture")
            self.account.waits.append(name)
            if self.strict and name != "Event.synchronize":
                raise SimulationError(f"{name} waits for the device on the launch path")
            if self.sync_debug == 2 and not asked:
                raise RuntimeError(f"called a synchronizing CUDA operation: {name}")
            while not (done() if done else all(not s.items for s in self.streams)):
                self._step()

    def pageable(self, name: str) -> None:
        """A copy from or to ordinary host memory."""
        if self.current.graph is not None:
            raise CaptureError(f"{name} with pageable memory during a capture")
        self.account.pageable.append(name)
        if self.strict:
            raise SimulationError(f"{name} with pageable memory on the launch path")

    @contextmanager
    def launch_path(self) -> Iterator[Account]:
        """Between launches: forbids hidden waits, synchronising streams or the device, and pageable copies.

        Waiting for an event is allowed; it shows in `account.waits`. Yields a fresh account.
        """
        self.account, self.strict = Account(), True
        try:
            yield self.account
        finally:
            self.strict = False

    def close(self) -> None:
        """Let go of all work. torch keeps some of the functions that lead here for good."""
        self.account = Account()
        for stream in self.streams:
            stream.items.clear()
            stream.graph = None
        self.streams.clear()

    # ------------------------------------------------------------------ the device's side

    def advance(self, operations: int) -> None:
        """Let the device do some operations, or fewer if none can begin."""
        for _ in range(operations):
            if not any(stream.ready() for stream in self.streams):
                return
            self._step()

    def _step(self) -> None:
        ready = [stream for stream in self.streams if stream.ready()]
        if not ready:
            stuck = {s.number: s.items[0].name for s in self.streams if s.items}
            raise SimulationError(f"deadlock: waiting for what never comes; heads of streams: {stuck}")
        stream = self.random.choice(ready)
        for _ in range(self.random.randrange(1, 8)):  # a stream runs on for a while
            if not stream.ready():
                return
            stream.items.popleft().work()


class Stream:
    """torch.cuda.Stream. Without a timeline given, one more stream of the simulated device."""

    def __init__(self, timeline: Timeline | None = None, device: Any = None, priority: int = 0) -> None:
        self.timeline = timeline if isinstance(timeline, Timeline) else active().timeline
        self.items: deque[Item] = deque()
        self.graph: Any = None  # the graph that captures this stream
        self.number = len(self.timeline.streams)
        self.cuda_stream = self.number
        self.timeline.streams.append(self)

    def ready(self) -> bool:
        return bool(self.items) and (self.items[0].after is None or self.items[0].after.done)

    def synchronize(self) -> None:
        self.timeline.wait("Stream.synchronize", lambda: not self.items, asked=True)

    def query(self) -> bool:
        self.timeline.advance(self.timeline.random.randrange(8))
        return not self.items

    def wait_event(self, event: "Event") -> None:
        if event.marker is not None:
            self._wait_marker(event.marker)

    def wait_stream(self, stream: "Stream") -> None:
        self._wait_marker(stream.mark())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def mark(self) -> Marker:
        marker = Marker()
        with self.timeline.lock:
            if self.graph is not None:
                raise CaptureError("an event is recorded on a stream during its capture, which this emulator lacks")
            self.items.append(Item("marker", marker.reach))
        return marker

    def _wait_marker(self, marker: Marker) -> None:
        with self.timeline.lock:
            if self.graph is not None:
                raise CaptureError("a stream waits for another during its capture, which this emulator lacks")
            self.items.append(Item("wait", lambda: None, after=marker))

    def __enter__(self) -> "Stream":
        self._context = self.timeline.on(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


class Event:
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.marker: Marker | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.marker = (stream or active().timeline.current).mark()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or active().timeline.current).wait_event(self)

    def query(self) -> bool:
        timeline = active().timeline
        with timeline.lock:
            timeline.advance(timeline.random.randrange(8))
        return self.marker is None or self.marker.done

    def synchronize(self) -> None:
        marker = self.marker
        if marker is not None:
            active().timeline.wait("Event.synchronize", lambda: marker.done, asked=True)

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds of this machine, which say nothing of a GPU."""
        if self.marker is None or end.marker is None or not (self.marker.done and end.marker.done):
            raise RuntimeError("both events must be recorded and done")
        return (end.marker.at - self.marker.at) * 1e3


_active: list[Any] = []


def active() -> Any:
    """The GPU that is simulated now."""
    if not _active:
        raise SimulationError("no GPU is simulated: use `with simulate():`")
    return _active[-1]
