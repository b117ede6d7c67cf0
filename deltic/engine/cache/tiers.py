"""The bytes of the prefix cache below device memory: units of host memory, and files.

This file moves. `tree.py` says what is worth keeping, `placement.py` when it moves, `disk.py` what a file
is. Host copies for eviction and preemption happen at once, in the engine's thread. Everything that may wait
for a disk is done behind the steps, by the mover: one thread. What is looked for and loaded comes first,
then, one object at a time, what is to be saved or deleted, in the order in which it was asked for. A job is
a function that is called once, and what was asked for together ends with a job that hands in its ticket: the
thread knows nothing of pages, files and copies.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from deltic.engine.cache.directory import Object
from deltic.engine.cache.disk import Disk, Search, Survey
from deltic.engine.cache.tree import HOST, Kind, Node
from deltic.engine.messages import EngineInfo
from deltic.engine.mirror import AskedMoves, Errand, Machines
from deltic.machine import be_nice

log = logging.getLogger("deltic.engine")

Bytes = npt.NDArray[np.uint8]

Job = Callable[[], None]

LOOK_S = 0.002
"""Seconds after which one who waits for other machines looks at this one's tickets."""

MOVER = "cache-mover"
"""Name of the thread that does what may wait."""


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

    @property
    def sent(self) -> tuple[str, bytes, bytes, int, int, tuple[int, ...]]:
        """Fields for another machine."""
        return self.kind, self.key, self.parent, self.depth, self.device, self.units


@dataclass(slots=True, eq=False)
class MoveTicket:
    """Moves that were asked for together."""

    number: int
    moves: list[Move]
    is_load: bool
    errand: Errand | None = None
    """The same of other machines."""

    @property
    def is_done(self) -> bool:
        """True if nobody is at work any more."""
        return self.errand is None or self.errand.is_done


class Mover:
    """The thread that does what may wait. It holds the tiers, and so the pools, until `close`."""

    def __init__(self, name: str, disk: Disk | None) -> None:
        self._name, self._disk = name, disk
        self._loads: deque[Job] = deque()
        self._behind: deque[Job] = deque()
        self.done: deque[MoveTicket] = deque()
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
        be_nice()
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


class Copies(Protocol):
    """Device memory that the host cannot address (runtime.gpu.copies.DeviceCopies).

    The views that Tiers is given are those of a staging buffer then, one for each of its two threads.
    """

    def mark(self) -> object:
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
    """Host memory and disk, as the engine's thread asks for them."""

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
        """page, state: the bytes of a page or state slot in device memory, as writable, contiguous,
        one-dimensional views;
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
        self.machines: Machines | None = None
        """Machines with further layers of the model, each of which has its part of a page and of a state."""
        self.largest = self._n_bytes
        """Bytes of a page and a state on the machine that has most of them: what the disk's budget counts."""
        self.n_units = 0 if host is None else host.shape[0]
        self.units_per_state = -(-state_bytes // page_bytes)
        self.disk_bytes = disk_bytes
        self.disk = Disk(directory, fingerprint, self._n_bytes) if directory is not None and disk_bytes > 0 else None
        self.mover = Mover(MOVER, self.disk)
        self.takes_evicted = True
        """True if host memory is for what is evicted, too, and not for preempted sequences alone."""
        self.takes_imports = False
        """True if files may come from elsewhere though no other server uses the directory."""
        self.n_pending = 0
        """Tickets that `finished` has not given yet."""
        self._n_tickets = 0
        self.read_bytes = {"host": 0, "disk": 0}
        self.written_bytes = {"host": 0, "disk": 0}

    @property
    def is_idle(self) -> bool:
        """True if nothing waits for the mover, and no survey is under way."""
        return self.mover.is_idle and (self.disk is None or self.disk.is_idle)

    @property
    def notices(self) -> list[str]:
        """Notices of the directory for `deltic serve` to print."""
        return [] if self.disk is None else self.disk.notices

    @property
    def n_damaged(self) -> int:
        """Files that were not what they should be."""
        return 0 if self.disk is None else self.disk.n_damaged

    @property
    def n_moved(self) -> int:
        """Number of moves that the mover has done, well or not: it stands still where the disk hangs."""
        return self.mover.n_moved + (0 if self.machines is None else self.machines.n_heard)

    @property
    def may_have_foreign(self) -> bool:
        """True if there may be files in the directory that this server does not know."""
        return self.disk is not None and (self.takes_imports or self.disk.has_foreign)

    def follow(self) -> None:
        """The engine's thread is there and evicts; called before every step."""
        if self.disk is not None:
            self.disk.follow()
            self.mover.start()

    # At once.

    def copy_out(self, move: Move) -> None:
        """Copies an object from device memory to host units."""
        _copy(self._fetched(move, self._mark()), self._units(move))
        self.tell("out", move)
        self.written_bytes["host"] += self._n_bytes[move.kind]
        move.ok = True

    def copy_in(self, move: Move) -> None:
        """Copies an object from host units to device memory."""
        _copy(self._units(move), self._device[move.kind](move.device))
        self._store(move, self._mark())
        self.tell("in", move)
        self.read_bytes["host"] += self._n_bytes[move.kind]
        move.ok = True

    def tell(self, action: Literal["out", "in", "delete", "clear", "resume"], *moves: Move) -> None:
        """Has other machines do the same, without an answer."""
        if self.machines is not None:
            self.machines.tell(AskedMoves(action, [move.sent for move in moves]))

    def _mark(self) -> object:
        return self._copies.mark() if self._copies else None

    def _fetched(self, move: Move, mark: object) -> list[Bytes]:
        """The bytes of an object in device memory, after what is marked."""
        views = self._device[move.kind](move.device)
        if self._copies:
            self._copies.fetch(move.kind, move.device, mark)
        return views

    def _store(self, move: Move, mark: object) -> None:
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
        return self._ask(self._load, moves, is_load=True)

    def share(self, machines: Machines, largest: dict[Kind, int], units_per_state: int) -> None:
        """Has other machines do the same from now on. largest: as the attribute."""
        self.machines, self.largest, self.units_per_state = machines, largest, units_per_state

    def save(self, moves: list[Move]) -> int:
        """Has objects written to disk, from device memory or else from their units. Returns the ticket, as
        `load`.
        """
        return self._ask(self._save, moves, is_load=False)

    def _ask(self, action: Callable[[Move, object], None], moves: list[Move], is_load: bool) -> int:
        # What wrote to these pages and state slots before was asked for by now: a copy need not wait for the
        # steps that follow.
        mark = self._mark()
        jobs = [functools.partial(action, move, mark) for move in moves]
        errand = None
        if self.machines is not None:
            errand = self.machines.ask(AskedMoves("load" if is_load else "save", [move.sent for move in moves]))
        end = self._ticket(moves, is_load, errand)
        self.mover.put([*jobs, end], before_saves=is_load)
        return self._n_tickets

    def _ticket(self, moves: list[Move], is_load: bool, errand: Errand | None = None) -> Job:
        """The job that says that all before it were done."""
        self._n_tickets += 1
        self.n_pending += 1
        return functools.partial(self.mover.done.append, MoveTicket(self._n_tickets, moves, is_load, errand))

    def search(self, search: Search) -> int:
        """Has files of other servers looked for, before all else. Returns the ticket, as `load`."""
        assert self.disk is not None
        jobs: list[Job] = [functools.partial(self.disk.search, search), self._ticket([], is_load=True)]
        self.mover.put(jobs, before_saves=True, first=True)
        return self._n_tickets

    def finished(self) -> list[tuple[int, list[Move]]]:
        """Tickets that were completed, each once."""
        done = self.mover.done
        if self.machines is not None:
            self.machines.hear()
        tickets = []
        for ticket in [ticket for ticket in done.copy() if ticket.is_done]:
            done.remove(ticket)
            self.n_pending -= 1
            tickets.append((ticket.number, ticket.moves))
            if ticket.errand is not None:
                self._join(ticket, ticket.errand)
            for move in ticket.moves:  # counted here, where no other thread counts
                if move.ok and ticket.is_load:
                    self.read_bytes["host" if move.units else "disk"] += self._n_bytes[move.kind]
                elif move.ok and not move.was_there:
                    self.written_bytes["disk"] += self._n_bytes[move.kind]
        return tickets

    def _join(self, ticket: MoveTicket, errand: Errand) -> None:
        """Has moves fail that have failed on any machine: who loses its share of an object loses it for all,
        so that no file is left which would be tried again and again.
        """
        failed = {i for answer in errand.answers for i in answer.failed}
        for move in (move for i, move in enumerate(ticket.moves) if i in failed or not move.ok):
            if not ticket.is_load:
                self.delete(move.kind, move.key)
            elif move.ok:
                move.is_bad = not move.units
            move.ok = False
        if failed and not ticket.is_load and self.disk is not None:
            self.disk.pause(self.disk.is_full or any(answer.is_full for answer in errand.answers))

    def wait(self, timeout_s: float) -> None:
        """Waits until a ticket is complete or the time is over. Returns at once if none is under way."""
        if self.machines is None:
            self.mover.wait(lambda: self.mover.done or not self.n_pending, timeout_s)
            return
        until_s = time.monotonic() + timeout_s
        while self.n_pending and not any(ticket.is_done for ticket in self.mover.done.copy()):
            if (left_s := until_s - time.monotonic()) <= 0:
                return
            self.machines.hear(min(left_s, LOOK_S))

    def delete(self, kind: Kind, key: bytes) -> None:
        """Removes a file, after the saves that were asked for before. One that is missing is fine."""
        if self.disk is not None:
            self.mover.put([functools.partial(self.disk.delete, kind, key)])
            self.tell("delete", Move(kind, key))

    def clear(self) -> None:
        """Removes every file of this model, before it returns. Nothing may be moved meanwhile."""
        if self.disk is not None:
            self.disk.clear()
            self.tell("clear")

    def survey(self) -> None:
        """Has the directory looked through, behind what was asked for before: `Disk.surveyed` then says what
        came of it. One that is under way does.
        """
        if self.disk is not None and (survey := self.disk.begin_survey()) is not None:
            self.mover.put([functools.partial(self._survey_all, self.disk, survey)])

    def _survey_all(self, disk: Disk, survey: Survey) -> None:
        jobs = [functools.partial(disk.survey_part, survey, part) for part in disk.parts()]
        # One at a time, since a load may come between them.
        self.mover.put([*jobs, functools.partial(disk.end_survey, survey)], first=True)

    def close(self, timeout_s: float) -> None:
        """Closes the mover (see `Mover.close`)."""
        self.mover.close(timeout_s)

    # The mover's.

    def _load(self, move: Move, mark: object) -> None:
        target = self._device[move.kind](move.device)
        if move.units:
            _copy(self._units(move), target)
        elif self.disk is None:
            return
        else:
            is_read, move.is_bad = self.disk.read(move, [view.data for view in target])
            if not is_read:
                return
        self._store(move, mark)
        move.ok = True

    def _save(self, move: Move, mark: object) -> None:
        disk = self.disk
        if disk is None or not disk.can_save:
            return
        if self.may_have_foreign and disk.has(move):
            move.ok = move.was_there = True
            return
        source = self._fetched(move, mark) if move.device >= 0 else self._units(move)
        move.ok = disk.write(move, [view.data for view in source])


def no_tiers(info: EngineInfo) -> Tiers:
    """Neither host memory nor a disk: device memory is all there is."""
    page = np.empty(info.page_bytes, np.uint8)
    tiers = Tiers(lambda _: [page], lambda _: [], None, info.state_bytes, None, 0, "")
    tiers.read_bytes = tiers.written_bytes = {}
    return tiers


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
