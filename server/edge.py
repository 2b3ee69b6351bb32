"""The server's end of the ring: its inbox on asyncio's loop, and the record's messages to the outboxes."""

import asyncio
import gc
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from engine.runtime.stage import INTERNAL_ERROR, ExitCode, Stage
from proto.channel import ChannelError
from proto.config import ServerOptions
from proto.ids import SUPERVISOR, Address
from proto.messages import (
    Accepted,
    CensusReply,
    Deltas,
    DetokenizeCall,
    DetokenizeReply,
    Drained,
    DrainRequest,
    Flush,
    FlushReply,
    Heartbeat,
    Message,
    Outgoing,
    Reject,
    Stop,
    TokenizeCall,
    TokenizeReply,
    World,
)
from server.calls import Calls, Reply
from server.errors import UnavailableError, shorten
from server.generation import Generation, OutputPiece
from server.readiness import Phase, Readiness
from server.record import Record
from server.validate import Ask
from server.wake_queue import Waiter, WakeQueue

log = logging.getLogger(__name__)

# What is done before other work on the loop, such as health probes and new calls, gets its turn: some 0.1 ms.
_PARTS_A_TURN = 2
_ROWS_A_PART = 32
_TICK_SECONDS = 0.05
_BACKLOG_SECONDS = 0.001
_CENSUS_SECONDS = 1.0
_COLLECT_SECONDS = 60.0


def spare_full_collections() -> None:
    """Leave full garbage collections to `Edge`.

    With thousands of calls open one takes 150 ms, and Python would run several a minute.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000, 3, 1 << 30)


class Edge:
    """Everything between handlers and the other stages. Lives on one event loop."""

    def __init__(self, stage: Stage, options: ServerOptions) -> None:
        self.stage = stage
        self.options = options
        self.record = Record(stage.config.index, stage.config.incarnation, options)
        self.calls = Calls()
        self.readiness = Readiness()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()  # exit code
        self.phase_changed = asyncio.Event()
        self._phase = self.readiness.phase
        self._loop = asyncio.get_running_loop()
        self._wake_queue = WakeQueue()
        self._waiters: dict[int, Waiter] = {}
        self._unread: deque[Message] = deque()
        self._receiving = False  # whether the loop will read on by itself
        self._next_census = 0.0
        self._next_collection = time.monotonic() + _COLLECT_SECONDS
        self._drained_told = False
        self._flush_pending = False

    @property
    def model_name(self) -> str:
        """The name under which the model answers."""
        return self.options.served_model_names[0]

    # ------------------------------------------------------------------ for handlers

    @contextmanager
    def running(self, ask: Ask, size: int, arrival: int) -> Iterator[Generation]:
        """Submit a request of `size` bytes and yield its generation; abort it on leaving unless it is over.

        Raises DuplicateIdError or OverloadedError.
        """
        generation, submit = self.record.open_generation(ask, size, arrival, time.time())
        waiter = self._waiters[generation.rid] = self._wake_queue.waiter()
        generation.attach(waiter.notify)
        try:
            self._send([submit])
            yield generation
        finally:
            del self._waiters[generation.rid]
            self._send(self.record.close_generation(generation))
            if self.options.log_requests:
                _log_request(generation)
            self._tell_drained()

    async def next_piece(self, generation: Generation) -> OutputPiece:
        """Wait for the next piece. Raises the CallError that ended the generation."""
        waiter = self._waiters[generation.rid]
        if generation.ready:
            await waiter.wait_turn()
        while (piece := generation.take_piece()) is None:
            await waiter.wait_notified()
        return piece

    async def ask(self, to: Address, question: TokenizeCall | DetokenizeCall | Flush, size: int) -> Reply:
        """Send a question of so many bytes and wait for its answer. Raises CallError."""
        reserved = self.record.reserve(size)
        answer = self.calls.expect(question.rid)
        try:
            self._send([Outgoing(to, question)])
            return await answer
        finally:
            self.calls.forget(question.rid)
            self.record.in_flight.remove(reserved)
            self._tell_drained()

    def abort(self, client_id: str) -> bool:
        """End a live generation with ABORT; False when no live request has that id."""
        out = self.record.abort_by_client_id(client_id)
        self._send(out or [])
        return out is not None

    def request_drain(self) -> None:
        """Ask the supervisor to drain and end the instance."""
        self._send([Outgoing(SUPERVISOR, DrainRequest())])

    # ------------------------------------------------------------------ the loop

    def start(self) -> None:
        """Read the inbox from now on."""
        self._loop.add_reader(self.stage.inbox.fd, self._receive)
        self._tick()

    def detach(self) -> None:
        """Read no more."""
        self._loop.remove_reader(self.stage.inbox.fd)

    def _tick(self) -> None:
        """Do what no message triggers. It reads too, for safety: the descriptor is edge-triggered."""
        self._receive()
        if self.ended.done():
            return
        try:
            self._keep_time()
        except Exception as error:
            self._die(error)
        self._loop.call_later(_TICK_SECONDS, self._tick)

    def _keep_time(self) -> None:
        self.stage.send_heartbeat(self._heartbeat)
        now = time.monotonic()
        if now >= self._next_census:
            self._next_census = now + _CENSUS_SECONDS
            self._send(self.record.cut_stalled(time.monotonic_ns()))
            self._send(self.record.census())
        if now >= self._next_collection:
            self._next_collection = now + _COLLECT_SECONDS
            gc.collect()
        self._flush()
        if self.stage.stopping:
            self.end(ExitCode.OK)

    def end(self, code: int) -> None:
        """End the process with this exit code; the first call counts."""
        if not self.ended.done():
            self.ended.set_result(code)

    def outlive(self, task: asyncio.Task[None]) -> None:
        """Callback for a task that must not end by itself: if it does, the process ends because of a bug."""
        if not task.cancelled():
            self._die(task.exception())

    def _die(self, error: BaseException | None) -> None:
        log.critical(INTERNAL_ERROR, exc_info=error)
        self.end(ExitCode.BUG)

    def _receive(self) -> None:
        """Drain the inbox fully, in turns with the loop's other work."""
        if not self._receiving:
            self._receive_some()

    def _receive_some(self) -> None:
        self._receiving = False
        if self.ended.done():
            return
        try:
            if not self._unread:
                for message in self.stage.inbox.drain(_PARTS_A_TURN):
                    self._unread.extend(_in_parts(message))
            if not self._unread:
                return
            for _ in range(min(len(self._unread), _PARTS_A_TURN)):
                self._on_message(self._unread.popleft())
        except ChannelError as error:
            log.critical("%s", error)
            self.end(ExitCode.CHANNEL)
        except Exception as error:
            self._die(error)
        else:
            self._receiving = True
            self._loop.call_soon(self._receive_some)

    def _on_message(self, message: Message) -> None:
        match message:
            case Deltas():
                self._send(self.record.on_deltas(message, time.monotonic_ns()))
            case Accepted():
                self.record.on_accepted(message)
            case Reject():
                if not self.calls.on_reject(message):
                    self.record.on_reject(message)
            case TokenizeReply() | DetokenizeReply() | FlushReply():
                self.calls.on_reply(message)
            case CensusReply():
                self.record.on_census_reply(message)
            case World():
                self._on_world(message)
            case Stop():
                self.end(ExitCode.OK)

    def _on_world(self, world: World) -> None:
        self.stage.adopt_world(world)
        broken = self.readiness.on_world(world)
        if broken:
            log.error("ending every request in flight: %s", broken)
            self.fail_all(f"the request was lost: {broken}")
        self.note_phase()
        self._tell_drained()

    def fail_all(self, why: str) -> None:
        """End every call in flight with UNAVAILABLE."""
        error = UnavailableError(why)
        self._send(self.record.fail_all(error))
        self.calls.fail_all(error)

    def note_phase(self) -> None:
        """Wake whoever follows the phase when it changed."""
        if self._phase is not self.readiness.phase:
            self._phase = self.readiness.phase
            log.info("phase: %s", self._phase.value)
            self.phase_changed.set()

    def _tell_drained(self) -> None:
        idle = not len(self.record) and not len(self.calls)
        if self.readiness.phase is Phase.DRAINING and idle and not self._drained_told:
            self._drained_told = True
            self._send([Outgoing(SUPERVISOR, Drained())])

    def _send(self, out: list[Outgoing]) -> None:
        for to, message in out:
            self.stage.outbox(to).send(message)
        if out:
            self._flush()

    def _flush(self) -> None:
        """Push on what peers did not take, soon again while something is left."""
        if not self.stage.flush() and not self._flush_pending:
            self._flush_pending = True
            self._loop.call_later(_BACKLOG_SECONDS, self._flush_again)

    def _flush_again(self) -> None:
        self._flush_pending = False
        if not self.ended.done():
            self._flush()

    def _heartbeat(self) -> Heartbeat:
        record = self.record
        counters: dict[str, float] = {
            "in_flight_requests": record.in_flight.requests,
            "in_flight_bytes": record.in_flight.bytes,
            "finished": record.finished,
            "failed": record.failed,
            "abandoned": record.abandoned,
            "repeated_deltas": record.repeated_deltas,
            "late_deltas": record.late_deltas,
        }
        return Heartbeat(counters)


def _in_parts(message: Message) -> Iterable[Message]:
    """Split a long message: a step may bring deltas for thousands of requests."""
    if not isinstance(message, Deltas) or len(message.rows) <= _ROWS_A_PART:
        return (message,)
    rows = message.rows
    return (Deltas(rows[i : i + _ROWS_A_PART]) for i in range(0, len(rows), _ROWS_A_PART))


def _log_request(generation: Generation) -> None:
    ending, error = generation.ending, generation.error
    if error is not None:
        outcome = f"{error.code.name} ({shorten(' '.join(str(error).split()))})"
    else:
        outcome = "cancelled" if ending is None else ending.finish.name.lower()
    log.info(
        "rid %016x id %s: %s, %d prompt tokens (%d cached), %d new, %.1f ms",
        generation.rid,
        generation.client_id,
        outcome,
        generation.prompt_tokens,
        generation.cached_tokens,
        generation.ids_received,
        (time.monotonic_ns() - generation.arrival) / 1e6,
    )
