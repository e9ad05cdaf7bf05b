"""The machine that something was measured on, and the memory of a process there."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "skorch", "distributed", "numpy")


def describe() -> dict[str, str]:
    """Processor, cores, and the versions that matter for speed."""
    return {
        "processor": _processor(),
        "cores": str(n_cores()),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def n_cores() -> int:
    """How many cores this process may use."""
    return len(cores_of_process())


def cores_of_process() -> tuple[int, ...]:
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def peak_memory() -> int:
    """The most bytes of memory that this process has had at a time."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        import resource  # also counts what the process had before it became this program

        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(kib)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
