"""Tiny random checkpoints on disk, in every layout that the published ones come in.

    path = tiny_checkpoint("moe", experts="split", tied=True)

Head geometry is the real one (DeltaNet 128/128, attention head 256, 64 rotary dims) so that production
kernels can run them; widths, head, layer and expert counts are small: 5 to 10 million parameters. Made from
plain torch by names and shapes, without the published model code: that is only the oracle which
`test_reference.py` compares with. Checkpoints of one seed and kind hold equal values in every layout.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from deltic.models.qwen.shape import ModelShape
from deltic.text import PRE_TOKENIZERS
from tests.tiny_config import (
    ADDED_TOKENS,
    CONV_WIDTH,
    EOS_TOKEN_IDS,
    EXPERT_WIDTH,
    FFN,
    HEAD_DIM,
    HIDDEN,
    INDEX_DIM,
    INDEX_HEADS,
    K_DIM,
    N_EXPERTS,
    N_K_HEADS,
    N_KV_HEADS,
    N_Q_HEADS,
    N_STREAMS,
    N_TABLE_PARTS,
    NOT_SPECIAL,
    SHARED_WIDTH,
    STREAM_RANK,
    TOKEN_ID,
    V_DIM,
    VOCAB_SIZE,
    n_v_heads_of,
    tiny_config,
)
from tests.tiny_vision import random_tower

if TYPE_CHECKING:
    import pytest

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif -%}
{%- endif -%}
"""

PICTURE_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    """\
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == "image" -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == "video" -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
""",
)
TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 192,
    "num_heads": 3,
    "intermediate_size": 336,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 2304,
}


def set_sizes(patch: pytest.MonkeyPatch, sizes: dict[str, int]) -> None:
    """Has checkpoints that are made from now on in other sizes, by their names in tests/tiny_config.py."""
    for name, value in sizes.items():
        patch.setattr(f"tests.tiny.{name}", value)
        patch.setattr(f"tests.tiny_config.{name}", value)


@functools.cache
def tiny_checkpoint(
    kind: str,
    *,
    tied: bool = False,
    layout: str | None = None,
    experts: str | None = None,
    shards: int = 1,
    extras: bool = False,
    has_mtp: bool = False,
    has_tower: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    n_layers: int = 4,
    seed: int = 0,
) -> Path:
    """A checkpoint directory, made once a session.

    kind: "dense" | "moe" | "next" | "flash". layout: "wrapped" (multimodal names; default) | "flat" (always for
    next). experts: "fused" | "split" (default for next). extras: a few `model.visual.*` and `mtp.*` tensors
    as well. has_mtp: a draft head. has_tower: a vision tower, and a template that takes pictures. Every fourth layer is attention.
    """
    layout = "flat" if kind == "next" else layout or "wrapped"
    experts = experts or ("split" if kind == "next" else "fused")
    path = new_directory(kind)

    tensors = _random_values(_text_shapes(kind, n_layers, tied), seed)
    if experts == "split":
        tensors = _split_experts(tensors)
    prefix = "model.language_model." if layout == "wrapped" else "model."
    tensors = {(n if n == "lm_head.weight" else prefix + n): t for n, t in tensors.items()}
    if kind == "flash":
        tensors |= _ngram_table(prefix, tiny_config(kind, tied=tied, layout=layout, n_layers=n_layers), seed + 4)
    if has_mtp:
        head = _random_values(_draft_head_shapes(kind), seed + 2)
        tensors |= _split_experts(head) if experts == "split" else head
    if has_tower:
        tensors |= {f"model.visual.{name}": tensor for name, tensor in random_tower(TOWER, seed + 3).items()}
    if extras:
        tensors |= _random_values(_extra_shapes(), seed + 1)
    _write_tensors(path, {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}, shards)

    config = tiny_config(kind, tied=tied, layout=layout, n_layers=n_layers)
    if has_tower:
        config["vision_config"] |= TOWER
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"eos_token_id": list(EOS_TOKEN_IDS)})
    _write_json(path / "tokenizer_config.json", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    (path / "chat_template.jinja").write_text(PICTURE_TEMPLATE if has_tower else CHAT_TEMPLATE)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


def byte_tokenizer() -> Tokenizer:
    """Byte-level, without merges: 256 bytes, then the family's 33 added tokens."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.normalizer, tokenizer.decoder = normalizers.NFC(), decoders.ByteLevel()
    cut = pre_tokenizers.Split(Regex(PRE_TOKENIZERS[True]), "isolated")  # as the family does it
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.add_tokens([AddedToken(t, special=t not in NOT_SPECIAL, normalized=False) for t in ADDED_TOKENS])
    return tokenizer


def new_directory(name: str) -> Path:
    """An empty one, removed when the process ends."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_session_dir()))


@functools.cache
def _session_dir() -> str:
    path = tempfile.mkdtemp(prefix="deltic-tiny-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _text_shapes(kind: str, n_layers: int, tied: bool) -> dict[str, tuple[int, ...]]:
    """Stored names, without the prefix, and shapes; experts fused."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCAB_SIZE, HIDDEN)}
    shapes |= _norm_shapes(kind, "norm", "hyper_connection_mixer", injects=False)
    if not tied:
        shapes["lm_head.weight"] = (VOCAB_SIZE, HIDDEN)
    for i in range(n_layers):
        mixer = _attention_shapes(kind) if i % 4 == 3 else _gdn_shapes(kind)
        ngrams = _ngram_shapes() if kind == "flash" and i == 1 else {}
        for name, shape in {**mixer, **ngrams, **_feed_forward_shapes(kind), **_layer_norm_shapes(kind)}.items():
            shapes[f"layers.{i}.{name}"] = shape
    return shapes


def _gdn_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    n_v_heads = n_v_heads_of(kind)
    key, value = N_K_HEADS * K_DIM, n_v_heads * V_DIM
    if kind == "next":
        inputs = {"qkvz": (2 * key + 2 * value, HIDDEN), "ba": (2 * n_v_heads, HIDDEN)}
    else:
        inputs = {
            "qkv": (2 * key + value, HIDDEN),
            "z": (value, HIDDEN),
            "b": (n_v_heads, HIDDEN),
            "a": (n_v_heads, HIDDEN),
        }
    return {f"linear_attn.in_proj_{part}.weight": shape for part, shape in inputs.items()} | {
        "linear_attn.conv1d.weight": (2 * key + value, 1, CONV_WIDTH),
        "linear_attn.A_log": (n_v_heads,),
        "linear_attn.dt_bias": (n_v_heads,),
        "linear_attn.norm.weight": (V_DIM,),
        "linear_attn.out_proj.weight": (HIDDEN, value),
    }


def _layer_norm_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    first = _norm_shapes(kind, "input_layernorm", "attn_hyper_connection")
    return first | _norm_shapes(kind, "post_attention_layernorm", "mlp_hyper_connection")


def _norm_shapes(kind: str, norm: str, connection: str, injects: bool = True) -> dict[str, tuple[int, ...]]:
    """A norm, or the hyper-connection that stands in its place."""
    if kind != "flash":
        return {f"{norm}.weight": (HIDDEN,)}
    width = N_STREAMS * HIDDEN
    inject = {f"{connection}.block_inject_weight.weight": (N_STREAMS, width)} if injects else {}
    return inject | {
        f"{connection}.hc_norm.weight": (width,),
        f"{connection}.input_mix_weight_down.weight": (STREAM_RANK, width),
        f"{connection}.input_mix_weight_up.weight": (width, STREAM_RANK),
    }


def _ngram_shapes() -> dict[str, tuple[int, ...]]:
    """The n-gram embedding without its table."""
    width = N_STREAMS * HIDDEN
    norms = {f"ple.norm_{part}.weight": (width,) for part in ("key", "query", "conv")}
    projections = {"ple.key_proj.weight": (width, HIDDEN), "ple.value_proj.weight": (HIDDEN, HIDDEN)}
    return norms | projections | {"ple.conv1d.weight": (width, 1, 4)}


def _ngram_table(prefix: str, config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """The table of n-grams in its parts, and the integers of the hash."""
    ngrams, p = ModelShape.from_config(config).ngrams, f"{prefix}layers.1.ple.ple_embedding."
    assert ngrams is not None
    part: tuple[int, ...] = (ngrams.n_rows // N_TABLE_PARTS, ngrams.head_width)
    shapes = {f"{p}ngram_embedding.shard_{i}.weight": part for i in range(N_TABLE_PARTS)}
    integers = (
        ("layer_multipliers", ngrams.multipliers),
        ("ngram_heads_vocab_sizes", ngrams.primes),
        ("ngram_heads_offsets", ngrams.offsets),
    )
    return _random_values(shapes, seed) | {f"{p}{name}": torch.tensor(values) for name, values in integers}


def _attention_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    index = {
        "self_attn.indexer.index_qk_proj.weight": ((INDEX_HEADS + 1) * INDEX_DIM, HIDDEN),
        "self_attn.indexer.q_layernorm.weight": (INDEX_DIM,),
        "self_attn.indexer.k_layernorm.weight": (INDEX_DIM,),
    }
    return {
        "self_attn.q_proj.weight": (2 * N_Q_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (N_KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (N_KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, N_Q_HEADS * HEAD_DIM),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
    } | (index if kind == "flash" else {})


def _feed_forward_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    def swiglu(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{prefix}gate_proj.weight": (width, HIDDEN),
            f"{prefix}up_proj.weight": (width, HIDDEN),
            f"{prefix}down_proj.weight": (HIDDEN, width),
        }

    if kind == "dense":
        return swiglu("mlp.", FFN)
    return {
        "mlp.gate.weight": (N_EXPERTS, HIDDEN),
        "mlp.shared_expert_gate.weight": (1, HIDDEN),
        "mlp.experts.gate_up_proj": (N_EXPERTS, 2 * EXPERT_WIDTH, HIDDEN),
        "mlp.experts.down_proj": (N_EXPERTS, HIDDEN, EXPERT_WIDTH),
        **swiglu("mlp.shared_expert.", SHARED_WIDTH),
    }


def _extra_shapes() -> dict[str, tuple[int, ...]]:
    """Enough of a vision tower and of a draft head to be recognised and skipped."""
    return {
        "model.visual.patch_embed.proj.weight": (144, 3, 2, 16, 16),
        "model.visual.patch_embed.proj.bias": (144,),
        "model.visual.blocks.0.attn.qkv.weight": (432, 144),
        "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
        "mtp.layers.0.self_attn.k_proj.weight": (N_KV_HEADS * HEAD_DIM, HIDDEN),
    }


def _draft_head_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """An attention layer, and what joins it to the trunk."""
    n_streams, joint = (N_STREAMS, ("fc_embedding", "fc_hidden")) if kind == "flash" else (1, ("fc",))
    layer = {**_layer_norm_shapes(kind), **_attention_shapes(kind), **_feed_forward_shapes(kind)}
    head = {
        **{f"{name}.weight": (HIDDEN, 2 * HIDDEN // len(joint)) for name in joint},
        **_norm_shapes(kind, "norm", "hyper_connection_mixer", injects=False),
        "pre_fc_norm_embedding.weight": (HIDDEN,),
        "pre_fc_norm_hidden.weight": (n_streams * HIDDEN,),
        **{f"layers.0.{name}": shape for name, shape in layer.items()},
    }
    return {f"mtp.{name}": shape for name, shape in head.items()}


def _random_values(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Nothing at its trivial initial value: norms off their rest, long and short memories, spread routing."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        if name.endswith("A_log"):
            value = torch.empty(shape).uniform_(0.5, 4.0, generator=generator).log()
        elif name.endswith("dt_bias"):  # inverse softplus of a log-uniform step
            step = torch.empty(shape).uniform_(math.log(1e-3), math.log(0.3), generator=generator).exp()
            value = step + torch.log(-torch.expm1(-step))
        elif name.endswith("linear_attn.norm.weight"):
            value = 1 + 0.1 * value  # the one plain norm
        elif len(shape) == 1 or name == "embed_tokens.weight":
            value = 0.1 * value  # small embeddings: the layers, not the last token, decide the logits
        elif name.endswith("conv1d.weight"):
            value = 0.5 * value
        else:
            value = value / math.sqrt(shape[-1])
        values[name] = value.to(torch.bfloat16)
    return values


def _split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    split = {}
    for name, tensor in tensors.items():
        base, _, last = name.rpartition("experts.")
        if last == "gate_up_proj":
            for e, both in enumerate(tensor):
                split[f"{base}experts.{e}.gate_proj.weight"] = both[:EXPERT_WIDTH]
                split[f"{base}experts.{e}.up_proj.weight"] = both[EXPERT_WIDTH:]
        elif last == "down_proj":
            split |= {f"{base}experts.{e}.down_proj.weight": down for e, down in enumerate(tensor)}
        else:
            split[name] = tensor
    return split


def _write_tensors(path: Path, tensors: dict[str, Tensor], shards: int) -> None:
    tensors = {n: t.clone() for n, t in tensors.items()}
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: tensors[n] for n in sorted(tensors)[i::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(path / "model.safetensors.index.json", index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))


@functools.cache
def tiny_embedder(
    kind: str = "dense", mode: str = "lasttoken", *, normalises: bool = True, is_bare: bool = True
) -> Path:
    """A tiny checkpoint with the files of sentence-transformers, whose tokenizer puts <|endoftext|> behind a text.

    is_bare: as a model without a head is saved, whose names have no beginning.
    """
    source = tiny_checkpoint(kind, layout="flat")
    path = new_directory("embedder")
    shutil.copytree(source, path, dirs_exist_ok=True)
    if is_bare:
        tensors = load_file(path / "model.safetensors")
        del tensors["lm_head.weight"]
        _write_tensors(path, {name.removeprefix("model."): tensor for name, tensor in tensors.items()}, 1)
        config = json.loads((path / "config.json").read_text())
        config["architectures"] = [
            config["architectures"][0].replace("ForCausalLM", "Model" if kind == "next" else "TextModel")
        ]
        _write_json(path / "config.json", config)
    tokenizer, end = byte_tokenizer(), "<|endoftext|>"
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, TOKEN_ID[end])])
    tokenizer.save(str(path / "tokenizer.json"))
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalises else [])]
    folders = ["", *(f"{i}_{name}" for i, name in enumerate(modules) if i)]
    for i, folder in enumerate(folders):
        (path / folder).mkdir(exist_ok=True)
        modules[i] = {"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.models.{modules[i]}"}  # type: ignore[call-overload]
    _write_json(path / "modules.json", modules)  # type: ignore[arg-type]
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    _write_json(
        path / "1_Pooling" / "config.json", {"word_embedding_dimension": HIDDEN, "include_prompt": True} | modes
    )
    prompts = {"query": "Instruct: find what answers\nQuery:", "document": ""}
    _write_json(path / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    _write_json(path / "sentence_bert_config.json", {"max_seq_length": 512, "do_lower_case": False})
    return path
