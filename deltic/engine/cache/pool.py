"""Reference-counted indices: of pages, state slots, batch slots, and units of host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class IntegrityError(AssertionError):
    """Pages or state slots do not add up; the message names the first thing that is off."""


class Pool:
    """Reference-counted indices 0 … n - 1, of pages, state slots or units.

    The one freed last is taken first: it is warm.
    """

    def __init__(self, name: str, n: int) -> None:
        self.name = name
        self.n = n
        self.n_owners = [0] * n
        self.n_idle = 0
        """Number of indices that the prefix tree alone owns."""
        self._free = list(range(n - 1, -1, -1))
        self._in_tree = [False] * n

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_available(self) -> int:
        """Free, or free once the tree gives them up."""
        return len(self._free) + self.n_idle

    def is_idle(self, index: int) -> bool:
        return self._in_tree[index] and self.n_owners[index] == 1

    def n_freed(self, indices: Iterable[int]) -> int:
        """Returns the number of these indices that would be available if one owner gave them back."""
        return sum(self.n_owners[index] - self._in_tree[index] == 1 for index in indices)

    def take(self, n: int) -> list[int]:
        """`n` free ones, now with one owner each. The caller has checked that there are as many."""
        if n > len(self._free):
            raise IntegrityError(f"{n} {self.name}s asked for, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(n)]
        for index in taken:
            self.n_owners[index] = 1
        return taken

    def share(self, indices: Iterable[int]) -> None:
        """Adds an owner to each index."""
        for index in indices:
            self.n_idle -= self.is_idle(index)
            self.n_owners[index] += 1

    def give_back(self, indices: Iterable[int]) -> None:
        """Takes an owner from each index; those left without any are free again. Raises IntegrityError for an
        index that had none.
        """
        for index in indices:
            self.n_owners[index] -= 1
            if self.n_owners[index] == 0:
                self._free.append(index)
            elif self.n_owners[index] < 0:
                raise IntegrityError(f"{self.name} {index} was given back more often than taken")
            self.n_idle += self.is_idle(index)

    def hand_to_tree(self, index: int) -> None:
        """An owner's share passes to the tree, which has none yet."""
        assert not self._in_tree[index]
        self._in_tree[index] = True
        self.n_idle += self.is_idle(index)

    def hand_back(self, index: int) -> None:
        """The tree's share passes to the caller."""
        self.n_idle -= self.is_idle(index)
        self._in_tree[index] = False

    def check(self, held: Counter[int]) -> None:
        """Raises IntegrityError unless exactly those of `held` (index -> owners) are in use."""
        for index, n_owners in enumerate(self.n_owners):
            if held.get(index, 0) != n_owners:
                raise IntegrityError(f"{self.name} {index} counts {n_owners} owners, {held[index]} sequences hold it")
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError(f"{len(self._free) - len(free)} {self.name}s are twice in the free list")
        in_use = {index for index, n_owners in held.items() if n_owners > 0}
        if both := free & in_use:
            raise IntegrityError(f"{self.name} {min(both)} is free and held")
        if len(free) + len(in_use) != self.n:
            raise IntegrityError(f"{len(in_use)} {self.name}s held + {len(free)} free is not {self.n}")
        n = sum(in_tree and n_owners == 1 for in_tree, n_owners in zip(self._in_tree, self.n_owners, strict=True))
        if self.n_idle != n:
            raise IntegrityError(f"{self.n_idle} {self.name}s count as idle, and {n} are")
