"""GGUF files, made of checkpoints as llama.cpp's converter makes them, by the published gguf package.

    path = tiny_gguf("moe", "Q4_K", n_files=2, has_mtp=True)      (bench/peers_gguf.py writes large ones)

The converter's changes are made here: 1 + w, -exp(A_log), tiled value heads, Next's q | k | v | z set apart, experts in
one tensor. gguf's quantiser makes the blocks; of the types that it cannot make, random blocks of the right size stand
for the values.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from deltic.models.qwen.shape import ModelShape
from tests.tiny import tiny_checkpoint

Array = NDArray[Any]

ARCHITECTURES = {"Qwen3_5F": "qwen35", "Qwen3_5M": "qwen35moe", "Qwen3Nex": "qwen3next", "Qwen4Exp": "qwen4exp"}
"""By the beginning of Hugging Face's."""

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "self_attn.indexer.q_proj": "indexer.q_proj", "self_attn.indexer.k_proj": "indexer.k_proj",
    "self_attn.indexer.q_layernorm": "indexer.q_norm", "self_attn.indexer.k_layernorm": "indexer.k_norm",
    "ple.key_proj": "ple_key", "ple.value_proj": "ple_value", "ple.conv1d": "ple_conv1d",
    "ple.norm_key": "ple_norm_key", "ple.norm_query": "ple_norm_query", "ple.norm_conv": "ple_norm_conv",
} | {
    f"{of}.{name}": f"{in_file}_{part}"
    for of, in_file in (
        ("attn_hyper_connection", "hc_attn"), ("mlp_hyper_connection", "hc_ffn"),
        ("model.hyper_connection_mixer", "output_hc"), ("hyper_connection_mixer", "nextn.hc_head"),
    )
    for name, part in (
        ("hc_norm", "norm"), ("input_mix_weight_down", "down"), ("input_mix_weight_up", "up"),
        ("block_inject_weight", "inject"),
    )
}  # fmt: skip
"""ggml's, by those of the checkpoint without `.weight`."""

NEXTN = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm",
}  # fmt: skip

Pick = Callable[[str, tuple[int, ...]], str]
"""The type of a tensor, by its name in the checkpoint and its shape."""


@functools.cache
def tiny_gguf(
    kind: str,
    type: str | Pick = "Q8_0",
    *,
    n_files: int = 1,
    has_mtp: bool = False,
    is_fused: bool = False,
    tied: bool = False,
    n_layers: int = 4,
    seed: int = 0,
) -> Path:
    """The first file of a model, made once a session. kind: as of tiny_checkpoint. type: of the matrices, or a function.

    is_fused: gate and up of experts are one tensor.
    """
    source = tiny_checkpoint(kind, tied=tied, layout="flat", experts="fused", n_layers=n_layers, seed=seed)
    target = Path(_folder().name) / str(len(list(Path(_folder().name).iterdir())))
    target.mkdir()
    return write_gguf(source, target / f"tiny-{kind}.gguf", type, n_files=n_files, has_mtp=has_mtp, is_fused=is_fused)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="deltic-gguf-")


def write_gguf(
    source: Path,
    target: Path,
    type: str | Pick = "Q8_0",
    *,
    n_files: int = 1,
    has_mtp: bool = False,
    is_fused: bool = False,
    text: Path | None = None,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Writes a checkpoint directory, of flat names and fused experts, as GGUF; gives its first file.

    One tensor at a time is in memory in float32, all of them as they are written. text: where the tokenizer and the
    template are, if not in `source`. change: adds to the metadata.
    """
    config = json.loads((source / "config.json").read_text())
    is_flash = config["architectures"][0].startswith("Qwen4Exp")

    def tensors() -> Iterator[tuple[str, str, Array]]:
        yield from converted(stored_values(source), config, is_fused)
        if has_mtp:
            yield from converted(mtp_values(checkpoint_values(source), config).items(), config, is_fused)

    arch = ARCHITECTURES[config["architectures"][0][:8]]
    n_tensors = -(-sum(1 for _ in tensors()) // n_files) if n_files > 1 else 0
    writer = gguf.GGUFWriter(target, arch, split_max_tensors=n_tensors)
    _write_metadata(writer, arch, config, has_mtp)
    if is_flash:
        _write_flash_next(writer, source, config, has_mtp)
    _write_text(writer, text or source, config["vocab_size"], "qwen2" if arch == "qwen3next" else "qwen35")
    change(writer)
    pick = type if callable(type) else _of_matrices(type)
    for hf_name, name, values in tensors():
        data, kind = blocks_of(values, pick(hf_name, values.shape), seed=len(name))
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target if n_files == 1 else target.with_name(f"{target.stem}-00001-of-{n_files:05}.gguf")


def checkpoint_values(source: Path) -> dict[str, Array]:
    """float32 tensors of a checkpoint directory, by their names."""
    return dict(stored_values(source))


def stored_values(source: Path) -> Iterator[tuple[str, Array]]:
    """The same, one after another in the files' order."""
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 -- not a dict
                yield name, opened.get_tensor(name).float().numpy()


def mtp_values(tensors: dict[str, Array], config: dict[str, Any]) -> dict[str, Array]:
    """A draft head: the last attention layer again, and what joins it to the trunk."""
    last = max(int(name.split(".")[2]) for name in tensors if ".self_attn.q_norm" in name)
    layer = f"model.layers.{last}."
    h, n_streams = config["hidden_size"], config.get("hc_count", 1)
    generator = np.random.default_rng(9)
    sizes = {name: h for name in NEXTN if name != "fc"} | {"pre_fc_norm_hidden": n_streams * h}
    mixer = {f"mtp.{n[6:]}": t for n, t in tensors.items() if n.startswith("model.hyper_connection_mixer.")}
    if mixer:
        del sizes["norm"]
    return (
        mixer
        | {f"mtp.layers.0.{n.removeprefix(layer)}": t for n, t in tensors.items() if n.startswith(layer)}
        | {
            "mtp.fc.weight": generator.normal(0, 0.05, (h, 2 * h)).astype(np.float32),
            **{f"mtp.{name}.weight": generator.normal(0, 0.1, n).astype(np.float32) for name, n in sizes.items()},
        }
    )


def tiled(values: Array, n_k: int, n_v: int, axis: int = 0) -> Array:
    """Value heads along an axis, from grouped by key head to tiled."""
    if n_k == n_v:
        return values
    shape = values.shape
    split = values.reshape(*shape[:axis], n_k, n_v // n_k, -1, *shape[axis + 1 :])
    return np.swapaxes(split, axis, axis + 1).reshape(shape)


def converted(
    tensors: Iterable[tuple[str, Array]], config: dict[str, Any], is_fused: bool = False
) -> Iterator[tuple[str, str, Array]]:
    """Tensors as the converter leaves them: the name in the checkpoint, the one in the file, and the values."""
    n_k, n_v, dim = (config[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "value_head_dim"))
    keys = 2 * n_k * config["linear_key_head_dim"]
    is_next = config["architectures"][0] == "Qwen3NextForCausalLM"
    table: list[Array] = []
    for name, values in tensors:
        if ".ngram_embedding.shard_" in name:
            table.append(values)  # in the order of the file: shards are few, and sorted
            if len(table) == config["split_ngram_parts"]:
                yield "table", "per_layer_token_embd.weight", np.concatenate(table)
            continue
        if ".ple_embedding." in name:
            continue
        block, prefix, base = _place(name, config["num_hidden_layers"])
        if base == "self_attn.indexer.index_qk_proj":
            for part, rows in zip("qk", np.split(values, [-config["indexer_head_dim"]]), strict=True):
                own = f"self_attn.indexer.{part}_proj"
                yield f"{prefix}{own}.weight", f"{block}{NAMES[own]}.weight", rows
            continue
        if base == "linear_attn.in_proj_qkvz":
            q, k, v, z = np.split(values.reshape(n_k, -1, values.shape[-1]), np.cumsum([128, 128, n_v // n_k * dim]), 1)
            qkv = np.concatenate([part.reshape(-1, values.shape[-1]) for part in (q, k, v)])
            yield f"{prefix}linear_attn.in_proj_qkv.weight", f"{block}attn_qkv.weight", qkv
            yield f"{prefix}linear_attn.in_proj_z.weight", f"{block}attn_gate.weight", z.reshape(-1, values.shape[-1])
            continue
        if base == "mlp.experts.gate_up_proj" and not is_fused:
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                yield f"{prefix}mlp.experts.{part}_proj.weight", f"{block}ffn_{part}_exps.weight", half
            continue
        if base.endswith("norm") or base.startswith(("pre_fc_norm", "ple.norm_")):
            values = values if base == "linear_attn.norm" else values + np.float32(1)
        if base.endswith("conv1d"):
            values = values[:, 0]
        if not is_next and base in ("linear_attn.in_proj_qkv", "linear_attn.conv1d"):
            values = np.concatenate([values[:keys], tiled(values[keys:], n_k, n_v)])
        elif (
            not is_next
            and base.startswith("linear_attn.")
            and base not in ("linear_attn.norm", "linear_attn.in_proj_ba")
        ):
            values = tiled(values, n_k, n_v, axis=1 if base == "linear_attn.out_proj" else 0)
        if base == "linear_attn.A_log":
            yield name, f"{block}ssm_a", -np.exp(values)
        elif base == "linear_attn.dt_bias":
            yield name, f"{block}ssm_dt.bias", values
        elif base == "mlp.shared_expert_gate":
            yield name, f"{block}ffn_gate_inp_shexp.weight", values[0]
        else:
            known = f"nextn.{NEXTN[base]}" if base in NEXTN else NAMES[base]
            yield name, f"{block}{known}.weight", values


def _place(name: str, n_layers: int) -> tuple[str, str, str]:
    """What a name begins with in the file and in the checkpoint, and the rest of it, without `.weight`."""
    name = name.removesuffix(".weight")
    for start, first in (("model.layers.", 0), ("mtp.layers.", n_layers)):
        if name.startswith(start):
            layer, _, rest = name.removeprefix(start).partition(".")
            return f"blk.{first + int(layer)}.", f"{start}{layer}.", rest
    return (f"blk.{n_layers}.", "mtp.", name[4:]) if name.startswith("mtp.") else ("", "", name)


def _of_matrices(type: str) -> Pick:
    """Vectors, routers and the convolution stay float32, and rows that are no whole blocks get another type."""

    def pick(name: str, shape: tuple[int, ...]) -> str:
        if len(shape) == 1 or "conv1d" in name or name.endswith("mlp.gate.weight"):
            return "F32"
        whole = shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]][0] == 0
        return type if whole else "Q8_0"

    return pick


def blocks_of(values: Array, type: str, seed: int = 0) -> tuple[Array, str]:
    """The values in a type's blocks, and the type: uint8 [..., bytes of a row], of plain types the values."""
    kind = gguf.GGMLQuantizationType[type]
    values = np.ascontiguousarray(values, np.float32)
    try:
        return gguf.quants.quantize(values, kind), type
    except NotImplementedError:
        return random_blocks(values.shape, type, float(values.std()), seed), type


D_AT = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ1_M": (), "NVFP4": (),
} | dict.fromkeys(("IQ4_NL", "IQ4_XS", "IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "Q1_0"), (0,))  # fmt: skip
"""Where a block has its float16 scales."""

LEVELS = {
    "Q2_K": 30, "Q3_K": 40, "Q4_K": 280, "Q5_K": 580, "Q6_K": 1200, "IQ4_NL": 70, "IQ4_XS": 1200, "IQ1_S": 8, "IQ1_M": 8,
    "IQ2_XXS": 60, "IQ2_XS": 60, "IQ2_S": 60, "IQ3_XXS": 160, "IQ3_S": 160, "Q1_0": 1,
    "NVFP4": 6,
}  # fmt: skip
"""The standard deviation of random blocks, in their scales."""


def random_blocks(shape: tuple[int, ...], type: str, deviation: float, seed: int = 0) -> Array:
    """Blocks whose every bit is random, but for the scales: the weights have about this standard deviation."""
    block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (*shape[:-1], shape[-1] // block, n_bytes), np.uint8)
    scale = deviation / LEVELS[type]
    for nth, at in enumerate(D_AT[type]):
        middle = 1.5 if type == "Q2_K" else 15.5 if type == "Q5_K" else 7.5  # least values centre the weights
        factors = generator.uniform(0.5, 1.0, data.shape[:-1]) * scale * (middle if nth else 1.0)
        data[..., at : at + 2] = factors.astype(np.float16)[..., None].view(np.uint8)
    if type == "NVFP4":  # half of what they say
        data[..., :4] = np.array(2 * scale, ml_dtypes.float8_e4m3fn).view(np.uint8)
    if type == "IQ1_M":  # four bits of it in each of the last four words
        words = data[..., -8:].view(np.uint16)
        words &= 0xFFF
        words |= np.uint16(np.float16(scale).view(np.uint16)) >> np.arange(0, 16, 4, dtype=np.uint16) << 12
    return data.reshape(*shape[:-1], -1)


def _write_metadata(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any], has_mtp: bool) -> None:
    n_layers, head = config["num_hidden_layers"], config["head_dim"]
    rope = config["rope_parameters"]
    writer.add_block_count(n_layers + has_mtp)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head * rope["partial_rotary_factor"]))
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config.get("full_attention_interval", 4))
    if has_mtp:
        writer.add_nextn_predict_layers(1)
    if arch == "qwen35":
        writer.add_feed_forward_length(config["intermediate_size"])
    else:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _write_flash_next(writer: gguf.GGUFWriter, source: Path, config: dict[str, Any], has_mtp: bool) -> None:
    """The metadata of streams, index and n-grams, by the converter's names, which the package has not yet."""
    ngrams = ModelShape.from_directory(source).ngrams
    assert ngrams is not None
    n_layers = config["num_hidden_layers"]
    numbers = {
        "hyper_connection.count": config["hc_count"],
        "hyper_connection.low_rank": config["hc_lowrank"],
        "attention.indexer.head_count": config["indexer_n_heads"],
        "attention.indexer.key_length": config["indexer_head_dim"],
        "attention.indexer.top_k": config["indexer_budget"],
        "ple.ngram_size": config["ngram_size"],
        "ple.heads_per_ngram": config["heads_per_ngram"],
        "ple.conv_kernel": config["ple_conv_kernel_size"],
        "ple.eos_token_id": ngrams.eos_id,
        "embedding_length_per_layer_input": ngrams.head_width,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"qwen4exp.{key}", value)
    ratio = config["indexer_compress_ratio"]
    lists = {
        "attention.compress_ratios": [ratio if i % 4 == 3 else 0 for i in range(n_layers)] + [0] * has_mtp,
        "ple.layers": [ngrams.layer],
    }
    for key, values in lists.items():
        writer.add_array(f"qwen4exp.{key}", values)
    integers = {
        "layer_multipliers": ngrams.multipliers,
        "head_vocab_sizes": ngrams.primes,
        "head_offsets": ngrams.offsets,
    }
    for key, exact in integers.items():
        kind = gguf.GGUFValueType
        writer.add_key_value(f"qwen4exp.ple.{key}", list(exact), kind.ARRAY, sub_type=kind.UINT64)


def _write_text(writer: gguf.GGUFWriter, source: Path, vocab_size: int, pre: str) -> None:
    said = json.loads((source / "tokenizer.json").read_text())
    texts = {id: (text, gguf.TokenType.NORMAL) for text, id in said["model"]["vocab"].items()}
    for token in said["added_tokens"]:
        kind = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
        texts[token["id"]] = (token["content"], kind)
    tokens = [texts.get(id, (f"[PAD{id}]", gguf.TokenType.UNUSED)) for id in range(vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_token_merges([" ".join(pair) for pair in said["model"]["merges"]])
    settings = json.loads((source / "tokenizer_config.json").read_text())
    ids = {text: id for id, (text, _) in enumerate(tokens)}
    writer.add_eos_token_id(ids[settings["eos_token"]])
    writer.add_pad_token_id(ids[settings["pad_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template((source / "chat_template.jinja").read_text())
