"""Checkpoints: the states that a sequence leaves for those that come after it.

A checkpoint costs no pass of its own. Inside a chunk of a prefill the state is written out as the kernel
passes (a snapshot). Between two chunks, and in a decode at the end of a page, the sequence's state slot
becomes the tree's, and the next chunk reads that one and writes another. Which are worth a state slot:
`PrefixTree.price`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from deltic.engine.cache.disk import Search
from deltic.engine.cache.placement import Placement, TierLoad
from deltic.engine.cache.tree import DEVICE, SUPERSEDED, Kind, Node
from deltic.engine.messages import EngineInfo, Picture
from deltic.engine.step import Chunk, Sequence
from deltic.ops.geometry import PAGE_SIZE

LADDER = (1024, 2048, 4096, 8192)
"""Tokens after which a long message, or a prompt without messages, gets checkpoints.

Then every LADDER[-1].
"""


@dataclass(slots=True, eq=False)
class Prefix:
    """A sequence's tie to the prefix tree."""

    keys: list[bytes]
    """Keys of the sequence's full pages."""
    node: Node
    """Node of the sequence's last page in the tree; the root at first."""
    wanted: dict[int, str] = field(default_factory=dict)
    """Depths at which its prefill leaves checkpoints, ascending, and why."""
    tail: Node | None = None
    """The checkpoint behind its generated tokens, which moves on with them."""
    load: TierLoad | None = None
    """The load that it waits for, or waited for."""
    n_loads: int = 0
    search: Search | None = None
    """Search for what other servers have of the prompt: the last one that the sequence waits for, or has
    waited for.
    """


def n_canonical(info: EngineInfo, sequence: Sequence) -> int:
    """Tokens of a sequence whose pages and states are the tree's to give and to take."""
    return len(sequence.tokens) if info.canonical_decode else sequence.n_prompt


def n_shareable(info: EngineInfo, sequence: Sequence) -> int:
    """The most pages behind which a sequence could start. One token of those that may be shared is left to
    compute, since a token is drawn from it and a decode does not start from a checkpoint; and so is whatever
    is scored.
    """
    n_tokens, scored = n_canonical(info, sequence) - 1, sequence.scored_from
    return (n_tokens if scored is None else min(n_tokens, scored)) // PAGE_SIZE


def fork_point(info: EngineInfo, sequence: Sequence) -> int | None:
    """The number of tokens behind which the siblings of a sequence fork off to read their branches; None: it
    has none such. The last token of the prompt is each one's own, since something may be scored behind it.
    """
    if not sequence.siblings or sequence.branch is None:
        return None
    n = sequence.n_shared - 1
    return n if info.canonical_decode else n - n % PAGE_SIZE


class Checkpoints:
    """Decides where sequences leave checkpoints, and takes them."""

    def __init__(self, info: EngineInfo, store: Placement) -> None:
        self._info, self._store, self._tree = info, store, store.tree

    def want(self, sequence: Sequence, n_known: int) -> None:
        """Decides where the prefill of an admitted sequence leaves checkpoints.

        n_known: tokens whose pages the tree had. Where it cannot start behind the last of them, prompts
        branch, and the next one that comes this way shall not compute the stretch again.
        """
        prefix, n_tokens = sequence.prefix, n_canonical(self._info, sequence)
        if sequence.branch is not None:
            n_tokens = sequence.n_shared  # nobody comes back to where a branch ends
        if prefix is None or not self._info.has_state:
            return
        wanted: dict[int, str] = {}
        begin = 0
        for end in [*sequence.request.boundaries, n_tokens]:
            wanted |= dict.fromkeys(_ladder(begin, end), "ladder")
            begin = end // PAGE_SIZE * PAGE_SIZE
            wanted[begin] = "message"
        last = (n_tokens - 1) // PAGE_SIZE * PAGE_SIZE
        # Where another prompt has gone on, more will: such a checkpoint is worth a place on disk.
        wanted[last] = "junction" if n_known == last and self._store.tiers.may_have_foreign else "end"
        wanted.setdefault(n_known, "junction")
        for depth in _picture_edges(sequence.request.pictures):
            wanted.setdefault(depth, "picture")
        prefix.wanted = {d: wanted[d] for d in sorted(wanted) if sequence.n_computed < d <= last}

    def want_junction(self, sequence: Sequence, depth: int) -> None:
        """Wants a checkpoint at `depth`: another sequence waits that begins as this one does, which prefills,
        and will start from where they part.
        """
        if depth > sequence.n_computed and self._info.has_state:
            prefix: Prefix = sequence.prefix
            prefix.wanted = dict(sorted(({depth: "junction"} | prefix.wanted).items()))

    def plan(self, chunk: Chunk) -> None:
        """Called before a chunk of a prompt runs: the checkpoint where it starts, and the snapshots it
        takes.
        """
        sequence = chunk.sequence
        prefix: Prefix | None = sequence.prefix
        if prefix is None or not prefix.wanted:
            return
        last = next(reversed(prefix.wanted))
        above = self._depth_above(prefix)
        prices = {}
        for depth, kind in prefix.wanted.items():
            # All but the last one are soon left behind by a deeper one; at a junction others will go another
            # way.
            weight = 1.0 if depth == last or kind == "junction" else SUPERSEDED
            prices[depth] = self._tree.price(depth, above if depth > above else 0, weight)
            above = depth
        if chunk.start in prices:
            self._leave_checkpoint(sequence, prefix.wanted[chunk.start], prices[chunk.start])
        # The deepest first: if state slots are short, it is the one that the next turn starts from.
        for depth in reversed(prefix.wanted):
            known = self._tree.nodes.get(prefix.keys[depth // PAGE_SIZE - 1])
            is_there = known is not None and known.state[DEVICE] is not None
            if not chunk.start < depth < chunk.start + chunk.length or is_there:
                continue
            if (state_slot := self._store.take_state_slot_worth(prices[depth])) is not None:
                chunk.snapshots = sorted([*chunk.snapshots, (depth - chunk.start, state_slot)])

    def drop(self, chunk: Chunk) -> None:
        """A step failed: drops the snapshots that it was to take."""
        self._store.state_slots.give_back([state_slot for _, state_slot in chunk.snapshots])
        chunk.snapshots = ()

    def take(self, chunk: Chunk, prefix: Prefix) -> None:
        """A chunk ran, and its pages are in the tree: its snapshots follow them."""
        for n, state_slot in chunk.snapshots:
            depth = chunk.start + n
            node = self._tree.nodes[prefix.keys[depth // PAGE_SIZE - 1]]
            if node.state[DEVICE] is None:
                self.keep(node, state_slot, prefix.wanted[depth])
            else:
                self._store.state_slots.give_back([state_slot])
        if prefix.wanted:
            prefix.wanted = {d: kind for d, kind in prefix.wanted.items() if d >= chunk.sequence.n_computed}

    def move_tail(self, sequence: Sequence) -> None:
        """A decode has filled a page.

        The next turn will start from the state after it, and no longer from the one before.
        """
        prefix: Prefix | None = sequence.prefix
        if prefix is None or prefix.node.depth != sequence.n_computed or sequence.start_slot is not None:
            return
        if not self._info.canonical_decode:
            return
        node, old = prefix.node, prefix.tail
        if node.state[DEVICE] is None and old is not None and self._store.is_only_passed(old):
            self._leave_for(self._store.take_state(old), sequence, "tail")
        elif node.depth:
            self._leave_checkpoint(sequence, "tail", self._tree.price(node.depth, self._depth_above(prefix)))
        prefix.tail = node if node.kind == "tail" and node.state[DEVICE] is not None else None

    def _depth_above(self, prefix: Prefix) -> int:
        """Depth of the last checkpoint before what is being computed."""
        node = prefix.node
        return node.depth if node.parent is None or node.has_state else self._tree.nearest_above(node).depth

    def _leave_checkpoint(self, sequence: Sequence, kind: str, price: float) -> None:
        """The state between two chunks becomes a checkpoint, if it is worth a state slot: the sequence's own
        state slot changes its owner, and the next chunk writes another.
        """
        node = sequence.prefix.node
        if node.depth == sequence.n_computed and node.state[DEVICE] is None and sequence.start_slot is None:
            state_slot = self._store.take_state_slot_worth(price)
            if state_slot is not None:
                self._leave_for(state_slot, sequence, kind)

    def _leave_for(self, state_slot: int, sequence: Sequence, kind: str) -> None:
        left = sequence.state_slot
        assert left is not None
        self.keep(sequence.prefix.node, left, kind)
        self._store.state_slots.share([left])
        sequence.start_slot, sequence.state_slot = left, state_slot

    def keep(self, node: Node, state_slot: int, kind: str) -> None:
        """A state slot becomes the tree's."""
        self._store.put(Kind.STATE, node, state_slot, kind)
        self._store.stats.checkpoints_taken[kind] = self._store.stats.checkpoints_taken.get(kind, 0) + 1


def _picture_edges(pictures: list[Picture]) -> Iterator[int]:
    """Yields where runs of pictures begin and end: other prompts ask something else about them. Pictures less
    than a page apart, as the frames of a video are, are one run.
    """
    for before, after in zip([None, *pictures], [*pictures, None], strict=True):
        if before is None or after is None or after.first - before.end >= PAGE_SIZE:
            if before is not None:
                yield before.end // PAGE_SIZE * PAGE_SIZE
            if after is not None:
                yield after.first // PAGE_SIZE * PAGE_SIZE


def _ladder(begin: int, end: int) -> Iterator[int]:
    """Depths inside a message of begin … end - 1 at which it gets checkpoints."""
    for step in LADDER:
        if begin + step < end:
            yield begin + step
    yield from range(begin + 2 * LADDER[-1], end, LADDER[-1])
