"""A thread that keys have in turns, by size (`Turns`, engine/turns.py).

One parses large bodies and makes prompts of them. Others compile grammars, write files and decode recordings.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar

from deltic.engine.turns import Turns
from deltic.text import pause

T = TypeVar("T")

MAX_BEGUN = 16
"""The most jobs that have begun, each with a thread, if as many keys have a long one."""

SWITCH_S = 0.0005
"""Seconds that Python (by default 0.005) lets a job keep the lock while the event loop waits for it: once for
each connection that has sent something.
"""


@dataclass(order=True)
class ThreadTurn:
    """Place in the order in which the work of all keys is done."""

    at: int
    n: int
    """Number of turns that were given before."""
    end: int = field(compare=False)
    """The turn of its key's next."""


class _Result(Future[T]):
    """Result of a job, which may be given up when it is half done."""

    is_given_up = False

    def cancel(self) -> bool:
        self.is_given_up = True
        return super().cancel()


@dataclass(order=True)
class _Job:
    turn: ThreadTurn
    done: _Result[Any] = field(compare=False)
    work: Callable[[], object] = field(compare=False)
    goes_on: threading.Event | None = field(default=None, compare=False)
    """Set when it may go on. None: it was not begun."""


class FairThread:
    """Does one job at a time; one that is long lets others pass where it calls `pause` (text.py), and has
    a thread of its own meanwhile. May be used from any thread; what it counts of bodies, from one.
    """

    def __init__(self, name: str, most: Callable[[], int]) -> None:
        """most: bytes of all bodies that a key may have here at the moment. Its oldest is taken whatever
        there is.
        """
        self._most = most
        sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
        self._threads = ThreadPoolExecutor(MAX_BEGUN, name)
        self._lock = threading.Lock()
        self._waiting: list[_Job] = []  # a heap
        self._current: _Job | None = None
        self._n_given = self._n_begun = 0
        self._turns = Turns()
        self._bodies: dict[str, dict[object, int]] = defaultdict(dict)  # by key, the oldest first
        self._sizes: Counter[str] = Counter()

    def hold(self, key: str, body: object, size: int) -> bool:
        """Counts a body of a key as so large by now, until it `leaves`. False: it has too much."""
        bodies = self._bodies[key]
        more = size - bodies.get(body, 0)
        if next(iter(bodies), body) is not body and self._sizes[key] + more > self._most():
            return False
        bodies[body] = size
        self._sizes[key] += more
        return True

    def leave(self, key: str, body: object) -> None:
        """Forgets a body, if it was counted."""
        self._sizes[key] -= self._bodies[key].pop(body, 0)

    def turn(self, key: str, size: int) -> ThreadTurn:
        """A key's next turn, of so many bytes."""
        with self._lock:
            self._n_given += 1
            at = self._turns.give(key, size)
            return ThreadTurn(at, self._n_given, at + size)

    def submit(self, key: str, size: int, work: Callable[[], T]) -> Future[T]:
        """Queues `work`, which runs in the context of who asks. It may be cancelled: once it has started, it
        ends where it pauses next.
        """
        return self.submit_in(self.turn(key, size), work)

    def submit_in(self, turn: ThreadTurn, work: Callable[[], T]) -> Future[T]:
        """Queues `work` in a turn, perhaps that of what it follows: work in several parts has one for all."""
        done = _Result[T]()
        context = copy_context()
        with self._lock:
            job = _Job(turn, done, partial(context.run, work))
            context.run(pause.set, partial(self._pause, job))
            heappush(self._waiting, job)
            self._go_on()
        done.add_done_callback(self._drop_cancelled)
        return done

    def close(self) -> None:
        """Waits for what was submitted."""
        while jobs := [*self._waiting, *filter(None, [self._current])]:
            wait([job.done for job in jobs])
        self._threads.shutdown()

    def _go_on(self) -> None:
        """Has the first of those that wait done, if none is. The caller has the lock."""
        if self._current is not None or not self._waiting:
            return
        self._current = job = heappop(self._waiting)
        self._turns.now = max(self._turns.now, job.turn.at)
        if job.goes_on is None:
            job.goes_on = threading.Event()
            self._n_begun += 1
            self._threads.submit(self._do)
        else:
            job.goes_on.set()

    def _do(self) -> None:
        job = self._current
        assert job is not None
        if job.done.set_running_or_notify_cancel():
            try:
                result = job.work()
            except BaseException as error:
                job.done.set_exception(error)
            else:
                job.done.set_result(result)
        del job.work  # what it holds is large, and its context holds the job
        del job  # an error has this frame, and the job the error
        with self._lock:
            self._n_begun -= 1
            self._current = None
            self._go_on()

    def _pause(self, job: _Job, n: int) -> None:
        """Has a job that has done n more of its bytes go on when its turn comes. Raises CancelledError if
        nobody waits for it any more.
        """
        if job.done.is_given_up:
            del job  # which has the error, and the error this frame
            raise CancelledError
        with self._lock:
            job.turn.at = min(job.turn.at + n, job.turn.end)
            self._turns.now = max(self._turns.now, job.turn.at)
            first = self._waiting[0] if self._waiting else None
            if first is None or job < first or (first.goes_on is None and self._n_begun == MAX_BEGUN):
                return
            assert job.goes_on is not None
            job.goes_on.clear()
            heappush(self._waiting, job)
            self._current = None
            self._go_on()
        job.goes_on.wait()

    def _drop_cancelled(self, done: Future[Any]) -> None:
        with self._lock:
            for job in [job for job in self._waiting if job.done is done]:
                del job.work  # what it holds is large, and its context holds the job
                self._waiting.remove(job)
                heapify(self._waiting)
