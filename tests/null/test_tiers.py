"""The bytes below device memory: what comes back is what went out, or nothing at all."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltic.config import ConfigError
from deltic.engine.cache.directory import ABANDONED_S
from deltic.engine.cache.disk import Disk
from deltic.engine.cache.tiers import Bytes, Move, Tiers
from deltic.engine.cache.tree import Kind
from deltic.private import make_private
from tests.waiting import wait_for

PAGE_BYTES, STATE_BYTES = 1500, 5003
N_PAGES, N_SLOTS, N_UNITS = 12, 6, 24
MODEL, OTHER_MODEL = "a" * 32, "b" * 32
ROOT = bytes(16)


class Device:
    """Pages in one piece, states in three of odd sizes, as a runner has them."""

    def __init__(self) -> None:
        self.pages = np.zeros((N_PAGES, PAGE_BYTES), np.uint8)
        self.recurrent = np.zeros((N_SLOTS, 2, 2000), np.uint8)
        self.conv = np.zeros((N_SLOTS, STATE_BYTES - 4000), np.uint8)

    def page(self, index: int) -> list[Bytes]:
        return [self.pages[index]]

    def state(self, state_slot: int) -> list[Bytes]:
        return [self.recurrent[state_slot, 0], self.recurrent[state_slot, 1], self.conv[state_slot]]

    def views(self, kind: str, index: int) -> list[Bytes]:
        return self.page(index) if kind == "page" else self.state(index)

    def fill(self, kind: str, index: int, content: bytes) -> None:
        data = np.frombuffer(content, np.uint8)
        for view in self.views(kind, index):
            view[:], data = data[: view.nbytes], data[view.nbytes :]

    def read(self, kind: str, index: int) -> bytes:
        return b"".join(view.tobytes() for view in self.views(kind, index))


def key_of(i: int) -> bytes:
    return hashlib.blake2b(str(i).encode(), digest_size=16).digest()


def content_of(kind: str, key: bytes) -> bytes:
    """Bytes that belong to one object alone."""
    n = PAGE_BYTES if kind == "page" else STATE_BYTES
    return hashlib.shake_128(kind.encode() + key).digest(n)


def disk_move(kind: str, i: int, device: int) -> Move:
    """Object i of a chain: its page is the i-th."""
    return Move(Kind(kind), key_of(i), key_of(i - 1) if i else ROOT, 64 * (i + 1), device)


Open = Callable[..., tuple[Tiers, Device]]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Tiers over a device of their own, closed at the end."""
    everything: list[Tiers] = []

    def open_(directory: Path | None, model: str = MODEL, with_host: bool = True) -> tuple[Tiers, Device]:
        device = Device()
        host = np.zeros((N_UNITS, PAGE_BYTES), np.uint8) if with_host else None
        tiers = Tiers(device.page, device.state, host, STATE_BYTES, directory, 1 << 30, model)
        everything.append(tiers)
        return tiers, device

    yield open_
    for tiers in everything:
        tiers.close(5.0)
        assert not tiers.mover.is_alive


def done(tiers: Tiers, ticket: int) -> list[Move]:
    """The moves of the only ticket under way."""
    deadline = time.monotonic() + 10
    while not (found := tiers.finished()):
        assert time.monotonic() < deadline
        tiers.wait(1.0)
    assert [t for t, _ in found] == [ticket]
    assert tiers.n_pending == 0 and not tiers.finished()
    return found[0][1]


def save(tiers: Tiers, device: Device, kinds: list[tuple[str, int]]) -> list[bool]:
    """Writes objects, by way of as many pages and state slots, and forgets them on the device."""
    moves = [disk_move(kind, i, at) for at, (kind, i) in enumerate(kinds)]
    for move in moves:
        device.fill(move.kind, move.device, content_of(move.kind, move.key))
    saved = done(tiers, tiers.save(moves))
    for move in moves:
        device.fill(move.kind, move.device, bytes(STATE_BYTES))
    return [move.ok for move in saved]


def load(tiers: Tiers, device: Device, kind: str, i: int) -> bool:
    """Reads an object; when it says that it did, the bytes are right."""
    (move,) = done(tiers, tiers.load([disk_move(kind, i, 3)]))
    if move.ok:
        assert device.read(kind, 3) == content_of(kind, move.key)
    return move.ok


def files(directory: Path) -> list[Path]:
    """But for those by which servers know of each other."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path for path in found if path.name != "lease" and path.parent.name != "servers")


@pytest.mark.parametrize("kind", ["page", "state"])
def test_host_round_trip(opened: Open, kind: str) -> None:
    tiers, device = opened(None)
    assert (tiers.n_units, tiers.units_per_state, tiers.disk) == (N_UNITS, 4, None)
    units, content = ((7,), content_of(kind, b"x")) if kind == "page" else ((5, 9, 2, 0), content_of(kind, b"x"))
    device.fill(kind, 1, content)
    out, back = Move(Kind(kind), device=1, units=units), Move(Kind(kind), device=2, units=units)
    tiers.copy_out(out)
    tiers.copy_in(back)
    assert out.ok and back.ok and device.read(kind, 2) == content
    (move,) = done(tiers, tiers.load([Move(Kind(kind), device=4, units=units)]))  # the same, in the thread
    assert move.ok and device.read(kind, 4) == content
    assert tiers.written_bytes == {"host": len(content), "disk": 0}
    assert tiers.read_bytes == {"host": 2 * len(content), "disk": 0}


def test_disk_round_trip_and_restart(opened: Open, tmp_path: Path) -> None:
    tiers, device = opened(tmp_path / "new" / "cache")
    assert tiers.disk is not None and tiers.disk.entries == [] and tiers.notices == []
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700
    assert all(save(tiers, device, [("page", 0), ("page", 1), ("state", 1)]))
    assert load(tiers, device, "page", 1) and load(tiers, device, "state", 1)
    assert not load(tiers, device, "state", 0), "nobody saved it"
    assert tiers.written_bytes["disk"] == 2 * PAGE_BYTES + STATE_BYTES
    assert tiers.read_bytes["disk"] == PAGE_BYTES + STATE_BYTES
    old = files(tmp_path)[0]
    os.utime(old, (1e9, 1e9))

    again, device = opened(tmp_path / "new" / "cache", with_host=False)
    assert again.n_units == 0 and again.units_per_state == 4 and again.notices == []
    assert {(e.kind, e.key, e.parent, e.depth) for e in again.disk.entries} == {
        ("page", key_of(0), ROOT, 64), ("page", key_of(1), key_of(0), 128), ("state", key_of(1), key_of(0), 128),
    }  # fmt: skip
    (oldest,) = (e for e in again.disk.entries if e.used_at == 1e9)
    assert oldest.n_bytes == old.stat().st_size
    assert all(load(again, device, e.kind, e.depth // 64 - 1) for e in list(again.disk.entries))
    assert old.stat().st_mtime > 1.5e9, "a read is a use, and the next start knows"
    assert tiers.n_damaged == again.n_damaged == 0

    other, device = opened(tmp_path / "new" / "cache", OTHER_MODEL)
    assert other.disk.entries == [] and "1 other models" in other.notices[0]
    assert not load(other, device, "page", 0)


def test_saves_from_host_memory(opened: Open, tmp_path: Path) -> None:
    tiers, device = opened(tmp_path)
    content = content_of("state", key_of(0))
    device.fill("state", 0, content)
    tiers.copy_out(Move(Kind.STATE, device=0, units=(3, 1, 4, 2)))
    move = disk_move("state", 0, -1)
    move.units = (3, 1, 4, 2)
    assert done(tiers, tiers.save([move]))[0].ok
    assert load(tiers, device, "state", 0)


def damaged_everywhere(whole: bytes) -> Iterator[tuple[str, bytes]]:
    for at in [*range(130), *range(130, len(whole), 97), len(whole) - 1]:
        yield f"byte {at}", whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]
    for n in [*range(0, len(whole), 53), 127, 128, 129, len(whole) - 1]:
        yield f"cut to {n}", whole[:n]
    yield "longer", whole + b"\0"


def test_damaged_files_are_refused_and_deleted(opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers, device = opened(tmp_path)
    assert all(save(tiers, device, [("page", 0), ("page", 1), ("state", 1)]))
    (path,) = (p for p in files(tmp_path) if p.name.startswith(key_of(1).hex()) and p.suffix == ".page")
    whole = path.read_bytes()
    damaged = list(damaged_everywhere(whole))
    for what, content in damaged:
        path.write_bytes(content)
        assert not load(tiers, device, "page", 1), what
        assert not path.exists(), what
    assert tiers.n_damaged == len(damaged) == len(caplog.records)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert load(tiers, device, "page", 0) and load(tiers, device, "state", 1)
    path.write_bytes(whole)
    assert load(tiers, device, "page", 1)


def test_files_of_other_objects_and_models_are_refused(opened: Open, tmp_path: Path) -> None:
    tiers, device = opened(tmp_path)
    other, other_device = opened(tmp_path, OTHER_MODEL)
    assert all(save(tiers, device, [("page", 0), ("page", 1)]))
    assert all(save(other, other_device, [("page", 1)]))

    def path(model: str, i: int) -> Path:
        return next(p for p in files(tmp_path / model) if p.name.startswith(key_of(i).hex()))

    path(MODEL, 1).write_bytes(path(MODEL, 0).read_bytes())
    assert not load(tiers, device, "page", 1), "the right kind of file under another's name"
    assert all(save(tiers, device, [("page", 1)]))
    path(MODEL, 1).write_bytes(path(OTHER_MODEL, 1).read_bytes())
    assert not load(tiers, device, "page", 1), "the right tokens of another model"
    assert load(tiers, device, "page", 0)


def test_what_is_in_the_directory_at_start(opened: Open, tmp_path: Path) -> None:
    tiers, device = opened(tmp_path)
    assert all(save(tiers, device, [("page", 0), ("page", 1), ("page", 2)]))
    tiers.close(5.0)
    short, whole, _ = files(tmp_path)
    os.truncate(short, 0)  # as a crash of the machine leaves it
    old, new = (whole.with_name(f"{whole.name}.0000000{i}.part") for i in range(2))
    for part in (old, new, tmp_path / MODEL / "1.part"):
        part.write_bytes(b"half")
    os.utime(old, (time.time() - ABANDONED_S - 60,) * 2)
    odd = [
        tmp_path / MODEL / "notes.txt",
        whole.with_name("README"),
        whole.with_name(f"{whole.name.rsplit('.', 2)[0]}.65.page"),  # not at the end of a page
        whole.with_name(f"{bytes(16).hex()}.{bytes(16).hex()}.64.page"),  # not in its directory
    ]
    for file in odd:
        file.write_bytes(b"not ours")

    again, device = opened(tmp_path)
    assert len(again.disk.entries) == 2 and again.n_damaged == 1
    assert not short.exists() and not old.exists() and new.exists()
    damaged, strange = again.notices
    assert "1 damaged file deleted" in damaged and "4 files" in strange
    again.disk.clear()
    assert all(file.exists() for file in odd) and new.exists()


def test_vanished_file_is_a_miss_without_a_warning(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiers, device = opened(tmp_path)
    other, _ = opened(tmp_path)
    assert all(save(tiers, device, [("page", 0)]))
    files(tmp_path)[0].unlink()
    assert not load(tiers, device, "page", 0)
    other.delete("page", key_of(0))
    assert other.n_damaged == tiers.n_damaged == 0 and not caplog.records


def test_a_bad_sector_says_nothing_of_other_files(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers, device = opened(tmp_path)
    assert all(save(tiers, device, [("page", 0), ("page", 1), ("page", 2), ("state", 2)]))

    def fails(file: int, buffers: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", fails)
        (move,) = done(tiers, tiers.load([disk_move("page", 1, 3)]))
    assert (move.ok, move.is_bad, tiers.n_damaged) == (False, False, 1)
    assert not load(tiers, device, "page", 1), "its file is gone"
    assert load(tiers, device, "page", 0) and load(tiers, device, "page", 2) and load(tiers, device, "state", 2)


def test_delete_comes_after_the_save_before_it(opened: Open, tmp_path: Path) -> None:
    tiers, device = opened(tmp_path)
    assert all(save(tiers, device, [("page", 0), ("state", 0)]))
    tiers.delete("page", key_of(0))
    tiers.delete("page", key_of(77))
    device.fill("page", 0, content_of("page", key_of(1)))
    done(tiers, tiers.save([disk_move("page", 1, 0)]))
    assert not load(tiers, device, "page", 0)
    assert load(tiers, device, "state", 0) and load(tiers, device, "page", 1)

    again, device = opened(tmp_path)
    again.delete("page", key_of(1))  # a file of the last run
    assert all(save(again, device, [("page", 1)])), "and again"
    assert load(again, device, "page", 1)


def test_clear(opened: Open, tmp_path: Path) -> None:
    tiers, device = opened(tmp_path)
    other, other_device = opened(tmp_path, OTHER_MODEL)
    assert all(save(tiers, device, [("page", 0), ("state", 0)]))
    assert all(save(other, other_device, [("page", 0)]))
    tiers.disk.clear()
    assert not files(tmp_path / MODEL) and len(files(tmp_path / OTHER_MODEL)) == 1
    assert not load(tiers, device, "page", 0)
    assert all(save(tiers, device, [("page", 0)])) and load(tiers, device, "page", 0)


def test_directory_that_cannot_be_used(tmp_path: Path) -> None:
    def movers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "cache-mover"}

    before = movers()
    device = Device()
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/deltic")):
        with pytest.raises(ConfigError, match=f"--cache-dir {directory}: cannot be used"):
            Tiers(device.page, device.state, None, STATE_BYTES, directory, 1 << 30, MODEL)
    assert movers() <= before  # none was left behind


def test_directory_of_others_is_refused(tmp_path: Path) -> None:
    """Files there could be anybody's, and a checksum is no proof of who wrote them."""
    directory = tmp_path / "shared"
    directory.mkdir()
    for mode in (0o777, 0o1777, 0o770):
        directory.chmod(mode)
        with pytest.raises(
            ConfigError, match=rf"--voices-dir {directory}: is writable for others \(mode \d*{mode:o}\)"
        ):
            make_private("--voices-dir", directory)
    directory.chmod(0o755)
    make_private("--voices-dir", directory)
    make_private("--voices-dir", directory / "made" / "below")
    assert (directory / "made" / "below").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_others_own_is_not_believed(opened: Open, tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    tiers, device = opened(directory)
    assert all(save(tiers, device, [("page", 0), ("page", 1)]))
    os.chown(files(directory)[0], 65534, -1)
    again, device = opened(directory)
    assert len(again.disk.entries) == 1 and "left alone" in again.notices[0]
    os.chown(files(directory)[1], 65534, -1)
    assert not load(tiers, device, "page", 0) and not load(tiers, device, "page", 1)
    os.chown(directory, 65534, -1)
    with pytest.raises(ConfigError, match="belongs to user 65534, and this server runs as 0"):
        opened(directory)


def test_full_disk(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers, device = opened(tmp_path)
    assert all(save(tiers, device, [("page", 0)]))
    write, n_refused, is_full = os.pwrite, [0], [True]

    def pwrite(*arguments: Any) -> int:
        if is_full[0]:
            n_refused[0] += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert save(tiers, device, [("page", 1), ("state", 1), ("page", 2)]) == [False] * 3
    assert n_refused == [1] and len(files(tmp_path)) == 1, "one attempt, and no part file stays"
    assert load(tiers, device, "page", 0), "reading goes on"
    assert 59 < tiers.disk._paused_until - time.monotonic() <= 60
    tiers.disk._paused_until = 0.0  # a minute later
    assert save(tiers, device, [("page", 1)]) == [False] and n_refused == [2]
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    tiers.disk._paused_until, is_full[0] = 0.0, False
    assert all(save(tiers, device, [("page", 1)])), "there is room again"


def test_directory_that_somebody_removes(opened: Open, tmp_path: Path) -> None:
    tiers, device = opened(tmp_path)
    assert all(save(tiers, device, [("page", 1)]))
    shutil.rmtree(tmp_path / MODEL)
    assert not load(tiers, device, "page", 1)
    tiers.disk.clear()
    assert all(save(tiers, device, [("page", 1)])) and load(tiers, device, "page", 1)


def test_loads_overtake_saves(opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers, device = opened(tmp_path)
    assert all(save(tiers, device, [("page", 0)]))
    gate, order = threading.Event(), []
    write = Disk._write

    def slow(self: Disk, part: str, move: Move, source: list[memoryview]) -> None:
        order.append(move.depth)
        gate.wait(5)
        write(self, part, move, source)

    monkeypatch.setattr(Disk, "_write", slow)
    saving = tiers.save([disk_move("page", i, i) for i in (1, 2)])
    while not order:
        time.sleep(0.001)
    loading = tiers.load([disk_move("page", 0, 5)])
    tiers.wait(0.02)
    assert tiers.finished() == [] and tiers.n_pending == 2
    gate.set()
    tickets: list[int] = []
    while tiers.n_pending:
        tiers.wait(1.0)
        tickets += [ticket for ticket, _ in tiers.finished()]
    assert tickets == [loading, saving], "before the second object of the save, even"


def test_an_error_in_the_thread_does_not_end_it(opened: Open, tmp_path: Path) -> None:
    tiers, device = opened(tmp_path)
    no_units = disk_move("page", 0, -1)
    bad, good = done(tiers, tiers.save([no_units, disk_move("page", 1, 0)]))
    assert not bad.ok and good.ok
    assert not done(tiers, tiers.load([Move(Kind.PAGE, device=N_PAGES + 5, units=(1,))]))[0].ok
    device.fill("page", 0, content_of("page", key_of(0)))
    assert all(save(tiers, device, [("page", 0)])) and load(tiers, device, "page", 0)


def test_close_while_busy(opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers, _ = opened(tmp_path / "a")
    moves = [disk_move("page", i, i) for i in range(N_PAGES)]
    tiers.save(moves)
    tiers.delete("page", key_of(0))
    tiers.close(5.0)
    assert len(files(tmp_path / "a")) == N_PAGES - 1, "all was done"

    tiers, _ = opened(tmp_path / "b")
    write = Disk._write
    monkeypatch.setattr(Disk, "_write", lambda self, *rest: (time.sleep(0.2), write(self, *rest)))  # a slow disk
    tiers.save([disk_move("page", i, i) for i in range(N_PAGES)])
    began = time.monotonic()
    tiers.close(0.3)
    assert time.monotonic() - began < 0.2 * N_PAGES / 2
    left = files(tmp_path / "b")
    assert 1 <= len(left) <= N_PAGES / 2 and not [path for path in left if path.suffix == ".part"]


def test_polling_costs_nothing_when_idle(opened: Open) -> None:
    tiers, _ = opened(None)
    n, best = 2000, 1.0
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(n):
            tiers.finished()
        best = min(best, (time.perf_counter() - began) / n)
    assert best < 1e-6


WRITER = """
import sys, random
from tests.null.test_tiers import *
tiers = Tiers((device := Device()).page, device.state, None, STATE_BYTES, Path(sys.argv[1]), 1 << 30, MODEL)
rng = random.Random(int(sys.argv[2]))
write, n_most, pause_s = os.pwrite, int(sys.argv[4]), float(sys.argv[5])
os.pwrite = lambda file, data, offset: (time.sleep(pause_s), write(file, data[:n_most], offset))[1]
print("ready", flush=True)
for _ in range(int(sys.argv[3])):
    kinds = [(rng.choice(["page", "state"]), rng.randrange(40)) for _ in range(N_SLOTS)]
    if rng.random() < 0.3:
        tiers.delete(*((kind := kinds[0][0]), key_of(kinds[0][1])))
    assert all(save(tiers, device, kinds))
    for kind, i in kinds[:2]:
        load(tiers, device, kind, i)
print("damaged", tiers.n_damaged)
tiers.close(5.0)
"""


def start_writer(directory: Path, *arguments: float) -> subprocess.Popen[str]:
    """arguments: seed, rounds, most bytes that the disk takes at once, seconds that it takes for them."""
    command = [sys.executable, "-c", WRITER, str(directory), *map(str, arguments)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)


def check_whole(opened: Open, directory: Path) -> int:
    """Every file that is there is right; how many there are."""
    tiers, device = opened(directory)
    assert all(load(tiers, device, e.kind, e.depth // 64 - 1) for e in tiers.disk.entries)
    assert tiers.n_damaged == 0
    return len(tiers.disk.entries)


def test_killed_at_any_moment(opened: Open, tmp_path: Path) -> None:
    """What a killed writer leaves is whole objects, and parts that nobody takes for one."""
    rng, n_found = random.Random(4), 0
    writers = [start_writer(tmp_path, 0, 1 << 30, 700, 0.0003)]
    for i in range(10):
        writer = writers.pop()
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        if i < 9:
            writers.append(start_writer(tmp_path, i + 1, 1 << 30, 700, 0.0003))  # it imports while the last one writes
        if i == 9:
            wait_for(lambda: len(files(tmp_path)) > 20)
        time.sleep(rng.random() * 0.05)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        n_found = max(n_found, check_whole(opened, tmp_path))
    assert n_found > 10


def test_two_servers_share_a_directory(opened: Open, tmp_path: Path) -> None:
    writers = [start_writer(tmp_path, seed, 60, 4000, 0) for seed in (1, 2)]
    for writer in writers:
        output, _ = writer.communicate(timeout=60)
        assert writer.returncode == 0 and output == "ready\ndamaged 0\n"
    assert check_whole(opened, tmp_path) > 10


def test_a_thousand_moves_against_a_model(opened: Open, tmp_path: Path) -> None:
    """Saves, loads, host copies and deletions at random, several under way at once, against three dictionaries."""
    tiers, device = opened(tmp_path)
    rng = random.Random(11)
    on_disk: set[tuple[str, int]] = set()
    on_host: dict[tuple[str, int], tuple[int, ...]] = {}
    free_units = list(range(N_UNITS))
    free = {"page": list(range(N_PAGES)), "state": list(range(N_SLOTS))}
    pending: dict[int, tuple[str, list[tuple[str, int]]]] = {}
    busy: set[tuple[str, int]] = set()

    def settle() -> None:
        for ticket, moves in tiers.finished():
            direction, objects = pending.pop(ticket)
            if direction == "delete":
                busy.difference_update(objects)
                continue
            for thing, move in zip(objects, moves, strict=True):
                busy.discard(thing)
                if direction == "save":
                    assert move.ok
                    on_disk.add(thing)
                else:
                    assert move.ok == (thing in on_disk or bool(move.units))
                    if move.ok:
                        assert device.read(move.kind, move.device) == content_of(move.kind, key_of(thing[1]))
                if move.device >= 0:
                    free[move.kind].append(move.device)

    def start(direction: str) -> None:
        moves, objects = [], []
        for _ in range(rng.randrange(1, 4)):
            thing = rng.choice(["page", "state"]), rng.randrange(30)
            if thing in busy or not free[thing[0]]:
                continue
            busy.add(thing)
            objects.append(thing)
            moves.append(disk_move(*thing, free[thing[0]].pop()))
            if direction == "save":
                device.fill(thing[0], moves[-1].device, content_of(thing[0], key_of(thing[1])))
            elif thing in on_host:
                moves[-1].units = on_host[thing]
        if moves:
            pending[getattr(tiers, direction)(moves)] = direction, objects

    def copy_out() -> None:
        thing = rng.choice(["page", "state"]), rng.randrange(30)
        n = tiers.units_per_state if thing[0] == "state" else 1
        if thing in busy or thing in on_host or not free[thing[0]] or len(free_units) < n:
            return
        rng.shuffle(free_units)
        on_host[thing] = tuple(free_units.pop() for _ in range(n))
        index = free[thing[0]][-1]
        device.fill(thing[0], index, content_of(thing[0], key_of(thing[1])))
        tiers.copy_out(Move(Kind(thing[0]), device=index, units=on_host[thing]))

    for _ in range(1000):
        action = rng.random()
        if action < 0.3:
            start("save")
        elif action < 0.7:
            start("load")
        elif action < 0.8:
            copy_out()
        elif action < 0.9 and on_host:
            thing = rng.choice(sorted(on_host))
            if thing not in busy:
                free_units.extend(on_host.pop(thing))
        elif on_disk:
            thing = rng.choice(sorted(on_disk))
            if thing not in busy:
                on_disk.discard(thing)
                busy.add(thing)
                tiers.delete(thing[0], key_of(thing[1]))
                pending[tiers.save([])] = "delete", [thing]  # finished after what was asked for before
        settle()
    while tiers.n_pending:
        tiers.wait(1.0)
        settle()
    assert not pending and not busy
    tiers.close(5.0)
    again, _ = opened(tmp_path)
    assert {(e.kind, e.depth // 64 - 1) for e in again.disk.entries} == on_disk and not again.notices
