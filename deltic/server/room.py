"""Room for slots or bytes that keys have in turns, by size (`Turns`, engine/turns.py): for pictures that are
decoded, and for their pixels.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from deltic.engine.turns import Turns


class Held:
    """A part of a Room, until all that use it have left."""

    def __init__(self, room: Room, key: str, size: int) -> None:
        self.size = size
        self._room, self._key, self._n_users = room, key, 1

    def enter(self) -> None:
        """Counts one more user."""
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
            tenant = key.partition("/")[0]
            if got.cancelled():
                continue
            if self._taken[tenant] and self._taken[tenant] + size > share:
                self._waiting.append(entry)
            elif size > left and self._taken.total():
                left = 0  # nobody passes whom room is lacking for
                self._waiting.append(entry)
            else:
                self._turns.now = max(self._turns.now, turn)
                self._taken[tenant] += size
                left -= size
                got.set_result(Held(self, key, size))
