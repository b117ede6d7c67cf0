"""Towers as GGUF files, as llama.cpp's converter makes them of a checkpoint, by the published gguf package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor

from tests.tiny_vision import vision_config


def converted(tensors: dict[str, Tensor], n_blocks: int) -> dict[str, Tensor]:
    """The tensors as llama.cpp's converter names them, in the words of the gguf package: the patch embedding is two."""
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, n_blocks)
    names = {part: gguf.TENSOR_NAMES[part] for part in gguf.MODEL_TENSOR}
    merger = {
        "norm": names[gguf.MODEL_TENSOR.V_POST_NORM],
        "linear_fc1": names[gguf.MODEL_TENSOR.V_MMPROJ].format(bid=0),
        "linear_fc2": names[gguf.MODEL_TENSOR.V_MMPROJ].format(bid=2),
    }
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        base, _, last = name.rpartition(".")
        if name == "patch_embed.proj.weight":
            patch = names[gguf.MODEL_TENSOR.V_ENC_EMBD_PATCH]
            found |= {f"{patch}.weight": value[:, :, 0], f"{patch}.weight.1": value[:, :, 1]}
        elif base.startswith("merger."):
            found[f"{merger[base.removeprefix('merger.')]}.{last}"] = value
        else:
            found[f"{known.get_name(f'visual.{base}')}.{last}"] = value
    return found


def type_in_file(name: str, shape: tuple[int, ...], type: str) -> str:
    """What the converter stores a tensor of this name in, of a file of this type."""
    if len(shape) == 1 or "position_embd" in name:
        return "F32"
    if "patch_embd" in name:
        return type if type == "F16" else "F32"
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    return "F16" if shape[-1] % block else type


def write_mmproj(
    path: Path,
    tensors: dict[str, Tensor],
    sizes: dict[str, Any],
    type: str = "BF16",
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    pick: Callable[[str, tuple[int, ...], str], str] = type_in_file,
) -> Path:
    """Writes a tower as the file that llama.cpp's converter makes of it; change: of the metadata."""
    config, values = vision_config(sizes), converted(tensors, sizes["depth"])
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.MMPROJ])
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config["out_hidden_size"])
    writer.add_vision_image_size(int(config["num_position_embeddings"] ** 0.5) * config["patch_size"])
    writer.add_vision_patch_size(config["patch_size"])
    writer.add_vision_embedding_length(config["hidden_size"])
    writer.add_vision_feed_forward_length(config["intermediate_size"])
    writer.add_vision_block_count(config["depth"])
    writer.add_vision_head_count(config["num_heads"])
    writer.add_vision_image_mean([0.5, 0.5, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.5])
    writer.add_clip_projector_type(gguf.VisionProjectorType.QWEN3VL)
    writer.add_vision_use_gelu(True)
    writer.add_vision_spatial_merge_size(config["spatial_merge_size"])
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_is_deepstack_layers([False] * config["depth"])
    change(writer)
    for name, value in values.items():
        kind = gguf.GGMLQuantizationType[pick(name, tuple(value.shape), type)]
        stored = gguf.quants.quantize(np.ascontiguousarray(value.float().numpy()), kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
