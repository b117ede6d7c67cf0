"""The chip that kernels are started on or compiled for, and what it has not: the rules of all configurations.

By default it is the device that is here. A process may describe another one (`described`,
`runtime.gpu.compile.compile_for`): the steps are then planned and compiled for that, and nothing is started.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.language.target_info import cuda_capability_geq, is_hip
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Chip:
    """Properties of a GPU that a kernel's configuration may follow."""

    target: GPUTarget
    """Backend, architecture and width of a warp, in Triton's words."""
    n_sms: int
    shared_bytes: int
    """Shared memory that one program may have."""
    memory_bytes: int = 0
    """Memory of the device, as its driver says. 0: that of the GPU that is here."""

    @property
    def is_nvidia(self) -> bool:
        return bool(self.target.backend == "cuda")

    @property
    def is_hopper(self) -> bool:
        """True on Hopper, where everything was measured."""
        return self.is_nvidia and self.target.arch == 90

    @property
    def has_hopper_copies(self) -> bool:
        """True if there are programmatic dependent launch, and copies of tiles by a descriptor (TMA)."""
        return self.is_nvidia and int(self.target.arch) >= 90

    @property
    def multiplies_from_shared(self) -> bool:
        """True if matrix units read shared memory (wgmma, tcgen05). Elsewhere, on Ampere, Ada and GeForce
        Blackwell too, tiles pass through registers on their way to them.
        """
        return self.has_hopper_copies and int(self.target.arch) < 120

    def stages(self, tile_bytes: int, most: int, beside: int = 0) -> int:
        """num_stages of a loop over tiles of so many bytes, 1 to `most`: what fits, with `beside` bytes of
        other things. A tile that passes through registers has left when it is multiplied: it is not counted.
        """
        fit = (self.shared_bytes - beside) // tile_bytes
        return max(1, min(most, fit if self.multiplies_from_shared else fit + 1))


KIB = 1024
GIB = 1 << 30
HOPPER = Chip(GPUTarget("cuda", 90, 32), 132, 227 * KIB)
CHIPS = {
    "sm_80": Chip(GPUTarget("cuda", 80, 32), 108, 163 * KIB),  # A100
    "sm_86": Chip(GPUTarget("cuda", 86, 32), 82, 99 * KIB, int(23.69 * GIB)),  # RTX 3090
    "sm_89": Chip(GPUTarget("cuda", 89, 32), 128, 99 * KIB, int(23.64 * GIB)),  # RTX 4090
    "sm_90": HOPPER,
    "sm_100": Chip(GPUTarget("cuda", 100, 32), 148, 227 * KIB),  # B200
    "sm_120": Chip(GPUTarget("cuda", 120, 32), 170, 99 * KIB, int(31.36 * GIB)),  # RTX 5090
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), 304, 64 * KIB),  # MI300X
    "gfx950": Chip(GPUTarget("hip", "gfx950", 64), 256, 160 * KIB),  # MI355X
    "gfx1100": Chip(GPUTarget("hip", "gfx1100", 32), 96, 64 * KIB),  # RX 7900 XTX
}
"""Chips that kernels are compiled for, each as its makers say of a card that has it."""


class _Described:
    chip: Chip | None = None
    emulated: str = ""
    """Name in CHIPS, where kernels are started as if it were here."""
    alone: bool = True
    """False: what other processes have of the GPU is not taken off the card's memory."""


described = _Described()
"""The chip to plan for where it is not the device that is here."""


def chip() -> Chip:
    """The chip of this process; Hopper where there is none, and in the interpreter."""
    return described.chip or _device()


@cache
def _device() -> Chip:
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return HOPPER
    device: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    shared = getattr(device, "shared_memory_per_block_optin", 64 * 1024)
    return Chip(triton.runtime.driver.active.get_current_target(), device.multi_processor_count, shared)


def device_name() -> str:
    """The name of the GPU that is here, and of the chip that it answers as."""
    name: str = torch.cuda.get_device_name()
    return f"{name} as {described.emulated}" if described.emulated else name


def free_bytes(device: torch.device) -> int:
    """Returns a GPU's free bytes; of an emulated card what it would have left beside all that is in use here,
    or beside what this process has, where tests share the GPU.
    """
    free, total = torch.cuda.mem_get_info(device)
    used = total - free if described.alone else torch.cuda.memory_reserved(device)
    return int(min(free, (chip().memory_bytes or total) - used))


def emulate(name: str, alone: bool = True) -> None:
    """Makes `chip()` answer as another of CHIPS on the NVIDIA GPU that is here: for tests and benches.

    Kernels take its sizes and its ways, Triton's passes are those for its architecture, and a kernel that
    takes more shared memory than it has is refused. torch gets the memory of its card. Only the assembler's
    target is the GPU that is here, and the vendor's library knows of nothing. alone: see `free_bytes`.
    """
    described.chip, described.emulated, described.alone = CHIPS[name], name, alone
    override_arch(name)
    triton.knobs.runtime.kernel_load_start_hook.add(_check_shared)
    if torch.cuda.is_available():
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, CHIPS[name].memory_bytes / total))


def override_arch(name: str) -> None:
    """Makes Triton compile for one of CHIPS, without a word in the environment: a cache's keys have that."""
    triton.knobs.runtime.override_arch = name.replace("_", "")
    os.environ.pop("TRITON_OVERRIDE_ARCH", None)


def _check_shared(module: object, function: object, name: str, files: dict[str, str], hash: str) -> None:
    """Raises OutOfResources for a kernel that is about to be loaded and does not fit the chip."""
    about = next(path for file, path in files.items() if file.endswith(".json"))
    shared = json.loads(Path(about).read_text())["shared"]
    if shared > chip().shared_bytes:
        raise OutOfResources(shared, chip().shared_bytes, "shared memory")


def tiles_of(matrix: Tensor, n_rows: int, width: int, stride: int, block: tuple[int, int]) -> object:
    """Makes what a kernel gives to `load_tile` for blocks of n_rows rows of `width` elements, `stride` apart:
    a descriptor, or pointer and stride where there is no TMA. (Triton would load 2 bytes at a time there.)
    """
    if chip().has_hopper_copies:
        return TensorDescriptor(matrix, [n_rows, width], [stride, 1], [*block])
    return matrix, stride


@triton.constexpr_function
def converts_e4m3():
    """Returns whether the architecture that is compiled for has e4m3: Ada and later."""
    arch = triton.knobs.runtime.override_arch
    return cuda_capability_geq(8, 9) and (arch is None or int(arch[2:]) >= 89)


@triton.jit
def load_tile(tiles, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] from there on. All of it lies in the matrix."""
    if isinstance(tiles, tl.tensor_descriptor):
        b_tile = tiles.load([row, column])
    else:
        o_row = (row + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        b_tile = tl.load(tiles[0] + o_row * tiles[1] + (column + tl.arange(0, COLUMNS))[None, :])
    return b_tile


@triton.jit
def group_of(i_program, n_t, n_m, GROUP: tl.constexpr):
    """Returns the (token tile, weight tile) of a program: GROUP token tiles, then the next weight tile, so
    that programs that run together share rows of x and of w.
    """
    i_group = i_program // (GROUP * n_m)
    group_size = tl.minimum(n_t - i_group * GROUP, GROUP)
    return i_group * GROUP + i_program % (GROUP * n_m) % group_size, i_program % (GROUP * n_m) // group_size


@triton.jit
def wait_for_front(PDL: tl.constexpr):
    """Waits for the kernel in front, whose writes are read from here on, and lets the next one start
    (launch.py).
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_l2(p_line):
    """Asks for the lines of these addresses to be brought into L2.

    Hopper's assembly: only where PDL is on.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p_line.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def either(b_first, p_first, p_second):
    """p_first where b_first, else p_second.

    AMD's compiler cannot choose between pointers of two tensors: integers are chosen between.
    """
    if is_hip():
        p_either = tl.where(b_first, p_first.to(tl.int64), p_second.to(tl.int64)).to(p_first.dtype.scalar)
    else:
        p_either = tl.where(b_first, p_first, p_second)
    return p_either
