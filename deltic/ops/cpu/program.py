"""The compiled kernels of the CPU: which library of them runs here, and programs of their calls.

They are one C++ source compiled for several instruction sets (CMakeLists.txt). The best one that this machine
can run is loaded. When there is none, loading fails with what to do. Nothing falls back silently.

A step is a `Program`: a flat list of kernel calls with fixed arguments, recorded once by the operators'
functions and run with a single crossing from Python. What changes from step to step (row counts, token ids,
lengths) is read by the kernels from the batch buffers.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from functools import cache
from pathlib import Path

import numpy as np

from deltic.ops.arrays import Array
from deltic.ops.contract import KernelError, check
from deltic.ops.cpu.instruction_sets import runnable

_pool = threading.Lock()
"""The thread pool of a library runs one program at a time."""

_REFUSALS = (
    None,
    "{n_threads} threads cannot be started: the system or the container limits them (ulimit -u, ulimit -v, pids.max); "
    "give --threads less",
    "threads cannot be bound to CPUs here; leave --pin-threads out",
)
"""Errors that deltic_start_threads can answer (csrc/pool.h, PoolState)."""

_LIBRARIES = Path(__file__).parents[1] / "lib"


def library_file(name: str) -> Path:
    """The compiled kernels of an instruction set."""
    return _LIBRARIES / f"cpu_{name}.so"


@cache
def usable_instruction_sets() -> tuple[str, ...]:
    """Names of the compiled instruction sets that this machine can run, best first."""
    return tuple(name for name in runnable() if library_file(name).exists())


def instruction_set() -> str:
    """Name of the best compiled instruction set that this machine can run.

    Raises KernelError if there is none.
    """
    for name in usable_instruction_sets():
        return name
    raise KernelError(
        f"no compiled kernels for this machine ({', '.join(runnable())}) in {_LIBRARIES}; compile them (make kernels, in a "
        "copy of the repository) or install the package again"
    )


@cache
def load_library(name: str) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(library_file(name)))
        library.deltic_start_threads  # noqa: B018  of an older build it has none
    except (OSError, AttributeError) as error:
        raise KernelError(
            f"the compiled kernels do not fit this version ({error}); install again (pip install --force-reinstall "
            "--no-deps .)"
        ) from error
    library.deltic_run.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.deltic_run.restype = None
    library.deltic_start_threads.argtypes = [ctypes.c_int64, ctypes.c_void_p]
    library.deltic_start_threads.restype = ctypes.c_int64
    return library


class Program:
    """A recorded list of kernel calls.

    Arguments are arrays (passed by address and kept alive), ints and floats.
    """

    def __init__(self, n_threads: int, library: str | None = None, cpus: tuple[int, ...] = ()) -> None:
        """cpus: the CPU that each thread is bound to, the one that calls `run` first.

        None: wherever the system likes.
        """
        self.instruction_set = library or instruction_set()
        self._kernels = load_library(self.instruction_set)
        self.n_threads = n_threads
        self._cpus = np.array(cpus, np.int32) if cpus else None
        check("program", not cpus or len(cpus) == n_threads, f"a CPU for each of {n_threads} threads")
        self._words: list[int] = []
        self._alive: list[Array] = []
        self._code = np.empty(0, np.int64)

    def call(self, kernel: str, *arguments: Array | int | float | None) -> None:
        """Appends one kernel call."""
        address = ctypes.cast(getattr(self._kernels, kernel), ctypes.c_void_p).value
        assert address is not None
        words = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                self._alive.append(argument)
                words.append(argument.ctypes.data)
            elif isinstance(argument, float):
                words.append(struct.unpack("<q", struct.pack("<d", argument))[0])
            else:
                words.append(int(argument or 0))
        self._words += [address, len(words), *words]

    def run(self) -> None:
        """Runs all calls in order.

        The interpreter lock is released meanwhile. Raises KernelError if the threads are not to be had.
        """
        if len(self._code) != len(self._words):
            self._code = np.array(self._words, np.int64)
        with _pool:
            cpus = None if self._cpus is None else self._cpus.ctypes.data
            refusal = _REFUSALS[self._kernels.deltic_start_threads(self.n_threads, cpus)]
            if refusal:
                raise KernelError(refusal.format(n_threads=self.n_threads))
            self._kernels.deltic_run(self._code.ctypes.data, len(self._code))
