"""From options to a device that runs plans. A simulated one starts without torch."""

import logging
import sys
from pathlib import Path
from typing import NoReturn

from engine.runtime.stage import INTERNAL_ERROR, ExitCode, Handler, Stage, tame_gc
from proto.config import WorkerOptions
from proto.devices import is_simulated, refuse
from proto.messages import WorkerFacts
from worker.device import Device, DeviceError
from worker.loop import WorkerLoop
from worker.ranks.followers import FollowerLoop, Followers, end_without_peers
from worker.ranks.group import ALONE, Group, PeerLostError

log = logging.getLogger(__name__)

# A result must not wait 5 ms, the default, for a launching thread that is busy in Python. At 0.1 ms, steps of 0.45 ms
# still lost 3 % of the device (`quintet bench host`). The slowest rank sets the pace of all.
_SWITCH_INTERVAL = 5e-6


def play(stage: Stage) -> NoReturn:
    """Load, report the facts, and run plans until told to stop."""
    options = stage.options
    assert isinstance(options, WorkerOptions)
    try:
        device = _device(stage, options)
    except DeviceError as error:
        log.critical("%s", error)
        stage.exit(ExitCode.REFUSED)
    except PeerLostError as error:
        end_without_peers(stage, error)
    except Exception:
        log.critical(INTERNAL_ERROR, exc_info=True)
        stage.exit(ExitCode.BUG)
    tame_gc()
    sys.setswitchinterval(_SWITCH_INTERVAL)
    loop: Handler
    if stage.address.rank == 0:
        loop = WorkerLoop(stage, device, Followers(stage, options.tensor_parallel_size))
    else:
        loop = FollowerLoop(stage, device)
    warn_if_shortened(options, device.facts)
    stage.ready(device.facts)
    stage.run(loop)


def warn_if_shortened(options: WorkerOptions, facts: WorkerFacts) -> None:
    """Log that the KV cache is too small for sequences of the length that was asked for."""
    if options.max_model_len and facts.max_model_len < options.max_model_len:
        log.warning(
            "--max-model-len %d is cut to %d: the KV cache holds no longer sequence",
            options.max_model_len,
            facts.max_model_len,
        )


def _device(stage: Stage, options: WorkerOptions) -> Device:
    """Return a device that is ready to run plans. Raises DeviceError and PeerLostError."""
    size = options.tensor_parallel_size
    refusal = refuse(
        options.device, dtype=options.dtype, kv_cache_dtype=options.kv_cache_dtype, tensor_parallel_size=size
    )
    if refusal:
        raise DeviceError(refusal)
    if is_simulated(options.device):
        if options.attention_backend != "auto":
            raise DeviceError(
                f"--attention-backend {options.attention_backend}: --device {options.device} computes no attention"
            )
        from worker.sim.device import SimulatedDevice

        return SimulatedDevice(options)

    def progress(text: str, done: int = 0, total: int = 0) -> None:
        stage.progress(text, done, total)
        if stage.stopping:  # a SIGTERM came meanwhile
            stage.exit(0)

    if options.device == "cuda":
        from worker.cuda.start import start as start_gpu

        return start_gpu(options, progress, _join_gpus(stage, options))

    from worker.cpu.start import start as start_cpu

    return start_cpu(options, progress, _join(stage, size) if size > 1 else ALONE)


def _join(stage: Stage, size: int) -> Group:
    """Meet the other ranks of this model. Raises PeerLostError."""
    from worker.ranks.distributed import DistributedGroup

    return DistributedGroup(stage.address.rank, size, _rendezvous(stage))


def _join_gpus(stage: Stage, options: WorkerOptions) -> Group:
    """Take a GPU, and meet the other ranks if there are any. Raises DeviceError, PeerLostError."""
    from worker.cuda.group import join_gpus, take_gpu

    replica, rank, size = stage.address.replica, stage.address.rank, options.tensor_parallel_size
    gpu = take_gpu(replica * size + rank, options.num_workers)
    if size == 1:
        return ALONE
    return join_gpus(rank, size, _rendezvous(stage), gpu, deterministic=options.deterministic)


def _rendezvous(stage: Stage) -> Path:
    return Path(stage.config.run_dir) / f"ranks-{stage.address.replica}"
