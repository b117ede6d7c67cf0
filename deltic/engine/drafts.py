"""Drafts: tokens that may follow, guessed where a text repeats itself.

A step runs a sequence's last token, and behind it a draft: tokens that a proposer guesses. Each row's logits
are those of a plain decode, bit for bit, and so is what is drawn from them. As long as what was drawn is what
was guessed, the next row is right, too. So a draft changes how many tokens a step gives, and nothing else.

`Repeats` guesses by the longest earlier run of tokens that ends as the text does now: edits, quotes and
results of tools repeat what is in the prompt (prompt lookup decoding, Saxena 2023). It needs no model.

How long a draft is follows what became of the last ones: twice as long where all was right, as long as what
was right where some was, and none for a while where nothing was, which gets longer each time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from deltic.engine.step import Step
from deltic.ops.geometry import PAGE_SIZE

LEAST = 3
"""Tokens that a run must have in common with the end of the text."""

LONGEST = 16
"""Tokens up to which runs are compared."""

N_PLACES = 4
"""Earlier places of three tokens that are looked at, the latest ones."""

N_INDEXED = 8192
"""Tokens before the first draft that are searched."""

N_AT_ONCE = 512
"""Tokens that are indexed in a step: a fraction of a millisecond."""

MAX_PAUSE = 64
"""Steps for which nothing is drafted, at most."""


@dataclass(slots=True, eq=False)
class Repeats:
    """Where the runs of a sequence's tokens were before: by three tokens the place behind them, and from each
    place the one before it with the same three. A token takes some 150 bytes.
    """

    first: int = 0
    """The first place that is indexed; 0: none is yet."""
    newest: dict[tuple[int, ...], int] = field(default_factory=dict)
    before: array[int] = field(default_factory=lambda: array("i"))

    def follow(self, tokens: Ids[int], most: int) -> list[int]:
        """Up to `most` tokens that followed the longest run with which `tokens` end, when it came before; no
        more than the run has. None where it is shorter than LEAST, nor while a long text is being indexed.
        """
        n, newest, before = len(tokens), self.newest, self.before
        if n <= LEAST:
            return []
        self.first = self.first or max(LEAST, n - N_INDEXED)
        known = self.first + len(before)
        end = min(n, known + N_AT_ONCE)
        # What ends at the last token is not an earlier place: it is indexed with the next one.
        for place in range(known, end):
            key = tuple(tokens[place - LEAST : place])
            before.append(newest.get(key, 0))
            newest[key] = place
        if end < n:
            return []
        best = length = 0
        place = newest.get(tuple(tokens[n - LEAST :]), 0)
        for _ in range(N_PLACES):
            if not place:
                break
            same = LEAST
            while same < min(place, LONGEST) and tokens[place - same - 1] == tokens[n - same - 1]:
                same += 1
            if same > length:
                best, length = place, same
            place = before[place - self.first]
        draft: list[int] = []
        for at in range(best, best + min(most, length)):  # behind the end the draft goes on with itself
            draft.append(tokens[at] if at < n else draft[at - n])
        return draft


@dataclass(slots=True, eq=False)
class Drafter:
    """The proposers of one sequence, and how far they are to be trusted."""

    repeats: Repeats = field(default_factory=Repeats)
    depth: int = 2
    """Tokens of the next draft, at most."""
    pause: int = 0
    """Steps until then."""
    n_misses: int = 0
    """Drafts in a row of which nothing was right."""

    def propose(self, tokens: Ids[int], most: int) -> list[int]:
        """A draft of up to `most` tokens."""
        if self.pause:
            self.pause -= 1
            return []
        return self.repeats.follow(tokens, min(most, self.depth))

    def observe(self, n_drafted: int, n_accepted: int, most: int) -> None:
        """What became of a draft. most: the longest that the engine runs."""
        if n_accepted == n_drafted:
            self.depth = min(most, 2 * self.depth)
        else:
            self.depth = max(1, n_accepted)
        self.n_misses = 0 if n_accepted else self.n_misses + 1
        self.pause = min(MAX_PAUSE, 2**self.n_misses) if self.n_misses > 1 else 0


def draft(step: Step, max_drafts: int) -> None:
    """Gives decodes of a step without a prefill, which would need the rows, drafts of up to max_drafts
    tokens, where such can be had.

    A window never reaches the end of a page, so that the state is whole there, where it may become a
    checkpoint.
    """
    room = PAGE_SIZE
    for draw in step.draws:
        chunk, sequence = step.chunks[draw.chunk], draw.sequence
        n_wanted = sequence.request.params.max_tokens - sequence.n_generated
        most = min(max_drafts, room, PAGE_SIZE - 2 - chunk.start % PAGE_SIZE, n_wanted - 1)
        if most <= 0 or sequence.guide is not None:
            continue
        if sequence.drafter is None:
            sequence.drafter = Drafter()
        chunk.drafts = sequence.drafter.propose(sequence.tokens, most)
        chunk.length += len(chunk.drafts)
        room -= len(chunk.drafts)
