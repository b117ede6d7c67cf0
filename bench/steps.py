"""Steps of `python -m bench.figures`, run one after the other or, on several GPUs, side by side."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ALL = 0
"""GPUs of a step that takes as many as there are."""
END_S = 15.0
"""How long a command that is ended may take over it."""
MOST_TOLD = 12
"""Last lines of a command that failed which are printed."""


@dataclass(frozen=True)
class Step:
    """Commands that belong together.

    `minutes`: how long they take on the machines of the kept runs, or an estimate; `python` begins each. In a
    command {out}, {scratch}, {peers}, {published}, {threads}, {gpus} and {minutes} stand for the directory of
    the results, one that is thrown away, where the peers are, the other package's Python, the machine's
    threads, how many GPUs the step has, and the minutes that it may take; {four} for four CPUs of its own.
    """

    name: str
    minutes: float
    commands: tuple[str, ...]
    gpus: int = 1
    """That it has for itself; ALL: as many as there are."""
    kind: str = ""
    """Word behind `gpu-` in the names of its results, where a table has such runs alone."""


@dataclass(frozen=True)
class Place:
    """A part of the machine that a step has for itself: a GPU and its share of the CPUs."""

    gpu: str
    cpus: frozenset[int]


def places(gpus: Sequence[str]) -> list[Place]:
    """A place for each GPU (as CUDA_VISIBLE_DEVICES names it); without any the whole machine is one."""
    cpus, n = sorted(os.sched_getaffinity(0)), max(1, len(gpus))
    shares = [frozenset(cpus[i * len(cpus) // n : (i + 1) * len(cpus) // n] or cpus) for i in range(n)]
    return [Place(gpu, share) for gpu, share in zip(gpus or [""], shares, strict=True)]


def visible_gpus() -> list[str]:
    """The GPUs that torch sees here, as CUDA_VISIBLE_DEVICES names them."""
    from torch.cuda import device_count  # a CPU's figures do without torch

    n, given = device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name for name in given.split(",") if name][:n] if given is not None else [str(i) for i in range(n)]


def worded(command: str, words: Mapping[str, object]) -> list[str]:
    """A command with its words filled in; `python` is the one that runs here."""
    parts = [part.format(**words) for part in shlex.split(command)]
    return [sys.executable if part == "python" else part for part in parts]


def stamp(path: Path, commit: str | None) -> bool:
    """Notes the commit in a result file. False: it is none, as one that was cut while it was written."""
    try:
        data = json.loads(path.read_text())
    except ValueError:
        return False
    if commit and isinstance(data, dict):
        data.setdefault("code" if "client" not in data else "client", {}).update(commit=commit, modified=False)
        path.write_text(json.dumps(data) + "\n")
    return True


@dataclass
class Figures:
    """A run of some steps. Results go to `out`; if packed, into one file there, made again as they come."""

    plan: str
    out: Path
    scratch: Path
    minutes: float
    words: Mapping[str, object]
    gpus: Sequence[str] = ()
    commit: str | None = None
    packed: bool = False
    missed: list[str] = field(default_factory=list)
    """Names of steps that failed or were passed over."""

    def __post_init__(self) -> None:
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self._processes, self._is_over = set[subprocess.Popen[bytes]](), False
        self.results = self.scratch / "results" if self.packed else self.out
        self.results.mkdir(exist_ok=True)
        self.log = self.results / f"figures-{self.plan}.log"

    @property
    def left(self) -> float:
        """Minutes."""
        return self.minutes - (time.monotonic() - self._begin) / 60

    def run(self, steps: Sequence[Step]) -> list[str]:
        """Runs the steps in their order, as many at once as there is room for; the names of those that were
        missed. One for which no time is left is passed over, one that does not end is ended.
        """
        every, waiting = places(self.gpus), list(steps)
        room, n, running = every, len(every), dict[Future[None], list[Place]]()
        try:
            with ThreadPoolExecutor(n) as pool, self._ending():
                while waiting or running:
                    while waiting and (waiting[0].gpus > n or (waiting[0].gpus or n) <= len(room)):
                        step = waiting.pop(0)
                        if self._is_passed_over(step, n, is_first=step is steps[0]):
                            continue
                        own, room = room[: step.gpus or n], room[step.gpus or n :]
                        running[pool.submit(self._take, step, own)] = own
                    for future in wait(running, timeout=30, return_when=FIRST_COMPLETED).done:
                        room = sorted(room + running.pop(future), key=every.index)
                        future.result()
                    self.pack()
        finally:
            self.pack()
        return list(dict.fromkeys(self.missed))

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Ends what runs where this one is ended."""
        try:
            yield
        except BaseException:
            self._is_over = True
            for process in list(self._processes):
                ended(process)
            raise

    def _is_passed_over(self, step: Step, n_places: int, *, is_first: bool) -> bool:
        why = ""
        if step.gpus > n_places:
            why = f"it needs {step.gpus} GPUs, of {n_places}"
        elif self.left < step.minutes * (0.5 if is_first else 1.0):
            why = f"too little time is left: {self.left:.1f} minutes, and it takes {step.minutes:g}"
        if why:
            self._say(f"{step.name}: passed over, {why}")
            self.missed.append(step.name)
        return bool(why)

    def _say(self, text: str) -> None:
        print(f"[{self.minutes - self.left:5.1f}] {text}", flush=True)

    def _take(self, step: Step, own: Sequence[Place]) -> None:
        """Runs a step's commands on these places."""
        n_cpus, names = frozenset().union(*(place.cpus for place in own)), ",".join(place.gpu for place in own)
        os.sched_setaffinity(0, n_cpus)  # of this thread, and of what it starts
        self._say(f"{step.name}: about {step.minutes:g} minutes" + f" on GPU {names}" * bool(names))
        home = self.scratch / step.name
        home.mkdir(exist_ok=True)
        budget = min(self.left, 3 * step.minutes + 1)  # longer hangs
        end = time.monotonic() + 60 * budget
        words = dict(self.words) | {"out": home, "scratch": self.scratch, "gpus": len(own)}
        words["four"] = ",".join(map(str, sorted(n_cpus)[:4]))
        words["minutes"] = f"{max(0.5, min(self.left, step.minutes) - 1):g}"
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": names} if names else {})
        for text in step.commands:
            command, at, log = worded(text, words), time.monotonic(), self.scratch / f"{step.name}.txt"
            if at >= end or self._is_over:
                self._say(f"{step.name}: no time is left for {text}")
                self.missed.append(step.name)
                break
            with log.open("w") as file:
                file.write(f"$ {shlex.join(command)}\n")
                file.flush()
                process = subprocess.Popen(
                    command, cwd=ROOT, stdout=file, stderr=file, env=environment, start_new_session=True
                )
                self._processes.add(process)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(end - at)
                why = "" if process.poll() is not None else f", ended after {time.monotonic() - at:.0f} s"
                status = ended(process)
                self._processes.discard(process)
            said = log.read_text(errors="replace").splitlines()
            self._gather(step, home, log)
            told = f": FAILED with status {status}{why}, see {self.log}" if status else ""
            self._say(f"{step.name}: {time.monotonic() - at:5.0f} s  {text}{told}")
            if status:
                self.missed.append(step.name)
                print(*said[-MOST_TOLD:], sep="\n", flush=True)

    def _gather(self, step: Step, home: Path, log: Path) -> None:
        """Moves what a command wrote to the results, with its log."""
        with self._lock:
            with self.log.open("a") as file:
                file.write(log.read_text(errors="replace"))
            log.unlink()
            for path in sorted(set(home.iterdir()) - set(home.glob("*.part"))):
                is_broken = path.suffix == ".json" and not stamp(path, self.commit)
                name = path.name.replace("gpu-", f"gpu-{step.kind}-", 1) if step.kind else path.name
                name += ".broken" if is_broken else ""
                # another step may have begun in the same second
                while (self.results / name).exists() and path.suffix == ".json":
                    name = f"{Path(name).stem}-{step.name}.json"
                shutil.move(path, self.results / name)

    def pack(self) -> None:
        """Writes all results and logs there are into one file, with those of steps that run."""
        if not self.packed:
            return
        with self._lock:
            target = self.out / f"figures-{self.plan}.tgz"
            part = target.with_suffix(".part")
            files = {str(path.relative_to(self.results)): path for path in sorted(self.results.rglob("*"))}
            for path in sorted((*self.scratch.glob("*.txt"), *self.scratch.glob("*/*.json"))):
                if path.parent != self.results:
                    files[f"running/{path.parent.name}-{path.name}"] = path
            with tarfile.open(part, "w:gz") as archive:
                for name, path in files.items():
                    if path.is_file():
                        added, content = tarfile.TarInfo(name), path.read_bytes()  # it may grow meanwhile
                        added.size = len(content)
                        archive.addfile(added, io.BytesIO(content))
            part.replace(target)


def ended(process: subprocess.Popen[bytes]) -> int:
    """Ends a command and what it started, if it still runs; its status."""
    for signal_number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
    return process.wait()
