"""Towers for tests: their configurations, and random weights with the names of a checkpoint, for whoever reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.reference.vision import Tower

TINY: dict[str, dict[str, Any]] = {
    "heads of 64": {"depth": 2, "hidden_size": 192, "num_heads": 3, "intermediate_size": 336, "out_hidden_size": 96},
    "heads of 72": {"depth": 2, "hidden_size": 288, "num_heads": 4, "intermediate_size": 464, "out_hidden_size": 128},
}
"""3 heads, and inner widths that are no multiple of 32, as the published 4304 is none."""
ODD: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 120,
    "num_heads": 5,
    "intermediate_size": 100,
    "out_hidden_size": 40,
    "num_position_embeddings": 49,
}
"""More than the kernels take."""
PUBLISHED: dict[str, Any] = {
    "depth": 12,
    "hidden_size": 768,
    "num_heads": 12,
    "intermediate_size": 3072,
    "out_hidden_size": 1024,
}
"""Of Qwen3.5-0.8B."""


def vision_config(sizes: dict[str, Any]) -> dict[str, Any]:
    """As in config.json."""
    return {
        "model_type": "qwen3_5",
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
        "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": [],
    } | sizes


def tower_of(sizes: dict[str, Any]) -> Tower:
    """For the reference."""
    return Tower(sizes["depth"], sizes["num_heads"])


def random_tower(sizes: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """bfloat16 weights of a tower, named as in a checkpoint behind `model.visual.`; activations keep their size."""
    generator = torch.Generator().manual_seed(seed)
    h, width, out = (sizes[name] for name in ("hidden_size", "intermediate_size", "out_hidden_size"))
    merged, n_places = 4 * h, vision_config(sizes)["num_position_embeddings"]
    weights: dict[str, Tensor] = {}

    def draw(name: str, *size: int, scale: float, mean: float = 0.0) -> None:
        weights[name] = (torch.randn(size, generator=generator) * scale + mean).bfloat16()

    def linear(name: str, n: int, *k: int) -> None:
        draw(f"{name}.weight", n, *k, scale=torch.tensor(k).prod().item() ** -0.5)
        draw(f"{name}.bias", n, scale=0.1)

    def norm(name: str) -> None:
        draw(f"{name}.weight", h, scale=0.1, mean=1.0)
        draw(f"{name}.bias", h, scale=0.1)

    linear("patch_embed.proj", h, 3, 2, 16, 16)
    draw("pos_embed.weight", n_places, h, scale=0.3)
    for i in range(sizes["depth"]):
        p = f"blocks.{i}."
        norm(f"{p}norm1")
        norm(f"{p}norm2")
        linear(f"{p}attn.qkv", 3 * h, h)
        weights[f"{p}attn.qkv.weight"][: 2 * h] *= 2  # attention that prefers some patches
        linear(f"{p}attn.proj", h, h)
        linear(f"{p}mlp.linear_fc1", width, h)
        linear(f"{p}mlp.linear_fc2", h, width)
    norm("merger.norm")
    linear("merger.linear_fc1", merged, merged)
    linear("merger.linear_fc2", out, merged)
    return weights
