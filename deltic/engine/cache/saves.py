"""Copies on disk of what the tree has and is worth it, which survive a restart.

They are written behind the steps (`Saves`). Other servers may use the directory (`Shared`). What they wrote
is looked for when a request wants it: it is in the tree then as if it had been restored at the start, and is
loaded as that is. One of the servers evicts for all, and takes everything that the others have written into
its tree, every SURVEY_S. The others save as long as the directory has room. Files that others have deleted
are forgotten. A prompt's files may also be asked for (`Exports`), to be sent to another server.

All of this is for the engine's thread; the mover's looks at the files (`disk.py`).
"""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from deltic.engine.cache.directory import Entry
from deltic.engine.cache.disk import Disk, Search, Survey
from deltic.engine.cache.tiers import Move, Tiers
from deltic.engine.cache.tree import DEVICE, DISK, STATE_FIRST, Kind, Node, PrefixTree, Tier, extend_keys, root_key
from deltic.engine.events import CacheLocated
from deltic.engine.messages import LocateCache
from deltic.ops.geometry import PAGE_SIZE

SAVE_BYTES = 32 << 20
"""About as much goes to disk in one go: for so long its pages and state slots are kept from others."""

REGROW_S = 3600.0
"""Seconds for which less is kept on a disk that was full."""

MAX_SAVED_PAGES = 1 << 17
"""Pages on disk; the tree takes about 1.2 kB of memory for each."""

SURVEY_S = 10.0
"""Seconds between two surveys of the directory by the server that evicts."""

IDLE_SURVEY_S = 60.0
"""The same by the others, which look when they have written a share of the budget, too."""

SHARE = 16
"""Divisor of the budget: this share a server may write between two looks, and this share is kept free for
others.
"""

MAX_NEWS = 200
"""Files of others that are taken note of before one step: that takes a millisecond."""

MAX_SEARCH_S = 1.0
"""Longest wait in seconds of a request for what others may have. A search that a hanging disk does not answer
is the last.
"""

MAX_EXPORT_S = 30.0
"""Longest time in seconds that a checkpoint may take to get to disk."""


class Shared:
    """View that a server has of a directory that others may use."""

    def __init__(self, saves: Saves, tree: PrefixTree, tiers: Tiers, disk: Disk) -> None:
        self._saves, self._tree, self._tiers, self._disk, self._directory = saves, tree, tiers, disk, disk.directory
        self.n_listed = self.n_written = 0
        """Bytes in the directory by the last survey, and those that this server has written since then."""
        self.searches: dict[int, Search] = {}
        self.n_found = 0
        """Pages that a request found, and another server had written."""
        self._survey_at = time.monotonic() + SURVEY_S
        self._news: deque[Entry | tuple[Kind, bytes]] = deque()
        """News of the last survey: objects that appeared, and the kinds and keys of those that are gone."""
        self._strays: set[tuple[Kind, bytes]] = set()
        """Objects without the page before them: that may have come after the look at its part of the
        directory.
        """
        self._old_strays: set[tuple[Kind, bytes]] = set()
        """Strays of the survey before."""
        self._knows_all = self._directory.may_delete
        """True if this server evicts, and its tree has what others wrote before: of `Disk.entries`, or a
        survey.
        """
        self._takes_all = False
        """True if the survey under way takes everything that others wrote."""

    @property
    def n_bytes(self) -> int:
        """Bytes in the directory, as far as this server knows."""
        return self.n_listed + self.n_written

    def summary(self) -> dict[str, object]:
        """Returns the counts as plain data."""
        directory = self._directory
        return {"servers": 1 + directory.n_others, "evicts": directory.may_delete, "found_pages": self.n_found}

    def clear(self) -> None:
        """The directory is about to be emptied."""
        self.n_listed = self.n_written = 0
        self.searches.clear()
        self._news.clear()
        self._strays.clear()

    # What a request wants.

    def search(self, root: bytes, keys: list[bytes], n_known: int, n_usable: int) -> Search | None:
        """Starts to look for more of a prompt than the tree has; None where that is of no use.

        n_known: pages that need not be looked for; n_usable: those that a request could start behind.
        """
        now_s = time.monotonic()
        if not self._tiers.may_have_foreign or any(now_s - s.began_s > MAX_SEARCH_S for s in self.searches.values()):
            return None
        search = Search(root, keys, n_known, n_usable, now_s)
        self.searches[self._tiers.search(search)] = search
        return search

    def found(self, ticket: int) -> None:
        """Puts what a search has found into the tree, as if this server had saved it."""
        search = self.searches.pop(ticket, None)
        if search is None:  # of before a reset
            return
        search.is_done = True
        node = self._tree.root(search.root)
        for n, key in enumerate(search.keys[: search.n_pages], 1):
            node = self._tree.child(node, key)
            if node.page[DISK] is None:
                self._saves.put(Kind.PAGE, node)
                self.n_found += 1
            if n == search.state_at and node.state[DISK] is None:
                self._saves.put(Kind.STATE, node)
        if search.n_pages:
            self._saves.make_room(0)

    # What there is.

    def poll(self) -> None:
        """Follows what others do. Called before every step."""
        tiers, disk = self._tiers, self._disk
        tiers.follow()
        if (survey := disk.surveyed) is not None:
            disk.surveyed = None
            self._take(survey)
        if self._news:
            self._take_news()
        may_delete = self._directory.may_delete
        self._knows_all &= may_delete
        has_just_got_the_lease = may_delete and not self._knows_all and not self._news
        now_s = time.monotonic()
        if has_just_got_the_lease or (tiers.may_have_foreign and now_s >= self._survey_at):
            self._survey_at = now_s + (SURVEY_S if may_delete else IDLE_SURVEY_S)
            tiers.survey()

    def must_look(self, budget: int) -> bool:
        """Returns whether nothing is to be written before the next survey, which has begun then."""
        if self._directory.may_delete:
            return not self._knows_all  # `poll` has it begun
        if self.n_written <= budget // SHARE:
            return False
        self._tiers.survey()
        return True

    def _take(self, survey: Survey) -> None:
        directory = self._directory
        self.n_listed, self.n_written = survey.n_bytes, 0
        self._old_strays, self._strays = self._strays, set()
        # Of the last one's what was not taken: what appeared does so again, what has gone is told only once.
        self._news = deque([*(news for news in self._news if not isinstance(news, Entry)), *survey.gone])
        self._takes_all = directory.may_delete
        if directory.may_delete and directory.has_locks:
            self._news += survey.appeared
            for node in filter(None, map(self._tree.nodes.get, survey.used)):
                if node.state[DISK] is not None:
                    self._tree.touch(node)
        if not self._news:
            self._has_taken()

    def _take_news(self) -> None:
        for _ in range(min(MAX_NEWS, len(self._news))):
            news = self._news.popleft()
            if isinstance(news, Entry):
                self._disk.know(news)
                self.adopt(news)
                continue
            kind, node = news[0], self._tree.nodes.get(news[1])
            if node is None or kind.of(node)[DISK] is None:
                continue
            if node.busy:
                self._news.append(news)
            else:
                self._saves.lose(kind, node)
        if not self._news:
            self._has_taken()

    def _has_taken(self) -> None:
        self._knows_all = self._takes_all
        self._saves.make_room(0)

    def adopt(self, entry: Entry) -> bool:
        """Puts an object of the directory into the tree; whether it has a place there.

        What cannot be reached from a root is deleted; where others write, only if that is so twice.
        """
        tree, what = self._tree, (entry.kind, entry.key)
        parent = tree.root(entry.parent) if entry.depth == PAGE_SIZE else tree.nodes.get(entry.parent)
        node = tree.nodes.get(entry.key)
        if parent is not None and parent.depth + PAGE_SIZE == entry.depth and (node is None or node.parent is parent):
            if entry.kind is Kind.PAGE and (parent.parent is None or parent.page[DISK] is not None):
                node = tree.child(parent, entry.key)
            elif entry.kind is Kind.PAGE or node is None or node.page[DISK] is None:
                node = None
            if node is not None:
                if entry.kind.of(node)[DISK] is None:
                    self._saves.put(entry.kind, node)
                return True
        if self._directory.may_delete and (not self._tiers.may_have_foreign or what in self._old_strays):
            self._tiers.delete(*what)
        else:
            self._strays.add(what)
            self._disk.forget(*what)
        return False


class NoSaves:
    """Saves where there is no disk: nothing is saved, and nothing can be found."""

    shared: Shared | None = None
    """View of what other servers do on the disk; None: there is none."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tier = Tier[bool](DISK, tree, lambda node: not node.busy, lambda node: not node.busy)
        self.queue: dict[Node, bool] = {}
        """Checkpoints to save; whether that is so whatever they are worth."""
        self.under_way: dict[int, tuple[list[Node], list[Node]]] = {}
        """Saves under way, by number: the path that each keeps where it is, and the node of each move."""

    @property
    def n_moving(self) -> int:
        """Saves and searches under way."""
        return 0

    def poll(self) -> None:
        """Follows what others do."""

    def finish(self, ticket: int, moves: list[Move]) -> None:
        """A save or a search is over."""

    def save_next(self) -> None:
        """Starts to save what waits longest, if nothing is being saved."""

    def save(self, node: Node) -> None:
        """Has the checkpoints up to here written to disk, with their pages, when their turn comes."""

    def search(self, root: bytes, keys: list[bytes], n_known: int, n_usable: int) -> Search | None:
        """Finds nothing (see `Shared.search`)."""
        return None

    def drop(self, kind: Kind, node: Node, deletes: bool) -> None:
        """An object is on disk no more. deletes: its file is of use to nobody; else it is forgotten."""

    def lose(self, kind: Kind, node: Node, is_bad: bool = False) -> None:
        """A page or state on disk cannot be used, nor what lies there beyond a page. That is deleted only
        where the file is_bad: else nothing is proven, and the next survey says what there is.
        """

    def clear(self, wait: Callable[[], None]) -> None:
        """Removes every file. wait: returns when nothing is moved."""
        wait()

    def summary(self) -> dict[str, object]:
        """Returns the counts as plain data."""
        return {"bytes_total": 0, "bytes_used": 0}


class Saves(NoSaves):
    """The tree's copies on disk, their budget, and the checkpoints that wait to be written."""

    shared: Shared

    def __init__(
        self, tree: PrefixTree, tiers: Tiers, disk: Disk, n_bytes: dict[Kind, int], forget: Callable[[Node], None]
    ) -> None:
        """n_bytes: of a page and of a state. forget: is told of a node that has lost its page."""
        super().__init__(tree)
        self._tree, self._tiers, self._disk, self._n_bytes, self._forget = tree, tiers, disk, n_bytes, forget
        self.disk_bytes = tiers.disk_bytes
        self._used = 0
        self._most = math.inf
        """Bound of the bytes on disk: less than the budget for a while after the disk was full."""
        self._regrow_at = 0.0
        self.shared = Shared(self, tree, tiers, disk)
        self._restore()

    def _restore(self) -> None:
        """The tree of what a directory holds."""
        entries, shared = self._disk.entries, self.shared
        for entry in sorted((e for e in entries if e.kind is Kind.PAGE), key=lambda entry: entry.depth):
            shared.adopt(entry)
        # Ordered by last use, so that what was used last is evicted last.
        for entry in sorted((e for e in entries if e.kind is Kind.STATE), key=lambda entry: entry.used_at):
            self._tree.clock += 1e-3 * shared.adopt(entry)
        shared.n_listed = self._used
        self.make_room(0)

    @property
    def n_moving(self) -> int:
        return len(self.under_way) + len(self.shared.searches)

    def poll(self) -> None:
        self.shared.poll()

    def finish(self, ticket: int, moves: list[Move]) -> None:
        if ticket in self.under_way:
            self._saved(*self.under_way.pop(ticket), moves)
        else:
            self.shared.found(ticket)

    # Behind the steps.

    def save(self, node: Node) -> None:
        for n in node.path:
            if n.has_state and n.state[DISK] is None:
                self.queue.setdefault(n, False)

    def is_saving(self, node: Node) -> bool:
        """Returns whether a checkpoint is still to be written."""
        return node in self.queue or any(path[-1] is node for path, _ in self.under_way.values())

    def files(self, node: Node) -> list[str]:
        """Lists the files of a checkpoint that is on disk: its pages, from the first on, and its state."""
        objects = [*(Move.of(Kind.PAGE, n, None) for n in node.path), Move.of(Kind.STATE, node, None)]
        return [self._disk.directory.file(of) for of in objects]

    def search(self, root: bytes, keys: list[bytes], n_known: int, n_usable: int) -> Search | None:
        return self.shared.search(root, keys, n_known, n_usable)

    def save_next(self) -> None:
        if not self.queue or self.under_way:
            return
        if time.monotonic() >= self._regrow_at:
            self._most = math.inf
        if self.shared.must_look(self.disk_bytes):
            return
        page_bytes, state_bytes = self._n_bytes[Kind.PAGE], self._n_bytes[Kind.STATE]
        while self.queue and self._disk.can_save:
            node = next(iter(self.queue))
            too_long = node.depth // PAGE_SIZE * page_bytes + state_bytes > self._room
            is_unwanted = node.is_left_behind and not self.queue[node]
            if not node.has_state or node.state[DISK] is not None or too_long or is_unwanted:
                del self.queue[node]
                continue
            path = node.path
            source = [n for n in path if n.page[DISK] is None]
            n_most = max(1, SAVE_BYTES // page_bytes)
            nodes = source[:n_most]  # from the first page on, then the state
            moves = [Move.of(Kind.PAGE, n, n.page[DEVICE]) for n in nodes]
            if len(source) <= n_most:
                del self.queue[node]
                moves.append(Move.of(Kind.STATE, node, node.state[DEVICE]))
                nodes.append(node)
            for n in path:
                n.busy += 1
            if self.make_room(sum(self._n_bytes[move.kind] for move in moves)):
                self.under_way[self._tiers.save(moves)] = path, nodes
                return
            for n in path:
                n.busy -= 1
            self.queue.pop(node, None)

    def _saved(self, path: list[Node], nodes: list[Node], moves: list[Move]) -> None:
        for node in path:
            node.busy -= 1
        if not all(move.ok for move in moves):
            self.queue.pop(path[-1], None)
        for node, move in zip(nodes, moves, strict=True):
            if not move.ok:
                continue
            if not move.was_there:
                self.shared.n_written += self._n_bytes[move.kind]
            if not self._tree.may_put(move.kind, node, DISK):
                self._discard(move.kind, node, self._disk.directory.may_delete)
            elif not self.tier.has(move.kind, node):
                self.put(move.kind, node, node.kind)
        for node in reversed(path):
            self._forget(node)
        if self._disk.is_full:
            self._give_way()

    # Room.

    @property
    def _room(self) -> int:
        """Bytes to which this server evicts: the budget, but for a little that others may write meanwhile.

        Where each evicts its own, less what others have put into the directory. An eighth in any case, lest
        whoever was first has all; the others give way for it when they save the next time.
        """
        most, directory = int(min(self.disk_bytes, self._most)), self._disk.directory
        if directory.has_locks:
            return most - (most // SHARE if directory.n_others else 0)
        return max(most - self._disk.foreign_bytes, most // 8)

    def make_room(self, n_bytes: int) -> bool:
        """Deletes the idle objects worth least on disk until n_bytes more fit. Returns False when they
        cannot.

        Where another server evicts, what is too much for this tree is forgotten.
        """
        may_delete = self._disk.directory.may_delete

        def is_full() -> bool:
            if self.tier.n_pages > MAX_SAVED_PAGES:
                return True
            return may_delete and self._used + n_bytes > self._room

        while is_full() and (victim := self.tier.victim()) is not None:
            self.drop(*victim, may_delete)
            self._forget(victim[1])
        if may_delete:
            return not is_full()
        return self.shared.n_bytes + n_bytes <= min(self.disk_bytes, self._most)

    def _give_way(self) -> None:
        """The disk was full before the budget was used up: a tenth of what this server has there makes room
        for what is new. After a while the whole budget is tried again.
        """
        self._disk.is_full = False  # with nothing to delete it is tried again later, whole
        if self._used and self._disk.directory.may_delete:
            self._most = min(self._most, self._used * 9 // 10)
            self._regrow_at = time.monotonic() + REGROW_S
            self.make_room(0)
            self._disk.resume()
            self._tiers.tell("resume")

    # What comes and goes.

    def put(self, kind: Kind, node: Node, why: str = "restored") -> None:
        """An object is on disk. why: a node that had no state becomes a checkpoint."""
        self.tier.put(kind, node, True, why)
        self._used += self._n_bytes[kind]

    def drop(self, kind: Kind, node: Node, deletes: bool) -> None:
        self.tier.drop(kind, node)
        self._discard(kind, node, deletes)
        self._used -= self._n_bytes[kind]

    def _discard(self, kind: Kind, node: Node, deletes: bool) -> None:
        (self._tiers.delete if deletes else self._disk.forget)(kind, node.key)

    def lose(self, kind: Kind, node: Node, is_bad: bool = False) -> None:
        deletes = is_bad and self._disk.directory.may_delete
        is_page = kind is Kind.PAGE
        for n in reversed(node.branch) if is_page else [node]:
            for each in STATE_FIRST if is_page else [kind]:
                if self.tier.has(each, n):
                    self.drop(each, n, deletes)
            self._forget(n)

    def clear(self, wait: Callable[[], None]) -> None:
        self.queue.clear()
        self.shared.clear()
        wait()
        self._tiers.clear()
        self.shared.clear()  # what was found while it waited

    def summary(self) -> dict[str, object]:
        return {"bytes_total": self._room, "bytes_used": self._used, **self.shared.summary()}


@dataclass(slots=True)
class Export:
    """A prompt whose files are wanted."""

    id: str
    number: int
    """The question's."""
    root: bytes
    keys: list[bytes]
    began_s: float
    search: Search | None = None
    node: Node | None = None
    """The checkpoint that is being written."""


class Exports:
    """The prompts that are asked for, one step further with each `poll`."""

    has_work = False

    def __init__(self, tree: PrefixTree, saves: Saves) -> None:
        self._tree, self._saves = tree, saves
        self._asked: list[Export] = []

    @property
    def is_waiting(self) -> bool:
        return bool(self._asked)

    def ask(self, command: LocateCache) -> None:
        """Begins to look for a prompt's deepest checkpoint; `poll` answers."""
        request = command.request
        keys = list[bytes]()
        # A request could start behind these: a token is left to compute.
        extend_keys(keys, request, array("i", request.prompt_ids), len(request.prompt_ids) - 1)
        export = Export(request.id, command.number, root_key(request), keys, time.monotonic())
        if export.keys:
            export.search = self._saves.search(export.root, export.keys, 0, 0)
        self._asked.append(export)

    def poll(self) -> list[CacheLocated]:
        """The answers that are ready."""
        if not self._asked:
            return []
        answers = [(export, self._answer(export)) for export in self._asked]
        self._asked = [export for export, answer in answers if answer is None]
        return [answer for _, answer in answers if answer is not None]

    def close(self, timeout_s: float) -> None:
        """Closes the saves: nobody waits any more."""
        self._asked.clear()

    def _answer(self, export: Export) -> CacheLocated | None:
        """The answer; None as long as it is looked for, or written."""
        located = partial(CacheLocated, export.id, number=export.number)
        saves, search, waited_s = self._saves, export.search, time.monotonic() - export.began_s
        if search is not None and not search.is_done and waited_s < MAX_SEARCH_S:
            return None
        known = self._tree.match(export.keys, len(export.keys))
        while known and not known[-1].has_state:
            known.pop()
        if not known:
            return located()
        node = known[-1]
        if node.state[DISK] is not None:
            return located(node.depth, saves.files(node))
        if node is not export.node:
            export.node = node
            saves.queue[node] = True
        elif not saves.is_saving(node):
            return located(error="the disk has no room for it, or cannot be written")
        if waited_s > MAX_EXPORT_S:
            return located(error=f"it could not be written within {MAX_EXPORT_S:g} s")
        return None
