"""From nothing to the first streamed token, for a user of the package.

Each round makes an empty environment, installs the package with what it needs, starts `deltic serve` and asks
for a streamed answer. pip's cache of packages is warm: a first round, which does not count, fills it. Where
uv is installed it takes turns with pip. The last environment of each is started again and again.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from deltic.bench.provenance import code, machine, now, runs_directory

INSTALLERS = {
    "pip": ("{python} -m venv {env}", "{env}/bin/python -m pip install --quiet --no-input {wheel}"),
    "pip --no-compile": (
        "{python} -m venv {env}",
        "{env}/bin/python -m pip install --quiet --no-input --no-compile {wheel}",
    ),
    "uv": ("uv venv --quiet --python {python} {env}", "uv pip install --quiet --python {env}/bin/python {wheel}"),
}
READY_S = 60.0
QUESTION = {
    "model": "built-in",
    "stream": True,
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "Write a story about a fox."}],
}


def user_environment() -> dict[str, str]:
    """This process's, as a user's: Python writes its bytecode, and no other environment is active."""
    left_out = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in left_out}


def install(how: str, env: Path, wheel: Path) -> float:
    """Seconds to make an environment that has the package. Raises CalledProcessError."""
    begun = time.perf_counter()
    for command in INSTALLERS[how]:
        words = [word.format(python=sys.executable, env=env, wheel=wheel) for word in command.split()]
        subprocess.run(words, check=True, env=user_environment(), stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


@contextmanager
def server(env: Path) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A port and the process of a `deltic serve` that has just been started; it is ended behind the block.

    Not a LocalServer: the program is another environment's, and nothing but it may take part of its time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(env / "bin" / "deltic"), "serve", "--port", str(port)]
    process = subprocess.Popen(command, env=user_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield port, process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    """Raises RuntimeError if it ends before, or takes long."""
    deadline = time.perf_counter() + READY_S
    while time.perf_counter() < deadline and process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.003)
    raise RuntimeError("the server did not become ready")


def first_piece(port: int) -> str:
    """The first text that is streamed. Raises RuntimeError if there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/v1/chat/completions", json.dumps(QUESTION), {"Content-Type": "application/json"})
    for line in connection.getresponse():
        data = line.removeprefix(b"data: ").strip()
        if data.startswith(b"{") and (text := json.loads(data)["choices"][0]["delta"].get("content")):
            return str(text)
    raise RuntimeError("no text was streamed")


def memory_mb(process: subprocess.Popen[bytes]) -> float:
    """Of a process and its children: the proportional set size, so that what they share counts once."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    told = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in (process.pid, *children)]
    return (
        sum(int(line.split()[1]) for text in told for line in text.splitlines() if line.startswith("Pss:")) * 1024 / 1e6
    )


def size_mb(directory: Path) -> float:
    """On the disk; a file with several names counts once."""
    stats = {(stat.st_dev, stat.st_ino): stat.st_blocks for p in directory.rglob("*") if (stat := p.lstat())}
    return sum(stats.values()) * 512 / 1e6


def start(env: Path) -> dict[str, float]:
    """Seconds from the command to ready and to the first piece, and the memory behind it in MB."""
    begun = time.perf_counter()
    with server(env) as (port, process):
        until_ready(port, process)
        ready_s = time.perf_counter() - begun
        first_piece(port)
        return {"ready_s": ready_s, "first_s": time.perf_counter() - begun, "memory_mb": memory_mb(process)}


def once(how: str, wheel: Path, directory: Path, n_starts: int = 1) -> dict[str, Any]:
    """A round: from nothing to the first piece of the first start; more starts of the same environment."""
    env = directory / "env"
    shutil.rmtree(env, ignore_errors=True)
    install_s = install(how, env, wheel)
    starts = [start(env) for _ in range(n_starts)]
    size = {"size_mb": size_mb(env)}
    if pip := next(iter(env.glob("lib/python*/site-packages/pip")), None):
        size["pip_mb"] = size_mb(pip)
    return {"how": how, "install_s": install_s, "total_s": install_s + starts[0]["first_s"], **size, "starts": starts}


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m bench.install", description=__doc__)
    parser.add_argument("wheel", nargs="?", type=Path, help="the package (default: what make wheel wrote into dist)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="of each installer (default: 7)")
    parser.add_argument("--starts", type=int, default=7, metavar="N", help="of the last environment (default: 7)")
    parser.add_argument("--out", metavar="DIR", help="write the JSON result into this directory")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    arguments = parsed(given)
    built = sorted(Path("dist").glob(f"deltic-*_{platform.machine()}.whl"))
    if not (wheel := arguments.wheel or (built[-1] if built else None)):
        print("bench.install: there is no package in dist; make wheel writes one", file=sys.stderr)
        return 2
    installers = [how for how in INSTALLERS if how != "uv" or shutil.which("uv")]
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory, Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("installing", total=(arguments.rounds + 1) * len(installers))
        for i in range(arguments.rounds + 1):
            for how in installers:
                n_starts = 1 + arguments.starts if i == arguments.rounds else 1
                found = once(how, wheel.resolve(), Path(directory), n_starts)
                rounds += [found] if i else []
                progress.advance(task)
    table = Table("installer", "install, s", "to the first token, s", "then ready, s", "MB on disk", "MB in memory")
    for how in installers:
        of = [found for found in rounds if found["how"] == how]
        later = of[-1]["starts"][1:]
        columns = (
            [found["install_s"] for found in of],
            [found["total_s"] for found in of],
            [one["ready_s"] for one in later],
            [found["size_mb"] for found in of],
            [one["memory_mb"] for one in later],
        )
        table.add_row(how, *(f"{statistics.median(column):.4g}" for column in columns))
    Console().print(table)
    result = {
        "bench": "install",
        "date": now().isoformat(timespec="seconds"),
        "machine": machine(),
        "code": code(),
        "package": {"sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(), "built": wheel.stat().st_mtime},
        "rounds": rounds,
    }
    path = runs_directory(arguments.out) / f"install-{now():%H%M%S}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"bench": "install", "file": str(path)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
