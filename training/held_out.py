"""Text that the built-in model knows and was not trained on: `python -m training.held_out > deltic/bench/quality.jsonl`.

Documents of the corpus under a seed that neither training (its workers' seeds are around 2000) nor `training.evaluate`
uses. A line is a document: a list of [text, whether the model learns to write it].
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


def documents() -> Iterator[Document]:
    """One of every kind, then as the corpus draws them."""
    corpus = Corpus(SEED, LONGEST_STORY)
    for kind in (*FIRST, *(kind for kind in MIX if kind not in FIRST)):
        yield corpus.draw(kind)
    yield from corpus


def lines() -> Iterator[str]:
    """The file's lines."""
    n_bytes = 0
    for document in documents():
        line = json.dumps(document.segments, ensure_ascii=False) + "\n"
        n_bytes += len(line.encode())
        if n_bytes > N_BYTES:
            return
        yield line


if __name__ == "__main__":
    sys.stdout.writelines(lines())
