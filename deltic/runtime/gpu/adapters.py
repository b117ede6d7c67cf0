"""LoRA adapters in a GPU's memory: where each lies, and how it comes there beside the steps.

All adapters lie in one arena of planned size, each in one run of bytes, first fit. Its row of the table says
where the terms of each matrix begin (ops/gpu/lora.py). A thread of its own copies an adapter, through pinned
memory, in pieces and on a stream of its own, so that running sequences do not wait for it.

No step reads a slot's row, or the bytes that it names, before its copy is done and after it was dropped. Steps
that read what lay there before may still run when a copy is asked for: it waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deltic.models.qwen.adapters import Adapter, Delta
from deltic.models.qwen.gpu_adapters import AdapterMemory, n_segments, sizes
from deltic.models.qwen.shape import ModelShape
from deltic.ops.arrays import Array, raw
from deltic.ops.gpu.lora import ALIGNED, SEGMENT_WORDS, WORDS, padded

PIECE_BYTES = 4 << 20
"""Bytes that are copied at a time."""


class _Packed(NamedTuple):
    """A matrix's terms: where they begin in the adapter, and its words, of which addresses count from there."""

    name: str
    first: int
    words: Array
    deltas: Sequence[Delta]


def _aligned(n: int) -> int:
    return -(-n // ALIGNED) * ALIGNED


def _layout(adapter: Adapter) -> tuple[list[_Packed], int]:
    """Of each matrix, and elements in all. Down of all terms comes first, ranks padded; then up of each."""
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


def adapter_bytes(adapter: Adapter) -> int:
    """That it takes of the arena."""
    return 2 * _layout(adapter)[1]


def _values(packed: _Packed) -> Iterator[tuple[int, Array]]:
    """What is to be written: where it begins, and bfloat16 as uint16."""
    ranks = [padded(delta.rank) for delta in packed.deltas]
    n_matrices, _, k = packed.deltas[0].down.shape
    down, at = np.zeros((n_matrices, sum(ranks), k), np.uint16), 0
    for delta, rank in zip(packed.deltas, ranks, strict=True):
        down[:, at : at + delta.rank] = raw(delta.down)
        at += rank
    is_turned = packed.name == "embed"  # a token's column is read as a row
    yield int(packed.words[0]), np.ascontiguousarray(down.transpose(0, 2, 1)) if is_turned else down
    for i, (delta, rank) in enumerate(zip(packed.deltas, ranks, strict=True)):
        up = np.zeros((n_matrices, delta.n_rows, rank), np.uint16)
        up[:, :, : delta.rank] = raw(delta.up)
        yield int(packed.words[2 + i * SEGMENT_WORDS]), up


class AdapterStore:
    """The adapters of a runner, by slot. Not thread-safe, but for its own thread."""

    def __init__(self, shape: ModelShape, memory: AdapterMemory, stream: torch.cuda.Stream | None) -> None:
        """stream: of the steps; None: not on a GPU."""
        self._memory, self._stream = memory, stream
        self._index = {name: i for i, name in enumerate(sizes(shape))}
        self._sizes = sizes(shape)
        self._places: dict[int, tuple[int, int]] = {}
        """Of the adapters that are there, first element and number of them, by slot."""
        self._thread = ThreadPoolExecutor(1, "adapters")
        is_gpu = stream is not None
        self._own = torch.cuda.Stream(memory.arena.device) if is_gpu else None
        self._staging = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(2)]

    def put(self, slot: int, adapter: Adapter) -> Future[None]:
        """Begins to bring an adapter into a slot that has none; done when steps may read it.

        Raises MemoryError where no run of free bytes is long enough: others must be dropped first.
        """
        assert slot not in self._places
        for name, deltas in adapter.deltas.items():
            self._check(name, deltas)
        packed, n = _layout(adapter)
        first = self._free(n)
        self._places[slot] = first, n
        mark = None
        if self._stream is not None:
            mark = torch.cuda.Event()
            mark.record(self._stream)
        return self._thread.submit(self._bring, slot, first, packed, mark)

    def drop(self, slot: int) -> None:
        """Frees a slot; no step that is planned from here on reads it."""
        del self._places[slot]

    def close(self) -> None:
        """Ends its thread, behind what it does."""
        self._thread.shutdown()

    def _check(self, name: str, deltas: Sequence[Delta]) -> None:
        of = self._sizes[name]
        down, up = ((of.n_matrices, None, of.k), (of.n_matrices, None, None))
        for delta in deltas:
            fits = all(want in (None, have) for want, have in zip(down, delta.down.shape, strict=True))
            fits &= all(want in (None, have) for want, have in zip(up, delta.up.shape, strict=True))
            if not fits or delta.first + delta.n_rows > of.n or len(deltas) > n_segments(name):
                raise ValueError(f"adapter: {name}: terms of {delta.down.shape} and {delta.up.shape} at {delta.first}")

    def _free(self, n: int) -> int:
        """Where n elements are free."""
        begin = 0
        for first, size in sorted(self._places.values()):
            if first - begin >= n:
                return begin
            begin = first + size
        if len(self._memory.arena) - begin < n:
            raise MemoryError(f"no room for an adapter of {2 * n} bytes")
        return begin

    def _bring(self, slot: int, first: int, packed: list[_Packed], mark: torch.cuda.Event | None) -> None:
        table = np.zeros(self._memory.table.shape[1:], np.int64)
        with self._on_own_stream(mark):
            arena = self._memory.arena.view(torch.uint8)
            for one in packed:
                for begin, values in _values(one):
                    self._copy(values.reshape(-1).view(np.uint8), arena[2 * (first + begin) :])
                words = table[self._index[one.name]]
                words[:] = one.words
                words[[0, *(2 + i * SEGMENT_WORDS for i in range(len(one.deltas)))]] += first
            self._copy(table.reshape(-1).view(np.uint8), self._memory.table[slot].view(-1).view(torch.uint8))
            self._wait()

    def _copy(self, values: Array, to: Tensor) -> None:
        """Bytes, a piece after the other: one is staged while the other is on its way."""
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

    def _on_own_stream(self, mark: torch.cuda.Event | None) -> AbstractContextManager[object]:
        if self._own is None:
            return nullcontext()
        if mark is not None:
            self._own.wait_event(mark)
        return torch.cuda.stream(self._own)
