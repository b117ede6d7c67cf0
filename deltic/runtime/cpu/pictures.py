"""The vision tower at work on a CPU: one picture at a time, in pieces that fit the time they are given, to
the rows that steps read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from deltic.engine.messages import Picture
from deltic.engine.pictures import Pace
from deltic.models.vision.cpu import TOKEN, VisionBuffers, VisionForward, VisionTower
from deltic.models.vision.pixels import Patches, PictureRules
from deltic.models.vision.shape import BLOCK, MERGE
from deltic.models.vision.weights import VisionWeights
from deltic.ops.arrays import Array, copy
from deltic.ops.geometry import PAGE_SIZE
from deltic.runtime.cpu.buffers import PIECE_ROWS
from deltic.runtime.plan import TextPlan

LEAST_ROWS = 4 * TOKEN
"""Patches of the shortest piece: fewer would read the weights for nothing."""


class PictureTower:
    """The engine's PictureEncoder. Not thread-safe: one engine loop owns it."""

    def __init__(
        self, plan: TextPlan, weights: VisionWeights, rules: PictureRules, buffers: VisionBuffers, rows: Array
    ) -> None:
        """rows: the pool, bfloat16 [blocks * PAGE_SIZE, H]."""
        assert plan.tower is not None
        self.rules, self._rows = rules, rows
        self._forward = VisionForward(VisionTower(plan.tower, weights, buffers), plan.n_threads, cpus=plan.cpus)
        self._picture: Picture | None = None
        self._blocks: list[int] = []
        self._pieces: Iterator[None] = iter(())
        self._pace = Pace(len(self._forward.stages), TOKEN, LEAST_ROWS, PIECE_ROWS)

    @property
    def n_blocks(self) -> int:
        return len(self._rows) // PAGE_SIZE

    def begin(self, picture: Picture, blocks: list[int]) -> None:
        """Starts to encode a picture, to these blocks, and forgets the one before if that is not finished."""
        size = picture.n_frames, picture.rows * BLOCK, picture.columns * BLOCK, 3
        patches = Patches(np.frombuffer(picture.pixels, np.uint8).reshape(size), self.rules)
        self._picture, self._blocks = picture, blocks
        grid = 1, picture.rows * MERGE, picture.columns * MERGE
        self._pieces = self._forward.run([patches], [grid], self._pace.n_rows)
        self._pace.begin()

    def run(self, seconds: float) -> bool:
        """Goes on for about so long, at least for one piece. Returns whether the picture is finished."""
        begin = now = time.perf_counter()
        while True:
            self._pace.left_s = begin + seconds - now
            try:
                next(self._pieces)
            except StopIteration:
                self._finish()
                return True
            after = time.perf_counter()
            self._pace.took(*self._pace.ran, after - now)
            now = after
            if begin + seconds - now < self._pace.least_s:
                return False

    def _finish(self) -> None:
        """Hands the tokens to the pool. They are rounded once, as embeddings are."""
        assert self._picture is not None
        tokens = self._forward.buffers.tokens[: self._picture.n_tokens]
        for i, block in enumerate(self._blocks):
            some = tokens[i * PAGE_SIZE : (i + 1) * PAGE_SIZE]
            copy(self._rows[block * PAGE_SIZE :][: len(some)], some)
        self._picture, self._pieces = None, iter(())
