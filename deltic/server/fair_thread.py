"""What keys take in turns: a thread that prepares large requests, or reads and writes files, and room for
slots or bytes. Start-time fair queueing.

Who is served first is the scheduler's to say (`engine/scheduler.py`, `_take_turn`); here large bodies wait to
be parsed, and pictures and recordings to be decoded. A key's next job is placed after its previous one, at a
distance equal to that job's size, and never before the job started last. So a key with much work waits behind
itself, and a key with little waits for the job that runs and for its turn.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar

T = TypeVar("T")


class Turns:
    """Numbers in whose order the work of all keys is to be done."""

    def __init__(self) -> None:
        self.now = 0
        """The turn of what was begun last."""
        self._next: dict[str, int] = {}

    def give(self, key: str, size: int) -> int:
        turn = max(self.now, self._next.get(key, 0))
        self._next[key] = turn + size
        return turn


class FairThread:
    """May be used from any thread; its backlog, `enter` and `leave`, from one."""

    def __init__(self, name: str, most: Callable[[], int]) -> None:
        """most: the largest total size of a key's waiting jobs at the moment. A single job may be larger."""
        self._most = most
        self._thread = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        # A heap, by turn and arrival.
        self._waiting: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []
        self._n_submitted = 0
        self._turns = Turns()
        self._sizes: dict[str, int] = defaultdict(int)

    def enter(self, key: str, size: int) -> bool:
        """Counts a body as the key's until it `leaves`, whatever it waits for. False: it has too much."""
        if self._sizes[key] and self._sizes[key] + size > self._most():
            return False
        self._sizes[key] += size
        return True

    def leave(self, key: str, size: int) -> None:
        self._sizes[key] -= size

    def submit(self, key: str, size: int, work: Callable[[], T]) -> Future[T]:
        """Queues `work`, which may be cancelled until it starts, and runs in the context of who asks."""
        done: Future[T] = Future()
        run: Callable[[], Any] = partial(copy_context().run, work)
        with self._lock:
            self._n_submitted += 1
            heappush(self._waiting, (self._turns.give(key, size), self._n_submitted, done, run))
        done.add_done_callback(self._drop_cancelled)
        self._thread.submit(self._do_next)
        return done

    def close(self) -> None:
        """Waits for what was submitted."""
        self._thread.shutdown()

    def _do_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return  # it was cancelled
            self._turns.now, _, done, work = heappop(self._waiting)
        if not done.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    def _drop_cancelled(self, done: Future[Any]) -> None:
        if done.cancelled():  # what it holds is large
            with self._lock:
                self._waiting = [entry for entry in self._waiting if entry[2] is not done]
                heapify(self._waiting)


class Held:
    """A part of a Room, until all that use it have left."""

    def __init__(self, room: Room, key: str, size: int) -> None:
        self.size = size
        self._room, self._key, self._n_users = room, key, 1

    def enter(self) -> None:
        """One more uses it."""
        self._n_users += 1

    def leave(self) -> None:
        self._n_users -= 1
        if not self._n_users:
            self.shrink(0)

    def shrink(self, size: int) -> None:
        """Gives back what is more than `size`."""
        self._room.give_back(self._key, self.size - size)
        self.size = size

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class Room:
    """An amount that all keys share, slots or bytes: who waits for some of it has a turn. Of one event loop.

    A key's batches (`KEY/batches`) have turns of their own and count as the key.
    """

    def __init__(self, most: Callable[[], int], n_shares: int = 1) -> None:
        """most: of all keys together. n_shares: one of so many is all that a key may have."""
        self._most, self._n_shares = most, n_shares
        self._turns = Turns()
        self._taken: Counter[str] = Counter()
        self._waiting: list[tuple[int, str, int, asyncio.Future[Held]]] = []  # in order of arrival

    @property
    def share(self) -> int:
        """The most that a key may have."""
        return max(1, self._most() // self._n_shares)

    async def take(self, key: str, size: int) -> Held:
        """Waits for so much, or for a share if that is less; whoever gets it leaves it."""
        got: asyncio.Future[Held] = asyncio.get_running_loop().create_future()
        size = min(size, self.share)
        self._waiting.append((self._turns.give(key, size), key, size, got))
        self._serve()
        try:
            return await got
        except asyncio.CancelledError:
            if got.cancelled():
                self._serve()
            else:
                got.result().leave()
            raise

    def give_back(self, key: str, size: int) -> None:
        self._taken[key.partition("/")[0]] -= size
        self._serve()

    def _serve(self) -> None:
        """Hands out what there is, in the order of turns. A key that has its share lets others pass."""
        share, left = self.share, self._most() - self._taken.total()
        waiting, self._waiting = sorted(self._waiting, key=lambda entry: entry[0]), []
        for entry in waiting:
            turn, key, size, got = entry
            owner = key.partition("/")[0]
            if got.cancelled():
                continue
            if self._taken[owner] and self._taken[owner] + size > share:
                self._waiting.append(entry)
            elif size > left and self._taken.total():
                left = 0  # nobody passes whom room is lacking for
                self._waiting.append(entry)
            else:
                self._turns.now = max(self._turns.now, turn)
                self._taken[owner] += size
                left -= size
                got.set_result(Held(self, key, size))
