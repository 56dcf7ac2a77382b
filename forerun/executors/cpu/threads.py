"""How many threads the machine really offers this process."""

import math
import os
from pathlib import Path

MOST = 16
"""A step of a small model has some 300 barriers; beyond this they cost more than they give."""


def available_cores() -> int:
    """Physical cores this process may use: affinity, one per core, within the cgroup's quota."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if cpus is None:
        return max(1, os.cpu_count() or 1)
    cores = {_core_of(cpu) for cpu in cpus}
    quota = cgroup_quota()
    return max(1, min(len(cores), math.floor(quota) if quota else len(cores)))


def default_threads() -> int:
    """Threads an executor uses unless told otherwise."""
    return min(available_cores(), MOST)


def _core_of(cpu: int) -> str:
    """A name that all hyperthreads of one core share."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return _read(path) or f"cpu{cpu}"


def cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs' worth of time the cgroup (version 2 or 1) grants, or None for no limit."""
    both = _read(root / "cpu.max").split()
    if len(both) != 2:
        both = [
            _read(root / "cpu" / "cpu.cfs_quota_us"),
            _read(root / "cpu" / "cpu.cfs_period_us"),
        ]
    quota, period = both
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
