"""Shards of a model on a GPU, and the buffers over which those of several GPUs meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltic.models.qwen.gpu_adapters import Targets
from deltic.models.qwen.gpu_linears import Linears
from deltic.models.qwen.weights import GdnLayer, Weights
from deltic.ops.arrays import front
from deltic.ops.geometry import GdnWeights
from deltic.ops.gpu.all_reduce import Columns, Rank
from deltic.ops.gpu.expert_slots import ExpertSlots
from deltic.ops.gpu.launch import copy_rows
from deltic.ops.gpu.weight import device_of


@dataclass(frozen=True)
class Exchange:
    """Buffers of a GPU for a model that is cut: for its own shards, and for what it shares with other GPUs,
    where there are any.
    """

    sums: Mapping[str, Rank]  # of a decode and of a prefill
    logits: Mapping[str, Columns]  # the same, and of a guess
    shard_logits: Tensor  # float32, flat: columns of logits of one shard
    gpu_logits: Tensor | None  # float32, flat: of all shards that this GPU has, where these are several
    total: Tensor | None  # float32, flat: sums, where a kernel of its own makes them

    @property
    def meetings(self) -> list[Rank | Columns]:
        return [*self.sums.values(), *self.logits.values()]


class Shard:
    """Shard of a model that a GPU has. Mostly it is the only one."""

    def __init__(
        self, weights: Weights, targets: Targets | None = None, outside: Mapping[str, ExpertSlots] | None = None
    ) -> None:
        """outside: the routed experts of each layer, where those are in the host's memory."""
        self.outside, self.layers, self.draft_head = outside, weights.layers, weights.draft_head
        are_gdn = [isinstance(layer, GdnLayer) for layer in self.layers]
        self.nth = [are_gdn[:i].count(is_gdn) for i, is_gdn in enumerate(are_gdn)]
        """Number of layers of the same kind in front of each layer: where its memory lies."""
        self.gdn: dict[int, GdnWeights] = weights.gdn()
        self.linears = Linears([*weights.named_parts(), ("lm_head", weights.lm_head)], targets)

    @property
    def n_head_rows(self) -> int:
        return self.linears.matrices["lm_head"].n


def place_of(weights: Weights) -> torch.device:
    """The device that has a model's layers: a stage may have no embedding and no head."""
    layer = weights.layers[0]
    return device_of(layer.in_proj if isinstance(layer, GdnLayer) else layer.qkv)


def norms_of(weights: Weights) -> dict[str, Any]:
    """The norms in front of blocks, or the hyper-connections in their places, by name."""
    layers = {f"layers.{i}": layer for i, layer in enumerate(weights.layers)}
    found: dict[str, Any] = {"norm": weights.norm}
    if weights.draft_head is not None:
        layers["draft_head.layer"], found["draft_head.norm"] = weights.draft_head.layer, weights.draft_head.norm
    found |= {f"{name}.input_norm": layer.input_norm for name, layer in layers.items()}
    return found | {f"{name}.post_norm": layer.post_norm for name, layer in layers.items()}


def of_shards(shards: Sequence[Shard], flat: Tensor, of_shard: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Partial sums of all shards, [shards * S, n, H], in the front of `flat`. of_shard(i, flat) gives those
    of one, in the front of what is left of it.
    """
    at, n = 0, len(shards)
    for i in range(n):
        found = of_shard(i, flat[at:])
        at += found.numel()
    assert at == n * found.numel()
    return front(flat, n * len(found), *found.shape[1:])


def feature_of(layers: tuple[int, ...], i: int, width: int) -> tuple[int, int] | None:
    """Columns where the residual stream behind layer i is kept for a block drafter: the first, and how many a
    row has of all these layers. None: it is not.
    """
    return (layers.index(i) * width, len(layers) * width) if i in layers else None


def keep_feature(feature: tuple[int, int] | None, residual: Tensor, features: Tensor | None) -> None:
    """Copies the residual stream, float32 [N, H], to such columns of features, bfloat16, flat."""
    if feature is not None and features is not None:
        (first, row), (n, h) = feature, residual.shape
        copy_rows(residual, front(features, n, row)[:, first : first + h])
