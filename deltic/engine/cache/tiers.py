"""The bytes of the prefix cache below device memory: units of host memory, and one file an object on disk.

This file moves. `tree.py` says what is worth keeping, `residency.py` when it moves. Host copies for eviction
and preemption happen at once, in the engine's thread. Everything that may wait for a disk is done by one
thread behind the steps: loads first, then, one object at a time, what is to be saved or deleted, in the order
in which it was asked for.

A file is named after the tokens of its object, so it never changes, and two servers may share a directory.
Its name tells all that the tree needs to know: opening a directory lists it and reads no file. It is written
under another name and moved when complete. It is not forced to the disk: what a crash of the machine leaves
half there has the wrong size or checksum, and every load compares the checksum of the bytes where they have
landed. They are read into device memory directly: as fast as through a mapping, without its copy, and a bad
sector is an error to catch instead of a signal that ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import secrets
import struct
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deltic.config import ConfigError
from deltic.logs import counted
from deltic.ops.geometry import PAGE_SIZE
from deltic.private import is_ours, make_private

log = logging.getLogger("deltic.engine")

Bytes = npt.NDArray[np.uint8]

VERSION = 1
"""Version of the file format, and of the order of the views that make up a page or a state."""

ABANDONED_S = 3600.0
"""A part file that nobody has written to for this long was left by a writer that was killed."""

PAUSE_S = 60.0
"""How long nothing is saved after the disk refused: it is full, more often than not."""

MOVER = "cache-mover"
"""Name of the thread that does what may wait."""

_MAGIC = b"DELTIC\r\n"  # with the line end that text transfers damage
HEADER = struct.Struct("<8sII16s16s16sQQI")
"""Magic, version, kind, model, key, parent, depth, bytes of the payload and their crc32."""
HEADER_CRC = struct.Struct("<I")
HEADER_BYTES = 128
_KINDS = {"page": 0, "state": 1}
_BLOCK_BYTES = 1 << 20  # small enough that the checksum finds in the cache what was just read
_NAME = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})\.([0-9]{1,12})\.(page|state)")
_MODEL = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One object on disk, as found at start."""

    kind: str
    """page or state."""
    key: bytes
    """Hash of the tokens up to and including this page: 16 bytes."""
    parent: bytes
    """The key of the page before; of the first: the root's."""
    depth: int
    """Tokens up to and including this page."""
    n_bytes: int
    """Of the file."""
    used_at: float
    """When it was written or last read, in seconds since 1970."""


@dataclass(slots=True)
class Move:
    """One object, one direction."""

    kind: str
    """page or state."""
    device: int
    """Index of the page or slot in device memory; -1: not there (it is saved from the host's)."""
    units: tuple[int, ...] = ()
    """Of host memory; none: not there."""
    key: bytes = b""
    parent: bytes = b""
    depth: int = 0
    ok: bool = False
    """Set when it succeeded. A target whose move failed may hold a part of it."""


class Copies(Protocol):
    """Device memory that the host cannot address (runtime.gpu.copies.DeviceCopies).

    The views that Tiers is given are those of a staging buffer then, one for each of its two threads.
    """

    def mark(self) -> Any:
        """Marks the work given to the device so far. A copy that is given the mark comes after that work.

        For the engine's thread.
        """

    def fetch(self, kind: str, index: int, mark: Any) -> None:
        """Copies a page or a state to the calling thread's buffer; it is there on return."""

    def store(self, kind: str, index: int, mark: Any) -> None:
        """Copies it from the calling thread's buffer to the device.

        What is started from now on finds it there.
        """


class Tiers:
    """Host memory and disk. `load`, `save`, `finished` and `n_pending` are for one thread, the engine's."""

    def __init__(
        self,
        page: Callable[[int], list[Bytes]],
        state: Callable[[int], list[Bytes]],
        host: Bytes | None,
        state_bytes: int,
        directory: Path | None,
        disk_bytes: int,
        fingerprint: str,
        copies: Copies | None = None,
    ) -> None:
        """page, state: the bytes of a page or slot in device memory, as writable, contiguous, one-dimensional
        views;
        called from two threads. host: [n_units, page bytes]. disk_bytes: 0 for no disk tier; the budget is
        kept by whoever deletes. fingerprint: 32 hex digits that name everything that decides the bits
        (runtime/fingerprint.py). copies: brings the bytes to those views and back, where device memory itself
        cannot be viewed.

        Raises ConfigError when the directory cannot be made, read or written, or may hold files of others.
        """
        self._device = {"page": page, "state": state}
        self._copies = copies
        self._host = host
        page_bytes = sum(view.nbytes for view in page(0))
        self._n_bytes = {"page": page_bytes, "state": state_bytes}
        self._model = blake2b(fingerprint.encode(), digest_size=16).digest()
        self.n_units = 0 if host is None else host.shape[0]
        self.units_per_state = -(-state_bytes // page_bytes)
        self.has_disk = directory is not None and disk_bytes > 0
        self.disk_bytes = disk_bytes
        self.takes_evicted = True
        """Whether host memory is for what is evicted, too, and not for preempted sequences alone."""
        self.entries: list[Entry] = []
        self.n_pending = 0
        """Tickets that `finished` has not given yet."""
        self.n_moved = 0
        """Objects that the mover is done with, well or not."""
        self.read_bytes = {"host": 0, "disk": 0}
        self.written_bytes = {"host": 0, "disk": 0}
        self.n_damaged = 0
        self.notices: list[str] = []
        self._files: dict[tuple[str, bytes], str] = {}
        """Path of each file that this process knows: `delete` is told the key alone."""
        self._paused_until, self._is_refused = 0.0, False
        self.is_full = False
        """Set when the disk had no room for what was to be written; for the engine's thread to clear, once it
        has made some.
        """
        self.foreign_bytes = 0
        """Bytes of other servers' files in the directory, when it was last looked at."""
        if directory is not None and self.has_disk:
            self._directory = directory / fingerprint
            try:
                self._open_directory(directory)
            except OSError as error:
                raise ConfigError(
                    f"--cache-dir {directory}: cannot be used ({error.strerror}: {error.filename}); give a directory that "
                    "this user may write, or leave it out"
                ) from error
        self._n_tickets = 0
        self._loads: deque[Callable[[], None]] = deque()
        self._behind: deque[Callable[[], None]] = deque()
        self._done: deque[tuple[int, list[Move], bool]] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._mover: threading.Thread | None = None
        """Started with the first ticket that may wait. It holds this object, and so the pools, until
        `close`.
        """

    @property
    def can_save(self) -> bool:
        """Not for a while after a write has failed."""
        return time.monotonic() >= self._paused_until

    def resume(self) -> None:
        """Room was made: saving goes on."""
        self.is_full, self._paused_until = False, 0.0

    # At once.

    def copy_out(self, move: Move) -> None:
        """From device memory to host units."""
        _copy(self._fetched(move, self._mark()), self._units(move))
        self.written_bytes["host"] += self._n_bytes[move.kind]
        move.ok = True

    def copy_in(self, move: Move) -> None:
        """From host units to device memory."""
        _copy(self._units(move), self._device[move.kind](move.device))
        self._store(move, self._mark())
        self.read_bytes["host"] += self._n_bytes[move.kind]
        move.ok = True

    def _mark(self) -> Any:
        return self._copies.mark() if self._copies else None

    def _fetched(self, move: Move, mark: Any) -> list[Bytes]:
        """The bytes of an object in device memory, after what is marked."""
        views = self._device[move.kind](move.device)
        if self._copies:
            self._copies.fetch(move.kind, move.device, mark)
        return views

    def _store(self, move: Move, mark: Any) -> None:
        """Copies the views of an object to device memory. They are there on return."""
        if self._copies:
            self._copies.store(move.kind, move.device, mark)

    def _units(self, move: Move) -> list[Bytes]:
        """The bytes of an object in host memory; it fills all but the last of its units."""
        assert self._host is not None
        n_left, views = self._n_bytes[move.kind], []
        for unit in move.units:
            views.append(self._host[unit][:n_left])
            n_left -= views[-1].nbytes
        assert n_left == 0, f"{len(move.units)} units for a {move.kind}"
        return views

    # Behind the steps.

    def load(self, moves: list[Move]) -> int:
        """Has objects brought to device memory, each from its units or else from its file; gives the ticket.

        What the moves name is the mover's until the ticket is finished.
        """
        return self._ask(self._loads, self._load, moves)

    def save(self, moves: list[Move]) -> int:
        """Has objects written to disk, from device memory or else from their units. Returns the ticket, as
        `load`.
        """
        return self._ask(self._behind, self._save, moves)

    def _ask(self, queue: deque[Callable[[], None]], action: Callable[[Move, Any], None], moves: list[Move]) -> int:
        ticket = self._n_tickets = self._n_tickets + 1
        self.n_pending += 1
        # What wrote to these pages and slots before was asked for by now: a copy need not wait for the steps
        # that follow.
        mark = self._mark()
        jobs = [functools.partial(action, move, mark) for move in moves]
        end = functools.partial(self._done.append, (ticket, moves, queue is self._loads))
        self._put(queue, [*jobs, end])
        return ticket

    def _put(self, queue: deque[Callable[[], None]], jobs: list[Callable[[], None]]) -> None:
        with self._changed:
            queue.extend(jobs)
            self._changed.notify_all()
        if self._mover is None:
            self._mover = threading.Thread(target=self._run, name=MOVER, daemon=True)
            self._mover.start()

    def finished(self) -> list[tuple[int, list[Move]]]:
        """Tickets that were completed, each once."""
        if not self._done:
            return []
        tickets = []
        while self._done:
            ticket, moves, is_load = self._done.popleft()
            self.n_pending -= 1
            tickets.append((ticket, moves))
            for move in moves:  # counted here, where no other thread counts
                if move.ok and is_load:
                    self.read_bytes["host" if move.units else "disk"] += self._n_bytes[move.kind]
                elif move.ok:
                    self.written_bytes["disk"] += self._n_bytes[move.kind]
        return tickets

    def wait(self, timeout_s: float) -> None:
        """Waits until a ticket is complete or the time is over. Returns at once if none is under way."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or not self.n_pending, timeout_s)

    def delete(self, kind: str, key: bytes) -> None:
        """Removes a file, after the saves that were asked for before. One that is missing is fine."""
        if self.has_disk:
            self._put(self._behind, [functools.partial(self._delete, kind, key)])

    def survey(self) -> None:
        """Has foreign_bytes counted anew, behind what was asked for before."""
        self._put(self._behind, [self._survey])

    def _survey(self) -> None:
        n_bytes = 0
        for i, entry in enumerate(self._list([])):
            if self._loads:
                return  # somebody waits; the next time will do
            if i % 100 == 99:
                time.sleep(0.001)  # the engine's thread is not to wait for many entries at once
            n_bytes += entry.n_bytes * ((entry.kind, entry.key) not in self._files)
        self.foreign_bytes = n_bytes

    def clear(self) -> None:
        """Removes every object of this model from disk, before it returns.

        Saves under way may still add theirs.
        """
        if self.has_disk:
            with contextlib.suppress(OSError):  # somebody removed the directory itself
                for entry in self._list([]):
                    self._unlink(self._path(entry.kind, entry.key, entry.parent, entry.depth))
            self._files.clear()
            self.entries.clear()

    def close(self, timeout_s: float) -> None:
        """Lets what was asked for be done for so long, then stops the thread.

        What remains undone is never finished.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._mover is None:
            return
        self._mover.join(timeout_s)
        with self._changed:
            self._loads.clear()
            self._behind.clear()
        self._mover.join(1.0)  # the object at hand; a disk that hangs holds up no one: the thread is a daemon

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a niceness of its own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._loads or self._behind or self._is_closing)
                queue = self._loads or self._behind
                if not queue:
                    return
                job = queue.popleft()
            try:
                job()
            except Exception:  # its moves stay not ok, and the next may be better
                log.exception("prefix cache: a move failed")
            self.n_moved += 1
            if self._done:
                with self._changed:
                    self._changed.notify_all()

    def _load(self, move: Move, mark: Any) -> None:
        target = self._device[move.kind](move.device)
        if move.units:
            _copy(self._units(move), target)
        elif not self.has_disk or not self._read(move, target):
            return
        self._store(move, mark)
        move.ok = True

    # Files.

    def _path(self, kind: str, key: bytes, parent: bytes, depth: int) -> str:
        name = key.hex()
        return f"{self._directory}/{name[:2]}/{name}.{parent.hex()}.{depth}.{kind}"

    def _header(self, move: Move, crc: int) -> bytes:
        what, size = (self._model, move.key, move.parent, move.depth), self._n_bytes[move.kind]
        header = HEADER.pack(_MAGIC, VERSION, _KINDS[move.kind], *what, size, crc)
        return (header + HEADER_CRC.pack(zlib.crc32(header))).ljust(HEADER_BYTES, b"\0")

    def _read(self, move: Move, target: list[Bytes]) -> bool:
        """Reads an object's file; whether all of it is there."""
        path = self._path(move.kind, move.key, move.parent, move.depth)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False  # another server of this directory has deleted it
        except OSError as error:
            log.warning("prefix cache: %s cannot be read (%s)", path, error.strerror)
            return False
        try:
            damage = self._fill(file, move, target)
            if damage is None:
                with contextlib.suppress(OSError):  # of root, perhaps: then it looks older than it is
                    os.utime(file)
        except OSError as error:
            damage = f"cannot be read: {error.strerror}"
        finally:
            os.close(file)
        if damage is not None:
            self.n_damaged += 1
            log.warning("prefix cache: %s is damaged (%s) and was deleted", path, damage)
            self._unlink(path)
        return damage is None

    def _fill(self, file: int, move: Move, target: list[Bytes]) -> str | None:
        """Reads a file into its target; gives what is wrong with it, if anything is."""
        stat, expected = os.fstat(file), HEADER_BYTES + self._n_bytes[move.kind]
        n_bytes = stat.st_size
        if not is_ours(stat.st_uid):
            return f"of another user, {stat.st_uid}"
        if n_bytes != expected:
            return f"{n_bytes} bytes, not {expected}"
        header, crc = os.read(file, HEADER_BYTES), 0
        for block in _blocks(target):
            done = 0
            while done < block.nbytes and (n := os.readv(file, [block[done:]])):
                done += n
            crc = zlib.crc32(block, crc)
        return None if header == self._header(move, crc) else "wrong checksum, or not what its name says"

    def _save(self, move: Move, mark: Any) -> None:
        if not self.has_disk or time.monotonic() < self._paused_until:
            return
        source = self._fetched(move, mark) if move.device >= 0 else self._units(move)
        path = self._path(move.kind, move.key, move.parent, move.depth)
        part = f"{path}.{secrets.token_hex(4)}.part"  # not the process id: two containers may have the same
        try:
            try:
                self._write(part, move, source)
                os.rename(part, path)
            except BaseException:
                self._unlink(part)
                raise
        except OSError as error:
            self._paused_until = time.monotonic() + PAUSE_S
            self.is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not self._is_refused:
                log.warning(
                    "prefix cache: --cache-dir cannot be written (%s: %s); reading goes on, and writing is tried again %s",
                    error.strerror,
                    part,
                    "with less" if self.is_full else f"every {PAUSE_S:.0f} s",
                )
            self._is_refused = True
            return
        self._files[move.kind, move.key] = path
        self._is_refused = False
        move.ok = True

    def _write(self, part: str, move: Move, source: list[Bytes]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            file = os.open(part, flags, 0o600)
        except FileNotFoundError:  # the first of its directory
            os.makedirs(os.path.dirname(part), 0o700, exist_ok=True)
            file = os.open(part, flags, 0o600)
        try:
            offset, crc = HEADER_BYTES, 0
            for block in _blocks(source):
                crc = zlib.crc32(block, crc)
                done = 0
                while done < block.nbytes:
                    done += os.pwrite(file, block[done:], offset + done)
                offset += done
            os.pwrite(file, self._header(move, crc), 0)
        finally:
            os.close(file)

    def _delete(self, kind: str, key: bytes) -> None:
        path = self._files.pop((kind, key), None)
        if path is not None:
            self._unlink(path)

    def _unlink(self, path: str) -> None:
        with contextlib.suppress(OSError):  # it may be gone, or the disk be read-only by now
            os.unlink(path)

    # The directory.

    def _open_directory(self, directory: Path) -> None:
        """Lists what is there, and makes sure that more can be written. Raises OSError and ConfigError."""
        make_private("--cache-dir", directory)
        make_private("--cache-dir", self._directory)
        probe = self._directory / f"{secrets.token_hex(4)}.part"
        probe.touch(0o600)
        probe.unlink()
        odd: list[str] = []
        sizes = {kind: HEADER_BYTES + n_bytes for kind, n_bytes in self._n_bytes.items()}
        for entry in self._list(odd):
            path = self._path(entry.kind, entry.key, entry.parent, entry.depth)
            if entry.n_bytes != sizes[entry.kind]:
                self.n_damaged += 1
                self._unlink(path)
                continue
            self.entries.append(entry)
            self._files[entry.kind, entry.key] = path
        if self.n_damaged:
            self.notices.append(f"--cache-dir {directory}: {counted(self.n_damaged, 'damaged file')} deleted")
        if odd:
            self.notices.append(
                f"--cache-dir {directory}: {counted(len(odd), 'file')} there left alone, not being Deltic's: {odd[0]}"
            )
        others = [d for d in os.listdir(directory) if _MODEL.fullmatch(d) and d != self._directory.name]
        if others:
            self.notices.append(
                f"--cache-dir {directory}: holds the caches of {len(others)} other models, versions or kinds of processor as "
                "well; what is not needed any more can be deleted, by directory"
            )

    def _list(self, odd: list[str]) -> Iterator[Entry]:
        """The objects of this model, as their names say, and into `odd` what is not one; old part files are
        removed.
        """
        for directory in os.scandir(self._directory):
            if not (len(directory.name) == 2 and directory.is_dir(follow_symlinks=False)):
                if not self._is_part(directory):
                    odd.append(directory.path)
                continue
            for item in list(os.scandir(directory)):
                found = _NAME.fullmatch(item.name)
                if found is None or found[1][:2] != directory.name or int(found[3]) % PAGE_SIZE:
                    if not self._is_part(item):
                        odd.append(item.path)
                    continue
                with contextlib.suppress(FileNotFoundError):  # deleted by another server
                    stat = item.stat(follow_symlinks=False)
                    if not is_ours(stat.st_uid):
                        odd.append(item.path)
                        continue
                    key, parent = bytes.fromhex(found[1]), bytes.fromhex(found[2])
                    yield Entry(found[4], key, parent, int(found[3]), stat.st_size, stat.st_mtime)

    def _is_part(self, item: os.DirEntry[str]) -> bool:
        """Whether it is a file that is being written; one that nobody writes any more is removed."""
        if not item.name.endswith(".part"):
            return False
        with contextlib.suppress(FileNotFoundError):
            if time.time() - item.stat(follow_symlinks=False).st_mtime > ABANDONED_S:
                self._unlink(item.path)
        return True


def _blocks(views: list[Bytes]) -> Iterator[memoryview]:
    for view in views:
        for start in range(0, view.nbytes, _BLOCK_BYTES):
            yield view.data[start : start + _BLOCK_BYTES]


def _copy(source: list[Bytes], target: list[Bytes]) -> None:
    """The same bytes, cut in other places."""
    targets = iter(target)
    room = next(targets)
    for view in source:
        while view.nbytes:
            if not room.nbytes:
                room = next(targets)
            n = min(view.nbytes, room.nbytes)
            room[:n] = view[:n]
            view, room = view[n:], room[n:]
