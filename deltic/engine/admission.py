"""Admission: the three lists of open sequences, and the rules by which they move between them.

A request gets a turn when it comes. The rank of a sequence follows from its priority, then from its turn, and
the one with the lowest rank is admitted first, as soon as there is a batch slot and memory for it.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest

from deltic.engine.cache.cache import Cache, pages_for
from deltic.engine.cache.tree import DEVICE
from deltic.engine.messages import Request
from deltic.engine.reading import Reading
from deltic.engine.step import Sequence, Step
from deltic.ops.geometry import PAGE_SIZE


def rank(sequence: Sequence) -> tuple[int, int, int, int]:
    """The sequence with the lower rank goes first.

    Ranks are unique among the open sequences. Sequences of one tenant are in the order of their priorities,
    then of their arrival. Two of different tenants change places only when one of the tenants sends something
    more urgent.
    """
    return max(0, sequence.request.priority), sequence.turn, sequence.arrival, sequence.index


def in_turns(prefills: list[Sequence], n_had: dict[str, int]) -> tuple[list[Sequence], dict[str, int]]:
    """Sorts prefills, which are given by rank, into the order in which their prompts are computed.

    Of several tenants one has its next before another has its second, and that one comes first who has had
    the fewest tokens. n_had: those tokens, by tenant. Given back of the tenants of today; who is new starts
    with the fewest.
    """
    of_tenant: dict[str, list[Sequence]] = {}
    for sequence in prefills:
        of_tenant.setdefault(sequence.request.tenant, []).append(sequence)
    least = min((n_had[tenant] for tenant in of_tenant if tenant in n_had), default=0)
    n_had = {tenant: n_had.get(tenant, least) for tenant in of_tenant}
    if len(of_tenant) <= 1:
        return prefills[:], n_had
    rows = zip_longest(*(of_tenant[tenant] for tenant in sorted(of_tenant, key=n_had.__getitem__)))
    return [sequence for row in rows for sequence in row if sequence is not None], n_had


def _queue_of(request: Request) -> tuple[str, int]:
    """The tenant and the priority within which requests go by arrival, but for the urgent ones."""
    return request.tenant, max(0, request.priority)


def _n_promised(sequence: Sequence) -> int:
    """Pages that its tokens are still to get."""
    return max(0, pages_for(len(sequence.tokens)) - len(sequence.pages))


class Admission:
    """The open sequences, in three lists that others may read.

    | a sequence | is in | owns |
    | --- | --- | --- |
    | that was not admitted, or was preempted | `waiting` | nothing; host memory perhaps |
    | whose prompt is being computed | `prefills` | a state slot, and pages for what is computed |
    | that decodes | `decodes` | a state slot, and pages for all its tokens |
    | of n > 1, while the first computes the prompt | its `siblings` | a state slot once that is admitted |
    """

    def __init__(self, cache: Cache, reading: Reading) -> None:
        self.waiting: list[Sequence] = []  # by rank
        self.prefills: list[Sequence] = []  # by rank
        self.decodes: list[Sequence] = []
        self.n_preemptions = 0
        self._cache = cache
        self._reading = reading
        self._turn = 0  # the latest that was admitted
        self._next: dict[tuple[str, int], int] = {}
        """Turns behind what tenants had admitted last, of each priority, where those are not over."""

    # A sequence waits, or leaves.

    def take_turn(self, request: Request, groups: Iterable[list[Sequence]]) -> int:
        """Gives a new request its turn. groups: the sequences of each open request.

        It comes after its tenant's requests that are as urgent, whether they wait, run or have ended, and
        level with the first of other tenants. So tenants alternate however many requests one of them sends,
        and none can be overtaken for ever. A single tenant is served in the order of arrival. Its tenant's
        less urgent requests move back behind it, in their order.
        """
        queue = _queue_of(request)
        turn, passed = max(self._turn, self._next.get(queue, 0)), []
        for group in (g for g in groups if _queue_of(g[0].request) == queue):
            if group[0].request.priority > request.priority:
                passed.append(group)
                continue
            waits = any(s.state_slot is None for s in group)
            turn = max(turn, group[0].turn + waits * group[0].request.params.n)
        after = turn + request.params.n
        for group in sorted(passed, key=lambda g: rank(g[0])):
            after = max(after, group[0].turn)
            for sequence in group:
                sequence.turn = after
            after += group[0].request.params.n
        if passed:
            self.waiting.sort(key=rank)
            self.prefills.sort(key=rank)
        return turn

    def wait(self, sequence: Sequence) -> None:
        """Queues a sequence, which owns nothing."""
        insort(self.waiting, sequence, key=rank)

    def take_out(self, sequence: Sequence, group: Iterable[Sequence]) -> None:
        """Takes an open sequence out of its list. group: the open sequences of its request.

        The next sibling takes over the computed tokens of a first one whose prompt is not done.
        """
        for other in group:
            if sequence in other.siblings:
                other.siblings.remove(sequence)
                return
        if sequence.state_slot is None:
            del self.waiting[bisect_left(self.waiting, rank(sequence), key=rank)]
        else:
            self._stop(sequence)
        if sequence.siblings:
            self._promote(sequence)

    def _stop(self, sequence: Sequence) -> None:
        (self.prefills if sequence in self.prefills else self.decodes).remove(sequence)

    def _promote(self, sequence: Sequence) -> None:
        heir, *siblings = sequence.siblings
        heir.siblings, sequence.siblings = siblings, []
        heir.read_prompt(sequence)
        heir.prefix, sequence.prefix = sequence.prefix, None
        if heir.prefix is not None:
            del heir.prefix.keys[sequence.n_shared // PAGE_SIZE :]
        if sequence.state_slot is None:
            self.wait(heir)
            return
        heir.pages, sequence.pages = sequence.pages, heir.pages
        heir.state_slot, sequence.state_slot = sequence.state_slot, heir.state_slot
        heir.start_slot, sequence.start_slot = sequence.start_slot, None
        heir.n_computed, sequence.n_computed = sequence.n_computed, 0
        insort(self.prefills, heir, key=rank)

    def part(self, first: Sequence, sibling: Sequence) -> None:
        """Lets a sibling wait for a place of its own, and find the prompt in the cache."""
        first.siblings.remove(sibling)
        sibling.read_prompt(first)
        self._start_over(sibling)

    def _start_over(self, sibling: Sequence) -> None:
        self._cache.release(sibling)
        self._cache.open(sibling)
        self.wait(sibling)

    def preempt(self, sequence: Sequence) -> None:
        """Takes everything from a running sequence and queues it again, at the head of its priority."""
        if first := next((other for other in self.prefills if sequence in other.siblings), None):
            self.part(first, sequence)
            self.n_preemptions += 1
            return
        self._stop(sequence)
        for member in (sequence, *sequence.siblings):
            self._cache.preempt(member)
            member.n_window, member.drafter = 0, None
        sequence.n_preempted += 1
        sequence.begin_prompt_logprobs()
        self.wait(sequence)
        self.n_preemptions += 1

    # A sequence comes to run.

    @property
    def n_promised(self) -> int:
        """Pages that the tokens of running sequences are still to get."""
        return sum(map(_n_promised, chain(self.prefills, self.decodes)))

    def fork(self, step: Step, sequence: Sequence, n_tokens: int) -> None:
        """Has the siblings of a sequence go on by themselves behind its first n_tokens, which it has when
        this step has run. They read their branches from the next step on. Where it has them already, and its
        state is in no checkpoint, they start over by themselves: this step is about to write over the state.
        """
        assert sequence.state_slot is not None
        is_late = 0 < n_tokens == sequence.n_computed and sequence.start_slot is None and self._cache.info.has_state
        for sibling in sequence.siblings:
            sibling.read_prompt(sequence)
            if is_late:
                self._start_over(sibling)
                continue
            copies = self.share(sequence, sibling, n_tokens)
            if copies is None:
                continue
            assert sibling.state_slot is not None
            if n_tokens > sequence.n_computed:
                step.page_copies += copies
                step.slot_copies.append((sequence.state_slot, sibling.state_slot))
            elif sequence.start_slot is not None:
                self._cache.state_slots.share([sequence.start_slot])
                sibling.start_slot = sequence.start_slot
            sibling.n_computed = sibling.n_cached = n_tokens
            insort(self.prefills, sibling, key=rank)
            step.forks.append(sibling)
        sequence.siblings = []

    def share(self, sequence: Sequence, sibling: Sequence, n_tokens: int) -> list[tuple[int, int]] | None:
        """Gives a sibling the first n_tokens of a sequence. Returns the pages to copy; None: pages are short,
        and it starts over by itself.
        """
        cache = self._cache
        n_own = pages_for(len(sibling.tokens)) - n_tokens // PAGE_SIZE
        has_room = not sibling.request.branches or n_own <= cache.pages.n_available - self.n_promised
        copies = cache.fork(sequence, sibling, n_tokens) if has_room else None
        if copies is None:
            self._start_over(sibling)
        return copies

    def candidates(self) -> Iterator[Sequence]:
        """Lists, by rank, the sequences that wait and are not held back."""
        return (sequence for sequence in self.waiting[:] if not self._is_held(sequence))

    def admit_newcomers(self, step: Step, n_tenants: int) -> None:
        """Admits, of each tenant who has no batch slot, the sequence that waits with the lowest rank. Its
        siblings wait for places of their own if there are none for all.

        n_tenants: of all open sequences.
        """
        served = {s.request.tenant for s in chain(self.prefills, self.decodes)}
        if len(served) == n_tenants:
            return
        for sequence in self.waiting[:]:
            if sequence.request.tenant in served or sequence.request.priority > 0 or self._is_held(sequence):
                continue
            served.add(sequence.request.tenant)
            if self.admit(sequence, step, is_newcomer=True) is False and sequence.siblings:
                for sibling in sequence.siblings[:]:
                    self.part(sequence, sibling)
                self.admit(sequence, step, is_newcomer=True)

    def _is_held(self, sequence: Sequence) -> bool:
        """Returns whether a waiting sequence should go on waiting: for its text, its pages, or a prefill that
        will share pages with it.
        """
        if sequence.lacks_text:
            return True
        if sequence.waits_for is not None:
            other, n_tokens = sequence.waits_for
            if other.state_slot is not None and other.n_computed < n_tokens and rank(other) < rank(sequence):
                return True
            sequence.waits_for = None
        return self._cache.is_loading(sequence)

    def admit(self, sequence: Sequence, step: Step, is_newcomer: bool = False) -> bool | None:
        """Moves a waiting sequence to the prefills, if it fits; None when it is held back instead. Others may
        have to give way to a newcomer.

        It takes pages as it goes, but starts only when all its tokens fit beside the pages that the other
        prefills still need. So prefills never wait for each other's pages, and a preempted sequence does not
        come back only to be preempted again.
        """
        cache, group = self._cache, [sequence, *sequence.siblings]
        n_batch_slots = max(0, len(group) - cache.batch_slots.n_free)
        if n_batch_slots and not is_newcomer:
            return False
        n_promised = self.n_promised
        is_whole = sequence.reads_whole_prompt
        known = [] if is_whole else cache.look_up(sequence)
        path = cache.usable(sequence, known)
        if not is_whole and (
            self._waits_for_prefix(sequence, len(path) * PAGE_SIZE, step) or cache.search(sequence, known, path)
        ):
            return None
        n_pages, leaving = cache.n_lacking(sequence, path, n_promised), list[Sequence]()
        if n_batch_slots or n_pages:
            leaving = self._giving_way(len(group), n_batch_slots, n_pages) if is_newcomer else []
            if not leaving:
                return False
        if cache.fetch(sequence, path):
            return None
        is_alone = cache.batch_slots.n_free == cache.batch_slots.n
        lacks_pages = any(node.page[DEVICE] is None for node in path)
        if cache.is_parked(sequence) and lacks_pages and not is_alone:
            # Running sequences have the room that its pages need. Without these, its parked state would be
            # lost.
            return False
        for other in leaving:
            n_promised -= _n_promised(other)
            self.preempt(other)
        if not cache.admit(sequence, cache.usable(sequence, known, DEVICE), n_promised):
            return False
        cache.checkpoints.want(sequence, len(known) * PAGE_SIZE)
        for other in self.waiting[: cache.batch_slots.n]:  # those that may come to run beside it
            if other is not sequence:
                cache.checkpoints.want_junction(sequence, cache.n_common(other, sequence))
        # Those of the request who wait for places of their own are not late any more: it has begun.
        parted = (other for other in self.waiting if other.request is sequence.request)
        for member in (*group, *parted):
            if not member.n_preempted:
                member.queued_s = time.monotonic() - member.arrived_at
        if not sequence.n_preempted and not is_whole:
            cache.note_lookup(sequence)
        self.waiting.remove(sequence)
        insort(self.prefills, sequence, key=rank)
        self._turn = max(self._turn, sequence.turn)
        queue = _queue_of(sequence.request)
        self._next[queue] = max(self._next.get(queue, 0), sequence.turn + sequence.request.params.n)
        self._next = {queue: turn for queue, turn in self._next.items() if turn > self._turn}
        self._reading.enter(sequence)
        return True

    def _waits_for_prefix(self, sequence: Sequence, n_usable: int, step: Step) -> bool:
        """Holds a sequence back if a running prefill will compute more of their common beginning than the
        cache has.

        That prefill goes first anyway, so waiting takes no longer than computing the same beside it.
        """
        # These have no prefill after this step.
        ending = (chunk.sequence for chunk in step.chunks if not chunk.is_decode)
        for other in chain(ending, self.prefills):
            n_common = self._cache.n_common(sequence, other)
            if other.n_computed < n_common > n_usable and rank(other) < rank(sequence):
                sequence.waits_for = other, n_common
                return True
        return False

    def _giving_way(self, n: int, n_batch_slots: int, n_pages: int) -> list[Sequence]:
        """Picks the running sequences that give up batch slots and pages for n of a tenant who has none.

        They are those of the lowest priority, then of the tenant with the most, the youngest first; a tenant
        is left as many as the newcomer gets. None, if that is not enough.
        """
        siblings = chain.from_iterable(sequence.siblings for sequence in self.prefills)
        running, leaving = [*self.prefills, *siblings, *self.decodes], list[Sequence]()
        n_of = Counter(sequence.request.tenant for sequence in running)
        while n_batch_slots > 0 or n_pages > 0:
            running = [s for s in running if s.request.priority > 0 or n_of[s.request.tenant] > n]
            if not running:
                return []
            last = max(running, key=lambda s: (rank(s)[0], n_of[s.request.tenant], rank(s)))
            running.remove(last)
            leaving.append(last)
            n_of[last.request.tenant] -= 1
            n_batch_slots -= 1
            n_pages -= self._cache.pages.n_freed(last.pages) + _n_promised(last)
        return leaving
