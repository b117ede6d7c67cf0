"""Pages and slots: every one is free or held, and `check` says so when not."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from deltic.engine.cache import Cache, IntegrityError, pages_for
from deltic.engine.request import Request, SamplingParams, Sequence


def sequence(n_tokens: int = 0) -> Sequence:
    request = Request(id="r", prompt_ids=[], params=SamplingParams())
    return Sequence(request, 0, 0, array("i", range(n_tokens)), n_tokens)


@pytest.mark.parametrize(
    ("n_tokens", "n_pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (1000, 16)]
)
def test_pages_for(n_tokens: int, n_pages: int) -> None:
    assert pages_for(n_tokens) == n_pages


def test_grow_takes_what_is_missing_or_nothing() -> None:
    cache, a, b = Cache(5, 2), sequence(), sequence()
    assert cache.take_slot(a) and cache.take_slot(b) and not cache.take_slot(sequence())
    assert cache.grow(a, 65) and len(a.pages) == 2
    assert cache.grow(a, 128) and len(a.pages) == 2
    assert not cache.grow(b, 4 * 64) and b.pages == []
    assert cache.grow(b, 3 * 64) and cache.pages.n_free == 0
    assert len({*a.pages, *b.pages}) == 5
    cache.check([a, b])
    cache.release(a)
    cache.release(a)  # nothing is left to take
    cache.check([b])
    assert cache.n_pages_used == 3 and cache.n_slots_used == 1


def test_fork_shares_full_pages_and_copies_the_last() -> None:
    cache, parent, child, late = Cache(4, 3), sequence(), sequence(), sequence()
    for s in (parent, child, late):
        cache.take_slot(s)
    cache.grow(parent, 150)
    assert cache.fork(parent, child, 150) == [(parent.pages[2], child.pages[2])]
    assert child.pages[:2] == parent.pages[:2] and child.pages[2] != parent.pages[2]
    assert cache.fork(parent, late, 150) is None and late.pages == []
    assert cache.fork(parent, late, 128) == [] and late.pages == parent.pages[:2]
    cache.check([parent, child, late])
    for s in (parent, late, child):
        assert cache.n_pages_used > 0
        cache.release(s)
        cache.check({parent, child, late} - {s})
    assert cache.n_pages_used == cache.n_slots_used == 0


def lose_page(cache: Cache, a: Sequence, b: Sequence) -> None:
    a.pages.pop()


def steal_page(cache: Cache, a: Sequence, b: Sequence) -> None:
    b.pages.append(a.pages[0])


def lose_slot(cache: Cache, a: Sequence, b: Sequence) -> None:
    b.slot = None


def share_slot(cache: Cache, a: Sequence, b: Sequence) -> None:
    b.slot = a.slot


def forget_slot(cache: Cache, a: Sequence, b: Sequence) -> None:
    a.slot = None


def run_ahead(cache: Cache, a: Sequence, b: Sequence) -> None:
    a.n_computed = 129


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lose_page, "page 1 counts 1 owners, 0 sequences hold it"),
        (steal_page, "page 0 counts 1 owners, 2 sequences hold it"),
        (lose_slot, r"1 slots held \+ 1 free is not 3"),
        (share_slot, "slot 0 has 2 owners"),
        (forget_slot, "r/0 has pages but no slot"),
        (run_ahead, "129 tokens computed in 2 pages"),
    ],
)
def test_check_names_what_is_off(harm: Callable[[Cache, Sequence, Sequence], None], words: str) -> None:
    cache, a, b = Cache(4, 3), sequence(), sequence()
    cache.take_slot(a)
    cache.take_slot(b)
    cache.grow(a, 128)
    cache.check([a, b])
    harm(cache, a, b)
    with pytest.raises(IntegrityError, match=words):
        cache.check([a, b])


def test_giving_back_twice_is_found() -> None:
    cache = Cache(2, 1)
    pages = cache.pages.take(1)
    cache.pages.give_back(pages)
    with pytest.raises(IntegrityError, match="page 0 was given back"):
        cache.pages.give_back(pages)
