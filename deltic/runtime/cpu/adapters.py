"""LoRA adapters in the CPU's memory: packed as its kernels read them, found by a table of addresses."""

from __future__ import annotations

from deltic.models.qwen.adapters import EMBEDDING, Adapter
from deltic.models.qwen.cpu_buffers import AdapterBuffers
from deltic.ops.arrays import Array
from deltic.ops.cpu.lora import put_terms, terms_bytes


def adapter_bytes(adapter: Adapter) -> int:
    """Bytes that an adapter takes."""
    return sum(terms_bytes(deltas) for deltas in adapter.deltas.values())


class CpuAdapterMemory:
    """Implements `runtime.adapters.AdapterMemory`."""

    def __init__(self, buffers: AdapterBuffers, memory: Array) -> None:
        """memory: uint8 [room.n_bytes]."""
        self._buffers, self._memory = buffers, memory
        self._written: dict[int, dict[int, Array]] = {}  # of a slot the entries of products, by their number

    def bytes_of(self, adapter: Adapter) -> int:
        return adapter_bytes(adapter)

    def write(self, slot: int, begin: int, adapter: Adapter) -> None:
        entries = {}
        for name, deltas in adapter.deltas.items():
            n_bytes = terms_bytes(deltas)
            memory = self._memory[begin : begin + n_bytes]
            entries[self._buffers.names.index(name)] = put_terms(deltas, memory, name == EMBEDDING)
            begin += n_bytes
        self._written[slot] = entries

    def open(self, slot: int) -> None:
        self.clear(slot)
        for i, entry in self._written.pop(slot).items():
            self._buffers.table[slot, i] = entry

    def clear(self, slot: int) -> None:
        self._buffers.table[slot] = 0
