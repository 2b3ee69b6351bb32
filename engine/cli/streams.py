"""The three standard streams, in whatever state the caller left them."""

import os
import sys


def open_missing() -> None:
    """Replace closed streams with /dev/null.

    Otherwise the next file or socket takes the free number, and output meant for a stream ends up in it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def give_up_stdout() -> None:
    """Discard what stdout still holds, which the interpreter would complain about at its exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.__stdout__.fileno() if sys.__stdout__ is not None else 1)
    os.close(null)
