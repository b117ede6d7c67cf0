"""Compiling the kernels of a configuration before its steps are recorded: all cores at once, and nothing is
run.

The steps are walked as if they were recorded, with every tensor on torch's "meta" device, which has sizes and
strides but no memory. Triton specialises a kernel on types, on constants, on integers that are 1 or multiples
of 16 and on pointers that are multiples of 16, all of which are the same there. What it would compile is
noted (tens of kernels) and given to worker processes, one for each core, since compiling holds the
interpreter's lock. They know the target but never open the device. The recording finds their results in
Triton's cache on disk: kernels, and the small C modules that start them. Products for Hopper are compiled by
threads of this process meanwhile (`ops/gpu/hopper.py`).

A failure here is logged and costs only time: a kernel that is not in the cache is compiled when it is first
started.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import pkgutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITCallable

from deltic.engine.step import Progress
from deltic.machine import n_usable_cpus
from deltic.ops import gpu
from deltic.ops.gpu import hopper
from deltic.ops.gpu.chip import Chip, chip, described, device_name, override_arch
from deltic.ops.gpu.launch import INTERPRETED, bound_levers, launches
from deltic.runtime.plan import Plan

log = logging.getLogger("deltic.engine")

MAX_WORKERS = 16
LIMIT_S = 300.0
"""Seconds after which the workers are ended, and the rest is compiled by whoever needs it."""
SOURCES = ("ops/gpu", "ops/geometry.py", "ops/formats.py", "ops/matrix.py", "models", "runtime", "engine")
"""Sources within the package that decide which kernels a step starts."""


@dataclass(frozen=True)
class Job:
    """A kernel to be compiled: a function of a module, and its arguments' types as Triton writes them
    down.
    """

    module: str
    name: str
    specialisation: str

    @property
    def kernel(self) -> triton.JITFunction:
        return getattr(importlib.import_module(self.module), self.name)


@dataclass(frozen=True)
class Report:
    """Counts of kernels: how many there are, how many were not in the cache, and how many could not be
    compiled.
    """

    n_kernels: int
    n_compiled: int
    n_failed: int
    seconds: float


@contextmanager
def collecting() -> Iterator[dict[Job, None]]:
    """Launches start nothing.

    The kernels that Triton would compile for them and has not yet are noted, in their order. The target and
    the chip's sizes are those of the current device. Not to be used beside launches of other threads.
    """
    jobs: dict[Job, None] = {}
    hook = triton.knobs.runtime.jit_cache_hook

    def note(*, fn: triton.JITFunction, compile: dict[str, Any], **_: object) -> bool:
        jobs[Job(fn.module, fn.name, compile["specialization_data"])] = None
        return True  # do not compile

    launches.compile_only = True
    triton.knobs.runtime.jit_cache_hook = note
    try:
        yield jobs
    finally:
        launches.compile_only = False
        triton.knobs.runtime.jit_cache_hook = hook


def _marker(plan: Plan[Any]) -> Path:
    """The file that says that all kernels of a plan are in the cache it lies in."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for name in SOURCES:
        for file in sorted((package / name).rglob("*.[cp][uy]")) if (package / name).is_dir() else [package / name]:
            digest.update(file.read_bytes())
    sizes = [*plan.step_sizes]
    for shape in (plan.shape, plan.tower, plan.drafter):  # what these do not say of themselves
        sizes.append(sorted(f"{name} {format.name}" for name, format in getattr(shape, "formats", {}).items()))
    machine = (chip(), device_name())
    versions = (triton.__version__, torch.__version__, sys.version)
    digest.update(repr((sizes, bound_levers(), machine, versions)).encode())
    return Path(triton.knobs.cache.dir) / f"deltic-{digest.hexdigest()[:24]}.json"


def fix_keys() -> None:
    """Gives every kernel its key, in one order, before any is used; 0.1 s, the first time.

    The key of a kernel that calls functions with global constants depends, in Triton 3.6, on whether these
    were given theirs before: what a worker compiled, or another process that served other models, would not
    be found.
    """
    for name in sorted(module.name for module in pkgutil.iter_modules(gpu.__path__)):
        for function in vars(importlib.import_module(f"{gpu.__name__}.{name}")).values():
            if isinstance(function, JITCallable):
                function.cache_key  # noqa: B018


# Compiling.


class Compilation:
    """Kernels that worker processes are compiling.

    `wait` must be called before the first of them is started.
    """

    def __init__(self, n_workers: int) -> None:
        """Starts the workers, which take a few seconds to be ready."""
        self.begun = time.perf_counter()
        self.errors: list[str] = []
        self._jobs: deque[Job] = deque()
        self._n_jobs = self._n_done = self._n_compiled = 0
        self._lock = threading.Lock()
        self._stderr: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        target = triton.runtime.driver.active.get_current_target()
        of_target = target.backend, json.dumps(target.arch), str(target.warp_size)
        # Workers have no business with the device, nor with more than a core each.
        environment = {
            **os.environ,
            "TRITON_CACHE_DIR": str(triton.knobs.cache.dir),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        self._workers = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, *of_target, described.emulated],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env=environment,
            )
            for _ in range(n_workers)
        ]
        self._threads: list[threading.Thread] = []

    def give(self, jobs: list[Job]) -> None:
        """Has them compiled, the longest sources first."""
        self._jobs.extend(sorted(jobs, key=lambda job: -len(job.kernel.src)))
        self._n_jobs = len(jobs)
        self._threads = [threading.Thread(target=self._attend, args=(worker,), daemon=True) for worker in self._workers]
        for thread in self._threads:
            thread.start()

    def _attend(self, worker: subprocess.Popen[str]) -> None:
        """Gives one worker a kernel after the other."""
        assert worker.stdin is not None and worker.stdout is not None
        with suppress(OSError, IndexError, ValueError):  # no job is left, or the worker has failed
            while True:
                job = self._jobs.popleft()
                worker.stdin.write(json.dumps([job.module, job.name, job.specialisation]) + "\n")
                worker.stdin.flush()
                answer = worker.stdout.readline()
                if not answer:  # it has died
                    return
                n_compiled, error = json.loads(answer)
                with self._lock:
                    self._n_compiled += n_compiled
                    self._n_done += not error
                    self.errors += [f"{job.name}: {error}"] if error else []
        with suppress(OSError):
            worker.stdin.close()  # it ends

    def wait(self, progress: Progress) -> Report:
        """Waits until all are compiled, or no worker is left, or LIMIT_S have passed. The workers are gone
        then.
        """
        for thread in self._threads:
            while thread.is_alive() and time.perf_counter() - self.begun < LIMIT_S:
                progress("compile", self._n_done / max(1, self._n_jobs))
                thread.join(0.1)
        progress("compile", 1.0)
        self.end()
        seconds = time.perf_counter() - self.begun
        return Report(self._n_jobs, self._n_compiled, self._n_jobs - self._n_done, seconds)

    def end(self) -> None:
        """Ends the workers, whatever they do."""
        for worker in self._workers:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                with suppress(OSError):
                    assert pipe is not None
                    pipe.close()
        with self._lock:
            if not self._stderr.closed:
                self._stderr.seek(0)
                lines = self._stderr.read().strip().splitlines()
                self.errors += lines[-1:] if self._n_done < self._n_jobs else []
                self._stderr.close()


class Kernels:
    """The kernels of a plan on their way into Triton's cache, while something else is done; see
    `begin_compiling`.
    """

    def __init__(self, compilation: Compilation | None, marker: Path | None) -> None:
        self._compilation, self._marker = compilation, marker

    def wait(self, progress: Progress) -> Report | None:
        """Waits until the kernels are compiled, or cannot be. None: there was nothing to do.

        Does not raise.
        """
        if self._compilation is None:
            return None
        try:
            report = self._compilation.wait(progress)
            failed = hopper.wait()
            if report.n_failed or failed:
                log.warning(
                    "%d of %d kernels were not compiled beforehand: %s",
                    report.n_failed + len(failed),
                    report.n_kernels + len(failed),
                    "; ".join([*failed, *self._compilation.errors][:3]) or "no time was left, or no worker",
                )
            elif self._marker is not None:
                self._marker.parent.mkdir(parents=True, exist_ok=True)
                self._marker.write_text(json.dumps({"kernels": report.n_kernels}))
            return report
        except Exception:
            log.warning("kernels were not compiled beforehand", exc_info=True)
            return None


def begin_compiling(plan: Plan[Any], collect: Callable[[Plan[Any]], list[Job]], *, again: bool = False) -> Kernels:
    """Starts to compile the kernels of a plan, unless the cache is known to hold them (again: even then) or
    there is but one CPU. collect: walks the steps of such a plan.

    `wait` is to be called before a kernel is started; weights can be read meanwhile. Does not raise: what
    fails is logged.
    """
    if INTERPRETED:
        return Kernels(None, None)
    n_workers = min(MAX_WORKERS, n_usable_cpus())
    compilation = None
    try:
        fix_keys()
        marker = _marker(plan)
        if n_workers < 2 or (marker.exists() and not again):
            return Kernels(None, None)
        compilation = Compilation(n_workers)
        compilation.give(collect(plan))
        return Kernels(compilation, marker)
    except Exception:
        log.warning("kernels are not compiled beforehand", exc_info=True)
        if compilation is not None:
            compilation.end()
        return Kernels(None, None)


def compile_for(chip: Chip) -> Any:
    """Makes this process plan and compile for this chip from here on, whatever is here. It starts nothing.
    Returns the class that makes the C module of a kernel, if any.
    """
    described.chip, target = chip, chip.target
    driver = next(b.driver for b in backends.values() if b.compiler.supports_target(target))
    try:
        active: Any = driver()
    except Exception:  # no driver library: kernels can be compiled, but not what starts them
        active = SimpleNamespace(launcher_cls=None)
    # a chip is a device of its own, by which Triton keeps apart what it has compiled
    active.get_current_target, active.get_current_device = lambda: target, lambda: chip
    active.get_current_stream = lambda device: 0
    triton.runtime.driver.set_active(active)
    return active.launcher_cls


# A worker: `python -m deltic.runtime.gpu.compile BACKEND ARCH WARP_SIZE EMULATED`.


def work(target: GPUTarget, jobs: IO[str], answers: IO[str]) -> None:
    """Compiles the kernels on the lines of `jobs`, whose configurations are given. Answers each with how many
    that were not in the cache, and an error.
    """
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    launcher = compile_for(Chip(target, n_sms=0, shared_bytes=0))
    fix_keys()  # and so imports the kernels, while there is nothing to do yet
    for line in jobs:
        error = ""
        hits.clear()
        try:
            job = Job(*json.loads(line))
            kernel = job.kernel.preload(job.specialisation)
            if launcher is not None:
                launcher(kernel.src, kernel.metadata)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"[:500]
        answers.write(json.dumps([hits.count(False), error]) + "\n")
        answers.flush()


def main() -> None:
    """Runs a worker. Its answers go where stdout was. All other output goes to stderr."""
    with os.fdopen(os.dup(1), "w") as answers, suppress(KeyboardInterrupt, BrokenPipeError):
        os.dup2(2, 1)
        backend, arch, warp_size, emulated = sys.argv[1:]
        if emulated:
            override_arch(emulated)
        work(GPUTarget(backend, json.loads(arch), int(warp_size)), sys.stdin, answers)


if __name__ == "__main__":
    main()
