"""What a measurement was made on: machine, time and code, as it goes into every result file."""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import deltic
from deltic.machine import cpu_model, cpuinfo, n_usable_cpus


def machine() -> dict[str, Any]:
    """CPU's name and its family/model numbers, instruction sets that matter to the kernels, usable cores,
    memory in GB, system.
    """
    has = set(cpuinfo("flags").split())
    meminfo = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    total = re.search(r"^MemTotal:\s*(\d+) kB", meminfo, re.MULTILINE)
    return {
        "cpu": cpu_model(),
        "cpu_id": f"{cpuinfo('cpu family')}/{cpuinfo('model')}",
        "cores": n_usable_cpus(),
        "memory_gb": round(int(total[1]) / 2**20, 1) if total else None,
        "isa": [name for name in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16") if name in has],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def machine_name() -> str:
    """A short name for directories: CPU model and usable cores."""
    words = re.sub(r"\(.*?\)|@.*|\b(cpu|processor|intel|amd)\b", " ", cpu_model(), flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:32].strip("-") + f"-{n_usable_cpus()}c"


def code() -> dict[str, Any]:
    """Version of this code and, in a checkout, its commit and whether files differ from it."""
    root = Path(deltic.__file__).parent.parent
    found: dict[str, Any] = {"version": deltic.__version__}
    if (root / ".git").exists():
        git = ["git", "-C", str(root)]
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
        if commit.returncode == 0:
            status = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True)
            found |= {"commit": commit.stdout.strip(), "modified": bool(status.stdout.strip())}
    return found


def now() -> datetime.datetime:
    """Local time with its zone, to the second."""
    return datetime.datetime.now().astimezone().replace(microsecond=0)


def runs_directory(out: str | None) -> Path:
    """`out`, or bench/runs/<date>-<machine> under the working directory; made when missing."""
    path = Path(out) if out else Path("bench/runs") / f"{now():%Y-%m-%d}-{machine_name()}"
    path.mkdir(parents=True, exist_ok=True)
    return path
