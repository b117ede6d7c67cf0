"""Where the bytes of the prefix tree are: the pools, eviction from one tier to the next, and the way back.

Device memory has pages and state slots, handed out by the two pools, with reference counts. Objects that only
the tree owns are idle. They are evicted when a sequence needs the room: to host memory if there is any, else
to nowhere. Host memory is one pool of units of a page's size; a state takes several. The disk keeps copies:
what is worth it is written behind, so it survives a restart.

Pages leave a tier leaf first, so the pages of a tier are closed: on the device and on disk with a page are
all those before it; on the host they continue a path that the device begins.

Other servers may use the directory: `shared.py` follows what they do. One of the servers evicts for all. The
others save as long as the directory has room.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from deltic.engine.cache.events import CacheEvents
from deltic.engine.cache.pool import IntegrityError, Pool
from deltic.engine.cache.shared import SHARE, Shared
from deltic.engine.cache.tiers import Move, Search, Tiers
from deltic.engine.cache.tree import (
    DEVICE,
    DISK,
    HOST,
    TIER_NAMES,
    Kind,
    Node,
    PrefixTree,
    Tier,
    branch_of,
    is_left_behind,
    path_to,
)
from deltic.engine.messages import CacheStats, EngineInfo
from deltic.ops.geometry import PAGE_SIZE

SAVE_BYTES = 32 << 20
"""About as much goes to disk in one go: for so long its pages and slots are kept from others."""

REGROW_S = 3600.0
"""How long less is kept on a disk that was full."""

STATE_FIRST = (Kind.STATE, Kind.PAGE)
"""The order in which a node's objects leave a tier: a state may not be where its page is not."""

MAX_SAVED_PAGES = 1 << 17
"""Pages on disk; the tree takes about 1.2 kB of memory for each."""


@dataclass(slots=True, eq=False)
class Load:
    """Pages and a state on their way to device memory."""

    path: list[Node]
    """From the first page to the one where the request will start: kept where they are meanwhile."""
    targets: list[Node]
    """The node of each move."""
    pages: list[int]
    slots: list[int]
    began_s: float
    is_done: bool = False


class Residency:
    """The tree's pages and states in their tiers, and the pools that they share with the sequences."""

    def __init__(self, info: EngineInfo, tiers: Tiers | None) -> None:
        self._info = info
        self.pages = Pool("page", info.n_pages)
        self.slots = Pool("slot", info.n_slots)
        self.units = Pool("unit", tiers.n_units if tiers else 0)
        self.tree = PrefixTree(info)
        self.events: CacheEvents | None = None
        """What is told of the tree, if anybody listens."""
        self.stats = CacheStats()
        self.tiers = tiers
        self.disk_bytes = tiers.disk_bytes if tiers and tiers.has_disk and info.prefix_cache else 0
        self._pools = pools = {Kind.PAGE: self.pages, Kind.STATE: self.slots}
        self._n_bytes = {Kind.PAGE: info.page_bytes, Kind.STATE: info.state_bytes}
        # On the device it must be the tree's alone; nowhere may it be taken away while it is moved.
        self.device = Tier(
            DEVICE, self.tree, lambda kind, node: not node.busy and pools[kind].is_idle(kind.of(node)[DEVICE])
        )
        self.host = Tier(
            HOST, self.tree, lambda kind, node: not node.busy and not (kind is Kind.PAGE and node.n_parked)
        )
        self.disk = Tier(DISK, self.tree, lambda kind, node: not node.busy)
        self._tiers = (self.device, self.host, self.disk)
        self._loads: dict[int, Load] = {}
        self._saves: dict[int, tuple[list[Node], list[Node]]] = {}  # the path, and the node of each move
        self._to_save: dict[Node, bool] = {}
        """Checkpoints; whether that is so whatever they are worth."""
        self._doomed: set[Node] = set()
        """Dropped with all beyond them, as soon as nothing of that is moved."""
        self._disk_used = 0
        self._disk_most = math.inf
        """Less than the budget for a while after the disk was full."""
        self._regrow_at = 0.0
        self.shared: Shared | None = None
        """What others do on the disk; None without one."""
        if self.disk_bytes and tiers is not None:
            self.shared = Shared(tiers, self.tree, self._put_saved, self._lose, self._make_room)
            self._restore(tiers, self.shared)

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

    def take_slots(self, n: int) -> list[int] | None:
        """`n` slots for the caller, evicting checkpoints; None when there are not as many."""
        while self.slots.n_free < n:
            node = self.device.least_state()
            if node is None:
                return None
            self._evict_state(node)
        return self.slots.take(n)

    def take_slot_worth(self, price: float) -> int | None:
        """A slot for a checkpoint of this priority: a free one, or one of lower priority; None if there is
        neither.
        """
        if not self.slots.n_free:
            node = self.device.least_state()
            if node is None:
                return None
            if node.priority >= price:
                self.tree.clock = max(self.tree.clock, price)  # as if it had come, and been evicted at once
                return None
            self._evict_state(node)
        return self.slots.take(1)[0]

    def _evict_page(self) -> bool:
        """Frees a page; False when none may be taken away."""
        while (victim := self.device.victim()) is not None:
            kind, node = victim
            if kind is Kind.STATE:
                self._evict_state(node)
                continue
            page = node.page[DEVICE]
            # Host memory that was not given for evicted pages is for those of preempted sequences.
            leads_on = node.state[HOST] is not None or node.n_children[HOST] or node.n_parked
            if leads_on and node.page[HOST] is None and (units := self._take_units(1)):
                self._copy_out(Kind.PAGE, page, units)
                self.host.put(Kind.PAGE, node, units)
            self._drop_on_device(Kind.PAGE, node)
            self.stats.n_pages_evicted += 1
            self._forget_if_gone(node)
            return True
        return False

    def _evict_state(self, node: Node) -> None:
        self.tree.clock = max(self.tree.clock, node.priority)
        slot = node.state[DEVICE]
        if node.state[HOST] is None and self.tiers is not None and self.tiers.takes_evicted:
            units = self._take_units(self.tiers.units_per_state, node.priority)
            if units:
                self._copy_out(Kind.STATE, slot, units)
                self.host.put(Kind.STATE, node, units)
        self._drop_on_device(Kind.STATE, node)
        self.stats.n_checkpoints_evicted += 1

    def _drop_on_device(self, kind: Kind, node: Node) -> None:
        index = self.device.drop(kind, node)
        self._pools[kind].hand_back(index)
        self._pools[kind].give_back([index])

    def _drop_on_host(self, kind: Kind, node: Node) -> None:
        self.units.give_back(self.host.drop(kind, node))

    # What the tree takes over, and gives away.

    def put_page(self, node: Node, page: int) -> None:
        """The tree becomes one more owner of a page."""
        self.pages.share([page])
        self.pages.hand_to_tree(page)
        self.device.put(Kind.PAGE, node, page)
        self._drop_copy(node)

    def put_state(self, node: Node, slot: int, why: str) -> None:
        """The caller's slot becomes the tree's: a checkpoint."""
        self.slots.hand_to_tree(slot)
        self.device.put(Kind.STATE, node, slot, why)
        self._drop_copy(node)

    def _drop_copy(self, node: Node) -> None:
        """Drops the host's copy: an object on the device needs no room on the host."""
        if node.busy:
            return
        for kind in Kind:
            if self.device.has(kind, node) and self.host.has(kind, node):
                self._drop_on_host(kind, node)

    def take_state(self, node: Node) -> int:
        """The tree's slot of a checkpoint becomes the caller's."""
        slot: int = self.device.drop(Kind.STATE, node)
        self.slots.hand_back(slot)
        return slot

    def is_only_passed(self, node: Node) -> bool:
        """Whether a checkpoint has one way on at most, and nobody has used it or does."""
        slot = node.state[DEVICE]
        if slot is None or node.busy or node.n_hits:
            return False
        return self.slots.is_idle(slot) and len(node.children) < 2

    # Host memory.

    def _take_units(self, n: int, price: float = math.inf) -> tuple[int, ...] | None:
        """`n` units of host memory.

        It drops the objects worth least there, if they are worth less than `price`; None when that is not
        enough.
        """
        if n > self.units.n:
            return None
        while self.units.n_free < n:
            victim = self.host.victim()
            if victim is None:
                return None
            kind, node = victim
            if kind is Kind.STATE and node.priority >= price:
                return None
            self._drop_on_host(kind, node)
            self._forget_if_gone(node)
        return tuple(self.units.take(n))

    def _copy_out(self, kind: Kind, device: int, units: tuple[int, ...]) -> None:
        assert self.tiers is not None
        self.tiers.copy_out(Move(kind, device, units))

    def park(self, kind: Kind, device: int) -> tuple[int, ...] | None:
        """Copies a page or a slot to host memory that is not the tree's; None when there is no room."""
        if self.tiers is None:
            return None
        units = self._take_units(self.tiers.units_per_state if kind is Kind.STATE else 1)
        if units:
            self._copy_out(kind, device, units)
        return units

    def unpark(self, kind: Kind, units: tuple[int, ...], device: int) -> None:
        """Brings that back, and frees the units."""
        assert self.tiers is not None
        self.tiers.copy_in(Move(kind, device, units))
        self.units.give_back(units)

    # From the lower tiers to the device, beside the steps.

    def load(self, path: list[Node], with_state: bool) -> Load | None:
        """Starts to bring what `path` lacks on the device.

        None when it lacks nothing, or there is no room.
        """
        missing = [node for node in path if node.page[DEVICE] is None]
        states = [path[-1]] if with_state and path[-1].state[DEVICE] is None else []
        if self.tiers is None or not (missing or states):
            return None
        wanted = {*missing, *states}
        for load in self._loads.values():
            if not wanted.isdisjoint(load.targets):
                return load  # another request's: what is missing after it is loaded then
        for node in path:
            node.busy += 1
        pages = self.take_pages(len(missing))
        slots = self.take_slots(len(states)) if pages is not None else None
        if pages is None or slots is None:
            self.pages.give_back(pages or [])
            self._rest(path)
            return None
        moves = [_move(Kind.PAGE, node, page) for node, page in zip(missing, pages, strict=True)]
        moves += [_move(Kind.STATE, node, slot) for node, slot in zip(states, slots, strict=True)]
        load = self._loads[self.tiers.load(moves)] = Load(path, missing + states, pages, slots, time.monotonic())
        return load

    def _rest(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            node.busy -= 1

    def poll(self) -> None:
        """Takes note of what was moved, and has the next thing saved. Called before every step."""
        tiers = self.tiers
        if tiers is None:
            return
        if self.shared is not None:
            self.shared.poll()
        if tiers.n_pending:
            for ticket, moves in tiers.finished():
                if ticket in self._loads:
                    self._loaded(self._loads.pop(ticket), moves)
                elif ticket in self._saves:
                    self._saved(*self._saves.pop(ticket), moves)
                elif self.shared is not None:
                    self.shared.found(ticket)
                for node in list(self._doomed):
                    self.drop(node)
        if self._to_save and not self._saves:
            self._save_next()

    @property
    def n_moving(self) -> int:
        """Loads, saves and searches under way."""
        return len(self._loads) + len(self._saves) + (len(self.shared.searches) if self.shared is not None else 0)

    @property
    def is_loading(self) -> bool:
        """Whether a sequence may wait for the lower tiers."""
        return bool(self._loads)

    @property
    def n_moved(self) -> int:
        """Objects that were moved or could not be: it stands still where the disk hangs."""
        return 0 if self.tiers is None else self.tiers.n_moved

    def _loaded(self, load: Load, moves: list[Move]) -> None:
        load.is_done = True
        for node in load.path:
            node.busy -= 1
        lost: list[tuple[Kind, Node, bool]] = []
        for node, move in zip(load.targets, moves, strict=True):
            kind = move.kind
            if move.ok and not self.device.has(kind, node) and self._has_path(kind, node, DEVICE):
                self._pools[kind].hand_to_tree(move.device)
                self.device.put(kind, node, move.device, node.kind)
                self._drop_copy(node)
                continue
            self._pools[kind].give_back([move.device])
            if not move.ok:
                lost.append((kind, node, move.is_bad))
        for node in load.path:
            self._drop_copy(node)
        for kind, node, is_bad in lost:
            self._lose(kind, node, is_bad)
        for node in reversed(load.path):  # another load may have found its page damaged
            self._forget_if_gone(node)

    def _has_path(self, kind: Kind, node: Node, tier: int) -> bool:
        """Whether a page may stand behind that of its parent in this tier, or a state behind its page."""
        if self.tree.nodes.get(node.key) is not node:  # it was dropped while its bytes were on their way
            return False
        before = node.parent if kind is Kind.PAGE else node
        assert before is not None
        return before.parent is None or before.page[tier] is not None

    # What other servers have.

    @property
    def may_have_foreign(self) -> bool:
        """Whether others may have written what this server does not know."""
        return self.shared is not None and self.tiers is not None and self.tiers.may_have_foreign

    def search(self, root: bytes, keys: list[bytes], n_known: int, n_usable: int) -> Search | None:
        """As `Shared.search`; None where nobody else can have written."""
        return self.shared.search(root, keys, n_known, n_usable) if self.shared is not None else None

    def _put_saved(self, kind: Kind, node: Node, why: str = "restored") -> None:
        self.disk.put(kind, node, True, why)
        self._disk_used += self._n_bytes[kind]

    def _lose(self, kind: Kind, node: Node, is_bad: bool = False) -> None:
        """A page or state on disk cannot be used, nor what lies there beyond a page. That is deleted only
        where the file is_bad: else nothing is proven, and the next survey says what there is.
        """
        deletes = is_bad and self.tiers is not None and self.tiers.may_delete
        kinds = STATE_FIRST if kind is Kind.PAGE else [kind]
        for n in reversed(branch_of(node)) if kind is Kind.PAGE else [node]:
            for each in kinds:
                if self.disk.has(each, n):
                    self._drop_saved(each, n, deletes)
            self._forget_if_gone(n)

    # To disk, behind the steps.

    def save(self, node: Node) -> None:
        """Has the checkpoints up to here written to disk, with their pages, when their turn comes."""
        if self.disk_bytes:
            for n in path_to(node):
                if n.has_state and n.state[DISK] is None:
                    self._to_save.setdefault(n, False)

    def demand(self, node: Node) -> None:
        """Has a checkpoint written to disk whatever it is worth."""
        self._to_save[node] = True

    def is_saving(self, node: Node) -> bool:
        """Whether a checkpoint is still to be written."""
        return node in self._to_save or any(path[-1] is node for path, _ in self._saves.values())

    def files(self, node: Node) -> list[str]:
        """Of a checkpoint that is on disk: its pages, from the first on, and its state."""
        assert self.tiers is not None
        moves = [_move(Kind.PAGE, n, None) for n in path_to(node)] + [_move(Kind.STATE, node, None)]
        return [self.tiers.file(move) for move in moves]

    def _save_next(self) -> None:
        """Starts to save the checkpoint that waits longest: pages from the first on, then the state."""
        assert self.tiers is not None and self.shared is not None
        info = self._info
        if time.monotonic() >= self._regrow_at:
            self._disk_most = math.inf
        if self.shared.must_look(self.disk_bytes):
            return
        while self._to_save and self.tiers.can_save:
            node = next(iter(self._to_save))
            too_long = node.depth // PAGE_SIZE * info.page_bytes + info.state_bytes > self._disk_room
            is_unwanted = is_left_behind(node) and not self._to_save[node]
            if not node.has_state or node.state[DISK] is not None or too_long or is_unwanted:
                del self._to_save[node]
                continue
            path = path_to(node)
            source = [n for n in path if n.page[DISK] is None]
            n_most = max(1, SAVE_BYTES // info.page_bytes)
            nodes = source[:n_most]
            moves = [_move(Kind.PAGE, n, n.page[DEVICE]) for n in nodes]
            if len(source) <= n_most:
                del self._to_save[node]
                moves.append(_move(Kind.STATE, node, node.state[DEVICE]))
                nodes.append(node)
            for n in path:
                n.busy += 1
            if self._make_room(sum(self._n_bytes[move.kind] for move in moves)):
                self._saves[self.tiers.save(moves)] = path, nodes
                return
            self._rest(path)
            self._to_save.pop(node, None)

    @property
    def _disk_room(self) -> int:
        """Bytes to which this server evicts: the budget, but for a little that others may write meanwhile.

        Where each evicts its own, less what others have put into the directory. An eighth in any case, lest
        whoever was first has all; the others give way for it when they save the next time.
        """
        assert self.tiers is not None
        most = int(min(self.disk_bytes, self._disk_most))
        if self.tiers.has_locks:
            return most - (most // SHARE if self.tiers.n_others else 0)
        return max(most - self.tiers.foreign_bytes, most // 8)

    def _give_way(self) -> None:
        """The disk was full before the budget was used up: a tenth of what this server has there makes room
        for what is new. After a while the whole budget is tried again.
        """
        assert self.tiers is not None
        if not self._disk_used or not self.tiers.may_delete:
            return  # nothing to delete: it is tried again later
        self._disk_most = min(self._disk_most, self._disk_used * 9 // 10)
        self._regrow_at = time.monotonic() + REGROW_S
        self._make_room(0)
        self.tiers.resume()

    def _make_room(self, n_bytes: int) -> bool:
        """Deletes the idle objects worth least on disk until n_bytes more fit. Returns False when they
        cannot.

        Where another server evicts, what is too much for this tree is forgotten.
        """
        assert self.tiers is not None
        may_delete = self.tiers.may_delete

        def is_full() -> bool:
            if self.disk.n_pages > MAX_SAVED_PAGES:
                return True
            return may_delete and self._disk_used + n_bytes > self._disk_room

        while is_full() and (victim := self.disk.victim()) is not None:
            self._drop_saved(*victim, may_delete)
            self._forget_if_gone(victim[1])
        if may_delete:
            return not is_full()
        return self.shared is not None and self.shared.n_bytes + n_bytes <= min(self.disk_bytes, self._disk_most)

    def _saved(self, path: list[Node], nodes: list[Node], moves: list[Move]) -> None:
        assert self.tiers is not None
        self._rest(path)
        if not all(move.ok for move in moves):
            self._to_save.pop(path[-1], None)
        for node, move in zip(nodes, moves, strict=True):
            if not move.ok:
                continue
            if self.shared is not None and not move.was_there:
                self.shared.n_written += self._n_bytes[move.kind]
            if not self._has_path(move.kind, node, DISK):
                self._discard(move.kind, node, self.tiers.may_delete)
            elif not self.disk.has(move.kind, node):
                self._put_saved(move.kind, node, node.kind)
        for node in reversed(path):
            self._forget_if_gone(node)
        if self.tiers.is_full:
            self._give_way()

    def _discard(self, kind: Kind, node: Node, deletes: bool) -> None:
        """A file is of no use to this server. deletes: nor to any; else it is forgotten."""
        assert self.tiers is not None
        (self.tiers.delete if deletes else self.tiers.forget)(kind, node.key)

    def _drop_saved(self, kind: Kind, node: Node, deletes: bool) -> None:
        self.disk.drop(kind, node)
        self._discard(kind, node, deletes)
        self._disk_used -= self._n_bytes[kind]

    def _restore(self, tiers: Tiers, shared: Shared) -> None:
        """The tree of what a directory holds."""
        for entry in sorted((e for e in tiers.entries if e.kind is Kind.PAGE), key=lambda entry: entry.depth):
            shared.adopt(entry)
        # Whose clock rises from one to the next, so that what was used last is the last to go.
        for entry in sorted((e for e in tiers.entries if e.kind is Kind.STATE), key=lambda entry: entry.used_at):
            self.tree.clock += 1e-3 * shared.adopt(entry)
        shared.n_listed = self.disk.n_pages * self._info.page_bytes + len(self.disk.states) * self._info.state_bytes
        self._make_room(0)

    # The end of nodes.

    def _forget_if_gone(self, node: Node) -> None:
        """A node that has no page in any tier is no longer known, nor is what lies beyond it."""
        if not node.has_page and not node.busy and self.tree.nodes.get(node.key) is node:
            self._drop_branch(node)

    def _drop_branch(self, node: Node) -> None:
        """Drops a node and all beyond it from every tier. Nothing of them may be moved now."""
        for n in reversed(branch_of(node)):
            assert not n.busy
            self._to_save.pop(n, None)
            self._doomed.discard(n)
            for kind in STATE_FIRST:
                if self.device.has(kind, n):
                    self._drop_on_device(kind, n)
                if self.host.has(kind, n):
                    self._drop_on_host(kind, n)
                if self.disk.has(kind, n):
                    self._drop_saved(kind, n, deletes=True)
            self.tree.forget(n)

    def drop(self, node: Node) -> int:
        """Drops a node and all beyond it from every tier; the number of pages.

        While something of them is moved they are doomed, and go once they rest: a disk may take long.
        """
        branch = branch_of(node)
        if any(n.busy for n in branch):
            self._doomed.add(node)
            for n in branch:
                self._to_save.pop(n, None)
            if self.events is not None:
                self.events.hide(branch)
        elif self.tree.nodes.get(node.key) is node:
            self._drop_branch(node)
        return len(branch)

    def is_doomed(self, key: bytes) -> bool:
        """Whether the node with this key is to be dropped: nobody may use it, nor put anything into it."""
        return bool(self._doomed) and self.tree.nodes.get(key) in self._doomed

    def reset(self) -> None:
        """Drops everything, in every tier. Bytes that sequences use stay theirs alone."""
        if self.tiers is not None:
            self._to_save.clear()
            if self.shared is not None:
                self.shared.clear()
            while self.n_moving:  # a page that is read may not become another's
                self.tiers.wait(1.0)
                self.poll()
            if self.disk_bytes:
                self.tiers.clear()
            if self.shared is not None:
                self.shared.clear()  # what was found while it waited
        for root in list(self.tree.roots.values()):
            for node in list(root.children):
                self._drop_branch(node)
        if self.events is not None:
            self.events.reset()

    def wait(self, timeout_s: float) -> None:
        """Until something was moved, or so long."""
        if self.tiers is not None and self.n_moving:
            self.tiers.wait(timeout_s)

    def count(self) -> CacheStats:
        """The counters, and the gauges as they are now."""
        stats = self.stats
        stats.n_pages, stats.n_checkpoints = self.device.n_pages, len(self.device.states)
        if self.tiers is not None:
            stats.read_bytes, stats.written_bytes = self.tiers.read_bytes, self.tiers.written_bytes
            stats.n_damaged = self.tiers.n_damaged
        return stats

    def summary(self) -> dict[str, Any]:
        """The contents of each tier, and the tree of checkpoints, as plain data."""
        page_bytes = self._info.page_bytes
        tiers: dict[str, dict[str, Any]] = {
            name: {"pages": tier.n_pages, "checkpoints": len(tier.states)}
            for name, tier in zip(TIER_NAMES, self._tiers, strict=True)
        }
        tiers["device"] |= {
            "pages_total": self.pages.n,
            "pages_in_use": self.pages.n - self.pages.n_available,
            "slots_total": self.slots.n,
            "slots_in_use": self.slots.n - self.slots.n_available,
        }
        tiers["host"] |= {"bytes_total": self.units.n * page_bytes}
        tiers["host"] |= {"bytes_used": (self.units.n - self.units.n_free) * page_bytes}
        tiers["disk"] |= {"bytes_total": self._disk_room if self.disk_bytes else 0, "bytes_used": self._disk_used}
        if self.shared is not None:
            tiers["disk"] |= self.shared.summary()
        return {
            "page_tokens": PAGE_SIZE,
            "page_bytes": page_bytes,
            "checkpoint_bytes": self._info.state_bytes,
            "tiers": tiers,
            "counters": msgspec.structs.asdict(self.count()),
            "checkpoints": self.tree.describe(),
        }

    def close(self, timeout_s: float) -> None:
        """Saves what waits to be saved, for at most so long, and ends the tiers."""
        if self.tiers is None:
            return
        until_s = time.monotonic() + timeout_s
        while (self._to_save or self.n_moving) and (left_s := until_s - time.monotonic()) > 0:
            self.poll()
            if self.n_moving:
                self.tiers.wait(left_s)
            else:  # for a survey, or for a disk that refused
                time.sleep(min(left_s, 0.01))
        self.tiers.close(max(0.1, until_s - time.monotonic()))

    def check(self, pages: Counter[int], slots: Counter[int], units: Counter[int]) -> None:
        """Raises IntegrityError unless the tree and the loads, with what the sequences hold, make up every
        pool. O(all).
        """
        moving = [node for load in self._loads.values() for node in load.path]
        moving += [node for path, _ in self._saves.values() for node in path]
        busy = Counter(moving)
        held_pages, held_slots, held_units = list[int](), list[int](), list[int]()
        for node in self.tree.nodes.values():
            if node.busy != busy.get(node, 0):
                raise IntegrityError(f"a node at {node.depth} counts {node.busy} moves, and {busy[node]} are under way")
            if not node.has_page and not node.busy:
                raise IntegrityError(f"a node at {node.depth} has no page anywhere")
            for tier in (DEVICE, DISK):
                if node.state[tier] is not None and node.page[tier] is None:
                    raise IntegrityError(f"a checkpoint at {node.depth} is in a tier where its page is not")
                if node.page[tier] is not None and not self._has_path(Kind.PAGE, node, tier):
                    raise IntegrityError(f"a page at {node.depth} is in a tier where the one before it is not")
            if node.page[DEVICE] is not None:
                held_pages.append(node.page[DEVICE])
            if node.state[DEVICE] is not None:
                held_slots.append(node.state[DEVICE])
            held_units += *(node.page[HOST] or ()), *(node.state[HOST] or ())
        for load in self._loads.values():
            held_pages += load.pages
            held_slots += load.slots
        pages.update(held_pages)
        slots.update(held_slots)
        units.update(held_units)
        self.pages.check(pages)
        self.slots.check(slots)
        self.units.check(units)
        if self.events is not None:
            self.events.check(self.tree)


def _move(kind: Kind, node: Node, device: int | None) -> Move:
    """device: the page or slot; None: it is in host memory only."""
    assert node.parent is not None
    units = kind.of(node)[HOST] or ()
    return Move(kind, -1 if device is None else device, units, node.key, node.parent.key, node.depth)
