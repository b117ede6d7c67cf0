"""Translates a GGUF file's metadata into the JSON files of a checkpoint directory.

So a GGUF file is read wherever a directory is: `document(file, "config.json")`, likewise
generation_config.json, tokenizer_config.json and tokenizer.json. The names are those of Hugging Face; what
is not supported is refused by the key that the metadata has.

Source: llama.cpp's converter of the family and its readers (qwen35.cpp, qwen35moe.cpp, qwen3next.cpp,
llama-vocab.cpp); of towers its Qwen3VLVisionModel, and clip.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deltic.models.fields import MAX_LAYERS, CheckpointError, OtherModelError, UnsupportedModelError, read_json
from deltic.models.gguf import Gguf, is_gguf, open_gguf
from deltic.models.vision.shape import LAYER_NORM_EPS, MERGE, PATCH_SIZE

ARCHITECTURES = {
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "qwen4exp": "Qwen4ExpForCausalLM",
}
"""Hugging Face's, by ggml's."""

_SIZES = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_DENSE_SIZES = {"intermediate_size": "feed_forward_length"}
_EXPERT_SIZES = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_FLASH_SIZES = {
    "hc_count": "hyper_connection.count",
    "hc_lowrank": "hyper_connection.low_rank",
    "indexer_n_heads": "attention.indexer.head_count",
    "indexer_head_dim": "attention.indexer.key_length",
    "indexer_budget": "attention.indexer.top_k",
    "ngram_size": "ple.ngram_size",
    "heads_per_ngram": "ple.heads_per_ngram",
    "ple_conv_kernel_size": "ple.conv_kernel",
}
_HASH = {
    "multipliers": "ple.layer_multipliers",
    "primes": "ple.head_vocab_sizes",
    "offsets": "ple.head_offsets",
    "eos_id": "ple.eos_token_id",
}
_TOWER_SIZES = {
    "depth": "block_count",
    "hidden_size": "embedding_length",
    "num_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "out_hidden_size": "projection_dim",
}
"""Integers: the names of config.json, and what follows the architecture in the metadata."""

_YARN = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
"""Fields of scaled positions: the same."""

_KEYS = _SIZES | _DENSE_SIZES | _EXPERT_SIZES | _FLASH_SIZES | _YARN | {
    "indexer_compress_ratio": "attention.compress_ratios",
    "ple_layer_ids": "ple.layers",
    "ple_embed_dim": "embedding_length_per_layer_input",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "num_hidden_layers": "block_count",
    "full_attention_interval": "full_attention_interval",
    "layer_types": "attention.recurrent_layers",
    "linear_value_head_dim": "ssm.inner_size",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "partial_rotary_factor": "rope.dimension_count",
    "mrope_section": "rope.dimension_sections",
}  # fmt: skip
"""Fields that a refusal may name."""

_TOWER = {
    "general.architecture": "clip",
    "clip.projector_type": "qwen3vl_merger",
    "clip.use_gelu": True,
    "clip.vision.attention.layer_norm_epsilon": LAYER_NORM_EPS,
    "clip.vision.patch_size": PATCH_SIZE,
    "clip.vision.spatial_merge_size": MERGE,
}
"""Values in the file of a vision tower that is run."""

_CHANGES = (
    *("attention.sliding_window", "attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias"),
    *("attn_logit_softcapping", "final_logit_softcapping", "use_parallel_residual"),
)
"""Keys that other architectures have, and that would change the mathematics."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Kinds of tokens."""

_ENDS = ("<|im_end|>", "<|endoftext|>")
"""Control tokens that end an answer, whatever the metadata says of them: its one end id is that of a turn."""

_SAMPLING = {
    "temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip

_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?%s+|\p{N}| ?[^\s%s\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {"qwen2": _PATTERN % (r"\p{L}", r"\p{L}"), "qwen35": _PATTERN % (r"[\p{L}\p{M}]", r"\p{L}\p{M}")}
"""Patterns that cut text before BPE, by ggml's name. Qwen3.5 and later count combining marks as letters."""


def document(file: Path, name: str) -> dict[str, Any]:
    """Returns what the JSON file of this name would hold, {} for one that a GGUF file has not. Raises
    CheckpointError, UnsupportedModelError.
    """
    made = {
        "config.json": config,
        "generation_config.json": generation_config,
        "tokenizer_config.json": tokenizer_config,
        "tokenizer.json": tokenizer,
    }.get(name)
    with naming(file):
        return {} if made is None else made(open_gguf(file))


def read_settings(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint, {} where there is no such file; of a GGUF file in the place
    of the directory what its metadata says. Raises CheckpointError, UnsupportedModelError.
    """
    if is_gguf(path.parent):
        return document(path.parent, path.name)
    return read_json(path) if path.exists() else {}


@contextmanager
def naming(path: Path | None, part: str = "") -> Iterator[None]:
    """Has a refused field named with the file that says it, a directory's config.json or a GGUF file; in that
    by the key that its metadata has. part: how the field's name begins, of a part of config.json.
    """
    try:
        yield
    except UnsupportedModelError as error:
        if path is None or error.file or type(error) is not UnsupportedModelError:
            raise
        field, supported, file = part + error.field.removeprefix(part), error.supported, path
        if is_gguf(path):
            field, supported = (in_metadata(text, path, part) for text in (field.removeprefix(part), supported))
        else:
            file = (path if path.is_dir() else path.parent) / "config.json"
        raise UnsupportedModelError(field, error.found, supported, str(file)) from None


def in_metadata(text: str, path: Path, part: str = "") -> str:
    """A text with fields of config.json by the keys that the metadata of a GGUF file has for them."""
    start, known = ("clip.vision", _TOWER_SIZES) if part else (open_gguf(path).get("general.architecture"), _KEYS)

    def key(word: re.Match[str]) -> str:
        found = known.get(word[0])
        return word[0] if found is None else found if found.startswith("tokenizer.") else f"{start}.{found}"

    return re.sub(r"[a-z_]+", key, text)


def architecture(model: Gguf) -> str:
    """ggml's name. Raises UnsupportedModelError."""
    arch = model.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise OtherModelError("general.architecture", arch, ", ".join(ARCHITECTURES))
    return arch


def n_trunk_layers(model: Gguf) -> int:
    """Layers without those of the MTP head, which come behind them."""
    fields = _Fields(model)
    return fields.number("block_count") - fields.number("nextn_predict_layers", 0)


def tiled_value_heads(model: Gguf) -> bool:
    """Returns whether value heads are stored tiled (head p belongs to key head p % Hk), not
    grouped (p // r).
    """
    fields = _Fields(model)
    return architecture(model) != "qwen3next" and fields.number("ssm.time_step_rank") > fields.number("ssm.group_count")


class _Fields:
    """The keys of a model's architecture, or those that begin otherwise."""

    def __init__(self, model: Gguf, arch: str | None = None) -> None:
        self.model, self.arch = model, arch or architecture(model)

    def get(self, key: str, default: object = None) -> Any:
        return self.model.get(f"{self.arch}.{key}", default)

    def number(self, key: str, default: int | None = None) -> int:
        """An integer; of one a layer the only one that is not 0."""
        value = self.get(key, default)
        if isinstance(value, list):
            given = {x for x in value if x != 0}
            value = given.pop() if len(given) == 1 else value
        if isinstance(value, bool) or not isinstance(value, int):
            said = "has no" if value is None else f"says {value!r} for"
            raise CheckpointError(f"{self.model.file}: the metadata {said} {self.arch}.{key}; an integer is needed")
        return value

    def only(self, key: str, *allowed: object) -> None:
        """Refuses another value of a key that may be absent."""
        value = self.get(key)
        if value is not None and value not in allowed:
            raise UnsupportedModelError(f"{self.arch}.{key}", value, " or ".join(map(repr, allowed)))


def config(model: Gguf) -> dict[str, object]:
    """config.json, flat, with `tiled_value_heads` besides."""
    fields = _Fields(model)
    for key, allowed in {
        "expert_gating_func": (1,),  # softmax
        "expert_weights_norm": (True,),
        "expert_weights_scale": (0.0, 1.0),
        "expert_group_count": (0, 1),
        "expert_shared_count": (0, 1),
        "leading_dense_block_count": (0,),
        "interleave_moe_layer_step": (0, 1),
        "attention.causal": (True,),
        "rope.scale_linear": (1.0,),
        **{key: (0, 0.0) for key in _CHANGES},
        **{key: (1, 1.0) for key in ("logit_scale", "residual_scale", "embedding_scale")},
    }.items():
        fields.only(key, *allowed)
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{model.file}: has no tensor 'token_embd.weight'; is it a whole model?")
    fields.only("vocab_size", embedding.shape[0])
    key, value = (fields.get(f"attention.{name}_length") for name in ("key", "value"))
    if value not in (None, key):
        said = f"{key}, as {fields.arch}.attention.key_length"
        raise UnsupportedModelError(f"{fields.arch}.attention.value_length", value, said)
    if (kind := model.get("general.type")) not in (None, "model"):
        raise UnsupportedModelError("general.type", kind, "model")
    if (version := model.get("general.quantization_version")) not in (None, 2):
        raise UnsupportedModelError("general.quantization_version", version, "2")
    n_value_heads, inner = fields.number("ssm.time_step_rank"), fields.number("ssm.inner_size")
    if n_value_heads < 1 or inner % n_value_heads:
        raise CheckpointError(
            f"{model.file}: {fields.arch}.ssm.inner_size is {inner}, no multiple of ssm.time_step_rank, {n_value_heads}"
        )
    sizes = _SIZES | (_DENSE_SIZES if fields.arch == "qwen35" else _EXPERT_SIZES)
    flash = _flash_next(fields) if fields.arch == "qwen4exp" else {}
    return {
        "architectures": [ARCHITECTURES[fields.arch]],
        "vocab_size": embedding.shape[0],
        **{name: fields.number(key) for name, key in sizes.items()},
        "rms_norm_eps": fields.get("attention.layer_norm_rms_epsilon"),
        "linear_value_head_dim": inner // n_value_heads,
        "tiled_value_heads": tiled_value_heads(model),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "eos_token_id": _end_ids(model),
        "rope_parameters": _rope(fields),
        **_layers(fields),
        **flash,
    }


def _flash_next(fields: _Fields) -> dict[str, object]:
    """Returns the fields of streams, index and n-grams, whose integers are `ngram_hash` here."""
    table = fields.model.tensors.get("per_layer_token_embd.weight")
    if table is None:
        raise CheckpointError(
            f"{fields.model.file}: has no tensor 'per_layer_token_embd.weight', the table of n-grams; give a file that has it"
        )
    sizes = {name: fields.number(key) for name, key in _FLASH_SIZES.items()}
    n_heads = (sizes["ngram_size"] - 1) * sizes["heads_per_ngram"]
    layers = fields.get("ple.layers")
    return sizes | {
        "output_gate_type": "sigmoid",
        "indexer_kv_heads": 1,
        "indexer_compress_ratio": fields.number("attention.compress_ratios"),
        "ple_layer_ids": [layer + 1 for layer in layers if isinstance(layer, int)]
        if isinstance(layers, list)
        else layers,
        "ple_embed_dim": fields.number("embedding_length_per_layer_input") * n_heads,
        "ngram_hash": {name: fields.get(key) for name, key in _HASH.items()} | {"n_rows": table.shape[0]},
    }


def _layers(fields: _Fields) -> dict[str, object]:
    """Returns the fields that say how many layers there are, and which are recurrent."""
    n_layers, recurrent = n_trunk_layers(fields.model), fields.get("attention.recurrent_layers")
    if not 1 <= n_layers <= MAX_LAYERS:
        raise UnsupportedModelError(
            f"{fields.arch}.block_count", fields.get("block_count"), f"1 to {MAX_LAYERS} layers"
        )
    if recurrent is None:
        return {"num_hidden_layers": n_layers, "full_attention_interval": fields.number("full_attention_interval", 4)}
    if not isinstance(recurrent, list) or len(recurrent) < n_layers:
        raise CheckpointError(
            f"{fields.model.file}: {fields.arch}.attention.recurrent_layers says {recurrent!r}, not a value for each of "
            f"{n_layers} layers"
        )
    types = ["linear_attention" if is_recurrent else "full_attention" for is_recurrent in recurrent[:n_layers]]
    return {"num_hidden_layers": n_layers, "layer_types": types}


def _rope(fields: _Fields) -> dict[str, object]:
    """rope_parameters."""
    rotary, head = fields.number("rope.dimension_count"), fields.number("attention.key_length")
    if not 0 < rotary <= head:
        raise UnsupportedModelError(f"{fields.arch}.rope.dimension_count", rotary, f"1 to {head}, a head's size")
    rope: dict[str, object] = {
        "rope_type": "default",
        "rope_theta": fields.get("rope.freq_base"),
        "partial_rotary_factor": rotary / head,
    }
    sections = fields.get("rope.dimension_sections")
    if sections is not None and fields.arch != "qwen3next":
        if not isinstance(sections, list) or any(sections[3:]):
            raise UnsupportedModelError(f"{fields.arch}.rope.dimension_sections", sections, "three sizes, and 0")
        rope |= {"mrope_section": sections[:3], "mrope_interleaved": True}
    fields.only("rope.scaling.type", "none", "yarn")
    if fields.get("rope.scaling.type") == "yarn":
        for key, allowed in {"yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}.items():
            fields.only(f"rope.scaling.{key}", allowed)
        rope |= {"rope_type": "yarn"} | {name: fields.get(key) for name, key in _YARN.items()}
        if rope["attention_factor"] is None:  # of older files
            rope["attention_factor"] = fields.get("rope.scaling.attn_factor")
    return rope


def vision_config(model: Gguf) -> dict[str, int]:
    """The vision_config of config.json, of a tower's file (`gguf.tower_beside`).

    Raises CheckpointError for another model's tower, or one that is not whole.
    """
    for key, expected in _TOWER.items():
        if (found := model.get(key)) != expected:
            raise CheckpointError(
                f"{model.file}: {key} is {found!r}, expected {expected!r}: not a vision tower of Qwen3.5 or later; get the "
                "mmproj file that belongs to the model"
            )
    deepstack = model.get("clip.vision.is_deepstack_layers", False)
    if any(deepstack) if isinstance(deepstack, list) else deepstack:
        raise CheckpointError(
            f"{model.file}: has deepstack layers (clip.vision.is_deepstack_layers), as Qwen3-VL, which is not supported; "
            "use a model of Qwen3.5 or later, and its mmproj file"
        )
    positions = model.tensors.get("v.position_embd.weight")
    if positions is None:
        raise CheckpointError(f"{model.file}: has no tensor 'v.position_embd.weight'; is it a whole tower?")
    fields = _Fields(model, "clip.vision")
    sizes = {name: fields.number(key) for name, key in _TOWER_SIZES.items()}
    return sizes | {"num_position_embeddings": positions.shape[0]}


def _end_ids(model: Gguf) -> list[int]:
    """Ids that end an answer: of the metadata, then of control tokens by their text."""
    ids = [model.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = _tokens(model)
    ids += [tokens.index(text) for text in _ENDS if text in tokens and kinds[tokens.index(text)] == _CONTROL]
    return [id for i, id in enumerate(ids) if id is not None and id not in ids[:i]]


def generation_config(model: Gguf) -> dict[str, object]:
    """generation_config.json."""
    sampling = {name: model.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {"eos_token_id": _end_ids(model)} | {name: value for name, value in sampling.items() if value is not None}


def tokenizer_config(model: Gguf) -> dict[str, object]:
    """tokenizer_config.json: the special tokens that templates name, and the chat templates."""
    tokens, _ = _tokens(model)
    said: dict[str, object] = {}
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        token = model.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int) and 0 <= token < len(tokens):
            said[f"{name}_token"] = tokens[token]
    named = {"default": model.get("tokenizer.chat_template")}
    for name in _texts(model, "tokenizer.chat_templates"):
        named[name] = model.get(f"tokenizer.chat_template.{name}")
    templates = {name: source for name, source in named.items() if isinstance(source, str)}
    if templates:
        is_one = [*templates] == ["default"]
        listed = [{"name": name, "template": source} for name, source in templates.items()]
        said["chat_template"] = templates["default"] if is_one else listed
    return said


def _texts(model: Gguf, key: str) -> list[str]:
    """A list of strings, [] where there is none. Raises CheckpointError for anything else."""
    found = model.get(key, [])
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found[:1]):
        raise CheckpointError(f"{model.file}: the metadata has no texts for {key}")
    return found


def _kinds(model: Gguf) -> list[int]:
    """The kind of every id. Raises CheckpointError."""
    kinds, texts = model.get("tokenizer.ggml.token_type"), model.headers[0].values.get("tokenizer.ggml.tokens")
    if not kinds or not isinstance(kinds, list) or texts is None or texts.n != len(kinds):
        raise CheckpointError(
            f"{model.file}: the metadata has no vocabulary (tokenizer.ggml.tokens, and as many tokenizer.ggml.token_type); "
            "give another file"
        )
    return kinds


def _tokens(model: Gguf) -> tuple[list[str], list[int]]:
    """The text of every id, and its kind. Raises CheckpointError."""
    return _texts(model, "tokenizer.ggml.tokens"), _kinds(model)


def highest_id(model: Gguf) -> int:
    """Returns the highest of the ids that `tokenizer` has, without reading their texts. -1: there is none.
    Raises CheckpointError.
    """
    known = (_CONTROL, _USER_DEFINED, _NORMAL, _UNKNOWN, _BYTE)
    return max((i for i, kind in enumerate(_kinds(model)) if kind in known), default=-1)


def tokenizer(model: Gguf) -> dict[str, object]:
    """tokenizer.json: byte-level BPE, as the family's."""
    for key, allowed in {"model": ("gpt2",), "pre": tuple(PATTERNS)}.items():
        found = model.get(f"tokenizer.ggml.{key}")
        if found not in allowed:
            raise UnsupportedModelError(f"tokenizer.ggml.{key}", found, " or ".join(allowed))
    tokens, kinds = _tokens(model)
    added = [i for i, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)]
    vocabulary = {tokens[i]: i for i, kind in enumerate(kinds) if kind in (_NORMAL, _UNKNOWN, _BYTE)}
    merges = _texts(model, "tokenizer.ggml.merges")
    if wrong := next((merge for merge in merges if merge.count(" ") != 1), None):
        raise CheckpointError(f"{model.file}: tokenizer.ggml.merges has {wrong!r}, which is not two tokens")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {
        "type": "Split",
        "pattern": {"Regex": PATTERNS[model.get("tokenizer.ggml.pre")]},
        "behavior": "Isolated",
        "invert": False,
    }
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **plain, "special": kinds[i] == _CONTROL} for i in added],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
