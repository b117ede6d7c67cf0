"""One random checkpoint at a published shape, in the Hugging Face layout: what every engine of the comparison
loads.

Text models of the Qwen3.5 family only. The values are drawn as those of
`deltic.models.qwen.weights.dummy_weights` are: unit fan-in matrices, norms near their rest, decays from a few
tokens to thousands; so activations and states stay in the range of trained ones. In FP8, as Qwen publishes
it, the codes of all matrices are parts of one random block, so that a file of 35 GB is written in a minute.

    python -m bench.peers_model SHAPE DIRECTORY [LAYERS]
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from deltic.config import ConfigError
from deltic.models.qwen.published import published_shape
from deltic.models.qwen.shape import LINEAR_ATTENTION, ModelShape
from tests.tiny_quantised import RECIPES

SHARD_BYTES = 2_000_000_000


def config_json(shape: ModelShape) -> dict[str, Any]:
    """The config.json of a text-only Qwen3.5 of this shape. Raises ValueError for another family."""
    if shape.family == "qwen3_next":
        raise ValueError("Qwen3-Next is not written; give a --shape of Qwen3.5, such as qwen3.5-0.8b")
    feed_forward: dict[str, Any] = {"intermediate_size": shape.intermediate_size}
    if shape.is_moe:
        feed_forward = {
            "num_experts": shape.n_experts,
            "num_experts_per_tok": shape.n_experts_per_tok,
            "moe_intermediate_size": shape.moe_intermediate_size,
            "shared_expert_intermediate_size": shape.shared_intermediate_size,
        }
    return feed_forward | {
        "architectures": ["Qwen3_5MoeForCausalLM" if shape.is_moe else "Qwen3_5ForCausalLM"],
        "model_type": f"{shape.family}_text",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.n_layers,
        "layer_types": list(shape.layer_types),
        "full_attention_interval": 4,
        "num_attention_heads": shape.n_q_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "linear_num_key_heads": shape.gdn_n_k_heads,
        "linear_num_value_heads": shape.gdn_n_v_heads,
        "linear_key_head_dim": shape.gdn_k_dim,
        "linear_value_head_dim": shape.gdn_v_dim,
        "linear_conv_kernel_dim": shape.conv_width,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "eos_token_id": list(shape.eos_token_ids),
        "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "mrope_interleaved": True,
            "mrope_section": list(shape.mrope_section or ()),
            "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
        },
    }


def cut_shape(name: str, n_layers: int | None = None) -> ModelShape:
    """A published shape, or a part of it: so many layers, and as large a part of the vocabulary, so that the
    head takes the same share of a step. Raises ConfigError.
    """
    shape = published_shape(name)
    if n_layers is None:
        return shape
    if n_layers % 4 or not 4 <= n_layers <= shape.n_layers:
        raise ConfigError(f"--layers {n_layers}: give a multiple of 4, from 4 to {shape.n_layers}")
    n_ids = shape.vocab_size * n_layers // shape.n_layers
    return replace(
        shape, layer_types=shape.layer_types[:n_layers], vocab_size=n_ids, eos_token_ids=(n_ids - 2, n_ids - 1)
    )


def tensor_sizes(shape: ModelShape, is_fused: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and size. is_fused: the experts of a layer are two tensors, as Qwen publishes them
    in bfloat16; in FP8 each expert has its own.
    """
    h, d = shape.hidden_size, shape.head_dim
    c, vd, hv = shape.conv_channels, shape.gdn_value_size, shape.gdn_n_v_heads
    yield "model.embed_tokens.weight", (shape.vocab_size, h)
    for i, kind in enumerate(shape.layer_types):
        layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (h,)}
        if kind == LINEAR_ATTENTION:
            layer |= {
                "linear_attn.in_proj_qkv.weight": (c, h),
                "linear_attn.in_proj_z.weight": (vd, h),
                "linear_attn.in_proj_b.weight": (hv, h),
                "linear_attn.in_proj_a.weight": (hv, h),
                "linear_attn.conv1d.weight": (c, 1, shape.conv_width),
                "linear_attn.A_log": (hv,),
                "linear_attn.dt_bias": (hv,),
                "linear_attn.norm.weight": (shape.gdn_v_dim,),
                "linear_attn.out_proj.weight": (h, vd),
            }
        else:
            q, kv = shape.n_q_heads * d, shape.n_kv_heads * d
            layer |= {
                "self_attn.q_proj.weight": (2 * q, h),
                "self_attn.k_proj.weight": (kv, h),
                "self_attn.v_proj.weight": (kv, h),
                "self_attn.q_norm.weight": (d,),
                "self_attn.k_norm.weight": (d,),
                "self_attn.o_proj.weight": (h, q),
            }
        layer["post_attention_layernorm.weight"] = (h,)
        mlps = {"mlp.": shape.intermediate_size}
        if shape.is_moe:
            layer |= {"mlp.gate.weight": (shape.n_experts, h), "mlp.shared_expert_gate.weight": (1, h)}
            n, width = shape.n_experts, shape.moe_intermediate_size
            mlps = {} if is_fused else {f"mlp.experts.{e}.": width for e in range(n)}
            if is_fused:
                layer |= {"mlp.experts.gate_up_proj": (n, 2 * width, h), "mlp.experts.down_proj": (n, h, width)}
            mlps["mlp.shared_expert."] = shape.shared_intermediate_size
        for mlp, f in mlps.items():
            layer |= {f"{mlp}{part}_proj.weight": (f, h) for part in ("gate", "up")}
            layer[f"{mlp}down_proj.weight"] = (h, f)
        for name, size in layer.items():
            yield f"model.layers.{i}.{name}", size
    yield "model.norm.weight", (h,)
    if not shape.tie_word_embeddings:
        yield "lm_head.weight", (shape.vocab_size, h)


def draw(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """bfloat16 values of the kind that the tensor of this name has."""
    values = torch.empty(size)
    if name.endswith("A_log"):
        values.uniform_(0.5, 4.0, generator=generator).log_()
    elif name.endswith("dt_bias"):  # inverse softplus of a log-uniform step
        values.uniform_(math.log(1e-3), math.log(0.3), generator=generator).exp_()
        values.add_(torch.log(-torch.expm1(-values)))
    elif name.endswith("conv1d.weight"):
        values.normal_(0.0, 0.5, generator=generator)
    elif len(size) == 1:
        rest = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0  # every other norm is zero-centred
        values.normal_(rest, 0.1, generator=generator)
    else:
        scale = 0.1 if "embed_tokens" in name else size[-1] ** -0.5
        values.normal_(0.0, scale, generator=generator)
    return values.to(torch.bfloat16)


class Fp8:
    """Matrices in e4m3 with a scale for 128 x 128, parts of one random block of codes."""

    def __init__(self, generator: torch.Generator) -> None:
        values = torch.empty(1 << 22).normal_(0.0, 64.0, generator=generator)
        self._codes = values.clamp(-448, 448).to(torch.float8_e4m3fn)
        self._begin = 0

    def tensors(self, name: str, size: tuple[int, ...]) -> dict[str, Tensor]:
        """Codes and scales of a matrix; nothing for what stays in 16 bits."""
        module = name.removesuffix(".weight")
        if not any(re.search(pattern, module) for pattern, _ in RECIPES["qwen-fp8"].rules):
            return {}
        n, n_block = math.prod(size), len(self._codes)
        self._begin = (self._begin + 4099) % n_block
        codes = torch.cat([self._codes[self._begin :], *[self._codes] * (n // n_block + 1)])[:n].view(size)
        scales = torch.full((-(-size[0] // 128), -(-size[1] // 128)), size[1] ** -0.5 / 64, dtype=torch.bfloat16)
        return {name: codes, f"{name}_scale_inv": scales}


def write_checkpoint(directory: Path, shape: ModelShape, seed: int = 0, fp8: bool = False) -> None:
    """Writes config.json, the safetensors files and their index, matrices in bfloat16 or as Qwen's FP8.

    The config comes last and so marks a complete one.
    """
    config = config_json(shape)
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    made = Fp8(generator) if fp8 else None
    if fp8:
        config["quantization_config"] = RECIPES["qwen-fp8"].config
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    n_files = n_bytes = total = 0

    def save() -> None:
        nonlocal n_files, n_bytes, total
        n_files += 1
        file = f"model-{n_files:05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        total += n_bytes
        shard.clear()
        n_bytes = 0

    for name, size in tensor_sizes(shape, is_fused=not fp8):
        tensors = made.tensors(name, size) if made else {}
        tensors = tensors or {name: draw(name, size, generator)}
        shard |= tensors
        n_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if n_bytes >= SHARD_BYTES:
            save()
    if shard:
        save()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (directory / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[2]), cut_shape(sys.argv[1], *map(int, sys.argv[3:4])))
