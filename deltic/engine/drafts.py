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
are proposed in a step, the likeliest ones run, as many as make a token cheapest. A proposer of which nothing
was right pauses, longer each time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from statistics import median

from deltic.engine.guides import Guide, Guides
from deltic.engine.step import Chunk, Draw, Sequence, Step
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

KEPT = 0.8
"""What a record keeps of what it knew, with each draft."""

N_TIMES = 8
"""Steps of a size that are remembered."""

HOPE = 0.25
"""What a row of a draft costs beside a sequence's own, until that is known."""

HEAD = 0.1
"""What a guess of the head costs beside a step without drafts, until that is known."""


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
    """Drafts in a row of which nothing was right, or that were not worth their rows."""
    pause: int = 0
    """Steps for which it proposes nothing."""

    @property
    def chance(self) -> float:
        """Of a token to be right, if those before are. The first one behind a pause is worth a try."""
        return max(self.n_right / self.n_seen, 0.5 if self.n_misses > 1 else 0.0)

    def observe(self, n_drafted: int, n_accepted: int) -> None:
        """What became of a draft."""
        self.n_right = KEPT * self.n_right + n_accepted
        self.n_seen = KEPT * self.n_seen + n_accepted + (n_accepted < n_drafted)
        if n_accepted:
            self.n_misses = self.pause = 0
        else:
            self.miss()

    def miss(self) -> None:
        """A draft was in vain: from the second on they pause, longer each time."""
        self.n_misses += 1
        self.pause = min(MAX_PAUSE, 2**self.n_misses) if self.n_misses > 1 else 0


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
    """What something took, by the number of sequences and of the tokens that are guessed for them in all."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], deque[float]] = {}
        self._known: dict[int, list[tuple[int, float]]] = {}
        """By the number of sequences: (tokens, median of the latest), ascending."""

    def observe(self, n: int, n_tokens: int, seconds: float) -> None:
        """n sequences with so many tokens took so long."""
        latest = self._latest.setdefault((n, n_tokens), deque(maxlen=N_TIMES))
        latest.append(seconds)
        known = self._known.setdefault(n, [])
        i = bisect_left(known, (n_tokens, -1.0))
        if len(latest) == 1:
            known.insert(i, (n_tokens, seconds))
        else:
            known[i] = n_tokens, median(latest)

    def seconds(self, n: int, n_tokens: int) -> float | None:
        """The estimate: between two that are known on their line, beyond them on a hopeful one. It will be
        tried then, and known. None: nothing is known of so many sequences.
        """
        known = self._known.get(n)
        if not known:
            return None
        i = bisect_left(known, (n_tokens, -1.0))
        if i < len(known) and (known[i][0] == n_tokens or i > 0):
            (x1, y1), (x0, y0) = known[i], known[max(0, i - 1)]
            return y1 if x1 == n_tokens else y0 + (y1 - y0) * (n_tokens - x0) / (x1 - x0)
        x, y = known[i - 1] if i else known[0]
        return y * (n + HOPE * n_tokens) / (n + HOPE * x)


class Drafting:
    """How long the drafts of a step are: as many rows as make its tokens cheapest."""

    def __init__(self, max_drafts: int, has_head: bool, guides: Guides | None) -> None:
        """max_drafts: tokens of a draft. has_head: whether the runner has a draft head."""
        self.max_drafts, self.has_head, self.guides = max_drafts, has_head, guides
        self.steps, self.guesses = Times(), Times()
        """Of steps, by the rows of their drafts, without what the head takes; and of that."""
        self.drafted, self.accepted = Counter[str](), Counter[str]()
        """As of Stats."""
        self._n_plain = 0

    def plan(self, step: Step) -> None:
        """Gives a step of decodes drafts, and says what the draft head guesses for the next one.

        A window never reaches the end of a page, so that the state is whole there, where it may become a
        checkpoint.
        """
        drafts: list[tuple[Draw, list[int]]] = []
        chances: list[tuple[float, int]] = []
        asked: list[tuple[Draw, int]] = []
        for draw in step.draws:
            chunk, sequence = step.chunks[draw.chunk], draw.sequence
            drafter = sequence.drafter = sequence.drafter or Drafter()
            n_left = sequence.request.params.max_tokens - sequence.n_generated - 1
            most = min(self.max_drafts, PAGE_SIZE - 2 - chunk.start % PAGE_SIZE, n_left)
            draft = self._propose(sequence, chunk, most) if most > 0 else []
            chance = drafter.used.chance
            chances += ((chance ** (j + 1), len(drafts)) for j in range(len(draft)))
            drafts.append((draw, draft))
            if self.has_head and n_left > 1 and drafter.used is drafter.of_head and not drafter.of_head.pause:
                asked.append((draw, min(self.max_drafts, n_left - 1)))
        n_taken = self._n_worth(len(step.chunks), sorted(chances, reverse=True)) if chances else {}
        for i, (draw, draft) in enumerate(drafts):
            chunk = step.chunks[draw.chunk]
            chunk.drafts = draft[: n_taken.get(i, 0)]
            chunk.length += len(chunk.drafts)
            chunk.rules = chunk.rules[: 1 + len(chunk.drafts)]
            if draft and not chunk.drafts:
                draw.sequence.drafter.used.miss()
        if asked:
            self._ask(len(step.chunks), asked)

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

    def _n_worth(self, n: int, chances: list[tuple[float, int]]) -> dict[int, int]:
        """The lengths of drafts: of the likeliest tokens as many as give the most tokens a second."""
        tokens, best, n_best = float(n), 0.0, 0
        for n_rows in range(min(len(chances), PAGE_SIZE) + 1):
            tokens += chances[n_rows - 1][0] if n_rows else 0.0
            seconds = self._step_s(n, n_rows)
            if tokens / seconds > best:
                best, n_best = tokens / seconds, n_rows
        return Counter(i for _, i in chances[:n_best])

    def _ask(self, n: int, asked: list[tuple[Draw, int]]) -> None:
        """Has the head guess for the next step: as many tokens for each as give the most tokens a second, of
        the step and the head. Where that is none, they pause.
        """
        records = [draw.sequence.drafter.of_head for draw, _ in asked]
        tokens, best, depth = float(n), n / self._step_s(n, 0), 0
        for k in range(1, max(most for _, most in asked) + 1):
            tokens += sum(record.chance**k for record in records)
            seconds = self._step_s(n, min(PAGE_SIZE, k * len(asked))) + self._guess_s(n, k * len(asked))
            if tokens / seconds > best:
                best, depth = tokens / seconds, k
        for (draw, most), record in zip(asked, records, strict=True):
            draw.n_guesses = min(most, depth)
            if not depth:
                record.miss()

    def _step_s(self, n: int, n_rows: int) -> float:
        seconds = self.steps.seconds(n, n_rows)
        return n + HOPE * n_rows if seconds is None else max(1e-9, seconds)

    def _guess_s(self, n: int, n_tokens: int) -> float:
        seconds = self.guesses.seconds(n, n_tokens)
        return HEAD * self._step_s(n, 0) * n_tokens / n if seconds is None else seconds

    def count(self, sequence: Sequence, n_drafted: int, n_accepted: int) -> None:
        """Takes what became of a sequence's draft."""
        self.drafted.update(str(1 + i) for i in range(n_drafted))
        self.accepted.update(str(1 + i) for i in range(n_accepted))
        sequence.drafter.used.observe(n_drafted, n_accepted)

    def observe(self, step: Step, seconds: float, guess_s: float) -> None:
        """Learns what a step took, if it was one of decodes, and what of that the head did."""
        if not step.chunks[-1].is_decode:
            return
        n, n_guesses = len(step.chunks), sum(draw.n_guesses for draw in step.draws)
        n_rows = step.n_tokens - n
        self._n_plain = 0 if n_rows or n_guesses else self._n_plain + 1
        if self._n_plain % N_TIMES < 2:  # of plain ones in a row some are enough
            self.steps.observe(n, n_rows, seconds - guess_s)
        if n_guesses:
            self.guesses.observe(n, n_guesses, guess_s)
