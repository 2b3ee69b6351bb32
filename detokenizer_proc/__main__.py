"""`python -P -m detokenizer_proc CONFIG.json`"""

from engine.runtime.stage import Stage
from proto.ids import StageKind


def main() -> None:
    stage = Stage.boot(StageKind.DETOKENIZER)
    from detokenizer_proc.loop import DetokenizerLoop
    from detokenizer_proc.vocabulary import VocabularyError

    try:
        handler = DetokenizerLoop(stage)
    except VocabularyError as error:
        raise SystemExit(str(error)) from error
    stage.run(handler)


if __name__ == "__main__":
    main()
