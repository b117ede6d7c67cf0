"""Who owns which page and which state slot: the two memories of the engine, as integers.

A page holds the keys and values of PAGE_SIZE tokens for all attention layers, a state slot one recurrent
state and one convolution window for every DeltaNet layer. This file only counts; the bytes are the runner's.
Pages are reference-counted, since sequences that fork off one prompt share its full pages; a slot has one
owner.

The slot of a sequence whose `n_computed` is 0 holds whatever its last owner left: a chunk that starts at 0
starts from the zero state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from deltic.engine.request import PAGE_SIZE, Sequence


class IntegrityError(AssertionError):
    """Pages or slots do not add up; the message names the first thing that is off."""


def pages_for(n_tokens: int) -> int:
    """Pages that hold `n_tokens` tokens."""
    return -(-n_tokens // PAGE_SIZE)


class PagePool:
    """A reference-counted free list of pages 0 … n_pages - 1. The page freed last is taken first: it is warm."""

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self.n_owners = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """`n` free pages, now with one owner each. The caller has checked that there are as many."""
        if n > len(self._free):
            raise IntegrityError(f"{n} pages asked for, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self.n_owners[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """One more owner for each of `pages`."""
        for page in pages:
            self.n_owners[page] += 1

    def give_back(self, pages: list[int]) -> None:
        """One owner less for each of `pages`; those without any are free again."""
        for page in reversed(pages):
            self.n_owners[page] -= 1
            if self.n_owners[page] == 0:
                self._free.append(page)
            elif self.n_owners[page] < 0:
                raise IntegrityError(f"page {page} was given back more often than taken")

    def check(self, held: Counter[int]) -> None:
        """Raises IntegrityError unless exactly the pages of `held` (page -> owners) are in use."""
        for page, n_owners in enumerate(self.n_owners):
            if held[page] != n_owners:
                raise IntegrityError(f"page {page} counts {n_owners} owners, {held[page]} sequences hold it")
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError(f"{len(self._free) - len(free)} pages are twice in the free list")
        if both := free & held.keys():
            raise IntegrityError(f"page {min(both)} is free and held")
        if len(free) + len(held) != self.n_pages:
            raise IntegrityError(f"{len(held)} pages held + {len(free)} free is not {self.n_pages}")


class Cache:
    """Pages and slots of the sequences. Every change to a sequence's `pages` or `slot` is made here."""

    def __init__(self, n_pages: int, n_slots: int) -> None:
        self.pages = PagePool(n_pages)
        self.n_slots = n_slots
        self._free_slots = list(range(n_slots - 1, -1, -1))

    @property
    def n_slots_used(self) -> int:
        return self.n_slots - len(self._free_slots)

    @property
    def n_pages_used(self) -> int:
        return self.pages.n_pages - self.pages.n_free

    def take_slot(self, sequence: Sequence) -> bool:
        """Gives `sequence` a slot; False when none is free."""
        if not self._free_slots:
            return False
        sequence.slot = self._free_slots.pop()
        return True

    def grow(self, sequence: Sequence, n_tokens: int) -> bool:
        """Makes room for `n_tokens` tokens in all; False, with nothing changed, when pages are short."""
        n_missing = pages_for(n_tokens) - len(sequence.pages)
        if n_missing > self.pages.n_free:
            return False
        if n_missing > 0:
            sequence.pages += self.pages.take(n_missing)
        return True

    def fork(self, parent: Sequence, child: Sequence, n_tokens: int) -> list[tuple[int, int]] | None:
        """Gives `child`, which owns no page yet, the first `n_tokens` tokens of `parent`.

        Full pages are shared, for nobody writes to them again; a partial last page is copied.
        Returns the (source, destination) pages to copy, or None, with nothing changed, when pages are short.
        """
        n_full, n_partial = divmod(n_tokens, PAGE_SIZE)
        if not n_partial:
            copies = []
        elif self.pages.n_free:
            copies = [(parent.pages[n_full], self.pages.take(1)[0])]
        else:
            return None
        shared = parent.pages[:n_full]
        self.pages.share(shared)
        child.pages = shared + [copy for _, copy in copies]
        return copies

    def release(self, sequence: Sequence) -> None:
        """Takes back everything that `sequence` owns."""
        self.pages.give_back(sequence.pages)
        sequence.pages = []
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = None

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises IntegrityError unless `sequences` hold exactly what is not free. O(pages + slots)."""
        pages: Counter[int] = Counter()
        slots: Counter[int] = Counter()
        for sequence in sequences:
            pages.update(sequence.pages)
            if sequence.slot is not None:
                slots[sequence.slot] += 1
            elif sequence.pages:
                raise IntegrityError(f"sequence {sequence.request.id}/{sequence.index} has pages but no slot")
            if len(sequence.pages) < pages_for(sequence.n_computed):
                raise IntegrityError(
                    f"sequence {sequence.request.id}/{sequence.index} has {sequence.n_computed} tokens computed"
                    f" in {len(sequence.pages)} pages"
                )
        self.pages.check(pages)
        for slot, n_owners in slots.items():
            if n_owners > 1 or slot in self._free_slots:
                raise IntegrityError(
                    f"slot {slot} has {n_owners} owners and is {self._free_slots.count(slot)}x free"
                )
        if len(slots) + len(self._free_slots) != self.n_slots:
            raise IntegrityError(
                f"{len(slots)} slots held + {len(self._free_slots)} free is not {self.n_slots}"
            )
