"""Order in which the tenants of requests, most often API keys, get what all of them share: threads, decoders,
masks. (Who runs in a step is `admission.py`.)

Start-time fair queueing: a tenant's next job is placed after its previous one, at a distance equal to that
job's size, and never before the job that was begun last. So a tenant with much work waits behind itself, and
one with little waits for the job that runs and for its turn.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from threading import Lock
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Turns:
    """Numbers in whose order the work of all tenants is to be done."""

    def __init__(self) -> None:
        self.now = 0
        """The turn of what was begun last."""
        self._next: dict[str, int] = {}

    def give(self, tenant: str, size: int) -> int:
        turn = max(self.now, self._next.get(tenant, 0))
        self._next[tenant] = turn + size
        return turn


class TimeShares:
    """Shares of the time of steps: what a piece of work for a tenant took, it owes to the others, whose work
    has as long before it has the next.
    """

    def __init__(self, n_open_of: Counter[str], can_be_brief: bool) -> None:
        """n_open_of: sequences, by tenant. can_be_brief: whether short pieces of work cost little."""
        self.working = set[str]()
        """The tenants who have something in the step, or whose picture is encoded behind it."""
        self._n_open_of, self._can_be_brief = n_open_of, can_be_brief
        self._owed_s: dict[str, float] = {}

    @property
    def is_brief(self) -> bool:
        """True if work for a tenant should be short, since there are others."""
        return self._can_be_brief and len(self._n_open_of) > 1

    @property
    def owing(self) -> list[str]:
        """The tenants who owe."""
        return list(self._owed_s)

    def waits(self, tenant: str, others: Iterable[str] | None = None) -> bool:
        """Returns whether a tenant owes to one of others, by default of those working, who has no more
        sequences open.
        """
        if not self.is_brief or tenant not in self._owed_s:
            return False
        n_of, others = self._n_open_of, self.working if others is None else others
        return any(n_of[other] <= n_of[tenant] for other in others if other != tenant)

    def owe(self, tenants: set[str], seconds: float) -> None:
        """Notes a piece of work for these tenants. What they owed before is forgotten: nobody has asked for
        it.
        """
        self._owed_s |= dict.fromkeys(tenants, seconds)

    def pay(self, tenant: str, seconds: float) -> None:
        """Notes that others had so long of what a tenant owes."""
        self._owed_s[tenant] -= seconds
        if self._owed_s[tenant] <= 0.0:
            del self._owed_s[tenant]


class NamespaceShares(Generic[Item]):
    """A cache whose room namespaces share: the one that has the most loses what it used least recently.

    Each namespace finds its own items only, since that one is there already tells that somebody asked for it.
    Any thread may call.
    """

    def __init__(self, room: int, size_of: Callable[[Item], int] = lambda _: 1) -> None:
        """room: the most that all items may have together, as `size_of` says of one; else their number."""
        self._room, self._size_of = room, size_of
        self._items: OrderedDict[tuple[str, Hashable], Item] = OrderedDict()  # what was used last is last
        self._used: Counter[str] = Counter()  # by namespace
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, namespace: str, key: Hashable) -> Item | None:
        """Finds an item of a namespace, and notes that it was used."""
        with self._lock:
            if (namespace, key) in self._items:
                self._items.move_to_end((namespace, key))
            return self._items.get((namespace, key))

    def put(self, namespace: str, key: Hashable, item: Item) -> None:
        """Keeps an item, unless the namespace has one of this key. Others go until all have room."""
        with self._lock:
            if (namespace, key) in self._items:
                return
            self._items[namespace, key] = item
            self._used[namespace] += self._size_of(item)
            while self._used.total() > self._room:
                most = max(self._used, key=self._used.__getitem__)
                oldest = next(kept for kept in self._items if kept[0] == most)
                self._used[most] -= self._size_of(self._items.pop(oldest))


def share_of(most: int, n_tenants: int) -> int:
    """Returns what each of so many tenants may have of `most`, and nobody can take from it."""
    return -(-most // n_tenants)
