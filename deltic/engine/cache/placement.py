"""Placement of the prefix tree's bytes: the pools, eviction from one tier to the next, and the way back.

Device memory has pages and state slots, handed out by the two pools, with reference counts. Objects that only
the tree owns are idle. They are evicted when a sequence needs the room: to host memory if there is any
(`HostMemory`), else to nowhere. The disk keeps copies (`saves.py`).

Pages leave a tier leaf first. So with a page all those before it are on the device, and the same holds on
disk; pages on the host continue a path that the device begins.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from deltic.engine.cache.events import CacheEvents
from deltic.engine.cache.saves import NoSaves, Saves
from deltic.engine.cache.tiers import Move, Tiers
from deltic.engine.cache.tree import DEVICE, DISK, HOST, STATE_FIRST, IntegrityError, Kind, Node, Pool, PrefixTree, Tier
from deltic.engine.events import CacheStats
from deltic.engine.messages import EngineInfo
from deltic.ops.geometry import PAGE_SIZE


@dataclass(slots=True, eq=False)
class TierLoad:
    """Pages and a state on their way to device memory."""

    path: list[Node]
    """Nodes from the first page to the one where the request will start: kept where they are meanwhile."""
    targets: list[Node]
    """The node of each move."""
    moves: list[Move]
    began_s: float
    is_done: bool = False


class HostMemory:
    """Units of host memory, of a page's size: the tree's copies, and what preempted sequences left there.

    A state takes several. What is worth least there is dropped.
    """

    def __init__(self, tree: PrefixTree, tiers: Tiers, forget: Callable[[Node], None]) -> None:
        """forget: is told of a node that has lost its page."""
        self.units = Pool("unit", tiers.n_units)
        self.tier = Tier[tuple[int, ...]](
            HOST,
            tree,
            page_is_idle=lambda node: not node.busy and not node.n_parked,
            state_is_idle=lambda node: not node.busy,
        )
        self._tiers, self._forget = tiers, forget

    def keep(self, kind: Kind, node: Node, device: int, price: float = math.inf) -> None:
        """Copies an object that leaves the device, where there is room for what is worth `price`."""
        if not self.tier.has(kind, node) and (units := self.park(kind, device, price)):
            self.tier.put(kind, node, units)

    def drop(self, kind: Kind, node: Node) -> None:
        """The tree needs a copy no more."""
        self.units.give_back(self.tier.drop(kind, node))

    def park(self, kind: Kind, device: int, price: float = math.inf) -> tuple[int, ...] | None:
        """Copies a page or a state slot to units that are not the tree's; None when there is no room.

        What the tree has there and is worth least makes way, if it is worth less than `price`.
        """
        units = self._take(self._tiers.units_per_state if kind is Kind.STATE else 1, price)
        if units:
            self._tiers.copy_out(Move(kind, device=device, units=units))
        return units

    def unpark(self, kind: Kind, units: tuple[int, ...], device: int) -> None:
        """Brings that back, and frees the units."""
        self._tiers.copy_in(Move(kind, device=device, units=units))
        self.units.give_back(units)

    def _take(self, n: int, price: float) -> tuple[int, ...] | None:
        if n > self.units.n:
            return None
        while self.units.n_free < n:
            victim = self.tier.victim()
            if victim is None:
                return None
            kind, node = victim
            if kind is Kind.STATE and node.priority >= price:
                return None
            self.drop(kind, node)
            self._forget(node)
        return tuple(self.units.take(n))


class Placement:
    """The tree's pages and states in their tiers, and the pools that they share with the sequences."""

    def __init__(self, info: EngineInfo, tiers: Tiers) -> None:
        self._info = info
        self.pages = Pool("page", info.n_pages)
        self.state_slots = Pool("state slot", info.n_slots)
        self._pools = {Kind.PAGE: self.pages, Kind.STATE: self.state_slots}
        self.tree = tree = PrefixTree(info)
        self.events: CacheEvents | None = None
        """Receiver of the tree's changes; None: nobody listens."""
        self.stats = CacheStats()
        self.tiers = tiers
        # On the device an object must be the tree's alone; nowhere may it be taken away while it is moved.
        pages, state_slots = self.pages, self.state_slots
        self.device = Tier[int](
            DEVICE,
            tree,
            page_is_idle=lambda node: not node.busy and pages.is_idle(node.page[DEVICE]),
            state_is_idle=lambda node: not node.busy and state_slots.is_idle(node.state[DEVICE]),
        )
        self.host = HostMemory(tree, tiers, self._forget_if_gone)
        self.units = self.host.units
        self._loads: dict[int, TierLoad] = {}
        self._doomed: set[Node] = set()
        """Dropped with all beyond them, as soon as nothing of that is moved."""
        self.saves = NoSaves(tree)
        if tiers.disk is not None and info.prefix_cache:
            self.saves = Saves(tree, tiers, tiers.disk, tiers.largest, self._forget_if_gone)
        self.shared, self._to_save = self.saves.shared, self.saves.queue
        self._tiers: tuple[Tier[Any], ...] = (self.device, self.host.tier, self.saves.tier)

    def listen(self, events: CacheEvents) -> None:
        """Has `events` told of every change from now on. Once, before the first request."""
        self.events = self.tree.listener = events
        for tier in self._tiers:
            tier.listener = events

    # Room on the device.

    def take_pages(self, n: int) -> list[int] | None:
        """`n` pages for the caller, evicting what is idle; None when there are not as many."""
        while self.pages.n_free < n:
            if self.pages.n_available < n or not self._evict_page():
                return None
        return self.pages.take(n)

    def take_state_slots(self, n: int) -> list[int] | None:
        """`n` state slots for the caller, evicting checkpoints; None when there are not as many."""
        while self.state_slots.n_free < n:
            node = self.device.least_state()
            if node is None:
                return None
            self._evict_state(node)
        return self.state_slots.take(n)

    def take_state_slot_worth(self, price: float) -> int | None:
        """A state slot for a checkpoint of this priority: a free one, or one of lower priority; None if there
        is neither.
        """
        if not self.state_slots.n_free:
            node = self.device.least_state()
            if node is None:
                return None
            if node.priority >= price:
                self.tree.clock = max(self.tree.clock, price)  # as if it had come, and been evicted at once
                return None
            self._evict_state(node)
        return self.state_slots.take(1)[0]

    def _evict_page(self) -> bool:
        """Frees a page; False when none may be taken away."""
        while (victim := self.device.victim()) is not None:
            kind, node = victim
            if kind is Kind.STATE:
                self._evict_state(node)
                continue
            # Copied if something there needs it: a checkpoint or a page behind it, or a preempted sequence
            # that will come back. Without --cache-host-gb only the last can be.
            if node.state[HOST] is not None or node.n_children[HOST] or node.n_parked:
                self.host.keep(Kind.PAGE, node, node.page[DEVICE])
            self._drop_on_device(Kind.PAGE, node)
            self.stats.n_pages_evicted += 1
            self._forget_if_gone(node)
            return True
        return False

    def _evict_state(self, node: Node) -> None:
        self.tree.clock = max(self.tree.clock, node.priority)
        if self.tiers.takes_evicted:
            self.host.keep(Kind.STATE, node, node.state[DEVICE], node.priority)
        self._drop_on_device(Kind.STATE, node)
        self.stats.n_checkpoints_evicted += 1

    def _drop_on_device(self, kind: Kind, node: Node) -> None:
        index = self.device.drop(kind, node)
        self._pools[kind].hand_back(index)
        self._pools[kind].give_back([index])

    # What the tree takes over, and gives away.

    def put(self, kind: Kind, node: Node, index: int, why: str = "") -> None:
        """The caller's page or state slot becomes the tree's. why: a state is a checkpoint."""
        self._pools[kind].hand_to_tree(index)
        self.device.put(kind, node, index, why)
        self._drop_copy(node)

    def _drop_copy(self, node: Node) -> None:
        """Drops the host's copy: an object on the device needs no room on the host."""
        for kind in Kind:
            if not node.busy and self.device.has(kind, node) and self.host.tier.has(kind, node):
                self.host.drop(kind, node)

    def take_state(self, node: Node) -> int:
        """The tree's state slot of a checkpoint becomes the caller's."""
        state_slot = self.device.drop(Kind.STATE, node)
        self.state_slots.hand_back(state_slot)
        return state_slot

    def is_only_passed(self, node: Node) -> bool:
        """Returns whether a checkpoint has one way on at most, and nobody has used it or does."""
        state_slot = node.state[DEVICE]
        if state_slot is None or node.busy or node.n_hits:
            return False
        return self.state_slots.is_idle(state_slot) and len(node.children) < 2

    # From the lower tiers to the device, beside the steps.

    def missing(self, path: list[Node], with_state: bool) -> list[tuple[Kind, Node]]:
        """Lists what `path` lacks on the device: pages, and then, with_state, the state behind them."""
        pages = [(Kind.PAGE, node) for node in path if node.page[DEVICE] is None]
        return [*pages, (Kind.STATE, path[-1])] if with_state and path[-1].state[DEVICE] is None else pages

    def load(self, path: list[Node], missing: list[tuple[Kind, Node]]) -> TierLoad | None:
        """Starts to bring what `path` lacks on the device. None: there is no room."""
        targets = [node for _, node in missing]
        wanted = set(targets)
        for load in self._loads.values():
            if not wanted.isdisjoint(load.targets):
                return load  # another request's: what is missing after it is loaded then
        for node in path:
            node.busy += 1
        n_states = sum(kind is Kind.STATE for kind, _ in missing)
        pages = self.take_pages(len(missing) - n_states)
        state_slots = self.take_state_slots(n_states) if pages is not None else None
        if pages is None or state_slots is None:
            self.pages.give_back(pages or [])
            for node in path:
                node.busy -= 1
            return None
        moves = [Move.of(kind, node, i) for (kind, node), i in zip(missing, pages + state_slots, strict=True)]
        load = self._loads[self.tiers.load(moves)] = TierLoad(path, targets, moves, time.monotonic())
        return load

    def poll(self) -> None:
        """Takes note of what was moved, and has the next thing saved. Called before every step."""
        self.saves.poll()
        if self.tiers.n_pending:
            for ticket, moves in self.tiers.finished():
                if (load := self._loads.pop(ticket, None)) is not None:
                    self._loaded(load)
                else:
                    self.saves.finish(ticket, moves)
                for node in list(self._doomed):
                    self.drop(node)
        self.saves.save_next()

    @property
    def n_moving(self) -> int:
        """Loads, saves and searches under way."""
        return len(self._loads) + self.saves.n_moving

    @property
    def is_idle(self) -> bool:
        """True if nothing is moved, nor waits to be saved."""
        return not self._to_save and not self.n_moving

    @property
    def is_loading(self) -> bool:
        """True if a sequence may wait for the lower tiers."""
        return bool(self._loads)

    def _loaded(self, load: TierLoad) -> None:
        load.is_done = True
        for node in load.path:
            node.busy -= 1
        lost: list[tuple[Kind, Node, bool]] = []
        for node, move in zip(load.targets, load.moves, strict=True):
            kind = move.kind
            if move.ok and not self.device.has(kind, node) and self.tree.may_put(kind, node, DEVICE):
                self.put(kind, node, move.device, node.kind)
                continue
            self._pools[kind].give_back([move.device])
            if not move.ok:
                lost.append((kind, node, move.is_bad))
        for node in load.path:
            self._drop_copy(node)
        for kind, node, is_bad in lost:
            self.saves.lose(kind, node, is_bad)
        for node in reversed(load.path):  # another load may have found its page damaged
            self._forget_if_gone(node)

    # The end of nodes.

    def _forget_if_gone(self, node: Node) -> None:
        """A node that has no page in any tier is no longer known, nor is what lies beyond it."""
        if not node.has_page and not node.busy and self.tree.nodes.get(node.key) is node:
            self._drop_branch(node)

    def _drop_branch(self, node: Node) -> None:
        """Drops a node and all beyond it from every tier. Nothing of them may be moved now."""
        for n in reversed(node.branch):
            assert not n.busy
            self.saves.queue.pop(n, None)
            self._doomed.discard(n)
            for kind in STATE_FIRST:
                if self.device.has(kind, n):
                    self._drop_on_device(kind, n)
                if self.host.tier.has(kind, n):
                    self.host.drop(kind, n)
                if self.saves.tier.has(kind, n):
                    self.saves.drop(kind, n, deletes=True)
            self.tree.forget(n)

    def drop(self, node: Node) -> int:
        """Drops a node and all beyond it from every tier; the number of pages.

        While something of them is moved they are doomed, and go once they rest: a disk may take long.
        """
        branch = node.branch
        if any(n.busy for n in branch):
            self._doomed.add(node)
            for n in branch:
                self.saves.queue.pop(n, None)
            if self.events is not None:
                self.events.hide(branch)
        elif self.tree.nodes.get(node.key) is node:
            self._drop_branch(node)
        return len(branch)

    def is_doomed(self, keys: list[bytes]) -> bool:
        """Returns whether the first page of a path is to be dropped: nobody may use it, nor put anything into
        it.
        """
        return bool(self._doomed and keys) and self.tree.nodes.get(keys[0]) in self._doomed

    def reset(self) -> None:
        """Drops everything, in every tier. Bytes that sequences use stay theirs alone."""
        self.saves.clear(self._finish)
        for root in list(self.tree.roots.values()):
            for node in list(root.children):
                self._drop_branch(node)
        if self.events is not None:
            self.events.reset()

    def _finish(self) -> None:
        while self.n_moving:  # a page that is read may not become another's
            self.tiers.wait(1.0)
            self.poll()

    def wait(self, timeout_s: float) -> None:
        """Waits until something was moved, or until the time is up."""
        if self.n_moving:
            self.tiers.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Saves what waits to be saved, for at most so long, and ends the tiers."""
        until_s = time.monotonic() + timeout_s
        while not self.is_idle and (left_s := until_s - time.monotonic()) > 0:
            self.poll()
            if self.n_moving:
                self.tiers.wait(left_s)
            else:  # for a survey, or for a disk that refused
                time.sleep(min(left_s, 0.01))
        self.tiers.close(max(0.1, until_s - time.monotonic()))

    # What is said of it.

    def count(self) -> CacheStats:
        """The counters, and the gauges as they are now."""
        stats, tiers = self.stats, self.tiers
        stats.n_pages, stats.n_checkpoints = self.device.n_pages, len(self.device.states)
        stats.read_bytes, stats.written_bytes, stats.n_damaged = tiers.read_bytes, tiers.written_bytes, tiers.n_damaged
        return stats

    def summary(self) -> dict[str, object]:
        """The contents of each tier, and the tree of checkpoints, as plain data."""
        page_bytes, units = self._info.page_bytes, self.units
        tiers: dict[str, dict[str, object]] = {
            tier.name: {"pages": tier.n_pages, "checkpoints": len(tier.states)} for tier in self._tiers
        }
        tiers["device"] |= {
            "pages_total": self.pages.n,
            "pages_in_use": self.pages.n - self.pages.n_available,
            "slots_total": self.state_slots.n,
            "slots_in_use": self.state_slots.n - self.state_slots.n_available,
        }
        tiers["host"] |= {"bytes_total": units.n * page_bytes, "bytes_used": (units.n - units.n_free) * page_bytes}
        tiers["disk"] |= self.saves.summary()
        return {
            "page_tokens": PAGE_SIZE,
            "page_bytes": page_bytes,
            "checkpoint_bytes": self._info.state_bytes,
            "tiers": tiers,
            "counters": msgspec.structs.asdict(self.count()),
            "checkpoints": self.tree.describe(),
        }

    def check(self, pages: Counter[int], state_slots: Counter[int], units: Counter[int]) -> None:
        """Raises IntegrityError unless the tree and the loads, with what the sequences hold, make up every
        pool. O(all).
        """
        paths = [*(path for path, _ in self.saves.under_way.values()), *(load.path for load in self._loads.values())]
        busy = Counter(node for path in paths for node in path)
        held: dict[Kind, list[int]] = {kind: [] for kind in Kind}
        held_units = list[int]()
        for node in self.tree.nodes.values():
            if node.busy != busy.get(node, 0):
                raise IntegrityError(f"a node at {node.depth} counts {node.busy} moves, and {busy[node]} are under way")
            if not node.has_page and not node.busy:
                raise IntegrityError(f"a node at {node.depth} has no page anywhere")
            for tier in (DEVICE, DISK):
                if node.state[tier] is not None and node.page[tier] is None:
                    raise IntegrityError(f"a checkpoint at {node.depth} is in a tier where its page is not")
                if node.page[tier] is not None and not self.tree.may_put(Kind.PAGE, node, tier):
                    raise IntegrityError(f"a page at {node.depth} is in a tier where the one before it is not")
            for kind in Kind:
                index, of_host, _ = kind.of(node)
                if index is not None:
                    held[kind].append(index)
                held_units += of_host or ()
        for load in self._loads.values():
            for move in load.moves:
                held[move.kind].append(move.device)
        pages.update(held[Kind.PAGE])
        state_slots.update(held[Kind.STATE])
        units.update(held_units)
        self.pages.check(pages)
        self.state_slots.check(state_slots)
        self.units.check(units)
        if self.events is not None:
            self.events.check(self.tree)
