"""Ranks in lockstep: rank 0 passes plans on to the others, which run the same steps and send no results."""

import logging
import os
import queue
import threading
import time
from collections import deque
from typing import NoReturn

from engine.runtime.stage import INTERNAL_ERROR, ExitCode, Stage
from proto.channel import encode
from proto.ids import Address, StageKind
from proto.messages import Heartbeat, Message, Reset, StepPlan, Stop
from worker.device import Deferred, Device
from worker.ranks.group import PeerLostError

log = logging.getLogger(__name__)

# The supervisor blames the process that ends first, and kills the others.
_BLAME_SECONDS = 1.0


class Followers:
    """The other ranks of the replica, as rank 0 sees them; there may be none."""

    def __init__(self, stage: Stage, size: int) -> None:
        replica = stage.address.replica
        self._outboxes = [stage.outbox(Address(StageKind.WORKER, replica, rank)) for rank in range(1, size)]

    def tell(self, message: StepPlan | Reset) -> None:
        """Pass a message on. Call before acting on it: a step waits for the other ranks' part of it.

        ZeroMQ takes a thousand messages before one would wait for our own loop, and the scheduler has a few in flight.
        """
        if self._outboxes:
            body = encode(message)
            for outbox in self._outboxes:
                outbox.send_encoded(body)


class FollowerLoop:
    """The loop of a rank other than 0 (`engine.runtime.stage.Handler`)."""

    def __init__(self, stage: Stage, device: Device) -> None:
        self._stage = stage
        self._device = device
        # In rank 0's order, Reset included: it was sent after rank 0 had launched the plans before it.
        self._orders: deque[StepPlan | Reset] = deque()
        self._launched: queue.SimpleQueue[Deferred] = queue.SimpleQueue()
        threading.Thread(target=self._await_steps, name="output", daemon=True).start()

    def on_message(self, message: Message) -> None:
        if isinstance(message, StepPlan | Reset):
            self._orders.append(message)

    def step(self, now: int) -> float | None:
        if not self._orders:
            return None
        order = self._orders.popleft()
        try:
            if isinstance(order, Reset):
                self._device.reset(order.epoch)
            elif isinstance(answer := self._device.launch(order), Deferred):
                self._launched.put(answer)
        except PeerLostError as error:
            end_without_peers(self._stage, error)
        return 0.0 if self._orders else None

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self._device.clock.counters())

    def _await_steps(self) -> None:
        """Wait for each step, as rank 0's output thread does: then its host memory is free, and the clock counts it."""
        try:
            while True:
                self._launched.get().wait()
        except Exception:
            log.critical(INTERNAL_ERROR, exc_info=True)
            os._exit(ExitCode.BUG)


def end_without_peers(stage: Stage, error: PeerLostError) -> NoReturn:
    """End this rank, since it cannot go on alone, but not before the one that ended first has been blamed.

    When the instance stops, another rank may have been told before us, in the middle of a step.
    """
    end = time.monotonic() + _BLAME_SECONDS
    while not stage.stopping and (left := end - time.monotonic()) > 0:
        if stage.inbox.wait(left) and any(isinstance(message, Stop) for message in stage.inbox.drain()):
            stage.stop()
    if stage.stopping:
        stage.exit(ExitCode.OK)
    log.critical("%s", error)
    stage.exit(ExitCode.PEER_LOST)
