"""`python -P -m scheduler CONFIG.json`: the scheduler's process."""

from engine.runtime.stage import Stage
from proto.ids import StageKind


def main() -> None:
    stage = Stage.boot(StageKind.SCHEDULER)
    from scheduler.loop import SchedulerLoop

    stage.run(SchedulerLoop(stage))


if __name__ == "__main__":
    main()
