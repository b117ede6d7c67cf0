"""A program and its steps written to a file, for replay.cpp to run with any library on any machine.

Nothing is computed here: a step is the buffers that the engine filled since the step before. What the kernels
themselves write is left to whoever replays it.
"""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from torch import Tensor

from deltic.ops.cpu.program import Program

_NUMBER, _KERNEL = -1, -2  # replay.cpp


class Recording(Program):
    """A program that keeps its calls and, instead of running, the buffers that changed since it was last run."""

    def __init__(self, n_threads: int, cpus: tuple[int, ...] = ()) -> None:
        super().__init__(n_threads, "baseline", cpus)
        self._calls: list[tuple[str, tuple[Tensor | int | float | None, ...]]] = []
        self._index: dict[int, int] = {}
        self._buffers: list[Tensor] = []
        self._first: list[Tensor] = []
        self._steps: list[dict[int, Tensor]] = []
        self._seen: list[Tensor] = []

    def call(self, kernel: str, *arguments: Tensor | int | float | None) -> None:
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.data_ptr() != 0:
                storage = argument.untyped_storage()
                if storage.data_ptr() not in self._index:
                    self._index[storage.data_ptr()] = len(self._buffers)
                    self._buffers.append(torch.empty(0, dtype=torch.uint8).set_(storage))
        self._calls.append((kernel, arguments))

    def run(self) -> None:
        if not self._seen:
            self._first = [buffer.clone() for buffer in self._buffers]
            self._seen = list(self._first)
        pairs = zip(self._buffers, self._seen, strict=True)
        changed = {i: now.clone() for i, (now, seen) in enumerate(pairs) if not torch.equal(now, seen)}
        for i, now in changed.items():
            self._seen[i] = now
        self._steps.append(changed)

    def place(self, tensor: Tensor) -> tuple[int, int]:
        """Buffer and byte offset of a tensor's first element."""
        start = tensor.untyped_storage().data_ptr()
        return self._index[start], tensor.data_ptr() - start

    def write(self, path: Path, outputs: list[Tensor]) -> None:
        """outputs: contiguous tensors of the program, which a replay writes one after another after each step."""
        with path.open("wb") as file:

            def put(*numbers: int) -> None:
                file.write(struct.pack(f"<{len(numbers)}q", *numbers))

            put(len(self._first))
            for buffer in self._first:
                put(buffer.nbytes)
                file.write(buffer.numpy())
            put(sum(2 + len(arguments) for _, arguments in self._calls))
            for kernel, arguments in self._calls:
                put(_KERNEL, len(kernel))
                file.write(kernel.encode())
                put(_NUMBER, len(arguments))
                for argument in arguments:
                    if isinstance(argument, Tensor) and argument.data_ptr() != 0:
                        put(*self.place(argument))
                    elif isinstance(argument, float):
                        put(_NUMBER, struct.unpack("<q", struct.pack("<d", argument))[0])
                    else:
                        put(_NUMBER, 0 if isinstance(argument, Tensor) else int(argument or 0))
            put(len(outputs))
            for output in outputs:
                put(*self.place(output), output.nbytes)
            put(len(self._steps))
            for step in self._steps:
                put(len(step))
                for i, buffer in step.items():
                    put(i)
                    file.write(buffer.numpy())
