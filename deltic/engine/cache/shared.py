"""What other servers do in the directory of the prefix cache, as far as this one's tree goes.

What they wrote is looked for when a request wants it (`Shared.search`): it is in the tree then as if it had
been restored at the start, and is loaded as that is. The server that evicts for all takes everything that the
others have written into its tree (`Shared.poll`), every SURVEY_S. Files that others have deleted are
forgotten. All of this is for the engine's thread; the mover's looks at the files (`tiers.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from deltic.engine.cache.directory import Entry
from deltic.engine.cache.tiers import Search, Survey, Tiers
from deltic.engine.cache.tree import DISK, Kind, Node, PrefixTree
from deltic.ops.geometry import PAGE_SIZE

SURVEY_S = 10.0
"""How often it is looked what other servers have in the directory, by the one that evicts."""

IDLE_SURVEY_S = 60.0
"""The same by the others, which look when they have written a share of the budget, too."""

SHARE = 16
"""What a server may write between two looks, and what is kept free for others: one part in so many of the
budget.
"""

MAX_NEWS = 200
"""Files of others that are taken note of before one step: that takes a millisecond."""

MAX_SEARCH_S = 1.0
"""How long a request waits for what others may have: one that a hanging disk does not answer is the last."""


class Shared:
    """One server's view of a directory that others may use."""

    def __init__(
        self,
        tiers: Tiers,
        tree: PrefixTree,
        put: Callable[[Kind, Node], None],
        lose: Callable[[Kind, Node], None],
        make_room: Callable[[int], bool],
    ) -> None:
        """put: a page or state of a node is on disk. lose: it is no more, nor what lies beyond a page.
        make_room: evicts until so many bytes more fit.
        """
        self._tiers, self._tree = tiers, tree
        self._put, self._lose, self._make_room = put, lose, make_room
        self.n_listed = self.n_written = 0
        """Bytes in the directory by the last survey, and those that this server has written since then."""
        self.searches: dict[int, Search] = {}
        self.n_found = 0
        """Pages that a request found, and another server had written."""
        self._survey_at = time.monotonic() + SURVEY_S
        self._news: deque[Entry | tuple[Kind, bytes]] = deque()
        """Of the last survey: objects that appeared, and the kinds and keys of those that are gone."""
        self._strays: set[tuple[Kind, bytes]] = set()
        """Objects without the page before them: that may have come after the look at its part of the
        directory.
        """
        self._old_strays: set[tuple[Kind, bytes]] = set()
        """Those of the survey before."""
        self._knows_all = tiers.may_delete
        """This server evicts, and its tree has what others wrote before: of `tiers.entries`, or a survey."""
        self._takes_all = False
        """Whether the last survey will have been one like that."""

    @property
    def n_bytes(self) -> int:
        """In the directory, as far as this server knows."""
        return self.n_listed + self.n_written

    def summary(self) -> dict[str, Any]:
        """As plain data."""
        tiers = self._tiers
        return {"servers": 1 + tiers.n_others, "evicts": tiers.may_delete, "found_pages": self.n_found}

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
        """What a search has found is in the tree as if this server had saved it."""
        search = self.searches.pop(ticket, None)
        if search is None:  # of before a reset
            return
        search.is_done = True
        node = self._tree.root(search.root)
        for n, key in enumerate(search.keys[: search.n_pages], 1):
            node = self._tree.child(node, key)
            if node.page[DISK] is None:
                self._put(Kind.PAGE, node)
                self.n_found += 1
            if n == search.state_at and node.state[DISK] is None:
                self._put(Kind.STATE, node)
        if search.n_pages:
            self._make_room(0)

    # What there is.

    def poll(self) -> None:
        """Follows what others do. Called before every step."""
        tiers = self._tiers
        tiers.follow()
        if (survey := tiers.surveyed) is not None:
            tiers.surveyed = None
            self._take(survey)
        if self._news:
            self._take_news()
        self._knows_all &= tiers.may_delete
        has_just_got_the_lease = tiers.may_delete and not self._knows_all and not self._news
        now_s = time.monotonic()
        if has_just_got_the_lease or (tiers.may_have_foreign and now_s >= self._survey_at):
            self._survey_at = now_s + (SURVEY_S if tiers.may_delete else IDLE_SURVEY_S)
            tiers.survey()

    def must_look(self, budget: int) -> bool:
        """Whether nothing is to be written before the next survey, which has begun then."""
        if self._tiers.may_delete:
            return not self._knows_all  # `poll` has it begun
        if self.n_written <= budget // SHARE:
            return False
        self._tiers.survey()
        return True

    def _take(self, survey: Survey) -> None:
        tiers = self._tiers
        self.n_listed, self.n_written = survey.n_bytes, 0
        self._old_strays, self._strays = self._strays, set()
        # Of the last one's what was not taken: what appeared does so again, what has gone is told only once.
        self._news = deque([*(news for news in self._news if not isinstance(news, Entry)), *survey.gone])
        self._takes_all = tiers.may_delete
        if tiers.may_delete and tiers.has_locks:
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
                self._tiers.know(news)
                self.adopt(news)
                continue
            kind, node = news[0], self._tree.nodes.get(news[1])
            if node is None or kind.of(node)[DISK] is None:
                continue
            if node.busy:
                self._news.append(news)
            else:
                self._lose(kind, node)
        if not self._news:
            self._has_taken()

    def _has_taken(self) -> None:
        self._knows_all = self._takes_all
        self._make_room(0)

    def adopt(self, entry: Entry) -> bool:
        """Puts an object of the directory into the tree; whether it has a place there.

        What cannot be reached from a root is deleted; where others write, only if that is so twice.
        """
        tree, tiers, what = self._tree, self._tiers, (entry.kind, entry.key)
        parent = tree.root(entry.parent) if entry.depth == PAGE_SIZE else tree.nodes.get(entry.parent)
        node = tree.nodes.get(entry.key)
        if parent is not None and parent.depth + PAGE_SIZE == entry.depth and (node is None or node.parent is parent):
            if entry.kind is Kind.PAGE and (parent.parent is None or parent.page[DISK] is not None):
                node = tree.child(parent, entry.key)
            elif entry.kind is Kind.PAGE or node is None or node.page[DISK] is None:
                node = None
            if node is not None:
                if entry.kind.of(node)[DISK] is None:
                    self._put(entry.kind, node)
                return True
        if tiers.may_delete and (not tiers.may_have_foreign or what in self._old_strays):
            tiers.delete(*what)
        else:
            self._strays.add(what)
            tiers.forget(*what)
        return False
