"""Loaded weights as plain rows, for the oracle: what each packed matrix stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltic.models.qwen.ngram_table import NgramTable
from deltic.models.qwen.weights import Moe, Weights
from deltic.ops.arrays import bfloat16
from deltic.ops.matrix import Matrix
from tests.tensors import tensor_of


def rows(matrix: Matrix) -> Tensor:
    """[n, k], or [E, n, k] of experts; bfloat16 where that is what is stored."""
    if matrix.segments[0].layout == "rows":
        from deltic.ops.gpu.weight import rows_of

        return rows_of("oracle", matrix).cpu()
    values = tensor_of(matrix.unpack())
    if {segment.format.name for segment in matrix.segments} == {"bf16"}:
        values = values.to(torch.bfloat16)
    return values[0] if len(values) == 1 else values


def vector(part: Any) -> Tensor:
    return part.cpu() if isinstance(part, Tensor) else tensor_of(part)


def ngram_rows(table: NgramTable, ids: Tensor) -> Tensor:
    """float32 [T, E]: rows of the table of n-grams, ids int64 [T, heads]."""
    rows = np.empty((len(ids), ids.shape[1] * table.width), bfloat16)
    table.gather(ids.numpy(), rows)
    return tensor_of(rows.astype(np.float32))


def plain(weights: Weights, of_matrix: Callable[[Matrix], Any] = rows) -> Any:
    """The same structure with tensors in the place of matrices, and the shared expert's gate apart from the router.

    of_matrix: what stands in the place of a matrix, if not `rows`.
    """

    def one(value: Any) -> Any:
        if isinstance(value, Matrix):
            return of_matrix(value)
        if value is None or isinstance(value, int):
            return value
        return fields(value) if dataclasses.is_dataclass(value) else vector(value)

    def fields(owner: Any) -> Any:
        out = type(owner).__new__(type(owner))
        for field in dataclasses.fields(owner):
            setattr(out, field.name, one(getattr(owner, field.name)))
        if isinstance(owner, Moe):
            out.shared_gate, out.router = out.router[-1], out.router[:-1]
        return out

    return SimpleNamespace(
        embed=of_matrix(weights.embed),
        norm=one(weights.norm),
        lm_head=of_matrix(weights.lm_head),
        layers=[fields(layer) for layer in weights.layers],
        draft_head=one(weights.draft_head),
        ngram_rows=None if weights.ngram_table is None else partial(ngram_rows, weights.ngram_table),
    )
