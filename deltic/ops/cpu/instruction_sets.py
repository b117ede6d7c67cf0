"""Instruction sets that the CPU kernels are compiled for, and which of them this machine runs.

`python deltic/ops/cpu/instruction_sets.py` prints those that it runs, best first, for the Makefile: so this
file imports the standard library only.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512_vnni"})
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2", "movbe"})
_ARMV8_2 = frozenset({"asimd", "atomics", "asimdrdm", "crc32"})
_AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})

# Best first: library name and the /proc/cpuinfo flags it needs. AVX-512 without its int8 dot product runs as
# AVX2.
INSTRUCTION_SETS: tuple[tuple[str, frozenset[str]], ...] = (
    ("amx", _AVX512 | {"avx512_bf16", "avx512vbmi"} | _AMX),
    ("avx512_bf16", _AVX512 | {"avx512_bf16", "avx512vbmi"}),
    ("avx512", _AVX512),
    ("avx2_vnni", _AVX2 | {"avx_vnni"}),
    ("avx2", _AVX2),
    ("neon_i8mm", _ARMV8_2 | {"asimddp", "i8mm"}),
    ("neon_dotprod", _ARMV8_2 | {"asimddp"}),
    ("baseline", frozenset()),
)

_ARCH_PRCTL, _REQUEST_FEATURE, _TILE_DATA = 158, 0x1023, 18
"""Linux, x86-64: asm/unistd_64.h, asm/prctl.h (ARCH_REQ_XCOMP_PERM) and the number of the feature."""


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


@cache
def runnable() -> tuple[str, ...]:
    """Names of the instruction sets that this machine runs, best first.

    Linux gives the matrix unit's registers to a process that asks for them. This asks, for all threads of the
    process. Some sandboxes refuse.
    """
    flags = cpu_flags()
    if flags >= _AMX and ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_FEATURE, _TILE_DATA) != 0:
        flags -= _AMX
    return tuple(name for name, needed in INSTRUCTION_SETS if needed <= flags)


if __name__ == "__main__":
    print(*runnable())
