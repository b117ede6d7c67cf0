"""The vision tower on a GPU, for `bench/pictures.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deltic.models.vision.gpu import PIECE, VisionGpu, vision_buffers
from deltic.models.vision.pixels import PictureRules
from deltic.models.vision.shape import CHANNELS, PATCH_SIZE, VisionShape
from deltic.models.vision.weights import VisionWeights
from deltic.ops.gpu.launch import Levers
from deltic.ops.gpu.vision import PatchGrid
from deltic.runtime.gpu.buffers import PIECE_ROWS


def tower(shape: VisionShape, weights: VisionWeights, side: int) -> Callable[[], None]:
    """Returns what starts the kernels that encode a square picture of `side` pixels in buffers of its own."""
    rows, size = side // PATCH_SIZE, side**2 * CHANNELS
    n = -(-(rows**2) // PIECE) * PIECE
    n_rows = min(n, PIECE_ROWS)
    buffers = vision_buffers(
        shape, n, n_rows, lambda name, size, dtype: torch.zeros(size, dtype=dtype, device=weights.norm.weight.device)
    )
    buffers.pixels[:size].copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
    forward = VisionGpu(shape, weights, PictureRules(), buffers)

    @Levers().bound()
    @Levers().bound()
    @Levers().bound()
    @Levers().bound()
    @Levers().bound()
    @Levers().bound()
    def start() -> None:
        for _ in forward.pieces(PatchGrid(rows, rows), 1, lambda stage, left: n_rows, lambda first, tokens: None):
            pass

    return start
