"""Ranks in processes of their own, and what tests have them do. Light to import: each process does it anew."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from proto.config import WorkerOptions
from proto.messages import StepPlan, StepResult, column
from tests.layer_cases import Player
from worker.cpu.start import load as load_step
from worker.cpu.start import start as start_cpu
from worker.cpu.step import CpuStep
from worker.ranks.distributed import DistributedGroup
from worker.ranks.group import Group
from worker.steps.batch import I32Array

PATIENCE = 90.0  # seconds for one task, on a machine that does much else

Task = Callable[..., Any]


class Ranks:
    """Several ranks that have met and wait for tasks, which all of them run at the same time."""

    def __init__(self, size: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, folder / "ranks", theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, task: Task, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Each rank's result of `task(group, *arguments[rank])`, or the exception that it raised."""
        for pipe, own in zip(self._pipes, arguments, strict=True):
            pipe.send((task, own))
        return [self.receive(rank) for rank in range(len(self._pipes))]

    def receive(self, rank: int) -> Any:
        """A rank's next result, or the exception that it raised."""
        assert self._pipes[rank].poll(PATIENCE), f"rank {rank} does not answer"
        return self._pipes[rank].recv()

    def send(self, task: Task) -> None:
        """Have all ranks begin a task without arguments; `receive` has what comes of it."""
        for pipe in self._pipes:
            pipe.send((task, ()))

    def run_same(self, task: Task, *arguments: Any) -> list[Any]:
        """As `run` with the same arguments for all; raises what a rank raised."""
        results = self.run(task, [arguments] * len(self._pipes))
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()


def _serve(rank: int, size: int, rendezvous: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    group = DistributedGroup(rank, size, rendezvous)
    while True:
        try:
            task, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(task(group, *arguments))
        except Exception as error:
            pipe.send(error)


# --------------------------------------------------------------------------- tasks


def load(group: Group, options: WorkerOptions) -> CpuStep:
    return load_step(options, lambda text, done, total: None, group)


def forced_logits(group: Group, options: WorkerOptions, ids: I32Array, chunk: int) -> npt.NDArray[np.float32]:
    """Logits [len(ids), vocab] of every position, fed `chunk` tokens a step."""
    found: npt.NDArray[np.float32] = Player(load(group, options), 1, len(ids)).chunked(0, ids, chunk).numpy()
    return found


def play(group: Group, options: WorkerOptions, plans: Sequence[StepPlan]) -> list[list[int]]:
    """Ids of the rows that each plan sampled."""
    runner = start_cpu(options, lambda text, done, total: None, group)
    runner.reset(1)
    ids = []
    for plan in plans:
        result = runner.step(plan)
        assert isinstance(result, StepResult)
        ids.append(column(result.ids).tolist())
    return ids


def facts(group: Group, options: WorkerOptions) -> tuple[int, int, int]:
    forward = load(group, options)
    return forward.facts.num_pages, forward.facts.max_model_len, forward.facts.kv_bytes_per_token


def sums(group: Group, rows: list[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    summed: npt.NDArray[np.float32] = group.sum(torch.from_numpy(rows[group.rank])).numpy()
    return summed


def lose_the_last(group: Group) -> None:
    """The last rank ends where the others wait for it."""
    if group.rank == group.size - 1:
        os._exit(1)
    group.sum(torch.ones(4))
