"""Order in which the owners of requests, most often API keys, get what all of them share.

Start-time fair queueing: an owner's next job is placed after its previous one, at a distance equal to that
job's size, and never before the job that was begun last. So an owner with much work waits behind itself, and
one with little waits for the job that runs and for its turn.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from itertools import zip_longest
from threading import Lock
from typing import Generic, TypeVar

from deltic.engine.step import Sequence

Item = TypeVar("Item")


class Turns:
    """Numbers in whose order the work of all owners is to be done."""

    def __init__(self) -> None:
        self.now = 0
        """The turn of what was begun last."""
        self._next: dict[str, int] = {}

    def give(self, owner: str, size: int) -> int:
        turn = max(self.now, self._next.get(owner, 0))
        self._next[owner] = turn + size
        return turn


class Shares(Generic[Item]):
    """A cache whose room parties share: the one that has the most loses what it used least recently.

    Each party finds its own items only, since that one is there already tells that somebody asked for it. Any
    thread may call.
    """

    def __init__(self, room: int, size_of: Callable[[Item], int] = lambda _: 1) -> None:
        """room: the most that all items may have together, as `size_of` says of one; else their number."""
        self._room, self._size_of = room, size_of
        self._items: OrderedDict[tuple[str, Hashable], Item] = OrderedDict()  # what was used last is last
        self._used: Counter[str] = Counter()  # by party
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, party: str, key: Hashable) -> Item | None:
        """Finds an item of a party, and notes that it was used."""
        with self._lock:
            if (party, key) in self._items:
                self._items.move_to_end((party, key))
            return self._items.get((party, key))

    def put(self, party: str, key: Hashable, item: Item) -> None:
        """Keeps an item, unless the party has one of this key. Others go until all have room."""
        with self._lock:
            if (party, key) in self._items:
                return
            self._items[party, key] = item
            self._used[party] += self._size_of(item)
            while self._used.total() > self._room:
                most = max(self._used, key=self._used.__getitem__)
                oldest = next(kept for kept in self._items if kept[0] == most)
                self._used[most] -= self._size_of(self._items.pop(oldest))


def rank(sequence: Sequence) -> tuple[int, int, int, int]:
    """The sequence with the lower rank goes first.

    Ranks are unique among the open sequences. Sequences of one owner are in the order of their priorities,
    then of their arrival. Two of different owners change places only when one of the owners sends something
    more urgent.
    """
    return max(0, sequence.request.priority), sequence.turn, sequence.arrival, sequence.index


def in_turns(prefills: list[Sequence], n_had: dict[str, int]) -> tuple[list[Sequence], dict[str, int]]:
    """Prefills, which are given by rank, in the order in which their prompts are computed. Of several owners
    one has its next before another has its second, and that one comes first who has had the fewest tokens.

    n_had: those tokens, by owner. Given back of the owners of today; who is new starts with the fewest.
    """
    of_owner: dict[str, list[Sequence]] = {}
    for sequence in prefills:
        of_owner.setdefault(sequence.request.owner, []).append(sequence)
    least = min((n_had[owner] for owner in of_owner if owner in n_had), default=0)
    n_had = {owner: n_had.get(owner, least) for owner in of_owner}
    if len(of_owner) <= 1:
        return prefills[:], n_had
    rows = zip_longest(*(of_owner[owner] for owner in sorted(of_owner, key=n_had.__getitem__)))
    return [sequence for row in rows for sequence in row if sequence is not None], n_had


def giving_way(
    running: list[Sequence], n: int, n_places: int, n_pages: int, n_freed: Callable[[Sequence], int]
) -> list[Sequence]:
    """The running sequences that give up places and pages for n sequences of an owner who has none.

    They are those of the lowest priority, then of the owner with the most, the youngest first; an owner is
    left as many as the newcomer gets. None, if that is not enough. n_freed: pages that one gives up.
    """
    found, places = list[Sequence](), Counter[str]()
    for sequence in running:
        places[sequence.request.owner] += 1 + len(sequence.siblings)
    while n_places > 0 or n_pages > 0:
        running = [s for s in running if s.request.priority > 0 or places[s.request.owner] > n + len(s.siblings)]
        if not running:
            return []
        last = max(running, key=lambda s: (rank(s)[0], places[s.request.owner], rank(s)))
        running.remove(last)
        found.append(last)
        places[last.request.owner] -= 1 + len(last.siblings)
        n_places -= 1 + len(last.siblings)
        n_pages -= n_freed(last)
    return found
