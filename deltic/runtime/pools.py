"""Vectors and decisions of prompts: hidden states behind the final norm, pooled or read whole, whatever the
chunks of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltic.engine.messages import Pooling, Request
from deltic.engine.step import Chunk, Sequence, Step
from deltic.models.joint_head import JointHead, Span, SpannedQuestion
from deltic.ops.arrays import Array, raw

RowsOf = Callable[[int, slice], Array]
"""Takes the number of a chunk and which of its tokens. Returns their hidden states, bfloat16 [N, H]."""


class Judge:
    """A joint head, and the output embedding from whose rows it knows the words of options."""

    def __init__(self, head: JointHead, rows: Callable[[int], Array]) -> None:
        """rows: the row of an id, [1, H]."""
        self._head, self._rows = head, rows

    def logits(self, request: Request, ids: list[int], hidden: NDArray[np.float32]) -> bytes:
        """float32: of all options of the request's questions, in order. ids, hidden: of its prompt."""
        questions = [
            SpannedQuestion(question.kind, Span(*question.instruction), [Span(*span) for span in question.options])
            for question in request.questions
        ]
        spans = [span for question in questions for span in question.options]
        known = {id: np.array(self._rows(id)[0], np.float32) for begin, end in spans for id in ids[begin:end]}
        lexical = np.stack([np.mean([known[id] for id in ids[begin:end]], 0) for begin, end in spans])
        return np.concatenate(self._head.logits(hidden, questions, lexical)).tobytes()


class Pools:
    """The prompts whose hidden states are being read. A mean is summed in float64, token by token, so that no
    cut between chunks shows in it; a joint head gets all rows at once.
    """

    def __init__(self) -> None:
        self.judge: Judge | None = None
        self._open: dict[Sequence, Any] = {}

    def follow(self, step: Step, rows_of: RowsOf) -> dict[int, bytes]:
        """Takes what a step has computed. Returns the vectors of prompts that are complete, float32, by the
        number of the draw.
        """
        self._open = {sequence: pool for sequence, pool in self._open.items() if sequence.finish_reason is None}
        for c, chunk in enumerate(step.chunks):
            if chunk.sequence.request.reads_hidden and (part := wanted(chunk)):
                self._take(chunk, rows_of(c, part))
        return {
            i: self._vector(draw.sequence) for i, draw in enumerate(step.draws) if draw.sequence.request.reads_hidden
        }

    def _take(self, chunk: Chunk, rows: Array) -> None:
        sequence, pooling = chunk.sequence, chunk.sequence.request.pooling
        if pooling is None:
            before = [] if chunk.start == 0 else self._open[sequence]  # also of one that starts over
            self._open[sequence] = [*before, raw(rows).copy()]
        elif pooling.mode != "mean":
            self._open[sequence] = _float32(rows)[0].astype(np.float64)
        else:
            if chunk.start == 0:
                self._open[sequence] = np.zeros(rows.shape[1])
            total = self._open[sequence]
            for row in _float32(rows):
                total += row

    def _vector(self, sequence: Sequence) -> bytes:
        request, pool = sequence.request, self._open.pop(sequence)
        if request.pooling is not None:
            return _pooled(pool / (sequence.n_prompt if request.pooling.mode == "mean" else 1), request.pooling)
        assert self.judge is not None
        return self.judge.logits(request, sequence.tokens[: sequence.n_prompt].tolist(), _float32(np.concatenate(pool)))


def wanted(chunk: Chunk) -> slice | None:
    """Says which of a chunk's tokens count; None: none of them."""
    pooling = chunk.sequence.request.pooling
    if pooling is None or pooling.mode == "mean":
        return slice(0, chunk.length)
    if pooling.mode == "cls":
        return slice(0, 1) if chunk.start == 0 else None
    return slice(chunk.length - 1, chunk.length) if chunk.start + chunk.length == chunk.sequence.n_prompt else None


def _pooled(pooled: NDArray[np.float64], pooling: Pooling) -> bytes:
    """The vector, cut to its first elements and then made as long as it should be (zeros stay zeros)."""
    kept = pooled[: pooling.n_dimensions]
    if pooling.is_normalised:
        kept = kept / max(float(np.sqrt(np.square(kept).sum())), 1e-12)
    return kept.astype(np.float32).tobytes()


def _float32(rows: Array) -> NDArray[np.float32]:
    return (raw(rows).astype(np.uint32) << 16).view(np.float32)
