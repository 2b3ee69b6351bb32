"""Which stages hang, judged from what they send and the CPU time that they use. No I/O, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass

from proto.ids import Address, StageKind
from proto.messages import Heartbeat

# Threads that keep a hung process's connections alive use less CPU than this during a stall; work uses more.
_COMPUTED_SECONDS = 0.05


@dataclass(slots=True)
class _Stillness:
    """The instant since which a process was not seen to do anything, and the CPU time it had used by then."""

    since: float = 0.0
    cpu_seconds: float = 0.0

    def end(self, now: float, cpu_seconds: float) -> None:
        self.since, self.cpu_seconds = now, cpu_seconds


class HangWatch:
    """Two rules. A stage is silent when it neither sends anything nor computes. A worker is stuck when its scheduler,
    which has sequences running, reports no progress and none of the worker's ranks computes: a rank may well send
    heartbeats while its device hangs, or while it waits for a plan that was lost.

    Times are seconds of the caller's own clock, the same in all calls.
    """

    def __init__(self, addresses: Sequence[Address], stall: float) -> None:
        self._stall = stall
        self._cpu_seconds = dict.fromkeys(addresses, 0.0)
        self._silence = {address: _Stillness() for address in addresses}
        self._standstill = {address: _Stillness() for address in addresses if address.kind is StageKind.WORKER}
        self._progress: dict[int, int] = {}  # by replica

    def on_message(self, address: Address, now: float) -> None:
        """A stage sent something, or was started."""
        self._silence[address].end(now, self._cpu_seconds[address])

    def on_heartbeat(self, address: Address, beat: Heartbeat, now: float) -> None:
        """A scheduler's heartbeat says how its replica gets on; those of others say nothing yet."""
        if address.kind is not StageKind.SCHEDULER:
            return
        before = self._progress.get(address.replica)
        self._progress[address.replica] = beat.progress
        if not beat.busy or beat.progress != before:
            for worker in self._ranks(address.replica):
                self._standstill[worker].end(now, self._cpu_seconds[worker])

    def on_cpu_time(self, address: Address, cpu_seconds: float, now: float) -> None:
        """A stage was seen to have used so much CPU time since it started."""
        self._cpu_seconds[address] = cpu_seconds
        for stillness in (self._silence[address], self._standstill.get(address)):
            if stillness is not None and cpu_seconds - stillness.cpu_seconds >= _COMPUTED_SECONDS:
                stillness.end(now, cpu_seconds)

    def is_silent(self, address: Address, now: float) -> bool:
        return now - self._silence[address].since >= self._stall

    def is_stuck(self, replica: int, now: float) -> bool:
        """Whether the replica's worker is stuck. Ask after a heartbeat of its scheduler."""
        ranks = self._ranks(replica)
        return bool(ranks) and all(now - self._standstill[rank].since >= self._stall for rank in ranks)

    def _ranks(self, replica: int) -> list[Address]:
        return [address for address in self._standstill if address.replica == replica]
