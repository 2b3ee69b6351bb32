"""Two ranks, each on a GPU of its own, against one that holds the whole model: of check.py, where there are two GPUs.

Ranks are children of this process. Tests run `logits` on simulated GPUs.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from scripts.gpu import speed
from tests.flashinfer_cases import Place, config
from worker.cuda.device import CudaDevice
from worker.cuda.group import join_gpus, take_gpu
from worker.layers.parameter import Parameter
from worker.loader.load import fill_dummy
from worker.ranks.group import ALONE, Group

RANKS = 2
ROWS, LENGTH, DECODES = 3, 20, 4
PATIENCE = 120.0  # seconds, for all that children do at once

Logits = npt.NDArray[np.float32]
Task = Callable[[Group], Any]


def compare(place: Place, scale: speed.Scale, bandwidth: float) -> dict[str, Any]:
    """Logits of a tiny model by one rank and by two, and decode steps of a large one. Raises where they differ."""
    alone = logits(place, False, ALONE)
    differences = {}
    for name, deterministic in (("all-reduce", False), ("in the order of ranks", True)):
        # With `deterministic`, each start has compared logits alone and in company, bit for bit.
        found = _on_gpus(partial(logits, place, deterministic), deterministic)
        differences[name] = judge(alone, found, place.tolerance)
    steps, *_ = _on_gpus(partial(_decode, scale, bandwidth), deterministic=False)
    return {"ranks": RANKS, "tolerance": place.tolerance, "largest_difference": differences, "decode": steps}


def judge(alone: Logits, found: list[Logits], tolerance: float) -> float:
    """The largest difference of two ranks' logits from one's. Raises AssertionError for too large a one."""
    first, *others = found
    assert all(np.array_equal(first, other) for other in others), "ranks have different logits"
    difference = float(np.abs(first - alone).max())
    assert difference <= tolerance, f"logits of {len(found)} ranks differ from one's by {difference}"
    assert np.ptp(alone) > 1, "logits are too alike to be compared"
    return difference


def logits(place: Place, deterministic: bool, group: Group) -> Logits:
    """[steps, rows, vocab] of prompts, then of decode rows, replayed, whose tokens are given."""
    model = config("llama", place, vocab_size=62, dtype=str(place.dtype).removeprefix("torch."))
    tokens = ROWS * LENGTH + ROWS
    device, _ = speed.make_device(
        model,
        rows=ROWS + 1,  # so that ROWS is no bucket
        tokens=tokens,
        length=LENGTH + DECODES + 2 * speed.PAGE,
        group=group,
        fill=_fill_wide,
        deterministic=deterministic,
    )
    driver = speed.Driver(device, depth=1)
    driver.fill(ROWS, LENGTH, tokens)
    found = [_logits(device)]
    for step in range(DECODES):
        device._step.state.last_tokens.fill_(7 * step + 1)
        torch.cuda.synchronize()
        driver.run()
        driver.settle()
        found.append(_logits(device))
    return np.stack(found)


def _logits(device: CudaDevice) -> Logits:
    torch.cuda.synchronize()
    read: Logits = device._step.logits[:ROWS].cpu().numpy()
    return read


def _fill_wide(parameters: dict[str, Parameter], seed: int) -> None:
    """The same weights for any number of ranks, far enough from 0 that logits differ."""
    fill_dummy(parameters, seed)
    for path, parameter in parameters.items():
        if not path.endswith("norm.weight"):
            parameter.tensor.mul_(12)


def _decode(scale: speed.Scale, bandwidth: float, group: Group) -> list[dict[str, Any]]:
    return list(speed.decode(scale, bandwidth, group))


# --------------------------------------------------------------------------- processes


def _on_gpus(task: Task, deterministic: bool) -> list[Any]:
    """Each rank's result. Raises RuntimeError for a rank that ended without one, or says nothing for PATIENCE."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(RANKS):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank, Path(folder, "ranks"), task, deterministic, theirs)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return [_receive(rank, pipe) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _receive(rank: int, pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE):
        raise RuntimeError(f"rank {rank} says nothing for {PATIENCE:g} s")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} ended; see above") from None


def _rank(rank: int, rendezvous: Path, task: Task, deterministic: bool, pipe: Connection) -> None:
    group = join_gpus(rank, RANKS, rendezvous, take_gpu(rank, RANKS), deterministic=deterministic)
    pipe.send(task(group))
    pipe.close()
    os._exit(0)  # what NCCL would say of a group that nobody took apart
