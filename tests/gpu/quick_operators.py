"""Operators of tensors in Triton's interpreter, by plans: which type both sides become, and what NumPy computes of them.

Triton finds that again at each operator, which took more than half of the interpreter's time. A plan is kept when its first result
is Triton's, bit for bit; what has none (bfloat16, differences of pointers, errors) goes Triton's way each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tests.gpu.mended_interpreter import rounded

NUMPY = {name: np.dtype(name) for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")}
INTEGERS = set(NUMPY)
NUMPY |= {"int1": np.dtype(bool), "fp16": np.dtype("float16"), "fp32": np.dtype("float32"), "fp64": np.dtype("float64")}
"""Types whose values are NumPy's, and become each other as `astype` says."""
LOADED = NUMPY | {"bf16": np.dtype("uint16"), "fp8e4nv": np.dtype("uint8"), "fp8e5": np.dtype("uint8")}
LOADED.pop("int1")
"""As they lie in memory."""
OFFSETS = ("int32", "int64")
"""Of pointers; Triton widens others first."""


def _floored(x: Any, y: Any) -> Any:
    return (x - np.fmod(x, y)) // y


ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
OF_FLOATS = {"truediv": np.divide}
OF_INTEGERS = {"floordiv": _floored, "mod": np.fmod, "lshift": np.left_shift, "rshift": np.right_shift}
OF_BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal}
COMPARISONS |= {"ne": np.not_equal}
REFLECTED = ("add", "sub", "mul", "truediv", "lshift", "rshift", "and", "or", "xor")


SLOW: dict[str, Callable[..., Any]] = {}
"""Triton's own, by name."""


class Plan(NamedTuple):
    """What is made of the data of x and y before compute, unless it is a constant; and the types of the result."""

    compute: Callable[..., Any]
    x: Any
    y: Any
    constant: Any
    handle_type: Any
    element_type: Any
    numpy_type: Any


_OF_SCALARS = tl.tuple([]), tl.constexpr(1)
"""Shape and number of elements."""
_types: dict[tuple[str, tuple[int, ...]], Any] = {}


def _tensor(data: Any, handle_type: Any, element_type: Any, is_block: bool) -> Any:
    """Without a look whether the data is what its types say."""
    found, handle = object.__new__(tl.tensor), object.__new__(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, handle_type, {}
    if not is_block:
        found.handle, found.type, found.dtype = handle, element_type, element_type
        found.shape, found.numel = _OF_SCALARS
        return found
    key = element_type.name, data.shape
    type = _types.get(key)
    if type is None:
        type = _types[key] = tl.block_type(element_type, list(data.shape))
    found.handle, found.type, found.dtype = handle, type, element_type
    found.shape, found.numel = type.of_tensors
    return found


def is_same(found: Any, wanted: Any) -> bool:
    """In types, shape and bits. What is compared has, with Triton, a handle of its operands' type, and so has a splat of it."""
    x, y = found.handle.data, wanted.handle.data
    x, y = (part.astype(bool) if wanted.dtype.name == "int1" else part for part in (x, y))
    types = found.type == wanted.type and (wanted.dtype.name == "int1" or found.handle.dtype == wanted.handle.dtype)
    return bool(types) and (x.dtype, x.shape) == (y.dtype, y.shape) and x.tobytes() == y.tobytes()


def _common_type(name: str, types: list[Any], are_numbers: list[bool]) -> Any:
    """Of both sides when they are computed with; None: there is no plan for it."""
    if not all(type.name in NUMPY for type in types):
        return None
    semantic, divides = interpreter.interpreter_semantic, name in ("truediv", "floordiv", "mod")
    weigh_less = are_numbers if name not in COMPARISONS else [False, False]
    type = semantic.computation_type_impl(types[0], weigh_less[0], types[1], weigh_less[1], divides)
    is_integer, is_bool = type.name in INTEGERS, type.name == "int1"
    if name.endswith("shift") and {type.name} != {types[0].name, *({} if are_numbers[1] else {types[1].name})}:
        return None  # whether it shifts signs in, follows the left type alone
    fits = (
        (name in ARITHMETIC and not is_bool)
        or (name in OF_FLOATS and not is_integer and not is_bool)
        or (name in OF_INTEGERS and is_integer)
        or (name in OF_BITS and (is_integer or is_bool))
        or name in COMPARISONS
        or name == "where"
    )
    return type if fits and type.name in NUMPY else None


def _plan(name: str, compute: Callable[..., Any], x: Any, y: Any, result: Any) -> Plan | None:
    """Of an operator between a tensor and a tensor or a number, in any order."""
    semantic, data = interpreter.interpreter_semantic, result.handle.data
    are_numbers = [not isinstance(side, tl.tensor) for side in (x, y)]
    types = [
        semantic.to_tensor_type(side) if is_number else side.dtype
        for side, is_number in zip((x, y), are_numbers, strict=True)
    ]
    handle_type = tl.int1 if result.dtype.name == "int1" else result.handle.dtype
    of_result = handle_type, result.dtype, NUMPY.get(result.dtype.name, data.dtype)
    if name == "add" and types[0].is_ptr() and types[1].name in OFFSETS:
        size = np.uint64(max(1, types[0].element_ty.primitive_bitwidth // 8))
        if are_numbers[1]:
            return Plan(np.add, None, None, size * semantic.to_tensor(y).handle.data.astype(np.uint64), *of_result)
        return Plan(lambda x, y: x + size * y.astype(np.uint64), None, None, None, *of_result)
    type = _common_type(name, types, are_numbers)
    if type is None:
        return None
    become = [
        None if is_number or of.name == type.name else NUMPY[type.name]
        for of, is_number in zip(types, are_numbers, strict=True)
    ]
    number = x if are_numbers[0] else y
    constant = None
    if any(are_numbers):  # comparisons make tensors of numbers first
        of_number = semantic.to_tensor if name in COMPARISONS else lambda number: semantic.scalar_constant(number, type)
        constant = of_number(number).handle.data.astype(NUMPY[type.name])
    return Plan(compute, *become, constant, *of_result)


def _operator(name: str, compute: Callable[..., Any], is_reflected: bool) -> None:
    """Of x and y: x is a tensor, y one or a number; reflected, the number is in front."""
    method = f"__{'r' * is_reflected}{name}__"
    slow, plans = getattr(tl.tensor, method), {}
    SLOW[method] = slow

    def quick(x: Any, y: Any) -> Any:
        if type(y) is tl.constexpr:
            y = y.value
        of_tensors = type(y) is tl.tensor
        try:
            key = (x.dtype.name, y.dtype.name) if of_tensors else (x.dtype.name, type(y), y)
            plan = plans[key]
        except (KeyError, TypeError):
            return learn(x, y)
        if plan is None:
            return slow(x, y)
        left = x.handle.data if plan.x is None else x.handle.data.astype(plan.x)
        if of_tensors:
            right = y.handle.data if plan.y is None else y.handle.data.astype(plan.y)
            is_block = x.type.is_block() or y.type.is_block()
        else:
            right, is_block = plan.constant, x.type.is_block()
        data = plan.compute(right, left) if is_reflected else plan.compute(left, right)
        if data.dtype != plan.numpy_type:
            return slow(x, y)
        return _tensor(data, plan.handle_type, plan.element_type, is_block)

    def learn(x: Any, y: Any) -> Any:
        wanted = slow(x, y)
        if type(y) is not tl.tensor and type(y) not in (int, float, bool):
            return wanted
        key = (x.dtype.name, y.dtype.name) if type(y) is tl.tensor else (x.dtype.name, type(y), y)
        sides = (y, x) if is_reflected else (x, y)
        plan = _plan(name, compute, *sides, wanted)
        if plan is not None and is_reflected:
            plan = plan._replace(x=plan.y, y=plan.x)
        plans[key] = plan
        if plan is not None and not is_same(quick(x, y), wanted):
            plans[key] = None
        return wanted

    setattr(tl.tensor, method, quick)


def _quick_to() -> None:
    """Of a tensor's values another type."""
    slow, plans = tl.tensor.to, {}
    SLOW["to"] = slow

    def quick(x: Any, dtype: Any, *more: Any, **others: Any) -> Any:
        if type(dtype) is tl.constexpr:
            dtype = dtype.value
        if more or others:
            return slow(x, dtype, *more, **others)
        key = x.dtype.name, dtype.name
        plan = plans.get(key, plans)
        if plan is plans:
            return learn(key, x, dtype)
        if plan is None:
            return slow(x, dtype)
        if key[0] == key[1]:
            return x
        return _tensor(plan(x.handle.data), dtype, dtype, x.type.is_block())

    def learn(key: tuple[str, str], x: Any, dtype: Any) -> Any:
        wanted = slow(x, dtype)
        source, to = key
        plans[key] = None
        if source in NUMPY and to in NUMPY and (source == to or to != "int1"):
            plans[key] = lambda data: data.astype(NUMPY[to])
        elif key == ("bf16", "fp32") or (source.startswith("fp8") and to in ("fp16", "bf16", "fp32")):
            table = _table(source, x.dtype, dtype)
            plans[key] = lambda data: table[data]
        elif key == ("fp32", "bf16"):
            plans[key] = rounded
        if plans[key] is not None and not is_same(quick(x, dtype), wanted):
            plans[key] = None
        return wanted

    def _table(source: str, type: Any, to: Any) -> Any:
        """What Triton makes of every value of 8 or 16 bits."""
        unsigned = np.uint16 if source == "bf16" else np.uint8
        every = np.arange(np.iinfo(unsigned).max + 1).astype(unsigned)
        found: Any = slow(_tensor(every, type, type, True), to)
        return found.handle.data

    tl.tensor.to = quick


def _quick_load() -> None:
    slow, known = tl.load, set()

    def quick(pointer: Any, mask: Any = None, other: Any = None, **more: Any) -> Any:
        if not more or (hints := tuple(more.items())) in known:
            found = load(pointer, mask, other)
            if found is not None:
                return found
        found = slow(pointer, mask, other, **more)
        if more and not {*more} - {"cache_modifier", "eviction_policy", "volatile"}:
            known.add(hints)
        return found

    def load(pointer: Any, mask: Any, other: Any) -> Any:
        """None: it is no plain load of a block by pointers."""
        type_ = pointer.type
        if not (type_.is_block() and type_.element_ty.is_ptr()):
            return None
        of, addresses = type_.element_ty.element_ty, pointer.handle.data
        if of.name not in LOADED:
            return None
        if mask is None:
            if other is not None:
                return None
            mask = np.ones(addresses.shape, bool)
        else:
            if type(mask) is not tl.tensor or mask.dtype.name != "int1":
                return None
            mask = mask.handle.data.astype(bool, copy=False)  # as in mended_interpreter.py
            if mask.shape != addresses.shape:
                mask = np.broadcast_to(mask, addresses.shape)
        if other is None or (type(other) in (int, float) and other == 0):
            rest = np.zeros(addresses.shape, LOADED[of.name])
        elif type(other) is tl.tensor and other.dtype.name == of.name:
            rest = np.broadcast_to(other.handle.data, addresses.shape)
        else:
            return None
        return _tensor(interpreter._interpreter.load(addresses, mask, rest, LOADED[of.name]), of, of, True)

    tl.load = tl.core.load = quick


def _quick_index() -> None:
    """Another axis."""
    slow, whole = tl.tensor.__getitem__, slice(None)
    SLOW["__getitem__"] = slow

    def quick(x: Any, slices: Any) -> Any:
        if type(slices) is not tuple or not x.type.is_block():
            return slow(x, slices)
        shape, at, old = [], 0, x.handle.data.shape
        for each in slices:
            if each is None:
                shape.append(1)
            elif type(each) is slice and each == whole and at < len(old):
                shape.append(old[at])
                at += 1
            else:
                return slow(x, slices)
        return _tensor(x.handle.data.reshape((*shape, *old[at:])), x.handle.dtype, x.dtype, True)

    tl.tensor.__getitem__ = quick


def _quick_where() -> None:
    slow, plans = tl.where, {}
    SLOW["where"] = slow

    def kind(x: Any) -> Any:
        return x.dtype.name if type(x) is tl.tensor else (type(x), x)

    def quick(condition: Any, x: Any, y: Any) -> Any:
        key = kind(x), kind(y)
        plan = plans.get(key, plans)
        if plan is plans:
            return learn(key, condition, x, y)
        if plan is None or type(condition) is not tl.tensor or condition.dtype.name != "int1":
            return slow(condition, x, y)
        sides, is_block = [], condition.type.is_block()
        for side, to in ((x, plan.x), (y, plan.y)):
            if type(side) is tl.tensor:
                sides.append(side.handle.data if to is None else side.handle.data.astype(to))
                is_block = is_block or side.type.is_block()
            else:
                sides.append(plan.constant)
        data = np.where(condition.handle.data, *sides)
        return _tensor(data, plan.handle_type, plan.element_type, is_block)

    def learn(key: Any, condition: Any, x: Any, y: Any) -> Any:
        wanted = slow(condition, x, y)
        numbers = [side for side in (x, y) if type(side) is not tl.tensor]
        if not all(type(side) in (int, float) for side in numbers):
            return wanted
        plans[key] = _plan("where", np.where, x, y, wanted) if len(numbers) < 2 else None
        if plans[key] is not None and not is_same(quick(condition, x, y), wanted):
            plans[key] = None
        return wanted

    tl.where = tl.core.where = quick


def quicken_operators() -> None:
    """After the language is patched, once."""
    for found in (ARITHMETIC, OF_FLOATS, OF_INTEGERS, OF_BITS, COMPARISONS):
        for name, compute in found.items():
            _operator(name, compute, False)
            if name in REFLECTED:
                _operator(name, compute, True)
    _quick_to()
    _quick_load()
    _quick_index()
    _quick_where()
