"""Provenance of a measurement, and the check that it is one.

Machine, time and code go into every result file. A figure counts where each answer had the length that was
asked for: answers that end early leave the others more of the machine, or nothing to measure.
"""

from __future__ import annotations

import datetime
import json
import platform
import re
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import deltic
from deltic.engine.messages import Output
from deltic.json_types import JsonObject
from deltic.machine import cpu_model, cpuinfo, n_usable_cpus


def machine() -> JsonObject:
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


def code() -> JsonObject:
    """Version of this code and, in a checkout, its commit and whether files differ from it."""
    root = Path(deltic.__file__).parent.parent
    version: JsonObject = {"version": deltic.__version__}
    if (root / ".git").exists():
        git = ["git", "-C", str(root)]
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
        if commit.returncode == 0:
            status = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True)
            version |= {"commit": commit.stdout.strip(), "modified": bool(status.stdout.strip())}
    return version


def now() -> datetime.datetime:
    """Local time with its zone, to the second."""
    return datetime.datetime.now().astimezone().replace(microsecond=0)


def runs_directory(out: str | Path | None) -> Path:
    """`out`, or bench/runs/<date>-<machine> under the working directory; made when missing."""
    path = Path(out) if out else Path("bench/runs") / f"{now():%Y-%m-%d}-{machine_name()}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def writer(bench: str, shape: str, device: str, out: str | Path | None, **head: object) -> Callable[..., None]:
    """Returns what writes a result's file under runs_directory(out), as often as more is measured.

    The file says `incomplete` until it is written with is_whole=True: a run that was cut makes no table.
    """
    path = runs_directory(out) / f"{bench}-{shape.replace('/', '-')}-{now():%H%M%S}.json"
    made: JsonObject = {"bench": bench, "date": now().isoformat(timespec="seconds"), "shape": shape, "device": device}
    made |= {"torch": version("torch"), "machine": machine(), "code": code()} | head

    def write(is_whole: bool = False, **result: object) -> None:
        part = path.with_suffix(".part")
        cut: JsonObject = {} if is_whole else {"incomplete": True}
        part.write_text(json.dumps(made | cut | result, indent=1, default=str) + "\n")
        part.replace(path)  # who reads meanwhile has the one or the other
        if is_whole:
            print(path)

    return write


def fault_of(reason: str | None, n_tokens: int, asked: int) -> str:
    """Returns why an answer that was to have exactly `asked` tokens is no measurement; "" where it is one.

    n_tokens: 0 where nobody counted them.
    """
    is_whole = reason == "length" and n_tokens in (0, asked)
    return "" if is_whole else f"an answer of {asked} tokens ended after {n_tokens}, as {reason!r}"


def checked(outputs: list[Output], n: int | None = None) -> list[Output]:
    """The outputs of a step of sequences that are to end at their length only. n: how many draw in it.

    Raises RuntimeError where one failed or ended otherwise, or where others drew: it is no measurement.
    """
    for output in outputs:
        if output.finish_reason not in (None, "length"):
            why = output.error or f"it ended as {output.finish_reason!r} before its length"
            raise RuntimeError(f"sequence {output.id}: {why}")
    if n is not None and len({output.id for output in outputs if output.token_ids}) != n:
        raise RuntimeError(f"a step in which {len(outputs)} of {n} sequences drew")
    return outputs
