"""The root process of an instance: passes events to the InstanceLifecycle and carries out what it decides."""

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from engine.config import ServeConfig
from engine.console import Console
from engine.documents import MODULES, Surroundings, command_line, stage_config
from engine.lifecycle import InstanceLifecycle, Limits
from engine.parallel import refuse_division
from engine.port import Port, PortError
from engine.preparation import PreparationError, prepare_model
from engine.processes import DeathPipe, Process, read_vitals
from engine.rundir import RunDir, RunDirError
from engine.runtime.stage import ExitCode, set_title
from engine.signals import Signals
from engine.stages import Action, Announce, Kill, Say, Start, Tell
from proto.channel import ChannelError, Context, Inbox, Outbox
from proto.ids import SUPERVISOR, Address, StageKind
from proto.model import ModelManifest

_INCARNATION = 1
_TICK_SECONDS = 0.2
_BACKLOG_SECONDS = 0.01
_DRAFT = ".part"


def serve(config: ServeConfig, modules: Mapping[StageKind, str] = MODULES) -> int:
    """Run an instance until it ends; returns the exit code. `modules` are what the stages run."""
    set_title(SUPERVISOR)
    console = Console()
    try:
        return _serve(config, modules, console, Signals())
    finally:
        console.close()


def _serve(config: ServeConfig, modules: Mapping[StageKind, str], console: Console, signals: Signals) -> int:
    try:
        if config.ready_file:
            _clear_ready_file(Path(config.ready_file))
        port = Port(config.host, config.port)
        run_dir = RunDir(config.run_dir)
    except (ReadyFileError, PortError, RunDirError) as error:
        console.forward(f"quintet serve: error: {error}")
        return ExitCode.REFUSED
    pipe = DeathPipe()
    try:
        manifest = prepare_model(
            config.model,
            Path(run_dir.path) / "model.json",
            needs_weights=config.needs_weights,
            death_fd=pipe.read_fd,
            console=console,
            cancelled=signals.end_requested,
        )
        if manifest is None:
            return 0
        if refusal := refuse_division(manifest.config, config.tensor_parallel_size):
            console.forward(f"quintet serve: error: {refusal}")
            return ExitCode.REFUSED
        return Supervisor(config, modules, manifest, port, run_dir.path, pipe, console, signals).run()
    except PreparationError as error:
        console.forward(f"quintet serve: error: {error}")
        return ExitCode.REFUSED
    finally:
        # Kills whatever the supervisor could not.
        pipe.close()
        run_dir.remove()
        port.close()


class ReadyFileError(RuntimeError):
    """The ready-file cannot be written; the text names it."""


class Supervisor:
    """Sockets, processes and signals of a running instance."""

    def __init__(
        self,
        config: ServeConfig,
        modules: Mapping[StageKind, str],
        manifest: ModelManifest,
        port: Port,
        run_dir: str,
        pipe: DeathPipe,
        console: Console,
        signals: Signals,
    ) -> None:
        self._config = config
        self._modules = modules
        self._port = port
        self._pipe = pipe
        self._console = console
        self._signals = signals
        self._around = Surroundings(manifest, port.number, run_dir, pipe.read_fd, _INCARNATION)
        self._context = Context()
        self._inbox = Inbox(self._context, run_dir, SUPERVISOR, _INCARNATION)
        self._outboxes: dict[Address, Outbox] = {}
        self._processes: dict[Address, Process] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._inbox.fd, selectors.EVENT_READ, self._on_inbox)
        self._selector.register(signals, selectors.EVENT_READ, self._on_signals)
        if config.parent_fd >= 0:
            self._selector.register(config.parent_fd, selectors.EVENT_READ, self._on_parent_end)
        self._next_look = 0.0
        self._lifecycle = InstanceLifecycle(
            [(address, address.kind in config.wrappers) for address in config.addresses],
            Limits(config.startup_timeout, config.stall_timeout, config.drain_timeout),
            _INCARNATION,
            os.getpid(),
        )

    def run(self) -> int:
        """Run until the lifecycle ends; returns the exit code."""
        try:
            self._perform(self._lifecycle.begin(time.monotonic()))
            while (code := self._lifecycle.exit_code) is None:
                self._turn()
            return code
        finally:
            self._close()

    def _turn(self) -> None:
        backlog = [outbox for outbox in self._outboxes.values() if not outbox.flush()]
        waiting = backlog or not self._console.flush()
        for key, _ in self._selector.select(_BACKLOG_SECONDS if waiting else _TICK_SECONDS):
            key.data()
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _TICK_SECONDS
            self._look_at_stages()
        self._perform(self._lifecycle.tick(time.monotonic()))

    # ------------------------------------------------------------------ events

    def _on_inbox(self) -> None:
        # Edge-triggered: until it is empty.
        try:
            while received := self._inbox.drain_with_senders():
                for sender, message in received:
                    self._perform(self._lifecycle.on_message(sender, message))
        except ChannelError as error:
            self._perform(self._lifecycle.on_unreadable(str(error)))

    def _on_signals(self) -> None:
        for number in self._signals.drain():
            if number == signal.SIGCHLD:
                # Not now: looking closes descriptors, and events of this round may be about them.
                self._next_look = 0.0
            elif number == signal.SIGINT:
                self._perform(self._lifecycle.on_interrupt())
            else:
                self._perform(self._lifecycle.on_terminate(signal.Signals(number).name))

    def _on_parent_end(self) -> None:
        self._selector.unregister(self._config.parent_fd)
        self._perform(self._lifecycle.on_terminate("the process that started this instance has ended"))
        self._perform(self._lifecycle.on_interrupt())

    def _on_output(self, process: Process) -> None:
        lines = process.read_lines()
        if lines is None:
            self._selector.unregister(process.output_fd)
        for line in lines or ():
            self._console.forward(line)

    def _look_at_stages(self) -> None:
        """Find out which stages have ended or are stopped, and what each uses."""
        for address, process in list(self._processes.items()):
            if process.reap():
                self._on_end(address, process)
        for address, process in self._processes.items():
            vitals = read_vitals(self._lifecycle.stages[address].pid)
            self._perform(self._lifecycle.on_vitals(address, vitals, process.last_lines))
        own = read_vitals(os.getpid())
        if own:
            self._lifecycle.on_supervisor_vitals(own)

    def _on_end(self, address: Address, process: Process) -> None:
        del self._processes[address]
        for line in process.read_rest():
            self._console.forward(line)
        if process.output_fd in self._selector.get_map():
            self._selector.unregister(process.output_fd)
        process.close()
        self._perform(self._lifecycle.on_exit(address, process.status, process.last_lines))

    # ------------------------------------------------------------------ actions

    def _perform(self, actions: Iterable[Action]) -> None:
        queue = deque(actions)
        while queue:
            match queue.popleft():
                case Start(address, incarnation):
                    queue.extend(self._start(address, incarnation))
                case Tell(address, message):
                    self._outboxes[address].send(message)
                case Kill(address):
                    self._processes[address].kill(self._lifecycle.stages[address].pid)
                case Say(text):
                    self._console.say(text)
                case Announce():
                    self._announce()

    def _start(self, address: Address, incarnation: int) -> list[Action]:
        if self._lifecycle.failure:
            return []
        path = Path(self._around.run_dir) / f"{address}.json"
        command = command_line(self._config, sys.executable, self._modules[address.kind], address.kind, str(path))
        document = stage_config(self._config, self._around, address, incarnation)
        if address not in self._outboxes:
            self._outboxes[address] = Outbox(self._context, self._around.run_dir, SUPERVISOR, _INCARNATION, address)
        self._outboxes[address].address_incarnation(incarnation)
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(document)))
            process = Process(command, self._pipe.read_fd)
        except OSError as error:
            return self._lifecycle.on_startup_error(f"{command[0]!r} cannot be started: {error.strerror}")
        self._processes[address] = process
        self._selector.register(process.output_fd, selectors.EVENT_READ, lambda: self._on_output(process))
        return self._lifecycle.on_spawned(address, process.pid)

    def _announce(self) -> None:
        if self._config.ready_file:
            _write_atomically(Path(self._config.ready_file), json.dumps(self._facts(), indent=2) + "\n")
        with contextlib.suppress(OSError):  # nobody reads stdout
            sys.stdout.write(f"quintet serves {self._config.names[0]} on {self._port.address}\n")
            sys.stdout.flush()

    def _facts(self) -> dict[str, object]:
        stages = self._lifecycle.stages.values()
        return {
            "address": self._port.address,
            "host": self._port.host,
            "port": self._port.number,
            "pid": os.getpid(),
            "run_dir": self._around.run_dir,
            "stages": [
                {
                    "kind": stage.address.kind.label,
                    "index": stage.address.index,
                    "rank": stage.address.rank,
                    "name": str(stage.address),
                    "pid": stage.pid,
                    "title": stage.title,
                }
                for stage in stages
            ],
        }

    def _close(self) -> None:
        for address, process in self._processes.items():
            process.kill(self._lifecycle.stages[address].pid)
            process.close()
        self._selector.close()
        self._inbox.close()
        self._context.close(linger=0)  # outboxes included: no stage is left to read them


def _clear_ready_file(path: Path) -> None:
    """Remove an earlier instance's file, and find a bad path before the model is loaded rather than after."""
    try:
        draft = path.with_name(path.name + _DRAFT)
        draft.touch()
        draft.unlink()
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ReadyFileError(f"--ready-file {path}: {error.strerror}") from error


def _write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    draft = path.with_name(path.name + _DRAFT)
    draft.write_text(text)
    draft.replace(path)
