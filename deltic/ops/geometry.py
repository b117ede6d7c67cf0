"""Sizes that kernels, models and the engine share, and what hands out memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PAGE_SIZE = 64
"""Tokens in one KV page; also the grid on which the scheduler cuts a prefill, and a block of one on a GPU."""

N_CODES = 16
"""Of a frame of speech: one that the talker draws, and 15 of its predictor."""

Allocate = Callable[[str, tuple[int, ...], "torch.dtype"], "Tensor"]
"""A tensor by the name of what it is for, its shape and its type: one that is counted, or one that is there."""
