"""`python -P -m tokenizer_proc CONFIG.json`"""

from engine.runtime.stage import Stage
from proto.ids import StageKind


def main() -> None:
    stage = Stage.boot(StageKind.TOKENIZER)
    from tokenizer_proc.encoding import TokenizerError
    from tokenizer_proc.loop import TokenizerLoop

    try:
        handler = TokenizerLoop(stage)
    except TokenizerError as error:
        raise SystemExit(str(error)) from error
    stage.run(handler)


if __name__ == "__main__":
    main()
