"""The checkpoint as GGUF, for llama.cpp: bfloat16 through the `gguf` package, then quantised by llama.cpp
itself.

    python -m bench.peers_gguf CHECKPOINT OUT THREADS      (in the environment of the peers)

Writes OUT/bf16.gguf, OUT/q8_0.gguf, OUT/q4_k_m.gguf, OUT/q4_0.gguf and, last, OUT/bytes.json: for each the
bytes of weights that a decode step reads. The format's conventions (names, decay as -exp(A_log), zero-centred
norms stored as 1 + w, value heads in tiled rather than grouped order) are those that llama.cpp's graph for
"qwen35" expects. There is no vocabulary: the engines exchange token ids.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import torch
from safetensors import safe_open
from torch import Tensor

QUANTISED = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}

NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
"""A layer's tensors: checkpoint name -> GGUF name."""

OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a checkpoint tensor."""
    if name in OUTER:
        return OUTER[name]
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if found is None or found[2] not in NAMES:
        raise ValueError(f"tensor {name!r} has no place in a GGUF file of this family")
    return f"blk.{found[1]}.{NAMES[found[2]]}"


def tiled(tensor: Tensor, config: dict[str, Any], dim: int, head_dim: int) -> Tensor:
    """Value heads along `dim`, from grouped by key head to one of each key head in turn."""
    n_k = config["linear_num_key_heads"]
    each = config["linear_num_value_heads"] // n_k
    split = tensor.view(*tensor.shape[:dim], n_k, each, head_dim, *tensor.shape[dim + 1 :])
    return split.transpose(dim, dim + 1).flatten(dim, dim + 2)


def converted(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """What GGUF keeps of this tensor: matrices bfloat16, everything else float32."""
    v_dim, v_heads = config["linear_value_head_dim"], config["linear_num_value_heads"]
    n_qk = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    kind = name.rpartition("linear_attn.")[2] if "linear_attn." in name else ""
    if kind in ("in_proj_qkv.weight", "conv1d.weight"):
        tensor = torch.cat([tensor[:n_qk], tiled(tensor[n_qk:], config, 0, v_dim)])
    elif kind == "in_proj_z.weight":
        tensor = tiled(tensor, config, 0, v_dim)
    elif kind in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        tensor = tiled(tensor, config, 0, 1)
    elif kind == "out_proj.weight":
        tensor = tiled(tensor, config, 1, v_dim)
    if kind == "conv1d.weight":
        return tensor.float().squeeze(1)
    if tensor.ndim > 1:
        return tensor
    if kind == "A_log":
        assert tensor.numel() == v_heads
        return -tensor.float().exp()
    is_zero_centred = name.endswith("norm.weight") and kind != "norm.weight"
    return tensor.float() + (1.0 if is_zero_centred else 0.0)


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What llama.cpp reads of the model's geometry."""
    rope, d = config["rope_parameters"], config["head_dim"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(d)
    writer.add_value_length(d)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(d * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    writer.add_uint32(f"{writer.arch}.full_attention_interval", config["full_attention_interval"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def stored_tensors(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint, in the files' order, mapped from them."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 -- not a dict
                yield name, handle.get_tensor(name)


def write_bf16(checkpoint: Path, path: Path) -> None:
    """Writes the bfloat16 GGUF; one tensor at a time is in memory."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "qwen35")
    add_metadata(writer, config)
    for name, tensor in stored_tensors(checkpoint):
        data = converted(name, tensor, config)
        is_matrix = data.dtype == torch.bfloat16
        writer.add_tensor_info(
            gguf_name(name),
            list(data.shape),
            torch.zeros(0).numpy().dtype,
            data.nbytes,
            gguf.GGMLQuantizationType.BF16 if is_matrix else gguf.GGMLQuantizationType.F32,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in stored_tensors(checkpoint):
        data = converted(name, tensor, config).contiguous()
        writer.write_tensor_data(data.view(torch.uint8).numpy() if data.ndim > 1 else data.numpy())
    writer.close()


def quantise(source: Path, target: Path, file_type: int, n_threads: int) -> None:
    """llama.cpp's own quantisation, without an importance matrix. Raises RuntimeError."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = file_type, n_threads
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if status != 0:
        raise RuntimeError(f"llama.cpp could not quantise {source} to {target.name} (status {status})")


def bytes_per_step(path: Path) -> int:
    """Bytes of weights that one decode step reads: all but an embedding that is not the head too."""
    tensors = {t.name: int(t.n_bytes) for t in gguf.GGUFReader(path).tensors}
    embedding = tensors["token_embd.weight"] if "output.weight" in tensors else 0
    return sum(tensors.values()) - embedding


def main() -> None:
    checkpoint, out, n_threads = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    write_bf16(checkpoint, out / "bf16.gguf")
    for name, file_type in QUANTISED.items():
        quantise(out / "bf16.gguf", out / f"{name}.gguf", file_type, n_threads)
    found = {name: bytes_per_step(out / f"{name}.gguf") for name in ("bf16", *QUANTISED)}
    (out / "bytes.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
