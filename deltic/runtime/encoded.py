"""Items that requests name by a key: encoded once, beside the steps, and kept in memory and on disk.

An item goes through two threads. One of its own runs the encoders (seconds, numpy without Python's lock, at
low priority) and reads and writes files. `poll`, in the engine's thread between two steps, does what only
that thread may do, one piece a call, so that no step waits long. A finished item never changes; a sequence
that runs keeps its own, whatever happens to it here.

Memory holds the items used last, within a number of bytes. A file is `DIRECTORY/MODEL/KEY.safetensors`, where
MODEL names everything that decides the bits (runtime/fingerprint.py); it is written under another name and
moved when complete, and its digest is compared whenever it is read. A damaged file is removed. Whoever sent
the source keeps it: files here are a cache.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from deltic.machine import be_nice
from deltic.models.fields import CheckpointError
from deltic.ops.arrays import Array

log = logging.getLogger("deltic.engine")

_KEY = re.compile(r"[0-9A-Za-z_-]{1,64}")


class Item(Protocol):
    """An encoded source, as arrays."""

    @property
    def n_bytes(self) -> int:
        """Bytes of memory that it takes."""

    def arrays(self) -> dict[str, Array]:
        """Returns what a file of it holds, by name."""


class Command(Protocol):
    """Asks for the item of a key."""

    @property
    def key(self) -> str:
        """Names the content: the same source and way of encoding have the same key."""

    @property
    def is_kept(self) -> bool:
        """True if to store the item on disk. Otherwise it lives in this process, as long as there is room."""


C = TypeVar("C", bound=Command)
T = TypeVar("T", bound=Item)
A = TypeVar("A")


@dataclass(slots=True)
class _Unfinished(Generic[C, T]):
    """An item of which `finish` has done n_done pieces."""

    command: C
    item: T
    n_done: int = 0


class Encoded(ABC, Generic[C, T, A]):
    """The encoded items of one model: commands C ask for items T, and `poll` brings answers A.

    All public methods are for the engine's thread. A subclass says what the items are.
    """

    noun: str
    """Name of an item in messages, such as "voice"."""
    source: str
    """The name of the source that a client would have to send again."""
    refusals: tuple[type[Exception], ...] = (CheckpointError,)
    """Exceptions of `make`, and of the fingerprint, whose text is the answer."""

    def __init__(self, directory: Path | None, model: Callable[[], str]) -> None:
        """directory: where items are kept; None: in memory only. model: the fingerprint, asked for once, in
        the other thread.
        """
        self._directory, self._ask_model, self._model = directory, model, ""
        self._items: OrderedDict[str, T] = OrderedDict()  # least recently used first
        self._asked: dict[str, deque[C | None]] = {}  # by key; the first is worked on; None: a drop
        self._leaving: dict[str, threading.Event] = {}  # dropped keys, until their files are gone for good
        self._unfinished: deque[_Unfinished[C, T]] = deque()
        self._answers: list[A] = []
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._done: deque[tuple[C, T | str | None]] = deque()
        self._thread: threading.Thread | None = None  # started with its first job

    # What a subclass says.

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of the items in memory, those that sequences hold not counted."""

    @abstractmethod
    def wrong_with(self, command: C) -> str | None:
        """Says why a command can have no item, before anything is read or made. None: it may."""

    @abstractmethod
    def make(self, command: C) -> T | str | None:
        """Runs in the other thread. Returns an item, the reason why there is none, or None if the command
        brings nothing to make it of.
        """

    @abstractmethod
    def of(self, arrays: dict[str, Array]) -> T:
        """The item in a file. Raises TypeError or ValueError for arrays of something else."""

    @abstractmethod
    def reply(self, command: C, item: T | None, error: str | None) -> A:
        """The answer that the item is there now, or why it is not."""

    def is_enough(self, item: T, command: C) -> bool:
        """Returns whether an item that is known is all that the command asks for."""
        return True

    def is_finished(self, item: T) -> bool:
        """Returns whether an item lacks nothing that `finish` would add."""
        return True

    def finish(self, item: T, i: int) -> tuple[T, bool]:
        """Runs in the engine's thread. Returns the item after piece i of the remaining work, and whether that
        was the last.
        """
        return item, True

    # In the engine's thread.

    @property
    def is_waiting(self) -> bool:
        """True if the other thread has something that `poll` will bring."""
        return bool(self._asked)

    @property
    def has_work(self) -> bool:
        """True if `poll` would do something now."""
        return bool(self._answers or self._done or self._unfinished)

    def get(self, key: str) -> T | None:
        """An item by its key, from memory or, if this process knows that its files fit, from disk.

        None: encode it (again).
        """
        item = self._items.get(key)
        if item is not None:
            self._items.move_to_end(key)
        elif self._directory is not None and self._model and _KEY.fullmatch(key) and not self._is_leaving(key):
            found = self._read(key)
            if found is not None and not isinstance(found, str):
                self._keep(key, item := found)
        return item

    def encode(self, command: C) -> None:
        """Has an item made, or looked for when the command has nothing to make it of.

        The answer comes from `poll`; those of one key come in the order in which they were asked.
        """
        asked = self._asked.setdefault(command.key, deque())
        asked.append(command)
        if len(asked) == 1:
            self._begin(command)

    def drop(self, key: str) -> None:
        """Forgets an item and removes its file.

        An item that is being made is forgotten once it is made; one that is asked for later stays. Nothing
        happens when there is none.
        """
        if key in self._asked:
            self._asked[key].append(None)
        self._forget(key)

    def poll(self) -> list[A]:
        """Takes the other thread's results and does one piece of the remaining work. Returns the answers that
        are ready.
        """
        while self._done:
            command, result = self._done.popleft()
            if result is None or isinstance(result, str) or self.is_finished(result):
                self._answer(command, result)
            else:
                self._unfinished.append(_Unfinished(command, result))
        if self._unfinished:
            self._go_on(self._unfinished[0])
        answers, self._answers = self._answers, []
        return answers

    def close(self, timeout_s: float) -> None:
        """Ends the thread behind what it has begun, or leaves it after so long. No other call may follow."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout_s)

    def _put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"{self.noun}-encoder", daemon=True)
            self._thread.start()

    def _begin(self, command: C) -> None:
        known = self._items.get(command.key)
        if known is not None and self.is_enough(known, command):
            self._done.append((command, known))
        else:
            self._put(lambda: self._done.append((command, self._find_or_make(command))))

    def _go_on(self, unfinished: _Unfinished[C, T]) -> None:
        try:
            unfinished.item, is_last = self.finish(unfinished.item, unfinished.n_done)
            unfinished.n_done += 1
        except Exception as error:
            log.exception("a %s could not be finished", self.noun)
            self._unfinished.popleft()
            return self._answer(unfinished.command, f"{type(error).__name__}; the engine's log says more")
        if is_last:
            self._unfinished.popleft()
            self._answer(unfinished.command, unfinished.item)

    def _answer(self, command: C, result: T | str | None) -> None:
        """Answers a command, keeps its item, and goes on to the next command of the same key."""
        key = command.key
        if result is None or isinstance(result, str):
            error = result or f"no such {self.noun} here (any more); send its {self.source}"
            self._answers.append(self.reply(command, None, error))
        else:
            self._keep(key, result)
            if command.is_kept:
                self._put(lambda: self._write(key, result))
            self._answers.append(self.reply(command, result, None))
        asked = self._asked[key]
        asked.popleft()
        while asked and asked[0] is None:
            asked.popleft()
            self._forget(key)
        if asked and (following := asked[0]) is not None:
            self._begin(following)
        else:
            del self._asked[key]

    def _keep(self, key: str, item: T) -> None:
        self._items[key] = item
        self._items.move_to_end(key)
        n_bytes = sum(kept.n_bytes for kept in self._items.values())
        while n_bytes > self.memory_bytes and len(self._items) > 1:
            _, dropped = self._items.popitem(last=False)
            n_bytes -= dropped.n_bytes

    def _forget(self, key: str) -> None:
        self._items.pop(key, None)
        if self._directory is not None and _KEY.fullmatch(key):
            self._remove(key)
            self._leaving = {name: gone for name, gone in self._leaving.items() if not gone.is_set()}
            self._leaving[key] = gone = threading.Event()

            def remove() -> None:
                self._remove(key)
                gone.set()

            self._put(remove)  # behind what may be writing it

    def _is_leaving(self, key: str) -> bool:
        """Returns whether a file that there is, or will be for a moment, was dropped."""
        gone = self._leaving.get(key)
        return gone is not None and not gone.is_set()

    # In the other thread, and from `get`, `drop` and `poll` where these touch files.

    def _run(self) -> None:
        be_nice()
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("a %s could not be kept", self.noun)

    def _find_or_make(self, command: C) -> T | str | None:
        if not _KEY.fullmatch(command.key):
            return f"a {self.noun}'s key has letters, digits, _ and -, at most 64 of them"
        if (wrong := self.wrong_with(command)) is not None:
            return wrong
        try:
            found: T | str | None = None
            if self._directory is not None:
                self._model = self._model or self._ask_model()
                found = self._read(command.key)
            if found is not None and not isinstance(found, str) and self.is_enough(found, command):
                return found
            made = self.make(command)
            return found if made is None and isinstance(found, str) else made
        except self.refusals as error:
            return str(error)
        except Exception as error:
            log.exception("a %s could not be encoded", self.noun)
            return f"{type(error).__name__}; the engine's log says more"

    def _file(self, key: str) -> Path:
        assert self._directory is not None
        return self._directory / self._model / f"{key}.safetensors"

    def _read(self, key: str) -> T | str | None:
        """The item in a file; None: there is none; a text: it was damaged, and is removed."""
        path = self._file(key)
        try:
            with safe_open(str(path), framework="np") as handle:
                found = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
                digest = (handle.metadata() or {}).get("digest")
            if digest != _digest(key, found):
                raise ValueError("its digest is another")
            return self.of(found)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError, TypeError, RuntimeError) as error:
            log.warning("the %s in %s is damaged (%s): removed", self.noun, path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return f"the file of this {self.noun} was damaged ({error}) and is removed; send its {self.source} again"

    def _write(self, key: str, item: T) -> None:
        """Whole or not at all. A disk that refuses costs the file, not the item."""
        if self._directory is None:
            return
        try:
            self._model = self._model or self._ask_model()
            path = self._file(key)
            if path.exists():
                return
            part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            try:
                arrays = {name: np.ascontiguousarray(array) for name, array in item.arrays().items()}
                save_file(arrays, part, metadata={"digest": _digest(key, arrays)})
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
        except (OSError, SafetensorError, CheckpointError) as error:
            log.warning("a %s could not be kept in %s: %s", self.noun, self._directory, error)

    def _remove(self, key: str) -> None:
        """Removes the files of every model: a dropped item is gone for all of them."""
        assert self._directory is not None
        for path in self._directory.glob(f"*/{key}.safetensors*"):  # one that was cut off, too
            with contextlib.suppress(OSError):
                path.unlink()


def _digest(key: str, arrays: dict[str, Array]) -> str:
    digest = blake2b(key.encode(), digest_size=16)
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {list(array.shape)}".encode())
        digest.update(array.data)
    return digest.hexdigest()
