"""Text that the built-in model knows and was not trained on: `python -m training.held_out > deltic/bench/quality.jsonl`.

Documents of the corpus under a seed that neither training (its workers' seeds are around 2000) nor `training.evaluate`
uses. A line is a document: a list of [text, whether the model learns to write it]. `python -m training.held_out SEED BYTES` makes
another text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from training.corpus import MIX, Corpus, Document

SEED = 9_000_017
N_BYTES = 48_000
LONGEST_STORY = 450
FIRST = ("story", "arithmetic", "tools")
"""Kinds of the first documents, whose answers `deltic bench quality` shows."""


def documents(seed: int) -> Iterator[Document]:
    """One of every kind, then as the corpus draws them."""
    corpus = Corpus(seed, LONGEST_STORY)
    for kind in (*FIRST, *(kind for kind in MIX if kind not in FIRST)):
        yield corpus.draw(kind)
    yield from corpus


def lines(seed: int = SEED, most: int = N_BYTES) -> Iterator[str]:
    """The file's lines, of at most so many bytes."""
    n_bytes = 0
    for document in documents(seed):
        line = json.dumps(document.segments, ensure_ascii=False) + "\n"
        n_bytes += len(line.encode())
        if n_bytes > most:
            return
        yield line


if __name__ == "__main__":
    sys.stdout.writelines(lines(*map(int, sys.argv[1:])))
