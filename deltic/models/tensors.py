"""The tensors of safetensors files by the names of the bfloat16 checkpoint, whatever is quantised and how.

What a matrix is follows from the tensors that it consists of, never from the format's name: published files
mix. The config says only what tensors cannot: whether integers are symmetric, and which GPTQ it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deltic.models.fields import CheckpointError
from deltic.models.layouts import PLAIN, Columns, Fp4, Fp8, Int8, Module, Packed, Plain, Said
from deltic.models.mapped import Header, MappedFiles
from deltic.models.stored import StoredTensor

_WEIGHTS = ("weight", "weight_packed", "qweight")

_COMPANIONS = {
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "qzeros",
    "scales",
    "g_idx",
}

_UNUSED = {
    f"{of}_{what}"
    for of in ("input", "output", "q", "k", "v", "activation", "prob_output")
    for what in ("scale", "zero_point", "global_scale")
}
"""Scales of activations and of the cache: neither is quantised here."""

_REFUSED = {
    "pre_quant_scale": "scales of the inputs (AWQ of ModelOpt)",
    "svdquant_lora_a": "SVDQuant",
    "svdquant_lora_b": "SVDQuant",
    "w_bf16_to_fp8_scale": "W4A8 of AutoRound",
    "bitmask": "2:4 sparse weights",
    "scale_packed": "2:4 sparse weights",
    "absmax": "bitsandbytes",
    "SCB": "bitsandbytes",
    "W_q": "HQQ",
    "trellis": "EXL3",
}

_ROLES = {*_WEIGHTS, *_COMPANIONS, *_UNUSED, *_REFUSED}

_STACK = re.compile(r"(gate_up_proj|down_proj)(?:_weight)?(?:_(.*))?")
"""The last part of the name of stacked experts, and of what belongs to them: gate_up_proj_scale_inv, ..."""

_SUPPORTED = (
    "BF16, F16, F32; FP8 (e4m3); int8; int4 and int8 of compressed-tensors, AWQ and GPTQ (AutoRound); NVFP4; MXFP4"
)

_METHODS = ("fp8", "compressed-tensors", "awq", "gptq", "auto-round", "modelopt")


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """That of a config.json, in its text_config or beside it; {} if there is none."""
    for fields in (config, config.get("text_config")):
        for name in ("quantization_config", "compression_config"):
            found = fields.get(name) if isinstance(fields, Mapping) else None
            if isinstance(found, Mapping) and found:
                return found
    return {}


def stored_tensors(headers: Mapping[str, Header], config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Every tensor of the files by the name that the bfloat16 checkpoint has for it (X.weight).

    headers: of all files, without the parts of the model that are not wanted: a matrix in a format that is
    not supported is an error, wherever it is. config: config.json. Of the weights nothing is read; of a
    matrix its weight_shape, and its g_idx if the config speaks of an order. Raises CheckpointError, which
    names file and tensor, for a scale without weights and the reverse, for shapes and dtypes that do not
    belong together, and for what is not supported.
    """
    files, quantisation = MappedFiles(), quantization_config(config)
    _check_config(headers, quantisation)
    said = Said.by(quantisation)
    tensors: dict[str, StoredTensor] = {}
    modules: dict[str, dict[str, str]] = {}
    for name, header in headers.items():
        target, role = _place(name)
        if not role:
            tensors[target] = Plain(files, name, header)
            continue
        parts = modules.setdefault(target, {})
        if role in parts:
            raise CheckpointError(f"{header.file}: tensor {name!r} and {parts[role]!r} are the same")
        parts[role] = name
    for target, parts in modules.items():
        tensor = _tensor(Module(files, headers, said, parts))
        if tensor is not None:
            tensors[target] = tensor
    method = quantisation.get("quant_method")
    if method is not None and method not in _METHODS and all(each.format is None for each in tensors.values()):
        raise CheckpointError(
            f"{_config_file(headers)}: quant_method {method!r} is not supported, and no tensor is quantised otherwise; "
            f"supported: {_SUPPORTED}"
        )
    return tensors


def _place(name: str) -> tuple[str, str]:
    """The name that the bfloat16 checkpoint has, and the role there ("" of what is never quantised)."""
    base, _, last = name.rpartition(".")
    if last in _ROLES:
        stacked = base.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        return (base if stacked else f"{base.removesuffix('.weight')}.weight"), last
    if base.endswith(".experts"):
        match = _STACK.fullmatch(last)
        if match:
            stack, suffix = match.groups()
            role = "weight" if suffix is None else suffix if suffix in _UNUSED else f"weight_{suffix}"
            if role in _ROLES:
                return f"{base}.{stack}", role
    return name, ""


def _tensor(module: Module) -> StoredTensor | None:
    """What the parts make; None for parts of which nothing is used."""
    parts = module.parts
    weights = [role for role in _WEIGHTS if role in parts]
    plain = Plain(module.files, parts["weight"], module.headers[parts["weight"]]) if "weight" in parts else None
    if plain is not None and len(parts) == 1 and plain.dtype in PLAIN:
        return plain
    for role in parts.keys() & _REFUSED.keys():
        raise module.error(role, f"belongs to {_REFUSED[role]}, which is not supported; supported: {_SUPPORTED}")
    if not weights:
        stray = next((role for role in parts if role not in _UNUSED), None)
        if stray is not None:
            raise module.error(stray, "has no weights beside it; is the download complete?")
        return None
    if len(weights) > 1:
        raise module.error(weights[1], f"stands beside {parts[weights[0]]!r}: the weights are stored twice")
    role = weights[0]
    dtype = module.headers[parts[role]].dtype
    tensor: StoredTensor
    if role == "qweight":
        tensor = Columns(module)
    elif role == "weight_packed" and dtype != "U8":
        tensor = Packed(module)
    elif dtype == "U8":
        tensor = Fp4(module, role)
    elif dtype == "F8_E4M3":
        tensor = Fp8(module)
    elif dtype == "I8":
        tensor = Int8(module)
    elif plain is not None and dtype in PLAIN:
        tensor = plain
    else:
        raise module.error(role, f"holds {dtype}, which is not supported; supported: {_SUPPORTED}")
    for stray in parts.keys() - module.used - _UNUSED - {role}:
        raise module.error(stray, f"does not belong beside weights of {dtype} ({tensor.dtype}): {parts[role]!r}")
    return tensor


def _check_config(headers: Mapping[str, Header], quantisation: Mapping[str, Any]) -> None:
    """Raises CheckpointError for what changes the meaning of tensors that look like others."""
    transform = quantisation.get("transform_config")
    if isinstance(transform, Mapping) and transform.get("config_groups"):
        raise CheckpointError(
            f"{_config_file(headers)}: quantization_config has a transform_config (rotated activations), which is not "
            "supported; use a checkpoint without"
        )


def _config_file(headers: Mapping[str, Header]) -> str:
    return str(next(iter(headers.values())).file.parent / "config.json") if headers else "config.json"
