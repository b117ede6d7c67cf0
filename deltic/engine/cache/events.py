"""Cache events: which blocks of prompts a request could start behind, told to routers as that changes.

A block is a page of the prefix tree. It is announced while a page of it is in some tier, and a checkpoint
lies at it or beyond it: keys and values behind the last checkpoint of a path are of no use to a request, so
nobody is told of them. Where there is no recurrent state, every page will do. A block is announced once for
each medium that it is in, its parent before it, and withdrawn once.

The tree says what moves (`tree.Listener`), the cache which tokens a page has (`learn`). Both only take notes;
`collect` compares what was told with what is, once a step, so what comes and goes within one is not told.
Pages and checkpoints whose tokens are unknown, as those that a restart found on disk, count once a request
has passed them.

Hashes have 63 bits, so readers with signed and with unsigned integers agree. They differ between models and
names of adapters, since readers keep those of all servers in one table.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

from deltic.engine.cache.tree import IntegrityError, Node, PrefixTree
from deltic.engine.messages import EngineInfo, Request
from deltic.engine.step import Sequence
from deltic.ops.geometry import PAGE_SIZE

GPU, CPU, DISK = 1, 2, 4
MEDIA = {GPU: "GPU", CPU: "CPU", DISK: "DISK"}
"""Readers' words for the three tiers, in the order of the tree's.

The pools that steps use are "GPU" on a CPU, too, as vLLM has it there: routers count most of that one.
"""

HASH_MASK = 2**63 - 1

ExtraKey = str | tuple[str, int]


@dataclass(slots=True, eq=False)
class Block:
    """Facts that events need of a node whose tokens are known. Another thread reads `hash` to `extra`, which
    do not change.
    """

    hash: int
    parent: int | None
    """The hash of the block before it."""
    tokens: array[int]
    lora: str | None
    """The name of the adapter."""
    extra: tuple[ExtraKey, ...] | None
    """Keys that decide, beside the tokens and those before them, who shares the block."""
    salt: int
    """Salt of the hash, which tells models and adapters apart."""
    told: int = 0
    """The media in which it is announced."""
    had_page: bool | None = None
    """True if the node had a page in any tier when last looked at; None: never looked at."""
    leads: bool = False
    """True if a checkpoint lies at the node or beyond it, as far as was looked."""
    n_leading: int = 0
    """Children of which that is so."""
    is_hidden: bool = False
    """True if the node is about to be dropped: nobody may use it."""


@dataclass(slots=True)
class BlocksStored:
    """Blocks of one path, one behind the other, are in a medium."""

    blocks: list[Block]
    medium: str


@dataclass(slots=True)
class Removed:
    """Blocks are no longer in a medium, or of no use there."""

    hashes: list[int]
    medium: str


@dataclass(slots=True)
class Cleared:
    """Event: every medium is empty."""


CacheEvent = BlocksStored | Removed | Cleared


class CacheEvents:
    """Changes of one model's prefix tree, as events. The first is a Cleared: a new process has nothing."""

    def __init__(self, info: EngineInfo, model: str, is_alone: bool = True) -> None:
        """model: the name that requests use. is_alone: no other model is behind this address; else a reset
        names its blocks, since readers take a Cleared for the address.
        """
        self._needs_state = info.has_state
        self._model = model
        self._is_alone = is_alone
        self._dirty: dict[Node, None] = {}
        self._left: list[Node] = []  # no checkpoints any more; those before them may lead nowhere
        self._log: list[CacheEvent] = [Cleared()]

    # Notes.

    def moved(self, node: Node) -> None:
        """A page has come into a tier, or left it."""
        self._dirty[node] = None

    def linked(self, node: Node) -> None:
        """A node has become a checkpoint. One whose tokens are unknown leads nobody to it before they are."""
        while node.parent is not None and node.block is not None and not node.block.leads:
            node.block.leads = True
            self._dirty[node] = None
            node = node.parent
            if node.parent is not None:
                node.block.n_leading += 1

    def unlinked(self, node: Node) -> None:
        """A node is no checkpoint any more."""
        self._left.append(node)  # looked at later: most often the next one is put right behind it

    def learn(self, node: Node, sequence: Sequence) -> None:
        """`node` is on the way of a sequence, and every node before it was learnt."""
        if node.block is not None:
            return
        begin, parent, request = node.depth - PAGE_SIZE, node.parent, sequence.request
        assert parent is not None
        before: Block | None = parent.block
        if before is None:  # the root
            lora = request.adapter_name or request.adapter.hex() or None
            identity = f"{self._model}\n{lora or ''}".encode("utf-8", "surrogatepass")
            above, salt = None, int.from_bytes(blake2b(identity, digest_size=8).digest())
        else:
            above, lora, salt = before.hash, before.lora, before.salt
        hash_ = (int.from_bytes(node.key[:8]) ^ salt) & HASH_MASK or 1
        extra = tuple(_extra_keys(request, lora, begin)) or None
        node.block = Block(hash_, above, sequence.tokens[begin : node.depth], lora, extra, salt)
        self._dirty[node] = None
        if node.has_state:
            self.linked(node)

    def learn_path(self, path: list[Node], sequence: Sequence) -> None:
        """A sequence starts behind `path`."""
        n = len(path)
        while n and path[n - 1].block is None:
            n -= 1
        for node in path[n:]:
            self.learn(node, sequence)

    def hide(self, branch: list[Node]) -> None:
        """A node and all beyond it will be dropped as soon as they can be: withdrawn at once."""
        if branch[0].block is not None:
            branch[0].block.is_hidden = True
        self._dirty |= dict.fromkeys(branch)

    def reset(self) -> None:
        """Every node was dropped."""
        if self._is_alone:
            self._dirty, self._left, self._log = {}, [], [Cleared()]

    # What is told.

    def collect(self) -> list[CacheEvent]:
        """Returns what has changed since the last call. O(nodes that changed)."""
        self._settle()
        log, self._log = self._log, []
        return log

    def _settle(self) -> None:
        if self._left:
            self._sweep()
        if not self._dirty:
            return
        dirty, self._dirty = self._dirty, {}
        # A damaged page may be gone, or come back, before those beyond it follow. It is rare.
        for node in [n for n in dirty if n.children and n.block is not None]:
            if node.block.had_page is not None and node.block.had_page != node.has_page:
                dirty |= dict.fromkeys(node.branch[1:])
        gone: dict[int, list[int]] = {}
        moved: dict[int, list[int]] = {}
        runs: list[BlocksStored] = []
        ends: dict[tuple[Node | None, int], BlocksStored] = {}
        for node in sorted(dirty, key=_depth):
            block: Block | None = node.block
            if block is None:
                continue
            before, block.told, block.had_page = block.told, self._media_of(node), node.has_page
            if before == block.told:
                continue
            for medium in MEDIA:
                if medium & before & ~block.told:
                    (moved if block.told else gone).setdefault(medium, []).append(block.hash)
                elif medium & block.told & ~before:
                    run = ends.pop((node.parent, medium), None)
                    if run is None:
                        run = BlocksStored([], MEDIA[medium])
                        runs.append(run)
                    run.blocks.append(block)
                    ends[node, medium] = run
        # What is gone may have come again as another node, and readers forget a hash that is nowhere.
        self._log += _removals(gone)
        self._log += runs
        self._log += _removals(moved)

    def _media_of(self, node: Node) -> int:
        """The media in which a node is to be announced, where its parent's are up to date."""
        block, parent = node.block, node.parent
        assert parent is not None
        if block.is_hidden or (self._needs_state and not block.leads):
            return 0
        if parent.parent is not None and not parent.block.told:
            return 0
        return _media(node)

    def _sweep(self) -> None:
        """Finds what leads nowhere any more, from former checkpoints up."""
        left, self._left = self._left, []
        for start in left:
            node = start
            while node.parent is not None and (block := node.block) is not None and block.leads:
                if node.has_state or block.n_leading:
                    break
                block.leads = False
                self._dirty[node] = None
                node = node.parent
                if node.parent is not None:
                    node.block.n_leading -= 1

    def check(self, tree: PrefixTree) -> None:
        """Raises IntegrityError unless what was told, or is about to be, is what the tree holds. O(all)."""
        self._settle()
        leading: set[Node] = set()
        for node in tree.nodes.values():
            at: Node | None = node if node.has_state and node.block is not None else None
            while at is not None and at.parent is not None and at not in leading:
                leading.add(at)
                at = at.parent
        media: dict[Node, int] = {}
        for node in sorted(tree.nodes.values(), key=_depth):
            block, parent = node.block, node.parent
            assert parent is not None
            if block is None:
                media[node] = 0
                continue
            is_announced = not block.is_hidden and (node in leading or not self._needs_state)
            media[node] = _media(node) if is_announced and (parent.parent is None or media[parent]) else 0
            if block.told != media[node]:
                raise IntegrityError(f"a block at {node.depth} is announced in {block.told}, and is in {media[node]}")


def _media(node: Node) -> int:
    """The media in which a node has a page."""
    return sum(medium for medium, where in zip(MEDIA, node.page, strict=True) if where is not None)


def _depth(node: Node) -> int:
    return node.depth


def _removals(hashes: dict[int, list[int]]) -> Iterable[Removed]:
    """The deepest first, as they leave."""
    return [Removed(of[::-1], MEDIA[medium]) for medium, of in hashes.items()]


def _extra_keys(request: Request, lora: str | None, begin: int) -> Iterator[ExtraKey]:
    """Yields the keys that decide, beside the tokens, who shares the page of tokens [begin, begin +
    PAGE_SIZE), in the form and order of vLLM (v1/core/kv_cache_utils.py, generate_block_hash_extra_keys): the
    adapter, pictures with their places, and in the first page the salt. That of a namespace has its name
    before it, as in `root_key`, so a router that knows no namespaces finds its pages for nobody.
    """
    if lora is not None:
        yield lora
    pictures = request.pictures
    i = bisect_right(pictures, begin, key=lambda picture: picture.end)
    while i < len(pictures) and pictures[i].first < begin + PAGE_SIZE:
        yield pictures[i].identifier, pictures[i].first - begin
        i += 1
    if begin == 0 and (scope := request.prefix_scope.removeprefix("\n")):
        yield scope
