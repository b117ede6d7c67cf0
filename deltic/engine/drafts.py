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

A GPU starts the next decode before the host has read this one (runtime/gpu/runner.py). It cannot where that
decode has a draft. So it does as long as none is in sight, and a draft comes a step later than it could.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from deltic.engine.guides import Guide, Guides
from deltic.engine.messages import EngineInfo
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

MAX_PAUSE, MAX_FIRST_PAUSE = 256, 32
"""Steps for which a proposer pauses, at most; and of a new sequence. Powers of two."""

MOST_MISSES = MAX_PAUSE.bit_length() - 1
"""Misses with which a proposer pauses longest."""

N_PAUSES = 6
"""Lengths of the pause of all drafts, each twice the one before, up to MAX_PAUSE."""

KEPT = 0.93
"""Decay of a record with each draft."""

A_TRY = 0.5
"""Chance that the first token behind a pause is believed to have."""

KEPT_TIMES = 0.95
"""Decay of the statistics of times with each new one."""

KEPT_AHEAD, N_VALID = 0.8, 512
"""Decay of the known time of steps that run ahead, and the number of steps for which it is valid."""

KEPT_WORTH, N_TRIED = 0.95, 6
"""Decay of the worth of steps that do not run ahead, and the number of them before it may cause a pause."""

BELIEF = 0.1
"""Weight of what is believed of times beside what is known: that of one step that ran this many tokens more,
or fewer, than others, squared.
"""

SURE = 2.0
"""Weight of one time of just so many tokens beside the line through all of them."""

MOST_LATE = 2.0
"""Factor by which a time may exceed what is expected; what is above says nothing of the work."""

OWN = 4.0
"""Cost of a sequence's own row, in rows of its draft, until that is known."""

HEAD = 0.1
"""Cost of a guess of the head, in steps without drafts, until that is known."""


def n_guessable(sequence: Sequence, n_drawn: int) -> int:
    """Counts the tokens that a draft head may guess behind n_drawn ones that the sequence does not have yet:
    the rows of all guesses but the last need a place in its pages.
    """
    last = len(sequence.tokens) + n_drawn - 1
    return 1 + (PAGE_SIZE - last % PAGE_SIZE if last < len(sequence.pages) * PAGE_SIZE else 0)


def n_drafted_at(start: int) -> int:
    """The most tokens of a draft behind the token at `start`: a window never reaches the end of a page, so
    that the state is whole there, where it may become a checkpoint. At its last token less than none.
    """
    return PAGE_SIZE - 2 - start % PAGE_SIZE


@dataclass(slots=True, eq=False)
class Repeats:
    """An index of the runs of a sequence's tokens: by three tokens the place behind them, and from each place
    the one before it with the same three. A token takes some 150 bytes.
    """

    first: int = 0
    """The first place that is indexed; 0: none is yet."""
    newest: dict[tuple[int, ...], int] = field(default_factory=dict)
    before: array[int] = field(default_factory=lambda: array("i"))

    def follow(self, tokens: Ids[int], most: int) -> list[int]:
        """Returns up to `most` tokens that followed the longest run with which `tokens` end, when it came
        before; no more than the run has. None where the run is shorter than LEAST, nor while a long text is
        being indexed.
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
    """Statistics of a proposer's tokens, the latest most: the chance that the next is right."""

    n_right: float = 1.5
    n_seen: float = 2.0
    """Tokens that were right, and those and the first wrong ones. They begin as a guess."""
    n_misses: int = 0
    """Drafts in a row that were not worth their rows, also when they were tried again."""

    @property
    def chance(self) -> float:
        """Chance of a token to be right, if those before are."""
        return max(self.n_right / self.n_seen, A_TRY if self.n_misses else 0.0)

    def is_due(self, step: int, last: int) -> bool:
        """Returns whether the proposer is due in the step of this number: after each miss half as often. All
        sequences try in the same steps, so that others have none. A sequence that had no part in such a step
        (its mask was late, or a prefill ran) tries in its next one.

        last: the step in which its sequence was asked before.
        """
        return not self.n_misses or step >> self.n_misses > last >> self.n_misses

    def begun(self) -> Record:
        """Makes the record of a new sequence, of which no more is known. It waits for its first try as those
        did that were in vain last.
        """
        return Record(2.0 * self.n_right / self.n_seen, 2.0, min(self.n_misses, MAX_FIRST_PAUSE.bit_length() - 1))

    def chances(self, whose: int, n: int) -> list[tuple[float, int]]:
        """Chances of a draft's n tokens to be right, each with `whose` draft it is. A try is one token."""
        return [(self.chance ** (i + 1), whose) for i in range(min(n, 1) if self.n_misses else n)]

    def observe(self, n_drafted: int, n_accepted: int) -> None:
        """Learns what became of a draft."""
        self.n_right = KEPT * self.n_right + n_accepted
        self.n_seen = KEPT * self.n_seen + n_accepted + (n_accepted < n_drafted)
        if n_accepted:
            self.n_misses = 0
        elif self.n_misses:  # that was the try
            self.miss()

    def miss(self) -> None:
        """Notes that a draft was not worth its rows: they pause, longer each time."""
        self.n_misses = min(self.n_misses + 1, MOST_MISSES)


@dataclass(slots=True, eq=False)
class Drafter:
    """The proposers of one sequence, what they propose, and how far they are to be trusted."""

    repeats: Repeats = field(default_factory=Repeats)
    guesses: list[int] = field(default_factory=list)
    """Guesses of the draft head, behind the last token."""
    of_repeats: Record = field(default_factory=Record)
    of_head: Record = field(default_factory=Record)
    of_grammar: Record = field(default_factory=lambda: Record(19.0, 20.0))
    used: Record = field(default_factory=Record)
    """The record of whoever proposed the next draft; the head's where there is none."""
    asked: int = 0
    """The latest step for which the proposers were asked, and what was to be tried was."""

    def begun(self, step: int) -> Drafter:
        """Makes the drafter of a new sequence, which comes behind the step of this number."""
        return Drafter(of_repeats=self.of_repeats.begun(), of_head=self.of_head.begun(), asked=step)

    def observe(self, n_drafted: int, n_accepted: int, known: Drafter) -> None:
        """Learns what became of a draft. known: with the records of all sequences, which learn it, too."""
        for record, of_all in ((self.of_repeats, known.of_repeats), (self.of_head, known.of_head)):
            if record is self.used:
                of_all.n_misses = max(of_all.n_misses, min(record.n_misses, 1))  # it was tried
                of_all.observe(n_drafted, n_accepted)
        self.used.observe(n_drafted, n_accepted)

    def propose(self, tokens: Ids[int], most: int, step: int, forced: Ids[int] = ()) -> list[int]:
        """Proposes a draft of up to `most` tokens for the step of this number: that of which more are
        expected to be right. What the head has guessed, it guessed when it was due.

        forced: what a grammar leaves as the only text.
        """
        likeliest, best, self.used = list[int](), 0.0, self.of_head
        for record in (self.of_grammar, self.of_head, self.of_repeats):
            if record is self.of_head:
                draft = self.guesses[:most]
            elif not record.is_due(step, self.asked):
                continue
            elif record is self.of_repeats:
                draft = self.repeats.follow(tokens, most)
            else:
                draft = list(forced[:most])
            expected = sum(record.chance ** (i + 1) for i in range(len(draft)))
            if expected > best:
                likeliest, best, self.used = draft, expected, record
        return likeliest


@dataclass(slots=True, eq=False)
class _Known:
    """Statistics of the times of n sequences."""

    sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Sums of 1, x, y, x^2 and x y, where x is the number of tokens over n, and y the seconds that took."""
    n_seen: int = 0
    just: dict[int, tuple[float, float, int]] = field(default_factory=dict)
    """Weight and mean of the times of just so many tokens, and n_seen at the last, by their number."""


class Times:
    """Estimates of a time by the number of sequences and that of the tokens guessed for them: what it took
    with just so many, the latest most, as far as that is known; else a line through all of it.
    """

    def __init__(self, own: float) -> None:
        """own: what a sequence is believed to cost beside a token, until that is known."""
        self._own = own
        self._known: dict[int, _Known] = {}

    def observe(self, n: int, n_tokens: int, seconds: float) -> None:
        """Learns what n sequences with so many tokens took."""
        known = self._known.setdefault(n, _Known())
        if known.n_seen:
            begin, each = self._line(known, n)  # beyond that another program had the processor
            seconds = min(seconds, MOST_LATE * (begin + each * n_tokens))
        x, y = n_tokens / n, seconds
        known.sums = [KEPT_TIMES * old + new for old, new in zip(known.sums, (1.0, x, y, x * x, x * y), strict=True)]
        known.n_seen += 1
        weight, mean, seen = known.just.get(n_tokens, (0.0, 0.0, 0))
        weight = weight * KEPT_TIMES ** (known.n_seen - seen)
        known.just[n_tokens] = weight + 1.0, (weight * mean + y) / (weight + 1.0), known.n_seen

    def seconds(self, n: int, most: int) -> list[float]:
        """Seconds with 0 to `most` tokens. Empty: nothing is known of so many sequences."""
        if (known := self._known.get(n)) is None:
            return []
        begin, each = self._line(known, n)
        estimates = [begin + each * i for i in range(most + 1)]
        for n_tokens, (weight, mean, seen) in known.just.items():
            if n_tokens <= most:
                sure = SURE * weight * KEPT_TIMES ** (known.n_seen - seen)
                estimates[n_tokens] = (estimates[n_tokens] + sure * mean) / (1.0 + sure)
        return estimates

    def _line(self, known: _Known, n: int) -> tuple[float, float]:
        """Fits the seconds without a token, and those of each. However steep the line is through a few
        samples that another program held up, without a token it takes a sixteenth of what is believed at the
        least.
        """
        total, *sums = known.sums
        x, y, xx, xy = (each / total for each in sums)
        believed = y / (self._own + x) if self._own + x else 0.0
        slope = max(0.0, (xy - x * y + BELIEF / total * believed) / (xx - x * x + BELIEF / total))
        if x:
            slope = min(slope, (y - believed * self._own / 16) / x)
        return max(0.0, y - slope * x), slope / n


class Drafting:
    """Decides how long the drafts of a step are: as many rows as make its tokens cheapest."""

    def __init__(self, max_drafts: int, has_head: bool, guides: Guides | None, runs_ahead: bool = False) -> None:
        """max_drafts: tokens of a draft. has_head, runs_ahead: whether the runner has a draft head, and
        whether it may run ahead.
        """
        self.max_drafts, self.has_head, self.guides, self.runs_ahead = max_drafts, has_head, guides, runs_ahead
        self.steps, self.guesses = Times(OWN), Times(0.0)
        """Times of steps, by the rows of their drafts; and of the head, not in them, by its depth."""
        self.known = Drafter()
        """A drafter with the records of all sequences."""
        self.drafted, self.accepted = (Counter({str(1 + i): 0 for i in range(max_drafts)}) for _ in range(2))
        """Counts of tokens by their place in the draft, as in Stats."""
        self._n_steps = self._n_plain = 0
        self._ahead_s: dict[int, tuple[float, int]] = {}
        """Seconds of a step that ran ahead, as did the next one, and the number of the step that took them;
        by the number of its sequences.
        """
        self._is_ahead = self._is_late = False
        """True if this step ran ahead, as may the next one; true if it came too late for drafts."""
        self._spent_s = self._plain_s = 0.0
        """Seconds of the latest steps that did not run ahead; and those of their tokens if they had."""
        self._n_tried, self._n_pauses, self._paused_until, self._n_right = 0, 0, 0, 0
        self._seen: set[tuple[int, bool]] = set()
        """Steps with drafts that have run before, by their tokens, and by whether the head guessed."""

    @classmethod
    def of(cls, info: EngineInfo, guides: Guides | None) -> Drafting | None:
        """Makes that of an engine; None: it has no drafts."""
        runs_ahead = info.n_lookahead > 0
        return cls(info.max_drafts, info.has_draft_head, guides, runs_ahead) if info.max_drafts else None

    def plan(self, step: Step) -> None:
        """Gives a step of decodes drafts, says what the draft head guesses for the next one, and whether
        that may run ahead. One that ran ahead or has prefills gets none: then what would be drafted in the
        next one says whether that may run ahead.
        """
        self._n_steps += 1
        ran_ahead = any(draw.sequence.runs_ahead for draw in step.draws)
        is_late = ran_ahead or not all(chunk.is_decode for chunk in step.chunks)
        if is_late and not self.runs_ahead:
            return
        # Sequences of the next decode: those that compute again what is lost do not draw.
        n = len(step.draws) + sum(chunk.is_decode for chunk in step.chunks)
        n -= sum(step.chunks[draw.chunk].is_decode for draw in step.draws)
        drafts: list[list[int]] = []
        chances: list[tuple[float, int]] = []
        asked: list[tuple[int, Record, int]] = []
        at = self._n_steps + is_late
        in_sight, is_quiet = False, at < self._paused_until or self._is_probe(n)
        for draw in step.draws if not is_quiet else []:
            chunk, sequence = step.chunks[draw.chunk], draw.sequence
            drafter = sequence.drafter = sequence.drafter or self.known.begun(at - 1)
            # At the end of a page, too, what counts is the step behind this one, if it may run ahead.
            is_next = is_late or (self.runs_ahead and n_drafted_at(len(sequence.tokens) - 1) <= 0)
            start = len(sequence.tokens) - 1 + is_next
            n_left = sequence.request.params.max_tokens - sequence.n_generated - 1 - is_next
            most = min(self.max_drafts, n_left, n_drafted_at(start))
            deepest = min(self.max_drafts, n_left - 1, n_drafted_at(start + 1))
            head, draft = drafter.of_head, list[int]()
            if most > 0:
                draft = self._propose(sequence, chunk, most, at, is_next)
            else:
                drafter.used = head
            if draft and is_next and not is_late:
                draft, in_sight = [], True
            chances += drafter.used.chances(len(drafts), len(draft))
            is_tried = head.n_misses and draft  # what comes of it is to be seen first
            is_due = self.has_head and drafter.used is head and head.is_due(at, drafter.asked)
            if is_due and not is_tried and deepest > 0:
                asked.append((len(drafts), head, deepest))
            drafts.append(draft)
        if chances or asked:
            in_sight |= self._share(step, n, drafts, chances, asked, is_late)
        for draw in step.draws:
            chunk, drafter = step.chunks[draw.chunk], draw.sequence.drafter
            chunk.rules = chunk.rules[: 1 + len(chunk.drafts)]
            draw.sequence.runs_ahead = self.runs_ahead and not in_sight
            has_room = n_drafted_at(len(draw.sequence.tokens) - 1 + is_late) > 1  # for drafts and guesses
            if drafter is not None and has_room and not (is_late and in_sight):
                drafter.asked = at
        step.runs_ahead, self._is_ahead, self._is_late = not in_sight, ran_ahead and not in_sight, is_late

    def _is_probe(self, n: int) -> bool:
        """Returns whether to measure what a step of n sequences takes that runs ahead."""
        return self.runs_ahead and self._n_steps - self._ahead_s.get(n, (0.0, -N_VALID))[1] >= N_VALID

    def _share(
        self,
        step: Step,
        n: int,
        drafts: list[list[int]],
        chances: list[tuple[float, int]],
        asked: list[tuple[int, Record, int]],
        is_late: bool,
    ) -> bool:
        """Gives the rows that are worth it to the drafts of a decode of n sequences, and asks for guesses;
        where it is late, nothing. Returns whether any rows or guesses are worth it.
        """
        seconds = self._step_s(n)
        chances.sort(reverse=True)
        n_taken = Counter(i for _, i in chances[: self._n_worth(chances, seconds, n)[1]])
        n_guesses = self._n_asked(asked, seconds, n) if asked else Counter[int]()
        missed = {step.draws[i].sequence.drafter.used for i, draft in enumerate(drafts) if draft and not n_taken[i]}
        missed |= {head for i, head, _ in asked if not n_guesses[i]}
        in_sight = bool(n_taken or n_guesses)
        for record in missed if not (is_late and in_sight) else ():  # else they are asked for this step again
            record.miss()
        if not is_late:
            for i, (draw, draft) in enumerate(zip(step.draws, drafts, strict=True)):
                chunk = step.chunks[draw.chunk]
                chunk.drafts = draft[: n_taken[i]]
                chunk.length += len(chunk.drafts)
                draw.n_guesses = n_guesses[i] if n_drafted_at(chunk.start + 1) > 0 else 0
        return in_sight

    def _propose(self, sequence: Sequence, chunk: Chunk, most: int, step: int, is_next: bool) -> list[int]:
        """Proposes a draft for the step of this number, as far as the sequence's guide allows it. is_next:
        this step draws a token before it: the first that the grammar leaves, if that drafts.
        """
        drafter, guide = sequence.drafter, sequence.guide
        if not isinstance(guide, Guide) or self.guides is None:
            free: list[int] = drafter.propose(sequence.tokens, most, step)
            return free
        forced = guide.forced(most + is_next)
        draft = drafter.propose(sequence.tokens, most, step, forced[is_next:])
        if not draft:
            return []
        drawn = forced[:is_next] if drafter.used is drafter.of_grammar else []
        allowed, chunk.rules = self.guides.ahead(guide, drawn + draft)
        if len(allowed) < len(drawn + draft):
            drafter.used.n_seen += 1
        return allowed[len(drawn) :]

    def _n_worth(self, chances: list[tuple[float, int]], seconds: list[float], n: int) -> tuple[float, int]:
        """Finds the most tokens a second, and with how many of the likeliest drafted ones.

        chances: of each token, and whose it is, the likeliest first. seconds: of a step with so many of them.
        """
        tokens, best, n_best = float(n), n / seconds[0], 0
        for n_rows, (chance, _) in enumerate(chances[: len(seconds) - 1], 1):
            tokens += chance
            if tokens > best * seconds[n_rows]:
                best, n_best = tokens / seconds[n_rows], n_rows
        return best, n_best

    def _n_asked(self, asked: list[tuple[int, Record, int]], seconds: list[float], n: int) -> Counter[int]:
        """Counts the tokens that the head guesses for the next step, by sequence: so deep that they give the
        most tokens a second, of the step and the head, which takes as long for one sequence as for some.

        asked: sequences, their records, and how many tokens they may have.
        """
        deepest = max(most for _, _, most in asked)
        guess_s = self.guesses.seconds(n, deepest) or [HEAD * seconds[0] * k for k in range(deepest + 1)]
        each = [record.chances(i, most) for i, record, most in asked]
        best, likeliest = n / seconds[0], list[tuple[float, int]]()
        for k in range(1, deepest + 1):
            chances = sorted((chance for chances_of_one in each for chance in chances_of_one[:k]), reverse=True)
            tokens_s, n_rows = self._n_worth(chances, [s + guess_s[k] for s in seconds], n)
            if tokens_s <= best:
                break  # deeper is not better, either
            best, likeliest = tokens_s, chances[:n_rows]
        return Counter(i for _, i in likeliest)

    def _step_s(self, n: int) -> list[float]:
        """Time of a step, by the number of rows that are drafts; in any unit where nothing is known."""
        most = min(self.max_drafts * n, PAGE_SIZE)
        plain_s = self._ahead_s.get(n, (1.0, 0))[0]
        return self.steps.seconds(n, most) or [plain_s * (1.0 + i / (OWN * n)) for i in range(most + 1)]

    def count(self, sequence: Sequence, n_drafted: int, n_accepted: int) -> None:
        """Takes what became of a sequence's draft."""
        self.drafted.update(str(1 + i) for i in range(n_drafted))
        self.accepted.update(str(1 + i) for i in range(n_accepted))
        self._n_right += n_accepted
        sequence.drafter.observe(n_drafted, n_accepted, self.known)

    def observe(self, step: Step, seconds: float, guess_s: float) -> None:
        """Learns what a step took, if it was one of decodes, and what of that the head did."""
        n_right, self._n_right = self._n_right, 0
        if not step.chunks[-1].is_decode:
            return
        n, deepest = len(step.chunks), max((draw.n_guesses for draw in step.draws), default=0)
        n_rows = step.n_tokens - n
        self._n_plain = 0 if n_rows or deepest else self._n_plain + 1
        if self._is_ahead:
            known_s = min(seconds, self._ahead_s.get(n, (seconds, 0))[0])  # one too low is soon put right
            seconds = min(seconds, MOST_LATE * known_s)
            seen = self._n_steps - (0 if n in self._ahead_s else N_VALID)  # the first may have taken longer
            self._ahead_s[n] = known_s + (1.0 - KEPT_AHEAD) * (seconds - known_s), seen
            return
        kind = step.n_tokens, deepest > 0
        if self.runs_ahead and (n_rows or deepest) and kind not in self._seen:
            self._seen.add(kind)  # it may have taken longer: what it runs was put in place first
            return
        if not self._is_late and self._n_plain % 8 < 2:  # of plain ones in a row some are enough
            self.steps.observe(n, n_rows, seconds - guess_s)
        if deepest:
            self.guesses.observe(n, deepest, guess_s)
        if n in self._ahead_s:
            self._weigh(seconds, self._ahead_s[n][0] * (1.0 + n_right / max(1, len(step.draws))))

    def _weigh(self, spent_s: float, plain_s: float) -> None:
        """Weighs what a step took that did not run ahead against what its tokens would have taken if it had.
        All drafts pause where the latest steps were not worth it, each time twice as long.

        What a step takes that runs ahead was seen in others, mostly long before: it follows what is shorter
        at once, and what is longer, as contexts grow, slowly. So drafts that gain less than steps differ may
        pause. Then steps run ahead, and what is known of them is put right.
        """
        spent_s = min(spent_s, MOST_LATE * plain_s)  # what held up those steps counts no more, either
        self._spent_s, self._plain_s = KEPT_WORTH * self._spent_s + spent_s, KEPT_WORTH * self._plain_s + plain_s
        self._n_tried += 1
        if self._n_tried < N_TRIED:
            return
        if self._plain_s > self._spent_s:
            self._n_pauses = 0
            return
        self._n_pauses = min(self._n_pauses + 1, N_PAUSES)
        self._paused_until = self._n_steps + (MAX_PAUSE >> N_PAUSES - self._n_pauses)
        self._spent_s, self._plain_s, self._n_tried = 0.0, 0.0, 0
