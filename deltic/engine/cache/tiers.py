"""The bytes of the prefix cache below device memory: units of host memory, and one file an object on disk.

This file moves. `tree.py` says what is worth keeping, `residency.py` when it moves, `directory.py` how
files are called and who else has some there. Host copies for eviction and preemption happen at once, in the
engine's thread. Everything that may wait for a disk is done by one thread behind the steps: what is looked
for and loaded first, then, one object at a time, what is to be saved or deleted, in the order in which it was
asked for.

A file is named after the tokens of its object, so it never changes, and several servers may share a
directory. Its name tells all that the tree needs to know: opening a directory lists it and reads no file. It
is written under another name and moved when complete. It is not forced to the disk: what a crash of the
machine leaves half there has the wrong size or checksum, and every load compares the checksum of the bytes
where they have landed. They are read into device memory directly: as fast as through a mapping, without its
copy, and a bad sector is an error to catch instead of a signal that ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deltic.config import ConfigError
from deltic.engine.cache.directory import BEAT_S, HEADER_BYTES, Directory, Entry, pack_header
from deltic.engine.cache.tree import Kind
from deltic.logs import counted
from deltic.ops.geometry import PAGE_SIZE
from deltic.private import is_ours

log = logging.getLogger("deltic.engine")

Bytes = npt.NDArray[np.uint8]

PAUSE_S = 60.0
"""How long nothing is saved after the disk refused: it is full, more often than not."""

MOVER = "cache-mover"
"""Name of the thread that does what may wait."""

SEARCH_S = 0.5
"""How long one search may take: on a network file system a look at a file takes a millisecond or less."""

UNFOLLOWED_S = 60.0
"""Another server gets the lease where the engine's thread has not come by for so long."""

_BLOCK_BYTES = 1 << 20  # small enough that the checksum finds in the cache what was just read
_MODEL = re.compile(r"[0-9a-f]{32}")


@dataclass(slots=True)
class Move:
    """One object, one direction."""

    kind: Kind
    device: int
    """Index of the page or slot in device memory; -1: not there (it is saved from the host's)."""
    units: tuple[int, ...] = ()
    """Of host memory; none: not there."""
    key: bytes = b""
    parent: bytes = b""
    depth: int = 0
    ok: bool = False
    """Set when it succeeded. A target whose move failed may hold a part of it."""
    is_bad: bool = False
    """Set when its file was not what it should be."""
    was_there: bool = False
    """Set when nothing was written: another server had done so."""


@dataclass(slots=True, eq=False)
class Search:
    """A look for what other servers have written of a prompt."""

    root: bytes
    keys: list[bytes]
    """Of its pages, from the first on, as far as a request could start behind them."""
    n_known: int
    """Of these pages, those that need not be looked for."""
    n_usable: int
    """A state at so many pages or fewer is of no use."""
    began_s: float
    is_done: bool = False
    n_pages: int = 0
    """Found: the first so many pages are on disk."""
    state_at: int = 0
    """Found: a state behind so many pages; 0: none."""


@dataclass(slots=True)
class Survey:
    """What there is in the directory."""

    n_bytes: int = 0
    """Of all objects, without their headers."""
    appeared: list[Entry] = field(default_factory=list)
    """Those that this server did not know, pages before what lies beyond them."""
    gone: list[tuple[Kind, bytes]] = field(default_factory=list)
    """Kinds and keys of those that others have deleted."""
    used: list[bytes] = field(default_factory=list)
    """Keys of states that were read since the last time, perhaps by others."""
    seen: set[tuple[Kind, bytes]] = field(default_factory=set)


class Copies(Protocol):
    """Device memory that the host cannot address (runtime.gpu.copies.DeviceCopies).

    The views that Tiers is given are those of a staging buffer then, one for each of its two threads.
    """

    def mark(self) -> Any:
        """Marks the work given to the device so far. A copy that is given the mark comes after that work.

        For the engine's thread.
        """

    def fetch(self, kind: Kind, index: int, mark: Any) -> None:
        """Copies a page or a state to the calling thread's buffer; it is there on return."""

    def store(self, kind: Kind, index: int, mark: Any) -> None:
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
        self._device = {Kind.PAGE: page, Kind.STATE: state}
        self._copies = copies
        self._host = host
        page_bytes = sum(view.nbytes for view in page(0))
        self._n_bytes = {Kind.PAGE: page_bytes, Kind.STATE: state_bytes}
        self.n_units = 0 if host is None else host.shape[0]
        self.units_per_state = -(-state_bytes // page_bytes)
        self.has_disk = directory is not None and disk_bytes > 0
        self.disk_bytes = disk_bytes
        self.takes_evicted = True
        """Whether host memory is for what is evicted, too, and not for preempted sequences alone."""
        # Who writes what: the mover's thread n_moved, n_damaged, _is_refused and _beat_at; both threads
        # is_full, _paused_until, foreign_bytes, surveyed, _survey, _files and _used_at, each in one go; the
        # engine's thread all else. The lock is for the queues.
        self.entries: list[Entry] = []
        self.n_pending = 0
        """Tickets that `finished` has not given yet."""
        self.n_moved = 0
        """Objects that the mover is done with, well or not."""
        self.read_bytes = {"host": 0, "disk": 0}
        self.written_bytes = {"host": 0, "disk": 0}
        self.n_damaged = 0
        self.notices: list[str] = []
        self._files: dict[tuple[Kind, bytes], str] = {}
        """Path of each file that this process knows: `delete` is told the key alone."""
        self._paused_until, self._is_refused = 0.0, False
        self.is_full = False
        """Set when the disk had no room for what was to be written; for the engine's thread to clear, once it
        has made some.
        """
        self.foreign_bytes = 0
        """Bytes of files in the directory that this server does not know, when it was last looked at."""
        self.takes_imports = False
        """Whether files may come from elsewhere though no other server uses the directory."""
        self.surveyed: Survey | None = None
        """For the engine's thread to take."""
        self._survey: Survey | None = None
        self._used_at: dict[bytes, float] = {}  # of states, by the last survey
        self._followed_s = time.monotonic()
        self._beat_at = self._followed_s + BEAT_S
        self.directory: Directory | None = None
        if directory is not None and self.has_disk:
            self.directory = Directory(directory, fingerprint)
            try:
                self._open_directory(self.directory)
            except OSError as error:
                self.directory.leave()
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

    @property
    def may_have_foreign(self) -> bool:
        """Whether there may be files in the directory that this server does not know."""
        return self.takes_imports or self.n_others > 0 or self.foreign_bytes > 0

    @property
    def n_others(self) -> int:
        """Other servers that use the directory."""
        return self.directory.n_others if self.directory else 0

    @property
    def has_locks(self) -> bool:
        """Whether one server evicts for all."""
        return self.directory is None or self.directory.has_locks

    @property
    def may_delete(self) -> bool:
        """Whether it is this one, or there are no locks."""
        return self.directory is None or self.directory.may_delete

    def follow(self) -> None:
        """The engine's thread is there and evicts; called before every step."""
        self._followed_s = time.monotonic()
        if self._mover is None and self.directory is not None:
            self._start()

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

    def search(self, search: Search) -> int:
        """Has files of other servers looked for, before all else. Returns the ticket, as `load`."""
        ticket = self._n_tickets = self._n_tickets + 1
        self.n_pending += 1
        jobs = [functools.partial(self._search, search), functools.partial(self._done.append, (ticket, [], True))]
        self._put(self._loads, jobs, first=True)
        return ticket

    def _put(
        self, queue: deque[Callable[[], None]], jobs: Sequence[Callable[[], None]], *, first: bool = False
    ) -> None:
        with self._changed:
            if first:
                queue.extendleft(reversed(jobs))
            else:
                queue.extend(jobs)
            self._changed.notify_all()
        if self._mover is None:
            self._start()

    def _start(self) -> None:
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
                elif move.ok and not move.was_there:
                    self.written_bytes["disk"] += self._n_bytes[move.kind]
        return tickets

    def wait(self, timeout_s: float) -> None:
        """Waits until a ticket is complete or the time is over. Returns at once if none is under way."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or not self.n_pending, timeout_s)

    def delete(self, kind: Kind, key: bytes) -> None:
        """Removes a file, after the saves that were asked for before. One that is missing is fine."""
        if self.has_disk:
            self._put(self._behind, [functools.partial(self._delete, kind, key)])

    def forget(self, kind: Kind, key: bytes) -> None:
        """Knows a file no more: the next survey says whether it is there."""
        self._used_at.pop(key, None)
        if self._files.pop((kind, key), None) is not None:
            self.foreign_bytes = max(1, self.foreign_bytes)

    def survey(self) -> None:
        """Has the directory looked through, behind what was asked for before: `surveyed` then says what came
        of it. One that is under way does.
        """
        if self._survey is None and self.directory is not None:
            self._survey = Survey()
            self._put(self._behind, [functools.partial(self._survey_all, self._survey, self.directory)])

    def _survey_all(self, survey: Survey, directory: Directory) -> None:
        jobs: list[Callable[[], None]] = []
        with contextlib.suppress(OSError):  # somebody removed it
            jobs = [functools.partial(self._survey_some, survey, directory, d) for d in directory.directories([])]
        # One at a time, since a load may come between them.
        self._put(self._behind, [*jobs, functools.partial(self._survey_end, survey)], first=True)

    def _survey_some(self, survey: Survey, directory: Directory, part: str) -> None:
        with contextlib.suppress(OSError):
            for entry, item in directory.names(part, []):
                what = entry.kind, entry.key
                survey.seen.add(what)
                survey.n_bytes += self._n_bytes[entry.kind]
                if what not in self._files:
                    survey.appeared.append(entry)
                elif entry.kind is Kind.STATE and directory.may_delete:
                    with contextlib.suppress(FileNotFoundError):
                        now = item.stat(follow_symlinks=False).st_mtime
                        if now > self._used_at.get(entry.key, now):
                            survey.used.append(entry.key)
                        self._used_at[entry.key] = now

    def _survey_end(self, survey: Survey) -> None:
        if survey is not self._survey:
            return  # the directory was cleared meanwhile
        missing = [(what, path) for what, path in list(self._files.items()) if what not in survey.seen]
        # A listing of a network file system may be an old one.
        survey.gone = [what for what, path in missing if not os.path.exists(path)]
        for kind, key in survey.gone:
            self._files.pop((kind, key), None)
            self._used_at.pop(key, None)
        survey.appeared.sort(key=lambda entry: (entry.depth, entry.kind))
        self.foreign_bytes = sum(self._n_bytes[entry.kind] for entry in survey.appeared)
        survey.seen.clear()
        self.surveyed, self._survey = survey, None

    def know(self, entry: Entry) -> None:
        """A file of another server is this one's to delete."""
        assert self.directory is not None
        path = self.directory.file(entry.kind, entry.key, entry.parent, entry.depth)
        self._files[entry.kind, entry.key] = path

    def clear(self) -> None:
        """Removes every object of this model from disk, before it returns.

        Saves under way may still add theirs.
        """
        if self.directory is not None:
            with contextlib.suppress(OSError):  # somebody removed the directory itself
                for entry in self.directory.entries([]):
                    self._unlink(self.directory.file(entry.kind, entry.key, entry.parent, entry.depth))
            self._files.clear()
            self._used_at.clear()
            self.entries.clear()
            self._survey = self.surveyed = None

    def close(self, timeout_s: float) -> None:
        """Lets what was asked for be done for so long, then stops the thread.

        What remains undone is never finished.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._mover is None:
            if self.directory is not None:
                self.directory.leave()
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
                until_s = None if self.directory is None else max(0.0, self._beat_at - time.monotonic())
                self._changed.wait_for(lambda: self._loads or self._behind or self._is_closing, until_s)
                queue = self._loads or self._behind
                job = queue.popleft() if queue else None
                if job is None and self._is_closing:
                    break
            if self.directory is not None and time.monotonic() >= self._beat_at:
                self._beat(self.directory)
            if job is None:
                continue
            try:
                job()
            except Exception:  # its moves stay not ok, and the next may be better
                log.exception("prefix cache: a move failed")
            self.n_moved += 1
            if self._done:
                with self._changed:
                    self._changed.notify_all()
        if self.directory is not None:
            self.directory.leave()

    def _beat(self, directory: Directory) -> None:
        n_others = directory.n_others
        with contextlib.suppress(OSError):  # the next may be better
            directory.beat(time.monotonic() - self._followed_s < UNFOLLOWED_S)
        if n_others and not directory.n_others:  # what it has left is not known before the next survey
            self.foreign_bytes = max(1, self.foreign_bytes)
        self._beat_at = time.monotonic() + BEAT_S

    def _search(self, search: Search) -> None:
        """Pages are there with all those before them, so the last is found by halving what is left to ask."""
        assert self.directory is not None
        keys, paths = [search.root, *search.keys], self.directory
        until_s = time.monotonic() + SEARCH_S

        def path(kind: Kind, n: int) -> str:
            return paths.file(kind, keys[n], keys[n - 1], n * PAGE_SIZE)

        def has(kind: Kind, n: int) -> bool:
            """Whether the n-th page, or the state behind it, is there."""
            return self._is_there(kind, path(kind, n)) and time.monotonic() < until_s

        low, high = search.n_known, len(search.keys)  # no more than high
        if low < high and has(Kind.PAGE, low + 1):
            low += 1
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if has(Kind.PAGE, middle) else (low, middle - 1)
            search.n_pages = low
        for n in range(low, search.n_usable, -1):
            if time.monotonic() > until_s:
                break
            if has(Kind.STATE, n):
                search.state_at, search.n_pages = n, max(n, search.n_pages)
                self._files[Kind.STATE, keys[n]] = path(Kind.STATE, n)
                break
        for n in range(1, search.n_pages + 1):
            self._files[Kind.PAGE, keys[n]] = path(Kind.PAGE, n)

    def _load(self, move: Move, mark: Any) -> None:
        target = self._device[move.kind](move.device)
        if move.units:
            _copy(self._units(move), target)
        elif not self.has_disk or not self._read(move, target):
            return
        self._store(move, mark)
        move.ok = True

    # Files.

    def file(self, move: Move) -> str:
        """Where an object is on disk, if it is there."""
        assert self.directory is not None
        return self.directory.file(move.kind, move.key, move.parent, move.depth)

    def _header(self, move: Move, crc: int) -> bytes:
        assert self.directory is not None
        what = move.kind, move.key, move.parent, move.depth
        return pack_header(self.directory.model, *what, self._n_bytes[move.kind], crc)

    def _read(self, move: Move, target: list[Bytes]) -> bool:
        """Reads an object's file; whether all of it is there."""
        path = self.file(move)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False  # another server of this directory has deleted it
        except OSError as error:
            log.warning("prefix cache: %s cannot be read (%s)", path, error.strerror)
            return False
        try:
            damage = self._fill(file, move, target)
            move.is_bad = damage is not None
            if damage is None:
                with contextlib.suppress(OSError):  # of root, perhaps: then it looks older than it is
                    os.utime(file)
                    if move.kind is Kind.STATE:
                        self._used_at[move.key] = os.fstat(file).st_mtime
        except OSError as error:
            if error.errno != errno.EIO:
                log.warning("prefix cache: %s cannot be read (%s)", path, error.strerror)
                return False
            damage = f"cannot be read: {error.strerror}"  # a bad sector; it says nothing of what lies beyond
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
        path = self.file(move)
        if self.may_have_foreign and self._is_there(move.kind, path):
            self._files[move.kind, move.key] = path
            move.ok = move.was_there = True
            return
        source = self._fetched(move, mark) if move.device >= 0 else self._units(move)
        assert self.directory is not None
        part = self.directory.part(path)
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

    def _is_there(self, kind: Kind, path: str) -> bool:
        with contextlib.suppress(OSError):
            return os.stat(path).st_size == HEADER_BYTES + self._n_bytes[kind]
        return False

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

    def _delete(self, kind: Kind, key: bytes) -> None:
        self._used_at.pop(key, None)
        path = self._files.pop((kind, key), None)
        if path is not None:
            self._unlink(path)

    def _unlink(self, path: str) -> None:
        with contextlib.suppress(OSError):  # it may be gone, or the disk be read-only by now
            os.unlink(path)

    # The directory.

    def _open_directory(self, directory: Directory) -> None:
        """Lists what is there, and makes sure that more can be written. Raises OSError and ConfigError."""
        directory.enter()
        root = directory.path.parent
        odd: list[str] = []
        for entry in directory.entries(odd):
            path = directory.file(entry.kind, entry.key, entry.parent, entry.depth)
            if entry.n_bytes != HEADER_BYTES + self._n_bytes[entry.kind]:
                if directory.may_delete:
                    self.n_damaged += 1
                    self._unlink(path)
                continue
            self.entries.append(entry)
            self._files[entry.kind, entry.key] = path
        if self.n_damaged:
            self.notices.append(f"--cache-dir {root}: {counted(self.n_damaged, 'damaged file')} deleted")
        if odd:
            self.notices.append(
                f"--cache-dir {root}: {counted(len(odd), 'file')} there left alone, not being Deltic's: {odd[0]}"
            )
        others = [d for d in os.listdir(root) if _MODEL.fullmatch(d) and d != directory.path.name]
        if others:
            self.notices.append(
                f"--cache-dir {root}: holds the caches of {len(others)} other models, versions or kinds of processor as "
                "well; what is not needed any more can be deleted, by directory"
            )
        if not directory.has_locks:
            self.notices.append(
                f"--cache-dir {root}: this file system has no locks (flock), so each server evicts what it has written itself, and "
                "has an eighth of --cache-disk-gb in any case; mount it with locks to have one evict for all"
            )


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
