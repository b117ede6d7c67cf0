"""Pictures of prompts: which are encoded, in which order, and who has a place in the pool of rows.

The pool is planned memory, in blocks of PAGE_SIZE rows; a row stands for a token of a picture. A chunk of a
prompt runs once the pictures that its tokens are of are there. So a prompt needs room for a few of its
pictures at a time, and those that the prefix cache has are not encoded at all.

In each plan the prefills, in the order of their rank, claim the pictures they need next. What nobody of a
higher rank has claimed in this plan may be evicted, though somebody of a lower rank waits for it: the first
always comes on, and nobody waits for ever. What is not claimed stays, for other requests, as long as nobody
needs its room. What leaves first is worth the least, by GreedyDual-Size with frequency, as in the prefix tree
(`cache/tree.py`): seconds of the tower a row, times its uses, on a clock that rises with what is evicted.

The tower runs between steps, in pieces that fit the time they are given; integers only here, and pixels that
are passed on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from deltic.engine.cache.tree import Pool
from deltic.engine.events import PictureStats
from deltic.engine.messages import Picture, Request
from deltic.engine.step import Chunk, Sequence
from deltic.ops.geometry import PAGE_SIZE

log = logging.getLogger("deltic.engine")

IDLE_S = 0.02
"""Seconds that the tower has between two looks at the commands, where nobody waits for a token."""


class PictureEncoder(Protocol):
    """The engine's interface to a vision tower and its pool (`runtime/cpu/pictures.py`)."""

    @property
    def n_blocks(self) -> int:
        """Blocks of the pool."""

    def begin(self, picture: Picture, blocks: list[int]) -> None:
        """Starts to encode a picture, to these blocks, and forgets the one before if that is not finished."""

    def run(self, seconds: float) -> bool:
        """Goes on for about so long, at least for one piece. Returns whether the picture is finished."""


class Pace:
    """Sizes of the pieces of a tower, in patches: as many as should take the time that is left, by what
    pieces of their kind took last.
    """

    def __init__(self, n_stages: int, unit: int, least: int, most: int) -> None:
        """n_stages: the embedding, two of each block, the merger. Pieces have a multiple of `unit` patches,
        `least` to `most` of them, but for the last of a stage.
        """
        self._n_stages, self._unit, self._least, self._most = n_stages, unit, least, most
        self._row_s: dict[str, float] = {}  # seconds a patch, by the kind of stage
        self.left_s = 0.0
        self.ran = ("", 0)
        """Kind and patches of the piece that was asked for last."""

    def begin(self) -> None:
        """Forgets what depends on the picture: what attention takes."""
        self._row_s.pop("rest", None)

    def n_rows(self, stage: int, n_left: int) -> int:
        """Patches of the next piece, which is of this stage, with so many to go."""
        last = self._n_stages - 1
        kind = "embedding" if stage == 0 else "merger" if stage == last else "keys" if stage % 2 else "rest"
        most = int(self.left_s / self._row_s[kind]) if kind in self._row_s else self._least
        n = min(self._most, max(self._least, most // self._unit * self._unit), n_left)
        self.ran = kind, n
        return n

    def seconds(self, kind: str, n: int) -> float | None:
        """Seconds of n patches; None: no piece of the kind is known."""
        return n * self._row_s[kind] if kind in self._row_s else None

    def took(self, kind: str, n: int, seconds: float) -> None:
        self._row_s[kind] = seconds / max(n, self._least)  # fewer take no less: weights are read anyway

    @property
    def least_s(self) -> float:
        """Seconds of the least piece. It may be of any kind: all are taken to be as slow as the slowest."""
        return self._least * max(self._row_s.values())


def row_ids(chunk: Chunk) -> Iterator[tuple[int, list[int]]]:
    """The ids by which a chunk's tokens of pictures name the tower's rows, below 0: for each picture from
    which token of the chunk on, and the ids, -1 - row.
    """
    for picture, blocks in chunk.pictures:
        begin, end = max(picture.first, chunk.start), min(picture.end, chunk.start + chunk.length)
        tokens = range(begin - picture.first, end - picture.first)
        yield begin - chunk.start, [-1 - blocks[i // PAGE_SIZE] * PAGE_SIZE - i % PAGE_SIZE for i in tokens]


Key = tuple[str, bytes]
"""Scope and content: how soon a picture is there tells whether it was before, as with prefixes."""


def _key_of(request: Request, picture: Picture) -> Key:
    return request.prefix_scope, picture.key


@dataclass(slots=True, eq=False)
class _Entry:
    """A picture with a place in the pool."""

    key: Key
    picture: Picture | None
    """Picture to encode; None: it is encoded, and its pixels are forgotten."""
    blocks: list[int]
    n_uses: int = 0
    seconds: float = 0.0
    """Seconds that the tower took."""
    priority: float = 0.0
    wanted_by: list[Sequence] = field(default_factory=list)
    """Open sequences that need it, until it is done."""

    @property
    def is_done(self) -> bool:
        return self.picture is None

    @property
    def worth(self) -> float:
        return (1 + self.n_uses) * self.seconds / (len(self.blocks) * PAGE_SIZE)


class Pictures:
    """The pictures in the pool, and those on their way into it."""

    def __init__(self, encoder: PictureEncoder) -> None:
        self.encoder = encoder
        self.pool = Pool("block of pictures", encoder.n_blocks)
        self.n_encoded = 0
        self.n_hits = 0
        """Pictures that a prompt needed and that were there."""
        self.tower_s = 0.0
        self._entries: dict[Key, _Entry] = {}
        self._claimed: dict[Key, _Entry] = {}  # in this plan, in the order of rank
        self._current: _Entry | None = None  # that the tower works on
        self._is_short = False
        self._clock = 0.0

    @property
    def has_work(self) -> bool:
        """True if a picture is to be encoded."""
        return self._next() is not None

    def waiting(self) -> set[str]:
        """The tenants whose pictures are to be encoded."""
        entries = [*self._claimed.values(), *filter(None, [self._current])]
        return {s.request.tenant for entry in entries if not entry.is_done for s in entry.wanted_by}

    def served(self) -> set[str]:
        """The tenants of the picture that the tower works on next."""
        entry = self._next()
        return set() if entry is None else {s.request.tenant for s in entry.wanted_by}

    def begin_plan(self) -> None:
        self._claimed = {}
        self._is_short = False

    def ready(self, sequence: Sequence, length: int) -> int:
        """Counts those of a sequence's next `length` tokens, on the grid of its chunks or all, that can run
        now. Claims what they need, and what the tokens behind them do, as far as there is room.
        """
        start = sequence.n_computed
        for picture in sequence.request.pictures:
            if picture.end <= start:
                continue
            is_next = picture.first < start + length
            entry = self._claim(sequence, picture)
            if is_next and (entry is None or not entry.is_done):
                # The page of its first token is where the tokens before it end.
                length = max(0, picture.first // PAGE_SIZE * PAGE_SIZE - start)
                self._is_short |= entry is None
            if entry is None:
                break
        return length

    def place(self, chunk: Chunk) -> None:
        """Gives a planned chunk the pictures that its tokens are of, all of which are ready."""
        begin, end = chunk.start, chunk.start + chunk.length
        for picture in chunk.sequence.request.pictures:
            if picture.end > begin and picture.first < end:
                entry = self._entries[_key_of(chunk.sequence.request, picture)]
                chunk.pictures = [*chunk.pictures, (picture, entry.blocks)]
                if picture.first >= begin:
                    self._use(entry)

    def distrust(self, sequences: list[Sequence]) -> None:
        """Forgets what the tower made of the pictures of sequences whose logits were not finite."""
        for sequence in sequences:
            for entry in self._of(sequence):
                self._evict(entry)

    def leave(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended, whose pixels would else stay. What nobody else waits for gives
        its room back, unless the tower has begun it: its request may be sent again.
        """
        for entry in self._of(sequence):
            if sequence in entry.wanted_by:
                entry.wanted_by.remove(sequence)
                if not entry.wanted_by and entry is not self._current:
                    self._evict(entry)

    def work(self, seconds: float) -> list[tuple[Sequence, str]]:
        """Runs the tower for about so long, and at least for one piece. Gives the sequences whose picture it
        could not encode, and why.
        """
        end = time.perf_counter() + seconds
        while (entry := self._next()) is not None:
            begin = time.perf_counter()
            try:
                if entry is not self._current:
                    if self._current is not None and not self._current.wanted_by:
                        self._evict(self._current)
                    self._current = entry
                    assert entry.picture is not None
                    self.encoder.begin(entry.picture, entry.blocks)
                is_done = self.encoder.run(end - begin)
            except Exception as error:
                log.exception("a picture could not be encoded")
                self._evict(entry)
                return [(sequence, type(error).__name__) for sequence in entry.wanted_by]
            entry.seconds += time.perf_counter() - begin
            if is_done:
                self._finish(entry)
            if time.perf_counter() >= end:
                break
        return []

    def stats(self) -> PictureStats:
        n_used = self.pool.n - self.pool.n_free
        return PictureStats(n_used, self.pool.n, self.n_encoded, self.n_hits, self.tower_s)

    def check(self) -> None:
        """Raises IntegrityError unless entries and free list make up the pool."""
        self.pool.check(Counter(block for entry in self._entries.values() for block in entry.blocks))

    def _next(self) -> _Entry | None:
        """The picture that the tower works on: the one that it has begun, while somebody wants it, else the
        first that is claimed.
        """
        current = self._current
        if current is not None and current.wanted_by:
            return current
        return next((e for e in self._claimed.values() if not e.is_done and e.wanted_by), None)

    def _of(self, sequence: Sequence) -> list[_Entry]:
        """The entries of those of a sequence's pictures that have a place."""
        keys = {_key_of(sequence.request, picture) for picture in sequence.request.pictures}
        return [self._entries[key] for key in keys if key in self._entries]

    def _claim(self, sequence: Sequence, picture: Picture) -> _Entry | None:
        """The picture's entry, made if there is room; None: there is none."""
        key = _key_of(sequence.request, picture)
        entry = self._entries.get(key)
        if entry is None:
            blocks = None if self._is_short else self._take(-(-picture.n_tokens // PAGE_SIZE))
            if blocks is None:
                return None
            entry = self._entries[key] = _Entry(key, picture, blocks)
        self._claimed.setdefault(key, entry)
        if not entry.is_done and sequence not in entry.wanted_by:
            entry.wanted_by.append(sequence)
        return entry

    def _take(self, n: int) -> list[int] | None:
        """Takes n blocks, and evicts for them what is not claimed; None: there are not so many."""
        others = [e for key, e in self._entries.items() if key not in self._claimed]
        if n > self.pool.n_free + sum(len(e.blocks) for e in others):
            return None
        for entry in sorted(others, key=lambda e: (bool(e.wanted_by), e.priority)):
            if n <= self.pool.n_free:
                break
            self._evict(entry)
        return self.pool.take(n)

    def _evict(self, entry: _Entry) -> None:
        self._clock = max(self._clock, entry.priority)
        if entry is self._current:
            self._current = None
        self._claimed.pop(entry.key, None)
        del self._entries[entry.key]
        self.pool.give_back(entry.blocks)

    def _finish(self, entry: _Entry) -> None:
        self._current, entry.picture, entry.wanted_by = None, None, []
        self.n_encoded += 1
        self.tower_s += entry.seconds
        entry.priority = self._clock + entry.worth

    def _use(self, entry: _Entry) -> None:
        """Notes that a prompt begins to read a picture."""
        self.n_hits += entry.n_uses > 0
        entry.n_uses += 1
        entry.priority = self._clock + entry.worth
