"""Pages and states between a device and the host, for `Tiers`: copies through pinned memory, beside the
steps. And rows in steps, from and to other machines.

The steps run on one stream, in order: a new owner of a page or state slot writes it after the old one. A copy
for the tiers is not on that stream, so that it does not wait for unrelated steps. It waits for an event that
was recorded on the stream of the steps when the move was asked for. All work that may have written the object
was started before that event, a decode that ran ahead included; and until the move is done no other owner
gets it. A copy to the device has arrived before its move is done, so before any step that reads it is
started.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from deltic.engine.cache.tiers import MOVER, Bytes, Copies, Tiers
from deltic.engine.step import Chunk
from deltic.models.qwen.shape import ModelShape
from deltic.ops.arrays import Array
from deltic.ops.geometry import PAGE_SIZE
from deltic.runtime.gpu.record import Recording
from deltic.runtime.plan import Plan
from deltic.runtime.stages import Neighbours


class Staging:
    """A pinned buffer for one object, and the stream of its copies."""

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self.buffer = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self.stream = torch.cuda.Stream(device) if is_gpu else None

    def end(self) -> None:
        """Waits for the copies on the current stream, which must be this one's.

        It waits for an event: checks for hidden waits let such an intended one pass.
        """
        if self.stream is not None:
            event = torch.cuda.Event()
            event.record()
            event.synchronize()


class StageRows:
    """The residual's rows on their way from and to other machines, through memory that the GPU copies by
    itself. Rows of decodes and of prefills are apart.
    """

    def __init__(self, shape: ModelShape, residuals: Sequence[Tensor]) -> None:
        """residuals: float32, flat: of decodes, and of prefills."""
        self._shape, self._residuals, self._is_gpu = shape, residuals, residuals[0].is_cuda
        self._host = [torch.empty(len(rows), dtype=rows.dtype, pin_memory=self._is_gpu) for rows in residuals]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._leaving: list[tuple[Array, bool]] = []
        """Rows that are on their way to the host, and whether they are of a prefill."""

    def run(self, recording: Recording, chunks: Sequence[Chunk], n: int, neighbours: Neighbours) -> None:
        """Starts a forward of n rows, among which are those of these chunks, all decodes or all prefills: of
        what is in front, if others are. What it leaves is passed on before more is waited for.
        """
        width, of_prefill = self._shape.stream_size, not chunks[0].is_decode
        rounded = [-(-chunk.length // PAGE_SIZE) * PAGE_SIZE if of_prefill else chunk.length for chunk in chunks]
        n_used = sum(rounded) - rounded[-1] + chunks[-1].length  # of a prefill with what pads its blocks
        host, residual = self._host[of_prefill][: n * width], self._residuals[of_prefill][: n * width]
        rows = host.numpy()[: n_used * width]
        if not self._shape.embeds:
            self.pass_on(neighbours)
            self._wait(of_prefill)  # of a step from which nothing was drawn nobody has
            neighbours.receive(rows)
            host[len(rows) :] = 0
            self._copy(residual, host, of_prefill)
        recording.run()
        if not self._shape.draws:
            self._copy(host[: len(rows)], residual[: len(rows)], of_prefill)
            self._leaving.append((rows, of_prefill))

    def pass_on(self, neighbours: Neighbours) -> None:
        """Hands all rows that leave to the stage behind, once they are on the host."""
        for rows, of_prefill in self._leaving:
            self._wait(of_prefill)
            neighbours.pass_on(rows)
        self._leaving.clear()

    def _copy(self, to: Tensor, rows: Tensor, of_prefill: bool) -> None:
        to.copy_(rows, non_blocking=True)
        if self._is_gpu:
            self._copied[of_prefill] = event = torch.cuda.Event()
            event.record()

    def _wait(self, of_prefill: bool) -> None:
        """Waits until the last copy from or to the host's rows is made."""
        if (event := self._copied[of_prefill]) is not None:
            event.synchronize()


class DeviceCopies:
    """Implements `tiers.Copies`. `page` and `state` are the views that Tiers is given with it.

    For two threads. Without a GPU, the tensors are in host memory and every copy is made at once: for tests.
    """

    def __init__(self, pages: Sequence[Tensor], states: Sequence[Tensor], stream: torch.cuda.Stream | None) -> None:
        """pages, states: what makes up a page or a state, each tensor contiguous, with the page or state slot
        as its first dimension. stream: the one of the steps; None: the tensors are not on a GPU.
        """
        self._parts = {"page": [_bytes(t) for t in pages], "state": [_bytes(t) for t in states]}
        self._n_bytes = {kind: sum(part.shape[1] for part in parts) for kind, parts in self._parts.items()}
        self._stream = stream
        # One for the engine, one for the mover: nothing is allocated once requests come.
        self._stagings = [Staging(max(self._n_bytes.values()), pages[0].device) for _ in range(2)]

    @property
    def state_bytes(self) -> int:
        """Bytes of a state, as Tiers counts them."""
        return self._n_bytes["state"]

    def page(self, index: int) -> list[Bytes]:
        """The calling thread's buffer, as large as a page."""
        return self._views("page")

    def state(self, state_slot: int) -> list[Bytes]:
        """The calling thread's buffer, as large as a state. It is the same one."""
        return self._views("state")

    def mark(self) -> torch.cuda.Event | None:
        """Marks all that was put on the stream of the steps up to now."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def fetch(self, kind: str, index: int, mark: torch.cuda.Event | None) -> None:
        """Copies a page or a state to the calling thread's buffer, after what is marked.

        It is there on return.
        """
        self._copy(kind, index, mark, to_device=False)

    def store(self, kind: str, index: int, mark: torch.cuda.Event | None) -> None:
        """Copies the calling thread's buffer to a page or a state, after what is marked.

        It is there on return.
        """
        self._copy(kind, index, mark, to_device=True)

    def _copy(self, kind: str, index: int, mark: torch.cuda.Event | None, to_device: bool) -> None:
        staging = self._staging()
        staged = staging.buffer[: self._n_bytes[kind]].split([part.shape[1] for part in self._parts[kind]])
        with self._stream_of(staging, mark):
            for part, host in zip(self._parts[kind], staged, strict=True):
                target, source = (part[index], host) if to_device else (host, part[index])
                target.copy_(source, non_blocking=True)
            staging.end()

    def _views(self, kind: str) -> list[Bytes]:
        return [self._staging().buffer.numpy()[: self._n_bytes[kind]]]

    def _staging(self) -> Staging:
        """The mover's, or the engine's: that may be called from one thread after another."""
        return self._stagings[threading.current_thread().name == MOVER]

    def _stream_of(self, staging: Staging, mark: torch.cuda.Event | None) -> AbstractContextManager[object]:
        if staging.stream is None:
            return nullcontext()
        if mark is not None:
            staging.stream.wait_event(mark)
        return torch.cuda.stream(staging.stream)


class AllCopies(Copies, Protocol):
    """Copies of whole devices."""

    @property
    def state_bytes(self) -> int: ...

    def page(self, index: int) -> list[Bytes]: ...

    def state(self, state_slot: int) -> list[Bytes]: ...


def open_tiers(copies: AllCopies, plan: Plan[Any], directory: Path | None, disk_bytes: int, model: str) -> Tiers:
    """Starts the tiers below the pools of a plan, on disk too where there is a directory.

    Raises ConfigError if that cannot be used.
    """
    host = np.empty((plan.n_host_units, plan.host_page_bytes), np.uint8) if plan.n_host_units else None
    return Tiers(copies.page, copies.state, host, copies.state_bytes, directory, disk_bytes, model, copies)


def _bytes(tensor: Tensor) -> Tensor:
    """uint8 [n, bytes of one]: the same memory."""
    assert tensor.is_contiguous()
    return tensor.view(len(tensor), -1).view(torch.uint8)
