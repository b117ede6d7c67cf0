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
import json
import os
import queue
import re
import shutil
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from deltic.config import MayPass
from deltic.models.fields import CheckpointError, of_another_family
from deltic.models.gguf import SUFFIX, chosen, has_header, models_among, tower_among

_SITE = re.compile(r"(https?://)?(www\.)?(hf\.co|huggingface\.co)/|hf://", re.IGNORECASE)
"""Text in front of a model's name that was copied from a browser or from another program."""

_HUB_NAME = re.compile(
    r"(?P<repository>[\w.-]+/[\w.-]+)(:(?P<what>[\w./-]+)|/(?P<kind>tree|blob|resolve)/(?P<revision>[^/]+)(/(?P<path>.+))?)?"
)

_HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")

LOOK_S = 0.5
"""Seconds between two reports of what has come."""

TELLING_S = 10.0
"""Seconds that the hub may take to tell its files, as the library has it."""

N_AT_ONCE = 8
"""Files that come at the same time, as the library has it."""

N_BREAKS = 20
"""Times that a file is asked for again where the library, which goes on through most breaks, has given up."""

MAX_HTTP_BYTES = 50_000_000_000
"""The biggest file that the hub gives over plain HTTP."""

CHUNK_BYTES = 1 << 18
"""Bytes of a file that are written or read at once. A break may cost them."""

HEAD_BYTES = 1 << 16
"""Bytes that an outline asks for first of a file of weights: the header of most."""

MAX_GAP_BYTES = 1 << 14
"""Largest gap between two parts of a file that are asked for together, in bytes."""

_VOCABULARY = ("tokenizer.json", "vocab.json", "merges.txt")
"""Small files of a model that are not small."""

_DECIDING = ("weight_shape", "weight_g_idx")
"""Tensors whose values a plan looks at; `g_idx`, too, where the configuration speaks of an order."""

TELL_AFTER_S = 1.0
"""Seconds before a download is told: what is in the cache takes less."""


class Download(msgspec.Struct, frozen=True):
    """Request of a download: a model, and the files wanted."""

    name: str
    """owner/model; with `:Q4_K_M`: of its GGUF files those of these bits."""
    files: tuple[str, ...]
    """Patterns of their names. Where there are GGUF files and no safetensors: those of one model instead, and
    of its vision tower.
    """
    revision: str | None = None
    """A branch, a tag or a commit; None: the hub's default."""
    directory: str | None = None
    """Directory of the cache. None: where HF_HOME says."""


class Part(msgspec.Struct):
    """Progress of one file that was not in the cache."""

    name: str
    total_bytes: int
    done_bytes: int = 0
    checked_bytes: int = 0
    stage: Literal["waiting", "downloading", "checking", "done"] = "waiting"


class Progress(msgspec.Struct, tag="progress"):
    """Progress of a download: bytes that have come, and the files under way."""

    done_bytes: int
    total_bytes: int
    files: list[Part] = []


class Outcome(msgspec.Struct, tag="outcome"):
    """The directory of the files, or why there is none."""

    directory: str | None = None
    error: str | None = None
    may_pass: bool = False
    """True if the error is a DownloadFailed."""


class DownloadFailed(CheckpointError, MayPass):
    """The hub, the way to it, or the disk: nothing is wrong with the name."""


class HubName(NamedTuple):
    """A model on the hub."""

    repository: str
    what: str = ""
    """Choice among its GGUF files: bits, as `Q4_K_M`, or the path of one."""
    revision: str | None = None
    """Revision, where the name is an address of a branch, a tag or a commit."""

    def __str__(self) -> str:
        return f"{self.repository}:{self.what}" if self.what else self.repository


def hub_name(text: str) -> HubName | None:
    """Reads a name as people type and paste it: owner/model, owner/model:Q4_K_M, owner/model:FILE.gguf,
    hf.co/... or the address in a browser, in quotes or not. None: it has none of these forms.
    """
    bare = _SITE.sub("", text.strip(" \t\n\"'`<>\u2018\u2019\u201c\u201d"), count=1)
    match = _HUB_NAME.fullmatch(urllib.parse.unquote(re.split(r"[?#]", bare)[0]).rstrip("/"))
    if match is None or bare.startswith("."):
        return None
    path = match["path"] or ""
    of_path = path if path.lower().endswith(SUFFIX) else path.rpartition("/")[2] if match["kind"] == "tree" else ""
    return HubName(
        match["repository"], match["what"] or of_path, match["revision"] if match["revision"] != "main" else None
    )


def is_hub_name(name: str) -> bool:
    """Returns whether this can only be a name on the hub: it has the form, and nothing here has the name."""
    return hub_name(name) is not None and not Path(name).expanduser().exists()


def wanted_of(text: str, files: tuple[str, ...], revision: str | None, directory: Path | None) -> Download:
    """Makes the download of a name for which `is_hub_name` holds. revision: in place of the name's."""
    name = hub_name(text)
    assert name is not None
    folder = str(directory.expanduser()) if directory else None
    return Download(str(name), files, revision or name.revision, folder)


def download(wanted: Download, parts: list[Part] | None = None, *, only_here: bool = False) -> Path:
    """The directory of the files, or the first file of a GGUF model. They are downloaded if they are not
    there. `parts` gets those, and is kept up to date. only_here: the cache is looked at, and nothing else.
    Raises CheckpointError.
    """
    (name, _, quant), given = wanted.name.partition(":"), wanted.revision
    with _explained(name, given):
        import huggingface_hub  # here, because most starts need no hub and it costs a fifth of a second
        from huggingface_hub import errors

        told, failed = None, None
        try:
            told = None if only_here else told_of(name, given)
        except Exception as error:  # all of it may be in the cache
            failed = error
        files, gguf = [] if quant else list(wanted.files), list[str]()
        if told is not None:
            _refuse_others(wanted, told)
            gguf = _gguf_files(name, quant, [file.rfilename for file in told.siblings or ()])
            files = list(map(glob.escape, gguf + _tower_files(gguf, told))) or files
            _fill(name, told, files, wanted.directory, [] if parts is None else parts)
            _refer(_cache_of(name, wanted.directory) / "refs", given or "main", str(told.sha))
        try:
            folder = Path(
                huggingface_hub.snapshot_download(
                    name,
                    revision=(told and told.sha) or given,  # for what it asks of a name it waits for ever
                    cache_dir=wanted.directory,
                    allow_patterns=files,
                    local_files_only=told is None,
                )
            )
        except errors.LocalEntryNotFoundError as error:
            if isinstance(failed, errors.RepositoryNotFoundError | errors.RevisionNotFoundError):
                raise failed from None
            raise error from failed
        if told is None:  # the hub cannot be asked: what the cache has decides
            gguf = _gguf_files(name, quant, [path.relative_to(folder).as_posix() for path in folder.rglob("*.*")])
        return folder / gguf[0] if gguf else folder


@contextlib.contextmanager
def _explained(name: str, given: str | None) -> Iterator[None]:
    """Makes a CheckpointError of what the library raises. given: the revision."""
    from huggingface_hub import errors

    try:
        yield
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
        why = f" ({_said(error.__cause__)})" if error.__cause__ else ""
        raise DownloadFailed(
            f"{name}{f' at {given}' if given else ''}: not a directory, not (or not wholly) in the download cache, and the hub "
            f"cannot be reached{why}; go online once, or give the path of a checkpoint directory"
        ) from error
    except Exception as error:  # the hub's own, the system's, and those of whichever HTTP library it has
        raise DownloadFailed(
            f"{name}: the download failed ({_said(error)}); start again: it goes on from what has come"
        ) from error


def _said(error: BaseException) -> str:
    """Returns the words of an error that a library raised."""
    if "Timeout" in type(error).__name__:
        return f"it has not answered for {TELLING_S:g} s"
    return " ".join(str(error).split()) or type(error).__name__


def told_of(name: str, revision: str | None) -> Any:
    """Asks the hub for a model and its files. It hears nothing of this machine, and has TELLING_S to answer:
    this, and what the library asks it later. Raises what the library does.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    constants.HF_HUB_DISABLE_TELEMETRY = True  # else the library tells which torch, and which agent, is here
    get_session().timeout = TELLING_S
    return HfApi().model_info(name, revision=revision, files_metadata=True, timeout=TELLING_S)


def _refuse_others(wanted: Download, told: object) -> None:
    """Raises CheckpointError for weights of a model that the hub knows to be of another family, before they
    come.
    """
    config, gguf = getattr(told, "config", None) or {}, getattr(told, "gguf", None) or {}
    names = [*(config.get("architectures") or ()), gguf.get("architecture")]
    said = next(filter(None, map(of_another_family, names)), "")
    if said and any(fnmatch("model.safetensors", each) for each in wanted.files):
        raise CheckpointError(f"{wanted.name}: {said}")


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
    commit, folder = told.sha or "", _cache_of(name, directory)
    missing: dict[str, Part] = {}
    for file in told.siblings or ():
        path, blob = file.rfilename, (file.lfs.sha256 if file.lfs else file.blob_id) or ""
        is_safe = _HASH.fullmatch(blob) and _HASH.fullmatch(commit) and _is_safe(path)
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


def _cache_of(name: str, directory: str | None) -> Path:
    """The folder of a model in the cache."""
    from huggingface_hub import constants

    return Path(directory or constants.HF_HUB_CACHE, "models--" + name.replace("/", "--"))


def _refer(refs: Path, revision: str, commit: str) -> None:
    """Writes which commit a branch or a tag is, where the library looks without the hub."""
    if _HASH.fullmatch(commit) and not _HASH.fullmatch(revision) and _is_safe(revision):
        (file := refs / revision).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(commit)


def _is_safe(path: str) -> bool:
    """Returns whether a path that the hub tells leads nowhere else."""
    return not {"..", "/"} & {*Path(path).parts}


def outline(wanted: Download, folder: Path, *, has_tokenizer: bool = False) -> Path:
    """Does what `download` does for a model that is to be planned: it gets the files without weights and
    vocabulary. Files of weights have their whole size there, and their header, and behind it nothing, which
    takes no room. What the cache has is linked. Some kilobytes are read of a file, of a GGUF file more, whose
    header has the vocabulary.

    folder: where they are put. has_tokenizer: it is another's. Where the hub cannot be reached, what the
    cache has decides. Raises CheckpointError.
    """
    from huggingface_hub import errors
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    (name, _, what), given = wanted.name.partition(":"), wanted.revision
    disable_progress_bars()
    with _explained(name, given):
        try:
            told = told_of(name, given)
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            raise
        except Exception:  # no way to the hub
            return download(wanted, only_here=True)
        _refuse_others(wanted, told)
        sizes = {file.rfilename: file.size for file in told.siblings or () if file.size is not None}
        gguf = _gguf_files(name, what, list(sizes))
        files = gguf + _tower_files(gguf, told)
        if not gguf:
            files = [file for file in sizes if any(fnmatch(file, each) for each in wanted.files)]
            if not (has_tokenizer or "tokenizer.json" in sizes or {"vocab.json", "merges.txt"} <= sizes.keys()):
                raise CheckpointError(f"{name}: no tokenizer.json and no vocab.json with merges.txt; give --tokenizer")
        root = folder / _cache_of(name, None).name / "snapshots" / str(told.sha)
        cached = _cache_of(name, wanted.directory) / "snapshots" / str(told.sha)

        def sketch(path: str) -> None:
            (target := root / path).parent.mkdir(parents=True, exist_ok=True)
            if (cached / path).is_file() and (cached / path).stat().st_size == sizes[path]:
                target.symlink_to(cached / path)
            else:
                _sketch(name, path, str(told.sha), sizes[path] or 0, target)

        small = [file for file in files if _is_safe(file) and Path(file).name not in _VOCABULARY]
        with ThreadPoolExecutor(N_AT_ONCE) as pool:  # weights last: how they lie is in the configuration
            for some in (False, True):
                list(pool.map(sketch, [file for file in small if _holds_weights(file) == some]))
        return root / gguf[0] if gguf else root


def _holds_weights(file: str) -> bool:
    return file.lower().endswith((SUFFIX, ".safetensors"))


def _sketch(name: str, path: str, commit: str, n_bytes: int, target: Path) -> None:
    """Writes a file as `outline` has it. Raises DownloadFailed, and what the library does."""
    from huggingface_hub.file_download import http_get

    url, headers = _address(name, path, commit)

    def get(begin: int, end: int) -> bytes:
        if begin >= (end := min(end, n_bytes)):
            return b""
        part = _Bounded()
        part.n_most, ranged = end - begin, headers | {"Range": f"bytes={begin}-{end - 1}"}
        http_get(url, part, headers=ranged, expected_size=end - begin, displayed_filename=path)
        return part.getvalue()

    with target.open("wb") as out:
        if not _holds_weights(path):
            out.write(get(0, n_bytes))
            return
        start = get(0, HEAD_BYTES)
        if path.lower().endswith(SUFFIX):
            while len(start) < n_bytes and not has_header(target, start, n_bytes):
                start += get(len(start), 2 * len(start))
        else:
            start += get(len(start), 8 + int.from_bytes(start[:8], "little"))
        out.write(start)
        out.truncate(n_bytes)
        if not path.lower().endswith(SUFFIX):
            for begin, end in _deciding(start, target.parent):
                out.seek(begin)
                out.write(get(begin, end))


def _address(name: str, path: str, commit: str) -> tuple[str, dict[str, str]]:
    """The address of a file, and the headers with which ranges of what is stored are asked for."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
    return hf_hub_url(name, path, revision=commit), build_hf_headers() | {"Accept-Encoding": "identity"}


class _Bounded(io.BytesIO):
    """Takes no more than it was asked for."""

    n_most = 0

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > self.n_most:
            raise DownloadFailed(
                "the hub, or a proxy on the way, sends whole files where a part is asked for; download the model, and plan its "
                "directory"
            )
        return super().write(data)


def _deciding(start: bytes, directory: Path) -> Iterator[tuple[int, int]]:
    """Yields the ranges of a safetensors file with tensors whose values decide. Ranges that are near together
    are one.

    start: of the file, with its header, which is not believed.
    """
    config = directory / "config.json"
    has_order = config.exists() and re.search(rb'"desc_act"\s*:\s*true', config.read_bytes())
    names = (*_DECIDING, "g_idx") if has_order else _DECIDING
    try:
        n = 8 + int.from_bytes(start[:8], "little")
        tensors = {name: told for name, told in json.loads(start[8:n]).items() if name.rpartition(".")[2] in names}
        spans = sorted((n + begin, n + end) for begin, end in (told["data_offsets"] for told in tensors.values()))
    except (ValueError, TypeError, KeyError, AttributeError):
        return  # who reads the header says what is wrong
    while spans:
        begin, end = spans.pop(0)
        while spans and spans[0][0] - end <= MAX_GAP_BYTES:
            end = max(end, spans.pop(0)[1])
        yield begin, end


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
    from huggingface_hub.file_download import http_get

    url, headers = _address(name, part.name, commit)
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
    """Returns whether the file is the blob of this name."""
    part.stage, part.checked_bytes = "checking", 0

    def told(n_bytes: int) -> None:
        part.checked_bytes = n_bytes

    return digest(file, part.total_bytes, told, is_big=len(blob) == 64) == blob


def digest(file: Path, n_bytes: int, told: Callable[[int], None], *, is_big: bool) -> str:
    """Hashes a file of n_bytes as the hub does: the SHA-256 of a big file, git's hash of a small one.

    told: is called with the bytes done. Raises OSError.
    """
    found = hashlib.sha256() if is_big else hashlib.sha1(b"blob %d\0" % n_bytes, usedforsecurity=False)
    done = 0
    with file.open("rb", buffering=0) as opened:
        while data := opened.read(CHUNK_BYTES):
            found.update(data)
            done += len(data)
            told(done)
    return found.hexdigest()


def published_hash(file: Path) -> str | None:
    """Returns the hash that the hub said of a file when it was downloaded: the name of its blob in the
    cache, or what the library wrote down beside a directory of its own. None: nobody knows.
    """
    blob = file.resolve()
    if blob.parent.name == "blobs" and _HASH.fullmatch(blob.name):
        return blob.name
    said = file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
    lines = said.read_text(encoding="utf-8").splitlines() if said.is_file() else []
    return lines[1] if len(lines) > 1 and _HASH.fullmatch(lines[1]) else None


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
