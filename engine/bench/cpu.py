"""CPU time of processes, to the microsecond: /proc/PID/stat counts only hundredths of a second."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds on a CPU and seconds ready but waiting for one, over all living threads."""

    running: float
    waiting: float

    def __sub__(self, earlier: "CpuTime") -> "CpuTime":
        return CpuTime(self.running - earlier.running, self.waiting - earlier.waiting)


def cpu_time(pid: int | None = None) -> CpuTime:
    """Read the CPU time of a process, or of this one (proc(5), schedstat). Raises OSError when it is gone."""
    running = waiting = 0
    for task in Path(f"/proc/{pid or 'self'}/task").iterdir():
        try:
            spent = (task / "schedstat").read_text().split()
        except OSError:
            continue  # a thread that ended meanwhile
        running += int(spent[0])
        waiting += int(spent[1])
    return CpuTime(running / 1e9, waiting / 1e9)


def cpu_times(pids: Mapping[str, int]) -> dict[str, CpuTime]:
    """Read the CPU times of several processes by name."""
    return {name: cpu_time(pid) for name, pid in pids.items()}
