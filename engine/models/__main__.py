"""`python -P -m engine.models NAME --out FILE [--no-weights]`: write a manifest as JSON.

A process of its own, so that the supervisor stays lean. Progress goes to stderr, a line each; exit
status 2 and the reason on stderr when the model cannot be used.
"""

import argparse
import sys
import time
from pathlib import Path

import msgspec

from engine.models.cache import write_atomically
from engine.models.errors import ModelError
from engine.models.resolve import prepare

_LINE_SECONDS = 1.0


class _Lines:
    """Prints progress: every new text, and its numbers once a second."""

    def __init__(self) -> None:
        self._text = ""
        self._next = 0.0

    def __call__(self, text: str, done: int, total: int) -> None:
        now = time.monotonic()
        if text == self._text and now < self._next and done < total:
            return
        self._text, self._next = text, now + _LINE_SECONDS
        amount = f" {done / 1e6:.1f}/{total / 1e6:.1f} MB" if total else ""
        print(f"{text}{amount}", file=sys.stderr, flush=True)  # noqa: T201


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -P -m engine.models", description=__doc__.splitlines()[0])
    parser.add_argument("name", help="directory, .gguf file, org/name or demo")
    parser.add_argument("--out", required=True, type=Path, help="where the manifest goes")
    parser.add_argument("--no-weights", action="store_true", help="only config and tokenizer are needed")
    args = parser.parse_args()
    try:
        manifest = prepare(args.name, weights_needed=not args.no_weights, progress=_Lines())
        write_atomically(args.out.absolute(), msgspec.json.encode(manifest))
    except ModelError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
