"""Pages and states on their way through staging buffers, with tensors on the CPU in the place of a device's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltic.engine.cache.tiers import MOVER, Move, Tiers
from deltic.engine.cache.tree import Kind
from deltic.runtime.gpu.copies import DeviceCopies
from tests.null.test_tiers import (
    MODEL,
    N_UNITS,
    PAGE_BYTES,
    STATE_BYTES,
    Device,
    content_of,
    disk_move,
    done,
    load,
    save,
)


class WatchedCopies(DeviceCopies):
    """Counts what was asked for, and which mark each copy came after."""

    def __init__(self, device: Device) -> None:
        states = [device.recurrent, device.conv]
        super().__init__([torch.from_numpy(device.pages)], [torch.from_numpy(t) for t in states], None)
        self.n_marks = 0
        self.copied: list[tuple[str, str, int, Any]] = []
        self.is_broken = False

    def mark(self) -> Any:
        self.n_marks += 1
        return self.n_marks

    def fetch(self, kind: str, index: int, mark: Any) -> None:
        super().fetch(kind, index, mark)
        self._note("fetch", kind, index, mark)

    def store(self, kind: str, index: int, mark: Any) -> None:
        super().store(kind, index, mark)
        self._note("store", kind, index, mark)

    def _note(self, *what: Any) -> None:
        if self.is_broken:
            raise RuntimeError("the device is gone")
        self.copied.append(what)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[Tiers, Device, WatchedCopies]]:
    device = Device()
    copies = WatchedCopies(device)
    host = np.zeros((N_UNITS, PAGE_BYTES), np.uint8)
    tiers = Tiers(copies.page, copies.state, host, STATE_BYTES, tmp_path, 1 << 30, MODEL, copies)
    yield tiers, device, copies
    tiers.close(5.0)
    assert not tiers.mover.is_alive


Opened = tuple[Tiers, Device, WatchedCopies]


@pytest.mark.parametrize("kind", ["page", "state"])
def test_host_round_trip(opened: Opened, kind: str) -> None:
    tiers, device, copies = opened
    assert (tiers.units_per_state, copies.state_bytes) == (4, STATE_BYTES)
    units, content = (7,) if kind == "page" else (5, 9, 2, 0), content_of(kind, b"x")
    device.fill(kind, 1, content)
    out, back = Move(Kind(kind), device=1, units=units), Move(Kind(kind), device=2, units=units)
    tiers.copy_out(out)
    device.fill(kind, 1, bytes(STATE_BYTES))
    tiers.copy_in(back)
    assert out.ok and back.ok and device.read(kind, 2) == content
    assert device.read(kind, 1) == device.read(kind, 3) == bytes(len(content))
    (move,) = done(tiers, tiers.load([Move(Kind(kind), device=4, units=units)]))  # the same, in the thread
    assert move.ok and device.read(kind, 4) == content
    assert [c[:3] for c in copies.copied] == [("fetch", kind, 1), ("store", kind, 2), ("store", kind, 4)]


def test_disk_round_trip(opened: Opened) -> None:
    tiers, device, _ = opened
    assert all(save(tiers, device, [("page", 0), ("page", 1), ("state", 1)]))
    assert load(tiers, device, "page", 1) and load(tiers, device, "state", 1)
    assert not load(tiers, device, "state", 0), "nobody saved it"


def test_copies_come_after_what_was_started_before_they_were_asked_for(opened: Opened) -> None:
    """One mark for all moves of a ticket, taken by the thread that asks, and no later one."""
    tiers, device, copies = opened
    moves = [disk_move("page", i, i) for i in range(4)] + [disk_move("state", 3, 1)]
    for move in moves:
        device.fill(move.kind, move.device, content_of(move.kind, move.key))
    ticket, n_marks = tiers.save(moves), copies.n_marks
    for _ in range(5):
        copies.mark()
    done(tiers, ticket)
    assert [mark for *_, mark in copies.copied] == [n_marks] * 5
    copies.copied.clear()
    tiers.copy_out(Move(Kind.PAGE, device=0, units=(1,)))
    tiers.copy_in(Move(Kind.PAGE, device=0, units=(1,)))
    assert [mark for *_, mark in copies.copied] == [copies.n_marks - 1, copies.n_marks]


def test_a_copy_that_fails_is_no_move(opened: Opened) -> None:
    tiers, device, copies = opened
    assert all(save(tiers, device, [("page", 0)]))
    copies.is_broken = True
    for ask in (tiers.load, tiers.save):
        (move,) = done(tiers, ask([disk_move("page", 0, 2)]))
        assert not move.ok
    with pytest.raises(RuntimeError, match="gone"):
        tiers.copy_out(Move(Kind.PAGE, device=0, units=(1,)))
    copies.is_broken = False
    assert load(tiers, device, "page", 0) and tiers.n_damaged == 0


def test_the_mover_has_a_buffer_of_its_own() -> None:
    """The engine has the other, whichever thread it is called from."""
    copies = WatchedCopies(Device())
    mine = copies.page(0)[0]
    assert mine.ctypes.data == copies.state(5)[0].ctypes.data == copies.page(3)[0].ctypes.data
    found: dict[str, Any] = {}
    for name in (MOVER, "another"):
        thread = threading.Thread(target=lambda name=name: found.update({name: copies.page(0)[0]}), name=name)
        thread.start()
        thread.join()
    assert not np.shares_memory(mine, found[MOVER]) and np.shares_memory(mine, found["another"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_wait_for_the_stream_of_the_steps() -> None:
    """Bytes that a stream is still to write, after a while, are what a copy brings; and a copy to the device comes after."""
    stream = torch.cuda.Stream()
    pages = torch.zeros((4, 1 << 20), dtype=torch.uint8, device="cuda")
    copies = DeviceCopies([pages], [pages], stream)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        pages[1].fill_(7)
    mark = copies.mark()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        pages[1].fill_(9)
    copies.fetch("page", 1, mark)
    (view,) = copies.page(1)
    assert (view == 7).all() and not stream.query(), "it waited for what came later, or for nothing"
    view[:] = 5
    copies.store("page", 1, copies.mark())
    with torch.cuda.stream(stream):
        total = pages[1].sum(dtype=torch.int64)
    assert int(total) == 5 << 20
