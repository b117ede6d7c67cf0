"""embed: token ids to rows of the embedding, widened to the float32 residual stream."""

from __future__ import annotations

import torch
from torch import Tensor

from deltic.ops.matrix import Matrix
from deltic.ops.table import Program, check


def embed(program: Program, table: Matrix, token_ids: Tensor, out: Tensor, n_tokens: Tensor) -> None:
    """out[t] = float32(table[token_ids[t]]).

    table: [V, H]; token_ids: int32 [T]; out: float32 [T, H]; n_tokens: int32 scalar, rows in use.
    Leaves out: a check of the ids; the scheduler only passes ids of the vocabulary.
    """
    check("embed", out.dtype == torch.float32 and table.k == out.shape[1], f"float32 out of width {table.k}")
    program.call("deltic_embed", *table.arguments, token_ids, out, n_tokens)
