"""The conditions of a measurement, without which its numbers say nothing."""

import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from quintet_client import AsyncClient


def machine() -> dict[str, Any]:
    """Describe this machine, and how busy it is with other work at this moment."""
    return {
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_1min": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def command_line() -> Sequence[str]:
    """Return the flags of this run."""
    return sys.argv[1:]


async def server(client: AsyncClient) -> dict[str, Any]:
    """Describe what the server runs, and how busy it is at this moment. Raises QuintetError."""
    info, load, model = await client.get_server_info(), await client.get_load(), await client.get_model_info()
    return {
        "address": info.address,
        "versions": dict(info.versions),
        "uptime_seconds": info.uptime_seconds,
        "in_flight_requests": load.in_flight_requests,
        "model": model.model,
        "device": model.device,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "num_pages": model.num_pages,
        "page_size": model.page_size,
        "max_num_seqs": model.max_num_seqs,
        "max_num_batched_tokens": model.max_num_batched_tokens,
    }


def in_words(conditions: dict[str, Any]) -> str:
    """Write the machine's conditions as one line below a table."""
    gigabytes = conditions["memory_bytes"] / 2**30
    return (
        f"{conditions['cpus']} CPUs ({conditions['cpu']}), {gigabytes:.0f} GiB, Python {conditions['python']}, "
        f"load average {conditions['load_average_1min']:.1f} at the start"
    )


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
