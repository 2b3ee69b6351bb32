"""`python -P -m worker CONFIG.json`: load a model, then run the scheduler's plans."""

from engine.runtime.stage import Stage
from proto.ids import StageKind

stage = Stage.boot(StageKind.WORKER)  # before heavy imports: the death pipe and the inbox come first

import logging  # noqa: E402

from proto.config import WorkerOptions  # noqa: E402
from worker.device import Device, DeviceError  # noqa: E402
from worker.loop import WorkerLoop, facts_of  # noqa: E402

log = logging.getLogger("worker")


def progress(text: str, done: int = 0, total: int = 0) -> None:
    """Report a step of loading; a SIGTERM that came meanwhile ends the stage here."""
    stage.progress(text, done, total)
    if stage.stopping:
        stage.exit(0)


def load_simulated(options: WorkerOptions) -> Device:
    """Without torch, so that it starts at once."""
    from worker.simulated import SimulatedDevice

    return SimulatedDevice(options)


def load_model(options: WorkerOptions) -> Device:
    """Weights into memory. A file that cannot be used ends the stage with a line that names it."""
    from worker.law import LawError
    from worker.loader import LoadError
    from worker.runner import Runner
    from worker.torch_forward import TorchForward

    try:
        return Runner(TorchForward.load(options, progress), options)
    except (LoadError, LawError) as error:
        raise DeviceError(str(error)) from error


def main() -> None:
    options = stage.options
    assert isinstance(options, WorkerOptions)
    try:
        device = load_simulated(options) if options.device.startswith("sim:") else load_model(options)
    except DeviceError as error:
        log.critical("%s", error)
        stage.exit(2)
    except Exception:
        log.critical("this stage dies of a bug while it loads", exc_info=True)
        stage.exit(4)
    loop = WorkerLoop(stage, device)
    stage.ready(facts_of(device, options))
    stage.run(loop)


main()
