"""One line a record, with stage and pid, on stderr; the supervisor keeps the last lines of each stage."""

import logging
import sys


def setup_logging(stage: str, level: str) -> None:
    """Configure the root logger. Levels are those of `logging`, in lower case."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            f"%(asctime)s.%(msecs)03d %(levelname).1s {stage} %(process)d %(name)s: %(message)s", datefmt="%H:%M:%S"
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
