"""How busy the machine is with other work, from /proc (Linux; elsewhere it counts as idle).

A pool of as many threads as there are CPUs loses far more than another process takes: every barrier waits for
the thread that was put aside. So a figure is worth something only with the CPUs to itself, and each one
records whether it had them.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Reading:
    """Seconds: wall clock, CPU time of everything (time stolen by the host included) and of one process."""

    wall_s: float
    all_s: float
    own_s: float


def read(pid: int | None = None) -> Reading:
    """Now; of the process with its threads when given."""
    if not STAT.exists():
        return Reading(time.monotonic(), 0.0, 0.0)
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, STAT.read_text().split()[1:9])
    own = 0
    if pid is not None:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        own = int(after_name[11]) + int(after_name[12])  # utime, stime
    return Reading(time.monotonic(), (user + nice + system + irq + softirq + steal) / tick, own / tick)


def others(before: Reading, after: Reading) -> float:
    """CPUs that other work kept busy between two readings of the same process; ticks are coarse, so small is
    nothing.
    """
    took = after.wall_s - before.wall_s
    return max(0.0, (after.all_s - before.all_s) - (after.own_s - before.own_s)) / max(took, 1e-9)


def wait_until_idle(most: float, patience_s: float, look_s: float = 0.5) -> float:
    """Waits until other work keeps at most `most` CPUs busy, or patience ends; returns the seconds waited."""
    start = time.monotonic()
    while time.monotonic() - start < patience_s:
        before = read()
        time.sleep(look_s)
        if others(before, read()) <= most:
            break
    return time.monotonic() - start
