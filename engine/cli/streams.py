"""The three standard streams, in whatever state the command's caller left them."""

import os
import sys


def open_missing() -> None:
    """Let closed streams read nothing and swallow what is written, as /dev/null does.

    Otherwise the next file or socket takes the free number, and what is meant for a stream ends up in it.
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
    """Nobody takes what stdout still holds; without this the interpreter complains of it at its exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.__stdout__.fileno() if sys.__stdout__ is not None else 1)
    os.close(null)
