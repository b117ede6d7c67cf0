"""The prefix tree: what was computed, by content, and what is worth keeping.

Every node is a page boundary. Its key is a hash chained over all tokens before it, so equal keys mean equal
tokens from the start, and one dictionary finds any prefix. A node has a page, and perhaps a state
(a checkpoint), in up to three tiers: device memory, host memory, disk. A request can start where a state and
all pages before it are.

What leaves a tier first: pages that no state in the tier lies beyond, since nothing resumes from them; then,
where the checkpoint of a leaf or a state slot is wanted, the state of the least priority. Priorities are
GreedyDual-Size with frequency (Cao and Irani, 1997, "Cost-aware WWW proxy caching algorithms"; Cherkasova,
1998, for the frequency): the prefill time a checkpoint saves over the next one above it, per byte of what
only it needs, times its uses, on top of a clock that rises to the priority of whatever is evicted. So what is
not used ages without being touched. The rule is here (`Tier.victim`, `PrefixTree.price`). `placement.py`
applies it when room is wanted, `tiers.py` moves the bytes. A `Pool` counts who has a page or a state slot:
the tree, sequences, or both.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar

from deltic.engine.messages import EngineInfo, Request
from deltic.ops.geometry import PAGE_SIZE

DEVICE, HOST, DISK = 0, 1, 2
TIER_NAMES = ("device", "host", "disk")

SUPERSEDED = 1 / 8
"""Weight of a checkpoint with exactly one other right below it.

Its conversation went on, and resumes from the lower one.
"""

MAX_DESCRIBED = 1000
"""Checkpoints in a description."""


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


def root_key(request: Request) -> bytes:
    """The key before the first page: who shares prefixes, and whatever decides KV and state beside the
    tokens: pictures (`picture_keys`), and here the adapter."""
    # Another hash than that of next_key, lest a salt be made up of another salt's key and tokens.
    scope = request.prefix_scope.encode("utf-8", "surrogatepass")
    return blake2b(scope, digest_size=16, person=b"deltic salt", salt=request.adapter).digest()


def next_key(key: bytes, tokens: array[int], pictures: bytes = b"") -> bytes:
    """The key after one page more, of PAGE_SIZE tokens. pictures: of the pictures that begin in it
    (`picture_keys`), whose tokens are placeholders.
    """
    return blake2b(key + tokens.tobytes() + pictures, digest_size=16).digest()


def picture_keys(request: Request, begin: int) -> bytes:
    """Returns the keys of the pictures that begin in the page of tokens [begin, begin + PAGE_SIZE), each
    behind a byte that says where.
    """
    pictures = request.pictures
    i, keys = bisect_left(pictures, begin, key=lambda picture: picture.first), b""
    while i < len(pictures) and pictures[i].first < begin + PAGE_SIZE:
        keys += bytes([pictures[i].first - begin]) + pictures[i].key
        i += 1
    return keys


def extend_keys(keys: list[bytes], request: Request, tokens: array[int], n_tokens: int) -> None:
    """Appends the keys of the full pages that the first `n_tokens` have, and `keys` has not yet."""
    key = keys[-1] if keys else root_key(request)
    for begin in range(len(keys) * PAGE_SIZE, n_tokens - PAGE_SIZE + 1, PAGE_SIZE):
        key = next_key(key, tokens[begin : begin + PAGE_SIZE], picture_keys(request, begin))
        keys.append(key)


Indices = list[Any]
"""Indices of a page or state, one a tier: one on the device, a tuple of units on the host, True on disk; None
where it is not.
"""

Place = TypeVar("Place")


class Kind(StrEnum):
    """The objects that a tier may have of a node. The text is the ending of their files' names."""

    PAGE = "page"
    STATE = "state"

    def of(self, node: Node) -> Indices:
        """Returns where the node's object of this kind is, for each tier."""
        return node.page if self is Kind.PAGE else node.state


STATE_FIRST = (Kind.STATE, Kind.PAGE)
"""The order in which a node's objects leave a tier: a state may not be where its page is not."""


@dataclass(slots=True, eq=False)
class Node:
    """A page boundary: `depth` tokens from the start, the last PAGE_SIZE of them in its page.

    page[tier] and state[tier] say where the bytes are: a page or state slot index on the device, a tuple of
    units on the host, True on disk; None: not there. n_children[tier] counts children with a page in the
    tier.
    """

    key: bytes
    parent: Node | None
    depth: int
    children: set[Node] = field(default_factory=set)
    page: Indices = field(default_factory=lambda: [None, None, None])
    state: Indices = field(default_factory=lambda: [None, None, None])
    n_children: list[int] = field(default_factory=lambda: [0, 0, 0])
    above: Node | None = None
    """The nearest checkpoint (or the root) on the way to the root, while this is one."""
    below: set[Node] = field(default_factory=set)
    """The checkpoints whose `above` this is."""
    kind: str = ""
    """Reason why the checkpoint was taken."""
    touched: float = 0.0
    priority: float = 0.0
    n_hits: int = 0
    n_parked: int = 0
    """Preempted sequences that come back to this page: it does not leave host memory before."""
    busy: int = 0
    """Moves under way that read or write its bytes: it stays where it is meanwhile."""
    block: Any = None
    """Facts that cache events need of the node (`events.Block`); None: not even its tokens are known."""

    @property
    def has_page(self) -> bool:
        return self.page != _NOWHERE

    @property
    def has_state(self) -> bool:
        return self.state != _NOWHERE

    @property
    def path(self) -> list[Node]:
        """The nodes from the first page to this one."""
        path, node = list[Node](), self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    @property
    def branch(self) -> list[Node]:
        """Nodes of the subtree under this one, itself first, parents before children."""
        branch = [self]
        for node in branch:  # grows as it is walked
            branch += node.children
        return branch

    @property
    def is_left_behind(self) -> bool:
        """True if a checkpoint is not worth a place on disk: its one conversation went on from a deeper one.

        Where prompts branch, and behind the first message, which is most often shared, it is.
        """
        if len(self.below) != 1 or self.kind == "junction":
            return False
        # The tail is the answer: the next turn may render it otherwise, or ask for another.
        if next(iter(self.below)).kind == "tail":
            return False
        above = self.above
        while above is not None and above.parent is not None and above.kind == "ladder":
            above = above.above
        return not (self.kind == "message" and above is not None and above.parent is None)


_NOWHERE = [None, None, None]


class Listener(Protocol):
    """Listener for changes: cache events, if there are any."""

    def moved(self, node: Node) -> None:
        """A page has come into a tier, or left it."""

    def linked(self, node: Node) -> None:
        """A node has become a checkpoint."""

    def unlinked(self, node: Node) -> None:
        """A node is no checkpoint any more."""


class Tier(Generic[Place]):
    """Nodes that have a page or a state in one tier, and the order in which they leave it."""

    def __init__(
        self, index: int, tree: PrefixTree, page_is_idle: Callable[[Node], bool], state_is_idle: Callable[[Node], bool]
    ) -> None:
        """page_is_idle, state_is_idle: whether a node's in this tier may be taken away. Two, as `victim` asks
        of thousands of nodes.
        """
        self.index, self.name, self.tree = index, TIER_NAMES[index], tree
        self.n_pages = 0
        self.states: dict[Node, None] = {}
        self.listener: Listener | None = None
        self._page_is_idle, self._state_is_idle = page_is_idle, state_is_idle
        self._loose: dict[Node, None] = {}  # leaves without a state, in the order in which they became that

    def _settle(self, node: Node) -> None:
        """Takes note of what a node has become: a leaf without a state, or not."""
        i = self.index
        if node.page[i] is not None and node.state[i] is None and not node.n_children[i]:
            self._loose[node] = None
        else:
            self._loose.pop(node, None)

    def has(self, kind: Kind, node: Node) -> bool:
        return kind.of(node)[self.index] is not None

    def put(self, kind: Kind, node: Node, where: Place, why: str = "") -> None:
        """A page or state of a node comes into this tier. why: of a node that becomes a checkpoint."""
        assert not self.has(kind, node)
        if kind is Kind.STATE and not node.has_state:
            self.tree.link(node, why)
        self._set(kind, node, where, 1)

    def drop(self, kind: Kind, node: Node) -> Place:
        """Drops a page or state of a node from this tier. Returns where it was."""
        where: Place = kind.of(node)[self.index]
        assert where is not None
        self._set(kind, node, None, -1)
        if kind is Kind.STATE and not node.has_state:
            self.tree.unlink(node)
        return where

    def _set(self, kind: Kind, node: Node, where: Place | None, n_more: int) -> None:
        kind.of(node)[self.index] = where
        if kind is Kind.PAGE:
            assert node.parent is not None
            node.parent.n_children[self.index] += n_more
            self.n_pages += n_more
            self._settle(node.parent)
            if self.listener is not None:
                self.listener.moved(node)
        elif where is None:
            del self.states[node]
        else:
            self.states[node] = None
        self._settle(node)

    def renew(self, node: Node) -> None:
        """Moves a page to the end of the order in which pages without states leave."""
        if node in self._loose:
            self._loose[node] = self._loose.pop(node)

    def victim(self) -> tuple[Kind, Node] | None:
        """The object to evict for one page less: a page, or the state of a leaf; then ask again."""
        # Few of them are in use: a leaf for each sequence that runs, and those that are being moved.
        for node in self._loose:
            if self._page_is_idle(node):
                return Kind.PAGE, node
        i, page_is_idle, state_is_idle = self.index, self._page_is_idle, self._state_is_idle
        leaves = (n for n in self.states if not n.n_children[i] and page_is_idle(n) and state_is_idle(n))
        leaf = min(leaves, key=_priority, default=None)
        return None if leaf is None else (Kind.STATE, leaf)

    def least_state(self) -> Node | None:
        """The state of the least priority that may be taken away."""
        return min(filter(self._state_is_idle, self.states), key=_priority, default=None)


class PrefixTree:
    """The nodes, by key, and the priorities of the checkpoints among them."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self.nodes: dict[bytes, Node] = {}
        self.roots: dict[bytes, Node] = {}
        self.clock = 0.0
        """The priority of what was evicted last."""
        self.listener: Listener | None = None

    def root(self, key: bytes) -> Node:
        return self.roots.get(key) or Node(key, None, 0)

    def child(self, parent: Node, key: bytes) -> Node:
        """The node after `parent` with this key, made if need be: the caller gives it a page."""
        node = self.nodes.get(key)
        if node is None:
            node = self.nodes[key] = Node(key, parent, parent.depth + PAGE_SIZE)
            if parent.parent is None:
                self.roots[parent.key] = parent
            parent.children.add(node)
        return node

    def match(self, keys: list[bytes], n_most: int) -> list[Node]:
        """The nodes of the longest known prefix, of at most n_most pages."""
        nodes, path = self.nodes, []
        for i in range(min(n_most, len(keys))):
            node = nodes.get(keys[i])
            if node is None:
                break
            path.append(node)
        return path

    def may_put(self, kind: Kind, node: Node, tier: int) -> bool:
        """Returns whether a page may stand behind that of its parent in this tier, or a state behind its
        page.
        """
        if self.nodes.get(node.key) is not node:  # it was dropped while its bytes were on their way
            return False
        before = node.parent if kind is Kind.PAGE else node
        assert before is not None
        return before.parent is None or before.page[tier] is not None

    def touch(self, node: Node) -> None:
        """A request starts from this checkpoint."""
        node.n_hits += 1
        node.touched = self.clock
        self._rate(node)

    def price(self, depth: int, above: int, weight: float = 1.0) -> float:
        """The priority of a checkpoint `depth` tokens deep, taken now, with the nearest one above it `above`
        deep.
        """
        return self.clock + weight * self._value(above, depth)

    def describe(self) -> list[dict[str, object]]:
        """The tree of checkpoints, parents before children: at most MAX_DESCRIBED, those nearest the root."""
        described: list[dict[str, object]] = []
        ids: dict[Node, int] = {}
        todo = deque(node for root in self.roots.values() for node in root.below)
        while todo and len(described) < MAX_DESCRIBED:
            node = todo.popleft()
            assert node.above is not None
            ids[node] = len(described)
            described.append(
                {
                    "id": ids[node],
                    "above": ids.get(node.above),
                    "tokens": node.depth,
                    "kind": node.kind,
                    "tiers": [name for name, where in zip(TIER_NAMES, node.state, strict=True) if where is not None],
                    "hits": node.n_hits,
                    "priority": round(node.priority - self.clock, 6),
                }
            )
            todo += node.below
        return described

    def forget(self, node: Node) -> None:
        """Takes out a node without a page; it has neither children nor states any more."""
        assert not node.has_page and not node.has_state and not node.children and node.parent is not None
        del self.nodes[node.key]
        parent = node.parent
        parent.children.discard(node)
        if parent.parent is None and not parent.children:
            self.roots.pop(parent.key, None)  # else every salt would leave one

    def nearest_above(self, node: Node) -> Node:
        """The next checkpoint on the way up, or the root."""
        above = node.parent
        assert above is not None
        while above.parent is not None and not above.has_state:
            above = above.parent
        return above

    def _value(self, start: int, end: int) -> float:
        """The cost of computing tokens start … end - 1, in tokens without context, for each megabyte of their
        pages and the state behind them.
        """
        info = self._info
        n_bytes = info.state_bytes + (end - start) // PAGE_SIZE * info.page_bytes
        return (end - start) * (1.0 + (start + end) / 2 / info.even_context) / n_bytes * 1e6

    def _rate(self, node: Node) -> None:
        assert node.above is not None
        weight = SUPERSEDED if len(node.below) == 1 else 1.0
        node.priority = node.touched + (1 + node.n_hits) * weight * self._value(node.above.depth, node.depth)

    def link(self, node: Node, why: str) -> None:
        """A node becomes a checkpoint."""
        node.kind, node.touched = why, self.clock
        above = node.above = self.nearest_above(node)
        below = set(_nearest_below(node))
        above.below -= below
        above.below.add(node)
        node.below = below
        for other in below:
            other.above = node
            self._rate(other)
        self._rate(node)
        if above.above is not None:
            self._rate(above)
        if self.listener is not None:
            self.listener.linked(node)

    def unlink(self, node: Node) -> None:
        """A node is no checkpoint any more."""
        above = node.above
        assert above is not None
        above.below.discard(node)
        above.below |= node.below
        for other in node.below:
            other.above = above
            self._rate(other)
        node.above, node.below = None, set()
        if above.above is not None:
            self._rate(above)
        if self.listener is not None:
            self.listener.unlinked(node)


def _priority(node: Node) -> float:
    return node.priority


def _nearest_below(node: Node) -> Iterator[Node]:
    """The checkpoints right below a node that is none yet."""
    todo = list(node.children)
    while todo:
        child = todo.pop()
        if child.has_state:
            yield child
        else:
            todo += child.children
