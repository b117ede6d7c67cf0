"""Tensors in safetensors files, as read-only arrays of the mapped files.

The safetensors library checks a file. Its numpy reader has no bfloat16 and copies, so that the place of each
tensor is taken from the header, and the bytes are mapped here.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from deltic.models.fields import CheckpointError, mending
from deltic.ops.arrays import Array, bfloat16

DTYPES = {
    "BF16": bfloat16,
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),  # exponents
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
"""Types that are read, by the format's names."""

_REMAP_BYTES = 1 << 28
"""A mapped file counts as resident as far as it was read: map it afresh after this much."""


@dataclass(frozen=True)
class Header:
    """Description of one tensor in a file, known without reading it. Its bytes are [begin, end)
    of the file.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int

    def rows(self, begin: int, end: int) -> Header:
        """Returns the header of rows [begin, end) of all [rows, K]: K is the last dimension, those before it
        are rows.
        """
        *rows, k = self.shape or (1,)
        n_bytes = (self.end - self.begin) // max(math.prod(rows), 1)
        return Header(self.file, (end - begin, k), self.dtype, self.begin + begin * n_bytes, self.begin + end * n_bytes)


def read_header(file: Path, advice: str = "") -> tuple[dict[str, Header], dict[str, str]]:
    """The tensors of a file by name, and its metadata.

    Raises CheckpointError, which ends in the advice (else what mends a download), for a file that is absent,
    damaged or cut short.
    """
    try:
        with safe_open(str(file), framework="np"), file.open("rb") as opened:  # opening it checks it
            size = int.from_bytes(opened.read(8), "little")
            fields = json.loads(opened.read(size))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: damaged or unreadable ({error}); {advice or mending(file)}") from error
    metadata = fields.pop("__metadata__", None) or {}
    headers = {}
    for name, tensor in fields.items():
        begin, end = (8 + size + offset for offset in tensor["data_offsets"])
        headers[name] = Header(file, tuple(tensor["shape"]), tensor["dtype"], begin, end)
    return headers, metadata


class MappedFiles:
    """Reads tensors of any number of files, which stay mapped for as long as an array of them is used.

    Several threads may read.
    """

    def __init__(self) -> None:
        self._mapped: dict[Path, mmap.mmap] = {}
        self._n_read = 0

    def read(self, header: Header) -> Array:
        """The tensor, as stored. Raises CheckpointError if the file cannot be read, KeyError for a type that
        DTYPES has not.
        """
        if self._n_read > _REMAP_BYTES:
            self._mapped.clear()
            self._n_read = 0
        n_bytes = header.end - header.begin
        if not n_bytes:
            return np.empty(header.shape, DTYPES[header.dtype])
        try:
            mapped = self._mapped.get(header.file)
            if mapped is None:
                with header.file.open("rb") as file:
                    mapped = self._mapped[header.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            flat = np.frombuffer(mapped, np.uint8, n_bytes, header.begin)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{header.file}: cannot be read ({error}); {mending(header.file)}") from error
        self._n_read += n_bytes
        return np.asarray(flat.view(DTYPES[header.dtype]).reshape(header.shape))


def map_at_random(header: Header) -> tuple[mmap.mmap, Array]:
    """The file, and the bytes of a tensor in it, uint8, mapped by themselves and not read: what is touched is
    read, and nothing around it. Raises CheckpointError if the file cannot be read.
    """
    begin = header.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        with header.file.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), header.end - begin, access=mmap.ACCESS_READ, offset=begin)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{header.file}: cannot be read ({error}); {mending(header.file)}") from error
    mapped.madvise(mmap.MADV_RANDOM)  # else a row of 320 bytes reads 128 kB
    return mapped, np.frombuffer(mapped, np.uint8, header.end - header.begin, header.begin - begin)
