"""The vision tower at work on a GPU: one picture at a time, in pieces that fit the time they are given, to
the rows that prefills read.

All of it runs on the stream of the steps: a piece runs when the steps before it have ended, and a prefill
that is started behind the last piece finds the picture's rows. Pieces are started without a wait, as many as
their kinds have lately taken of the time. Then all are waited for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from deltic.engine.messages import Picture
from deltic.engine.pictures import Pace
from deltic.models.vision.gpu import PIECE, VisionBuffers, VisionGpu
from deltic.models.vision.pixels import PictureRules
from deltic.models.vision.shape import MERGE
from deltic.models.vision.weights import VisionWeights
from deltic.ops.geometry import PAGE_SIZE
from deltic.ops.gpu.launch import bound_levers
from deltic.ops.gpu.vision import PatchGrid
from deltic.runtime.gpu.record import Watch
from deltic.runtime.plan import TextPlan


class PictureTower:
    """The engine's PictureEncoder. Not thread-safe: one engine loop owns it."""

    def __init__(
        self,
        plan: TextPlan,
        weights: VisionWeights,
        rules: PictureRules,
        buffers: VisionBuffers,
        rows: Tensor,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """rows: the pool, bfloat16 [blocks * PAGE_SIZE, H]."""
        assert plan.tower is not None
        self.rules, self._rows, self._stream, self._levers = rules, rows, stream, bound_levers()
        self.forward = VisionGpu(plan.tower, weights, rules, buffers)
        self._pixels: Tensor | None = None  # as long as a copy of it may be on its way
        self._blocks: list[int] = []
        self._pieces: Iterator[bool] = iter(())
        self._pace = Pace(self.forward.n_stages, PIECE, PIECE, len(buffers.patches))

    @property
    def n_blocks(self) -> int:
        return len(self._rows) // PAGE_SIZE

    def walk(self) -> None:
        """Starts every kernel that a picture may start, on whatever is in the buffers."""
        grid, forward = PatchGrid(MERGE, MERGE), self.forward
        for n in range(PIECE, len(forward.buffers.patches) + 1, PIECE):
            for stage in (0, 1, 2, forward.n_stages - 1):
                forward.run(stage, grid, 1, 0, n)

    def begin(self, picture: Picture, blocks: list[int]) -> None:
        """Starts to encode a picture, to these blocks, and forgets the one before if that is not finished."""
        self._blocks, self._pixels = blocks, torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8)
        with torch.cuda.stream(self._stream):
            self.forward.buffers.pixels[: len(self._pixels)].copy_(self._pixels, non_blocking=True)
        grid = PatchGrid(picture.rows * MERGE, picture.columns * MERGE)
        self._pieces = self.forward.pieces(grid, picture.n_frames, self._pace.n_rows, self._put)
        self._pace.begin()

    def run(self, seconds: float) -> bool:
        """Goes on for about so long, at least for one piece. Returns whether the picture is finished."""
        end = time.perf_counter() + seconds
        with torch.cuda.stream(self._stream), self._levers.bound():
            while True:
                is_done = self._start(end - time.perf_counter())
                if is_done or end - time.perf_counter() < self._pace.least_s:
                    break
        if is_done:
            self._pixels, self._pieces = None, iter(())
        return is_done

    def _start(self, seconds: float) -> bool:
        """Starts as many pieces as should take so long, but no second one of a kind that is not known, and
        waits for them.
        """
        started: list[tuple[str, int, Watch]] = []
        pace, is_known, is_done = self._pace, True, False
        pace.left_s = seconds
        while is_known and not is_done and (not started or pace.left_s > pace.least_s):
            watch = Watch(self._stream is not None)
            watch.begin()
            is_done = next(self._pieces)
            watch.end()
            expected_s = pace.seconds(*pace.ran)
            started.append((*pace.ran, watch))
            is_known = expected_s is not None
            pace.left_s -= expected_s or 0.0
        started[-1][2].wait()
        for kind, n, watch in started:
            pace.took(kind, n, watch.seconds())
        return is_done

    def _put(self, first: int, tokens: Tensor) -> None:
        """Copies tokens of the picture to its blocks. They are rounded once, as embeddings are."""
        for i, some in enumerate(tokens.split(PAGE_SIZE), first // PAGE_SIZE):
            self._rows[self._blocks[i] * PAGE_SIZE :][: len(some)].copy_(some)
