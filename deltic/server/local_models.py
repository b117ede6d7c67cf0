"""Models on this disk: in the hub's cache, and in directories that somebody named.

`local_models` looks at names and sizes alone, which takes milliseconds. `model_files` and `why_not` read
headers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from deltic.aliases import Published, published
from deltic.config import BUILT_IN, EngineConfig
from deltic.models.checkpoint import locate, locate_speech, speaks
from deltic.models.fields import CheckpointError
from deltic.models.gguf import SUFFIX, chosen, is_gguf, models_among, open_gguf, set_name, tower_among

FAMILIES = {"qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe", "qwen3_next": "qwen3next", "qwen4_exp": "qwen4exp"}
"""Architectures as Ollama and GGUF files name them, by the shape's."""

FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4", 39: "NVFP4", 40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
"""general.file_type of a GGUF file."""

INDEX = "model.safetensors.index.json"

MAX_DEPTH = 3
"""Folders below a directory that are looked into: owner, model and bits, as other programs lay them."""

_BITS = re.compile(r"(?<![A-Za-z0-9])(UD-)?([IT]?Q\d\w*|BF16|F16|F32|(?:MX|NV)FP4\w*)$", re.IGNORECASE)
"""Bits at the end of a GGUF file's name without its suffix."""


@dataclass(frozen=True)
class LocalModel:
    """A model on this disk."""

    name: str
    """Name that `deltic serve` takes: owner/model, owner/model:Q4_K_M, or a path; of a model's second commit
    the short name that pins it.
    """
    path: Path
    """Directory, or first GGUF file; where only a part has come, the model's folder in the cache."""
    n_bytes: int
    """Bytes of its files, a vision tower included, which other models may share."""
    used_s: float
    """Time at which its files were last read, as far as the file system notes it, in seconds since 1970."""
    missing: str = ""
    """Files that it needs and that are not there. Empty: it can be loaded."""
    repository: str = ""
    """owner/model of one in the hub's cache."""
    revision: str = ""
    """Commit of one in the hub's cache."""
    files: tuple[Path, ...] = ()
    """Files of one in the hub's cache."""

    @property
    def published_as(self) -> Published | None:
        """The published model that it is: repository and file, at the commit that the table pins, so that a
        short name means the same bytes everywhere. Where the table pins none, any commit is the model.
        """
        hub = f"{self.repository}:{self.path.name}" if is_gguf(self.path) else self.repository
        return next((each for each in published() if each.hub == hub and each.revision in (None, self.revision)), None)


class ModelFiles(NamedTuple):
    """Facts that the files of a model tell of it."""

    family: str = "qwen"
    format: str = "safetensors"
    n_params: int = 0
    n_bytes: int = 0
    level: str = ""
    """A GGUF file's own name of its bits."""


@functools.lru_cache(maxsize=64)
def model_files(model: str, dummy: str | None = None) -> ModelFiles:
    """Reads facts of a model's files; of random weights, as if they were stored in 16 bits."""
    try:
        directory, shape = locate(EngineConfig(model=BUILT_IN if dummy else model, dummy=dummy))
        about, n = (
            ModelFiles(FAMILIES.get(shape.family, ModelFiles.family), "safetensors", shape.n_params),
            shape.n_params,
        )
        if dummy is not None:
            return about._replace(n_bytes=2 * n)
        if not is_gguf(directory):
            files = directory.glob("*.safetensors") if directory.is_dir() else [directory]
            return about._replace(n_bytes=sum(file.stat().st_size for file in files))
        stored = open_gguf(directory)
        n_bytes, level = sum(file.stat().st_size for file in stored.files), stored.get("general.file_type")
        level = FILE_TYPES.get(level, "") if isinstance(level, int) else ""
        return about._replace(format="gguf", n_bytes=n_bytes, level=level)
    except (ValueError, OSError):  # what was loaded is no longer there
        return ModelFiles()


def why_not(path: Path) -> str:
    """Says why the model at a path cannot be served, by its configuration or header; empty: it can be."""
    config = EngineConfig(model=str(path))
    try:
        locate_speech(config) if speaks(config) else locate(config)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def local_models(download_dir: Path | None = None, directories: Sequence[Path] = ()) -> list[LocalModel]:
    """Finds the models in the hub's cache and in further directories, in the order of their names. Of several
    revisions of one, it is the one that the name stands for, else the newest, and beside it the one that a
    short name pins.

    download_dir: as --download-dir; None: where HF_HOME says. One that was not wholly downloaded says what is
    missing. Raises CheckpointError for a directory that is none.
    """
    found = list(_in_cache(download_dir))
    for directory in directories:
        if not (there := directory.expanduser()).is_dir():
            raise CheckpointError(f"{directory}: no such directory. Name one that holds models.")
        found += _in_directory(there, MAX_DEPTH)
    return sorted(found, key=lambda model: model.name.lower())


def cache_folder(download_dir: Path | None = None) -> Path:
    """Returns the folder of the hub's cache."""
    from huggingface_hub import constants  # a fifth of a second

    return Path(download_dir.expanduser() if download_dir else constants.HF_HUB_CACHE)


def _in_cache(download_dir: Path | None) -> Iterator[LocalModel]:
    """Finds those in the hub's cache, and what has come of others."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    cache = cache_folder(download_dir)
    try:
        repositories = {repo.repo_path: repo for repo in scan_cache_dir(cache).repos}
    except (CacheNotFound, OSError, ValueError):  # ValueError: a file, no folder
        return
    for folder in sorted(cache.glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        seen = set[str]()
        repo = repositories.get(folder)
        for revision in sorted(repo.revisions, key=lambda r: ("main" not in r.refs, -r.last_modified)) if repo else ():
            files = {file.file_path.relative_to(revision.snapshot_path).as_posix(): file for file in revision.files}
            sizes = {path: file.size_on_disk for path, file in files.items()}
            used = {path: file.blob_last_accessed for path, file in files.items()}
            for what, parts, missing in _models_of(sizes, revision.snapshot_path):
                weights = [path for path in parts if _holds_weights(path)]
                model = LocalModel(
                    f"{name}:{_short(name, what, sizes)}" if what else name,
                    revision.snapshot_path / parts[0] if what else revision.snapshot_path,
                    sum(sizes[path] for path in parts),
                    max(used[path] for path in weights),
                    missing,
                    name,
                    revision.commit_hash,
                    tuple(revision.snapshot_path / path for path in parts),
                )
                if model.name in seen and (known := model.published_as):
                    model = replace(model, name=known.names[0])
                if model.name not in seen:
                    seen.add(model.name)
                    yield model
        halves = [half.stat() for half in folder.glob("blobs/*.incomplete")]
        if halves and not seen:
            n_bytes = sum(blob.stat().st_size for blob in folder.glob("blobs/*"))
            at = max(half.st_mtime for half in halves)
            yield LocalModel(name, folder, n_bytes, at, "the rest of a download: deltic pull goes on with it", name)


def _in_directory(directory: Path, depth: int) -> Iterator[LocalModel]:
    """Finds those in a directory and in the folders below it."""
    with contextlib.suppress(OSError):  # a folder of somebody else
        entries = sorted(directory.iterdir())
        is_model = any(entry.suffix == ".safetensors" for entry in entries)  # with what lies below
        files = [file for file in (directory.rglob("*") if is_model else entries) if file.is_file()]
        stats = {file.relative_to(directory).as_posix(): file.stat() for file in files}
        sizes = {name: stat.st_size for name, stat in stats.items()}
        for what, parts, missing in _models_of(sizes, directory):
            path = directory / parts[0] if what else directory
            used = max(stats[name].st_atime for name in parts if _holds_weights(name))
            yield LocalModel(str(path), path, sum(sizes[name] for name in parts), used, missing)
        for entry in entries:
            if depth and not is_model and entry.is_dir() and not entry.name.startswith("."):
                yield from _in_directory(entry, depth - 1)


def _holds_weights(path: str) -> bool:
    return path.lower().endswith((SUFFIX, ".safetensors"))


def _models_of(sizes: Mapping[str, int], root: Path) -> Iterator[tuple[str, list[str], str]]:
    """Yields each model among the files of a folder: the `set_name` of a GGUF model, "" for one of
    safetensors; its files, that of the weights first; and what is missing.
    """
    models = models_among(sizes)
    if any(path.endswith(".safetensors") and "/" not in path for path in sizes):
        aside = {path for path in sizes if path.lower().endswith(SUFFIX)}
        yield "", [path for path in sizes if path not in aside], _missing(sizes, root)
    for what, parts in models.items():
        n = re.search(r"-of-(\d{5})\.", parts[0])
        lacks = int(n[1]) - len(parts) if n else 0
        yield what, parts + towers_of(parts[0], sizes), f"{lacks} of its {int(n[1])} files" if n and lacks else ""


def towers_of(gguf: str, files: Iterable[str]) -> list[str]:
    """Returns the file of the vision tower of a GGUF model, where its folder among these files has one."""
    folder, sign, _ = gguf.rpartition("/")
    tower = tower_among(path.rpartition("/")[2] for path in files if path.rpartition("/")[0] == folder)
    return [folder + sign + tower] if tower else []


def _missing(sizes: Mapping[str, int], root: Path) -> str:
    """Names the files that a model of safetensors lacks."""
    wanted = {"config.json"}
    if INDEX in sizes:
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            wanted |= set(json.loads((root / INDEX).read_bytes())["weight_map"].values())
    return ", ".join(sorted(name for name in wanted if isinstance(name, str) and name not in sizes))


def _short(name: str, what: str, files: Iterable[str]) -> str:
    """Names a GGUF model of a repository by its bits, where these mean no other of its files."""
    bits = _BITS.search(what)
    if bits and set_name(chosen(name, files, bits[0])[0]) == what:
        return bits[0]
    return what + SUFFIX


class Removal(NamedTuple):
    """Deletion of a model, before it is done."""

    n_bytes: int
    """Bytes that it frees."""
    run: Callable[[], None]
    """Deletes. Raises CheckpointError where that was not allowed."""


def removal(model: LocalModel, download_dir: Path | None = None) -> Removal:
    """Prepares the deletion of a model of the hub's cache, in all of its revisions but one that has a name of
    its own. Files that another model there needs are kept.

    Raises CheckpointError for one that is not in the cache: what somebody else put there is theirs to delete.
    """
    from huggingface_hub import scan_cache_dir

    cache = cache_folder(download_dir)
    if not model.path.is_relative_to(cache):
        raise CheckpointError(f"{model.name}: not in the download cache ({cache}). Delete its files yourself.")
    folder, info = cache / model.path.relative_to(cache).parts[0], scan_cache_dir(cache)
    revisions = [revision for repo in info.repos if repo.repo_path == folder for revision in repo.revisions]
    halves = sum(half.stat().st_size for half in folder.glob("blobs/*.incomplete"))
    others = [other for other in _in_cache(download_dir) if folder in other.path.parents and other.path != model.path]
    if not revisions:  # nothing has wholly come
        n_bytes = sum(blob.stat().st_size for blob in folder.glob("blobs/*"))
        return Removal(n_bytes, partial(_run, model, [folder], partial(shutil.rmtree, folder)))
    if not model.files:
        raise CheckpointError(f"{model.name}: in the download cache. deltic rm takes the name that deltic list has.")
    if not others:
        whole = info.delete_revisions(*(revision.commit_hash for revision in revisions))
        return Removal(whole.expected_freed_size + halves, partial(_run, model, model.files, whole.execute))

    def within(file: Path) -> tuple[str, ...]:
        return file.relative_to(folder).parts[2:]  # behind `snapshots` and the commit

    theirs = {file: other.revision for other in others for file in other.files}
    shared = {within(file) for file, revision in theirs.items() if revision == model.revision}
    gone = {within(file) for file in model.files} - shared
    files = [file for revision in revisions for file in revision.files]
    links = {file.file_path: file for file in files if within(file.file_path) in gone and file.file_path not in theirs}
    needed = {file.blob_path for file in files if file.file_path not in links}
    blobs = {file.blob_path: file.size_on_disk for file in links.values() if file.blob_path not in needed}

    def unlink() -> None:
        for path in (*links, *blobs):
            path.unlink(missing_ok=True)

    return Removal(sum(blobs.values()), partial(_run, model, list(links), unlink))


def _run(model: LocalModel, gone: Sequence[Path], delete: Callable[[], None]) -> None:
    """Deletes a model. gone: paths that are not there afterwards. Raises CheckpointError."""
    with contextlib.suppress(OSError):  # which the library passes over, too
        delete()
    if any(path.exists() for path in gone):
        raise CheckpointError(f"{model.name}: not all of it could be deleted. See who may write to {model.path}.")
