"""Ownership of the two memories: the pages and state slots of each sequence, and those it shares with the
prefix tree.

A page holds the keys and values of PAGE_SIZE tokens for all attention layers, a state slot one recurrent
state and one convolution window for every DeltaNet layer. A batch slot is a row in the tables of a step:
whoever runs has one.

| owner | of pages | of state slots |
| --- | --- | --- |
| a running sequence | of all its tokens; full ones are shared with the tree | its own, and its start |
| the prefix tree | every full page that was not evicted | checkpoints |

What only the tree owns is as good as free: it is evicted when a sequence needs the room (which first:
`tree.py`). So the cache takes nothing from those that run, and needs no limit of its own.

Where prefill and decode differ in bits, the tree has what prefill wrote, and nothing else: full pages of
prompts, and states inside them. What was decoded is a sequence's own as long as it runs; the next turn brings
it as a prompt, and it is computed again.

The state slot of a sequence whose `n_computed` is 0 holds whatever its last owner left: a chunk that starts
at 0 starts from the zero state.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from deltic.engine.cache.checkpoints import Checkpoints, Prefix, n_canonical, n_shareable
from deltic.engine.cache.placement import Placement
from deltic.engine.cache.saves import MAX_SEARCH_S
from deltic.engine.cache.tiers import Tiers, no_tiers
from deltic.engine.cache.tree import DEVICE, DISK, Indices, IntegrityError, Kind, Node, Pool, extend_keys, root_key
from deltic.engine.messages import EngineInfo
from deltic.engine.step import Chunk, Sequence
from deltic.ops.geometry import PAGE_SIZE

MAX_LOADS = 3
"""Times a request waits for pages from a lower tier; then it computes what is missing."""

MAX_LOAD_S = 30.0
"""Longest wait in seconds for a load from a lower tier, since a disk may hang."""

SEARCH_AGAIN_S = 5.0
"""A request that waits so long for its batch slot looks once more whether other servers have its prefix."""


def pages_for(n_tokens: int) -> int:
    """Pages that hold `n_tokens` tokens."""
    return -(-n_tokens // PAGE_SIZE)


@dataclass(slots=True, eq=False)
class Parked:
    """A preempted sequence's memory on the host: its last pages, which are not the tree's, and its state."""

    n_computed: int
    n_shared: int
    """Pages before those, which the tree has."""
    node: Node | None
    """The last of them."""
    pages: list[tuple[int, ...]]
    state: tuple[int, ...]

    @property
    def units(self) -> list[int]:
        """Units of host memory that hold the parked pages and state."""
        return [unit for units in (*self.pages, self.state) for unit in units]


class Cache:
    """Pages, state slots and batch slots of the sequences. Whatever changes what a sequence owns is here."""

    def __init__(self, info: EngineInfo, tiers: Tiers | None = None) -> None:
        """Makes a cache over `tiers`. Without info.prefix_cache nothing is kept for other requests, and host
        memory is for preempted sequences alone. Without info.canonical_decode other requests find only what
        prefill wrote.
        """
        self.store = Placement(info, tiers or no_tiers(info))
        self.pages, self.state_slots = self.store.pages, self.store.state_slots
        self.batch_slots = Pool("batch slot", info.max_num_seqs)
        self.info = info
        self.stats = self.store.stats
        self._tree = self.store.tree
        self.checkpoints = Checkpoints(info, self.store)
        self._parked: dict[Sequence, Parked] = {}

    @property
    def n_pages_used(self) -> int:
        """Pages that sequences own: they cannot be evicted."""
        return self.pages.n - self.pages.n_available

    @property
    def n_slots_used(self) -> int:
        return self.state_slots.n - self.state_slots.n_available

    # A sequence waits, and looks for its prefix.

    def open(self, sequence: Sequence) -> None:
        """Ties a new sequence to the tree, unless its request or the server does without."""
        if self.info.prefix_cache and sequence.request.use_cache:
            sequence.prefix = Prefix([], self._root(sequence))
            self._extend_keys(sequence)

    def _root(self, sequence: Sequence) -> Node:
        return self._tree.root(root_key(sequence.request))

    def _extend_keys(self, sequence: Sequence) -> None:
        extend_keys(sequence.prefix.keys, sequence.request, sequence.tokens, n_canonical(self.info, sequence))

    def look_up(self, sequence: Sequence) -> list[Node]:
        """The tree's nodes for the pages that a waiting sequence could share."""
        if sequence.prefix is None:
            return []
        self._extend_keys(sequence)
        if self.store.is_doomed(sequence.prefix.keys):
            return []
        return self._tree.match(sequence.prefix.keys, (len(sequence.tokens) - 1) // PAGE_SIZE)

    def usable(self, sequence: Sequence, known: list[Node], tier: int = DISK) -> list[Node]:
        """Returns the part of `known` that the sequence can start behind, with what is in this tier and in
        those above it. Unless it comes back from host memory, what `n_shareable` leaves is computed.
        """
        parked = self._parked.get(sequence)
        n_most = next((i for i, node in enumerate(known) if not _within(node.page, tier)), len(known))
        if parked is not None:
            if parked.n_shared <= n_most:
                return known[: parked.n_shared]
            self._forget_parked(sequence)  # what it continues is gone
        n_most = min(n_most, n_shareable(self.info, sequence))
        while self.info.has_state and n_most and not _within(known[n_most - 1].state, tier):
            n_most -= 1
        return known[:n_most]

    def is_parked(self, sequence: Sequence) -> bool:
        """Returns whether host memory has the sequence's last pages and its state."""
        return sequence in self._parked

    def search(self, sequence: Sequence, known: list[Node], path: list[Node]) -> bool:
        """Starts to look whether other servers that share the disk have more of a waiting sequence than
        `path`, behind which it could start. known: its nodes in the tree. Returns whether it did.
        """
        prefix = sequence.prefix
        if prefix is None or not self.store.tiers.may_have_foreign or sequence in self._parked:
            return False
        n_most = min(len(prefix.keys), n_shareable(self.info, sequence))
        last = prefix.search
        if len(path) >= n_most or (last is not None and time.monotonic() - last.began_s < SEARCH_AGAIN_S):
            return False
        root = root_key(sequence.request)
        search = self.store.saves.search(root, prefix.keys[:n_most], min(len(known), n_most), len(path))
        prefix.search = search or last
        return search is not None

    def fetch(self, sequence: Sequence, path: list[Node]) -> bool:
        """Starts to load the parts of `path` that the device lacks, if there is room. Returns whether it
        did.
        """
        prefix = sequence.prefix
        if prefix is None or not path or prefix.n_loads == MAX_LOADS:
            return False
        missing = self.store.missing(path, with_state=self.info.has_state and sequence not in self._parked)
        prefix.load = self.store.load(path, missing) if missing else None
        prefix.n_loads += prefix.load is not None
        return prefix.load is not None

    def n_lacking(self, sequence: Sequence, path: list[Node], n_promised: int) -> int:
        """Pages that all its tokens lack beside n_promised of others, shared pages included."""
        shared = (node.page[DEVICE] for node in path if node.page[DEVICE] is not None)
        n_shared = sum(not self.pages.is_idle(page) for page in shared)
        return max(0, pages_for(len(sequence.tokens)) - n_shared - self.pages.n_available + n_promised)

    def is_loading(self, sequence: Sequence) -> bool:
        prefix: Prefix | None = sequence.prefix
        if prefix is None:
            return False
        waits, now_s = ((prefix.search, MAX_SEARCH_S), (prefix.load, MAX_LOAD_S)), time.monotonic()
        return any(wait and not wait.is_done and now_s - wait.began_s < most_s for wait, most_s in waits)

    def n_common(self, sequence: Sequence, other: Sequence) -> int:
        """Tokens, in full pages, with which both begin, and which `sequence` could start behind."""
        if sequence.prefix is None or other.prefix is None:
            return 0
        mine, theirs = sequence.prefix.keys, other.prefix.keys
        n = min(len(mine), len(theirs), n_shareable(self.info, sequence))
        # Keys are chained: where one differs, all after it do.
        return PAGE_SIZE * bisect_left(range(n), True, key=lambda i: mine[i] != theirs[i])

    def admit(self, sequence: Sequence, path: list[Node], n_promised: int) -> bool:
        """Gives a waiting sequence a batch slot, a state slot, and the pages of `path`, all on the device.

        Its siblings batch slot and state slot. n_promised: available pages that are others'. False, with
        nothing of it changed, when something is short.
        """
        group = [sequence, *sequence.siblings]
        parked = self._parked.get(sequence)
        pages = [node.page[DEVICE] for node in path]
        start = [path[-1].state[DEVICE]] if path and parked is None and self.info.has_state else []
        self.pages.share(pages)
        self.state_slots.share(start)
        state_slots: list[int] | None = None
        n_parked = len(parked.pages) if parked is not None else 0
        n_new = max(n_parked, pages_for(len(sequence.tokens)) - len(pages))
        if len(group) <= self.batch_slots.n_free and n_new <= self.pages.n_available - n_promised:
            state_slots = self.store.take_state_slots(len(group))
            is_ours = start and self.state_slots.n_owners[start[0]] == 2 and not path[-1].busy
            if state_slots is None and is_ours:  # no state slot is to be had: it goes on in the checkpoint's
                others = self.store.take_state_slots(len(group) - 1)
                if others is not None:
                    self.state_slots.give_back([self.store.take_state(path[-1])])
                    state_slots, start = [*start, *others], []
        own = self.store.take_pages(n_parked) if state_slots is not None else []
        if state_slots is None or own is None:
            self.state_slots.give_back([*start, *(state_slots or [])])
            self.pages.give_back(pages)
            return False
        for member, state_slot, batch_slot in zip(group, state_slots, self.batch_slots.take(len(group)), strict=True):
            member.state_slot, member.batch_slot = state_slot, batch_slot
        sequence.pages, sequence.n_computed = pages + own, len(pages) * PAGE_SIZE
        sequence.pages_version += 1
        sequence.start_slot = start[0] if start else None
        if sequence.prefix is not None:
            sequence.prefix.node = path[-1] if path else self._root(sequence)
            sequence.prefix.tail, sequence.prefix.load, sequence.prefix.n_loads = None, None, 0
            if self.store.events is not None:
                self.store.events.learn_path(path, sequence)
        if parked is not None:
            self._unpark(sequence, parked)
        elif start:
            self._tree.touch(path[-1])
        if path and not self.info.has_state:
            self.store.device.renew(path[-1])
        return True

    def note_lookup(self, sequence: Sequence) -> None:
        """Counts what a sequence found that was admitted for the first time."""
        if sequence.prefix is not None:
            sequence.n_cached = sequence.n_computed
            self.stats.n_lookups += 1
            self.stats.n_hits += sequence.n_cached > 0
            self.stats.n_lookup_tokens += sequence.n_prompt
            self.stats.n_hit_tokens += sequence.n_cached

    # A sequence runs.

    def grow(self, sequence: Sequence, n_tokens: int) -> bool:
        """Makes room for `n_tokens` tokens in all.

        Returns False, and changes nothing of the sequence, when pages are short.
        """
        n_missing = pages_for(n_tokens) - len(sequence.pages)
        if n_missing > 0:
            pages = self.store.take_pages(n_missing)
            if pages is None:
                return False
            sequence.pages += pages
        return True

    def computed(self, chunk: Chunk) -> None:
        """A chunk ran, and the sequence's n_computed says so: its full pages and snapshots enter the tree."""
        sequence = chunk.sequence
        self._let_go_of_start(sequence)
        self.publish(sequence)
        prefix: Prefix | None = sequence.prefix
        if prefix is None:
            self.state_slots.give_back([at for _, at in chunk.snapshots])  # the cache was reset meanwhile
            return
        self.checkpoints.take(chunk, prefix)
        if chunk.start < sequence.n_prompt <= sequence.n_computed and self.store.tiers.may_have_foreign:
            self.store.saves.save(prefix.node)  # another server may want it while the answer is still written

    def _let_go_of_start(self, sequence: Sequence) -> None:
        if sequence.start_slot is not None:
            self.state_slots.give_back([sequence.start_slot])
            sequence.start_slot = None

    def publish(self, sequence: Sequence) -> None:
        """Full pages enter the tree.

        Where it has the same page already, the sequence takes that one for its own; where that is not to be
        used, the sequence goes on without the tree.
        """
        prefix, pages = sequence.prefix, sequence.pages
        n_tokens = min(sequence.n_computed, n_canonical(self.info, sequence))
        if prefix is None or prefix.node.depth + PAGE_SIZE > n_tokens:
            return
        self._extend_keys(sequence)
        if self.store.is_doomed(prefix.keys):
            sequence.prefix = None
            return
        events = self.store.events
        node = prefix.node if prefix.node.depth else self._root(sequence)
        for i in range(node.depth // PAGE_SIZE, n_tokens // PAGE_SIZE):
            node = self._tree.child(node, prefix.keys[i])
            if events is not None:
                events.learn(node, sequence)
            if node.page[DEVICE] is None:
                self.pages.share([pages[i]])
                self.store.put(Kind.PAGE, node, pages[i])
            elif node.page[DEVICE] != pages[i]:
                self.pages.share([node.page[DEVICE]])
                self.pages.give_back([pages[i]])
                pages[i] = node.page[DEVICE]
                sequence.pages_version += 1
        prefix.node = node

    def fork(self, parent: Sequence, child: Sequence, n_tokens: int) -> list[tuple[int, int]] | None:
        """Gives `child`, which owns no page yet, the first `n_tokens` tokens of `parent`.

        Full pages are shared, for nobody writes to them again; a partial last page is copied.
        Returns the (source, destination) pages to copy, or None, with nothing changed, when pages are short.
        """
        n_full, n_partial = divmod(n_tokens, PAGE_SIZE)
        own = self.store.take_pages(1 if n_partial else 0)
        if own is None:
            return None
        shared = parent.pages[:n_full]
        self.pages.share(shared)
        child.pages = shared + own
        if parent.prefix is not None:
            child.prefix = Prefix(parent.prefix.keys[:n_full], parent.prefix.node)
        return [(parent.pages[n_full], page) for page in own]

    # A sequence stops running.

    def release(self, sequence: Sequence, *, keep_state: bool = True) -> None:
        """Takes back everything that `sequence` owns. keep_state: its state may become a checkpoint; it is
        not what its tokens say after a step that failed, nor, where the device runs ahead, from the prompt's
        last token on.
        """
        self._forget_parked(sequence)
        self._let_go_of_start(sequence)
        prefix: Prefix | None = sequence.prefix
        state_slot = sequence.state_slot
        if state_slot is not None:
            node = prefix.node if prefix is not None else None
            here = node is not None and node.depth == sequence.n_computed > 0 and node.state[DEVICE] is None
            is_prefilled = self.info.canonical_decode or sequence.n_computed < sequence.n_prompt
            keep_state &= self.info.has_state and is_prefilled
            if node is not None and here and keep_state and self._tree.nodes.get(node.key) is node:
                self.checkpoints.keep(node, state_slot, "tail")
            else:
                self.state_slots.give_back([state_slot])
            assert sequence.batch_slot is not None
            self.batch_slots.give_back([sequence.batch_slot])
        self.pages.give_back(reversed(sequence.pages))
        sequence.pages, sequence.state_slot, sequence.batch_slot = [], None, None
        if prefix is not None:
            if state_slot is not None:
                self.store.saves.save(prefix.node)
            prefix.tail = None
            prefix.wanted = {}

    def preempt(self, sequence: Sequence) -> None:
        """Takes back everything that a running sequence owns, and keeps in host memory, if it has room, what
        the tree does not: a decode comes back exactly where it was. Without that it starts again from what
        the tree has kept; and so does a prompt of which something was scored, for it is scored afresh.

        The device may have run ahead: then the state has seen n_lookahead tokens more than n_computed says,
        and the pages hold their KV. The copies to host memory wait for that, and take those pages too; what
        was drawn there is kept by the runner, which goes on from it when the sequence comes back with these
        bytes. If they were lost, chunks of it come that start before n_computed, and the runner drops what it
        kept (engine.StepRunner).
        """
        n_computed = sequence.n_computed
        is_worth_it = sequence.n_pending == 1
        if not self.info.canonical_decode:  # what was decoded can be had again one token a step only
            is_worth_it |= n_computed >= sequence.n_prompt
        is_worth_it &= sequence.scored_from is None or n_computed <= sequence.scored_from
        parked = self._park(sequence) if is_worth_it and n_computed else None
        self.release(sequence)
        sequence.n_computed = 0
        if parked is not None:
            self._parked[sequence] = parked
            if parked.node is not None:
                parked.node.n_parked += 1

    def _park(self, sequence: Sequence) -> Parked | None:
        prefix: Prefix | None = sequence.prefix
        n_shared = prefix.node.depth // PAGE_SIZE if prefix is not None else 0
        assert sequence.state_slot is not None
        # Before the first chunk behind a checkpoint has run, the state is the checkpoint's.
        state_slot = sequence.state_slot if sequence.start_slot is None else sequence.start_slot
        own = sequence.pages[n_shared : pages_for(sequence.n_computed + self.info.n_lookahead)]
        units = [self.store.host.park(Kind.PAGE, page) for page in own]
        state = self.store.host.park(Kind.STATE, state_slot)
        node = prefix.node if prefix is not None else None
        parked = Parked(sequence.n_computed, n_shared, node, [u for u in units if u is not None], state or ())
        if state is None or None in units:
            self.store.units.give_back(parked.units)
            return None
        return parked

    def _unpark(self, sequence: Sequence, parked: Parked) -> None:
        assert sequence.state_slot is not None
        for units, page in zip(parked.pages, sequence.pages[parked.n_shared :], strict=True):
            self.store.host.unpark(Kind.PAGE, units, page)
        self.store.host.unpark(Kind.STATE, parked.state, sequence.state_slot)
        sequence.n_computed = parked.n_computed
        self._unlist(sequence)

    def _forget_parked(self, sequence: Sequence) -> None:
        if sequence in self._parked:
            self.store.units.give_back(self._unlist(sequence).units)

    def _unlist(self, sequence: Sequence) -> Parked:
        parked = self._parked.pop(sequence)
        if parked.node is not None:
            parked.node.n_parked -= 1
        return parked

    # The whole.

    def distrust(self, spoilt: Iterable[Sequence], sequences: Iterable[Sequence]) -> int:
        """The logits of `spoilt`, which run, were not finite.

        Nobody knows which page or state is to blame, so all that the tree has of them leaves every tier, from
        the first page on, with all that lies beyond. Those of `sequences` that run on it go on without the
        tree. The number of pages, in whatever tier.
        """
        tops = {node for s in spoilt if s.prefix is not None for node in s.prefix.node.path[:1]}
        for sequence in sequences:
            prefix = sequence.prefix
            if sequence.state_slot is not None and prefix is not None and tops & {*prefix.node.path[:1]}:
                sequence.prefix = None
        for sequence in spoilt:
            sequence.prefix = None
        return sum(self.store.drop(node) for node in tops)

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Forgets everything that was kept for others, in every tier.

        The open sequences go on, without the tree where they run already.
        """
        self.store.reset()
        for sequence in sequences:
            if sequence.state_slot is not None:
                sequence.prefix = None
            elif sequence.prefix is not None:
                sequence.prefix.load = sequence.prefix.search = None

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises IntegrityError unless the sequences and the tree hold exactly what is not free.

        O(pages + state slots).
        """
        pages: Counter[int] = Counter()
        state_slots: Counter[int] = Counter()
        batch_slots: Counter[int] = Counter()
        for sequence in sequences:
            name = f"sequence {sequence.request.id}/{sequence.index}"
            pages.update(sequence.pages)
            state_slots.update(s for s in (sequence.state_slot, sequence.start_slot) if s is not None)
            batch_slots.update([] if sequence.batch_slot is None else [sequence.batch_slot])
            if sequence.state_slot is None and (sequence.pages or sequence.batch_slot is not None):
                raise IntegrityError(f"{name} has pages or a batch slot but no state slot")
            if len(sequence.pages) < pages_for(sequence.n_computed):
                raise IntegrityError(f"{name} has {sequence.n_computed} tokens computed in {len(sequence.pages)} pages")
        units: Counter[int] = Counter()
        for parked in self._parked.values():
            units.update(parked.units)
        self.store.check(pages, state_slots, units)
        self.batch_slots.check(batch_slots)


def _within(where: Indices, tier: int) -> bool:
    """Returns whether a page or state is in `tier` or one above."""
    return any(index is not None for index in where[: tier + 1])
