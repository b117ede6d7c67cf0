"""The tensors of safetensors files by the names of the bfloat16 checkpoint, whatever is quantised and how.

What a matrix is follows from the tensors that it consists of, never from the format's name: published files
mix. The config says only what tensors cannot: whether integers are symmetric, and which GPTQ it is. What else
it says is compared with them: weights beside the config of others are refused. Which modules it names
(`ignore`, `targets`, ...) has no meaning here: a matrix is quantised where its tensors are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deltic.models.fields import CheckpointError
from deltic.models.layouts import PLAIN, Columns, Fp4, Fp8, Int8, Module, Packed, Plain, Said, Stored
from deltic.models.mapped import Header, MappedFiles
from deltic.models.stored import StoredTensor, in_ngram_table

_WEIGHTS = ("weight", "weight_packed", "qweight")

_COMPANIONS = {
    *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_zero_point"),
    *("weight_shape", "weight_g_idx", "qzeros", "scales", "g_idx"),
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

_COMPRESSED = {"packed", "int8", "fp8", "nvfp4", "mxfp4"}
_AUTO_ROUND = {"awq", "gptq", *_COMPRESSED}
_METHODS = {
    "fp8": {"fp8"},
    "fbgemm_fp8": {"fp8"},
    "compressed-tensors": _COMPRESSED,
    "awq": {"awq"},
    "gptq": {"gptq"},
    "auto-round": _AUTO_ROUND,
    "auto_round": _AUTO_ROUND,
    "intel/auto-round": _AUTO_ROUND,
    "modelopt": _COMPRESSED,
    "modelopt_fp4": _COMPRESSED,
}
"""Kinds that its checkpoints hold (layouts.Stored.kind), by quant_method."""

_FORMATS = {
    "pack-quantized": {"packed"},
    "int-quantized": {"int8"},
    "float-quantized": {"fp8"},
    "naive-quantized": {"fp8", "int8"},
    "nvfp4-pack-quantized": {"nvfp4"},
    "mxfp4-pack-quantized": {"mxfp4"},
}
"""The same by compressed-tensors' format; others are of several."""

_ALGORITHMS = {"NVFP4": "nvfp4", "MXFP4": "mxfp4", "FP8": "fp8", "INT8": "int8", "W8A8": "int8"}
"""The same by parts of ModelOpt's quant_algo."""


def quantization_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """Finds the quantization_config of a config.json, in its text_config or beside it. {} if
    there is none.
    """
    for fields in (config, config.get("text_config")):
        for name in ("quantization_config", "compression_config"):
            found = fields.get(name) if isinstance(fields, Mapping) else None
            if isinstance(found, Mapping) and found:
                return found
    return {}


def stored_tensors(headers: Mapping[str, Header], config: Mapping[str, object]) -> dict[str, StoredTensor]:
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
    fitting = set[tuple[object, ...]]()
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
        if quantisation and isinstance(tensor, Stored):
            alike = tensor.kind, tensor.format, tensor.spread, tensor.zero is None, tensor.shape[-2:]
            field = None if alike in fitting else _contradicted(quantisation, tensor)
            fitting.add(alike)
            if field is not None:
                raise CheckpointError(
                    f"{_config_file(headers)}: quantization_config.{field} does not describe {tensor.where}, which holds "
                    f"{tensor.format.bits} bits a weight ({tensor.kind}, {_spread_text(tensor)}); get configuration and weights anew"
                )
        if tensor is not None:
            tensors[target] = tensor
    return tensors


def _contradicted(config: Mapping[str, object], tensor: Stored) -> str | None:
    """A field of the quantization_config that says something else of a matrix than its tensors, and what it
    says; None: there is none. Of several rules one that fits is enough: whose it is, only names say.
    """
    kind, is_packed = tensor.kind, tensor.kind in ("awq", "gptq")
    fits: dict[str, Callable[[Any], bool]] = {
        "quant_method": lambda said: kind in _METHODS[said],
        "quant_algo": lambda said: _is_algorithm(str(said).upper(), kind),
        "fmt": lambda said: kind != "fp8" or "e4m3" in str(said),
        "weight_block_size": lambda said: kind != "fp8" or _is_block(said, tensor),
        "pack_dtype": lambda said: not is_packed or str(said).endswith("int32"),
        "packing_format": lambda said: kind != ("gptq" if "awq" in str(said) else "awq"),
        "version": lambda said: kind != "awq" or str(said).lower() == "gemm",
        "data_type": lambda said: ("int" in str(said)) == tensor.is_integer,
    }
    for name, fit in fits.items():
        if config.get(name) is not None and not fit(config[name]):
            return f"{name} {config[name]!r}"
    found = min((_misfits(rule, tensor) for rule in _rules(config)), key=len, default=[])
    return found[0] if found else None


def _rules(config: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Yields what is said of matrices, by the path of each field: of the groups of compressed-tensors, or of
    GPTQ, AWQ and AutoRound, and their exceptions.
    """
    groups = config.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        for name, group in groups.items():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping):
                path = f"config_groups.{name}."
                yield {f"{path}weights.{key}": said for key, said in weights.items()} | (
                    {f"{path}format": group["format"]} if group.get("format") else {"format": config.get("format")}
                )
        return
    base = {key: config.get(key) for key in ("bits", "w_bit", "group_size", "q_group_size")}
    yield base
    for name in ("dynamic", "extra_config"):
        exceptions = config.get(name)
        for module, fields in exceptions.items() if isinstance(exceptions, Mapping) else ():
            if isinstance(fields, Mapping):
                own = {f"{name}.{module}.{key}": said for key, said in fields.items()}
                yield {key: said for key, said in base.items() if key not in fields} | own


def _misfits(rule: Mapping[str, object], tensor: Stored) -> list[str]:
    """The fields of a rule that do not fit a matrix, and what they say."""
    rows, columns = tensor.spread
    k = tensor.shape[-1]
    strategy, group = (
        next((said for path, said in rule.items() if path.endswith(end)), None) for end in (".strategy", ".group_size")
    )
    in_one = columns == 0 and isinstance(group, int) and group >= k

    def fits(key: str, said: Any) -> bool:
        if key in ("bits", "w_bit", "num_bits"):
            return bool(said == tensor.format.bits)
        if key in ("group_size", "q_group_size"):
            if strategy in ("tensor", "channel", "block") or tensor.kind == "fp8":
                return True
            return said == columns or (columns == 0 and (said in (-1, 0) or (isinstance(said, int) and said >= k)))
        if key == "type":
            return bool((said == "int") == tensor.is_integer)
        if key == "symmetric" and tensor.kind in _COMPRESSED:
            return said is (tensor.zero is None)
        if key == "strategy" and tensor.kind == "fp8":
            is_row = tensor.shape[-2] == 1
            fitting = {"tensor": rows == 0 or is_row, "channel": rows == 1 or is_row}
            return said not in fitting or (columns == 0 and fitting[said])
        if key == "strategy":
            by_group = {"group": columns > 0 or in_one, "tensor_group": tensor.kind == "nvfp4", "block": False}
            return by_group.get(said, columns == 0)
        if key == "block_structure":
            return strategy != "block" or _is_block(said, tensor)
        return key != "format" or said not in _FORMATS or tensor.kind in _FORMATS[said]

    return [
        f"{path} {said!r}"
        for path, said in rule.items()
        if said is not None and not fits(path.rpartition(".")[2], said)
    ]


def _is_algorithm(said: str, kind: str) -> bool:
    """Returns whether ModelOpt's algorithm may leave this kind of matrix. An algorithm that is
    not known may.
    """
    known = {held for part, held in _ALGORITHMS.items() if part in said}
    return not known or kind in known or "MIXED" in said


def _is_block(said: object, tensor: Stored) -> bool:
    """Returns whether the scales of an e4m3 matrix are those of blocks of this size. A small
    matrix has one.
    """
    if not isinstance(said, list | tuple) or len(said) != 2 or not all(isinstance(size, int) for size in said):
        return False
    sizes = zip(said, tensor.spread, tensor.shape[-2:], strict=True)
    return all(size == shared or (shared == 0 and size >= whole) or whole == 1 for size, shared, whole in sizes)


def _spread_text(tensor: Stored) -> str:
    rows, columns = tensor.spread
    if rows > 1 or (columns and tensor.kind == "fp8"):
        return f"a scale for {rows} x {columns}"
    return f"groups of {columns}" if columns else "a scale a row" if rows else "a scale a matrix"


def _place(name: str) -> tuple[str, str]:
    """The name that the bfloat16 checkpoint has, and the role there ("" of what is never quantised)."""
    if in_ngram_table(name):
        return name, ""
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
    """Makes the tensor of a module's parts. None if nothing of them is used."""
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


def _check_config(headers: Mapping[str, Header], quantisation: Mapping[str, object]) -> None:
    """Raises CheckpointError for what is not known, and for what changes the meaning of tensors that look as
    others.
    """
    file, method = _config_file(headers), quantisation.get("quant_method")
    if method is not None and (not isinstance(method, str) or method not in _METHODS):
        raise CheckpointError(f"{file}: quant_method {method!r} is not supported; supported: {_SUPPORTED}")
    transform, sparsity = quantisation.get("transform_config"), quantisation.get("sparsity_config")
    if isinstance(transform, Mapping) and transform.get("config_groups"):
        raise CheckpointError(
            f"{file}: quantization_config has a transform_config (rotated activations), which is not supported; use a "
            "checkpoint without"
        )
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise CheckpointError(
            f"{file}: quantization_config has a sparsity_config of format {sparsity['format']!r}, which is not supported; use a "
            "checkpoint without"
        )


def _config_file(headers: Mapping[str, Header]) -> str:
    return str(next(iter(headers.values())).file.parent / "config.json") if headers else "config.json"
