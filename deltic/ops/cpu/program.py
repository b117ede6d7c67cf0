"""The compiled kernels of the CPU: which library of them runs here, and programs of their calls.

They are one C++ source compiled for several instruction sets (CMakeLists.txt). The best one that this machine
can run is loaded; when there is none, loading fails with what to do. Nothing falls back silently.

A step is a `Program`: a flat list of kernel calls with fixed arguments, recorded once by the operators'
functions and run with a single crossing from Python. What changes from step to step (row counts, token ids,
lengths) is read by the kernels from the batch buffers.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import threading
from functools import cache
from pathlib import Path

import numpy as np

from deltic.ops.arrays import Array
from deltic.ops.contract import KernelError, check

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512_vnni"})
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2", "movbe"})
_ARMV8_2 = frozenset({"asimd", "atomics", "asimdrdm", "crc32"})

# Best first: library name and the /proc/cpuinfo flags it needs. AVX-512 without its int8 dot product runs as
# AVX2.
INSTRUCTION_SETS: tuple[tuple[str, frozenset[str]], ...] = (
    ("amx", _AVX512 | {"avx512_bf16", "avx512vbmi", "amx_tile", "amx_bf16"}),
    ("avx512_bf16", _AVX512 | {"avx512_bf16", "avx512vbmi"}),
    ("avx512", _AVX512),
    ("avx2_vnni", _AVX2 | {"avx_vnni"}),
    ("avx2", _AVX2),
    ("neon_i8mm", _ARMV8_2 | {"asimddp", "i8mm"}),
    ("neon_dotprod", _ARMV8_2 | {"asimddp"}),
    ("baseline", frozenset()),
)

_pool = threading.Lock()
"""The thread pool of a library runs one program at a time."""

_REFUSALS = (
    None,
    "{n_threads} threads cannot be started: the system or the container limits them (ulimit -u, ulimit -v, pids.max); "
    "give --threads less",
    "threads cannot be bound to CPUs here; leave --pin-threads out",
)
"""What deltic_start_threads answers (csrc/pool.h, PoolState)."""

_LIBRARIES = Path(__file__).parents[1] / "lib"


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction-set flags of this CPU as Linux names them (flags on x86, Features on ARM); empty where it
    names none.
    """
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def library_file(name: str) -> Path:
    """The compiled kernels of an instruction set."""
    return _LIBRARIES / f"cpu_{name}.so"


@cache
def usable_instruction_sets() -> tuple[str, ...]:
    """Names of the compiled instruction sets that this machine can run, best first."""
    flags = cpu_flags()
    return tuple(
        name
        for name, needed in INSTRUCTION_SETS
        if needed <= flags and library_file(name).exists() and load_library(name).deltic_prepare()
    )


def instruction_set() -> str:
    """Name of the best compiled instruction set that this machine can run.

    Raises KernelError if there is none.
    """
    for name in usable_instruction_sets():
        return name
    raise KernelError(
        f"no compiled kernels for {platform.machine()} in {_LIBRARIES}; install again (pip install --force-reinstall "
        "--no-deps .)"
    )


@cache
def load_library(name: str) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(library_file(name)))
        library.deltic_prepare  # noqa: B018  of an older build it has none
    except (OSError, AttributeError) as error:
        raise KernelError(
            f"the compiled kernels do not fit this version ({error}); install again (pip install --force-reinstall "
            "--no-deps .)"
        ) from error
    library.deltic_run.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.deltic_run.restype = None
    library.deltic_start_threads.argtypes = [ctypes.c_int64, ctypes.c_void_p]
    library.deltic_start_threads.restype = library.deltic_prepare.restype = ctypes.c_int64
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
