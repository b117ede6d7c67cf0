"""The tensors of a GGUF file under the names, and with the values, of the bfloat16 Hugging Face checkpoint.

What llama.cpp's converter does to weights is undone where it is exact: norms are stored as 1 + w, A_log as
-exp(A_log), experts as one tensor, the convolution without its middle dimension. Value heads stay in the
order of the file (`gguf_config.tiled_value_heads`), and what Next interleaves by key head is as the file
has it: in_proj_qkv and in_proj_z apart, in_proj_ba interleaved. Of a vision tower only the patch embedding
is changed: a tensor for each of a patch's two frames.

NVFP4 may have a tensor `X.scale` beside `X.weight`, float32 [1] or of each expert, by which its weights are
multiplied, and `X.input_scale`, which is not used: rows are rounded by groups of their own.

Source: llama.cpp's converter of the family (of towers: its Qwen3VLVisionModel). Blocks are in
models/gguf_blocks.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from deltic.models.fields import CheckpointError
from deltic.models.gguf import PLAIN, QUANTISED, Gguf, GgufTensor
from deltic.models.gguf_blocks import decoded
from deltic.models.gguf_config import n_trunk_layers, vision_config
from deltic.models.mapped import Header, MappedFiles
from deltic.models.stored import Derived, StoredTensor
from deltic.ops.arrays import Array
from deltic.ops.formats import WEIGHT_FORMATS, Quantised, WeightFormat

MAX_EXPERTS = 4096
"""Limit of experts. No model comes near it. Each expert becomes three tensors."""

_MIXES = {
    "norm": "hc_norm",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "inject": "block_inject_weight",
}
"""Names of a hyper-connection's tensors, behind `hc_attn_`."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"} | {
    f"output_hc_{part}": f"model.hyper_connection_mixer.{name}" for part, name in _MIXES.items()
}

_LAYER = (
    {
        "attn_norm.weight": "input_layernorm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "attn_q.weight": "self_attn.q_proj.weight",
        "attn_k.weight": "self_attn.k_proj.weight",
        "attn_v.weight": "self_attn.v_proj.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
        "attn_q_norm.weight": "self_attn.q_norm.weight",
        "attn_k_norm.weight": "self_attn.k_norm.weight",
        "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
        "attn_gate.weight": "linear_attn.in_proj_z.weight",
        "ssm_in.weight": "linear_attn.in_proj_qkvz.weight",  # of older files of Next
        "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
        "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
        "ssm_beta.weight": "linear_attn.in_proj_b.weight",
        "ssm_conv1d.weight": "linear_attn.conv1d.weight",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_norm.weight": "linear_attn.norm.weight",
        "ssm_out.weight": "linear_attn.out_proj.weight",
        "ffn_gate_inp.weight": "mlp.gate.weight",
        "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
        "ple_key.weight": "ple.key_proj.weight",
        "ple_value.weight": "ple.value_proj.weight",
        "ple_norm_key.weight": "ple.norm_key.weight",
        "ple_norm_query.weight": "ple.norm_query.weight",
        "ple_norm_conv.weight": "ple.norm_conv.weight",
        "ple_conv1d.weight": "ple.conv1d.weight",
        "indexer.q_proj.weight": "self_attn.indexer.q_proj.weight",
        "indexer.k_proj.weight": "self_attn.indexer.k_proj.weight",
        "indexer.q_norm.weight": "self_attn.indexer.q_layernorm.weight",
        "indexer.k_norm.weight": "self_attn.indexer.k_layernorm.weight",
    }
    | {
        f"hc_{block}_{part}.weight": f"{name}_hyper_connection.{of}.weight"
        for block, name in (("attn", "attn"), ("ffn", "mlp"))
        for part, of in _MIXES.items()
    }
    | {
        f"ffn_{part}{shared}.weight": f"mlp.{'shared_expert.' if shared else ''}{part}_proj.weight"
        for part in ("gate", "up", "down")
        for shared in ("", "_shexp")
    }
)
"""Names of a layer's tensors, behind `blk.3.` and `model.layers.3.`."""

_NEXTN = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head_norm": "norm",
    "embed_tokens": "embed_tokens",
    "shared_head_head": "shared_head",
} | {f"hc_head_{part}": f"hyper_connection_mixer.{name}" for part, name in _MIXES.items()}
"""Names of the MTP head's tensors, behind `blk.40.nextn.` and `mtp.`."""

_EXPERTS = {"gate": ("gate",), "up": ("up",), "down": ("down",), "gate_up": ("gate", "up")}
"""Matrices in the rows of an expert, in equal parts, by the middle of `ffn_gate_exps`."""

_TOWER = {
    "v.patch_embd": "patch_embed.proj",
    "v.position_embd": "pos_embed",
    "v.post_ln": "merger.norm",
    "mm.0": "merger.linear_fc1",
    "mm.2": "merger.linear_fc2",
}
"""Names of a vision tower's tensors, without `.weight` or `.bias`; behind `model.visual.`."""

_TOWER_BLOCK = {
    "ln1": "norm1",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ln2": "norm2",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
}
"""Names of a vision block's tensors, behind `v.blk.3.` and `blocks.3.`."""

_TOWER_NAME = re.compile(r"(?:v\.blk\.(0|[1-9]\d{0,4})\.)?(.+)\.(weight|bias)")

_PATCHES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""A tower's patch embedding of the first frame, and of the second."""

_BLOCK = re.compile(r"blk\.(\d{1,5})\.(.+)")


def stored_tensors(model: Gguf, unused: tuple[str, ...] = ()) -> dict[str, StoredTensor]:
    """Returns the tensors by their names in the bfloat16 checkpoint, in the flat layout: `model.`,
    `lm_head.`, `mtp.`.

    A tensor that no such checkpoint has keeps its name. unused: how the names begin of those that may be of
    any type. Raises CheckpointError for types that are not read, and for shapes that no such checkpoint has.
    """
    files, n_layers = MappedFiles(), n_trunk_layers(model)
    found: dict[str, StoredTensor] = {}
    nvfp4 = {name.removesuffix("weight") for name, tensor in model.tensors.items() if tensor.type == "NVFP4"}
    for tensor in model.tensors.values():
        base, dot, last = tensor.name.rpartition(".")
        if last in ("scale", "input_scale") and base + dot in nvfp4:
            continue
        scale = model.tensors.get(f"{base}.scale") if tensor.type == "NVFP4" else None
        whole = Rows(tensor, files, tensor.shape, factors=None if scale is None else _factors(scale, tensor, files))
        for name, stored in _renamed(whole, n_layers):
            if not name.startswith(unused):
                _check_type(tensor)
            if name in found:
                raise CheckpointError(f"{tensor.where} is stored twice: also as {found[name].where}")
            found[name] = stored
    return found


def _check_type(tensor: GgufTensor) -> None:
    if tensor.type not in PLAIN + QUANTISED:
        raise CheckpointError(
            f"{tensor.where} is quantised as {tensor.type}, which is not supported; supported: "
            f"{', '.join(PLAIN + QUANTISED)}"
        )


def _factors(scale: GgufTensor, tensor: GgufTensor, files: MappedFiles) -> Array:
    """float32 [1 or experts]: what the weights of a tensor are multiplied by. Raises CheckpointError."""
    if scale.type != "F32" or scale.shape not in ((1,), tensor.shape[:-2]):
        raise CheckpointError(
            f"{scale.where} is {scale.type} {list(scale.shape)}; expected F32 [1], or one for each expert of "
            f"{tensor.name!r}; get the file anew"
        )
    factors = files.read(Header(scale.file, scale.shape, "F32", scale.begin, scale.end))
    if not np.isfinite(factors).all() or (factors <= 0).any():
        raise CheckpointError(f"{scale.where} has scales that are not finite, or not above 0; get the file anew")
    return factors


def tower_tensors(model: Gguf) -> dict[str, StoredTensor]:
    """The tensors of a vision tower's file by the names of the bfloat16 checkpoint, behind `model.visual.`.

    Raises CheckpointError for another file, for tensors that no such tower has, and types that are not read.
    """
    vision_config(model)
    files, (first, second) = MappedFiles(), (model.tensors.get(name) for name in _PATCHES)
    kinds = {(one.type, one.shape) for one in (first, second) if one is not None}
    if first is None or second is None or len(kinds) > 1 or first.type not in PLAIN or len(first.shape) != 4:
        raise CheckpointError(
            f"{model.file}: expected tensors {' and '.join(map(repr, _PATCHES))}, of one shape of four sizes, both in one of "
            f"{', '.join(PLAIN)}; get the file anew, or convert it anew with a current llama.cpp"
        )
    patches = Frames(Rows(first, files, first.shape), Rows(second, files, second.shape))
    found: dict[str, StoredTensor] = {}
    for tensor in model.tensors.values():
        _check_type(tensor)
        match = _TOWER_NAME.fullmatch(tensor.name)
        known = None if match is None else (_TOWER_BLOCK if match[1] else _TOWER).get(match[2])
        if match is not None and known is not None:
            name = f"blocks.{match[1]}.{known}.{match[3]}" if match[1] else f"{known}.{match[3]}"
            found[name] = patches if tensor is first else Rows(tensor, files, tensor.shape)
        elif tensor is not second:
            raise CheckpointError(
                f"{tensor.where} is not of a vision tower of Qwen3.5 or later; get the mmproj file that belongs to the model"
            )
    return found


@dataclass(frozen=True)
class Rows:
    """A StoredTensor: a range of a GGUF tensor's rows, as the tensor of this shape."""

    tensor: GgufTensor
    files: MappedFiles
    shape: tuple[int, ...]
    first: int = 0
    """First row in the tensor."""
    change: Callable[[Array], Array] | None = None
    """Makes the checkpoint's values of the stored ones, float32 of float32."""
    factors: Array | None = None
    """Factors of the weights, of each expert or one of all."""

    @property
    def where(self) -> str:
        return self.tensor.where

    @property
    def format(self) -> WeightFormat | None:
        return WEIGHT_FORMATS.get(self.tensor.type)

    @property
    def dtype(self) -> str:
        return "F32" if self.change else self.tensor.type

    def read(self, begin: int, end: int) -> Array | Quantised:
        """Reads rows as every StoredTensor does."""
        tensor, n, k = self.tensor, end - begin, self.shape[-1]
        n_rows = math.prod(tensor.shape) // k
        n_bytes = (tensor.end - tensor.begin) // n_rows
        at = tensor.begin + (self.first + begin) * n_bytes
        if self.format is not None:
            header = Header(tensor.file, (n * n_bytes,), "U8", at, at + n * n_bytes)
            factor = 1.0
            if self.factors is not None:
                factor = self.factors[self.first * len(self.factors) // n_rows]
            return decoded(tensor.type, self.files.read(header).reshape(n, n_bytes), tensor.where, factor)
        rows = self.files.read(Header(tensor.file, (n, k), tensor.type, at, at + n * n_bytes))
        if self.change is None:
            return rows
        changed = self.change(rows.astype(np.float32))
        if not np.isfinite(changed).all():
            raise CheckpointError(
                f"{tensor.where} has values that no checkpoint gives; the file is damaged, get it anew"
            )
        return changed


@dataclass(frozen=True)
class Frames(Derived):
    """A StoredTensor [h, channels, 2, y, x], of tensors [h, channels, y, x] of each frame of a patch, plain
    and of one type.
    """

    tensor: Rows
    second: Rows

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.tensor.shape[:2], 2, *self.tensor.shape[2:])

    def read(self, begin: int, end: int) -> Array:
        """Reads rows as every StoredTensor does."""
        *_, y, x = self.tensor.shape
        low, high = begin // (2 * y), -(-end // (2 * y))  # channels
        frames = [np.asarray(one.read(low * y, high * y)).reshape(-1, y, x) for one in (self.tensor, self.second)]
        rows: Array = np.stack(frames, axis=1).reshape(-1, x)
        return rows[begin - 2 * y * low : end - 2 * y * low]


def _renamed(whole: Rows, n_layers: int) -> Iterator[tuple[str, Rows]]:
    """Yields what a tensor of the file is in the checkpoint: one tensor, or those of each expert."""
    name = whole.tensor.name
    match = _BLOCK.fullmatch(name)
    if match is None:
        base, _, last = name.rpartition(".")
        if base in _TOP:
            yield f"{_TOP[base]}.{last}", _changed(f"{_TOP[base]}.{last}", whole)
        else:  # the vision tower, where it is in the same file
            yield f"model.visual.{name}" if name.startswith(("v.", "mm.")) else name, whole
        return
    layer, rest = int(match[1]), match[2]
    prefix = f"model.layers.{layer}." if layer < n_layers else f"mtp.layers.{layer - n_layers}."
    part, _, last = rest.removeprefix("nextn.").rpartition(".")
    if rest.startswith("nextn.") and part in _NEXTN:
        own = "mtp." if layer == n_layers else prefix
        yield f"{own}{_NEXTN[part]}.{last}", _changed(f"{_NEXTN[part]}.{last}", whole)
    elif rest in _LAYER:
        yield prefix + _LAYER[rest], _changed(_LAYER[rest], whole)
    elif rest.startswith("ffn_") and rest.endswith("_exps.weight") and (kind := rest[4:-12]) in _EXPERTS:
        yield from _experts(f"{prefix}mlp.experts.", _EXPERTS[kind], whole)
    else:
        yield name, whole


def name_in_file(name: str, n_layers: int) -> str:
    """Returns the name in a GGUF file of so many layers for a tensor of the bfloat16 checkpoint. A name that
    no such file has is returned as it is.
    """
    match = re.fullmatch(r"(model|mtp)\.layers\.(\d+)\.(.+)", name)
    if match is not None:
        block = f"blk.{int(match[2]) + n_layers * (match[1] == 'mtp')}."
        rest = re.sub(r"^mlp\.experts\.\d+\.(gate|up|down)_proj\.", r"ffn_\1_exps.", match[3])
        known = next((key for key, value in _LAYER.items() if value == rest), None)
        return block + (known or rest) if known or rest != match[3] else name
    base, _, last = name.rpartition(".")
    for names, block in (
        (_TOP, ""),
        ({key: f"mtp.{value}" for key, value in _NEXTN.items()}, f"blk.{n_layers}.nextn."),
    ):
        for key, value in names.items():
            if value == base:
                return f"{block}{key}.{last}"
    return name


def tower_name_in_file(name: str) -> str:
    """Does what `name_in_file` does, for a tensor of a vision tower."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(?:weight|bias)", name)
    base, _, last = name.rpartition(".")
    names, start = (_TOWER_BLOCK, f"v.blk.{match[1]}.") if match else (_TOWER, "")
    known = next((key for key, value in names.items() if value == (match[2] if match else base)), None)
    return name if known is None else f"{start}{known}.{last}"


def _experts(prefix: str, parts: tuple[str, ...], whole: Rows) -> Iterator[tuple[str, Rows]]:
    """The matrices of each expert, of one tensor [E, rows of all parts, K]."""
    shape = whole.shape
    if len(shape) != 3 or shape[1] % len(parts) or shape[0] > MAX_EXPERTS:
        raise CheckpointError(
            f"{whole.where} has the shape {list(shape)}; expected those of at most {MAX_EXPERTS} experts"
        )
    n, n_rows = shape[0], shape[1] // len(parts)
    for i in range(n * len(parts)):
        name = f"{prefix}{i // len(parts)}.{parts[i % len(parts)]}_proj.weight"
        yield name, replace(whole, shape=(n_rows, shape[2]), first=i * n_rows)


def _changed(name: str, whole: Rows) -> Rows:
    """The tensor of this name as the checkpoint has it."""
    shape = whole.shape
    if name.endswith("conv1d.weight") and len(shape) == 2:
        return replace(whole, shape=(shape[0], 1, shape[1]))
    if name == "mlp.shared_expert_gate.weight":
        return replace(whole, shape=(1, shape[-1])) if math.prod(shape) == shape[-1] else whole
    change: Callable[[Array], Array] | None = None
    if name == "linear_attn.A_log":
        change = _log_decay
    elif re.search(r"norm(_embedding|_hidden|_key|_query|_conv)?\.weight$", name) and name != "linear_attn.norm.weight":
        change, shape = _zero_centred, (math.prod(shape),)  # of streams: some files have a row for each
    if change is not None and whole.format is not None:
        raise CheckpointError(f"{whole.where} is quantised as {whole.tensor.type}; expected {', '.join(PLAIN)}")
    return replace(whole, change=change, shape=shape)


def _zero_centred(values: Array) -> Array:
    return values - np.float32(1)


def _log_decay(values: Array) -> Array:
    """-exp(A_log) to A_log; what is not negative to what is not finite."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.log(-values.astype(np.float64)).astype(np.float32)
