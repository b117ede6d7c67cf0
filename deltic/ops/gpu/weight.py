"""Weights in a GPU's memory: how they get there, in the order of ops/gpu/decode.py, and back."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from deltic.machine import n_usable_cpus
from deltic.ops.arrays import Array, bfloat16
from deltic.ops.contract import check
from deltic.ops.formats import BLOCK_ROWS, CODEBOOKS, TABLES, Quantised, WeightFormat, book_of, codes_in
from deltic.ops.gpu.launch import INTERPRETED, allocate_in_host
from deltic.ops.gpu.operands import decode
from deltic.ops.gpu.quantise import MADE, quantise
from deltic.ops.matrix import Layout, Matrix, Segment, planes


def rows_of(operator: str, w: Matrix | Segment) -> Tensor:
    """The matrix itself, bfloat16 [n, k], of several matrices [n_matrices, n, k], for an operator whose
    kernels read nothing else.

    Raises KernelError, which names the operator and the format, for a matrix in any format but bf16 in rows.
    """
    segment = w.whole if isinstance(w, Matrix) else w
    check(
        operator,
        segment.layout == "rows" and segment.format.codes == "bf16",
        f"weights in rows of bfloat16; there is no kernel for {segment.format.name} in {segment.layout}",
    )
    size = (segment.n, segment.k) if segment.n_matrices == 1 else (segment.n_matrices, segment.n, segment.k)
    rows: Tensor = segment.data.view(torch.bfloat16).view(size)
    return rows


def is_bf16(w: Matrix) -> bool:
    """Returns whether `rows_of` has it."""
    return len(w.segments) == 1 and w.whole.layout == "rows" and w.whole.format.codes == "bf16"


def device_of(w: Matrix) -> torch.device:
    """The device in whose memory a matrix lies."""
    found: torch.device = w.segments[0].data.device
    return found


def to_device(array: Array, device: torch.device | str) -> Tensor:
    """The array as a tensor on the device, on "meta" only its size."""
    kind = torch.device(device).type
    if kind == "meta":
        return torch.empty(array.shape, dtype=_dtype(array.dtype), device=device)
    plain = array.view(np.int16) if array.dtype == bfloat16 else array
    if kind == "cuda":  # through memory that the device reads by itself
        host = torch.empty(plain.shape, dtype=_dtype(plain.dtype), pin_memory=True)
        host.numpy()[...] = plain
    else:  # torch has no tensors that are only read, as mapped files are
        host = torch.from_numpy(plain if plain.flags.writeable else plain.copy())
    return (host.view(torch.bfloat16) if plain is not array else host).to(device, non_blocking=True)


class _Mapped(mmap.mmap):
    """Memory of its own; `unlock` is called in front of its end."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def mapped_memory(size: tuple[int, ...]) -> Tensor:
    """uint8 memory of the host, at a whole page, which GPUs read and write by its address. (Torch's own would
    be as large as the next power of two.) Raises MemoryError where the system locks no more.
    """
    n_bytes = math.prod(size)
    memory = _Mapped(-1, n_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(memory, dtype=torch.uint8)
    if not INTERPRETED:
        runtime, address = torch.cuda.cudart(), found.data_ptr()
        if int(error := runtime.cudaHostRegister(address, n_bytes, 0)):
            raise MemoryError(f"{n_bytes / 1e9:.1f} GB of the host's memory cannot be mapped for the GPU ({error})")
        # else the pages stay locked for ever, and what gets the address next is refused
        memory.unlock = partial(runtime.cudaHostUnregister, address)
    return found.view(size)


def _dtype(dtype: DTypeLike) -> torch.dtype:
    found: torch.dtype = getattr(torch, np.dtype(dtype).name)
    return found


# Rows in a format other than bf16.


def _of_rows(segment: Segment) -> dict[str, Tensor]:
    """The parts, rows first: codes, bytes [n_matrices, n, bytes of a row]; scales as integers of their width
    [n_matrices, n, groups].
    """
    found, data = {}, segment.data.view(segment.n_matrices, -1)
    dtypes = dict(zip(("scale", "least", "outer"), segment.format.dtypes, strict=True))
    for name, (at, size) in planes(segment.n, segment.k, segment.format).items():
        plane = data[:, at : at + size]
        if name == "book":  # of the whole matrix
            continue
        if name in dtypes:
            plane = plane.view(_integer(np.dtype(dtypes[name]).itemsize))
            found[name] = plane.view(segment.n_matrices, -1, segment.n).transpose(1, 2)
        else:
            found[name] = plane.view(segment.n_matrices, segment.n, -1)
    return found


def _integer(itemsize: int) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[itemsize]


def _lanes(value: int, n_bytes: int = 2) -> int:
    """An int64 with the value in each lane of so many bytes."""
    return int.from_bytes(value.to_bytes(n_bytes, "little") * (8 // n_bytes), "little", signed=True)


def _side_by_side(units: Tensor, shift: int, mask: int, bits: int) -> Tensor:
    """int64 [...] of [..., 4]: what the mask takes of each, shifted to the right before, side by side."""
    found = units[..., 0] >> shift & mask
    for i in range(1, 4):
        found |= (units[..., i] >> shift & mask) << bits * i
    return found


def _pairs(low: Tensor, high: Tensor) -> Tensor:
    """int16 [..., n, 2] of the lanes of two, int64 [..., n / 4]."""
    return torch.stack((low.view(torch.int16), high.view(torch.int16)), -1)


def _packed(format: WeightFormat, codes: Tensor) -> dict[str, Tensor]:
    """Planes of codes, uint8 [n, bytes], of codes one a byte [n, k].

    32 codes are four int64 of four lanes: code 8 i + 2 t + c is byte c in lane t of the i-th.
    """
    n, k = codes.shape
    if format.codes in CODEBOOKS:
        return _entries(format, codes)
    if format.codes == "e4m3":
        return {"codes8": codes}
    units = codes.contiguous().view(torch.int64).view(n, k // 32, 4)
    found = {}
    if format.bits == 8:
        units = units ^ _lanes(0x80, 1)
        first, second = units[..., ::2], units[..., 1::2]
        low = first & _lanes(0xFF) | (second & _lanes(0xFF)) << 8
        high = first >> 8 & _lanes(0xFF) | second & _lanes(0xFF00)
        found["codes8"] = _pairs(low, high).view(n, k // 32, 2, 4, 2).transpose(2, 3).contiguous()
    if 4 <= format.bits < 8:
        low, high = (_side_by_side(units, shift, _lanes(0xF), 4) for shift in (0, 8))
        found["codes4"] = _pairs(low, high)
    if format.bits in (2, 3, 6):
        found["codes2"] = _side_by_side(units, 4 if format.bits == 6 else 0, _lanes(3, 1), 2)
    if format.bits in (3, 5):
        nibbles = _side_by_side(units, int(format.bits) - 1, _lanes(1, 1), 1)
        found["codes1"] = ((nibbles | nibbles >> 4) & _lanes(0xFF)).view(torch.int16).to(torch.uint8)
    return {name: plane.view(n, -1).view(torch.uint8) for name, plane in found.items()}


def _side(parts: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Integers [..., n] of so many bits side by side: [...] of the dtype."""
    shifts = bits * torch.arange(parts.shape[-1], device=parts.device)
    return (parts.to(torch.int64) << shifts).sum(-1).to(dtype)


def _entries(format: WeightFormat, codes: Tensor) -> dict[str, Tensor]:
    """Does what `_packed` does, of a codebook's entries."""
    (n, k), book = codes.shape, CODEBOOKS[format.codes]
    low, high, signs = codes.view(n, k // 32, -1, book.width)[..., :3].unbind(-1)  # [n, K / 32, entries]
    found = {"index": low.contiguous()} if book.bits else {}
    if book.high_bits:
        found["high"] = _side(high, book.high_bits, torch.int16 if book.high_bits == 4 else torch.uint8)
    if book.has_signs:
        columns = (signs[..., None] >> torch.arange(book.width, device=codes.device)) & 1
        elements = columns.view(n, k // 32, 4, 4, 2).permute(0, 1, 3, 4, 2)  # by element, j % 2, j / 2
        found["codes1"] = _side(elements.reshape(n, k // 8, 8), 1, torch.uint8)
    return {name: plane.reshape(n, -1).view(torch.uint8) for name, plane in found.items()}


def _put_book(segment: Segment) -> None:
    """Writes the entries of a segment's codebook, if it has one, behind the codes of each matrix."""
    at, size = planes(segment.n, segment.k, segment.format).get("book", (0, 0))
    if size:
        levels = book_of(segment.format.codes).reshape(-1, 2)
        pairs = torch.from_numpy(levels[:, 0] | levels[:, 1] << 4)
        segment.data.view(segment.n_matrices, -1)[:, at : at + size] = pairs.to(segment.data.device)


def _store(segment: Segment, first: int, codes: Tensor, parts: Mapping[str, Tensor]) -> None:
    """Writes rows from row `first` of each matrix on. codes: uint8 [rows, k]; parts: integers
    [rows, groups].
    """
    where = _of_rows(segment)
    for name, rows in (_packed(segment.format, codes) | dict(parts)).items():
        each = rows.view(segment.n_matrices, len(rows) // segment.n_matrices, -1)
        where[name][:, first : first + each.shape[1]].copy_(each)
    _put_book(segment)


def _integers(array: Array, device: torch.device | str) -> Tensor:
    """[rows, all the rest] as integers."""
    flat = np.ascontiguousarray(array).reshape(len(array), -1)
    return to_device(flat.view(f"{'u' if flat.itemsize == 1 else 'i'}{flat.itemsize}"), device)


def _put_rows(segment: Segment, first: int, rows: Array | Quantised, device: torch.device | str) -> None:
    if not isinstance(rows, Quantised):
        codes, *scales = quantise(segment.format, to_device(rows.reshape(-1, segment.k), device), segment.n_matrices)
        named = dict(zip(("scale", "least"), scales, strict=True))
        parts = {
            name: part.contiguous().view(_integer(part.itemsize)) for name, part in named.items() if part is not None
        }
    else:
        codes, outer = to_device(rows.codes, device), rows.outer
        if segment.format.scales == "e4m3" and outer is not None:
            outer = np.ldexp(outer, -np.frexp(outer[:, :1])[1])
        arrays = {"scale": rows.scale, "least": rows.least, "outer": outer}
        parts = {name: _integers(array, device) for name, array in arrays.items() if array is not None}
    _store(segment, first, codes, parts)


def unpack(segment: Segment) -> Tensor:
    """float32 [n_matrices, n, k]: the values that stand for the rows, as the kernels read them. For tests."""
    out = torch.empty(segment.n_matrices, segment.n, segment.k, dtype=torch.float32, device=segment.data.device)
    decode(segment, out)
    return out


# Random rows, for benches.


def _random(format: WeightFormat, values: Array) -> Quantised:
    """Rows of random codes, the low bits of bfloat16 values [n, k], with one scale that makes them about as
    large. Its sign changes from group to group and from row to row, where it has one: codes have not quite
    the mean 0. What a mean makes of inputs that are above 0 would grow from layer to layer, until all tokens
    are alike and choose the same experts.
    """
    n, dtypes, sizes = len(values), format.dtypes, format.sizes(values.shape[1])
    codes = codes_in(format.codes, values.view(np.uint8)[:, ::2])
    if format.codes == "e4m3":
        codes -= codes & 0x7F == 0x7F  # NaN
    middle, wide = 1 << (int(format.bits) - 1), {"int8": 74, "e4m3": 110}
    size = 2**format.bits / 12**0.5
    if format.codes in TABLES:
        table = np.array(TABLES[format.codes])
        size = np.sqrt(np.square(table[book_of(format.codes)] if format.codes in CODEBOOKS else table).mean())
    step = float(values.astype(np.float32).std()) / wide.get(format.codes, float(size))
    kind, _, with_ = format.scales.partition(".")
    scale: float = {"k": 32, "e8m0": 128 + round(np.log2(step)), "e4m3": 0x38}.get(kind, step)
    half = middle - 0.5
    least = {"k": 32, "e4m3": None}.get(kind, -step * half if with_ == "least" else 0 if format.bits == 8 else middle)
    unit = step / (4 if with_ == "eighth" else 32)
    outer = [unit, unit * half][: 1 + (with_ == "least")] if kind == "k" else [2 * step, 1]
    filled: list[Any] = [
        None if dtype is None or size is None else np.broadcast_to(np.array(value, dtype), (n, *size)).copy()
        for value, dtype, size in zip((scale, least, outer), dtypes, sizes, strict=True)
    ]
    if kind not in ("e8m0", "e4m3") and format.codes != "e4m3":
        groups = [part for part in filled[:2] if part is not None and part.dtype.kind in "ifV"]
        for part in groups or filled[2:]:
            part[::2, ::2] *= -1
            part[1::2, 1::2] *= -1
    return Quantised(format, codes, *filled)


def _drawn(format: WeightFormat, k: int, block: Array, device: torch.device | str) -> Segment:
    """Makes as many rows as a block of values has, in this format: made of the values, or random as they are.
    """
    n = max(1, len(block) // k)
    if format.codes == "e4m3":  # an odd number of blocks: each of many matrices of 2^n begins elsewhere
        n = max(3, n // BLOCK_ROWS - 1 | 1) * BLOCK_ROWS
    values = np.resize(block, n * k).reshape(n, k)
    memory = torch.empty((1, Segment.n_bytes_of(n, k, format, "rows")), dtype=torch.uint8, device=device)
    segment = Segment(n, k, format, "rows", memory)
    _put_rows(segment, 0, values if format.name in MADE else _random(format, values), device)
    return segment


def _repeat(segment: Segment, drawn: Segment, at: int) -> None:
    """Fills several matrices with the rows of another, again and again, at first from row `at` on; e4m3 from
    the block that this row is in, so that rows of a block share their scales here, too.
    """
    if segment.format.codes == "e4m3":
        at -= at % BLOCK_ROWS
    source = _of_rows(drawn)
    _put_book(segment)
    for i in range(segment.n_matrices):
        target, begin = _of_rows(segment.one(i)), 0
        while begin < segment.n:
            n = min(segment.n - begin, drawn.n - at)
            for name, rows in source.items():
                target[name][0, begin : begin + n].copy_(rows[0, at : at + n])
            begin, at = begin + n, (at + n) % drawn.n


class DeviceStore:
    """A device's memory as a `Store` of weights (models/loading.py), matrices in rows."""

    layout: Layout = "rows"
    n_threads = n_usable_cpus()

    def __init__(self, device: torch.device | str, has_experts: bool = True) -> None:
        """has_experts: False where matrices of several experts are in the host's memory, which the device
        reads.
        """
        self.device, self._has_experts = device, has_experts
        self._tiled: tuple[Array, Tensor] | None = None  # the last block, and where it lies on the device
        self._drawn: dict[tuple[str, int, int], tuple[Array, Segment]] = {}  # rows that were made of blocks

    def empty(self, size: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        is_outside = not self._has_experts and len(size) == 2 and size[0] > 1 and np.dtype(dtype) == np.uint8
        if is_outside and torch.device(self.device).type != "meta":
            return mapped_memory(size)
        return torch.empty(size, dtype=_dtype(dtype), device=self.device)

    def put(self, part: Tensor | Segment, rows: Array | Quantised, first: int = 0) -> None:
        """Raises KernelError for bfloat16 rows and a segment whose format is not made of them."""
        if isinstance(part, Segment) and part.format.codes != "bf16":
            _put_rows(part, first, rows, self.device)
        else:
            assert not isinstance(rows, Quantised)
            begin = first * part.k if isinstance(part, Segment) else 0
            _flat(part)[begin : begin + rows.size].copy_(to_device(rows, self.device).view(-1))

    def tile(self, part: Tensor | Segment, block: Array, offset: int) -> None:
        """Repeats a block of values over a part. A format that is not made of bfloat16 gets random codes, as
        large as the block's values.
        """
        if isinstance(part, Segment) and part.format.codes != "bf16":
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


def in_host(table: Matrix) -> Matrix:
    """The same rows in memory of the host that a GPU reads, if they are not there yet."""
    if not table.segments[0].data.is_cuda:
        return table
    data = [allocate_in_host("table", s.data.shape, s.data.dtype).copy_(s.data) for s in table.segments]
    return replace(table, segments=tuple(replace(s, data=d) for s, d in zip(table.segments, data, strict=True)))


def _flat(part: Tensor | Segment) -> Tensor:
    """The values of a part, one after another."""
    memory: Tensor = part.data.view(torch.bfloat16) if isinstance(part, Segment) else part
    return memory.view(-1)
