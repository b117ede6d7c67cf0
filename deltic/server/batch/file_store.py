"""Files that are kept under `--batch-dir`: what was uploaded, and what batches made of it.

Each file has a card beside it, in JSON. A card is written before its file gets its name: a file without a
card, or a card without its file, is what a process that was killed left behind, and goes when the next one
starts. What has another name than these is somebody else's, and stays. All belong to the key that made them;
nobody else finds them. What touches the disk for long runs in a
thread, in which keys take turns.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
from msgspec import Struct

from deltic.config import ConfigError, MayPass
from deltic.json_types import JsonObject
from deltic.private import make_private
from deltic.server.errors import ApiError
from deltic.server.fair_thread import FairThread

log = logging.getLogger("deltic.server")

MAX_FILES = 10_000
"""Files of one key at most."""
MIN_BYTES = 4096
"""Bytes that a file takes at least, with its card."""
KEPT_S = 30 * 86_400
"""Seconds for which a file is kept that does not say."""
SWEEP_S = 60.0

OURS = re.compile(r"file-[0-9a-f]{24}(\.json(\.new)?)?|[0-9a-f]{24}\.part")
"""Names that are made here."""

NO_RETRY = {"x-should-retry": "false"}

T = TypeVar("T")


class Card(Struct):
    """The metadata of a file. Times in seconds of the epoch."""

    id: str
    owner: str
    """Name of the key; "" without keys."""
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str

    def plain(self) -> JsonObject:
        """Returns the card as OpenAI's API has it."""
        fields = msgspec.to_builtins(self) | {"object": "file", "status": "processed", "status_details": None}
        del fields["owner"]
        return dict(fields)


class FileStore:
    """The files of one directory, which is one process's."""

    def __init__(self, directory: Path, room_gb: float, n_tenants: int = 1) -> None:
        """n_tenants: among whom the room is shared out.

        Raises ConfigError for a directory that cannot be used.
        """
        self.directory = directory
        self.room_bytes = int(room_gb * 1e9)
        self.share_bytes = self.room_bytes // n_tenants
        """Bytes that one owner may take."""
        self._used: Counter[str] = Counter()
        """Bytes by owner."""
        self._n_files: Counter[str] = Counter()
        self.in_use: Counter[str] = Counter()
        """Files that a batch reads, which stay."""
        self._worker = FairThread("files", lambda: 0)  # no file waits in memory
        self._cards: dict[str, Card] = {}
        self._swept_s = time.monotonic()
        try:
            for made in (directory, directory / "files", directory / "batches"):
                make_private("--batch-dir", made)  # who may write there asks in anybody's name
            self._lock = (directory / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._load()
        except BlockingIOError:
            raise MayPass(f"--batch-dir {directory} is another server's that runs") from None
        except OSError as error:
            reason = f"{error.filename or directory}: {error.strerror}"
            raise ConfigError(f"--batch-dir {directory} cannot be used: {reason}") from None

    def close(self) -> None:
        """Lets another process have the directory."""
        self._worker.close()
        self._lock.close()

    async def in_thread(self, owner: str, work: Callable[..., T], *given: object) -> T:
        return await asyncio.wrap_future(self._worker.submit(owner, 1, partial(work, *given)))

    def path(self, file_id: str) -> Path:
        return self.directory / "files" / file_id

    def get(self, file_id: str, owner: str) -> Card:
        """Raises ApiError (404)."""
        self.sweep()
        card = self._cards.get(file_id)
        if card is None or card.owner != owner:
            raise ApiError(404, f"No such File object: {file_id}", param="id", code="not_found")
        return card

    def all(self, owner: str) -> list[Card]:
        """Returns the owner's cards, in the order in which they were made."""
        self.sweep()
        return [card for card in self._cards.values() if card.owner == owner]

    @property
    def used_bytes(self) -> int:
        return self._used.total()

    def has_room(self, owner: str, n_bytes: int = 1) -> bool:
        """Returns whether there is so much of the owner's share, and of the disk: keys that are gone may have
        left files.
        """
        own, others = self._used[owner], self.used_bytes - self._used[owner]
        return own + n_bytes <= min(self.share_bytes, self.room_bytes - others)

    def take(self, owner: str, n_bytes: int) -> None:
        """Counts what is about to be written. Raises ApiError (409) when there is no room for it."""

        def is_full() -> bool:
            return self._n_files[owner] >= MAX_FILES or not self.has_room(owner, n_bytes)

        if is_full():
            self.sweep(now=True)
        if is_full():
            message = (
                f"there is no room for more files ({self.share_bytes / 1e9:g} GB, {MAX_FILES} files). Delete some."
            )
            raise ApiError(409, message, code="storage_full", headers=NO_RETRY)
        self.count(owner, n_bytes)

    def count(self, owner: str, n_bytes: int) -> None:
        """Notes what was written, or, below 0, what is gone."""
        self._used[owner] += n_bytes

    def part(self) -> Path:
        """A name for a file that is being written."""
        return self.path(f"{secrets.token_hex(12)}.part")

    async def add(self, written: Path, card: Card) -> None:
        """Gives a file that is whole its name. It was counted as it was written. Raises OSError."""

        def name() -> None:
            write_whole(self.path(card.id + ".json"), msgspec.json.encode(card))
            written.rename(self.path(card.id))

        await self.in_thread(card.owner, name)
        self._note(card)  # here: the event loop reads what it changes

    def _note(self, card: Card) -> None:
        self._cards[card.id] = card
        self._n_files[card.owner] += 1

    def remove(self, file_id: str) -> None:
        card = self._cards.pop(file_id)
        self._n_files[card.owner] -= 1
        self.count(card.owner, -max(MIN_BYTES, card.bytes))
        self.path(file_id).unlink(missing_ok=True)
        self.path(file_id + ".json").unlink(missing_ok=True)

    def sweep(self, now: bool = False) -> None:
        """Removes files whose time is over; unless `now`, at most once a minute."""
        if not now and time.monotonic() < self._swept_s + SWEEP_S:
            return
        self._swept_s = time.monotonic()
        over = [c.id for c in self._cards.values() if c.expires_at < time.time() and not self.in_use[c.id]]
        for file_id in over:
            self.remove(file_id)

    def _load(self) -> None:
        entries = os.scandir(self.directory / "files")
        files = {entry.name: Path(entry.path) for entry in entries if OURS.fullmatch(entry.name)}
        stems = [stem for name in files if (stem := name.removesuffix(".json")) != name and stem in files]
        cards = [card for stem in stems if (card := _card(files[f"{stem}.json"])) and card.id == stem]
        kept = {name for card in cards for name in (card.id, card.id + ".json")}
        for name in files.keys() - kept:
            files[name].unlink()
        for card in sorted(cards, key=lambda card: card.created_at):
            self._note(card)
            self.count(card.owner, max(MIN_BYTES, card.bytes))


def _card(path: Path) -> Card | None:
    """Raises OSError: the card is there all the same."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Card)
    except msgspec.DecodeError:
        log.warning("%s is no card of a file, and is removed", path)
        return None


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that is there whole or not at all. Raises OSError."""
    new = path.with_name(path.name + ".new")
    try:
        with open(new, "wb", opener=private) as file:
            file.write(data)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def unwritable(what: str, error: OSError) -> ApiError:
    """The error for a client whose `what` the disk does not take."""
    message = f"{what} cannot be written: {error.strerror}"
    return ApiError(409, message, code="storage_full", headers=NO_RETRY)


def private(path: str, flags: int) -> int:
    """An opener of files that nobody else may read."""
    return os.open(path, flags, 0o600)


def append(file: BinaryIO, data: bytes) -> None:
    """Writes behind the end of an unbuffered file, all of it or nothing. Raises OSError."""
    end = file.seek(0, os.SEEK_END)
    try:
        while data:
            data = data[file.write(data) :]
    except OSError:
        file.truncate(end)
        raise
