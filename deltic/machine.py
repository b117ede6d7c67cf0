"""The machine as this process may use it: CPUs and their quotas, free memory and its limits, the CPU's name.

Imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import resource
import sys
import threading
import typing
from collections.abc import Iterator
from pathlib import Path

CPUS: tuple[int, ...] = tuple(
    sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
)
"""The CPUs this process may use, as it was started: a thread that is pinned later sees only its own."""


MAX_THREADS = 256
"""The thread pool's array of tickets (csrc/pool.cpp, MAX_THREADS) has as many."""


NICENESS = 10
"""Niceness of threads that work beside the steps, which go first."""


PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
"""Directories in which the kernel tells of processes and of control groups."""


def cuda_driver() -> ctypes.CDLL | None:
    """The library of the NVIDIA driver; None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def be_nice() -> None:
    """Has the calling thread go behind the steps, where a thread has a niceness of its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def n_usable_cpus(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """CPUs this process may use, as threads to start: its affinity mask, and the container's quota when there
    is one; at most MAX_THREADS.

    A quota of a CPU and a half is one thread: two would be stopped for a quarter of each period, and a step
    waits for the last of them.
    """
    n_cpus = len(CPUS)
    for group in _control_groups("cpu", proc, cgroup):
        for quota in (_quota(group / "cpu.max"), _quota(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")):
            n_cpus = int(min(n_cpus, max(1.0, quota)))
    return min(n_cpus, MAX_THREADS)


def _control_groups(controller: str, proc: Path, cgroup: Path) -> Iterator[Path]:
    """Directories of the control groups of this process that may limit it, each tree from the process's own
    group up to the root.

    `cgroup` mounts version 2 (one tree), or version 1 (a tree for each controller), or both side by side.
    Inside a container the path may be one of the host's that is not mounted: the root of what is mounted is
    then the container's own group.
    """
    lines = [line.split(":", 2) for line in _lines(proc / "self/cgroup")]
    groups = {name: path for _, names, path in lines for name in names.split(",")}  # version 2 has no name
    for mounted in cgroup, cgroup / "unified":
        yield from _up(mounted, groups.get("", "/"))
    for mounted in cgroup / controller, cgroup / "cpu,cpuacct":
        if controller in mounted.name.split(","):
            yield from _up(mounted, groups.get(controller, "/"))


def _up(mounted: Path, path: str) -> list[Path]:
    """The directory of a control group and those above it, the root of the mount last."""
    group = mounted / path.strip("/")
    return [group, *(above for above in group.parents if above.is_relative_to(mounted))]


def _quota(*files: Path) -> float:
    """Quota over period, in one file or two; infinite where there is no limit ("max", or -1)."""
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError):
        return math.inf


class FreeMemory(typing.NamedTuple):
    """Memory that this process may still take."""

    bytes: int
    limit: str
    """Source of the bound, in words for behind the figure; empty where it is the machine."""


def free_memory_bytes() -> int:
    """Bytes this process may still take, see `free_memory`."""
    return free_memory().bytes


def memory_bound() -> str:
    """The limit that `free_memory_bytes` follows, as " under ..." to put after its figure; empty where that
    is the machine's memory.
    """
    limit = free_memory().limit
    return f" under {limit}" if limit else ""


def free_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> FreeMemory:
    """Bytes that this process may still take.

    That is the machine's available memory, or less under a limit of the process or of a control group that it
    is in, at any level.

    The file cache counts as free in a group, too: the kernel drops it when memory is asked for, and a
    checkpoint that was just downloaded is all file cache.
    """
    free = [FreeMemory(int(_table(proc / "meminfo")["MemAvailable:"]) * 1024, "")]
    for group in _control_groups("memory", proc, cgroup):
        for file, usage, cache in MEMORY_FILES:
            try:
                limit = int((group / file).read_text())  # "max" where there is none
                used = int((group / usage).read_text())
            except (OSError, ValueError):
                continue
            stat = _table(group / "memory.stat")
            left = limit - used + sum(int(stat.get(line, 0)) for line in cache)
            name = "/" + "/".join(group.relative_to(cgroup).parts)
            free.append(FreeMemory(max(0, left), f"{file} of the control group {name}, {limit / 1e9:.1f} GB"))
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        taken = sum(int(line.split()[0]) for line in _lines(proc / "self/statm")) * resource.getpagesize()
        free.append(FreeMemory(max(0, addresses - taken), f"RLIMIT_AS (ulimit -v), {addresses / 1e9:.1f} GB"))
    return min(free)


_FILE_CACHE = ("inactive_file", "active_file")


MEMORY_FILES = (
    ("memory.max", "memory.current", _FILE_CACHE),
    # Beyond it the kernel slows the group down until it hardly moves.
    ("memory.high", "memory.current", _FILE_CACHE),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
"""A group's limit, its usage, and the lines of `memory.stat` that are file cache; cgroup v2, then v1."""


def n_oom_kills(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Processes of this process's control group that the kernel has ended for want of memory; None where it
    does not say.
    """
    for group in _control_groups("memory", proc, cgroup):
        for file in "memory.events", "memory.oom_control":  # cgroup v2, v1
            if count := _table(group / file).get("oom_kill"):
                return int(count)
    return None


def _table(path: Path) -> dict[str, str]:
    """First and second word of each line; nothing of a file that cannot be read."""
    rows = (line.split() for line in _lines(path))
    return {row[0]: row[1] for row in rows if len(row) > 1}


def _lines(path: Path) -> list[str]:
    """Returns the lines of a file; none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def cpu_model() -> str:
    """The CPU's name as the system gives it."""
    return cpuinfo("model name") or platform.processor() or platform.machine()


def cpuinfo(field: str) -> str:
    """A field of the first CPU in /proc/cpuinfo; empty where there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.partition(":")[0].strip() == field:
                return line.partition(":")[2].strip()
    return ""
