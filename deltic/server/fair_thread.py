"""One thread that prepares large requests, in which keys take turns: start-time fair queueing.

Who is served first is the scheduler's to say (`engine/scheduler.py`, `_take_turn`); here only large bodies
wait to be parsed. A key's next job is placed after its previous one, at a distance equal to that job's size,
and never before the job started last. So a key with much work waits behind itself, and a key with little
waits for the job that runs and for its turn.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar

T = TypeVar("T")


class FairThread:
    """May be used from any thread."""

    def __init__(self, name: str, most: Callable[[], int]) -> None:
        """most: the largest total size of a key's waiting jobs at the moment. A single job may be larger."""
        self._most = most
        self._thread = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        # A heap, by turn and arrival.
        self._waiting: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []
        self._n_submitted = 0
        self._turn = 0
        """The turn of the job started last."""
        self._next_turns: dict[str, int] = {}
        self._sizes: dict[str, int] = defaultdict(int)

    def submit(self, key: str, size: int, work: Callable[[], T]) -> Future[T] | None:
        """Queues `work`, which may be cancelled until it starts, and runs in the context of who asks. None:
        the key's backlog is full.
        """
        done: Future[T] = Future()
        run = partial(copy_context().run, work)
        with self._lock:
            if self._sizes[key] and self._sizes[key] + size > self._most():
                return None
            self._sizes[key] += size
            turn = max(self._turn, self._next_turns.get(key, 0))
            self._next_turns[key] = turn + size
            self._n_submitted += 1
            heappush(self._waiting, (turn, self._n_submitted, done, run))
        done.add_done_callback(lambda done: self._leave(key, size, done))
        self._thread.submit(self._do_next)
        return done

    def _do_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return  # it was cancelled
            self._turn, _, done, work = heappop(self._waiting)
        if not done.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    def _leave(self, key: str, size: int, done: Future[Any]) -> None:
        with self._lock:
            self._sizes[key] -= size
            if done.cancelled():  # what it holds is large
                self._waiting = [entry for entry in self._waiting if entry[2] is not done]
                heapify(self._waiting)
