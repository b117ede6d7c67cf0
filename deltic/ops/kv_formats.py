"""Formats of the keys and values in pages, and how one page of one layer lies in bytes.

What is stored is the key after norm and rotation and the value, both rounded to bfloat16 first: that is all
of the format `bf16`. The others round once more, each token and key head by itself, so that no cut of a
prompt and no neighbour changes a code. tests/reference/kv.py says in NumPy which codes and scales they are,
to the bit. Nothing is rounded after that: a product reads code * scale, or least + code * scale, and a kernel
may multiply a score, or a weight of softmax, with the scale instead.

A page of a layer is one section behind another: codes of keys, [nk, 64, d]; codes of values, [nk, 64, d] or
half as many bytes; then, [nk, 64] each, those that the format has of: scales of keys, scales of values, least
values. Each section begins at a multiple of 64 bytes, since it has 64 tokens. In which order codes lie within
a section is the device's matter (csrc/attention.cpp; ops/gpu).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deltic.ops.geometry import PAGE_SIZE, DeviceArray


@dataclass(frozen=True)
class KvFormat:
    """Sizes are those of one token and key head. Scales and least values of values are 0 bytes where a format
    has none.
    """

    name: str
    devices: tuple[str, ...]
    """Devices that have kernels for it, as --device says them."""
    key_bits: int
    value_bits: int
    key_scale_bytes: int = 0
    value_scale_bytes: int = 0
    least_bytes: int = 0
    """Bytes of a value's offset: what code 0 stands for."""
    largest_key: float | None = None
    """The largest key that is stored as it is; larger ones are cut. None: there is none."""

    @property
    def is_plain(self) -> bool:
        """True if pages are arrays of bfloat16, [2, nk, 64, d] a layer, and not sections of bytes."""
        return self.key_bits == 16

    def head_bytes(self, dim: int) -> int:
        """Bytes of one token's key and value of one head of dim elements."""
        return sum(n for _, n in self._parts(dim))

    def sections(self, n_heads: int, dim: int) -> dict[str, tuple[int, int]]:
        """Sections of a layer's page by name: first byte, and bytes. Sections of 0 bytes are left out."""
        found, at = {}, 0
        for name, n in self._parts(dim):
            if n:
                found[name] = at, n_heads * PAGE_SIZE * n
                at += n_heads * PAGE_SIZE * n
        return found

    def layer_bytes(self, n_heads: int, dim: int) -> int:
        """Bytes of a layer's page."""
        return n_heads * PAGE_SIZE * self.head_bytes(dim)

    def _parts(self, dim: int) -> Iterator[tuple[str, int]]:
        yield "keys", dim * self.key_bits // 8
        yield "values", dim * self.value_bits // 8
        yield "key_scales", self.key_scale_bytes
        yield "value_scales", self.value_scale_bytes
        yield "least_values", self.least_bytes


BF16 = KvFormat("bf16", ("cpu", "cuda"), 16, 16)


@dataclass(frozen=True)
class KvPages:
    """Pages of one layer, with any page stride, and the format of the keys and values in them."""

    data: DeviceArray
    format: KvFormat = BF16
    table: DeviceArray = None
    """Pages of each sequence, on a GPU: int32 [batch_slots, max_pages]."""
    chosen: DeviceArray = None
    """int32 [T, n]: groups of `ratio` keys that a row reads, ascending, where more are whole. None: all."""
    ratio: int = 0


KV_FORMATS = {
    format.name: format
    for format in (
        BF16,
        # e4m3 with float16 scales
        KvFormat("fp8", ("cuda",), 8, 8, 2, 2),
        # keys e4m3 as they are; values of 4 bits, float16 scales and least values
        KvFormat("turboquant_k8v4", ("cuda",), 8, 4, 0, 2, 2, largest_key=448.0),
        # symmetric, with float32 scales
        KvFormat("int8", ("cpu",), 8, 8, 4, 4),
        # keys as int8 has them; values of 4 bits, float32 scales and least values
        KvFormat("k8v4", ("cpu",), 8, 4, 4, 4, 4),
    )
}
"""Formats by name, as --kv-cache-dtype gives it."""

KV_ALIASES = {"bfloat16": "bf16", "fp8_e4m3": "fp8"}
"""Names that other servers have for them."""


def on_device(device: str) -> list[str]:
    """Names of the formats that a device has."""
    return [name for name, format in KV_FORMATS.items() if device in format.devices]
