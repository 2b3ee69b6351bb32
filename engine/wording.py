"""How the supervisor tells of its stages' work and ends."""

import signal

from proto.ids import StageKind
from proto.messages import Progress


def describe_progress(progress: Progress) -> str:
    """With a percentage, where the total is known."""
    if progress.total:
        return f"{progress.text} {100 * progress.done // progress.total}%"
    return progress.text


def describe_end(status: int | None) -> str:
    """Of an exit code, or minus a signal; None = cannot be known."""
    if status is None:
        return "ended"
    if status < 0:
        return f"was killed by {_signal_name(-status)}"
    return f"ended with exit code {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def advise(status: int | None, kind: StageKind) -> str:
    """What the operator can do about such an end."""
    if status == -signal.SIGKILL:
        flags = "--num-pages or --kv-cache-memory-bytes" if kind is StageKind.WORKER else "--max-in-flight-bytes"
        return f"If nobody sent it, the kernel ran out of memory (see dmesg): lower {flags}."
    if status is not None and status < 0:
        return "It crashed in native code: please report it, with the lines above."
    return "Its log above says why; --log-level debug shows more."
