"""Chips that kernels are compiled for: compute units, and the shared memory that one program may have, as their makers say."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget

from deltic.ops.gpu.chip import HOPPER, Chip

KIB = 1024
CHIPS = {
    "sm_80": Chip(GPUTarget("cuda", 80, 32), 108, 163 * KIB),  # A100
    "sm_86": Chip(GPUTarget("cuda", 86, 32), 84, 99 * KIB),  # A40, RTX 3090
    "sm_89": Chip(GPUTarget("cuda", 89, 32), 142, 99 * KIB),  # L40, RTX 4090
    "sm_90": HOPPER,
    "sm_100": Chip(GPUTarget("cuda", 100, 32), 148, 227 * KIB),  # B200
    "sm_120": Chip(GPUTarget("cuda", 120, 32), 188, 99 * KIB),  # RTX PRO 6000, RTX 5090
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), 304, 64 * KIB),  # MI300X
    "gfx950": Chip(GPUTarget("hip", "gfx950", 64), 256, 160 * KIB),  # MI355X
    "gfx1100": Chip(GPUTarget("hip", "gfx1100", 32), 96, 64 * KIB),  # RX 7900 XTX
}
