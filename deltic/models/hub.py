"""The hub: a model's files, downloaded into the cache of huggingface_hub.

    python -m deltic.models.hub JSON

downloads what a Download says in a process of its own, which can be ended at any moment: the library's
threads cannot. It writes lines of JSON, each a Progress, the last an Outcome, and ends when its standard
input does.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from fnmatch import fnmatch
from pathlib import Path

import msgspec

from deltic.config import MayPass
from deltic.models.fields import CheckpointError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

LOOK_S = 0.5
"""How often it is looked what has come."""

TELL_AFTER_S = 1.0
"""What is in the cache takes less, and needs no word."""


class Download(msgspec.Struct, frozen=True):
    """What is to be there."""

    name: str
    files: tuple[str, ...]
    """Patterns of their names."""
    revision: str | None = None
    """A branch, a tag or a commit; None: the hub's default."""
    directory: str | None = None
    """Where the cache is; None: where HF_HOME says."""


class Progress(msgspec.Struct, tag="progress"):
    """How much has come."""

    done_bytes: int
    total_bytes: int


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


def download(wanted: Download) -> Path:
    """The directory of the files, which are downloaded if they are not there. Raises CheckpointError."""
    import huggingface_hub  # here, because most starts need no hub and it costs a fifth of a second
    from huggingface_hub import errors

    name, given = wanted.name, wanted.revision
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=given, cache_dir=wanted.directory, allow_patterns=list(wanted.files)
            )
        )
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
            f"{name}: the download failed ({said}); start again: files that have come whole are kept"
        ) from error


class _Watch:
    """Bytes that come into the cache, and how many there will be."""

    def __init__(self, wanted: Download) -> None:
        """Of the time before the download."""
        from huggingface_hub.constants import HF_HUB_CACHE

        self._wanted = wanted
        folder = "models--" + wanted.name.replace("/", "--")
        self._blobs = Path(wanted.directory or HF_HUB_CACHE, folder, "blobs")
        self._before = set(self._sizes())

    def n_missing_bytes(self) -> int:
        """Asks the hub. Raises what its library does."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        wanted = self._wanted
        listed = HfApi().list_repo_tree(wanted.name, recursive=True, revision=wanted.revision)
        files = [entry for entry in listed if isinstance(entry, RepoFile)]
        wanted_files = [file for file in files if any(fnmatch(file.path, each) for each in wanted.files)]
        blobs = {file.lfs.sha256 if file.lfs else file.blob_id: file.size for file in wanted_files}
        return sum(size for blob, size in blobs.items() if blob not in self._before)

    def n_come_bytes(self) -> int:
        return sum(size for blob, size in self._sizes().items() if blob not in self._before)

    def _sizes(self) -> dict[str, int]:
        sizes = {}
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._blobs):
                with contextlib.suppress(OSError):  # renamed meanwhile
                    stat = entry.stat()
                    # Some files are made at full size, empty.
                    sizes[entry.name] = min(stat.st_size, stat.st_blocks * 512)
        return sizes


def _tell(watch: _Watch) -> None:
    """Writes how much has come, while the download goes on."""
    time.sleep(TELL_AFTER_S)
    total = 0
    with contextlib.suppress(Exception):  # then without: what is wrong with the hub the download will say
        total = watch.n_missing_bytes()
    while True:
        _say(Progress(watch.n_come_bytes(), total))
        time.sleep(LOOK_S)


def _say(line: Progress | Outcome) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()


_OWN_PART = re.compile(r"\.[0-9a-f]{8}\.incomplete$")
"""A part that nobody can go on with: its name is one process's."""


def _end_with_parent() -> None:
    """Ends the process when whoever started it closes its input, or is gone."""
    sys.stdin.buffer.read()
    with contextlib.suppress(OSError):
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(link)
                if _OWN_PART.search(target):
                    os.unlink(target)
    os._exit(1)


def main() -> None:
    wanted = msgspec.json.decode(sys.argv[1], type=Download)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threading.Thread(target=_tell, args=(_Watch(wanted),), daemon=True).start()
    try:
        outcome = Outcome(directory=str(download(wanted)))
    except CheckpointError as error:
        outcome = Outcome(error=str(error), may_pass=isinstance(error, DownloadFailed))
    _say(outcome)
    os._exit(0)  # the library's threads may have files to finish


if __name__ == "__main__":
    main()
