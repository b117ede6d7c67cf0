"""A directory for the sockets between a server and its engine process, which nobody else may enter.

A server that is killed cannot remove its own: the next one does. Whoever uses a directory holds a lock on it,
which the kernel gives back when the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

import zmq

PREFIX = "deltic-engine-"

MAX_NAME_LENGTH = 24
"""Characters of the longest name of a socket in it."""

SHORT = Path("/tmp")
"""Directory for the sockets when TMPDIR is too long for the name of a socket."""


class SocketDirectory:
    """A directory in TMPDIR, this process's until `close`."""

    def __init__(self) -> None:
        """Raises OSError when there is no place for it."""
        parent = _parent()
        remove_stale(parent)
        self.path, self._lock = _locked(parent)

    def close(self) -> None:
        """Removes it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_stale(parent: Path) -> None:
    """Removes the directories in `parent` that this user's servers left when they were killed: those that
    nobody has locked and that hold nothing but sockets.
    """
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, in use, or gone meanwhile
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                _remove_if_stale(path, directory)
            finally:
                os.close(directory)


def _remove_if_stale(path: Path, directory: int) -> None:
    """directory: its descriptor. Raises OSError when it is in use."""
    if os.fstat(directory).st_uid != os.getuid():
        return
    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    names = os.listdir(directory)
    if all(stat.S_ISSOCK(os.lstat(path / name).st_mode) for name in names):
        for name in names:
            os.unlink(name, dir_fd=directory)
        path.rmdir()


def _parent() -> Path:
    """Raises OSError."""
    parent = Path(tempfile.gettempdir())
    length = len(os.fsencode(parent)) + len(f"/{PREFIX}12345678/") + MAX_NAME_LENGTH
    if length <= zmq.IPC_PATH_MAX_LEN:
        return parent
    if os.access(SHORT, os.W_OK | os.X_OK):
        return SHORT
    raise OSError(
        errno.ENAMETOOLONG,
        f"the name of TMPDIR ({parent}) is too long for a socket in it, and {SHORT} cannot be written; set TMPDIR to a shorter one",
    )


def _locked(parent: Path) -> tuple[Path, int]:
    """A new directory that only its owner can enter, and the descriptor that holds its lock.

    Raises OSError.
    """
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # Another server may take it for a stale one before it is locked.
        with contextlib.suppress(FileNotFoundError):
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(directory, fcntl.LOCK_EX)
                is_ours = os.path.samestat(os.fstat(directory), path.stat())
            except OSError:
                os.close(directory)
                raise
            if is_ours:
                return path, directory
            os.close(directory)
