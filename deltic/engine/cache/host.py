"""Host memory: what the tree has there, and what preempted sequences left.

It is one pool of units of a page's size; a state takes several. What is worth least there is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from deltic.engine.cache.mover import Move
from deltic.engine.cache.pool import Pool
from deltic.engine.cache.tiers import Tiers
from deltic.engine.cache.tree import HOST, Kind, Node, PrefixTree, Tier


class Host:
    """The units of host memory, and who has them."""

    def __init__(self, tree: PrefixTree, tiers: Tiers, forget: Callable[[Node], None]) -> None:
        """forget: is told of a node that has lost its page."""
        self.units = Pool("unit", tiers.n_units)
        self.tier = Tier(
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
