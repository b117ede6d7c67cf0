"""Packed weights on disk: the internal layout as one safetensors file that is mapped, not read.

A start from such a file copies nothing: the kernels work on the mapped pages. The file is written once, by `deltic pack`
into a directory that is a model of its own, or by the first start with `--weights-cache`. It is the same for all machines.
Every part is stored as bytes, padded to 64 so that all begin on a cache line. A file appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deltic.config import EngineConfig
from deltic.models.checkpoint import model_name
from deltic.models.shapes import CheckpointError, ModelShape
from deltic.models.weights import Progress, Weights, checkpoint_files, empty_weights
from deltic.ops.table import Program

PACKED = "packed.safetensors"
VERSION = "1"
"""Of the layout of csrc/matrix.h and of the parts' names: a file of another version is packed anew."""

_LINE = 64


def save_packed(
    weights: Weights, file: Path, quantize: str | None, notices: list[str], progress: Progress | None = None
) -> None:
    """Writes the file beside its name and moves it there when it is complete. Raises OSError."""
    parts = dict(weights.named_tensors())
    header: dict[str, object] = {
        "__metadata__": {"deltic": VERSION, "quantize": quantize or "", "notices": json.dumps(notices)}
    }
    total = 0
    for name, tensor in parts.items():
        size = (tensor.nbytes + _LINE - 1) // _LINE * _LINE
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [total, total + size]}
        total += size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _LINE)
    file.parent.mkdir(parents=True, exist_ok=True)
    part_file = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with part_file.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for tensor in parts.values():
                out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
                out.write(bytes(-tensor.nbytes % _LINE))
                if progress is not None:
                    progress(out.tell(), total)
        part_file.replace(file)
    finally:
        part_file.unlink(missing_ok=True)


def packed_format(file: Path) -> str | None:
    """What a packed file was quantised to, or None for bfloat16. Raises CheckpointError for a file of another kind."""
    quantize, _ = _metadata(file)
    return quantize


def _metadata(file: Path) -> tuple[str | None, list[str]]:
    try:
        with safe_open(str(file), framework="pt") as handle:
            metadata = handle.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: damaged or unreadable ({error}); pack the model again") from error
    if metadata.get("deltic") != VERSION:
        raise CheckpointError(
            f"{file}: packed by another version of Deltic ({metadata.get('deltic')!r}, not {VERSION!r}); pack the model again"
        )
    return metadata["quantize"] or None, json.loads(metadata["notices"])


def map_packed(
    file: Path, shape: ModelShape, n_threads: int, progress: Progress | None = None
) -> tuple[Weights, list[str]]:
    """The weights as views of the mapped file, every page of it touched, and the notices of when it was packed.

    Raises CheckpointError for a file that is damaged, of another version or of another model.
    """
    quantize, notices = _metadata(file)
    with safe_open(str(file), framework="pt") as handle:
        names = set(handle.keys())
        weights = empty_weights(shape, quantize, tied="lm_head" not in names, device="meta")
        sizes = {name: tensor.nbytes for name, tensor in weights.named_tensors()}
        if names != set(sizes):
            odd = sorted(names.symmetric_difference(sizes))[0]
            raise CheckpointError(f"{file}: packed from another model ({odd!r}); pack the model again")
        mapped: dict[str, Tensor] = {}
        total, done = sum(sizes.values()), 0
        for name, n_bytes in sizes.items():
            stored = handle.get_tensor(name)
            if stored.nbytes != (n_bytes + _LINE - 1) // _LINE * _LINE:
                raise CheckpointError(f"{file}: {name!r} has the size of another model; pack the model again")
            mapped[name] = stored[:n_bytes]
            _touch(stored, n_threads)
            done += n_bytes
            if progress is not None:
                progress(done, total)
    weights.replace(mapped)
    return weights, notices


def _touch(data: Tensor, n_threads: int) -> None:
    """Reads what was mapped, so that the first request does not wait for the disk."""
    program = Program(n_threads)
    program.call("deltic_read_memory", data, data.nbytes, torch.empty(data.nbytes // (1 << 20) + 1))
    program.run()


def cache_file(config: EngineConfig, directory: Path) -> Path:
    """Where the cache keeps the packed weights of this checkpoint: a name that changes when a file of it does."""
    assert config.weights_cache is not None
    if config.dummy is not None:
        what: list[object] = [config.dummy, config.seed]
    else:
        files = [*sorted(checkpoint_files(directory)), directory / "config.json"]
        what = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    key = hashlib.sha256(json.dumps([VERSION, config.quantize, what]).encode()).hexdigest()[:16]
    return (
        config.weights_cache
        / f"{Path(model_name(config)).name}-{config.quantize or 'bf16'}-{key}.safetensors"
    )


def copy_model_files(source: Path, target: Path) -> None:
    """Everything of a checkpoint directory but its weights: configuration, tokenizer, templates, licence."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        is_weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or file.name.endswith(
            ".index.json"
        )
        if file.is_file() and not is_weights:
            shutil.copy2(file, target / file.name)
