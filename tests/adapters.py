"""LoRA adapters of tiny checkpoints, as PEFT writes them, and what they make of the oracle's weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltic.models.qwen.adapters import Adapter
from tests.plain import plain
from tests.tensors import tensor_of

DELTANET = ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a"]
DELTANET += ["linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"]
ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj", "shared_expert_gate"]
CONNECTIONS = ["input_mix_weight_down", "input_mix_weight_up", "block_inject_weight"]
STREAMS = [*CONNECTIONS, "index_qk_proj", "ple.key_proj", "ple.value_proj"]
EVERY = [*DELTANET, *ATTENTION, *MLP, *STREAMS, "lm_head", "embed_tokens"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
"""Parameters, and not modules."""


def make_adapter(
    model: Any,
    path: Path,
    modules: list[str],
    parameters: Sequence[str] = (),
    *,
    seed: int = 0,
    size: float = 0.03,
    **settings: Any,
) -> Any:
    """Puts an adapter with random values into a model of transformers and saves it; the model with it.

    Values are exact in bfloat16. modules: ends of names.
    """
    from peft import LoraConfig, get_peft_model

    named = [name for name, _ in model.named_modules()]
    found = [name for name in named if "visual" not in name and any(name.endswith(end) for end in modules)]
    settings = {"r": 8, "lora_alpha": 16, **settings}
    # As one expression: PEFT would rename those of a list for models whose experts it knows to be stacked.
    either = "|".join(map(re.escape, found))
    config = LoraConfig(target_modules=f"({either})", target_parameters=list(parameters) or None, **settings)
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_" in name:
                value.copy_((size * torch.randn(value.shape, generator=generator)).bfloat16())
    adapted.save_pretrained(path)
    return adapted.eval()


class Adapted:
    """A weight of the oracle and what an adapter adds to it: x W^T + bfloat16(scale * x down^T) up^T, in the place of a tensor."""

    def __init__(self, weight: Tensor, terms: list[tuple[int, Tensor, Tensor, float]], rounds: bool) -> None:
        """terms: first row, down, up and scale of each, in float32."""
        self.weight, self.terms, self.rounds = weight, terms, rounds

    def float(self) -> Adapted:
        return Adapted(self.weight.float(), self.terms, self.rounds)

    @property
    def T(self) -> Adapted:
        return self

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def __getitem__(self, i: Any) -> Adapted:
        """Of an expert, or of some rows."""
        if self.weight.dim() == 3:
            return Adapted(
                self.weight[i], [(n, down[i], up[i], scale) for n, down, up, scale in self.terms], self.rounds
            )
        rows = torch.arange(len(self.weight))[i].reshape(-1)
        terms = []
        for first, down, up, scale in self.terms:
            whole = torch.zeros(len(self.weight), up.shape[1])
            whole[first : first + len(up)] = up
            terms.append((0, down, whole[rows], scale))
        return Adapted(self.weight.float()[rows], terms, self.rounds)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        out = x @ self.weight.T
        for first, down, up, scale in self.terms:
            v = scale * (x @ down.T)
            out[:, first : first + len(up)] += (v.bfloat16().float() if self.rounds else v) @ up.T
        return out


def adapted(weights: Any, adapter: Adapter, precision: str = "float32") -> Any:
    """The oracle's weights of loaded ones, with an adapter: rounded between its two products where precision is bfloat16."""
    out, rounds = plain(weights), precision == "bfloat16"
    for name, deltas in adapter.deltas.items():
        terms = [(d.first, tensor_of(d.down).float(), tensor_of(d.up).float(), d.scale) for d in deltas]
        if name == "embed":
            _, down, up, scale = terms[0]
            v = scale * down[0].T
            out.embed = out.embed.float() + (v.bfloat16().float() if rounds else v) @ up[0].T
            continue
        *path, last = name.split(".")
        owner = out
        for step in path:
            owner = owner[int(step)] if step.isdigit() else getattr(owner, step)
        weight = getattr(owner, last)
        if last == "router":
            weight = torch.cat([owner.router, owner.shared_gate[None]])
        if weight.dim() == 2:
            terms = [(first, down[0], up[0], scale) for first, down, up, scale in terms]
        whole = Adapted(weight, terms, rounds)
        if last == "router":  # whose last row, the shared expert's gate, is apart
            owner.router, owner.shared_gate = whole[:-1], _Row(whole[-1])
        else:
            setattr(owner, last, whole)
    return out


class _Row:
    """One row of a weight, which the oracle makes a matrix."""

    def __init__(self, row: Adapted) -> None:
        self.row = row

    def __getitem__(self, i: None) -> Adapted:
        return self.row
