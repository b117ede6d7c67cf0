"""Tiny checkpoints whose matrices are quantised, in the layouts and mixes that are published.

    tiny = tiny_quantised("moe", "mixed-nvfp4")
    tiny.path, tiny.values["model.language_model.layers.0.mlp.experts.3.up_proj.weight"]

A layout is a function of a matrix: it gives the tensors that a file has of it, by the last part of their names, and
float32 values that they mean, both by the publisher's formula in plain torch (test_quantised_files.py holds the
formulas to the packages). A recipe says which modules a publisher quantises, how, and what config.json says of it.
Rounding to the nearest code is all the quantisation there is: what is tested is reading.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import tiny_checkpoint

Tensors = dict[str, Tensor]
Layout = Callable[[Tensor], tuple[Tensors, Tensor]]

E4M3, BF16, F16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _spread(scale: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    """float32 of the weights' shape: each scale for a block of weights."""
    wide = scale.float().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return wide[..., : shape[-2], : shape[-1]]


def _e4m3(w: Tensor, scale: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Codes, and what they mean."""
    wide = _spread(scale, rows, columns, w.shape)
    codes = (w.float() / wide).clamp(-448, 448).to(E4M3)
    return codes, codes.float() * wide


def fp8_block(w: Tensor, scale: str = "weight_scale_inv", dtype: torch.dtype = BF16) -> tuple[Tensors, Tensor]:
    """Qwen's FP8 and compressed-tensors' block (as weight_scale): one scale for 128 x 128."""
    n, k = -(-w.shape[-2] // 128), -(-w.shape[-1] // 128)
    padded = torch.zeros(*w.shape[:-2], n * 128, k * 128)
    padded[..., : w.shape[-2], : w.shape[-1]] = w
    largest = padded.reshape(*w.shape[:-2], n, 128, k, 128).abs().amax((-3, -1))
    scales = (largest / 448).to(dtype)
    codes, values = _e4m3(w, scales, 128, 128)
    return {"weight": codes, scale: scales}, values


def fp8_row(w: Tensor, dtype: torch.dtype = BF16) -> tuple[Tensors, Tensor]:
    """compressed-tensors' channel FP8."""
    scales = (w.float().abs().amax(-1, keepdim=True) / 448).to(dtype)
    codes, values = _e4m3(w, scales, 1, w.shape[-1])
    return {"weight": codes, "weight_scale": scales}, values


def fp8_tensor(w: Tensor) -> tuple[Tensors, Tensor]:
    """ModelOpt's FP8, with a scale of the activations."""
    scale = w.float().abs().max() / 448
    codes, values = _e4m3(w, scale.reshape(1, 1), *w.shape[-2:])
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.02)}, values


def _integers(w: Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Unsigned codes [N, K], scales [N, groups], codes of zero [N, groups], and values."""
    grouped = w.float().reshape(*w.shape[:-1], -1, group)
    least, most, top = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0), (1 << bits) - 1
    if symmetric:
        scale = (torch.maximum(-least, most) / (top / 2)).to(dtype)
        zero = torch.full_like(least, 1 << (bits - 1))
    else:
        scale = ((most - least) / top).to(dtype)
        zero = (-least / scale.float()).round().clamp(0, top)
    codes = (grouped / scale.float()[..., None] + zero[..., None]).round().clamp(0, top)
    values = (codes - zero[..., None]) * scale.float()[..., None]
    return codes.reshape(w.shape).long(), scale, zero.long(), values.reshape(w.shape)


def _words(codes: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """int32: codes packed along the last dimension, from the lowest bits on in this order."""
    share = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % share))
    fields = padded.reshape(*padded.shape[:-1], -1, share)[..., list(order or range(share))]
    return (fields << (torch.arange(share) * bits)).sum(-1).to(torch.int32)


def pack_quantised(
    w: Tensor, bits: int = 4, group: int = 128, symmetric: bool = True, dtype: torch.dtype = BF16
) -> tuple[Tensors, Tensor]:
    """compressed-tensors' pack-quantized. group 0: a channel."""
    codes, scale, zero, values = _integers(w, bits, group or w.shape[-1], symmetric, dtype)
    tensors = {"weight_packed": _words(codes, bits), "weight_scale": scale, "weight_shape": torch.tensor(w.shape)}
    if not symmetric:
        tensors["weight_zero_point"] = _words(zero.mT, bits).mT.contiguous()
    return tensors, values


def int_quantised(w: Tensor, symmetric: bool = True, dtype: torch.dtype = BF16) -> tuple[Tensors, Tensor]:
    """compressed-tensors' int-quantized, a scale a channel; ModelOpt's with float32 [N]."""
    codes, scale, zero, values = _integers(w, 8, w.shape[-1], symmetric, dtype)
    tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scale[:, 0] if dtype == F32 else scale}
    if not symmetric:
        tensors["weight_zero_point"] = (zero - 128).to(torch.int8)
    return tensors, values


def awq(w: Tensor, group: int = 128, symmetric: bool = False, dtype: torch.dtype = F16) -> tuple[Tensors, Tensor]:
    """AutoAWQ's GEMM layout."""
    codes, scale, zero, values = _integers(w, 4, group, symmetric, dtype)
    qweight, qzeros = _words(codes.T, 4, AWQ_ORDER), _words(zero.T, 4, AWQ_ORDER)
    return {"qweight": qweight, "qzeros": qzeros, "scales": scale.T.contiguous()}, values


def gptq(
    w: Tensor, bits: int = 4, group: int = 128, symmetric: bool = True, version: int = 1, dtype: torch.dtype = F16
) -> tuple[Tensors, Tensor]:
    """GPTQ's layout; version 1 has whole words of ones less in qzeros, as GPTQModel writes it. group 0: a channel."""
    group = group or w.shape[-1]
    codes, scale, zero, values = _integers(w, bits, group, symmetric, dtype)
    ones = sum(1 << bits * i for i in range(32 // bits)) if version == 1 else 0
    qzeros = (_words(zero.T, bits).long() - ones).to(torch.int32)
    tensors = {
        "qweight": _words(codes, bits).T.contiguous(),
        "qzeros": qzeros,
        "scales": scale.T.contiguous(),
        "g_idx": (torch.arange(w.shape[1]) // group).to(torch.int32),
    }
    return tensors, values


def auto_round(w: Tensor) -> tuple[Tensors, Tensor]:
    """AutoRound's in GPTQ's layout: without g_idx."""
    tensors, values = gptq(w)
    del tensors["g_idx"]
    return tensors, values


def _e2m1(w: Tensor, scale: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Packed codes of rows of groups, and what they mean. scale: float32."""
    grouped = w.float().reshape(*w.shape[:-1], -1, group)
    wanted = grouped / scale.clamp(min=1e-30)[..., None]
    codes = torch.bucketize(wanted.abs(), (E2M1[:7] + E2M1[1:8]) / 2) + 8 * wanted.signbit().long()
    values = (E2M1[codes] * scale[..., None]).reshape(w.shape)
    codes = codes.reshape(w.shape)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), values


def nvfp4(w: Tensor, publisher: str = "compressed-tensors") -> tuple[Tensors, Tensor]:
    """NVFP4; a stack has one scale of the tensor an expert."""
    largest = w.float().abs().amax((-2, -1), keepdim=True)
    groups = w.float().reshape(*w.shape[:-1], -1, 16).abs().amax(-1)
    lead = w.shape[:-2]
    if publisher == "modelopt":
        outer = largest / (6 * 448)
        scale = (groups / 6 / outer).to(E4M3)
        packed, values = _e2m1(w, scale.float() * outer, 16)
        tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": outer.reshape(lead)}
        return tensors | {"input_scale": torch.tensor(0.01)}, values
    outer = 448 * 6 / largest
    scale = (groups / 6 * outer).to(E4M3)
    packed, values = _e2m1(w, scale.float() / outer, 16)
    tensors = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": outer.reshape(*lead, 1)}
    return tensors | {"input_global_scale": torch.tensor([100.0])}, values


def mxfp4(w: Tensor, name: str = "weight_packed") -> tuple[Tensors, Tensor]:
    """MXFP4 of compressed-tensors (weight_packed) and ModelOpt (weight)."""
    groups = w.float().reshape(*w.shape[:-1], -1, 32).abs().amax(-1)
    exponents = (torch.floor(torch.log2(groups)) - 2 + 127).clamp(0, 254).to(torch.uint8)
    packed, values = _e2m1(w, torch.exp2(exponents.float() - 127), 32)
    return {name: packed, "weight_scale": exponents}, values


@dataclass(frozen=True)
class Recipe:
    """What a publisher quantises: the layout of the first pattern that a module's name matches; no pattern: bfloat16."""

    rules: tuple[tuple[str, Layout], ...]
    config: dict[str, Any]


_MLP = r"mlp\.(experts\.\d+\.|shared_expert\.)?(gate|up|down)_proj$"
_MIXER = r"(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_(qkv|z|qkvz)|out_proj))$"


def _group(**weights: Any) -> dict[str, Any]:
    base = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}
    return {"targets": ["Linear"], "weights": base | weights, "input_activations": None, "output_activations": None}


def _compressed(format: str, *groups: dict[str, Any], ignore: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


def _gptq(**fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "true_sequential": True,
        "dynamic": {"-:.*attn.*": {}, "-:.*shared_expert.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {}},
    } | fields


_NV = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}

RECIPES = {
    "qwen-fp8": Recipe(
        ((_MLP, fp8_block), (_MIXER, fp8_block)),
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.language_model.embed_tokens"],
        },
    ),
    "fp8-dynamic": Recipe(
        ((_MLP, fp8_row), (_MIXER, fp8_row)),
        _compressed("float-quantized", _group(num_bits=8, type="float", strategy="channel", group_size=None)),
    ),
    "fp8-block": Recipe(
        ((_MLP, partial(fp8_block, scale="weight_scale")), (_MIXER, partial(fp8_block, scale="weight_scale"))),
        _compressed("float-quantized", _group(num_bits=8, type="float", strategy="block", block_structure=[128, 128])),
    ),
    "fp8-modelopt": Recipe(
        ((_MLP, fp8_tensor), (_MIXER, fp8_tensor)), {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": []}
    ),
    # Asymmetric in groups of 32, of the mixers all but what makes the gates.
    "awq-compressed": Recipe(
        (
            (_MLP, partial(pack_quantised, group=32, symmetric=False)),
            (_MIXER, partial(pack_quantised, group=32, symmetric=False)),
        ),
        _compressed("pack-quantized", _group(symmetric=False, group_size=32)),
    ),
    "w4a16": Recipe(
        ((_MLP, pack_quantised), (r"self_attn\.[qkvo]_proj$", pack_quantised)),
        _compressed("pack-quantized", _group(), ignore=["lm_head", "re:.*linear_attn.*"]),
    ),
    "w8a16": Recipe(
        ((_MLP, partial(pack_quantised, bits=8, group=0)),),
        _compressed("pack-quantized", _group(num_bits=8, strategy="channel", group_size=None)),
    ),
    "w8a8": Recipe(
        ((_MLP, int_quantised), (_MIXER, int_quantised)),
        _compressed("int-quantized", _group(num_bits=8, strategy="channel", group_size=None)),
    ),
    "awq": Recipe(
        ((_MLP, awq), (r"self_attn\.[qkvo]_proj$", awq)),
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    ),
    "gptq": Recipe(((r"mlp\.(experts\.\d+\.)?(gate|up|down)_proj$", gptq),), _gptq()),
    "gptq-v2": Recipe(
        ((_MLP, partial(gptq, symmetric=False, version=2, group=64)),),
        _gptq(sym=False, checkpoint_format="gptq_v2", group_size=64),
    ),
    "gptq-int8": Recipe(((_MLP, partial(gptq, bits=8)),), _gptq(bits=8)),
    "auto-round": Recipe(
        ((_MLP, auto_round), (_MIXER, auto_round)),
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "data_type": "int",
            "extra_config": {"lm_head": {"bits": 16}},
        },
    ),
    "nvfp4": Recipe(
        ((_MLP, nvfp4), (r"self_attn\.[qkvo]_proj$", nvfp4)), _compressed("nvfp4-pack-quantized", _group(**_NV))
    ),
    "nvfp4-modelopt": Recipe(
        (
            (_MLP, partial(nvfp4, publisher="modelopt")),
            (_MIXER, fp8_tensor),
            ("lm_head$", partial(nvfp4, publisher="modelopt")),
        ),
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": [], "producer": {"name": "modelopt"}},
    ),
    "mixed-nvfp4": Recipe(
        ((_MLP, nvfp4), (_MIXER, fp8_row), ("lm_head$", fp8_row)),
        _compressed(
            "mixed-precision",
            _group(**_NV),
            _group(num_bits=8, type="float", strategy="channel", group_size=None),
            ignore=["re:.*in_proj_[ab]$"],
        ),
    ),
    "mxfp4": Recipe(
        ((_MLP, mxfp4),),
        _compressed("mxfp4-pack-quantized", _group(type="float", group_size=32, scale_dtype="torch.uint8")),
    ),
}
"""By name: mixes that are published of this family, and the schemes of the packages that write them."""


@dataclass(frozen=True)
class Tiny:
    """A checkpoint, and float32 of what its quantised matrices mean, by the names of the bfloat16 checkpoint."""

    path: Path
    values: dict[str, Tensor]


def quantise(tensors: Tensors, recipe: Recipe) -> tuple[Tensors, dict[str, Tensor]]:
    """Tensors as the publisher's file holds them, and values of the quantised ones."""
    stored, values = {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        layout = next((layout for pattern, layout in recipe.rules if re.search(pattern, module)), None)
        if layout is None:
            stored[name] = tensor
            continue
        parts, values[name] = layout(tensor)
        stored |= {f"{module}.{part}": one.contiguous() for part, one in parts.items()}
    return stored, values


@functools.cache
def tiny_quantised(
    kind: str, recipe: str, *, shards: int = 1, n_layers: int = 4, seed: int = 0, extras: bool = False
) -> Tiny:
    """A tiny checkpoint (tests/tiny.py: kind) as a recipe's publisher has it: experts each by its own name, not tied."""
    source = tiny_checkpoint(kind, experts="split", n_layers=n_layers, seed=seed, extras=extras)
    path = source.with_name(f"{source.name}-{recipe}-{shards}")
    _, stored, values = _quantised(source, recipe)
    _copy(source, path)
    write_shards(path, stored, shards)
    set_config(path, RECIPES[recipe].config)
    return Tiny(path, values)


@functools.cache
def meaning_of(kind: str, recipe: str, *, n_layers: int = 4, seed: int = 0) -> Path:
    """The same checkpoint without quantisation: what is quantised there is float32 of the values that it means."""
    source = tiny_checkpoint(kind, experts="split", n_layers=n_layers, seed=seed, extras=False)
    path = source.with_name(f"{source.name}-{recipe}-meaning")
    _copy(source, path)
    tensors, _, values = _quantised(source, recipe)
    save_file(tensors | values, path / "model.safetensors")
    return path


@functools.lru_cache(maxsize=2)
def _quantised(source: Path, recipe: str) -> tuple[Tensors, Tensors, Tensors]:
    """Tensors of a checkpoint, and what `quantise` makes of them: asked for by both of the above."""
    tensors = load_file(source / "model.safetensors")
    return tensors, *quantise(tensors, RECIPES[recipe])


def _copy(source: Path, path: Path) -> None:
    path.mkdir()
    for file in source.iterdir():
        if not file.name.startswith("model"):
            shutil.copy(file, path)


def write_shards(path: Path, tensors: Tensors, shards: int = 1) -> None:
    """As one file, or spread over shards by turns: a weight and its scale are in two."""
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::shards]}
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def set_config(path: Path, quantization_config: dict[str, Any]) -> None:
    """Puts a quantization_config into the config.json of a checkpoint."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_config}))
