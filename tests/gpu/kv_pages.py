"""Quantised pages of a GPU, made and read by the reference: where codes, scales and least values lie in their bytes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from deltic.ops.geometry import PAGE_SIZE
from deltic.ops.kv_formats import KV_FORMATS, KvFormat
from tests.reference.kv import FORMATS, Rows

QUANTISED = [KV_FORMATS["fp8"], KV_FORMATS["turboquant_k8v4"]]


def _array(x: Tensor) -> np.ndarray:
    return x.cpu().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def quantised(pages: Tensor, format: KvFormat) -> Tensor:
    """uint8 [n, bytes] of bfloat16 pages [n, 2, nk, 64, d]. What is not finite is no number there, too."""
    n, _, _, _, d = pages.shape
    keys, values = (rows(_array(pages[:, i])) for i, rows in enumerate(FORMATS[format.name]))
    codes = values.codes
    if format.value_bits == 4:
        codes = codes[..., : d // 2] | codes[..., d // 2 :] << 4
    parts = [keys.codes, codes, keys.scale, values.scale, values.least]
    flat = [np.ascontiguousarray(part).view(np.uint8).reshape(n, -1) for part in parts if part is not None]
    return torch.from_numpy(np.concatenate(flat, 1)).to(pages.device)


def values_of(pages: Tensor, format: KvFormat, n_heads: int, dim: int) -> Tensor:
    """float32 [n, 2, nk, 64, d]: what pages in any format stand for."""
    if format.is_plain:
        return pages.float().cpu()
    shape = len(pages), n_heads, PAGE_SIZE
    parts = {
        name: pages[:, begin : begin + size].cpu().contiguous().numpy()
        for name, (begin, size) in format.sections(n_heads, dim).items()
    }
    floats = {
        name: part.view(np.float16).reshape(shape) for name, part in parts.items() if name not in ("keys", "values")
    }
    keys = Rows(parts["keys"].view(ml_dtypes.float8_e4m3fn).reshape(*shape, dim), floats.get("key_scales"))
    codes = parts["values"].reshape(*shape, -1)
    if format.value_bits == 4:
        codes = np.concatenate([codes & 15, codes >> 4], -1)
    else:
        codes = codes.view(ml_dtypes.float8_e4m3fn)
    values = Rows(codes, floats["value_scales"], floats.get("least_values"))
    return torch.from_numpy(np.stack([keys.values(), values.values()], 1))
