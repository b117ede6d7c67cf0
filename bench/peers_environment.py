"""The environment of the engines that `bench.peers` measures, and their processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers_report import Lane
from deltic.config import ConfigError
from deltic.machine import CGROUP, n_usable_cpus
from deltic.ops.cpu.instruction_sets import cpu_flags

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = {
    "llama.cpp": {"llama-cpp-python": "0.3.36"},
    "transformers": {"transformers": "5.23.0", "torch": "2.13.0", "safetensors": "0.8.0"},
}
"""What the environment of the peers holds for each, from PyPI; llama-cpp-python is built from source."""

BUILT_WITH = "llama-build"
"""The file in an environment, and in a folder of wheels, that says how llama.cpp was built."""

BUILD_FLAGS = "-DGGML_NATIVE=ON"
"""Of llama.cpp: all instructions of this machine; with its vision tools, for bench/pictures.py."""

WITHOUT_AMX = "-DGGML_NATIVE=OFF " + " ".join(
    f"-DGGML_{name}=ON"
    for name in (
        *("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2"),
        *("AVX_VNNI", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16"),
    )
)
"""Where there is AMX: everything but it.

Its kernels for Q8_0 end this version with a general protection fault (docs/log).
"""


class PeerFailed(RuntimeError):
    """A worker that ended or reported an error; the message names its log."""


class MemoryGroup:
    """A control group (version 1 or 2) in which a process has so much memory, file cache included."""

    def __init__(self, name: str, n_bytes: int, cgroup: Path = CGROUP) -> None:
        """Raises ConfigError where none can be made."""
        root = cgroup / "memory" if (cgroup / "memory").is_dir() else cgroup
        self.folder = root / f"deltic-bench-{os.getpid()}-{name}"
        limit = self.folder / ("memory.max" if root == cgroup else "memory.limit_in_bytes")
        try:
            self.folder.mkdir()
            limit.write_text(str(n_bytes))
        except OSError as error:
            self.close()
            raise ConfigError(f"--memory-gb: no control group of memory ({error}); needs root on Linux") from error

    def enter(self, command: Sequence[str]) -> list[str]:
        """A command that runs in the group."""
        return ["sh", "-c", 'echo $$ >"$0"; exec "$@"', str(self.folder / "cgroup.procs"), *command]

    def close(self) -> None:
        if self.folder.is_dir():
            self.folder.rmdir()


def forget(file: Path) -> None:
    """Has the system drop what it has read of a file, which no group's memory would count."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


class Worker:
    """The process of one lane. It runs only while it is asked."""

    def __init__(
        self, name: str, python: Path, module: str, config: dict[str, Any], log: Path, group: MemoryGroup | None = None
    ) -> None:
        self.name, self.log, self._group = name, log, group
        command = [str(python), "-m", module, json.dumps(config)]
        # In a session of its own: when a shell that started the driver in the background ends, the kernel
        # continues every stopped process of that job.
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command if group is None else group.enter(command),
                cwd=ROOT,
                text=True,
                bufsize=1,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": str(config["n_threads"])},
            )
        self.info: dict[str, Any] = self._answer()["ready"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline() or '{"error": "the process ended"}')
        if "error" in answer:
            raise PeerFailed(f"{self.name}: {answer['error']}; see {self.log}")
        self._process.send_signal(signal.SIGSTOP)
        return dict(answer)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """One request and its answer. Raises PeerFailed."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._group is not None:
            self._group.close()


def build_flags() -> str:
    """What llama.cpp is built with on this machine."""
    return WITHOUT_AMX if "amx_int8" in cpu_flags() else BUILD_FLAGS


def packages(lanes: Sequence[Lane]) -> dict[str, str]:
    """What these lanes need of the environment of the peers; llama.cpp always, which makes the files."""
    engines = [engine for engine in PACKAGES if engine == "llama.cpp" or any(engine == lane.engine for lane in lanes)]
    return {name: version for engine in engines for name, version in PACKAGES[engine].items()}


def make_environment(directory: Path, wanted: Mapping[str, str], wheels: Path | None) -> tuple[Path, dict[str, str]]:
    """The Python of an environment that holds the packages (made, or completed, when it does not) and their
    versions. wheels: a folder to install from; else PyPI. Raises ConfigError for one that does not say how
    llama.cpp was built.
    """
    python = directory / "bin" / "python"
    if not python.exists():
        print(f"making an environment for the peers in {directory}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
        (directory / ".gitignore").write_text("*\n")
    if installed(python, wanted) is None:
        print("installing " + ", ".join(f"{k} {v}" for k, v in wanted.items()), flush=True)
        flags, source = build_flags(), ["--no-binary", "llama-cpp-python"]
        if wheels is not None:
            if not (wheels / BUILT_WITH).is_file():
                raise ConfigError(
                    f"--wheels {wheels}: has no file {BUILT_WITH} with the CMAKE_ARGS of llama-cpp-python"
                )
            flags, source = (wheels / BUILT_WITH).read_text().strip(), ["--no-index", "--find-links", str(wheels)]
        is_new = installed(python, PACKAGES["llama.cpp"]) is None
        build = {"CMAKE_ARGS": flags, "CMAKE_BUILD_PARALLEL_LEVEL": str(n_usable_cpus())}
        pip = [sys.executable, "-m", "pip", "--python", str(python)]  # many systems' Python cannot make a pip
        command = [*pip, "install", *source, *(f"{k}=={v}" for k, v in wanted.items())]
        subprocess.run(command, check=True, env=os.environ | build)
        if is_new:
            (directory / BUILT_WITH).write_text(flags + "\n")
    versions = installed(python, wanted)
    if versions is None:
        raise PeerFailed(f"{directory}: packages are missing after pip install; remove the directory and start again")
    return python, versions


def built_with(directory: Path) -> str:
    """What the llama.cpp of an environment was built with."""
    said = directory / BUILT_WITH
    return said.read_text().strip() if said.exists() else "unknown flags: the environment was made by other means"


def installed(python: Path, wanted: Mapping[str, str]) -> dict[str, str] | None:
    """Versions of the peers in an environment; None when one is missing or another version."""
    script = (
        "import json, sys, importlib.metadata as m\n"
        "found = {d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}\n"
        "print(json.dumps({name: found.get(name) for name in sys.argv[1:]}))"
    )
    output = subprocess.run([python, "-c", script, *wanted], capture_output=True, text=True, check=True).stdout
    found: dict[str, str | None] = json.loads(output)
    versions = {name: version for name, version in found.items() if version is not None}
    same = all((found[name] or "").partition("+")[0] == version for name, version in wanted.items())
    return versions if same else None
