"""Steps as CUDA graphs: recorded once, replayed from then on. And the time that something takes."""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from deltic.engine.events import ReplayStats
from deltic.ops.gpu.launch import bound_levers, launches

Body = Callable[[], object]
"""Starts the kernels of a step, neither waiting nor allocating."""


@dataclass(eq=False)
class Recording:
    """A step that can be replayed, and what it starts."""

    body: Body
    n_launches: int
    replays: ReplayStats
    """Counts of all recordings that belong to one model."""
    graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Starts it."""
        self.replays.n_replayed += 1
        self.body()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Lets Python collect nothing meanwhile: CUDA ends a capture during which an older recording is freed."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def record_all(
    bodies: list[Body],
    stream: torch.cuda.Stream | None,
    progress: Callable[[float], None],
    replays: ReplayStats,
    are_replayed: bool = False,
) -> list[Recording]:
    """Records each for replays on this stream, by the levers that are bound; the largest come first, so that
    the smaller ones find their memory in the pool. stream: None without a GPU, where each stays as it is, and
    is interpreted. replays: the model's, which counts them.

    Each is run once before, which compiles new kernels: no sequence may have rows in it. are_replayed: and
    once as recorded, for which the device makes room the first time.
    """
    levers = bound_levers()
    bodies = [levers.bound()(body) for body in bodies]  # those that are not replayed keep them
    replays.n_recorded += len(bodies)
    if stream is None:
        return [Recording(body, 0, replays) for body in bodies]
    torch.cuda.synchronize()  # what was allocated and copied so far was on another stream
    pool, recordings = torch.cuda.graph_pool_handle(), list[Recording]()
    with torch.cuda.stream(stream), _without_collections():
        for i, body in enumerate(bodies):
            launches.n = 0
            body()
            recording = Recording(body, launches.n, replays)
            if levers.graphs:
                torch.cuda.synchronize()
                recording.graph = torch.cuda.CUDAGraph(keep_graph=True)  # so that its nodes can be counted
                with torch.cuda.graph(
                    recording.graph, pool=pool, stream=stream, capture_error_mode="thread_local"
                ):  # threads of other models may go on
                    body()
                recording.graph.instantiate()
                recording.body = recording.graph.replay
                if are_replayed:
                    recording.body()
            recordings.append(recording)
            progress((i + 1) / len(bodies))
    torch.cuda.synchronize()
    return recordings


Variant = Literal[
    "decode", "drafted decode", "adapted decode", "draw", "late draw", "prefill", "adapted prefill",
    "draft keys", "first guess", "next guess", "block",
]  # fmt: skip
"""Names of what recordings start. A drafted decode may have several rows of a sequence; in an adapted one
rows may have adapters, too.
"""


class Recordings:
    """The recorded steps of a model, by what they start, how many rows or blocks they have, and up to how
    many keys.
    """

    def __init__(self, row_sizes: Items[int], block_sizes: Items[int], lengths: Items[int]) -> None:
        """row_sizes: of decodes and draws. block_sizes: of prefills. lengths: most keys of a row of a decode.
        All ascend.
        """
        self.row_sizes, self.block_sizes, self.lengths = row_sizes, block_sizes, lengths
        self.made: dict[tuple[Variant, int, int], Recording] = {}
        """Recordings by what they start, rows or blocks, and most keys: 0 but for decodes."""
        self._bodies: dict[tuple[Variant, int, int], Body] = {}

    def add(self, variant: Variant, n: int, body: Body, length: int = 0) -> None:
        """Adds what is to be recorded; of one variant, the largest come first."""
        self._bodies[variant, n, length] = body

    def add_decodes(self, variant: Variant, most: int, body: Callable[[int, int], Body]) -> None:
        """Adds decodes of up to `most` rows. body: makes one of so many rows and keys."""
        for length in reversed(self.lengths):
            for n in reversed(self.row_sizes):
                if n <= most:
                    self.add(variant, n, body(n, length), length)

    def record(
        self,
        stream: torch.cuda.Stream | None,
        progress: Callable[[float], None],
        replays: ReplayStats,
        are_replayed: bool = False,
    ) -> None:
        """Records all that was added, as `record_all` does."""
        recorded = record_all([*self._bodies.values()], stream, progress, replays, are_replayed)
        self.made = dict(zip(self._bodies, recorded, strict=True))
        self._bodies.clear()

    def size(self, n_rows: int) -> int:
        """Returns the rows of the smallest recordings for so many."""
        return self.row_sizes[bisect_left(self.row_sizes, n_rows)]

    def decode(self, n_rows: int, n_keys: int, variant: Variant = "decode") -> Recording:
        """Returns the smallest forward of so many rows, none with more than n_keys keys."""
        return self.made[variant, self.size(n_rows), self.lengths[bisect_left(self.lengths, n_keys)]]

    def of(self, variant: Variant, n: int) -> Recording:
        """Returns the recording of n rows or blocks, which is no decode."""
        return self.made[variant, n, 0]


class Watch:
    """The time between two points of the current stream."""

    def __init__(self, is_gpu: bool) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if is_gpu else []
        self._times = [0.0, 0.0]

    def begin(self) -> None:
        """The first point is here."""
        self._mark(0)

    def end(self) -> None:
        """The second point is here."""
        self._mark(1)

    def _mark(self, i: int) -> None:
        self._times[i] = time.perf_counter()
        if self._events:
            self._events[i].record()

    def wait(self) -> None:
        """Waits until the second point has been passed."""
        if self._events:
            self._events[1].synchronize()

    def seconds(self) -> float:
        """Seconds between the two points, which have been passed."""
        if self._events:
            return float(self._events[0].elapsed_time(self._events[1])) / 1000
        return self._times[1] - self._times[0]
