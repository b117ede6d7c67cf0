"""Documents as rows of tokens, made by worker processes so that training never waits for text. Imports no torch.

A row holds whole documents one after another, padded at its end. One uint16 is a token id and two flags: LEARN (the
model is asked to predict this token) and FIRST (a document starts here). A row resets the model at each FIRST, which
wastes no computation on padding, where one document a row would waste more than half of it.
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.corpus import DEMO, Corpus, Document

LEARN, FIRST, ID_MASK = 0x8000, 0x4000, 0x3FFF
SHORT_ROW, LONG_ROW = 1024, 4096
LONGEST_STORY = {SHORT_ROW: 450, LONG_ROW: 1500}  # words; one and a half tokens a word
LONG_SHARE = 0.35  # of batches; they are what teaches stories beyond a page
N_OPEN = 24  # documents at hand to fill a row from
N_KEPT = 256  # batches kept for a second use, should the workers ever be too slow

Row = NDArray[np.uint16]


def encode(document: Document, tokenizer: Tokenizer) -> Row:
    """The document's flagged tokens; segments are encoded one by one, as a server meets prompt and answer."""
    parts = []
    for text, learn in document.segments:
        ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint16)
        parts.append(ids | np.uint16(LEARN if learn else 0))
    row = np.concatenate(parts)
    row[0] = row[0] & ID_MASK | FIRST
    return row


def pack(documents: Iterator[Row], row_length: int, pad_id: int) -> Iterator[Row]:
    """Rows of `row_length`, each filled with the longest documents at hand that still fit."""
    at_hand: list[Row] = []
    while True:
        row = np.full(row_length, pad_id, dtype=np.uint16)
        used = 0
        while True:
            while len(at_hand) < N_OPEN:
                document = next(documents)
                if len(document) <= row_length:
                    at_hand.append(document)
            # an empty row takes the oldest document, so that none waits for ever
            fitting = [0] if used == 0 else [i for i, d in enumerate(at_hand) if len(d) <= row_length - used]
            if not fitting:
                break
            chosen = at_hand.pop(max(fitting, key=lambda i: len(at_hand[i])) if row_length - used < 512 else fitting[0])
            row[used : used + len(chosen)] = chosen
            used += len(chosen)
        if used < row_length:
            row[used] |= FIRST  # padding is a document of its own, with nothing to learn
        yield row


class Batches:
    """An endless stream of batches of one seed: arrays [rows, row_length], rows of one of two lengths."""

    def __init__(self, seed: int, batch_tokens: int):
        tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        pad_id = tokenizer.token_to_id("<|endoftext|>")
        self._rng = Random(seed)
        self._rows = {}
        for number, length in enumerate((SHORT_ROW, LONG_ROW)):
            corpus = Corpus(2 * seed + number, LONGEST_STORY[length])
            documents = (encode(document, tokenizer) for document in corpus)
            self._rows[length] = pack(documents, length, pad_id)
        self._batch_tokens = max(batch_tokens, LONG_ROW)

    def draw(self, row_length: int | None = None) -> Row:
        length = row_length or (LONG_ROW if self._rng.random() < LONG_SHARE else SHORT_ROW)
        rows = self._rows[length]
        return np.stack([next(rows) for _ in range(self._batch_tokens // length)])


def _work(seed: int, batch_tokens: int, pipe: Connection) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    batches = Batches(seed, batch_tokens)
    try:
        while True:
            batch = batches.draw()
            pipe.send_bytes(np.uint16(batch.shape[1]).tobytes() + batch.tobytes())
    except (BrokenPipeError, KeyboardInterrupt):
        return


class Supply:
    """Batches from worker processes. Start it before the accelerator is touched: the workers are forked."""

    def __init__(self, seed: int, batch_tokens: int, n_workers: int):
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._kept: deque[Row] = deque(maxlen=N_KEPT)
        self._rng = Random(seed)
        self.n_reused = 0
        for i in range(n_workers):
            mine, theirs = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(seed * 1000 + i, batch_tokens, theirs), daemon=True)
            worker.start()
            theirs.close()
            self._pipes.append(mine)

    def draw(self) -> Row:
        """The next batch, or an old one again if none is ready. RuntimeError when the workers have died."""
        ready = wait(self._pipes, timeout=0 if len(self._kept) >= 32 else 60)
        if not ready:
            if not self._kept:
                raise RuntimeError("no batch from the corpus workers within 60 s")
            self.n_reused += 1
            return self._rng.choice(self._kept)
        pipe = self._rng.choice(ready)
        try:
            data = np.frombuffer(pipe.recv_bytes(), dtype=np.uint16)  # type: ignore[union-attr]
        except EOFError:
            raise RuntimeError("a corpus worker has died; its error is printed above") from None
        batch = data[1:].reshape(-1, int(data[0]))
        self._kept.append(batch)
        return batch
