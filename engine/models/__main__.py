"""`python -P -m engine.models NAME --out FILE [--no-weights]`: write a manifest as JSON.

A process of its own, so that the supervisor stays lean. Progress goes to stderr, a line each; exit
status 2 and the reason on stderr when the model cannot be used.
"""

import argparse
import sys
from pathlib import Path

import msgspec

from engine.models.cache import write_atomically
from engine.models.errors import ModelError
from engine.models.progress import ProgressLines
from engine.models.resolve import prepare


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -P -m engine.models", description="Write a model's manifest as JSON.")
    parser.add_argument("name", help="directory, .gguf file, org/name or demo")
    parser.add_argument("--out", required=True, type=Path, help="where the manifest goes")
    parser.add_argument("--no-weights", action="store_true", help="only config and tokenizer are needed")
    args = parser.parse_args()
    try:
        manifest = prepare(args.name, weights_needed=not args.no_weights, progress=ProgressLines(sys.stderr))
        write_atomically(args.out.absolute(), msgspec.json.encode(manifest))
    except ModelError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
