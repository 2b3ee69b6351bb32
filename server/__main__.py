"""The server stage: `python -P -m server CONFIG.json`."""

from engine.runtime.stage import Stage
from proto.ids import StageKind


def main() -> None:
    stage = Stage.boot(StageKind.SERVER)
    from server.app import run  # after the tie to the parent: grpc is a heavy import

    run(stage)


if __name__ == "__main__":
    main()
