"""A text model on several GPUs: a runner on each, all of which run the same steps, and what makes them one
for the engine.

Each runner has a thread. It knows the whole step, has a table and recordings of its own, and draws every
token itself. What GPUs have to tell each other, kernels do (ops/gpu/all_reduce.py). A thread each, and not
one for all: what waits for its GPU, as a copy from memory that is not pinned, waits for the others' kernels,
too, and these must be started meanwhile. The engine's thread hands a step out and waits for all of them.

Where one runner fails and others do not, these wait on their GPUs for good. So the engine is told that it has
lost its runner, and its process ends (RunnerLostError).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from deltic.engine.cache.tiers import Bytes, Tiers
from deltic.engine.engine import LoadedAdapters
from deltic.engine.events import ExpertStats
from deltic.engine.messages import Picture
from deltic.engine.pictures import PictureEncoder
from deltic.engine.step import Progress, RunnerLostError, Step, StepResult, silent
from deltic.models.dflash.weights import DrafterWeights
from deltic.models.qwen.weights import Weights
from deltic.models.vision.pixels import PictureRules
from deltic.models.vision.weights import VisionWeights
from deltic.ops.geometry import PAGE_SIZE
from deltic.ops.gpu.all_reduce import apart, let_reach
from deltic.ops.gpu.launch import allocate_in_host, allocate_on, bound_levers
from deltic.runtime.gpu.adapters import open_adapters
from deltic.runtime.gpu.buffers import exchanges, gpu_workspace, meeting
from deltic.runtime.gpu.copies import DeviceCopies, open_tiers
from deltic.runtime.gpu.pictures import PictureTower
from deltic.runtime.gpu.text import GpuTextRunner
from deltic.runtime.plan import TextPlan
from deltic.runtime.stages import Neighbours

GRACE_S = 5.0
"""Seconds that a runner that has not failed may take to end, or to fail as well, once another has failed."""

T = TypeVar("T")


class GpuThread:
    """A thread whose current GPU is this one. It ends with the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=str(device), daemon=True).start()

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Queues the call behind those that are queued. It runs by the levers that are bound here."""
        future: Future[T] = Future()
        self._calls.put((partial(copy_context().run, call), future))
        return future

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while True:
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:  # given to who waits for it
                future.set_exception(error)
            del call, future  # a runner that nobody has any more is not held until the next call


def together(threads: Sequence[GpuThread], calls: Sequence[Callable[[], T]]) -> list[T]:
    """Returns what the calls give, one on each thread. Raises the error of all of them, or RunnerLostError if
    only some have failed, or each in its own way: they are not at the same place then.
    """
    futures = [thread.start(call) for thread, call in zip(threads, calls, strict=True)]
    wait(futures, return_when=FIRST_EXCEPTION)
    if any(future.done() and future.exception() for future in futures):
        wait(futures, timeout=GRACE_S)
        errors = [future.exception() if future.done() else None for future in futures]
        failed = next(error for error in errors if error is not None)
        if len({f"{type(error)} {error}" for error in errors}) > 1:
            at = ", ".join(str(i) for i, error in enumerate(errors) if error is not None)
            raise RunnerLostError(f"GPU {at} of {len(futures)} failed: {type(failed).__name__}: {failed}") from failed
        raise failed
    return [future.result() for future in futures]


class ParallelRunner:
    """The engine's runner of a model on several GPUs. Not thread-safe: one engine loop owns it."""

    neighbours: Neighbours | None = None
    """Neighbours that it has none of: a model on several machines has one GPU on each."""

    def __init__(
        self,
        plan: TextPlan,
        devices: Sequence[torch.device],
        weights: Sequence[list[Weights]],
        progress: Progress = silent,
        vision: tuple[VisionWeights, PictureRules] | None = None,
        drafters: Sequence[DrafterWeights] = (),
    ) -> None:
        """weights: of each GPU's parts. vision: as for one GPU. The first has it. drafters: of each GPU, if
        there is a block drafter.

        Raises KernelError for GPUs that do not reach each other's memory, unless the lever says that they
        meet in the host's.
        """
        if bound_levers().peer:
            let_reach(devices)
        in_host = None if bound_levers().peer else meeting(plan, allocate_in_host, is_in_host=True)
        self.plan, self.levers = plan, bound_levers()
        self._threads = [GpuThread(device) for device in devices]
        plans = [plan.of_gpu(i) for i in range(len(devices))]
        workspaces = [gpu_workspace(p, allocate_on(d)) for p, d in zip(plans, devices, strict=True)]
        found = exchanges(workspaces, plan.cuts, in_host)
        self.runners: list[GpuTextRunner] = []
        with apart([part for exchange in found for part in exchange.meetings]):
            for i, thread in enumerate(self._threads):  # one after another, which recording needs
                own = drafters[i] if drafters else None
                make = partial(GpuTextRunner, plans[i], weights[i], exchange=(workspaces[i], found[i]), drafter=own)
                part = partial(part_of_progress, progress, i, len(devices))
                self.runners.append(thread.start(partial(make, part, None if i else vision)).result())
            # Behind all recordings: before each of them torch gives back memory that it keeps, on every GPU.
            for thread, runner in zip(self._threads, self.runners, strict=True):
                thread.start(runner.walk).result()
        first = self.first = self.runners[0]
        self.max_logit_rows = first.max_logit_rows
        self.tiers: Tiers | None = None
        self.pictures: PictureEncoder | None = None
        memory = [part for runner in self.runners for part in runner.adapter_memory]
        self.adapters: LoadedAdapters | None = open_adapters(plan, memory) if memory else None
        self.pools = first.pools
        for runner in self.runners[1:]:  # the first one reads hidden states for all
            runner.pools = None
        self.info, self.replays = first.info, first.replays  # info is of all GPUs; each replays the same
        if first.tower is not None:
            self.pictures = SharedTower(first.tower, self.runners, self._threads[0])
        self._lost: RunnerLostError | None = None

    @property
    def experts(self) -> ExpertStats | None:
        """Counts experts as a GpuRunner does: each GPU uses the same. Bytes are those of all links."""
        found = [runner.outside.seen for runner in self.runners if runner.outside is not None]
        return ExpertStats(*found[0][:2], *map(sum, zip(*(of[2:] for of in found), strict=True))) if found else None

    def on_all(self, call: Callable[[GpuTextRunner], T]) -> list[T]:
        """Returns what the call gives for the runner of each GPU. Raises RunnerLostError."""
        if self._lost is not None:  # a thread may never answer again
            raise self._lost
        try:
            return together(self._threads, [partial(call, runner) for runner in self.runners])
        except RunnerLostError as error:
            self._lost = error
            raise

    def step(self, step: Step) -> StepResult:
        """Runs a step as a GpuRunner does. Raises RunnerLostError."""
        return self.on_all(lambda runner: runner.step(step))[0]

    def is_busy(self) -> bool:
        """Answers as a GpuRunner does."""
        return self.first.is_busy()

    def open_tiers(self, directory: Path | None, disk_bytes: int, model: str) -> Tiers:
        """Opens the tiers as a GpuRunner does. A page on the host is that of each GPU, one
        behind the other.
        """
        copies = JointCopies([runner.copies() for runner in self.runners])
        self.tiers = open_tiers(copies, self.plan, directory, disk_bytes, model)
        return self.tiers


def part_of_progress(progress: Progress, i: int, n: int, stage: str, done: float) -> None:
    """Tells `progress` of the i-th of n parts of a stage."""
    progress(stage, (i + done) / n)


class JointCopies:
    """Implements `tiers.Copies` for a page, or a state, of which each GPU has a part."""

    def __init__(self, parts: Sequence[DeviceCopies]) -> None:
        self._parts = parts

    @property
    def state_bytes(self) -> int:
        return sum(part.state_bytes for part in self._parts)

    def page(self, index: int) -> list[Bytes]:
        return [view for part in self._parts for view in part.page(index)]

    def state(self, state_slot: int) -> list[Bytes]:
        return [view for part in self._parts for view in part.state(state_slot)]

    def mark(self) -> list[torch.cuda.Event | None]:
        """Marks all that was put on the streams of the steps up to now."""
        return [part.mark() for part in self._parts]

    def fetch(self, kind: str, index: int, mark: list[torch.cuda.Event | None]) -> None:
        for part, own in zip(self._parts, mark, strict=True):
            part.fetch(kind, index, own)

    def store(self, kind: str, index: int, mark: list[torch.cuda.Event | None]) -> None:
        for part, own in zip(self._parts, mark, strict=True):
            part.store(kind, index, own)


class SharedTower:
    """The engine's PictureEncoder: the first GPU's tower, whose tokens all of them get."""

    def __init__(self, tower: PictureTower, runners: Sequence[GpuTextRunner], thread: GpuThread) -> None:
        self._tower, self._runners, self._thread = tower, runners, thread
        self._blocks: list[int] = []

    @property
    def n_blocks(self) -> int:
        return self._tower.n_blocks

    def begin(self, picture: Picture, blocks: list[int]) -> None:
        self._blocks = blocks
        self._thread.start(lambda: self._tower.begin(picture, blocks)).result()

    def run(self, seconds: float) -> bool:
        return self._thread.start(lambda: self._run(seconds)).result()

    def _run(self, seconds: float) -> bool:
        is_done = self._tower.run(seconds)
        if is_done:
            for runner in self._runners[1:]:
                self._copy_to(runner)
        return is_done

    def _copy_to(self, runner: GpuTextRunner) -> None:
        first, rows, target = self._runners[0], self._runners[0].workspace.picture_rows, runner.workspace.picture_rows
        assert rows is not None and target is not None
        with torch.cuda.stream(first.stream), torch.cuda.stream(runner.stream):
            for block in self._blocks:
                some = slice(block * PAGE_SIZE, (block + 1) * PAGE_SIZE)
                target[some].copy_(rows[some], non_blocking=True)
