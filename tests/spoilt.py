"""Memory that nobody has written yet, filled with what it may hold.

0xff: no numbers, or -1, which a product with 0 shows. 0x3f: numbers of 0.7, which look like any others; an engine computes anew what is
no number, so that only these show in its answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import numpy as np
import pytest

from deltic.ops.arrays import Array
from deltic.ops.cpu.program import Program

every_byte = pytest.mark.parametrize("byte", [0x3F, 0xFF])


def arrays_in(value: object, but: tuple[str, ...] = ()) -> Iterator[Array]:
    """Arrays of a dataclass and of those within it, but for some of its fields."""
    if isinstance(value, np.ndarray):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            if field.name not in but:
                yield from arrays_in(getattr(value, field.name))


def spoil(value: object, byte: int, but: tuple[str, ...] = ()) -> None:
    for array in arrays_in(value, but):
        np.atleast_1d(array).view(np.uint8)[...] = byte


def spoil_before_each_run(program: Program, value: object, byte: int, but: tuple[str, ...] = ()) -> None:
    run = program.run

    def run_spoilt() -> None:
        spoil(value, byte, but)
        run()

    program.run = run_spoilt  # type: ignore[method-assign]
