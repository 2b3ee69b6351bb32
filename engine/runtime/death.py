"""Die with the supervisor, whatever this process is doing.

The supervisor holds the write end of a pipe and never writes. Its end, however it comes, closes the pipe, and
the kernel then signals whoever asked to own the read end: with SIGKILL, so that a stopped process or one
that holds the GIL in native code goes too. A pipe's flags belong to the open file description, which all
children would share by inheritance, hence the reopening through /proc.
"""

import ctypes
import fcntl
import os
import select
import signal
import stat
import sys

_F_SETSIG = 10
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def tie_to_parent(death_fd: int) -> None:
    """Arrange our death at the supervisor's. Call before heavy imports; -1 = started by hand, no tie.

    Exits at once when the supervisor is gone already.
    """
    if death_fd < 0:
        return
    try:
        own = os.open(f"/proc/self/fd/{death_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SystemExit(
            f"death pipe {death_fd} is not open (set death_fd to -1 to start a stage by hand): {error}"
        ) from error
    if not stat.S_ISFIFO(os.fstat(own).st_mode):
        raise SystemExit(f"descriptor {death_fd} is not the death pipe (set death_fd to -1 to start a stage by hand)")
    os.close(death_fd)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    # A second line of defence, for the time until now. It also fires when a wrapper ends, as it should.
    ask_for_death_signal()
    hung_up, _, _ = select.select([own], [], [], 0)
    if hung_up:
        sys.exit("the supervisor is gone")


def ask_for_death_signal() -> None:
    """Have the kernel kill this process when the thread that spawned it ends. Survives exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
