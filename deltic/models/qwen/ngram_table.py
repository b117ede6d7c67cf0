"""The table of the n-gram embedding, which stays in its files: of its tens of gigabytes a token reads a few
rows.

The files are mapped, and the system keeps in memory what it has room for. The table is no part of the weights
that are packed, cut or moved to a GPU, which reads a copy in the host's memory. A row is read as bfloat16:
what is stored, times the scale. Source of the names: the published checkpoints, and vLLM for FP8.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from deltic.models.fields import CheckpointError
from deltic.models.files import read_headers
from deltic.models.gguf import QUANTISED, is_gguf, open_gguf
from deltic.models.gguf_blocks import decoded
from deltic.models.mapped import DTYPES, Header, MappedFiles, map_at_random
from deltic.models.qwen.ngrams import NgramShape
from deltic.ops.arrays import Array, bfloat16, copy

_SHARD = re.compile(r"ngram_embedding\.(?:shard_(\d+)\.)?weight")
_INTEGERS = {"layer_multipliers": "multipliers", "ngram_heads_vocab_sizes": "primes", "ngram_heads_offsets": "offsets"}
_TYPES = ("BF16", "F16", "F32", "F8_E4M3")
_DUMMY_ROWS = 1 << 16
_GATHERED = 1 << 16
"""Rows that are converted at a time."""
_COPIED_BYTES = 1 << 26
"""Bytes of a part of a copy, at most. Allocators of pinned memory round large sizes up to powers of two."""


@dataclass(frozen=True)
class NgramTable:
    """Rows of the same width, in parts of as many rows each, one behind another; the last may have fewer."""

    parts: Sequence[Array]
    """Arrays [rows, width], or uint8 [rows, bytes] of blocks."""
    width: int
    scale: float = 1.0
    blocks: str = ""
    """The type of GGUF's blocks in which rows are stored. Empty: they are values."""
    files: tuple[mmap.mmap, ...] = ()
    """Files that are mapped, in which rows are read here and there. Empty: the rows are in memory."""
    is_reachable: bool = False
    """True if the rows are in memory that every GPU reads."""

    @property
    def rows_per_part(self) -> int:
        return len(self.parts[0])

    @property
    def n_rows(self) -> int:
        return sum(len(part) for part in self.parts)

    @cached_property
    def addresses(self) -> Array:
        """Addresses of the parts, int64: row r is at that of part r // rows_per_part, and r % rows_per_part
        rows of `row_bytes` behind.
        """
        return np.array([part.ctypes.data for part in self.parts], np.int64)

    @property
    def row_bytes(self) -> int:
        return self.parts[0].strides[0]

    def in_memory(self, allocate: Callable[[int], Array], progress: Callable[[int, int], None]) -> NgramTable:
        """Copies the rows: as they are stored, those in GGUF's blocks as bfloat16.

        allocate: gives uint8 [n] of memory that is to hold them. progress: takes the rows that are copied,
        and all rows.
        """
        first, dtype = self.parts[0], np.dtype(bfloat16) if self.blocks else self.parts[0].dtype
        n_times = len(self.parts) if all(part is first for part in self.parts) else 1  # random rows
        n_rows, row_bytes = self.n_rows // n_times, self.width * dtype.itemsize
        n_each = n_rows if n_times > 1 else min(n_rows, max(1, _COPIED_BYTES // row_bytes))
        for file in self.files:
            file.madvise(mmap.MADV_SEQUENTIAL)
        parts = list[Array]()
        for begin in range(0, n_rows, n_each):
            end = min(begin + n_each, n_rows)
            parts.append(allocate((end - begin) * row_bytes).view(dtype).reshape(end - begin, self.width))
            for at in range(begin - begin % self.rows_per_part, end, self.rows_per_part):
                some = slice(max(at, begin), min(at + self.rows_per_part, end))
                stored = self.parts[at // self.rows_per_part][some.start - at : some.stop - at]
                parts[-1][some.start - begin : some.stop - begin] = self._values(stored) if self.blocks else stored
            progress(end, n_rows)
        return replace(self, parts=parts * n_times, blocks="", files=())

    def gather(self, ids: Array, out: Array) -> None:
        """Reads rows: ids int64 [T, heads], out bfloat16 [T, heads * width]."""
        rows, flat = out.reshape(-1, self.width), ids.reshape(-1)
        for begin in range(0, len(flat), _GATHERED):
            some = slice(begin, begin + _GATHERED)
            part_of, at = np.divmod(flat[some], self.rows_per_part)
            for part in np.unique(part_of):
                here = part_of == part
                rows[some][here] = self._values(self.parts[part][at[here]])

    def _values(self, stored: Array) -> Array:
        """bfloat16 [n, width] of rows as they are stored."""
        if self.blocks:
            values = decoded(self.blocks, np.ascontiguousarray(stored), "the table of n-grams").values()
        elif stored.dtype == bfloat16:
            return stored
        else:
            values = stored.astype(np.float32) * np.float32(self.scale)
        out = np.empty(values.shape, bfloat16)
        copy(out, values)
        return out


def ngram_table_of(path: Path, ngrams: NgramShape | None) -> NgramTable | None:
    """Maps the table of a checkpoint, a directory or a file, and checks its integers. None: the model has
    none.

    Raises CheckpointError.
    """
    if ngrams is None:
        return None
    parts, scale = _checked(path, ngrams)
    files, found = MappedFiles(), _headers_of(path, ngrams.layer)
    for name, field in _INTEGERS.items():
        if (header := found.get(name)) is not None:
            said, made = files.read(header).ravel().tolist(), list(getattr(ngrams, field))
            if said != made:
                raise CheckpointError(
                    f"{header.file}: the n-grams' {name} are {said[:2]}..., and the sizes and the seed of config.json make "
                    f"{made[:2]}...; get configuration and weights anew"
                )
    factor = 1.0 if scale is None else float(files.read(scale).astype(np.float32).ravel()[0])
    if not (math.isfinite(factor) and factor > 0):
        raise CheckpointError(
            f"{parts[0].file}: ngram_embedding.weight_scale is {factor}, no scale; get the checkpoint anew"
        )
    blocks = parts[0].dtype if parts[0].dtype in QUANTISED else ""
    mapped, rows = zip(*(_mapped(part) for part in parts), strict=True)
    return NgramTable(rows, ngrams.head_width, factor, blocks, mapped)


def check_ngram_table(path: Path, ngrams: NgramShape, *, in_memory: bool = False) -> int:
    """Raises what `ngram_table_of` does for names, sizes and types, without reading a value. Returns the
    bytes of the table; in_memory: of its copy there.
    """
    parts, _ = _checked(path, ngrams)
    if in_memory and parts[0].dtype in QUANTISED:
        return 2 * ngrams.n_params
    return sum(part.end - part.begin for part in parts)


def _checked(path: Path, ngrams: NgramShape) -> tuple[list[Header], Header | None]:
    """The parts of the table in their order, and the scale of all of them, if they have one."""
    found = {name: header for name, header in _headers_of(path, ngrams.layer).items() if name not in _INTEGERS}
    scale = found.pop("ngram_embedding.weight_scale", None)
    shards = {int(match[1] or 0): found.pop(name) for name in list(found) if (match := _SHARD.fullmatch(name))}
    if found:
        raise CheckpointError(
            f"{next(iter(found.values())).file}: a table of n-grams with {min(found)!r} is not supported; supported are rows in "
            f"{', '.join(_TYPES)}, the last with one weight_scale, and blocks of GGUF"
        )
    if not shards or sorted(shards) != list(range(len(shards))):
        raise CheckpointError(
            f"{path}: the table of n-grams (ngram_embedding.shard_*.weight) is not whole: {len(shards)} parts are there, numbered up "
            f"to {max(shards, default=0)}; is the download complete?"
        )
    first, shape = shards[0], (ngrams.n_rows // len(shards), ngrams.head_width)
    for i, header in shards.items():
        if header.shape != shape or shape[0] * len(shards) != ngrams.n_rows:
            raise CheckpointError(
                f"{header.file}: part {i} of the table of n-grams is {list(header.shape)}; expected are {len(shards)} equal parts of "
                f"{[ngrams.n_rows, ngrams.head_width]} by config.json; get configuration and weights anew"
            )
        if header.dtype != first.dtype or header.dtype not in (*_TYPES, *QUANTISED):
            raise CheckpointError(
                f"{header.file}: part {i} of the table of n-grams is {header.dtype}; supported are {', '.join(_TYPES)}, all parts in one"
            )
    if (first.dtype == "F8_E4M3") != (scale is not None):
        raise CheckpointError(
            f"{first.file}: a table of n-grams in F8_E4M3 has one ngram_embedding.weight_scale, and no other has; this one is "
            f"{first.dtype} with{'' if scale else 'out'} it; get the checkpoint anew"
        )
    return [shards[i] for i in range(len(shards))], scale


def _headers_of(path: Path, layer: int) -> dict[str, Header]:
    """The tensors of the table and of the integers, by their names without what all of them begin with."""
    if is_gguf(path):
        table = open_gguf(path).tensors.get("per_layer_token_embd.weight")
        if table is None:
            return {}
        return {"ngram_embedding.weight": Header(table.file, table.shape, table.type, table.begin, table.end)}
    begin = re.compile(rf"(?:model\.|language_model\.)*layers\.{layer}\.ple\.ple_embedding\.(.+)")
    found = ((begin.fullmatch(name), header) for name, header in read_headers(path).items())
    return {match[1]: header for match, header in found if match}


def _mapped(header: Header) -> tuple[mmap.mmap, Array]:
    """A file, mapped for reading here and there, and the rows of a tensor in it."""
    mapped, flat = map_at_random(header)
    rows = flat.reshape(header.shape[0], -1)
    return mapped, rows if header.dtype in QUANTISED else np.asarray(rows.view(DTYPES[header.dtype]))


def dummy_ngram_table(ngrams: NgramShape, seed: int) -> NgramTable:
    """Random rows, for benches: as many as a table has, all of which are those of one small part again and
    again.
    """
    rows = np.random.default_rng(seed).standard_normal((_DUMMY_ROWS, ngrams.head_width), np.float32)
    part = np.empty(rows.shape, bfloat16)
    copy(part, rows * np.float32(0.1))
    return NgramTable([part] * -(-ngrams.n_rows // _DUMMY_ROWS), ngrams.head_width)


def dummy_table_bytes(ngrams: NgramShape) -> int:
    """Bytes of the memory of such a table."""
    return _DUMMY_ROWS * ngrams.head_width * 2


def ngram_row_ids(ngrams: NgramShape, ids: Array, previous: Array) -> Array:
    """Returns the rows that tokens' n-grams name, int64 [T, heads].

    ids: int32 [T]; previous: int32 [T, size - 1], those of the tokens before, the nearest first.
    """
    factors, n_each = np.array(ngrams.multipliers, np.int64), ngrams.n_heads // (ngrams.size - 1)
    products = np.column_stack([ids, previous]).astype(np.int64) * factors
    mixed = np.bitwise_xor.accumulate(products, 1)[:, 1:]
    rows: Array = np.repeat(mixed, n_each, 1) % np.array(ngrams.primes) + np.array(ngrams.offsets)
    return rows
