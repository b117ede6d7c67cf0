"""embed: token ids to rows of the embedding, widened to the float32 residual stream."""

from __future__ import annotations

import torch
from torch import Tensor

from deltic.ops.table import Program, check


def embed(program: Program, table: Tensor, token_ids: Tensor, out: Tensor, n_tokens: Tensor) -> None:
    """out[t] = float32(table[token_ids[t]]).

    table: bfloat16 [V, H]; token_ids: int32 [T]; out: float32 [T, H]; n_tokens: int32 scalar, rows in use.
    Leaves out: a check of the ids; the scheduler only passes ids of the vocabulary.
    """
    check(
        "embed", table.dtype == torch.bfloat16 and out.dtype == torch.float32, "bfloat16 table, float32 out"
    )
    check(
        "embed", table.shape[1] == out.shape[1] and table.shape[1] % 16 == 0, "equal widths, a multiple of 16"
    )
    program.call("deltic_embed", table, token_ids, out, n_tokens, table.shape[1])
