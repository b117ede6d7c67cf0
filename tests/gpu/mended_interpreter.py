"""Triton's interpreter, mended where it is not what a GPU does: version 3.6 multiplies bfloat16 as integers and rounds to it
towards 0, rounds twice in a fused multiply-add, and with NumPy 2.4 no loop ends at a bound that was loaded; 3.9 makes integers of
truth values that are given to a function, and then takes no such mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_cast = interpreter.InterpreterBuilder.cast_impl


def _patched(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    if handle.dtype.scalar == tl.float16:
        return handle.data.astype(np.float32)
    return handle.data


def _dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    # a BLAS may give a row other bits at another place or in another number of rows; in float64 the sums of bfloat16 are mostly exact
    product = np.matmul(_widened(a), _widened(b), dtype=np.float64) + d.data
    return interpreter.TensorHandle(product.astype(d.data.dtype, copy=False), d.dtype.scalar)


def rounded(x: Any) -> Any:
    """float32 as the bits of bfloat16, uint16."""
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def _rounding(self: Any, source: Any, to: Any) -> Any:
    if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
        return interpreter.TensorHandle(rounded(source.data), tl.bfloat16)
    return _cast(self, source, to)


def _fma(self: Any, a: Any, b: Any, c: Any) -> Any:
    if c.dtype.scalar != tl.float32:
        return interpreter.TensorHandle(a.data * b.data + c.data, c.dtype.scalar)
    sum_ = a.data.astype(np.float64) * b.data.astype(np.float64) + c.data.astype(np.float64)
    return interpreter.TensorHandle(sum_.astype(np.float32), tl.float32)


def _masked(access: Any, at: int) -> Any:
    """An access to memory whose mask, operand `at`, may be of integers."""

    def of_truth(self: Any, *operands: Any, **others: Any) -> Any:
        mask = operands[at]
        if isinstance(mask, interpreter.TensorHandle) and mask.data.dtype != bool:
            mask = interpreter.TensorHandle(mask.data.astype(bool), tl.int1)
        return access(self, *operands[:at], mask, *operands[at + 1 :], **others)

    return of_truth


def mend() -> None:
    """For the whole process; to be called before a kernel runs."""
    interpreter._patch_lang_tensor = _patched
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.cast_impl = _rounding
    interpreter.InterpreterBuilder.create_fp_trunc = _rounding
    interpreter.InterpreterBuilder.create_fma = _fma
    for name, at in (("create_masked_load", 1), ("create_masked_store", 2), ("create_atomic_rmw", 3)):
        setattr(interpreter.InterpreterBuilder, name, _masked(getattr(interpreter.InterpreterBuilder, name), at))
