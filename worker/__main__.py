"""`python -P -m worker CONFIG.json`: the worker's process."""

from engine.runtime.stage import Stage
from proto.ids import StageKind


def main() -> None:
    stage = Stage.boot(StageKind.WORKER)
    from worker.start import play

    play(stage)


if __name__ == "__main__":
    main()
