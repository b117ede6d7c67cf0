"""Rounding bfloat16 rows to the formats of --quantize, on a device: the codes and scales of csrc/pack.cpp,
bit for bit, and e4m3. Every sum has the order that it has there, and nothing is fused.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.formats import BLOCK_ROWS, WeightFormat

MADE = ("int8", "int4", "int4-symmetric", "fp8")
"""The formats that are made of bfloat16."""

_MAGIC = 12582912.0
"""1.5 * 2^23: adding it rounds to an integer."""


def quantise(format: WeightFormat, rows: Tensor, n_matrices: int = 1) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and least values of bfloat16 rows [n, k]: uint8 [n, k], and [n, groups] of the format's
    dtype. The rows are as many of each matrix, from a multiple of BLOCK_ROWS on.

    Raises KernelError for a format that is not made of bfloat16.
    """
    name, (n, k) = format.name, rows.shape
    check("weights", name in MADE, f"rows in {name}; it is not made of bfloat16")
    whole = k // format.group * format.group
    found = []
    for part in (rows[:, :whole], rows[:, whole:]):
        if part.shape[1]:
            # [weights, groups]: sums walk the weights
            w = part.float().reshape(-1, min(format.group, part.shape[1])).t().contiguous()
            made: tuple[Tensor, ...]
            if name == "int8":
                made = _int8(w)
            elif name == "fp8":
                made = _e4m3(w, n_matrices, n // n_matrices)
            else:
                made = _int4(w, name != "int4")
            found.append((made[0].t().reshape(n, -1), *(one.view(n, -1) for one in made[1:])))
    codes, scale, *least = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    return codes, scale, least[0] if least else None


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x == 0, 0.0, 1.0 / x)


def _rounded(w: Tensor, least: Tensor, inverse: Tensor, top: float) -> Tensor:
    return ((w - least).mul_(inverse).add_(_MAGIC).sub_(_MAGIC)).clamp_(0.0, top)


def _summed(parts: Tensor) -> Tensor:
    """The sum over the first dimension, in its order."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total


def _int8(w: Tensor) -> tuple[Tensor, Tensor]:
    scale = w.abs().amax(0) * float(np.float32(1) / np.float32(127))
    codes = _rounded(w, scale * -128.0, _inverse(scale), 255.0).to(torch.uint8)
    return codes ^ 0x80, scale


def _e4m3(w: Tensor, n_matrices: int, n: int) -> tuple[Tensor, Tensor]:
    """Codes w with one scale for BLOCK_ROWS of a matrix's n rows, as in the published checkpoints."""
    blocks = torch.split(w.abs().amax(0).view(n_matrices, n, -1), BLOCK_ROWS, 1)
    scale = torch.cat([block.amax(1, keepdim=True).expand_as(block) for block in blocks], 1).flatten() / 448.0
    codes = torch.where(scale == 0, 0.0, w / scale).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scale


def _int4(w: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Scale and least by trial, as `fit_int4` of csrc/pack.cpp."""
    scale, least = _fitted(w, symmetric)
    rounded = scale.bfloat16()
    scale = rounded.float()
    least = scale * -8.0 if symmetric else least.bfloat16().float()
    return _rounded(w, least, _inverse(scale), 15.0).to(torch.uint8), rounded, least.bfloat16()


def _fitted(w: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
    low, high, n = w.amin(0), w.amax(0), float(len(w))
    sum_x, sum_xx = _summed(w), _summed(w * w)
    most = torch.maximum(high, -low)
    best = torch.full_like(low, torch.inf)
    best_scale, best_least = torch.zeros_like(low), torch.zeros_like(low)
    f32 = np.float32
    for trial in range(16 if symmetric else 8):
        divisor, sign = f32(0.3) * f32(trial % 8), f32(1 if trial < 8 else -1)
        if symmetric:
            step = most * float(sign / (f32(6.5) + divisor))
            q = _rounded(w, step * -8.0, _inverse(step), 15.0).sub_(8.0)
        else:
            step = (high - low) * float(f32(1) / (f32(14) + divisor))
            q = _rounded(w, low, _inverse(step), 15.0)
        sum_q, sum_qq = q.sum(0), (q * q).sum(0)  # integers: exact in any order
        sum_qx = _summed(q.mul_(w))
        if symmetric:
            scale, least = sum_qx * _inverse(sum_qq), torch.zeros_like(low)
        else:
            spread = n * sum_qq - sum_q * sum_q
            scale = (n * sum_qx - sum_q * sum_x) * _inverse(spread)
            least = (sum_x - scale * sum_q) / n
        # |x - scale q - least|^2, expanded
        error = sum_xx + scale * scale * sum_qq + n * least * least
        error -= 2.0 * (scale * sum_qx + least * sum_x - scale * least * sum_q)
        better = error < best
        best = torch.where(better, error, best)
        best_scale = torch.where(better, scale, best_scale)
        best_least = torch.where(better, scale * -8.0 if symmetric else least, best_least)
    return best_scale, best_least
