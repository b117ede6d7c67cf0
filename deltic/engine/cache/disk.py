"""The files of the prefix cache, one an object, and their bytes (`directory.py` has their names).

A file is named after the tokens of its object, so it never changes. Any server can compute the name, and it
tells all that the tree needs to know: opening a directory lists it and reads no file. A file is written under
another name and moved when complete. It is not forced to the disk: what a crash of the machine leaves half
there has the wrong size or checksum, and every load compares the checksum of the bytes where they have
landed. They are read into device memory directly: as fast as through a mapping, without its copy, and a bad
sector is an error to catch instead of a signal that ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from deltic.config import ConfigError
from deltic.engine.cache.directory import HEADER_BYTES, Directory, Entry, Object, pack_header
from deltic.engine.cache.tree import Kind
from deltic.logs import counted
from deltic.ops.geometry import PAGE_SIZE
from deltic.private import is_ours

log = logging.getLogger("deltic.engine")

BEAT_S = 5.0
"""Seconds between two times that a server says that it is there, looks for others, and tries to get the
lease.
"""

PAUSE_S = 60.0
"""Seconds for which nothing is saved after the disk refused: most often it is full."""

SEARCH_S = 0.5
"""Longest time in seconds of one search: on a network file system a look at a file takes a millisecond or
less.
"""

UNFOLLOWED_S = 60.0
"""Seconds without a step of the engine's thread after which the lease passes to another server."""

_BLOCK_BYTES = 1 << 20  # small enough that the checksum finds in the cache what was just read
_MODEL = re.compile(r"[0-9a-f]{32}")


@dataclass(slots=True, eq=False)
class Search:
    """A look for what other servers have written of a prompt."""

    root: bytes
    keys: list[bytes]
    """Keys of the prompt's pages, from the first on, as far as a request could start behind them."""
    n_known: int
    """Pages at the start of `keys` that need not be looked for."""
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
    """Contents of the directory."""

    n_bytes: int = 0
    """Bytes of all objects, without their headers."""
    appeared: list[Entry] = field(default_factory=list)
    """Objects that this server did not know, pages before what lies beyond them."""
    gone: list[tuple[Kind, bytes]] = field(default_factory=list)
    """Kinds and keys of those that others have deleted."""
    used: list[bytes] = field(default_factory=list)
    """Keys of states that were read since the last time, perhaps by others."""
    seen: set[tuple[Kind, bytes]] = field(default_factory=set)


class Disk:
    """The files of one model, for two threads.

    Only the mover's writes `n_damaged`, `beat_at` and `_is_refused`. Both write `is_full`, `foreign_bytes`,
    `surveyed`, `_survey`, `_paused_until`, `_files` and `_used_at`, each in one go. All else is the engine's.
    """

    def __init__(self, root: Path, fingerprint: str, n_bytes: dict[Kind, int]) -> None:
        """n_bytes: of a page and of a state. Raises ConfigError when the directory cannot be made, read or
        written, or may hold files of others.
        """
        self.directory = Directory(root, fingerprint)
        self._n_bytes = n_bytes
        self.entries: list[Entry] = []
        """Objects that were there at the start."""
        self.notices: list[str] = []
        self.n_damaged = 0
        self.is_full = False
        """Set when the disk had no room for what was to be written; for the engine's thread to clear, when it
        makes some.
        """
        self.foreign_bytes = 0
        """Bytes of files in the directory that this server does not know, when it was last looked at."""
        self.surveyed: Survey | None = None
        """Result of the last survey, for the engine's thread to take."""
        self._survey: Survey | None = None
        self._files: dict[tuple[Kind, bytes], str] = {}
        """Path of each file that this process knows: `delete` is told the key alone."""
        self._used_at: dict[bytes, float] = {}  # of states, by the last survey
        self._paused_until, self._is_refused = 0.0, False
        self._followed_s = time.monotonic()
        self.beat_at = self._followed_s + BEAT_S
        try:
            self._open()
        except OSError as error:
            self.directory.leave()
            raise ConfigError(
                f"--cache-dir {root}: cannot be used ({error.strerror}: {error.filename}). Give a directory that "
                "this user may write, or leave it out."
            ) from error

    def _open(self) -> None:
        """Lists what is there, and makes sure that more can be written. Raises OSError and ConfigError."""
        directory = self.directory
        directory.enter()
        root = directory.path.parent
        odd: list[str] = []
        for entry in directory.entries(odd):
            path = directory.file(entry)
            if entry.n_bytes != HEADER_BYTES + self._n_bytes[entry.kind]:
                if directory.may_delete:
                    self.n_damaged += 1
                    _unlink(path)
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

    # For the engine's thread.

    @property
    def is_idle(self) -> bool:
        """True if no survey is under way."""
        return self._survey is None

    @property
    def can_save(self) -> bool:
        """True unless a write has failed less than PAUSE_S ago."""
        return time.monotonic() >= self._paused_until

    @property
    def has_foreign(self) -> bool:
        """True if the directory may have files that this server does not know."""
        return self.directory.n_others > 0 or self.foreign_bytes > 0

    def follow(self) -> None:
        """The engine's thread is there and evicts; called before every step."""
        self._followed_s = time.monotonic()

    def pause(self, is_full: bool) -> None:
        """Saves nothing for a while: a disk has refused, this one or another machine's. is_full: it had no
        room.
        """
        self._paused_until, self.is_full = time.monotonic() + PAUSE_S, is_full

    def keep(self, keys: set[bytes]) -> None:
        """Removes the objects that were there at the start and have none of these keys, unless others may
        want them.
        """
        for entry in self.entries if self.directory.may_delete and not self.has_foreign else ():
            if entry.key not in keys:
                self.delete(entry.kind, entry.key)
        self.entries = []

    def resume(self) -> None:
        """Room was made: saving goes on."""
        self.is_full, self._paused_until = False, 0.0

    def know(self, entry: Entry) -> None:
        """A file of another server is this one's to delete."""
        self._files[entry.kind, entry.key] = self.directory.file(entry)

    def forget(self, kind: Kind, key: bytes) -> None:
        """Knows a file no more: the next survey says whether it is there."""
        self._used_at.pop(key, None)
        if self._files.pop((kind, key), None) is not None:
            self.foreign_bytes = max(1, self.foreign_bytes)

    def clear(self) -> None:
        """Removes every object of this model from disk, before it returns.

        Saves under way may still add theirs.
        """
        with contextlib.suppress(OSError):  # somebody removed the directory itself
            for entry in self.directory.entries([]):
                _unlink(self.directory.file(entry))
        self._files.clear()
        self._used_at.clear()
        self.entries.clear()
        self._survey = self.surveyed = None

    def begin_survey(self) -> Survey | None:
        """Begins a survey and returns it; None while another is under way."""
        if self._survey is not None:
            return None
        self._survey = Survey()
        return self._survey

    # For the mover's thread.

    def beat(self) -> None:
        """Says that this server is there, and sees who else is."""
        directory = self.directory
        n_others = directory.n_others
        with contextlib.suppress(OSError):  # the next may be better
            directory.beat(time.monotonic() - self._followed_s < UNFOLLOWED_S)
        if n_others and not directory.n_others:  # what it has left is not known before the next survey
            self.foreign_bytes = max(1, self.foreign_bytes)
        self.beat_at = time.monotonic() + BEAT_S

    def parts(self) -> list[str]:
        """The directories that `survey_part` is for."""
        with contextlib.suppress(OSError):  # somebody removed it
            return self.directory.directories([])
        return []

    def survey_part(self, survey: Survey, part: str) -> None:
        """Takes down what there is in one directory."""
        with contextlib.suppress(OSError):
            for entry, item in self.directory.names(part, []):
                what = entry.kind, entry.key
                survey.seen.add(what)
                survey.n_bytes += self._n_bytes[entry.kind]
                if what not in self._files:
                    survey.appeared.append(entry)
                elif entry.kind is Kind.STATE and self.directory.may_delete:
                    with contextlib.suppress(FileNotFoundError):
                        now = item.stat(follow_symlinks=False).st_mtime
                        if now > self._used_at.get(entry.key, now):
                            survey.used.append(entry.key)
                        self._used_at[entry.key] = now

    def end_survey(self, survey: Survey) -> None:
        """Compares what is there with what this process knows."""
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

    def search(self, search: Search) -> None:
        """Pages are there with all those before them, so the last is found by halving what is left to ask."""
        keys = [search.root, *search.keys]
        until_s = time.monotonic() + SEARCH_S

        def path(kind: Kind, n: int) -> str:
            return self.directory.file(Object(kind, keys[n], keys[n - 1], n * PAGE_SIZE))

        def has(kind: Kind, n: int) -> bool:
            """Returns whether the n-th page, or the state behind it, is there."""
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

    def read(self, of: Object, target: list[memoryview]) -> tuple[bool, bool]:
        """Reads an object's file. Returns whether all of it is there, and whether what it held was wrong."""
        path = self.directory.file(of)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False, False  # another server of this directory has deleted it
        except OSError as error:
            log.warning("prefix cache: %s cannot be read (%s)", path, error.strerror)
            return False, False
        is_bad = False
        try:
            damage = self._fill(file, of, target)
            is_bad = damage is not None
            if not is_bad:
                with contextlib.suppress(OSError):  # of root, perhaps: then it looks older than it is
                    os.utime(file)
                    if of.kind is Kind.STATE:
                        self._used_at[of.key] = os.fstat(file).st_mtime
        except OSError as error:
            if error.errno != errno.EIO:
                log.warning("prefix cache: %s cannot be read (%s)", path, error.strerror)
                return False, False
            damage = f"cannot be read: {error.strerror}"  # a bad sector; it says nothing of what lies beyond
        finally:
            os.close(file)
        if damage is not None:
            self.n_damaged += 1
            log.warning("prefix cache: %s is damaged (%s) and was deleted", path, damage)
            _unlink(path)
        return damage is None, is_bad

    def _fill(self, file: int, of: Object, target: list[memoryview]) -> str | None:
        """Reads a file into its target; gives what is wrong with it, if anything is."""
        stat, expected = os.fstat(file), HEADER_BYTES + self._n_bytes[of.kind]
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
        return None if header == self._header(of, crc) else "wrong checksum, or not what its name says"

    def _header(self, of: Object, crc: int) -> bytes:
        return pack_header(self.directory.model, of, self._n_bytes[of.kind], crc)

    def has(self, of: Object) -> bool:
        """Returns whether an object's file is there, and remembers it if so."""
        path = self.directory.file(of)
        if self._is_there(of.kind, path):
            self._files[of.kind, of.key] = path
            return True
        return False

    def _is_there(self, kind: Kind, path: str) -> bool:
        with contextlib.suppress(OSError):
            return os.stat(path).st_size == HEADER_BYTES + self._n_bytes[kind]
        return False

    def write(self, of: Object, source: list[memoryview]) -> bool:
        """Writes an object's file; False when the disk refused, which is then left alone for a while."""
        path = self.directory.file(of)
        part = self.directory.part(path)
        try:
            try:
                self._write(part, of, source)
                os.rename(part, path)
            except BaseException:
                _unlink(part)
                raise
        except OSError as error:
            self.pause(error.errno in (errno.ENOSPC, errno.EDQUOT))
            if not self._is_refused:
                log.warning(
                    "prefix cache: --cache-dir cannot be written (%s: %s); reading goes on, and writing is tried again %s",
                    error.strerror,
                    part,
                    "with less" if self.is_full else f"every {PAUSE_S:.0f} s",
                )
            self._is_refused = True
            return False
        self._files[of.kind, of.key] = path
        self._is_refused = False
        return True

    def _write(self, part: str, of: Object, source: list[memoryview]) -> None:
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
            os.pwrite(file, self._header(of, crc), 0)
        finally:
            os.close(file)

    def delete(self, kind: Kind, key: bytes) -> None:
        """Removes a file that this process knows; one that is missing is fine."""
        self._used_at.pop(key, None)
        path = self._files.pop((kind, key), None)
        if path is not None:
            _unlink(path)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):  # it may be gone, or the disk be read-only by now
        os.unlink(path)


def _blocks(views: list[memoryview]) -> Iterator[memoryview]:
    for view in views:
        for start in range(0, view.nbytes, _BLOCK_BYTES):
            yield view[start : start + _BLOCK_BYTES]
