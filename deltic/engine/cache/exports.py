"""What the prefix cache has of a prompt, as files that a server can send to another."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from functools import partial

from deltic.engine.cache.cache import Cache
from deltic.engine.cache.shared import MAX_SEARCH_S
from deltic.engine.cache.tiers import Search
from deltic.engine.cache.tree import DISK, Node, next_key, picture_keys, root_key
from deltic.engine.messages import CacheLocated, LocateCache, Request
from deltic.ops.geometry import PAGE_SIZE

MAX_EXPORT_S = 30.0
"""How long a checkpoint may take to get to disk."""


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

    def __init__(self, cache: Cache) -> None:
        self._store = cache.store
        self._asked: list[Export] = []

    @property
    def is_waiting(self) -> bool:
        return bool(self._asked)

    def ask(self, command: LocateCache) -> None:
        """Begins to look for a prompt's deepest checkpoint; `poll` answers."""
        request = command.request
        export = Export(request.id, command.number, root_key(request), page_keys(request), time.monotonic())
        if export.keys:
            export.search = self._store.search(export.root, export.keys, 0, 0)
        self._asked.append(export)

    def poll(self) -> list[CacheLocated]:
        """The answers that are ready."""
        if not self._asked:
            return []
        answers = [(export, self._answer(export)) for export in self._asked]
        self._asked = [export for export, answer in answers if answer is None]
        return [answer for _, answer in answers if answer is not None]

    def close(self, timeout_s: float) -> None:
        """Nobody waits any more."""
        self._asked.clear()

    def _answer(self, export: Export) -> CacheLocated | None:
        """The answer; None as long as it is looked for, or written."""
        located = partial(CacheLocated, export.id, number=export.number)
        store, search, waited_s = self._store, export.search, time.monotonic() - export.began_s
        if search is not None and not search.is_done and waited_s < MAX_SEARCH_S:
            return None
        known = store.tree.match(export.keys, len(export.keys))
        while known and not known[-1].has_state:
            known.pop()
        if not known:
            return located()
        node = known[-1]
        if node.state[DISK] is not None:
            return located(node.depth, store.files(node))
        if node is not export.node:
            export.node = node
            store.demand(node)
        elif not store.is_saving(node):
            return located(error="the disk has no room for it, or cannot be written")
        if waited_s > MAX_EXPORT_S:
            return located(error=f"it could not be written within {MAX_EXPORT_S:g} s")
        return None


def page_keys(request: Request) -> list[bytes]:
    """Of the pages that a request could start behind."""
    tokens, key, keys = array("i", request.prompt_ids), root_key(request), []
    for begin in range(0, len(tokens) - PAGE_SIZE, PAGE_SIZE):
        key = next_key(key, tokens[begin : begin + PAGE_SIZE], picture_keys(request, begin))
        keys.append(key)
    return keys
