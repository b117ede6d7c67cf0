"""Adapters on a GPU: their memory, and the matrices that they add to."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.models.loading import COUNTED_ROWS
from deltic.models.qwen.adapters import Adapter
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import empty_weights
from deltic.ops.geometry import Allocate
from deltic.ops.gpu.lora import WORDS, ExpertTargets, Target, n_sums
from deltic.ops.matrix import Matrix

_SEGMENTS = {"in_proj": 4, "qkv": 3, "gate_up": 2, "shared_gate_up": 2, "router": 2}
"""Terms that a fused matrix may have; others have one. Of in_proj: q | k | v, z, b, a."""


@dataclass(frozen=True)
class Sized:
    """A matrix [n, k] to which adapters may add, or a stack of them; of the embedding k is the vocabulary."""

    n: int
    k: int
    n_matrices: int = 1


_REACHED = re.compile(r"layers\.\d+\.(in_proj|out_proj|qkv|o_proj|mlp\.\w+)")
"""Names of matrices of layers that adapters may add to: not of hyper-connections, the index and n-grams."""


def sizes(shape: ModelShape) -> dict[str, Sized]:
    """Sizes of every matrix to which adapters may add, by its name."""
    h, parts = shape.hidden_size, empty_weights(shape, None, True, COUNTED_ROWS).named_parts()
    found = {
        name: Sized(part.n, part.k, part.n_matrices)
        for name, part in parts
        if isinstance(part, Matrix) and _REACHED.fullmatch(name)
    }
    return found | {"embed": Sized(h, shape.vocab_size), "lm_head": Sized(shape.head_rows or shape.vocab_size, h)}


def n_segments(name: str) -> int:
    """Terms that an adapter may have for a matrix of this name."""
    return _SEGMENTS.get(name.rpartition(".")[2], 1)


def unreached(adapter: Adapter) -> list[str]:
    """The modules of an adapter to which nothing is added on a GPU."""
    covered = ((module, part) for module, part, *_ in adapter.covers if part not in ("embed", "lm_head"))
    return [module for module, part in covered if not _REACHED.fullmatch(part)]


@dataclass(frozen=True)
class AdapterBuffers:
    """Adapters that are loaded, and workspaces of their terms, of a model or of one of its shards."""

    arena: Tensor  # bfloat16, flat
    table: Tensor  # int64 [slots, matrices, WORDS] (ops/gpu/lora.py)
    sums: Tensor  # float32, flat: of one matrix, in a decode or a prefill
    gate_up: Tensor | None  # float32, flat: of all pairs of a mixture, before SwiGLU


def adapter_buffers(
    shape: ModelShape, room: tuple[int, int, int], rows: tuple[int, int], allocate: Allocate, n_shards: int
) -> list[AdapterBuffers]:
    """Allocates those of each shard, which share the workspaces. room: slots, the largest rank, bytes of an
    arena. rows: the most of a decode and of a prefill.
    """
    n_slots, max_rank, n_bytes = room
    widest, by_pair = max(shape.moe_intermediate_size, shape.shared_intermediate_size), shape.n_experts_per_tok + 1
    matrices = sizes(shape)

    def most(n: int, are_blocks: bool) -> int:
        """Floats of the sums of n rows."""
        found = []
        for name, one in matrices.items():
            k, lines = one.k, n
            if one.n_matrices > 1:  # a line a pair, and those of the shared expert are cut in the same way
                k, lines = max(k, widest) if name.endswith("down") else k, n * by_pair
            found.append(n_sums(lines, 1 if name == "embed" else k, n_segments(name), max_rank, are_blocks))
        return max(found)

    n_floats, pairs = max(most(rows[0], False), most(rows[1], True)), max(rows) * by_pair
    sums = allocate("sums of adapters", (n_floats,), torch.float32)
    gate_up = allocate("gate and up of pairs", (pairs * 2 * widest,), torch.float32) if shape.is_moe else None
    arenas = [allocate("adapters", (n_bytes // 2,), torch.bfloat16) for _ in range(n_shards)]
    tables = [allocate("table of adapters", (n_slots, len(matrices), WORDS), torch.int64) for _ in range(n_shards)]
    return [AdapterBuffers(arena, table, sums, gate_up) for arena, table in zip(arenas, tables, strict=True)]


class Targets:
    """The matrices of a model by their names, as operators know them."""

    def __init__(self, shape: ModelShape, buffers: AdapterBuffers, max_rank: int) -> None:
        self._gate_up = buffers.gate_up
        self._found = {
            name: Target(buffers.table[:, i], buffers.arena, buffers.sums, one.n, one.k, n_segments(name), max_rank)
            for i, (name, one) in enumerate(sizes(shape).items())
        }

    def __getitem__(self, name: str) -> Target:
        return self._found[name]

    def experts(self, name: str) -> ExpertTargets:
        """Targets of a mixture. name: how the names of its matrices begin."""
        assert self._gate_up is not None
        parts = "router", "gate_up", "down", "shared_gate_up", "shared_down"
        return ExpertTargets(**{part: self._found[name + part] for part in parts}, sums=self._gate_up)
