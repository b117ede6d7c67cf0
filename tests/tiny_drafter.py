"""Tiny random block drafters on disk, as the published ones are stored, for the tiny checkpoints of tests/tiny.py.

path = tiny_drafter("dflash2")
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from deltic.models.dflash.shape import DrafterShape
from deltic.models.dflash.weights import load_drafter
from deltic.ops.matrix import Matrix
from tests.plain import rows
from tests.tensors import tensor_of
from tests.tiny import new_directory
from tests.tiny_config import HIDDEN, VOCAB_SIZE

KINDS = ("dflash", "dflash2", "dspark", "sliding")
MASK, N_Q, N_KV, DIM, FFN, RANK, GROUP = 300, 4, 2, 64, 384, 32, 16
TARGET_LAYERS = [0, 2]
_ARCHITECTURES = {"dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}


def tiny_config(kind: str, **more: Any) -> dict[str, Any]:
    """config.json, as published. sliding: DFlash whose first layer has a window, smaller than a prompt, and is causal."""
    own: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": TARGET_LAYERS}
    if kind == "dflash2":
        own |= {"block_size": 8, "conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": RANK}
        own |= {
            "selector_top_k": 4,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 20.0,
            "input_embedding_scale": 1.5,
        }
    of_dspark = {"markov_rank": RANK, "markov_head_type": "vanilla"}
    of_dspark |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    return {
        "architectures": [_ARCHITECTURES.get(kind, "DFlashDraftModel")],
        "attention_bias": False,
        "block_size": 8,
        "dflash_config": own,
        "head_dim": DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "layer_types": ["sliding_attention" if kind == "sliding" else "full_attention", "full_attention"],
        "max_position_embeddings": 4096,
        "model_type": "qwen3",
        "num_attention_heads": N_Q,
        "num_hidden_layers": 2,
        "num_key_value_heads": N_KV,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 40 if kind == "sliding" else None,
        "vocab_size": VOCAB_SIZE,
    } | (of_dspark if kind == "dspark" else {}) | more  # fmt: skip


@functools.cache
def tiny_drafter(kind: str, *, seed: int = 7, prefix: str = "", dtype: torch.dtype = torch.bfloat16) -> Path:
    """A checkpoint directory, made once a session. kind: one of KINDS. prefix: of all names."""
    path = new_directory(kind)
    write_drafter(path, kind, seed, prefix, dtype)
    return path


@functools.cache
def small_drafter(kind: str, hidden_size: int) -> Path:
    """Of a smaller model, as far as a test of Triton's interpreter makes one."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HIDDEN": hidden_size, "FFN": 64, "N_Q": 2, "N_KV": 1, "DIM": 32}.items():
            patch.setattr(f"tests.tiny_drafter.{name}", value)
        path = new_directory(f"small-{kind}")
        write_drafter(path, kind)
        return path


def write_drafter(path: Path, kind: str, seed: int = 7, prefix: str = "", dtype: torch.dtype = torch.bfloat16) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes(kind).items():
        value = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1 + 0.1 * value
        elif name.endswith("base_kernel"):
            value = torch.tensor([1.0, 0.3])[None, :, None] + 0.1 * value
        elif name.endswith("codebook") or name.endswith("bias"):
            value = value / 2
        elif "kernel_projection" in name:
            value = value / math.sqrt(shape[-1]) / 4
        else:
            value = value / math.sqrt(shape[-1])
        tensors[prefix + name] = value.to(dtype)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(tiny_config(kind), indent=1))


def shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes as they are stored."""
    found: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, len(TARGET_LAYERS) * HIDDEN)}
    found |= {"hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for i in range(2):
        p = f"layers.{i}."
        found |= {f"{p}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        found |= {f"{p}self_attn.{name}_norm.weight": (DIM,) for name in "qk"}
        found |= {
            f"{p}self_attn.{name}_proj.weight": (n * DIM, HIDDEN) for name, n in (("q", N_Q), ("k", N_KV), ("v", N_KV))
        }
        found |= {f"{p}self_attn.o_proj.weight": (HIDDEN, N_Q * DIM)}
        found |= {f"{p}mlp.{name}_proj.weight": (FFN, HIDDEN) for name in ("gate", "up")}
        found |= {f"{p}mlp.down_proj.weight": (HIDDEN, FFN)}
        if kind == "dflash2":
            for conv in ("attention_conv", "mlp_conv"):
                found |= {f"{p}{conv}.base_kernel": (2, 2, HIDDEN)}
                found |= {f"{p}{conv}.kernel_projection.weight": (4 * HIDDEN // GROUP, HIDDEN)}
    if kind == "dflash2":
        s = "candidate_selector."
        found |= {f"{s}{name}_codebook": (VOCAB_SIZE, RANK) for name in ("predecessor", "successor")}
        found |= {f"{s}hidden_projection.weight": (RANK, HIDDEN)}
    if kind == "dspark":
        found |= {f"markov_head.markov_w{i}.weight": (VOCAB_SIZE, RANK) for i in (1, 2)}
        found |= {"confidence_head.proj.weight": (1, HIDDEN + RANK), "confidence_head.proj.bias": (1,)}
    return found


def plain_drafter(path: Path) -> tuple[Any, DrafterShape]:
    """Weights for the reference, as plain tensors, and the shape."""
    shape = DrafterShape.from_directory(path)
    weights = _plain(load_drafter(path, shape, None)[0])
    for layer in weights.layers:
        for conv in filter(None, (layer.attn_conv, layer.mlp_conv)):
            conv.base = conv.base.unflatten(0, (2, shape.conv_taps))
    return weights, shape


def _plain(part: Any) -> Any:
    if part is None or isinstance(part, Tensor):
        return part
    if isinstance(part, Matrix):
        return rows(part)
    if isinstance(part, list):
        return [_plain(each) for each in part]
    if dataclasses.is_dataclass(part):
        return SimpleNamespace(**{each.name: _plain(getattr(part, each.name)) for each in dataclasses.fields(part)})
    return tensor_of(part)
