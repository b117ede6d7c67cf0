"""The assembly that makes operands of codes (ops/gpu/operands.py), which Triton's interpreter leaves out: interpreted here, to the bit."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from deltic.ops.arrays import Array
from deltic.ops.formats import CODEBOOKS, CODES, SCALES, WEIGHT_FORMATS, Quantised, _indices
from deltic.ops.gpu.decode import first_bit, has_table, high_bits, low_bits
from deltic.ops.gpu.operands import _assembly, lowered, unit
from tests.quantised_rows import operands, random_rows, rounded

BYTES = np.arange(0, 32, 8, np.uint32)
NAMES = [name for name, format in WEIGHT_FORMATS.items() if format.codes not in ("bf16", "e4m3")]
LOWERED = [n for n in NAMES if lowered(CODES.index(WEIGHT_FORMATS[n].codes), SCALES.index(WEIGHT_FORMATS[n].scales))]


def float_of(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bfloat16_bits(values: Array) -> Array:
    """uint32 below 2^16 of float64 values, which are rounded, and numbers that are not subnormal."""
    near = rounded(values)
    assert ((near == 0) | (np.abs(near) >= 2.0**-126) & (np.abs(near) < 2.0**128)).all()
    return near.astype(np.float32).view(np.uint32) >> 16


class Assembly:
    """Runs what `_assembly` writes, with every register a vector of uint32."""

    def __init__(self, **registers: Array) -> None:
        self.registers = registers

    def value(self, name: str) -> Array:
        if name.startswith("0f"):
            return np.array([int(name[2:], 16)], np.uint32)
        return self.registers[name] if name in self.registers else np.array([int(name, 0) & 0xFFFFFFFF], np.uint32)

    def run(self, text: str) -> None:
        for line in text.strip("{} ").split(";"):
            line = line.strip()
            name, _, rest = line.partition(" ")
            if not line or name == ".reg":
                continue
            if name == "mov.b64":  # into two
                low, high, source = re.findall(r"[\w$]+", rest)
                word = self.registers[source]
                self.registers[low], self.registers[high] = (
                    (word & 0xFFFFFFFF).astype(np.uint32),
                    (word >> 32).astype(np.uint32),
                )
            elif rest.startswith("{"):
                low, high, source = re.findall(r"[\w$]+", rest)
                word = self.value(source)
                self.registers[low], self.registers[high] = word & 0xFFFF, word >> 16
            else:
                to, *sources = (each.strip() for each in rest.split(","))
                self.registers[to] = self.result(name, *map(self.value, sources))

    def result(self, name: str, *given: Array) -> Array:
        a, b, c, table = given + given[:1] * (4 - len(given))
        if name == "prmt.b32":
            eight = np.concatenate([each[..., None] >> BYTES & 255 for each in np.broadcast_arrays(a, b, c)[:2]], -1)
            chosen = np.broadcast_to(c, eight.shape[:-1])[..., None] >> np.arange(0, 16, 4, np.uint32) & 15
            assert (chosen < 8).all()
            found = np.take_along_axis(eight, chosen.astype(np.int64), -1)
            return (found << BYTES).sum(-1).astype(np.uint32)
        if name == "fma.rn.bf16x2":
            halves = ((each & 0xFFFF, each >> 16) for each in (a, b, c))
            low, high = (float_of(x) * float_of(y) + float_of(z) for x, y, z in zip(*halves, strict=True))
            return bfloat16_bits(low) | bfloat16_bits(high) << 16
        if name.endswith(".f32") and name.startswith(("fma", "mul", "add", "neg")):
            x, y, z = (each.view(np.float32).astype(np.float64) for each in (a, b, c))
            number = {"neg": -x, "mul": x * y, "add": x + y, "fma": x * y + z}[name[:3]]
            return number.astype(np.float32).view(np.uint32)
        if name == "cvt.rn.bf16x2.f32":
            high, low = (bfloat16_bits(each.view(np.float32).astype(np.float64)) for each in (a, b))
            return low | high << 16
        if name == "lop3.b32":
            assert table == 0xEA
            return a & b | c
        integer = {"mov": a, "and": a & b, "or": a | b, "shl": a << (b & 31), "shr": a >> (b & 31), "mul": a * b}
        return integer[name.partition(".")[0]]


def made(rows: Quantised) -> Array:
    """float64 [n, k]: what the assembly makes of rows, in operands' unit."""
    f, (n, k) = rows.format, rows.codes.shape
    codes, scales = CODES.index(f.codes), SCALES.index(f.scales)
    raw = rows.codes.astype(np.uint64)
    if f.codes in CODEBOOKS:
        raw = _indices(f.codes, rows.codes).astype(np.uint64)
    low, high = 4 if has_table(codes) else low_bits(codes), high_bits(codes)
    raw ^= np.uint64(0x80 if low == 8 else 0)
    columns = [
        [32 * (i // 4) + 2 * (i % 4) + j % 2 + 8 * (j // 2 % 2) + 16 * (j // 4) for i in range(k // 8)]
        for j in range(8)
    ]
    elements = [
        sum(
            (raw[:, columns[j]] >> np.uint64(above) & np.uint64((1 << bits) - 1)) << np.uint64(first_bit(j, bits))
            for j in range(8)
        )
        for above, bits in ((0, low), (low, high))
        if bits
    ]
    words = elements[0] & np.uint64(0xFFFFFFFF), elements[-1] >> np.uint64(32 if low == 8 else 0)
    scale, least = rows.scales()
    scale = scale.astype(np.float64) * (2.0**133 if lowered(codes, scales) else 1.0) * unit(codes, scales)
    if f.scales.endswith(".zero"):
        least = rows.least.view(np.int8).astype(float) if f.codes == "int8" else -128.0 - rows.least
    elif least is not None:
        least = least.astype(np.float64) * unit(codes, scales)
    group = f.group or k
    halves = [
        None if part is None else bfloat16_bits(part.astype(np.float64)).astype(np.uint64) for part in (scale, least)
    ]
    is_lowered = lowered(codes, scales)
    width = 32 if is_lowered and (least is not None or f.group == 16) else 16

    def given(half: int) -> Array:
        """Scales of the first or last four codes of each element, and what stands above them, as `_packed` has them."""
        groups = [[column // group for column in columns[4 * i]] for i in (0, 1)]
        parts = [
            halves[0][:, groups[half]],
            halves[0][:, groups[1]] if halves[1] is None else halves[1][:, groups[half]],
        ]
        if is_lowered:  # each twice
            parts = [part * np.uint64(0x10001) for part in parts]
        word = parts[0] | parts[1] << np.uint64(width) if halves[1] is not None or width == 32 else parts[0]
        return word if width == 32 else word.astype(np.uint32)

    registers = {"$8": words[0].astype(np.uint32), "$9": words[1].astype(np.uint32), "$10": given(0), "$11": given(1)}
    machine = Assembly(**registers)
    with np.errstate(over="ignore"):
        machine.run(_assembly(codes, scales, f.group))
    out = np.empty((n, k))
    for j in range(8):
        out[:, columns[j]] = float_of(machine.registers[f"${j}"])
    return out / unit(codes, scales)


@pytest.mark.parametrize("name", NAMES)
def test_assembly_makes_the_operands(name: str) -> None:
    rows = random_rows(name, 16, 512)
    assert np.array_equal(made(rows), operands(rows))


@pytest.mark.parametrize("name", LOWERED)
def test_no_scale_is_too_large_or_small(name: str) -> None:
    """Of the largest and the least float16, and of the largest and smallest integers beside them, operands are exact."""
    rows = random_rows(name, 24, 512)
    ends = np.array([65504, -65504, 2.0**-24, -(2.0**-24), 2.0**-14, 0.0], np.float16)
    if rows.outer is None:
        scale = np.resize(ends, rows.scale.shape[::-1]).T
        least = None if rows.least is None else np.resize(ends[::-1], rows.scale.shape[::-1]).T
        rows = replace(rows, scale=scale.copy(), least=None if least is None else least.copy())
    else:
        outer = np.broadcast_to(np.resize(ends, len(rows))[:, None, None], rows.outer.shape).copy()
        extremes = np.array([127, -128, 1, 0] if rows.scale.dtype == np.int8 else [255, 1, 0], np.int16).astype(
            rows.scale.dtype
        )
        least = None if rows.least is None else np.resize(extremes, rows.least.shape)
        rows = replace(rows, outer=outer, scale=np.resize(extremes, rows.scale.shape), least=least)
    assert np.array_equal(made(rows), operands(rows))
