"""Packed weights on disk: the internal layout as one safetensors file that is mapped, not read.

A start from such a file copies nothing: the kernels work on the mapped pages. The file is written once, by
`deltic pack` into a directory that is a model of its own, or by the first start with `--weights-cache`. It is
the same for all machines. The pages are the system's file cache: it may drop them when others need the
memory, and read them again.
Every part is stored as bytes, padded to 64 so that all begin on a cache line. A file appears whole or not at
all: it is written under another name and moved when the disk has it. What the header says is checked on every
start, the bytes are not, as little as those of any checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from deltic.config import ENV_PREFIX, ConfigError, EngineConfig
from deltic.machine import free_memory_bytes, memory_bound, n_usable_cpus
from deltic.models.checkpoint import ALL_FILES, locate, model_name, resolve_model, speaks
from deltic.models.dflash.shape import DRAFT_MODEL, DrafterShape, is_drafter
from deltic.models.embedder import MODULES
from deltic.models.fields import CheckpointError
from deltic.models.files import PACKED, Skipped, checkpoint_files, read_headers
from deltic.models.gguf import is_gguf, open_gguf
from deltic.models.gguf_config import document
from deltic.models.joint_head import CONFIG
from deltic.models.loading import Host, OnDisk, Parts, Progress, shares_text
from deltic.models.mapped import Header, MappedFiles, map_at_random, read_header
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import (
    DRAFT_HEAD,
    UNUSED,
    Weights,
    empty_weights,
    load_weights,
    stored_shape,
    weight_bytes,
)
from deltic.models.stored import in_ngram_table
from deltic.ops.arrays import Array
from deltic.ops.cpu.program import Program
from deltic.ops.formats import WEIGHT_FORMATS, WeightFormat
from deltic.ops.matrix import Matrix
from deltic.private import make_private

VERSION = "4"
"""Version of the layout of csrc/format.h and of the parts' names. A file of another version is
packed anew.
"""

_LINE = 64
_PAGE = 4096
_COPIED = 1 << 24
"""Bytes that are copied at a time."""
TOWER, TABLE = "vision.safetensors", "ngrams.safetensors"
"""Files of a packed model's vision tower, and of its table of n-grams, beside its weights."""

_ADVICE = "it must be packed again"
_ABANDONED_S = 3600.0
"""A part file that nobody has written to for this long was left by a writer that was killed."""


P = TypeVar("P", bound=Parts)


def save_packed(
    weights: Parts,
    file: Path,
    quantize: str | None,
    notices: list[str],
    progress: Progress | None = None,
    formats: Mapping[str, WeightFormat] = MappingProxyType({}),
) -> None:
    """Writes the file beside its name and moves it there when it is complete.

    formats: of the tensors that were stored quantised, which a model directory of its own has to know.
    Several may write it at once: the last wins, and all wrote the same. Raises OSError.
    """
    parts = dict(weights.named_memory())
    known = json.dumps({name: format.name for name, format in formats.items()})
    metadata = {"deltic": VERSION, "quantize": quantize or "", "notices": json.dumps(notices), "formats": known}
    header: dict[str, object] = {"__metadata__": metadata}
    total = 0
    for name, memory in parts.items():
        size = (memory.nbytes + _LINE - 1) // _LINE * _LINE
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [total, total + size]}
        total += size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _LINE)
    file.parent.mkdir(parents=True, exist_ok=True)
    for left in file.parent.glob(f"{file.name}.*.part"):
        with contextlib.suppress(OSError):  # moved by its writer meanwhile, or another user's
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                left.unlink()
    # Not the process id: two containers that share the directory may have the same.
    part_file = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part")
    try:
        with part_file.open("xb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            done = 0
            for memory in parts.values():
                out.write(memory.reshape(-1).view(np.uint8).data)
                done += out.write(bytes(-memory.nbytes % _LINE)) + memory.nbytes
                if progress is not None:
                    progress(done, total)
            out.flush()
            os.fsync(out.fileno())  # else a crash of the machine could leave the name without the bytes
        part_file.replace(file)
    finally:
        part_file.unlink(missing_ok=True)


def resolve_quantize(
    config: EngineConfig, directory: Path, formats: Mapping[str, WeightFormat] = MappingProxyType({})
) -> tuple[str | None, str | None]:
    """Returns what matrices are rounded to at load, or were when the model was packed: as --quantize says it,
    and as --quantize-rest does.

    formats: of the tensors that are stored quantised. A DELTIC_ variable that is for the other kind of
    checkpoint is left out. Raises ConfigError for such a flag, and when a packed model is asked to be
    another, CheckpointError when it cannot be read.
    """
    rounded = config.quantize_rest if formats else config.quantize
    if formats and config.quantize is not None and f"{ENV_PREFIX}QUANTIZE" not in os.environ:
        names = ", ".join(name for name, _ in Counter(format.name for format in formats.values()).most_common(4))
        raise ConfigError(
            f"--quantize {config.quantize}: {directory} is quantised already ({names}), and runs as it is stored; leave "
            "the flag out, or give --quantize-rest, int8 or int4, on a GPU also fp8, for the matrices that it left in 16 bits"
        )
    if not formats and config.quantize_rest is not None and f"{ENV_PREFIX}QUANTIZE_REST" not in os.environ:
        raise ConfigError(
            f"--quantize-rest {config.quantize_rest}: {config.dummy or directory} is not quantised; leave the flag out, or "
            "give --quantize, which rounds all matrices"
        )
    if config.dummy is None and (directory / PACKED).exists():
        packed, _ = _metadata(directory / PACKED)
        if rounded not in (None, packed):
            flag = "--quantize-rest" if formats else "--quantize"
            raise ConfigError(
                f"{flag} {rounded}: {directory} holds weights packed as {packed or 'bf16'}; leave the flag out, or give "
                "the original checkpoint"
            )
        rounded = packed
    return (None, rounded) if formats else (rounded, None)


def check_rounded(config: EngineConfig) -> None:
    """Raises ConfigError for what the CPU cannot make of weights."""
    if config.rounded == "fp8":
        flag = "--quantize" if config.quantize else "--quantize-rest"
        raise ConfigError(f"{flag} fp8 is for a GPU; on the CPU give int8 or int4")


def pack_model(config: EngineConfig, target: Path, progress: Callable[[str, float], None]) -> tuple[str, list[str]]:
    """Writes a model directory of packed weights; gives their formats, for people, and the notices of
    loading, which the file keeps as well.

    progress: the stage, and how much of it is done. Raises ConfigError, and a loader's other ValueErrors,
    before anything is written; and ConfigError when it cannot be.
    """
    if config.dummy is not None:
        raise ConfigError(
            f"--dummy {config.dummy}: random weights are not packed into a model; `deltic serve --dummy` can keep them "
            "with --weights-cache"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--out {target}: exists and is not an empty directory; give another, or remove it first")
    if speaks(config):
        raise ConfigError(
            f"{config.model}: speech models are not packed into a model; `deltic serve` can keep their packed weights with "
            "--weights-cache"
        )
    source, shape = locate(config)
    _refuse_others(source, shape)
    drafter = _drafter_of(config, source, shape)
    shape = stored_shape(source, shape, drafts=True)
    quantize, rest = resolve_quantize(config, source, shape.formats)
    config = dataclasses.replace(config, quantize=quantize, quantize_rest=rest)
    check_rounded(config)
    largest = max(p.n * p.k * 2 for p in _matrices(shape, config.rounded))  # whole while it is packed
    needed, free = weight_bytes(shape, config.rounded) + largest, free_memory_bytes()
    if largest > free:
        raise ConfigError(
            f"packing takes {largest / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free{memory_bound()}; take a machine with more"
        )
    n_threads = config.threads or n_usable_cpus()
    store = Host(n_threads) if needed <= free else OnDisk(n_threads, directory=target.absolute().parent)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        weights, notices = load_weights(
            source, shape, lambda done, total: progress("packing", done / total), quantize=config.rounded, store=store
        )
    except OSError as error:
        raise ConfigError(f"--out {target}: cannot be written ({error})") from error
    try:
        # The weights last: a directory without them is no model yet, and is not taken for one.
        _copy_model_files(source, target)
        if not is_gguf(source):
            _copy_tensors(source, target / TOWER, lambda name: name.startswith(UNUSED["vision"]))
            _copy_tensors(source, target / TABLE, in_ngram_table)
        if drafter is not None:
            (target / DRAFT_MODEL).mkdir()
            for file in (*drafter.glob("*.json"), *drafter.glob("*.safetensors")):
                shutil.copyfile(file, target / DRAFT_MODEL / file.name)
        file = target / PACKED
        save_packed(
            weights, file, config.rounded, notices, lambda done, total: progress("writing", done / total), shape.formats
        )
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"--out {target}: cannot be written ({error})") from error
        raise
    return shares_text(weights.formats()) if shape.formats else config.quantize or "bfloat16", notices


def _refuse_others(source: Path, shape: ModelShape) -> None:
    """Raises ConfigError for a checkpoint of which more than the packed weights would be needed."""
    if (source / PACKED).exists():
        raise ConfigError(f"{source} holds packed weights; give the original checkpoint")
    for name in (MODULES, CONFIG):
        if (source / name).is_file():
            raise ConfigError(
                f"{source}: what its {name} says is not packed; serve it as it is: `deltic serve` can keep packed weights with "
                "--weights-cache"
            )
    if shape.ngrams is not None and is_gguf(source):
        raise ConfigError(
            f"{source}: its table of n-grams stays in its files, and these are of GGUF; give a checkpoint in safetensors, or "
            "serve this one as it is"
        )


def _drafter_of(config: EngineConfig, source: Path, shape: ModelShape) -> Path | None:
    """The directory of the block drafter that is copied beside packed weights: the one that is asked for, or
    the model's own; None: it has none. Raises CheckpointError, UnsupportedModelError.
    """
    place = source / DRAFT_MODEL
    if config.draft_model is not None:
        place = resolve_model(config.draft_model, ALL_FILES, None, config.download_dir)
    elif not is_drafter(place):
        return None
    DrafterShape.from_directory(place).check_target(shape)
    return place


def _matrices(shape: ModelShape, quantize: str | None) -> list[Matrix]:
    weights = empty_weights(shape, quantize, shape.tie_word_embeddings)
    return [part for _, part in weights.named_parts() if isinstance(part, Matrix)]


def _metadata(file: Path) -> tuple[str | None, list[str]]:
    _, metadata = read_header(file, _ADVICE)
    if metadata.get("deltic") != VERSION:
        raise CheckpointError(
            f"{file}: packed by another version of Deltic ({metadata.get('deltic')!r}, not {VERSION!r}); {_ADVICE}"
        )
    quantize = metadata.get("quantize", "")
    if quantize and quantize not in WEIGHT_FORMATS:
        raise CheckpointError(f"{file}: packed in a format that is not known here ({quantize!r}); {_ADVICE}")
    try:
        return quantize or None, [Skipped.read(text) for text in json.loads(metadata.get("notices", "[]"))]
    except (json.JSONDecodeError, TypeError) as error:
        raise CheckpointError(f"{file}: damaged ({error}); {_ADVICE}") from error


def map_packed(
    file: Path, shape: ModelShape, n_threads: int, progress: Progress | None = None, *, reads_experts: bool = True
) -> tuple[Weights, list[str]]:
    """The weights as views of the mapped file, every page of it touched, and the notices of when it was
    packed. reads_experts: False leaves routed experts on the disk until they are used.

    Raises CheckpointError for a file that is damaged, of another version or of another model.
    """

    return map_parts(file, partial(_unfilled, shape), n_threads, progress, reads_experts=reads_experts)


def _unfilled(shape: ModelShape, quantize: str | None, names: set[str]) -> Weights:
    tied = shape.tie_word_embeddings and "lm_head" not in names
    return empty_weights(shape, quantize, tied)


def check_packed(file: Path, shape: ModelShape) -> None:
    """Raises what `map_packed` does."""
    _placed(file, partial(_unfilled, shape))


def map_parts(
    file: Path,
    empty: Callable[[str | None, set[str]], P],
    n_threads: int,
    progress: Progress | None = None,
    *,
    reads_experts: bool = True,
) -> tuple[P, list[str]]:
    """Does what map_packed does, for any model: `empty` gives its weights without memory, from the format and
    the names in the file.
    """
    weights, notices, placed = _placed(file, empty)
    files, mapped = MappedFiles(), dict[str, Array]()
    left = set() if reads_experts else weights.experts().keys()
    total, done = sum(n_bytes for name, (_, n_bytes) in placed.items() if name not in left), 0
    for name, (header, n_bytes) in placed.items():
        if name in left:
            mapped[name] = map_at_random(header)[1][:n_bytes]
            continue
        stored = files.read(header)
        mapped[name] = stored[:n_bytes]
        _touch(stored, n_threads)
        done += n_bytes
        if progress is not None:
            progress(done, total)
    weights.replace(mapped)
    return weights, notices


def _placed(
    file: Path, empty: Callable[[str | None, set[str]], P]
) -> tuple[P, list[str], dict[str, tuple[Header, int]]]:
    """The weights without memory, the notices, and where each part of them is, with its bytes.

    As map_parts.
    """
    quantize, notices = _metadata(file)
    headers, _ = read_header(file, _ADVICE)
    weights = empty(quantize, set(headers))
    sizes = {name: memory.nbytes for name, memory in weights.named_memory()}
    if not any(name.startswith(DRAFT_HEAD) for name in sizes):  # drafts are off
        headers = {name: header for name, header in headers.items() if not name.startswith(DRAFT_HEAD)}
    if headers.keys() != sizes.keys():
        odd = sorted(headers.keys() ^ sizes.keys())[0]
        raise CheckpointError(f"{file}: packed from another model ({odd!r} is in one only); {_ADVICE}")
    for name, n_bytes in sizes.items():
        header = headers[name]
        if header.dtype != "U8" or header.shape != ((n_bytes + _LINE - 1) // _LINE * _LINE,):
            raise CheckpointError(f"{file}: {name!r} has the size of another model; {_ADVICE}")
    return weights, notices, {name: (headers[name], n_bytes) for name, n_bytes in sizes.items()}


def _touch(data: Array, n_threads: int) -> None:
    """Reads what was mapped, so that the first request does not wait for the disk."""
    n_blocks = data.nbytes >> 20  # the kernel reads whole ones
    program = Program(n_threads)
    program.call("deltic_read_memory", data, data.nbytes, np.empty(n_blocks + 1, np.float32))
    program.run()
    data[n_blocks << 20 :: _PAGE].sum()


def cache_file(config: EngineConfig, directory: Path, has_draft_head: bool = False) -> Path:
    """Names the file in which the cache keeps the packed weights of this checkpoint. The name changes when a
    file of the checkpoint does. has_draft_head: whether they include one.
    """
    assert config.weights_cache is not None
    if config.dummy is not None:
        what: list[object] = [config.dummy, config.seed]
    else:
        if is_gguf(directory):
            files = list(open_gguf(directory).files)
        else:
            files = sorted(checkpoint_files(directory))
            files += [*sorted(directory.glob("*.index.json")), directory / "config.json"]
        what = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    key = hashlib.sha256(json.dumps([VERSION, config.rounded, has_draft_head, what]).encode()).hexdigest()[:16]
    kind = config.quantize or ("bf16" if config.quantize_rest is None else f"rest-{config.quantize_rest}")
    return config.weights_cache / f"{Path(model_name(config)).name}-{kind}-{key}.safetensors"


def through_cache(
    config: EngineConfig,
    directory: Path,
    map_file: Callable[[Path], tuple[P, list[str]]],
    load: Callable[[], tuple[P, list[str]]],
    progress: Progress | None = None,
    has_draft_head: bool = False,
    *,
    stays_on_disk: bool = False,
) -> tuple[P, list[str]]:
    """Returns what a packed model holds, or the cache has of an earlier start, or `load` gives, with notices.

    Whatever is wrong with the cache is one of them: it costs a load, not the start. progress: of the writing.
    stays_on_disk: what `load` gives is mapped, too, once it is in the cache: memory does not hold it.
    Raises ConfigError where its files may be anybody's, or cannot be written and must be.
    """
    if config.dummy is None and (directory / PACKED).exists():
        return map_file(directory / PACKED)
    if config.weights_cache is None:
        return load()
    cached, cache_notices = cache_file(config, directory, has_draft_head), list[str]()
    try:
        # One that cannot be made is told below, as one that cannot be written.
        with contextlib.suppress(OSError):
            make_private("--weights-cache", config.weights_cache)
        if cached.exists():
            return map_file(cached)
    except (CheckpointError, OSError) as error:
        cache_notices.append(f"--weights-cache: {error}")
    weights, notices = load()
    try:
        save_packed(weights, cached, config.rounded, notices, progress)
        if stays_on_disk:
            weights, _ = map_file(cached)
        cache_notices += [f"--weights-cache: packed again as {cached}"] if cache_notices else []
    except OSError as error:
        if stays_on_disk:
            raise ConfigError(f"--weights-cache {config.weights_cache}: cannot be written ({error})") from error
        cache_notices.append(f"--weights-cache: {error}; the next start loads again")
    return weights, notices + cache_notices


def _copy_tensors(source: Path, file: Path, is_wanted: Callable[[str], bool]) -> None:
    """Tensors of a checkpoint, if it has them, as they are stored there: a vision tower is packed when
    loaded, and a table of n-grams never.
    """
    headers = {name: header for name, header in read_headers(source).items() if is_wanted(name)}
    if not headers:
        return
    fields, n_bytes = {}, 0
    for name, header in headers.items():
        end = n_bytes + header.end - header.begin
        fields[name] = {"dtype": header.dtype, "shape": header.shape, "data_offsets": [n_bytes, end]}
        n_bytes = end
    said = json.dumps(fields).encode()
    said += b" " * (-len(said) % 8)
    with file.open("wb") as out:
        out.write(len(said).to_bytes(8, "little") + said)
        for header in headers.values():
            with header.file.open("rb") as stored:
                stored.seek(header.begin)
                for begin in range(header.begin, header.end, _COPIED):
                    out.write(stored.read(min(_COPIED, header.end - begin)))


def _copy_model_files(source: Path, target: Path) -> None:
    """Everything of a checkpoint directory but its weights: configuration, tokenizer, templates, licence; of
    a GGUF file what its metadata says.
    """
    target.mkdir(parents=True, exist_ok=True)
    if is_gguf(source):
        for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            text = json.dumps(document(source, name), ensure_ascii=False)
            (target / name).write_text(text, encoding="utf-8")
        return
    for file in source.iterdir():
        is_weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or file.name.endswith(
            ".index.json"
        )
        if file.is_file() and not is_weights:
            shutil.copy2(file, target / file.name)
