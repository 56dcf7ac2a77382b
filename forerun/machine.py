"""The machine's properties: cores, instruction sets, memory. Reads files, starts nothing."""

import ctypes
import gc
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_INTERESTING = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni")
"""x86 flags that decide which kernels run; on ARM: asimddp and i8mm."""

_INTERESTING_ARM = ("asimd", "asimddp", "i8mm", "sve")


def cpu_name() -> str:
    """Return the processor's own name (/proc/cpuinfo), else the platform's."""
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_identity() -> str:
    """Return everything that decides whether machine code built here runs elsewhere: the
    processor's name and every instruction set it has.
    """
    flags = [line for line in _lines("/proc/cpuinfo") if line.startswith(("flags", "Features"))]
    return f"{platform.machine()} {cpu_name()} {flags[:1]}"


def _cpu_features() -> list[str]:
    """Return those instruction sets of this CPU that matter to the kernels."""
    for line in _lines("/proc/cpuinfo"):
        if line.startswith(("flags", "Features")):
            have = set(line.partition(":")[2].split())
            return [name for name in (*_INTERESTING, *_INTERESTING_ARM) if name in have]
    return []


def cores() -> int:
    """Return the logical CPUs that this process may use, cgroup quota included; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota, _, period = _text("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        allowed = min(allowed or 1, max(1, int(quota) // int(period)))
    return max(1, allowed or 1)


def physical_cores() -> int:
    """Return the cores that this process may use, hyperthreads of a core counted once, cgroup quota
    included; at least 1.
    """
    if not hasattr(os, "sched_getaffinity"):
        return cores()
    siblings = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    apart = {_text(siblings.format(cpu)) or str(cpu) for cpu in os.sched_getaffinity(0)}
    return min(len(apart), cores())


def _memory_total() -> int:
    """Return the most bytes of memory that this process may use (machine or cgroup, the
    smaller).
    """
    total = _page_count("SC_PHYS_PAGES")
    limit = _text("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


@contextmanager
def collected_later() -> Iterator[None]:
    """Disable garbage collection of cycles within a context: code and vocabularies that are loaded
    stay alive, and searching them for garbage takes a tenth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def trim_memory(cycles: bool = False) -> None:
    """Return freed memory to the system, as far as the C library keeps it (glibc only): loading
    leaves hundreds of megabytes.

    cycles  also collect cyclic garbage, which stops all threads, and search what is alive only here
            from now on: else every some hundred steps wait 17 ms for it, 2 without it
    """
    if cycles:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def memory_available() -> int:
    """Return the bytes that can be allocated now without swapping (machine and cgroup, the
    smaller).
    """
    available = _page_count("SC_AVPHYS_PAGES")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _text("/sys/fs/cgroup/memory.max"), _text("/sys/fs/cgroup/memory.current")
    if limit.strip().isdigit() and used.strip().isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def gpu_devices() -> list[str]:
    """Return the device files of this machine's NVIDIA GPUs, sorted; empty without one. Does not
    call the driver; on Windows, which has no such files, an installed driver counts as one.
    """
    if sys.platform == "win32":
        library = Path(r"C:\Windows\System32\nvcuda.dll")
        return [library.name] if library.exists() else []
    devices = [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()]
    devices += [path for path in (Path("/dev/dxg"),) if path.exists()]  # Linux on Windows.
    return sorted(map(str, devices))


def tpu_devices() -> list[str]:
    """Return the device files of this machine's TPU chips, sorted; [] without one. Newer ones
    appear as VFIO groups, as other devices do: those count only if Google's library is installed.
    """
    devices = [path for path in Path("/dev").glob("accel*") if path.name[5:].isdigit()]
    if find_spec("libtpu") is not None:
        devices += [path for path in Path("/dev/vfio").glob("*") if path.name.isdigit()]
    return sorted(map(str, devices))


def stamp() -> dict[str, Any]:
    """Return facts about the machine as JSON values, for every number that is measured on it:
    processor, cores, instruction sets, memory in bytes, load, system, Python.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "cpu": cpu_name(),
        "cores": cores(),
        "features": _cpu_features(),
        "memory_bytes": _memory_total(),
        "load_1min": load,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _page_count(name: str) -> int:
    if sys.platform == "win32" or name not in os.sysconf_names:
        return 8 << 30
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _lines(path: str) -> list[str]:
    return _text(path).splitlines()
