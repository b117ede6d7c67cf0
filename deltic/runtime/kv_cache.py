"""The format of keys and values that a model is run with, and whether its keys fit into it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from deltic.config import ConfigError, EngineConfig
from deltic.models.fields import read_json
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import AttnLayer, Weights
from deltic.models.tensors import quantization_config
from deltic.ops.kv_formats import KV_ALIASES, on_device

WHERE = {"cpu": "a CPU", "cuda": "a GPU"}


def resolve_kv_cache(config: EngineConfig, directory: Path, device: str) -> tuple[EngineConfig, list[str]]:
    """The settings with the name of the format (KV_FORMATS) in place of auto or another server's name for it;
    and notices. directory: the checkpoint's. device: cpu or cuda. Raises ConfigError for a format that the
    device does not have.
    """
    asked, known = KV_ALIASES.get(config.kv_cache_dtype, config.kv_cache_dtype), on_device(device)
    if asked != "auto":
        if asked not in known:
            raise ConfigError(
                f"--kv-cache-dtype {config.kv_cache_dtype} is not for {WHERE[device]}, which has {', '.join(known)}"
            )
        return replace(config, kv_cache_dtype=asked), []
    if config.dummy is not None or not _wants_fp8(directory):
        return replace(config, kv_cache_dtype="bf16"), []
    if "fp8" in known:
        return replace(config, kv_cache_dtype="fp8"), ["keys and values in fp8, as the checkpoint says"]
    said = (
        f"the checkpoint was made for keys and values in fp8, which {WHERE[device]} does not have: they are bf16; "
        "--kv-cache-dtype int8 takes half the memory"
    )
    return replace(config, kv_cache_dtype="bf16"), [said]


def _wants_fp8(directory: Path) -> bool:
    """Whether a checkpoint says that it was made for keys and values in 8-bit floats."""
    file = (directory if directory.is_dir() else directory.parent) / "config.json"
    scheme = quantization_config(read_json(file)).get("kv_cache_scheme") if file.exists() else None
    return isinstance(scheme, Mapping) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"


def largest_keys(weights: Weights, shape: ModelShape) -> dict[str, float]:
    """By the name of an attention layer, what no element of its keys exceeds: a norm makes a head sqrt(d)
    long and multiplies it with 1 + w, rotation leaves pairs their length, and YaRN multiplies those.
    """
    layers = {f"layers.{i}": layer for i, layer in enumerate(weights.layers) if isinstance(layer, AttnLayer)}
    if weights.draft_head is not None:
        layers["draft head (MTP)"] = weights.draft_head.layer
    most = math.sqrt(shape.head_dim) * max(1.0, shape.rope_attention_factor)
    return {name: most * float(abs(1.0 + layer.k_norm).max()) for name, layer in layers.items()}


def check_keys(weights: Weights, shape: ModelShape) -> None:
    """Raises ConfigError where keys may be larger than the format can hold. weights: of the model, or of one
    of its parts, whose norms are whole.
    """
    most = shape.kv_format.largest_key
    if most is None:
        return
    for name, bound in largest_keys(weights, shape).items():
        if not bound <= most:
            raise ConfigError(
                f"--kv-cache-dtype {shape.kv_cache_dtype}: keys of {name} may be as large as {bound:.0f}, and it holds {most:.0f} "
                "at most; give --kv-cache-dtype fp8, whose keys have scales"
            )
