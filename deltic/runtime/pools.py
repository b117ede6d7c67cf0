"""Vectors of prompts: hidden states behind the final norm, pooled over a prompt, whatever its chunks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from deltic.engine.messages import Pooling
from deltic.engine.step import Chunk, Sequence, Step
from deltic.ops.arrays import Array, raw

RowsOf = Callable[[int, slice], Array]
"""Takes the number of a chunk and which of its tokens. Returns their hidden states, bfloat16 [N, H]."""


class Pools:
    """The prompts that are being pooled. A mean is summed in float64, token by token, so that no cut between
    chunks shows in it.
    """

    def __init__(self) -> None:
        self._open: dict[Sequence, NDArray[np.float64]] = {}

    def follow(self, step: Step, rows_of: RowsOf) -> dict[int, bytes]:
        """Takes what a step has computed. Returns the vectors of prompts that are complete, float32, by the
        number of the draw.
        """
        self._open = {sequence: pool for sequence, pool in self._open.items() if sequence.finish_reason is None}
        for c, chunk in enumerate(step.chunks):
            pooling = chunk.sequence.request.pooling
            if pooling is not None and (part := wanted(chunk, pooling)):
                self._take(chunk, pooling, _float32(rows_of(c, part)))
        vectors = {}
        for i, draw in enumerate(step.draws):
            if (pooling := draw.sequence.request.pooling) is not None:
                n = draw.sequence.n_prompt if pooling.mode == "mean" else 1
                vectors[i] = _vector(self._open.pop(draw.sequence) / n, pooling)
        return vectors

    def _take(self, chunk: Chunk, pooling: Pooling, rows: NDArray[np.float32]) -> None:
        if pooling.mode != "mean":
            self._open[chunk.sequence] = rows[0].astype(np.float64)
            return
        if chunk.start == 0:  # also of one that starts over
            self._open[chunk.sequence] = np.zeros(rows.shape[1])
        total = self._open[chunk.sequence]
        for row in rows:
            total += row


def wanted(chunk: Chunk, pooling: Pooling) -> slice | None:
    """Says which of a chunk's tokens count; None: none of them."""
    if pooling.mode == "mean":
        return slice(0, chunk.length)
    if pooling.mode == "cls":
        return slice(0, 1) if chunk.start == 0 else None
    return slice(chunk.length - 1, chunk.length) if chunk.start + chunk.length == chunk.sequence.n_prompt else None


def _vector(pooled: NDArray[np.float64], pooling: Pooling) -> bytes:
    """The vector, cut to its first elements and then made as long as it should be (zeros stay zeros)."""
    kept = pooled[: pooling.n_dimensions or None]
    if pooling.is_normalised:
        kept = kept / max(float(np.sqrt(np.square(kept).sum())), 1e-12)
    return kept.astype(np.float32).tobytes()


def _float32(rows: Array) -> NDArray[np.float32]:
    return (raw(rows).astype(np.uint32) << 16).view(np.float32)
