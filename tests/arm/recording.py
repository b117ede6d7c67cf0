"""A program and its steps written to a file, for replay.cpp to run with any library on any machine.

Nothing is computed here: a step is the buffers that the engine filled since the step before. What the kernels
themselves write is left to whoever replays it.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from deltic.ops.arrays import Array
from deltic.ops.cpu.program import Program

_NUMBER, _KERNEL = -1, -2  # replay.cpp


class Recording(Program):
    """A program that keeps its calls and, instead of running, the buffers that changed since it was last run."""

    def __init__(self, n_threads: int, cpus: tuple[int, ...] = ()) -> None:
        super().__init__(n_threads, "baseline", cpus)
        self._calls: list[tuple[str, tuple[Array | int | float | None, ...]]] = []
        self._index: dict[int, int] = {}
        self._buffers: list[Array] = []
        self._first: list[Array] = []
        self._steps: list[dict[int, Array]] = []
        self._seen: list[Array] = []

    def call(self, kernel: str, *arguments: Array | int | float | None) -> None:
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                memory = _memory(argument)
                if memory.ctypes.data not in self._index:
                    self._index[memory.ctypes.data] = len(self._buffers)
                    self._buffers.append(memory)
        self._calls.append((kernel, arguments))

    def run(self) -> None:
        if not self._seen:
            self._first = [buffer.copy() for buffer in self._buffers]
            self._seen = list(self._first)
        pairs = zip(self._buffers, self._seen, strict=True)
        changed = {i: now.copy() for i, (now, seen) in enumerate(pairs) if not np.array_equal(now, seen)}
        for i, now in changed.items():
            self._seen[i] = now
        self._steps.append(changed)

    def place(self, array: Array) -> tuple[int, int]:
        """Buffer and byte offset of an array's first element."""
        start = _memory(array).ctypes.data
        return self._index[start], array.ctypes.data - start

    def write(self, path: Path, outputs: list[Array]) -> None:
        """outputs: contiguous arrays of the program, which a replay writes one after another after each step."""
        with path.open("wb") as file:

            def put(*numbers: int) -> None:
                file.write(struct.pack(f"<{len(numbers)}q", *numbers))

            put(len(self._first))
            for buffer in self._first:
                put(buffer.nbytes)
                file.write(buffer)
            put(sum(2 + len(arguments) for _, arguments in self._calls))
            for kernel, arguments in self._calls:
                put(_KERNEL, len(kernel))
                file.write(kernel.encode())
                put(_NUMBER, len(arguments))
                for argument in arguments:
                    if isinstance(argument, np.ndarray):
                        put(*self.place(argument))
                    elif isinstance(argument, float):
                        put(_NUMBER, struct.unpack("<q", struct.pack("<d", argument))[0])
                    else:
                        put(_NUMBER, int(argument or 0))
            put(len(outputs))
            for output in outputs:
                put(*self.place(output), output.nbytes)
            put(len(self._steps))
            for step in self._steps:
                put(len(step))
                for i, buffer in step.items():
                    put(i)
                    file.write(buffer)


def _memory(array: Array) -> Array:
    """The bytes of all that the array is a part of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.reshape(-1).view(np.uint8)
