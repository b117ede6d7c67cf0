"""The mover: one thread that does, behind the steps, whatever may wait for a disk.

What is looked for and loaded comes first, then, one object at a time, what is to be saved or deleted, in the
order in which it was asked for. A job is a function that is called once, and what was asked for together
ends with a job that hands in its ticket: the thread knows nothing of pages, files and copies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltic.engine.cache.disk import Disk, Object
from deltic.engine.cache.tree import HOST, Kind, Node

log = logging.getLogger("deltic.engine")

Job = Callable[[], None]


@dataclass(slots=True)
class Move(Object):
    """Move of one object in one direction."""

    device: int = -1
    """Index of the page or state slot in device memory; -1: not there (it is saved from the host's)."""
    units: tuple[int, ...] = ()
    """Units of host memory; none: the object is not there."""
    ok: bool = False
    """Set when it succeeded. A target whose move failed may hold a part of it."""
    is_bad: bool = False
    """Set when its file was not what it should be."""
    was_there: bool = False
    """Set when nothing was written: another server had done so."""

    @classmethod
    def of(cls, kind: Kind, node: Node, device: int | None) -> Move:
        """device: the page or state slot; None: it is in host memory only."""
        assert node.parent is not None
        units, device = kind.of(node)[HOST] or (), -1 if device is None else device
        return cls(kind, node.key, node.parent.key, node.depth, device, units)


@dataclass(slots=True)
class Ticket:
    """Moves that were asked for together."""

    number: int
    moves: list[Move]
    is_load: bool


class Mover:
    """The thread that does what may wait. It holds the tiers, and so the pools, until `close`."""

    def __init__(self, name: str, disk: Disk | None) -> None:
        self._name, self._disk = name, disk
        self._loads: deque[Job] = deque()
        self._behind: deque[Job] = deque()
        self.done: deque[Ticket] = deque()
        """Tickets that are complete, for the engine's thread to take."""
        self.n_moved = 0
        """Jobs that are over, well or not."""
        self._changed = threading.Condition()  # for the queues
        self._is_closing = False
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """True if no job waits."""
        return not (self._loads or self._behind)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def put(self, jobs: Sequence[Job], *, before_saves: bool = False, first: bool = False) -> None:
        """Has jobs done in this order. before_saves: with the loads. first: before what waits there."""
        with self._changed:
            queue = self._loads if before_saves else self._behind
            if first:
                queue.extendleft(reversed(jobs))
            else:
                queue.extend(jobs)
            self._changed.notify_all()
        self.start()

    def start(self) -> None:
        """Starts the thread, if that was not done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def wait(self, condition: Callable[[], object], timeout_s: float) -> None:
        """Waits until `condition` holds, which is looked at whenever a ticket is complete, or until the time
        is up.
        """
        with self._changed:
            self._changed.wait_for(condition, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Lets what was asked for be done for so long, then stops the thread.

        What remains undone is never finished.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is None:
            if self._disk is not None:
                self._disk.directory.leave()
            return
        self._thread.join(timeout_s)
        with self._changed:
            self._loads.clear()
            self._behind.clear()
        # The object at hand. A disk that hangs holds up no one: the thread is a daemon.
        self._thread.join(1.0)

    def _run(self) -> None:
        disk = self._disk
        if sys.platform == "linux":  # where a thread has a niceness of its own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            with self._changed:
                until_s = None if disk is None else max(0.0, disk.beat_at - time.monotonic())
                self._changed.wait_for(lambda: self._loads or self._behind or self._is_closing, until_s)
                queue = self._loads or self._behind
                job = queue.popleft() if queue else None
                if job is None and self._is_closing:
                    break
            if disk is not None and time.monotonic() >= disk.beat_at:
                disk.beat()
            if job is None:
                continue
            try:
                job()
            except Exception:  # its moves stay not ok, and the next may be better
                log.exception("prefix cache: a move failed")
            self.n_moved += 1
            if self.done:
                with self._changed:
                    self._changed.notify_all()
        if disk is not None:
            disk.directory.leave()
