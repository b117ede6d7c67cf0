"""The hub: a model's files, downloaded into the cache of huggingface_hub.

    python -m deltic.models.hub JSON

downloads what a Download says in a process of its own, which can be ended at any moment: the library's
threads cannot. It writes lines of JSON, each a Progress, the last an Outcome, and ends when its standard
input does.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import os
import queue
import re
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import msgspec

from deltic.config import MayPass
from deltic.models.fields import CheckpointError
from deltic.models.gguf import chosen, models_among, tower_among

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")

_HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")

LOOK_S = 0.5
"""How often it is told what has come."""

TELLING_S = 10.0
"""How long the hub may take to tell its files, as the library has it."""

N_AT_ONCE = 8
"""Files that come at the same time, as the library has it."""

N_BREAKS = 20
"""How often a file is asked for where the library, which goes on through most breaks, has given up."""

MAX_HTTP_BYTES = 50_000_000_000
"""The biggest file that the hub gives over plain HTTP."""

CHUNK_BYTES = 1 << 18
"""What of a file is written or read at once; what a break may cost."""

TELL_AFTER_S = 1.0
"""What is in the cache takes less, and needs no word."""


class Download(msgspec.Struct, frozen=True):
    """What is to be there."""

    name: str
    """owner/model; with `:Q4_K_M`: of its GGUF files those of these bits."""
    files: tuple[str, ...]
    """Patterns of their names. Where there are GGUF files and no safetensors: those of one model instead, and
    of its vision tower.
    """
    revision: str | None = None
    """A branch, a tag or a commit; None: the hub's default."""
    directory: str | None = None
    """Where the cache is; None: where HF_HOME says."""


class Part(msgspec.Struct):
    """One file that was not in the cache."""

    name: str
    total_bytes: int
    done_bytes: int = 0
    checked_bytes: int = 0
    stage: Literal["waiting", "downloading", "checking", "done"] = "waiting"


class Progress(msgspec.Struct, tag="progress"):
    """How much has come, and the files under way."""

    done_bytes: int
    total_bytes: int
    files: list[Part] = []


class Outcome(msgspec.Struct, tag="outcome"):
    """The directory of the files, or why there is none."""

    directory: str | None = None
    error: str | None = None
    may_pass: bool = False
    """Whether that is a DownloadFailed."""


class DownloadFailed(CheckpointError, MayPass):
    """The hub, the way to it, or the disk: nothing is wrong with the name."""


def is_hub_name(name: str) -> bool:
    """Whether it can only be a name on the hub: of its form, and nothing here."""
    return not Path(name).expanduser().exists() and bool(_HUB_NAME.fullmatch(name)) and not name.startswith(".")


def download(wanted: Download, parts: list[Part] | None = None) -> Path:
    """The directory of the files, or the first file of a GGUF model. They are downloaded if they are not
    there; `parts` gets those, and is kept up to date. Raises CheckpointError.
    """
    import huggingface_hub  # here, because most starts need no hub and it costs a fifth of a second
    from huggingface_hub import errors

    (name, _, quant), given = wanted.name.partition(":"), wanted.revision
    try:
        told, files, gguf = _told(name, given), [] if quant else list(wanted.files), list[str]()
        if told is not None:
            gguf = _gguf_files(name, quant, [file.rfilename for file in told.siblings or ()])
            files = list(map(glob.escape, gguf + _tower_files(gguf, told))) or files
            _fill(name, told, files, wanted.directory, [] if parts is None else parts)
        folder = Path(
            huggingface_hub.snapshot_download(name, revision=given, cache_dir=wanted.directory, allow_patterns=files)
        )
        if told is None:  # the hub cannot be asked: what the cache has decides
            gguf = _gguf_files(name, quant, [path.relative_to(folder).as_posix() for path in folder.rglob("*.*")])
        return folder / gguf[0] if gguf else folder
    except CheckpointError:
        raise
    except errors.GatedRepoError as error:
        raise CheckpointError(f"{name}: gated on the hub; accept its terms there and set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{name}: has no revision {given!r} on the hub; give a branch, a tag or a whole commit"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(f"{name}: neither a directory here nor a model on the hub") from error
    except errors.LocalEntryNotFoundError as error:
        raise DownloadFailed(
            f"{name}{f' at {given}' if given else ''}: not a directory, not (or not wholly) in the download cache, and the hub "
            "cannot be reached; go online once, or give the path of a checkpoint directory"
        ) from error
    except Exception as error:  # the hub's own, the system's, and those of whichever HTTP library it has
        said = " ".join(str(error).split()) or type(error).__name__
        raise DownloadFailed(
            f"{name}: the download failed ({said}); start again: it goes on from what has come"
        ) from error


def _told(name: str, revision: str | None) -> Any:
    """What the hub tells of a model and its files; None: nothing (it cannot be reached, or wants a token).
    Then all is left to the library, which says what is wrong or finds everything in the cache.
    """
    from huggingface_hub import HfApi

    try:
        return HfApi().model_info(name, revision=revision, files_metadata=True, timeout=TELLING_S)
    except Exception:
        return None


def _gguf_files(name: str, quant: str, files: Sequence[str]) -> list[str]:
    """The files of the GGUF model that is wanted of a repository's, [] where safetensors are."""
    if not quant and (any(fnmatch(file, "*.safetensors") for file in files) or not models_among(files)):
        return []
    return chosen(name, files, quant)


def _tower_files(gguf: Sequence[str], told: Any) -> list[str]:
    """The file of the vision tower of a GGUF model, where its folder in the repository has one."""
    folder = gguf[0].rpartition("/")[0] if gguf else ""
    split = [file.rfilename.rpartition("/") for file in told.siblings or () if gguf]
    tower = tower_among(name for where, _, name in split if where == folder)
    return [f"{folder}/{tower}" if folder else tower] if tower else []


def _fill(name: str, told: Any, files: Sequence[str], directory: str | None, parts: list[Part]) -> None:
    """Downloads the blobs that the cache has not. The library then finds them, and makes a snapshot of
    them.

    Newer versions of the library begin a file again after each end of the process, and look at no hash.
    told: by the hub; files: patterns of names. Raises DownloadFailed, OSError, and what the library does.
    """
    from huggingface_hub import constants

    commit = told.sha or ""
    folder = Path(directory or constants.HF_HUB_CACHE, "models--" + name.replace("/", "--"))
    missing: dict[str, Part] = {}
    for file in told.siblings or ():
        path, blob = file.rfilename, (file.lfs.sha256 if file.lfs else file.blob_id) or ""
        is_safe = _HASH.fullmatch(blob) and _HASH.fullmatch(commit) and not {"..", "/"} & {*Path(path).parts}
        if file.size is None or not is_safe or not any(fnmatch(path, each) for each in files):
            continue
        places = (folder / "snapshots" / commit / path, folder / "blobs" / blob)
        for place in places:
            if place.is_file() and place.stat().st_size != file.size:
                place.unlink(missing_ok=True)  # cut short by a full disk or a loss of power
        if not any(place.is_file() for place in places):
            missing[blob] = Part(path, file.size)
    if missing:
        (folder / "blobs").mkdir(parents=True, exist_ok=True)
        _fetch_all(name, commit, folder, missing, parts)


def _fetch_all(name: str, commit: str, folder: Path, missing: dict[str, Part], parts: list[Part]) -> None:
    """Downloads files, by their blobs, some at a time. Raises the first error."""
    for blob, part in missing.items():
        with contextlib.suppress(OSError):
            part.done_bytes = _half(folder, blob).stat().st_size
    parts += missing.values()
    n_bytes = sum(max(0, part.total_bytes - part.done_bytes) for part in missing.values())
    if n_bytes > (n_free := shutil.disk_usage(folder).free):
        raise DownloadFailed(
            f"{name}: {n_bytes / 1e9:.2f} GB are to come, but the disk of {folder} has {n_free / 1e9:.2f} GB free; "
            "make room, or choose another disk with --download-dir"
        )
    slots, ended = threading.Semaphore(N_AT_ONCE), queue.SimpleQueue[Exception | None]()
    failed = threading.Event()

    def work(blob: str, part: Part) -> None:
        with slots:
            try:
                if not failed.is_set():
                    _fetch(part, name, commit, folder, blob)
                ended.put(None)
            except Exception as error:
                failed.set()
                ended.put(error)

    for blob, part in missing.items():  # in no pool, whose threads would outlive a Ctrl-C
        threading.Thread(target=work, args=(blob, part), daemon=True).start()
    for _ in missing:
        if (error := ended.get()) is not None:
            raise error


def _half(folder: Path, blob: str) -> Path:
    """The file that becomes the blob, named as by the versions of the library that go on with one."""
    return folder / "blobs" / f"{blob}.incomplete"


def _fetch(part: Part, name: str, commit: str, folder: Path, blob: str) -> None:
    """Downloads a file from where it stopped, and checks it, if no other process does.

    Raises DownloadFailed if its hash is not the one that the hub says, and what the library does.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    half, whole = _half(folder, blob), folder / "blobs" / blob
    is_huge = part.total_bytes > MAX_HTTP_BYTES
    part.stage = "downloading"
    lock = folder.parent / ".locks" / folder.name / f"{blob}.lock"  # the library's
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        for left in whole.parent.glob(f"{blob}.*.incomplete") if is_huge else ():
            left.unlink()  # of the library, which cannot go on with it
        while not whole.exists() and not is_huge:
            n_old = _get(part, name, commit, half)
            if _is_right(part, half, blob):
                half.rename(whole)
                break
            half.unlink()
            if not n_old:  # else what was there was wrong, not what has come
                raise DownloadFailed(
                    f"{name}: {part.name} has another hash than the hub says, and was deleted; start again; if that does not "
                    "help, the hub or a proxy on the way changes it"
                )
            part.stage = "downloading"
    if is_huge:  # hf_xet alone brings such a file, and checks it
        hf_hub_download(name, part.name, revision=commit, cache_dir=folder.parent)
    part.done_bytes, part.stage = part.total_bytes, "done"


class _Counted(io.BufferedWriter):
    """The end of a file, which tells how long the file is."""

    part: Part

    def write(self, data: Any, /) -> int:
        n_bytes = super().write(data)
        self.part.done_bytes = self.tell()
        return n_bytes


def _get(part: Part, name: str, commit: str, half: Path) -> int:
    """Downloads what is missing of a file, through breaks for as long as something comes between them.

    Returns how many bytes were there before. Raises what the library does, OSError.
    """
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
    url, headers = hf_hub_url(name, part.name, revision=commit), build_hf_headers()
    headers["Accept-Encoding"] = "identity"  # a range of what is stored
    rest: dict[str, Any] = {"headers": headers, "expected_size": part.total_bytes, "displayed_filename": part.name}
    with _Counted(io.FileIO(half, "a")) as file:
        n_old = file.tell() if file.tell() <= part.total_bytes else file.seek(file.truncate(0))
        file.part, part.done_bytes = part, n_old
        for n_left in reversed(range(N_BREAKS)):
            n_before = part.done_bytes
            try:
                http_get(url, file, resume_size=n_before, **rest)
                break
            except Exception:
                if not n_left or part.done_bytes <= n_before:
                    raise
                time.sleep(1)
        file.flush()
        os.fsync(file.fileno())  # else a loss of power leaves a file of the right size, empty
    return n_old


def _is_right(part: Part, file: Path, blob: str) -> bool:
    """Whether the file is the blob of this name: the SHA-256 of a big file, git's of a small one."""
    part.stage, part.checked_bytes = "checking", 0
    is_big = len(blob) == 64
    digest = hashlib.sha256() if is_big else hashlib.sha1(b"blob %d\0" % part.total_bytes, usedforsecurity=False)
    with file.open("rb", buffering=0) as opened:
        while data := opened.read(CHUNK_BYTES):
            digest.update(data)
            part.checked_bytes += len(data)
    return digest.hexdigest() == blob


def _tell(parts: list[Part]) -> None:
    """Writes how much has come, while the download goes on."""
    time.sleep(TELL_AFTER_S)
    while True:
        done, total = sum(part.done_bytes for part in parts), sum(part.total_bytes for part in parts)
        _say(Progress(done, total, [part for part in parts if part.stage in ("downloading", "checking")]))
        time.sleep(LOOK_S)


def _say(line: Progress | Outcome) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()


def _end_with_parent() -> None:
    """Ends the process when whoever started it closes its input, or is gone."""
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    wanted = msgspec.json.decode(sys.argv[1], type=Download)
    parts: list[Part] = []
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threading.Thread(target=_tell, args=(parts,), daemon=True).start()
    try:
        outcome = Outcome(directory=str(download(wanted, parts)))
    except CheckpointError as error:
        outcome = Outcome(error=str(error), may_pass=isinstance(error, DownloadFailed))
    _say(outcome)
    os._exit(0)  # the library's threads may have files to finish


if __name__ == "__main__":
    main()
