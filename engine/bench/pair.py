"""A scheduler and a worker in processes of their own, with this process in place of all other stages."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from engine.bench.cpu import CpuTime, cpu_times
from engine.config import ServeConfig
from engine.documents import MODULES, Surroundings, command_line, stage_config
from engine.processes import DeathPipe, Process
from engine.rundir import RunDir
from proto.channel import Context, Inbox, Outbox, encode
from proto.ids import Address, StageKind, make_rid
from proto.messages import (
    ID_BYTES,
    U8,
    Admit,
    Emit,
    Facts,
    Heartbeat,
    Histogram,
    Message,
    Opening,
    Ready,
    Reject,
    Sampling,
    StageInfo,
    StageState,
    WorkerFacts,
    World,
    column,
)
from proto.model import ModelManifest

_SCHEDULER = Address(StageKind.SCHEDULER, 0)
_WORKER = Address(StageKind.WORKER, 0)
_INCARNATION = 1
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat's counters, and the monotonic second at which it came."""

    came: float
    counters: dict[str, float]
    histograms: dict[str, Histogram]


class PairError(RuntimeError):
    """A stage did not start, died, or refused a request; the text ends with its last lines."""


class Pair:
    """Sends Admits as a tokenizer, sinks Emits as a detokenizer, and keeps heartbeats as a supervisor."""

    def __init__(self, config: ServeConfig, manifest: ModelManifest) -> None:
        """Start both; use as a context manager, which ends them. Raises PairError."""
        self._run_dir = RunDir(config.run_dir)
        self._pipe = DeathPipe()
        self._context = Context()
        self._supervisor = self._inbox(StageKind.SUPERVISOR)
        self._server = self._inbox(StageKind.SERVER)
        self._detokenizer = self._inbox(StageKind.DETOKENIZER)
        self._admits = self._outbox(Address(StageKind.TOKENIZER, 0), _SCHEDULER)
        around = Surroundings(manifest, 0, self._run_dir.path, self._pipe.read_fd, _INCARNATION)
        self._processes: dict[Address, Process] = {}
        self._facts: dict[Address, Facts] = {}
        self._counter = 0
        self.beats: dict[str, list[Beat]] = {}  # by label
        self.tokens = 0
        self.finished = 0
        self.step = 0  # number of the last Emit's step
        self.rows = 0  # number of rows in the last Emit
        try:
            for address in (_WORKER, _SCHEDULER):
                self._start(config, around, address)
            self.facts = self._await_ready()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ start and end

    def _inbox(self, kind: StageKind) -> Inbox:
        return Inbox(self._context, self._run_dir.path, Address(kind, 0), _INCARNATION)

    def _outbox(self, sender: Address, to: Address) -> Outbox:
        return Outbox(self._context, self._run_dir.path, sender, _INCARNATION, to)

    def _start(self, config: ServeConfig, around: Surroundings, address: Address) -> None:
        path = Path(self._run_dir.path, f"{address}.json")
        path.write_bytes(msgspec.json.encode(stage_config(config, around, address, _INCARNATION)))
        command = command_line(config, sys.executable, MODULES[address.kind], address.kind, str(path))
        self._processes[address] = Process(command, self._pipe.read_fd)
        self.beats[address.kind.label] = []

    def _await_ready(self) -> WorkerFacts:
        """Wait until both are ready; the scheduler is once it has heard of a ready worker."""
        outbox = self._outbox(Address(StageKind.SUPERVISOR, 0), _SCHEDULER)
        end = time.monotonic() + _START_SECONDS
        while _SCHEDULER not in self._facts:
            if time.monotonic() > end:
                raise PairError(f"scheduler and worker are not ready after {_START_SECONDS:g} s:\n{self._last_lines()}")
            self._supervisor.wait(0.05)
            self.drain()
            self.check()
            outbox.send(self._world())
        outbox.close()
        facts = self._facts[_WORKER]
        assert isinstance(facts, WorkerFacts)
        return facts

    def _world(self) -> World:
        return World(
            stages=tuple(
                StageInfo(
                    address=address,
                    incarnation=_INCARNATION,
                    pid=process.pid,
                    state=StageState.READY if address in self._facts else StageState.STARTING,
                    facts=self._facts.get(address),
                )
                for address, process in self._processes.items()
            )
        )

    def _last_lines(self) -> str:
        lines: list[str] = []
        for process in self._processes.values():
            lines += process.last_lines
        return "\n".join(lines[-20:])

    def close(self) -> None:
        for process in self._processes.values():
            process.kill(process.pid)
        self._pipe.close()
        for process in self._processes.values():
            while not process.reap():
                time.sleep(0.005)
            process.close()
        self._context.close(linger=0)
        self._run_dir.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ requests and tokens

    def admit(self, prompt_ids: bytes, output_tokens: int) -> None:
        """Send a request that ends by length. `prompt_ids` are i32."""
        self._counter += 1
        rid = make_rid(0, _INCARNATION, self._counter)
        self._admits.send(
            Admit(
                rid=rid,
                attempt=1,
                prompt_ids=prompt_ids,
                max_new_tokens=output_tokens,
                sampling=Sampling(temperature=0, seed=self._counter),
                arrival=time.monotonic_ns(),
                opening=encode(Opening(rid, 1, len(prompt_ids) // ID_BYTES)),
            )
        )

    def drain(self) -> int:
        """Process all messages that have arrived. Returns how many requests ended."""
        self._admits.flush()
        before = self.finished
        for emit in self._detokenizer.drain():
            self._sink(emit)
        for address, message in self._supervisor.drain_with_senders():
            if isinstance(message, Heartbeat):
                self.beats[address.kind.label].append(Beat(time.monotonic(), message.counters, message.histograms))
            elif isinstance(message, Ready):
                self._facts[address] = message.facts
        return self.finished - before

    def check(self) -> None:
        """Raise PairError when a process has ended or a request was refused."""
        for message in self._server.drain():
            if isinstance(message, Reject):
                raise PairError(f"the scheduler rejected a request: {message.message}")
        for address, process in self._processes.items():
            if process.reap():
                process.read_rest()
                raise PairError(f"{address} ended with status {process.status}:\n{self._last_lines()}")
            process.read_lines()

    def _sink(self, emit: Message) -> None:
        if not isinstance(emit, Emit):
            return
        self.rows = len(emit.rids) // 8
        self.tokens += len(emit.ids) // ID_BYTES
        self.step = emit.step
        if emit.finishes:
            self.finished += int(np.count_nonzero(column(emit.finishes, U8)))

    def cpu(self) -> dict[str, CpuTime]:
        """Read the CPU times of both stages, by label."""
        return cpu_times({address.kind.label: process.pid for address, process in self._processes.items()})
