"""The interpreter that stands in for a GPU computes, where it is made quicker, what Triton's own does: bit for bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
import triton.language as tl
from triton.runtime import interpreter

from deltic.ops.gpu.launch import INTERPRETED
from tests.gpu import mended_interpreter, quick_interpreter
from tests.gpu.mended_interpreter import rounded
from tests.gpu.quick_operators import NUMPY, SLOW, is_same

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels run natively")
TYPES = {type.name: type for type in (tl.int1, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.float32)}
SHAPES = (
    ((4, 8), (4, 8)),
    ((4, 8), (1, 8)),
    ((4, 1), (1, 8)),
    ((8,), (4, 8)),
    ((4, 8), None),
    (None, (4, 8)),
    (None, None),
)
"""Of both sides; None: no block."""


def tensor(type: Any, shape: tuple[int, ...] | None, rng: np.random.Generator) -> Any:
    values = rng.integers(-9 if type.name[0] in "if" else 1, 9, shape or (1,)) * (0.75 if type.is_floating() else 1)
    values[values == 0] = 5  # a divisor
    values = values > 0 if type.name == "int1" else values
    handle = interpreter.TensorHandle(values.astype(NUMPY[type.name]), type)
    return tl.tensor(handle, tl.block_type(type, list(shape)) if shape else type)


def outcome(fn: Any, *args: Any) -> Any:
    """What it returns or, if it refuses these types, of which kind the error is."""
    try:
        return fn(*args)
    except Exception as error:
        return type(error)


def agree(name: str, fn: Any, *args: Any) -> None:
    found, wanted = outcome(fn, *args), outcome(SLOW[name], *args)
    assert found is wanted or is_same(found, wanted), (name, args, found, wanted)


@pytest.fixture(scope="module", autouse=True)
def patched() -> None:
    quick_interpreter._patch_language()


@pytest.mark.filterwarnings("ignore")
def test_operators_are_tritons_own() -> None:
    """Of all pairs of types, shapes and values other than those that a plan was made of; with numbers on either side, too."""
    rng = np.random.default_rng(0)
    methods = [name for name in SLOW if name.startswith("__") and name != "__getitem__"]
    assert len(methods) > 20
    for x, y in product(TYPES.values(), TYPES.values()):
        for shapes in SHAPES:
            sides = tensor(x, shapes[0], rng), tensor(y, shapes[1], rng)
            for name in methods:
                if not name.startswith("__r") or name == "__rshift__":
                    agree(name, getattr(tl.tensor, name), *sides)
            condition = tensor(tl.int1, shapes[0], rng)
            agree("where", tl.where, condition, *sides)
    for x, number in product(TYPES.values(), (0, 1, 3, -2, 0.5, 2.0, True, 1 << 40)):
        for shape in ((4, 8), None):
            for _, name in product(range(2), methods):
                agree(name, getattr(tl.tensor, name), tensor(x, shape, rng), number)
            agree("where", tl.where, tensor(tl.int1, (4, 8), rng), tensor(x, shape, rng), number)
            agree("where", tl.where, tensor(tl.int1, (4, 8), rng), number, tensor(x, shape, rng))


@pytest.mark.filterwarnings("ignore")
def test_types_change_as_tritons_own() -> None:
    rng = np.random.default_rng(1)
    for source, to, shape in product(TYPES.values(), (*TYPES.values(), tl.bfloat16, tl.float64), ((4, 8), None)):
        for _ in range(2):
            agree("to", tl.tensor.to, tensor(source, shape, rng), to)
    bits = np.arange(1 << 16).astype(np.uint16)
    for source, to in product((tl.bfloat16, tl.float8e4nv), (tl.float32, tl.bfloat16, tl.float16)):
        every = bits.astype(np.uint16 if source is tl.bfloat16 else np.uint8)
        for _ in range(2):
            agree(
                "to",
                tl.tensor.to,
                tl.tensor(interpreter.TensorHandle(every, source), tl.block_type(source, [1 << 16])),
                to,
            )
    x = tensor(tl.float32, (4, 8), rng)
    for slices in (
        (None, slice(None)),
        (slice(None), None),
        (slice(None), slice(None), None),
        (slice(None), None, slice(None)),
    ):
        agree("__getitem__", tl.tensor.__getitem__, x, slices)


def test_a_mask_of_integers_is_one_of_truth_values() -> None:
    """Triton 3.9 makes such ones of truth values that are computed from arguments of a program."""
    values = np.arange(1, 5, dtype=np.int32)
    addresses = interpreter.TensorHandle(
        values.ctypes.data + 4 * np.arange(4, dtype=np.uint64), tl.pointer_type(tl.int32)
    )
    pointer = tl.tensor(addresses, tl.block_type(tl.pointer_type(tl.int32), [4]))
    handle = interpreter.TensorHandle(np.zeros(4, bool), tl.int1)
    handle.data = np.array([1, 0, 1, 0], np.int32)
    mask = tl.tensor(handle, tl.block_type(tl.int1, [4]))
    assert tl.load(pointer, mask=mask, other=0).handle.data.tolist() == [1, 0, 3, 0]


def test_a_row_of_a_product_has_the_same_bits_anywhere() -> None:
    rng = np.random.default_rng(0)
    rows, columns = (rng.standard_normal(shape).astype(np.float32) for shape in ((128, 64), (64, 32)))

    def product_of(part: Any) -> Any:
        handles = [interpreter.TensorHandle(rounded(x), tl.bfloat16) for x in (part, columns)]
        zeros = interpreter.TensorHandle(np.zeros((len(part), 32), np.float32), tl.float32)
        return mended_interpreter._dot(None, *handles, zeros).data

    whole = product_of(rows)
    assert all((product_of(rows[i : i + n]) == whole[i : i + n]).all() for n in (16, 32, 64) for i in range(0, 128, n))
