"""Loaded weights as plain rows, for the oracle: what each packed matrix stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deltic.models.qwen.weights import Moe, Weights
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


def plain(weights: Weights, of_matrix: Callable[[Matrix], Any] = rows) -> Any:
    """The same structure with tensors in the place of matrices, and the shared expert's gate apart from the router.

    of_matrix: what stands in the place of a matrix, if not `rows`.
    """

    def fields(owner: Any) -> Any:
        out = type(owner).__new__(type(owner))
        for field in dataclasses.fields(owner):
            value = getattr(owner, field.name)
            if isinstance(value, Matrix):
                value = of_matrix(value)
            elif dataclasses.is_dataclass(value):
                value = fields(value)
            else:
                value = vector(value)
            setattr(out, field.name, value)
        if isinstance(owner, Moe):
            out.shared_gate, out.router = out.router[-1], out.router[:-1]
        return out

    return SimpleNamespace(
        embed=of_matrix(weights.embed),
        norm=vector(weights.norm),
        lm_head=of_matrix(weights.lm_head),
        layers=[fields(layer) for layer in weights.layers],
        draft_head=None if weights.draft_head is None else fields(weights.draft_head),
    )
