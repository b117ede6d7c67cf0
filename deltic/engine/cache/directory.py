"""The directory of a model's files of the prefix cache: their names and headers, and who else uses it.

Several servers may use one directory, of a network file system as well. Three things tell servers of each
other, each a file of the directory:

- `servers/NAME`, one a server, renewed every BEAT_S (`disk.py`): who is there. Ages are told by the file
  system's own clock: a server compares others' files with the one that it has just renewed.
- `lease`, locked (flock) by the one server that evicts for all. Where it dies, the kernel or the file server
  lets go of the lock, and the next that tries has it. Nothing wrong comes of two that believe to hold it: who
  misses a file computes what was in it.
- the objects themselves, found by their names.

A file system without locks has no lease: then each server evicts what it has written itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from deltic.engine.cache.tree import Kind
from deltic.ops.geometry import PAGE_SIZE
from deltic.private import is_ours, make_private

VERSION = 1
"""Version of the file format, and of the order of the views that make up a page or a state."""

ALIVE_S = 180.0
"""A server is there until its file is so old: a network file system may show a time that is a minute old."""

ABANDONED_S = 3600.0
"""A part file that nobody has written to for this long was left by a writer that was killed."""

KINDS = {Kind.PAGE: 0, Kind.STATE: 1}
HEADER = struct.Struct("<8sII16s16s16sQQI")
"""Magic, version, kind, model, key, parent, depth, bytes of the payload and their crc32."""
HEADER_CRC = struct.Struct("<I")
HEADER_BYTES = 128
_MAGIC = b"DELTIC\r\n"  # with the line end that text transfers damage
_NAME = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})\.([0-9]{1,12})\.(page|state)")
_LEASE, _SERVERS = "lease", "servers"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(slots=True)
class Object:
    """A page or a state, as the name of its file says."""

    kind: Kind
    key: bytes = b""
    """Hash of the tokens up to and including this page: 16 bytes."""
    parent: bytes = b""
    """The key of the page before; of the first: the root's."""
    depth: int = 0
    """Tokens up to and including this page."""


@dataclass(slots=True)
class Entry(Object):
    """Object on disk."""

    n_bytes: int = 0
    """Bytes of the file; 0: not looked at."""
    used_at: float = 0.0
    """Time when the file was written or last read, in seconds since 1970."""


def pack_header(model: bytes, of: Object, size: int, crc: int) -> bytes:
    """The HEADER_BYTES in front of a payload of `size` bytes."""
    header = HEADER.pack(_MAGIC, VERSION, KINDS[of.kind], model, of.key, of.parent, of.depth, size, crc)
    return (header + HEADER_CRC.pack(zlib.crc32(header))).ljust(HEADER_BYTES, b"\0")


def unpack_header(header: bytes) -> tuple[bytes, Entry, int, int]:
    """Model, object (without what only a file has), bytes of the payload and their crc32, of a whole header.

    Raises ValueError for one that is damaged, or of another version.
    """
    magic, version, kind, model, key, parent, depth, size, crc = HEADER.unpack_from(header)
    end = HEADER_CRC.pack(zlib.crc32(header[: HEADER.size])).ljust(HEADER_BYTES - HEADER.size, b"\0")
    if magic != _MAGIC or header[HEADER.size :] != end:
        raise ValueError("damaged")
    if version != VERSION or kind not in KINDS.values():
        raise ValueError(f"of version {version}, and this server reads version {VERSION}")
    return model, Entry(list(KINDS)[kind], key, parent, depth), size, crc


class Directory:
    """The directory of one model. `file` and `header` are for any thread, all else for one at a time."""

    def __init__(self, root: Path, fingerprint: str) -> None:
        self.path = root / fingerprint
        self.model = blake2b(fingerprint.encode(), digest_size=16).digest()
        self.n_others = 0
        """Number of other servers that used the directory when last looked at."""
        self.has_locks = True
        self.now_s = 0.0
        """The file system's time at the last `beat`."""
        self._name = f"{os.uname().nodename[:64]}.{os.getpid()}.{secrets.token_hex(4)}"
        self._lease: io.FileIO | None = None

    @property
    def may_delete(self) -> bool:
        """True if this server evicts: it holds the lease, or there is none."""
        return self._lease is not None or not self.has_locks

    def file(self, of: Object) -> str:
        """Returns the path of an object's file, which need not exist."""
        name = of.key.hex()
        return f"{self.path}/{name[:2]}/{name}.{of.parent.hex()}.{of.depth}.{of.kind}"

    def part(self, file: str) -> str:
        """A name for a file while it is written; two containers may have the same process id."""
        return f"{file}.{secrets.token_hex(4)}.part"

    # Who is there.

    def enter(self) -> None:
        """Makes the directory, and sees whether more can be written. Raises OSError and ConfigError."""
        make_private("--cache-dir", self.path.parent)
        make_private("--cache-dir", self.path)
        probe = self.path / f"{secrets.token_hex(4)}.part"
        probe.touch(0o600)
        probe.unlink()
        self.beat()

    def beat(self, is_followed: bool = True) -> None:
        """Says that this server is there, counts the others, and tries to get the lease.

        is_followed: somebody will evict, so the lease is of use; else it is given up. Raises OSError.
        """
        servers = self.path / _SERVERS
        own = servers / self._name
        try:
            os.utime(own)
        except FileNotFoundError:
            servers.mkdir(0o700, exist_ok=True)
            own.touch(0o600)
        self.now_s = own.stat().st_mtime
        if is_followed:
            self._take_lease()
        else:
            self._drop_lease()
        n_others = 0
        for other in os.scandir(servers):
            with contextlib.suppress(FileNotFoundError):
                if other.name == self._name:
                    continue
                if self.now_s - other.stat(follow_symlinks=False).st_mtime < ALIVE_S:
                    n_others += 1
                elif self.may_delete:
                    os.unlink(other.path)
        self.n_others = n_others

    def leave(self) -> None:
        """The end of `beat`: others need not wait until it is missed."""
        self._drop_lease()
        with contextlib.suppress(OSError):
            (self.path / _SERVERS / self._name).unlink(missing_ok=True)

    def _take_lease(self) -> None:
        if self._lease is not None:
            with contextlib.suppress(OSError):
                if os.fstat(self._lease.fileno()).st_nlink:
                    return
            self._drop_lease()  # somebody removed the file: another may be locked by now
        file = io.FileIO(self.path / _LEASE, "a", opener=lambda path, flags: os.open(path, flags, 0o600))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._lease, self.has_locks = file, True
        except BlockingIOError:
            file.close()
            self.has_locks = True
        except OSError as error:
            file.close()
            if error.errno not in _NO_LOCKS:
                raise
            self.has_locks = False

    def _drop_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            with contextlib.suppress(OSError):
                lease.close()

    # What is there.

    def entries(self, odd: list[str]) -> Iterator[Entry]:
        """The objects, with their sizes and times, and into `odd` what is not one; old part files go."""
        for directory in self.directories(odd):
            for entry, item in self.names(directory, odd):
                with contextlib.suppress(FileNotFoundError):  # deleted by another server
                    stat = item.stat(follow_symlinks=False)
                    if not is_ours(stat.st_uid):
                        odd.append(item.path)
                        continue
                    entry.n_bytes, entry.used_at = stat.st_size, stat.st_mtime
                    yield entry

    def directories(self, odd: list[str]) -> list[str]:
        """Lists the directories that objects are in. Raises OSError."""
        paths = []
        for item in os.scandir(self.path):
            if len(item.name) == 2 and item.is_dir(follow_symlinks=False):
                paths.append(item.path)
            elif item.name not in (_LEASE, _SERVERS) and not self._is_part(item):
                odd.append(item.path)
        return paths

    def names(self, directory: str, odd: list[str]) -> Iterator[tuple[Entry, os.DirEntry[str]]]:
        """The objects in one of `directories`, by their names alone. Raises OSError."""
        for item in list(os.scandir(directory)):
            match = _NAME.fullmatch(item.name)
            if match is None or match[1][:2] != os.path.basename(directory) or int(match[3]) % PAGE_SIZE:
                if not self._is_part(item):
                    odd.append(item.path)
                continue
            yield Entry(Kind(match[4]), bytes.fromhex(match[1]), bytes.fromhex(match[2]), int(match[3])), item

    def _is_part(self, item: os.DirEntry[str]) -> bool:
        """Returns whether an entry is a file that is being written. One that nobody writes any more is
        removed.
        """
        if not item.name.endswith(".part"):
            return False
        with contextlib.suppress(OSError):
            if self.may_delete and self.now_s - item.stat(follow_symlinks=False).st_mtime > ABANDONED_S:
                os.unlink(item.path)
        return True
