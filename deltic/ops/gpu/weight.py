"""Weights in a GPU's memory: how they get there, in the order of ops/gpu/decode.py, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from deltic.ops.arrays import Array, bfloat16
from deltic.ops.contract import check
from deltic.ops.formats import Quantised, WeightFormat
from deltic.ops.gpu.operands import decode
from deltic.ops.gpu.quantise import MADE, quantise
from deltic.ops.matrix import Layout, Matrix, Piece, planes

_CHUNK = 1 << 25
"""Weights that are packed at a time: it takes up to 50 bytes for each."""


def rows_of(operator: str, w: Matrix | Piece) -> Tensor:
    """The matrix itself, bfloat16 [n, k], of several matrices [n_matrices, n, k], for an operator whose
    kernels read nothing else.

    Raises KernelError, which names the operator and the format, for a matrix in any format but bf16 in rows.
    """
    piece = w.whole if isinstance(w, Matrix) else w
    check(
        operator,
        piece.layout == "rows" and piece.format.codes == "bf16",
        f"weights in rows of bfloat16; there is no kernel for {piece.format.name} in {piece.layout}",
    )
    size = (piece.n, piece.k) if piece.n_matrices == 1 else (piece.n_matrices, piece.n, piece.k)
    rows: Tensor = piece.data.view(torch.bfloat16).view(size)
    return rows


def is_bf16(w: Matrix) -> bool:
    """Whether `rows_of` has it."""
    return len(w.pieces) == 1 and w.whole.layout == "rows" and w.whole.format.codes == "bf16"


def to_device(array: Array, device: torch.device | str) -> Tensor:
    """The array as a tensor on the device, on "meta" only its size."""
    if torch.device(device).type == "meta":
        return torch.empty(array.shape, dtype=_dtype(array.dtype), device=device)
    if not array.flags.writeable:  # of a mapped file; torch has no such tensors
        array = array.copy()
    if array.dtype == bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def _dtype(dtype: DTypeLike) -> torch.dtype:
    found: torch.dtype = getattr(torch, np.dtype(dtype).name)
    return found


# Rows in a format other than bf16.


def _of_rows(piece: Piece) -> dict[str, Tensor]:
    """The parts of one matrix as bytes, rows first: codes [n, bytes], scales [n, groups, bytes of one]."""
    found, data = {}, piece.data.view(-1)
    itemsize = dict(zip(("scale", "least", "outer"), piece.format.dtypes, strict=True))
    for name, (at, size) in planes(piece.n, piece.k, piece.format).items():
        plane = data[at : at + size]
        if name in itemsize:
            found[name] = plane.view(-1, piece.n, np.dtype(itemsize[name]).itemsize).transpose(0, 1)
        else:
            found[name] = plane.view(piece.n, -1)
    return found


def _side_by_side(unit: Tensor, bits: int) -> Tensor:
    """[..., 8] numbers of 1, 2 or 4 bits as bytes [..., bits]: 0, 2, 4, 6, 1, 3, 5, 7, the lowest bit first.
    """
    in_order = unit[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    each = in_order.view(*unit.shape[:-1], bits, 8 // bits) << torch.arange(0, 8, bits, dtype=torch.uint8, device=unit.device)
    return each.sum(-1, dtype=torch.uint8)


def _packed(format: WeightFormat, codes: Tensor) -> dict[str, Tensor]:
    """Planes of codes, uint8 [n, bytes], of codes one a byte [n, k]."""
    n, k = codes.shape
    if format.codes == "e4m3":
        return {"codes8": codes}
    if format.codes == "int8":
        codes = codes ^ 0x80
    # [n, k / 32, t, j]: code j of element t
    unit = codes.view(n, k // 32, 2, 2, 4, 2).permute(0, 1, 4, 2, 3, 5).reshape(n, k // 8, 8)
    found = {}
    if format.bits == 8:
        found["codes8"] = unit[..., [0, 2, 1, 3, 4, 6, 5, 7]]
    if 4 <= format.bits < 8:
        found["codes4"] = _side_by_side(unit & 15, 4)
    if format.bits in (2, 3, 6):
        found["codes2"] = _side_by_side((unit >> (4 if format.bits == 6 else 0)) & 3, 2)
    if format.bits in (3, 5):
        found["codes1"] = _side_by_side((unit >> (format.bits - 1)) & 1, 1)
    return {name: plane.reshape(n, -1) for name, plane in found.items()}


def _store(piece: Piece, begin: int, codes: Tensor, parts: Mapping[str, Tensor]) -> None:
    """Writes rows of one matrix from row `begin` on. codes: uint8 [n, k]; parts: bytes [n, groups, bytes of
    one].
    """
    where = _of_rows(piece)
    for name, rows in (_packed(piece.format, codes) | dict(parts)).items():
        where[name][begin : begin + len(rows)].copy_(rows)


def _bytes_of(array: Array, device: torch.device | str) -> Tensor:
    """[n, groups, bytes of one]."""
    flat = np.ascontiguousarray(array).reshape(len(array), -1)
    return to_device(flat.view(np.uint8).reshape(*flat.shape, array.itemsize), device)


def _put_rows(piece: Piece, rows: Array | Quantised, device: torch.device | str) -> None:
    step = max(1, _CHUNK // piece.k)
    for begin in range(0, piece.n, step):
        some = slice(begin, begin + step)
        if isinstance(rows, Quantised):
            part = rows.take(some)
            named = {"scale": part.scale, "least": part.least, "outer": part.outer}
            if piece.format.scales == "e4m3" and part.outer is not None:
                named["outer"] = np.ldexp(part.outer, -np.frexp(part.outer[:, :1])[1])
            parts = {name: _bytes_of(array, device) for name, array in named.items() if array is not None}
            _store(piece, begin, to_device(part.codes, device), parts)
        else:
            _put_quantised(piece, begin, to_device(rows.reshape(piece.n, piece.k)[some], device))


def _put_quantised(piece: Piece, begin: int, values: Tensor) -> None:
    codes, scale, least = quantise(piece.format, values)
    named = {"scale": scale, "least": least}
    parts = {
        name: part.contiguous().unsqueeze(-1).view(torch.uint8) for name, part in named.items() if part is not None
    }
    _store(piece, begin, codes, parts)


def unpack(piece: Piece) -> Tensor:
    """float32 [n_matrices, n, k]: the values that stand for the rows, as the kernels read them. For tests."""
    out = torch.empty(piece.n_matrices, piece.n, piece.k, dtype=torch.float32, device=piece.data.device)
    decode(piece, out)
    return out


# Random rows, for benches.


def _random(format: WeightFormat, values: Array) -> Quantised:
    """Rows of random codes, the low bits of bfloat16 values [n, k], with one scale that makes them about as
    large. Its sign changes from row to row, where it has one: codes have not quite the mean 0, and a mean
    that all rows share would grow from layer to layer until all tokens are alike.
    """
    n, dtypes, sizes = len(values), format.dtypes, format.sizes(values.shape[1])
    codes = values.view(np.uint8)[:, ::2] & np.uint8((1 << min(format.bits, 8)) - 1)
    if format.codes == "e4m3":
        codes -= codes & 0x7F == 0x7F  # NaN
    middle, wide = 1 << (format.bits - 1), {"int8": 74, "e4m3": 110, "iq4": 66, "e2m1": 6}
    step = float(values.astype(np.float32).std()) / wide.get(format.codes, 2**format.bits / 12**0.5)
    kind, _, with_ = format.scales.partition(".")
    scale: float = {"k": 32, "e8m0": 128 + round(np.log2(step)), "e4m3": 0x38}.get(kind, step)
    half = middle - 0.5
    least = {"k": 32, "e4m3": None}.get(kind, -step * half if with_ == "least" else 0 if format.bits == 8 else middle)
    outer = [step / 32, step * half / 32][: 1 + bool(with_)] if kind == "k" else [2 * step, 1]
    filled: list[Any] = [
        None if dtype is None or size is None else np.broadcast_to(np.array(value, dtype), (n, *size)).copy()
        for value, dtype, size in zip((scale, least, outer), dtypes, sizes, strict=True)
    ]
    signed = [part for part, dtype in zip(filled, dtypes, strict=True) if dtype is not None and np.dtype(dtype).kind in "fV"]
    for part in signed:
        part[::2] *= -1
    return Quantised(format, codes, *filled)


def _drawn(format: WeightFormat, k: int, block: Array, device: torch.device | str) -> Piece:
    """As many rows as a block of values has, in this format: made of it, or random as it is."""
    n = max(1, len(block) // k)
    values = np.resize(block, n * k).reshape(n, k)
    memory = torch.empty((1, Piece.n_bytes_of(n, k, format, "rows")), dtype=torch.uint8, device=device)
    piece = Piece(n, k, format, "rows", memory)
    _put_rows(piece, values if format.name in MADE else _random(format, values), device)
    return piece


def _repeat(piece: Piece, drawn: Piece, at: int) -> None:
    """Fills several matrices with the rows of another, again and again, at first from row `at` on."""
    source = _of_rows(drawn)
    for i in range(piece.n_matrices):
        target, begin = _of_rows(piece.one(i)), 0
        while begin < piece.n:
            n = min(piece.n - begin, drawn.n - at)
            for name, rows in source.items():
                target[name][begin : begin + n].copy_(rows[at : at + n])
            begin, at = begin + n, (at + n) % drawn.n


class DeviceStore:
    """A device's memory as a `Store` of weights (models/loading.py), matrices in rows."""

    layout: Layout = "rows"

    def __init__(self, device: torch.device | str) -> None:
        self.device = device
        self._tiled: tuple[Array, Tensor] | None = None  # the last block, and where it lies on the device
        self._drawn: dict[tuple[str, int, int], tuple[Array, Piece]] = {}  # rows that were made of blocks

    def empty(self, size: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        return torch.empty(size, dtype=_dtype(dtype), device=self.device)

    def put(self, part: Any | Piece, rows: Array | Quantised) -> None:
        """Raises KernelError for bfloat16 rows and a piece whose format is not made of them."""
        if isinstance(part, Piece) and part.format.codes != "bf16":
            _put_rows(part, rows, self.device)
        else:
            assert not isinstance(rows, Quantised)
            _flat(part).copy_(to_device(rows, "cpu").view(-1))

    def tile(self, part: Any | Piece, block: Array, offset: int) -> None:
        """In a format that is not made of bfloat16: with random codes, as large as the block's values."""
        if isinstance(part, Piece) and part.format.codes != "bf16":
            key = part.format.name, part.k, id(block)
            if key not in self._drawn:
                self._drawn[key] = block, _drawn(part.format, part.k, block, self.device)
            drawn = self._drawn[key][1]
            _repeat(part, drawn, offset // part.k % drawn.n)
            return
        flat = _flat(part)
        if self._tiled is None or self._tiled[0] is not block:
            self._tiled = block, to_device(block, self.device)
        values = self._tiled[1]
        n = min(flat.numel(), len(values) - offset)
        flat[:n].copy_(values[offset : offset + n])
        for rest in torch.split(flat[n:], len(values)):
            rest.copy_(values[: len(rest)])


def _flat(part: Any | Piece) -> Tensor:
    """The values of a part, one after another."""
    memory: Tensor = part.data.view(torch.bfloat16) if isinstance(part, Piece) else part
    return memory.view(-1)
