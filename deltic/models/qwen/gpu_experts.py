"""A model's routed experts that are outside the GPU (ops/gpu/expert_slots.py): slots for decodes, and two
buffers for prefills of what is in no slot of a layer, of which one is filled while the other is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltic.models.qwen.weights import Moe, Weights
from deltic.ops.geometry import Allocate
from deltic.ops.gpu.expert_slots import UNIT, Counts, ExpertSlots, Stage, expert_slots, stage_in, stage_memory
from deltic.ops.gpu.launch import allocate_in_host

AHEAD_BLOCKS = 4
"""Blocks from which on a prefill takes a layer's experts whole, while the layer in front computes: it uses
nearly all of them. A shorter one copies those that it uses, once they are known.
"""


def layers_of_experts(weights: Weights) -> dict[str, Moe]:
    """The mixtures of the layers and of the draft head, by how the names of their matrices begin."""
    found = {f"layers.{i}.mlp.": layer.mlp for i, layer in enumerate(weights.layers)}
    if weights.draft_head is not None:
        found["draft_head.layer.mlp."] = weights.draft_head.layer.mlp
    return {name: mlp for name, mlp in found.items() if isinstance(mlp, Moe)}


def slot_bytes(weights: Weights) -> int:
    """Bytes of a slot in every layer: of one expert of each."""
    return sum(memory.shape[1] for memory in weights.experts().values())


@dataclass(frozen=True)
class OutsideExperts:
    """The experts of all layers, by how the names of a layer's matrices begin, of each shard of a GPU."""

    layers: list[dict[str, ExpertSlots]]
    stages: list[tuple[Tensor, Tensor]]  # uint8: room for the experts of a layer
    counts: Counts
    side: torch.cuda.Stream | None  # of the copies of layers ahead; None without a GPU

    @property
    def seen(self) -> list[int]:
        """Experts that decodes found in slots, those that they did not, the bytes of these in all shards, and
        those that prefills brought, as far as the host has heard: it waits for nothing.
        """
        n_here, n_fetched, n_units, n_staged = self.counts.seen.numpy().tolist()
        return [n_here // len(self.layers), n_fetched // len(self.layers), n_units * UNIT, n_staged * UNIT]

    def stage(self, i: int, i_shard: int, is_filled: bool) -> Stage:
        """A shard's stage of layer i. is_filled: `fill` has copied what it lacks, and `wait` has waited."""
        memory, experts = self.stages[i_shard][i % 2], self.layers[i_shard][f"layers.{i}.mlp."]
        return replace(stage_in(memory, experts), is_filled=is_filled)

    def fill(self, i: int) -> torch.cuda.Event | None:
        """Starts to copy to the stages of layer i what they lack, behind all that the current stream has now:
        the layer that had the stages before has read them. Returns what to wait for.
        """
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for i_shard in range(len(self.layers)):
                self.stage(i, i_shard, False).fill()
        return None if self.side is None else self.side.record_event()

    def wait(self, filled: torch.cuda.Event | None) -> None:
        """Has the current stream wait for copies that were started."""
        if filled is not None:
            torch.cuda.current_stream().wait_event(filled)


def outside_experts(weights: Sequence[Weights], n_slots: int, allocate: Allocate) -> OutsideExperts:
    """Makes the slots and stages of shards whose experts are in the host's memory. allocate(name, size,
    dtype) gives a zeroed tensor on the GPU.
    """
    found = allocate("expert counts", (4,), torch.int64)
    on_gpu, is_real = found.device.type == "cuda", found.device.type != "meta"
    seen = allocate_in_host("expert counts", (4,), torch.int64) if is_real else found
    counts = Counts(found, seen)
    homes = [{name: (moe.gate_up, moe.down) for name, moe in layers_of_experts(of).items()} for of in weights]
    return OutsideExperts(
        layers=[{name: expert_slots(*at, n_slots, counts, allocate) for name, at in of.items()} for of in homes],
        stages=[(stage_memory(of.values(), allocate), stage_memory(of.values(), allocate)) for of in homes],
        counts=counts,
        side=torch.cuda.Stream(found.device) if on_gpu else None,
    )
