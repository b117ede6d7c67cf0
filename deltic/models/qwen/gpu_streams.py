"""A residual of several streams on a GPU: what blocks read of it (hyper-connections), and the n-gram
embedding, which adds to it (models/qwen/weights.py: HyperConnection, Ngrams).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltic.models.loading import transposed
from deltic.models.qwen.gpu_linears import Linears
from deltic.models.qwen.ngram_table import NgramTable
from deltic.models.qwen.ngrams import NgramShape
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import GdnLayer, HyperConnection, Weights
from deltic.ops.arrays import Array, front
from deltic.ops.geometry import Allocate
from deltic.ops.gpu.blocks import Blocks, Rows
from deltic.ops.gpu.fp8 import Fp8Rows
from deltic.ops.gpu.launch import allocate_in_host
from deltic.ops.gpu.linear import WideScratch, k_splits
from deltic.ops.gpu.ngrams import (
    STORED,
    HashedTable,
    NgramScratch,
    NgramVectors,
    ngram_add_decode,
    ngram_add_prefill,
    ngram_rows_decode,
    ngram_rows_prefill,
)
from deltic.ops.gpu.streams import gates, read, streams_norm
from deltic.ops.gpu.weight import device_of

NGRAM_RING = 32
"""Rows that the ring of the n-gram embedding has beside those that its convolution reads: as many as a step
has of a sequence, at most.
"""


@dataclass(frozen=True)
class ConnectionBuffers:
    """Buffers of up to T rows, flat. A recording for fewer uses the front of each."""

    embedded: Tensor  # float32: the row that begins each stream
    normed: Tensor  # bfloat16
    sums: Tensor  # float32: slices of a product with `down`; of many rows bfloat16 in its front
    low: Tensor  # bfloat16
    inject: Tensor  # float32: with what the block that runs is added to each stream
    ngrams: Tensor | None  # bfloat16: rows of the table
    kv: Tensor | None  # float32: slices of a product with them; of many rows bfloat16
    gate: Tensor | None  # float32
    columns: Tensor | None  # bfloat16: of many rows what goes into the convolution


def connection_buffers(
    shape: ModelShape, n_rows: int, allocate: Allocate, *, name: str, n_wanted: int = 0
) -> ConnectionBuffers | None:
    """Buffers for n_rows rows, many of them where only n_wanted, at most, reach the head. None: there is one
    stream.
    """
    if shape.n_streams == 1:
        return None
    h, s, size, rank, bf16, f32 = (
        shape.hidden_size, shape.n_streams, shape.stream_size, shape.stream_rank, torch.bfloat16, torch.float32,
    )  # fmt: skip
    n_sums, n_few = n_rows * (rank + s), n_wanted or n_rows
    n_sums = max(
        n_sums if n_wanted else 0, n_few * (rank + s) * k_splits(rank + s, size), n_few * rank * k_splits(rank, size)
    )
    ngrams = kv = gate = columns = None
    if shape.ngrams is not None:
        width = size + h
        slices = 1 if n_wanted else k_splits(width, shape.ngrams.width)
        ngrams = allocate(f"{name} n-gram rows", (n_rows * shape.ngrams.width,), bf16)
        kv = allocate(f"{name} n-gram sums", (n_rows * width * slices,), bf16 if n_wanted else f32)
        gate = allocate(f"{name} n-gram gates", (n_rows * s,), f32)
        columns = allocate(f"{name} n-gram columns", (n_rows * size,), bf16) if n_wanted else None
    return ConnectionBuffers(
        embedded=allocate(f"{name} embedded", (n_rows * h,), f32),
        normed=allocate(f"{name} normed streams", (n_rows * size,), bf16),
        sums=allocate(f"{name} stream sums", (n_sums,), f32),
        low=allocate(f"{name} stream gates", (n_rows * rank,), bf16),
        inject=allocate(f"{name} stream factors", (n_rows * s,), f32),
        ngrams=ngrams,
        kv=kv,
        gate=gate,
        columns=columns,
    )


class HyperConnections:
    """The hyper-connections of a model, each by its name, such as `layers.3.input_norm`."""

    def __init__(self, shape: ModelShape, parts: Mapping[str, HyperConnection], linears: Linears) -> None:
        self._shape, self._parts, self._linears = shape, parts, linears

    def read(
        self,
        name: str,
        residual: Tensor,
        block: Tensor | None,
        b: ConnectionBuffers,
        out: Tensor,
        *,
        rows: Tensor | None = None,
        fp8: Fp8Rows | None = None,
        wide: WideScratch | None = None,
    ) -> None:
        """out = what the block behind a connection reads, bfloat16 [N, H], after the block in front was added
        to the residual, float32 [T, S * H]. rows: only of these, int32 [N]; nothing is stored then. fp8: a
        workspace of few rows; wide: that of many.
        """
        of, s, n, rank = self._parts[name], self._shape.n_streams, len(out), self._shape.stream_rank
        streams, normed = residual.view(len(residual), s, -1), front(b.normed, n, residual.shape[1])
        before = None if block is None else front(b.inject, len(residual), s)
        streams_norm(streams, block, before, of.norm, self._shape.rms_norm_eps, normed, rows=rows)
        if wide is None:
            sums = self._linears.partial(f"{name}.down", normed, b.sums, fp8)
        else:
            sums = front(b.sums.view(torch.bfloat16), 1, n, of.down.n)
            self._linears.project_many(f"{name}.down", normed, sums[0], wide)
        low = front(b.low, n, rank)
        gates(sums, low, front(b.inject, n, s) if of.down.n > rank else None, s)
        read(low, of.up, normed, out)

    def add(self, residual: Tensor, block: Tensor, b: ConnectionBuffers) -> None:
        """residual += what the block behind the last connection gives, as `read` adds it."""
        s, (norm, eps) = self._shape.n_streams, (self._parts["norm"].norm, self._shape.rms_norm_eps)
        streams, scratch = residual.view(len(residual), s, -1), front(b.normed, *residual.shape)
        streams_norm(streams, block, front(b.inject, len(residual), s), norm, eps, scratch)


class NgramLayer:
    """The layer that adds what a table holds of the last tokens."""

    def __init__(self, shape: ModelShape, weights: Weights, linears: Linears) -> None:
        """weights: with a table in memory that the GPU reaches; without one only for what is compiled."""
        assert shape.ngrams is not None
        self._shape, self._ngrams, self._linears = shape, shape.ngrams, linears
        i = next(
            i for i, layer in enumerate(weights.layers) if isinstance(layer, GdnLayer) and layer.ngrams is not None
        )
        own: Any = weights.layers[i].ngrams  # type: ignore[union-attr]
        self._name = f"layers.{i}.ngrams.proj"
        self._weights = NgramVectors(
            own.key_norm, own.query_norm, own.conv_norm, transposed(own.conv), self._ngrams.size, shape.rms_norm_eps
        )
        self._rows = weights.ngram_table
        """Holds the memory that `_table` has the addresses of."""
        self._table = hashed_table(self._rows, self._ngrams, device_of(weights.lm_head))

    def rows_of_decode(self, history: Tensor, rows: Rows, b: ConnectionBuffers) -> None:
        """Reads what the table holds of each row's last tokens."""
        assert b.ngrams is not None
        ngram_rows_decode(self._table, history, rows=rows, out=front(b.ngrams, len(rows.position), self._ngrams.width))

    def rows_of_prefill(self, ids: Tensor, b: ConnectionBuffers) -> None:
        """The same of T tokens. ids: int32 [longest n-gram, T]."""
        assert b.ngrams is not None
        ngram_rows_prefill(self._table, ids, out=front(b.ngrams, ids.shape[1], self._ngrams.width))

    def add(
        self,
        residual: Tensor,
        block: Tensor | None,
        columns: Tensor,
        b: ConnectionBuffers,
        where: Rows | Blocks,
        *,
        fp8: Fp8Rows | None = None,
        wide: WideScratch | None = None,
    ) -> None:
        """residual += what the rows of the table give, after the block in front was added. columns: of the
        state slots.
        """
        assert b.ngrams is not None and b.kv is not None and b.gate is not None
        n, s, w = len(residual), self._shape.n_streams, self._weights
        rows, streams = front(b.ngrams, n, self._ngrams.width), residual.view(n, s, -1)
        inject, gate = None if block is None else front(b.inject, n, s), front(b.gate, n, s)
        if isinstance(where, Rows):
            kv = self._linears.partial(self._name, rows, b.kv, fp8)
            ngram_add_decode(streams, block, inject, kv, w, rows=where, gate=gate, columns=columns)
        else:
            assert b.columns is not None
            kv = front(b.kv, 1, n, residual.shape[1] + self._shape.hidden_size)
            self._linears.project_many(self._name, rows, kv[0], wide)
            made = NgramScratch(gate, front(b.columns, n, residual.shape[1]))
            ngram_add_prefill(streams, block, inject, kv, w, blocks=where, made=made, columns=columns)


def reachable_table(table: NgramTable, progress: Callable[[int, int], None]) -> NgramTable:
    """The same rows in memory of the host that every GPU reads, if they are not there yet. progress: as of
    `NgramTable.in_memory`.
    """
    if table.is_reachable:
        return table

    def allocate(n_bytes: int) -> Array:
        return np.asarray(allocate_in_host("table of n-grams", (n_bytes,), torch.uint8).numpy())

    return replace(table.in_memory(allocate, progress), is_reachable=True)


def hashed_table(table: NgramTable | None, ngrams: NgramShape, device: torch.device) -> HashedTable:
    """A table that the device reaches, as kernels take it."""
    kind, part_rows, scale, addresses = "bf16", ngrams.n_rows, 1.0, np.zeros(1, np.int64)
    if table is not None:
        assert not table.blocks and (table.is_reachable or device.type != "cuda")
        kinds = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
        kind, part_rows, scale = kinds.get(table.parts[0].dtype.name, "fp8"), table.rows_per_part, table.scale
        addresses = table.addresses
    assert kind in STORED

    def integers(values: object) -> Tensor:
        tensor: Tensor = torch.tensor(values, dtype=torch.int64)
        return tensor.to(device)

    of_hash = (integers(values) for values in (ngrams.multipliers, ngrams.primes, ngrams.offsets))
    return HashedTable(integers(addresses), part_rows, ngrams.head_width, kind, scale, ngrams.eos_id, *of_hash)
