"""LoRA adapters in a GPU's memory: how they lie there, and how they come there beside the steps.

All adapters lie in one arena of planned size. Who gets which bytes of it is decided in runtime/adapters.py. A
slot's row of a table says where the terms of each matrix begin (ops/gpu/lora.py). They are copied through
pinned memory, in pieces and on a stream of their own, so that running sequences do not wait.

Steps that read what lay there before may still run when an adapter is written: the copies wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deltic.models.fields import CheckpointError
from deltic.models.qwen.adapters import EMBEDDING, Adapter, Delta, listed
from deltic.models.qwen.gpu_adapters import AdapterBuffers, n_segments, sizes, unreached
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.shard import Cuts, whole
from deltic.ops.arrays import Array, raw
from deltic.ops.gpu.lora import ALIGNED, SEGMENT_WORDS, WORDS, padded
from deltic.runtime.adapters import AdapterMemory, Adapters
from deltic.runtime.plan import TextPlan

PIECE_BYTES = 4 << 20
"""Bytes that are copied at a time."""


class _Packed(NamedTuple):
    """A matrix's terms: where they begin in the adapter, and words, whose addresses count from there."""

    name: str
    first: int
    words: Array
    deltas: Sequence[Delta]


def _aligned(n: int) -> int:
    return -(-n // ALIGNED) * ALIGNED


def _layout(adapter: Adapter) -> tuple[list[_Packed], int]:
    """Lays out the matrices of an adapter, and counts the elements of all. Down of all terms comes first,
    ranks padded; then up of each.
    """
    found, at = [], 0
    for name, deltas in adapter.deltas.items():
        words = np.zeros(WORDS, np.int64)
        ranks = [padded(delta.rank) for delta in deltas]
        n_matrices, _, k = deltas[0].down.shape
        first, words[0], words[1] = at, at, sum(ranks)
        at = _aligned(at + n_matrices * sum(ranks) * k)
        for i, (delta, rank) in enumerate(zip(deltas, ranks, strict=True)):
            scale = int(np.array(delta.scale, np.float32).view(np.int32))
            begin = 2 + i * SEGMENT_WORDS
            words[begin : begin + SEGMENT_WORDS] = at, delta.first, delta.n_rows, rank, sum(ranks[:i]), scale
            at = _aligned(at + n_matrices * delta.n_rows * rank)
        found.append(_Packed(name, first, words, deltas))
    return found, at


def adapter_bytes(adapter: Adapter, cuts: Sequence[Cuts] = ()) -> int:
    """Bytes of the arena that an adapter takes; cuts: the most that any part of a model takes.

    Raises CheckpointError for modules that it cannot change.
    """
    if names := unreached(adapter):
        raise CheckpointError(
            f"{listed(names)}: hyper-connections, the index and n-grams are changed by adapters on a CPU alone; take --device cpu, or "
            "train it again with exclude_modules"
        )
    return 2 * max(_layout(one)[1] for one in ([adapter.of_part(part) for part in cuts] or [adapter]))


def _values(packed: _Packed) -> Iterator[tuple[int, Array]]:
    """Yields what is to be written: where it begins, and bfloat16 as uint16."""
    ranks = [padded(delta.rank) for delta in packed.deltas]
    n_matrices, _, k = packed.deltas[0].down.shape
    down, at = np.zeros((n_matrices, sum(ranks), k), np.uint16), 0
    for delta, rank in zip(packed.deltas, ranks, strict=True):
        down[:, at : at + delta.rank] = raw(delta.down)
        at += rank
    is_turned = packed.name == EMBEDDING  # a token's column is read as a row
    yield int(packed.words[0]), np.ascontiguousarray(down.transpose(0, 2, 1)) if is_turned else down
    for i, (delta, rank) in enumerate(zip(packed.deltas, ranks, strict=True)):
        up = np.zeros((n_matrices, delta.n_rows, rank), np.uint16)
        up[:, :, : delta.rank] = raw(delta.up)
        yield int(packed.words[2 + i * SEGMENT_WORDS]), up


class GpuAdapterMemory:
    """Implements `adapters.AdapterMemory`: the adapters of a runner."""

    def __init__(self, shape: ModelShape, buffers: AdapterBuffers, stream: torch.cuda.Stream | None) -> None:
        """stream: of the steps; None: not on a GPU."""
        self._buffers, self._stream = buffers, stream
        self._sizes = sizes(shape)
        self._index = {name: i for i, name in enumerate(self._sizes)}
        self._cleared: torch.cuda.Event | None = None
        """Event behind all steps that may have read what is free by now."""
        is_gpu = stream is not None
        self._own = torch.cuda.Stream(buffers.arena.device) if is_gpu else None
        self._staging = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(2)]

    def bytes_of(self, adapter: Adapter) -> int:
        """See `adapter_bytes`."""
        return adapter_bytes(adapter)

    def write(self, slot: int, begin: int, adapter: Adapter) -> None:
        """Puts an adapter at a byte of the arena, and its row into the table. It is there on return. In any
        thread, one at a time. Raises ValueError for terms that are not of this model's matrices.
        """
        first, (packed, _) = begin // 2, _layout(adapter)
        assert begin % (2 * ALIGNED) == 0
        for one in packed:
            self._check(one)
        table = np.zeros(self._buffers.table.shape[1:], np.int64)
        with self._on_own_stream():
            arena = self._buffers.arena.view(torch.uint8)
            for one in packed:
                for at, values in _values(one):
                    self._copy(values.reshape(-1).view(np.uint8), arena[2 * (first + at) :])
                words = table[self._index[one.name]]
                words[:] = one.words
                words[[0, *(2 + i * SEGMENT_WORDS for i in range(len(one.deltas)))]] += first
            self._copy(table.reshape(-1).view(np.uint8), self._buffers.table[slot].view(-1).view(torch.uint8))
            self._wait()

    def open(self, slot: int) -> None:
        """Rows may have what was written from the next step on: no step has read the slot's row before."""

    def clear(self, slot: int) -> None:
        """Marks the slot's bytes as free to be written: no step that is started from here on reads them."""
        if self._stream is not None:
            self._cleared = torch.cuda.Event()
            self._cleared.record(self._stream)

    def _check(self, packed: _Packed) -> None:
        name, of = packed.name, self._sizes.get(packed.name)
        for delta in packed.deltas:
            sizes = (delta.down.shape[0], delta.down.shape[2], delta.up.shape[0])
            fits = (
                of is not None
                and sizes == (of.n_matrices, of.k, of.n_matrices)
                and len(packed.deltas) <= n_segments(name)
            )
            if not fits or of is None or delta.first + delta.n_rows > of.n:
                raise ValueError(f"adapter: {name}: terms {delta.down.shape} and {delta.up.shape} at row {delta.first}")

    def _copy(self, values: Array, to: Tensor) -> None:
        """Bytes, a piece after the other: one is staged while another is on its way."""
        for i, begin in enumerate(range(0, len(values), PIECE_BYTES)):
            piece, staging = values[begin : begin + PIECE_BYTES], self._staging[i % 2]
            if i % 2 == 0:
                self._wait()  # for both
            staging.numpy()[: len(piece)] = piece
            to[begin : begin + len(piece)].copy_(staging[: len(piece)], non_blocking=True)

    def _wait(self) -> None:
        if self._own is not None:
            event = torch.cuda.Event()
            event.record()
            event.synchronize()

    def _on_own_stream(self) -> AbstractContextManager[object]:
        if self._own is None:
            return nullcontext()
        if self._cleared is not None:
            self._own.wait_event(self._cleared)
        return torch.cuda.stream(self._own)


class JointMemory:
    """Implements `adapters.AdapterMemory` for a model that is cut: the memory of each part, where an adapter
    has the same bytes, as many as its largest part needs.
    """

    def __init__(self, parts: Sequence[GpuAdapterMemory], cuts: Sequence[Cuts]) -> None:
        self._parts, self._cuts = parts, cuts

    def bytes_of(self, adapter: Adapter) -> int:
        return adapter_bytes(adapter, self._cuts)

    def write(self, slot: int, begin: int, adapter: Adapter) -> None:
        for memory, cuts in zip(self._parts, self._cuts, strict=True):
            memory.write(slot, begin, adapter.of_part(cuts))

    def open(self, slot: int) -> None:
        for memory in self._parts:
            memory.open(slot)

    def clear(self, slot: int) -> None:
        for memory in self._parts:
            memory.clear(slot)


def open_adapters(plan: TextPlan, memory: Sequence[GpuAdapterMemory]) -> Adapters:
    """Starts the adapters of a model. memory: of each of its parts, by GPU."""
    of_all: AdapterMemory = JointMemory(memory, plan.cuts) if plan.cuts else memory[0]
    return Adapters(whole(plan.shape, plan.cuts), plan.adapters, of_all)
