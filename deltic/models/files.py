"""The files of a checkpoint: which tensors they hold, by name, shape and format, and whether these are the
ones that a model is made of. Nothing of their values is read here.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType

from deltic.models.fields import CheckpointError, read_json
from deltic.models.gguf import is_gguf, open_gguf
from deltic.models.gguf_config import in_metadata, n_trunk_layers
from deltic.models.gguf_tensors import name_in_file, tower_name_in_file
from deltic.models.gguf_tensors import stored_tensors as tensors_of_gguf
from deltic.models.layouts import Plain
from deltic.models.loading import Planned
from deltic.models.mapped import Header, MappedFiles, read_header
from deltic.models.stored import StoredTensor, formats_of
from deltic.models.tensors import quantization_config
from deltic.models.tensors import stored_tensors as tensors_of_files
from deltic.ops.formats import WEIGHT_FORMATS, WeightFormat
from deltic.ops.matrix import Matrix

INDEX = "model.safetensors.index.json"
"""The file that says where each tensor is."""

PACKED = "packed.safetensors"
"""The weights of a packed model (packed.py)."""

_SIZED_BY = (
    (r"linear_attn\.", "linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim"),
    (r"self_attn\.(q|o)_", "num_attention_heads, head_dim"),
    (r"self_attn\.", "num_key_value_heads, head_dim"),
    (r"shared_expert\.", "shared_expert_intermediate_size"),
    (r"experts\.", "num_experts, moe_intermediate_size"),
    (r"mlp\.gate\.", "num_experts"),
    (r"(gate|up|down)_proj\.", "intermediate_size"),
    (r"^(lm_head|model\.(language_model\.)?embed_tokens)\.", "vocab_size"),
)
"""The fields of config.json that size tensors of a language model, beside hidden_size, by their names."""

_MLX = (
    "an MLX checkpoint (mlx-community, LM Studio), whose tensors are stored in another way; give the model that it was "
    "made of, or a GGUF file of it"
)

_IGNORED = re.compile(r"(rotary_emb\.inv_freq|\.k_scale|\.v_scale)$")

_STORED_DTYPES = ("BF16", "F16", "F32")

Unused = Mapping[str, tuple[str, ...]]
"""Parts of a model that may be stored and are not run, with the prefixes of their names."""

_ALL_USED: Unused = MappingProxyType({})


class Skipped(str):
    """A notice of the tensors of a part of a model that is stored and not run."""

    part: str

    def __new__(cls, part: str, n: int) -> Skipped:
        notice = super().__new__(cls, f"skipped {n} {part} tensors: only the text stack is run")
        notice.part = part
        return notice

    @classmethod
    def read(cls, notice: str) -> str:
        """The notice from its text: a Skipped if it is one."""
        found = re.fullmatch(r"skipped (\d+) (\w+) tensors: only the text stack is run", notice)
        return notice if found is None else cls(found[2], int(found[1]))


def without_skipped(notices: list[str], part: str) -> list[str]:
    """The notices but those of a part that was skipped and is not missed."""
    return [notice for notice in notices if not (isinstance(notice, Skipped) and notice.part == part)]


def _identity(path: Path) -> tuple[object, ...]:
    """Identifies the files of a checkpoint, so that changed ones are read anew."""
    files = sorted(path.glob("*.safetensors*")) if path.is_dir() else [path]
    stats = [(file, file.stat()) for file in files if file.exists()]
    return tuple((file, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for file, s in stats)


def read_headers(path: Path) -> dict[str, Header]:
    """Reads the headers of all files of a checkpoint. They are kept until a file changes, or
    `forget_headers`, since a start asks for them several times. Raises CheckpointError.
    """
    return dict(_headers_of(path, _identity(path)))


def forget_headers() -> None:
    """Frees what `read_headers` keeps: a model that is loaded needs none."""
    _headers_of.cache_clear()


@lru_cache(maxsize=2)  # a speech model has two directories
def _headers_of(path: Path, identity: tuple[object, ...]) -> Mapping[str, Header]:
    headers: dict[str, Header] = {}
    for file, promised in checkpoint_files(path).items():
        found, metadata = read_header(file)
        if metadata.get("format") == "mlx":
            raise CheckpointError(f"{file}: {_MLX}")
        for name in promised:
            if name not in found:
                raise CheckpointError(f"{file}: {INDEX} lists tensor {name!r} here, but it is missing")
        for name in found.keys() & headers.keys():
            raise CheckpointError(f"tensor {name!r} is stored twice: in {headers[name].file} and in {file}")
        headers |= found
    return MappingProxyType(headers)


def open_tensors(path: Path, unused: Unused = _ALL_USED) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, a directory or a file, by the names of its bfloat16 release.

    Those of unused parts may be in formats that are not supported; of safetensors they are as in the files.
    Raises CheckpointError.
    """
    prefixes = tuple(prefix for each in unused.values() for prefix in each)
    if is_gguf(path):
        return tensors_of_gguf(open_gguf(path), prefixes)
    config = (path if path.is_dir() else path.parent) / "config.json"
    headers, files = read_headers(path), MappedFiles()
    skipped = {name: headers.pop(name) for name in list(headers) if name.startswith(prefixes)}
    said = read_json(config) if config.exists() else {}
    if isinstance(of_mlx := said.get("quantization"), Mapping):
        bits, group = of_mlx.get("bits"), of_mlx.get("group_size")
        raise CheckpointError(f"{config}: quantization: {bits!r} bits in groups of {group!r}: {_MLX}")
    found = tensors_of_files(headers, said)
    method = quantization_config(said).get("quant_method")
    if method in ("fp8", "awq", "gptq") and all(tensor.format is None for tensor in found.values()):
        raise CheckpointError(f"{config}: quantization_config.quant_method is {method!r}, and no tensor is quantised")
    return found | {name: Plain(files, name, header) for name, header in skipped.items()}


def open_part(path: Path, prefixes: tuple[str, ...]) -> dict[str, StoredTensor]:
    """The tensors of safetensors files whose names begin so, and nothing of the others.

    Raises CheckpointError.
    """
    config = (path if path.is_dir() else path.parent) / "config.json"
    headers = {name: header for name, header in read_headers(path).items() if name.startswith(prefixes)}
    return tensors_of_files(headers, read_json(config) if headers and config.exists() else {})


def stored_formats(directory: Path, unused: Unused = _ALL_USED) -> dict[str, WeightFormat]:
    """The formats of a model's quantised tensors (`stored.formats_of`), in a packed model too.

    Raises CheckpointError.
    """
    packed = directory / PACKED
    if not packed.exists():
        return formats_of(open_tensors(directory, unused))
    _, metadata = read_header(packed)
    try:
        return {name: WEIGHT_FORMATS[format] for name, format in json.loads(metadata.get("formats", "{}")).items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{packed}: packed in formats that are not known here ({error}); it must be packed again"
        ) from error


def _names_of(path: Path) -> tuple[Callable[[str], str], str, Callable[..., str]]:
    """Returns texts for messages: how a file names a tensor of the bfloat16 checkpoint, what says its size,
    and in which fields. For a missing one they say also where its layer comes from.
    """

    def said_by(name: str, is_missing: bool = False) -> str:
        if not name.startswith(("model.", "lm_head.", "mtp.")):
            return ""
        fields = next((f"{fields}, " for pattern, fields in _SIZED_BY if re.search(pattern, name)), "") + "hidden_size"
        fields = f"num_hidden_layers, layer_types, full_attention_interval, {fields}" if is_missing else fields
        return f" ({in_metadata(fields, path) if is_gguf(path) else fields})"

    if not is_gguf(path):
        return str, "config.json", said_by
    model = open_gguf(path)
    is_tower = model.get("general.architecture") == "clip"
    called = tower_name_in_file if is_tower else partial(name_in_file, n_layers=n_trunk_layers(model))
    return called, "metadata", said_by


def check_plan(
    plan: list[Planned], tensors: Mapping[str, StoredTensor], path: Path, unused: Unused = _ALL_USED
) -> list[str]:
    """Compares what is stored with what is needed, before anything is read. Returns notices for the user."""
    converted: Counter[str] = Counter()
    called, config, said_by = _names_of(path)
    needed = [(stored, part.target) for part in plan for stored in part.stored]
    for stored, target in needed:
        tensor = tensors.get(stored.name)
        if tensor is None:
            raise CheckpointError(
                f"{path}: tensor {called(stored.name)!r} is missing; expected shape {list(stored.shape)}. "
                f"Is the download complete, and is the {config} that of this checkpoint{said_by(stored.name, True)}?"
            )
        if tensor.shape != stored.shape:
            raise CheckpointError(
                f"{tensor.where} has the wrong shape: expected {list(stored.shape)} by {config}{said_by(stored.name)}, "
                f"found {list(tensor.shape)}; configuration and weights do not belong together, get both anew"
            )
        taken = [segment.format for segment in target.segments] if isinstance(target, Matrix) else []
        if tensor.dtype not in _STORED_DTYPES and tensor.format not in taken:
            raise CheckpointError(
                f"{tensor.where} has the wrong dtype: expected {', '.join(_STORED_DTYPES)}, found {tensor.dtype}"
            )
        if tensor.format is None and tensor.dtype != "BF16" and isinstance(target, Matrix):
            converted[tensor.dtype] += 1

    skipped: Counter[str] = Counter()
    unexpected = []
    for name in sorted(set(tensors).difference(stored.name for stored, _ in needed)):
        part = next((part for part, prefixes in unused.items() if name.startswith(prefixes)), None)
        if part is not None:
            skipped[part] += 1
        elif not _IGNORED.search(name):
            unexpected.append(name)
    if unexpected:
        first = ", ".join(repr(called(n)) for n in unexpected[:5]) + (", ..." if len(unexpected) > 5 else "")
        raise CheckpointError(
            f"{tensors[unexpected[0]].where}: {len(unexpected)} unexpected tensors: {first}. "
            f"The {config} does not describe this checkpoint{said_by(unexpected[0], True)}, or it holds an adapter."
        )
    told = [f"converted {n} matrices from {dtype} to BF16" for dtype, n in converted.items()]
    return [*(Skipped(part, n) for part, n in skipped.items()), *told]


def checkpoint_files(path: Path) -> dict[Path, list[str]]:
    """The files of a checkpoint, each with the names that the index promises in it."""
    if path.is_file():
        return {path: []}
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint directory or safetensors file")
    index = path / INDEX
    if not index.exists():
        single = path / "model.safetensors"
        found = [single] if single.exists() else sorted(path.glob("*.safetensors"))
        if not found:
            raise CheckpointError(f"{path}: no *.safetensors file here, and no other format is supported")
        return {file: [] for file in found}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to files, found {weight_map!r}")
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{index}: tensor {name!r} must map to a file name, found {file!r}")
        by_file.setdefault(file, []).append(name)
    for file, names in by_file.items():
        if Path(file).name != file:
            raise CheckpointError(f"{index}: tensor {names[0]!r} must map to a file name, found {file!r}")
        if not (path / file).exists():
            raise CheckpointError(f"{path / file}: {INDEX} lists this shard, but it is missing; download it again")
    return {path / file: names for file, names in by_file.items()}
