"""Triton's interpreter, quicker: what it makes again for every launch, call or tensor, though it is the same each time, is kept.

No value changes (test_gpu_interpreter.py). With the tiny shapes of tests, nine tenths of its time went there (3.6; 3.7 is the same
in this). Operators are in quick_operators.py.
"""

from __future__ import annotations

import time
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import ConstexprFunction

from tests.gpu.quick_operators import quicken_operators

_patch_lang = interpreter._patch_lang
_np_dtype = interpreter._get_np_dtype
_broadcast = TritonSemantic.broadcast_impl_value
_equal = tl.tuple.__eq__
_unwrap = tl.core._unwrap_if_constexpr
_type_equal = tl.dtype.__eq__


@cache
def _patch_language() -> None:
    _patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    quicken_operators()


def _patched(fn: Any) -> Any:
    """Once and for good, where Triton does it for each launch and looks again in each function that a kernel calls."""
    _patch_language()
    return interpreter._LangPatchScope()


@cache
def _named_np_dtype(name: str) -> Any:
    return _np_dtype(tl.dtype(name))


def _quick_np_dtype(type: Any) -> Any:
    return np.dtype(np.uint64) if type.scalar.is_ptr() else _named_np_dtype(type.scalar.name)


@cache
def _sizes(*shape: int) -> tuple[Any, int, Any, Any]:
    """Shape and number of elements as a type of blocks has them, and as its tensors do."""
    numel = tl.core.validate_block_shape(shape)
    return tl.tuple(shape), numel, tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(numel)


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    self.shape, self.numel, *self.of_tensors = _sizes(*tl.core._unwrap_shape(shape))
    assert len(self.shape) > 0


def _with_element_ty(self: Any, element_ty: Any) -> Any:
    other = object.__new__(tl.block_type)
    other.__dict__ = self.__dict__ | {"element_ty": element_ty}
    return other


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensors if type.is_block() else _sizes()[2:]


def _quick_equal(self: Any, other: Any) -> Any:
    return tl.constexpr(True) if self is other else _equal(self, other)


def _quick_broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    is_done = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
    return (lhs, rhs) if is_done else _broadcast(self, lhs, rhs)


_atomic_rmw = interpreter.InterpreterBuilder.create_atomic_rmw
WAIT_S = 1e-4
PLAIN = {int, float, bool, str, type(None), tl.tensor, tl.dtype, tl.block_type, tl.pointer_type}


def _quick_unwrap(o: Any) -> Any:
    of = type(o)
    return o if of in PLAIN else o.value if of is tl.constexpr else _unwrap(o)


def _quick_type_equal(self: Any, other: Any) -> bool:
    return self is other or _type_equal(self, other)


def _quick_unwrap_shape(shape: Any) -> list[Any]:
    return [_quick_unwrap(size) for size in (shape.value if type(shape) is tl.constexpr else shape)]


def _constant(self: Any, *args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
    """What a function of constants returns, which is no `constexpr` here."""
    return self.fn(*map(_quick_unwrap, args), **{name: _quick_unwrap(value) for name, value in kwargs.items()})


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that a kernel calls, for which the language is patched."""
    fn = self.rewritten_fn.get(self.fn) or self.rewrite()
    try:
        return fn(*args, **kwargs)
    except Exception as error:
        raise InterpreterError(repr(error)) from error


def _member(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """A function of the language as kernels call it, without one that only looks whether they do."""
    fn = getattr(member, "__wrapped__", member)

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return fn(*args, **kwargs)

    scope.set_attr(obj, name, called)


def _atomic(self: Any, operation: Any, pointer: Any, value: Any, *more: Any) -> Any:
    """A rank that waits for another (ops/gpu/all_reduce.py) looks again and again: another process may have the CPU meanwhile."""
    if value.data.size == 1 and not value.data.item():
        time.sleep(WAIT_S)
    return _atomic_rmw(self, operation, pointer, value, *more)


def quicken() -> None:
    """For the whole process; to be called before a kernel runs."""
    interpreter._patch_lang = _patched
    interpreter._patch_attr = _member
    interpreter.InterpreterBuilder.create_atomic_rmw = _atomic
    interpreter.InterpretedFunction.__call__ = _call
    ConstexprFunction.__call__ = _constant
    tl.core._unwrap_if_constexpr, tl.core._unwrap_shape = _quick_unwrap, _quick_unwrap_shape
    tl.dtype.__eq__ = _quick_type_equal
    interpreter._get_np_dtype = _quick_np_dtype
    tl.block_type.__init__ = _init_block_type
    tl.block_type.with_element_ty = _with_element_ty
    tl.block_type.to_ir = lambda self, builder: self  # an interpreter has no other types
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.tensor.__init__ = _init_tensor
    tl.tuple.__eq__ = _quick_equal
    TritonSemantic.broadcast_impl_value = _quick_broadcast
    # Without its option `debug`, which is off, nothing looks at what it computes.
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
