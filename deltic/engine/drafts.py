"""Drafts: tokens that may follow, guessed where a text repeats itself.

A step runs a sequence's last token, and behind it a draft: tokens that a proposer guesses. Each row's logits
are those of a plain decode, bit for bit, and so is what is drawn from them. As long as what was drawn is what
was guessed, the next row is right, too. So a draft changes how many tokens a step gives, and nothing else.

`Repeats` guesses by the longest earlier run of tokens that ends as the text does now: edits, quotes and
results of tools repeat what is in the prompt (prompt lookup decoding, Saxena 2023). It needs no model.

Where a grammar leaves one text only, that is the draft.

A draft head (MTP), where the checkpoint has one, guesses from the model's own hidden state. The runner has
it: behind each draw it gives as many tokens as the step before asked for.

How long drafts are follows from what became of the last ones, and from what steps took: of all tokens that
are proposed in a step, the likeliest ones run, as many as make a token cheapest. A proposer whose drafts are
not worth their rows pauses, longer each time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from deltic.engine.guides import Guide, Guides
from deltic.engine.step import Chunk, Sequence, Step
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

MAX_PAUSE = 128
"""Steps for which a proposer pauses, at most."""

KEPT = 0.9
"""What a record keeps of what it knew, with each draft."""

A_TRY = 0.5
"""How likely the first token behind a pause is believed to be right."""

KEPT_TIMES = 0.95
"""What is kept of what is known of times, with each one."""

BELIEF = 0.1
"""How much what is believed of times weighs beside what is known: one step that ran this many tokens more, or
fewer, than others, squared.
"""

MOST_LATE = 2.0
"""By how much a time may be longer than expected; what is above says nothing of the work."""

OWN = 4.0
"""What a sequence's own row costs beside a row of its draft, until that is known."""

HEAD = 0.1
"""What a guess of the head costs beside a step without drafts, until that is known."""


def n_guessable(sequence: Sequence, n_drawn: int) -> int:
    """How many tokens a draft head may guess behind n_drawn ones that the sequence does not have yet: the
    rows of all guesses but the last need a place in its pages.
    """
    last = len(sequence.tokens) + n_drawn - 1
    return 1 + (PAGE_SIZE - last % PAGE_SIZE if last < len(sequence.pages) * PAGE_SIZE else 0)


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
class Record:
    """What became of a proposer's tokens, the latest ones most: how likely the next is right."""

    n_right: float = 1.5
    n_seen: float = 2.0
    """Tokens that were right, and those and the first wrong ones. They begin as a guess."""
    n_misses: int = 0
    """How often in a row drafts were not worth their rows, also when they were tried again."""
    pause: int = 0
    """Steps for which it proposes nothing."""

    @property
    def chance(self) -> float:
        """Of a token to be right, if those before are. The first one behind a pause is worth a try."""
        return max(self.n_right / self.n_seen, A_TRY if self.n_misses else 0.0)

    def begun(self) -> Record:
        """One of another sequence, for which no more is known than this."""
        return Record(2.0 * self.n_right / self.n_seen, 2.0)

    def chances(self, whose: int, n: int) -> list[tuple[float, int]]:
        """Of the tokens of a draft to be right, with whose draft it is."""
        return [(self.chance ** (i + 1), whose) for i in range(n)]

    def observe(self, n_drafted: int, n_accepted: int) -> None:
        """What became of a draft."""
        self.n_right = KEPT * self.n_right + n_accepted
        self.n_seen = KEPT * self.n_seen + n_accepted + (n_accepted < n_drafted)
        if n_accepted:
            self.n_misses = 0
        elif self.n_misses:  # that was the try
            self.miss()

    def miss(self) -> None:
        """A draft is not worth its rows: they pause, longer each time."""
        self.n_misses += 1
        self.pause = min(MAX_PAUSE, 2**self.n_misses)


@dataclass(slots=True, eq=False)
class Drafter:
    """The proposers of one sequence, what they propose, and how far they are to be trusted."""

    repeats: Repeats = field(default_factory=Repeats)
    guesses: list[int] = field(default_factory=list)
    """Of the draft head, behind the last token."""
    of_repeats: Record = field(default_factory=Record)
    of_head: Record = field(default_factory=Record)
    of_grammar: Record = field(default_factory=lambda: Record(19.0, 20.0))
    used: Record = field(default_factory=Record)
    """Of these, whose the next draft is; the head's where there is none."""

    def begun(self) -> Drafter:
        """One of another sequence."""
        return Drafter(of_repeats=self.of_repeats.begun(), of_head=self.of_head.begun())

    def observe(self, n_drafted: int, n_accepted: int, known: Drafter) -> None:
        """What became of a draft. known: with the records of all sequences, which learn it, too."""
        self.used.observe(n_drafted, n_accepted)
        if self.used is self.of_repeats:
            known.of_repeats.observe(n_drafted, n_accepted)
        elif self.used is self.of_head:
            known.of_head.observe(n_drafted, n_accepted)

    def propose(self, tokens: Ids[int], most: int, forced: Ids[int] = ()) -> list[int]:
        """A draft of up to `most` tokens: that of which more are expected to be right.

        forced: what a grammar leaves as the only text.
        """
        found, best, self.used = list[int](), 0.0, self.of_head
        for record in (self.of_grammar, self.of_head, self.of_repeats):
            if record.pause:
                record.pause -= 1
                continue
            if record is self.of_repeats:
                draft = self.repeats.follow(tokens, most)
            else:
                draft = list((forced if record is self.of_grammar else self.guesses)[:most])
            expected = sum(record.chance ** (i + 1) for i in range(len(draft)))
            if expected > best:
                found, best, self.used = draft, expected, record
        return found


class Times:
    """What something takes, by the number of sequences: a line over the number of tokens that are guessed for
    them in all, through what it took, the latest most.
    """

    def __init__(self, own: float) -> None:
        """own: what a sequence is believed to cost beside a token, until that is known."""
        self._own = own
        self._sums: dict[int, tuple[float, ...]] = {}
        """By the number of sequences n: of 1, x, y, x^2 and x y, where x is the number of tokens over n."""

    def observe(self, n: int, n_tokens: int, seconds: float) -> None:
        """n sequences with so many tokens took so long."""
        x, y = n_tokens / n, seconds
        if (line := self.line(n)) is not None:
            y = min(y, MOST_LATE * (line[0] + line[1] * n_tokens))  # another program had the processor
        sums = self._sums.get(n, (0.0,) * 5)
        self._sums[n] = tuple(KEPT_TIMES * old + new for old, new in zip(sums, (1.0, x, y, x * x, x * y), strict=True))

    def line(self, n: int) -> tuple[float, float] | None:
        """Of so many sequences, the seconds without a token, and those of each. None: nothing is known."""
        if n not in self._sums:
            return None
        total, *sums = self._sums[n]
        x, y, xx, xy = (each / total for each in sums)
        believed = y / (self._own + x) if self._own + x else 0.0
        weight = BELIEF / total
        slope = max(0.0, (xy - x * y + weight * believed) / (xx - x * x + weight))
        return max(0.0, y - slope * x), slope / n


class Drafting:
    """How long the drafts of a step are: as many rows as make its tokens cheapest."""

    def __init__(self, max_drafts: int, has_head: bool, guides: Guides | None) -> None:
        """max_drafts: tokens of a draft. has_head: whether the runner has a draft head."""
        self.max_drafts, self.has_head, self.guides = max_drafts, has_head, guides
        self.steps, self.guesses = Times(OWN), Times(0.0)
        """Of steps, by the rows of their drafts, without what the head takes; and of that."""
        self.known = Drafter()
        """With the records of all sequences."""
        self.drafted, self.accepted = Counter[str](), Counter[str]()
        """As of Stats."""
        self._n_plain = 0

    def plan(self, step: Step) -> None:
        """Gives a step of decodes drafts, and says what the draft head guesses for the next one.

        A window never reaches the end of a page, so that the state is whole there, where it may become a
        checkpoint.
        """
        drafts: list[list[int]] = []
        chances: list[tuple[float, int]] = []
        of_guesses: list[tuple[float, int]] = []
        for draw in step.draws:
            chunk, sequence = step.chunks[draw.chunk], draw.sequence
            drafter = sequence.drafter = sequence.drafter or self.known.begun()
            n_left = sequence.request.params.max_tokens - sequence.n_generated - 1
            most = min(self.max_drafts, PAGE_SIZE - 2 - chunk.start % PAGE_SIZE, n_left)
            draft = self._propose(sequence, chunk, most) if most > 0 else []
            chances += drafter.used.chances(len(drafts), len(draft))
            if self.has_head and drafter.used is drafter.of_head and not drafter.of_head.pause:
                of_guesses += drafter.of_head.chances(len(drafts), min(self.max_drafts, n_left - 1))
            drafts.append(draft)
        n_taken = self._n_worth(len(step.chunks), chances, are_drafts=True)
        n_asked = self._n_worth(len(step.chunks), of_guesses, are_drafts=False)
        wanted = {i for _, i in of_guesses}
        for i, (draw, draft) in enumerate(zip(step.draws, drafts, strict=True)):
            chunk, drafter = step.chunks[draw.chunk], draw.sequence.drafter
            chunk.drafts = draft[: n_taken[i]]
            chunk.length += len(chunk.drafts)
            chunk.rules = chunk.rules[: 1 + len(chunk.drafts)]
            draw.n_guesses = n_asked[i]
            if draft and not chunk.drafts:
                drafter.used.miss()
            elif i in wanted and not draw.n_guesses:
                drafter.of_head.miss()

    def _propose(self, sequence: Sequence, chunk: Chunk, most: int) -> list[int]:
        """A draft, as far as the sequence's guide allows it."""
        drafter, guide = sequence.drafter, sequence.guide
        if not isinstance(guide, Guide) or self.guides is None:
            found: list[int] = drafter.propose(sequence.tokens, most)
            return found
        draft = drafter.propose(sequence.tokens, most, guide.forced(most))
        if not draft:
            return []
        allowed, chunk.rules = self.guides.ahead(guide, draft)
        if len(allowed) < len(draft):
            drafter.used.n_seen += 1
        return allowed

    def _n_worth(self, n: int, chances: list[tuple[float, int]], are_drafts: bool) -> Counter[int]:
        """Of the likeliest tokens as many as give the most tokens a second, by the sequence that they are of.

        chances: of each token, and whose it is. are_drafts: they are there; else the head has to guess them
        first.
        """
        chances.sort(reverse=True)
        begin, each = self._line(n)
        if not are_drafts:
            known = self.guesses.line(n)
            more = (0.0, HEAD * begin / n) if known is None else known
            begin, each = begin + more[0], each + more[1]
        tokens, best, n_best = float(n), n / begin, 0
        for n_rows, (chance, _) in enumerate(chances[:PAGE_SIZE], 1):
            tokens += chance
            if tokens / (begin + each * n_rows) > best:
                best, n_best = tokens / (begin + each * n_rows), n_rows
        return Counter(i for _, i in chances[:n_best])

    def _line(self, n: int) -> tuple[float, float]:
        """As of Times, of steps; in any unit where nothing is known."""
        begin, each = self.steps.line(n) or (OWN * n, 1.0)
        return max(1e-9, begin), each

    def count(self, sequence: Sequence, n_drafted: int, n_accepted: int) -> None:
        """Takes what became of a sequence's draft."""
        self.drafted.update(str(1 + i) for i in range(n_drafted))
        self.accepted.update(str(1 + i) for i in range(n_accepted))
        sequence.drafter.observe(n_drafted, n_accepted, self.known)

    def observe(self, step: Step, seconds: float, guess_s: float) -> None:
        """Learns what a step took, if it was one of decodes, and what of that the head did."""
        if not step.chunks[-1].is_decode:
            return
        n, n_guesses = len(step.chunks), sum(draw.n_guesses for draw in step.draws)
        n_rows = step.n_tokens - n
        self._n_plain = 0 if n_rows or n_guesses else self._n_plain + 1
        if self._n_plain % 8 < 2:  # of plain ones in a row some are enough
            self.steps.observe(n, n_rows, seconds - guess_s)
        if n_guesses:
            self.guesses.observe(n, n_guesses, guess_s)
