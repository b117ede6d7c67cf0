"""A fingerprint of everything that decides the bits of pages and states.

Data computed under another fingerprint is of no use.

That is the content of the checkpoint with its formats (or which random weights), what is rounded of it, the
shape that follows from it and the settings, the compiled kernels, and the Python code that lays out the
memory and records the steps, with the versions of the libraries it calculates with. The processor is in it
through the kernels that were chosen for it. In doubt a thing is included: one too many costs an empty cache,
one too few gives wrong answers. Hashing a large checkpoint takes seconds, so each file's hash is remembered,
by size and time of change.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from deltic.config import EngineConfig
from deltic.models.fields import CheckpointError
from deltic.models.gguf import is_gguf, open_gguf, tower_beside

MEMORY = "hashes.json"
"""File in the cache directory: resolved path -> [size, mtime_ns, hash]."""

_SEGMENT_BYTES = 64 << 20
"""A file is hashed in segments, and their hashes are hashed: two threads can share one file."""

_BLOCK_BYTES = 1 << 20
_N_THREADS = 2
_SETTLED_S = 2.0
"""A file that changed this recently could change again within the resolution of its time stamp: it is not
remembered.
"""

_CODE = ("engine", "models", "ops", "runtime")
"""Folders whose Python, at any depth, may decide the bits."""

Progress = Callable[[int, int], None]  # bytes hashed, bytes to hash


def fingerprint(
    config: EngineConfig, shape: object, directory: Path, kernels: Path | str, on_progress: Progress | None = None
) -> str:
    """32 hex digits. config.rounded: resolved. shape: what settings made of the model's, by its repr.
    directory: the checkpoint's, or one safetensors or GGUF file. kernels: the library in use; or, of kernels
    that are sources here, a text with everything else that they depend on.

    Raises CheckpointError for a file that cannot be read.
    """
    memory_file = config.cache_dir / MEMORY if config.cache_dir is not None else None
    weights = {} if config.dummy is not None else _weight_hashes(directory, memory_file, on_progress)
    content = {
        "weights": weights or [config.dummy, config.seed],
        "quantize": config.rounded,
        "shape": repr(shape),  # formats of pages and states, a draft head's pages, positions
        "kernels": _hash(kernels) if isinstance(kernels, Path) else kernels,
        "code": _code_hashes(),
        "libraries": {name: _version(name) for name in ("torch", "numpy")} | {"libc": platform.libc_ver()},
    }
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _code_hashes() -> dict[str, str]:
    """Hashes of the Python that may decide the bits, by its place in the package."""
    package = Path(__file__).parents[1]
    sources = sorted(path for part in _CODE for path in (package / part).rglob("*.py"))
    return {str(path.relative_to(package)): _hash(path) for path in sources}


def code_digest() -> str:
    """8 hex digits that name this code, for those that must run the same."""
    return blake2b(json.dumps(_code_hashes()).encode(), digest_size=4).hexdigest()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _weight_hashes(directory: Path, memory_file: Path | None, on_progress: Progress | None) -> dict[str, str]:
    """Hashes of the configuration and of every file of weights that the loader may read, by name."""
    small: list[Path] = []
    if is_gguf(directory):
        tower = tower_beside(directory)
        files = [*open_gguf(directory).files, *([] if tower is None else [tower])]
    elif directory.is_dir():
        files = sorted(directory.glob("*.safetensors"))
        names = ("*.index.json", "preprocessor_config.json")
        small = [directory / "config.json", *sorted(file for name in names for file in directory.glob(name))]
    else:
        files, small = [directory], [directory.with_name("config.json")]
    return {file.name: _hash(file) for file in small} | _remembered(files, memory_file, on_progress)


def _remembered(files: list[Path], memory_file: Path | None, on_progress: Progress | None) -> dict[str, str]:
    """Hashes by name, of what has changed since they were remembered or never was."""
    memory = _recall(memory_file)
    hashes, todo = {}, []
    for file in files:
        identity = _identity(file)
        known = memory.get(str(file.resolve()))
        if isinstance(known, list) and known[:-1] == identity:
            hashes[file.name] = str(known[-1])
        else:
            todo.append((file, identity))
    total = sum(size for _, (size, *_) in todo)
    done, is_new = 0, False
    with ThreadPoolExecutor(_N_THREADS) as pool:
        for file, identity in todo:
            size, changed_ns, *_ = identity
            began = time.time()
            segments = []
            for digest in pool.map(functools.partial(_hash_segment, file), range(0, size, _SEGMENT_BYTES)):
                segments.append(digest)
                if on_progress is not None:
                    on_progress(done + min(len(segments) * _SEGMENT_BYTES, size), total)
            done += size
            hashes[file.name] = blake2b(b"".join(segments), digest_size=16).hexdigest()
            if _identity(file) == identity and began - changed_ns / 1e9 > _SETTLED_S:
                memory[str(file.resolve())] = [*identity, hashes[file.name]]
                is_new = True
    if is_new and memory_file is not None:
        _remember(memory_file, memory)
    return hashes


def _identity(file: Path) -> list[int]:
    """Returns what changes with a file's content.

    Images and archives may give all their files one mtime, so its inode as well.
    """
    try:
        stat = file.stat()
    except OSError as error:
        raise _unreadable(file, error) from error
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def _hash(file: Path) -> str:
    try:
        return blake2b(file.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise _unreadable(file, error) from error


def _hash_segment(file: Path, start: int) -> bytes:
    digest, block = blake2b(digest_size=16), memoryview(bytearray(_BLOCK_BYTES))
    try:
        with file.open("rb", buffering=0) as handle:
            handle.seek(start)
            n_left = _SEGMENT_BYTES
            while n_left and (n := handle.readinto(block[:n_left])):
                digest.update(block[:n])
                n_left -= n
    except OSError as error:
        raise _unreadable(file, error) from error
    return digest.digest()


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{file}: cannot be read ({error.strerror}); is this a checkpoint?")


def _recall(memory_file: Path | None) -> dict[str, object]:
    if memory_file is not None:
        with contextlib.suppress(OSError, ValueError):  # none yet, or damaged: everything is hashed again
            memory = json.loads(memory_file.read_text())
            if isinstance(memory, dict):
                return memory
    return {}


def _remember(memory_file: Path, memory: dict[str, object]) -> None:
    part = memory_file.with_name(f"{memory_file.name}.{secrets.token_hex(4)}.part")
    with contextlib.suppress(OSError):  # the cache refuses a directory that cannot be written
        memory_file.parent.mkdir(0o700, parents=True, exist_ok=True)
        try:
            part.write_text(json.dumps(memory, indent=1, sort_keys=True))
            os.replace(part, memory_file)
        finally:
            part.unlink(missing_ok=True)
