"""Random rows in any format of deltic/ops/formats.py, of values about as large as a layer's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np

from deltic.ops.arrays import Array
from deltic.ops.formats import TABLES, WEIGHT_FORMATS, Quantised, codes_in


def random_rows(name: str, n: int, k: int, seed: int = 0) -> Quantised:
    """[n, k]; some scales are 0, negative or the smallest that there are, where the format has such."""
    format, rng = WEIGHT_FORMATS[name], np.random.default_rng(seed)
    sizes, dtypes = format.sizes(k), format.dtypes
    codes = codes_in(format.codes, rng.integers(0, 256, (n, k), np.uint8))
    if format.codes == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0x38  # NaN
    size = float(np.std(TABLES[format.codes])) if format.codes in TABLES else 1.0
    step = 0.05 / k**0.5 / {"int8": 40, "e4m3": 40, "iq4": 30, "e2m1": 1}.get(format.codes, size)

    def numbers(size: tuple[int, ...], dtype: object, scale: float) -> Array:
        values = rng.uniform(-scale, scale, (n, *size))
        values.reshape(-1)[::7] = 0.0
        return values.astype(dtype)  # type: ignore[call-overload, no-any-return]

    kind = format.scales.partition(".")[0]
    least = outer = None
    if kind == "k":
        low = 0 if format.has_least else -32
        scale = rng.integers(low, 64, (n, *sizes[0])).astype(dtypes[0])
        least = rng.integers(0, 64, (n, *sizes[1])).astype(np.uint8) if sizes[1] else None
        assert sizes[2] is not None
        outer = numbers(sizes[2], np.float16, step / 8)
    elif kind == "e8m0":
        scale = rng.integers(112, 126, (n, *sizes[0])).astype(np.uint8)
        scale.reshape(-1)[::7] = rng.integers(0, 3)
    elif kind == "e4m3":
        scale = rng.uniform(0.0, 2.0, (n, *sizes[0])).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        outer = np.stack([rng.uniform(0.01, 0.02, n), rng.uniform(1.0, 2.0, n)], 1).astype(np.float32)
    else:
        scale = numbers(sizes[0], dtypes[0], step)
        if format.scales.endswith(".least"):
            assert sizes[1] is not None
            least = numbers(sizes[1], dtypes[1], step * 8)
        elif format.scales.endswith(".zero"):
            assert sizes[1] is not None
            least = rng.integers(0, 1 << format.bits, (n, *sizes[1])).astype(np.uint8)
    return Quantised(format, codes, scale, least, outer)


def rounded(values: Array) -> Array:
    """float64: the nearest bfloat16, ties to even; by way of float32 some would be rounded twice."""
    bits = np.ascontiguousarray(values, np.float64).view(np.int64)
    found: Array = ((bits + (1 << 44) - 1 + ((bits >> 45) & 1)) >> 45 << 45).view(np.float64)
    return found


def operands(rows: Quantised) -> Array:
    """float64 [n, k]: what a GPU's products multiply with (ops/gpu/operands.py)."""
    f, k = rows.format, rows.codes.shape[1]
    if f.codes == "e4m3":
        return rows.values().astype(np.float64)
    scale, least = (None if part is None else part.astype(np.float64) for part in rows.scales())
    assert scale is not None
    ones = replace(
        rows, format=replace(f, scales="float32"), scale=np.ones_like(scale, np.float32), least=None, outer=None
    )
    codes = ones.values().astype(np.float64) + (1 << (int(f.bits) - 1) if f.has_least and f.codes != "int8" else 0)
    spread = partial(np.repeat, repeats=f.group or k, axis=1)
    if f.scales.endswith(".zero"):
        assert rows.least is not None
        zero = rows.least.view(np.int8) if f.codes == "int8" else rows.least
        codes, least = codes - spread(zero.astype(np.float64))[:, :k], None
    product = codes * spread(rounded(scale))[:, :k]
    return rounded(product if least is None else product + spread(rounded(least))[:, :k])
