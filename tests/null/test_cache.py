"""Pages and state slots: every one is free or held, and `check` says so when not."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from deltic.engine.cache.cache import Cache, IntegrityError, pages_for
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.step import Sequence
from tests.fakes import FakeRunner


def cache_of(n_pages: int, n_slots: int, n_batch_slots: int | None = None) -> Cache:
    return Cache(FakeRunner(n_pages=n_pages, n_slots=n_slots, max_num_seqs=n_batch_slots or n_slots).info)


def sequence(n_tokens: int = 0) -> Sequence:
    request = Request(id="r", prompt_ids=[], params=SamplingParams())
    return Sequence(request, 0, 0, array("i", range(n_tokens)), n_tokens)


def admitted(cache: Cache, n_tokens: int = 0) -> Sequence:
    """A new sequence with a batch slot and a state slot."""
    new = sequence(n_tokens)
    assert cache.admit(new, [], 0)
    return new


@pytest.mark.parametrize(("n_tokens", "n_pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (1000, 16)])
def test_pages_for(n_tokens: int, n_pages: int) -> None:
    assert pages_for(n_tokens) == n_pages


def test_grow_takes_what_is_missing_or_nothing() -> None:
    cache = cache_of(5, 3, 2)
    a, b = admitted(cache), admitted(cache)
    assert not cache.admit(sequence(), [], 0)  # no batch slot
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


def test_admission_takes_no_page_that_is_promised_and_nothing_when_it_fails() -> None:
    cache = cache_of(5, 3)
    assert not cache.admit(sequence(129), [], 3) and not cache.admit(sequence(6 * 64), [], 0)
    cache.check([])
    parent = sequence(129)
    parent.siblings = [sequence() for _ in range(3)]
    assert not cache.admit(parent, [], 0)  # four state slots
    cache.check([])
    parent.siblings.pop()
    assert cache.admit(parent, [], 2)
    group = [parent, *parent.siblings]
    assert {s.state_slot for s in group} == {s.batch_slot for s in group} == {0, 1, 2}
    cache.check(group)


def test_fork_shares_full_pages_and_copies_the_last() -> None:
    cache = cache_of(4, 3)
    parent, child, late = (admitted(cache) for _ in range(3))
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


def lose_state_slot(cache: Cache, a: Sequence, b: Sequence) -> None:
    b.state_slot = b.batch_slot = None


def share_state_slot(cache: Cache, a: Sequence, b: Sequence) -> None:
    b.state_slot = a.state_slot


def forget_state_slot(cache: Cache, a: Sequence, b: Sequence) -> None:
    a.state_slot = None


def share_batch_slot(cache: Cache, a: Sequence, b: Sequence) -> None:
    b.batch_slot = a.batch_slot


def keep_checkpoint(cache: Cache, a: Sequence, b: Sequence) -> None:
    cache.store.take_state_slots(1)


def run_ahead(cache: Cache, a: Sequence, b: Sequence) -> None:
    a.n_computed = 129


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lose_page, "page 1 counts 1 owners, 0 sequences hold it"),
        (steal_page, "page 0 counts 1 owners, 2 sequences hold it"),
        (lose_state_slot, "state slot 1 counts 1 owners, 0 sequences hold it"),
        (share_state_slot, "state slot 0 counts 1 owners, 2 sequences hold it"),
        (forget_state_slot, "r/0 has pages or a batch slot but no state slot"),
        (share_batch_slot, "batch slot 0 counts 1 owners, 2 sequences hold it"),
        (keep_checkpoint, "state slot 2 counts 1 owners, 0 sequences hold it"),
        (run_ahead, "129 tokens computed in 2 pages"),
    ],
)
def test_check_names_what_is_off(harm: Callable[[Cache, Sequence, Sequence], None], words: str) -> None:
    cache = cache_of(4, 3)
    a, b = admitted(cache), admitted(cache)
    cache.grow(a, 128)
    cache.check([a, b])
    harm(cache, a, b)
    with pytest.raises(IntegrityError, match=words):
        cache.check([a, b])


def test_giving_back_twice_is_found() -> None:
    cache = cache_of(2, 1)
    pages = cache.pages.take(1)
    cache.pages.give_back(pages)
    with pytest.raises(IntegrityError, match="page 0 was given back"):
        cache.pages.give_back(pages)
