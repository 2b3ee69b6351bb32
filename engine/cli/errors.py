"""How a command fails: with one line on stderr and an exit code, both in one place."""

import sys

FAILED = 1
USED_WRONGLY = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class CommandError(Exception):
    """The command cannot go on; the text, one line for the user, says why."""

    def __init__(self, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code


def complain(text: str) -> None:
    """Write one line to stderr."""
    sys.stderr.write(f"quintet: {text}\n")
