"""Drafts: tokens that may follow, guessed where a text repeats itself.

A step runs a sequence's last token, and behind it a draft: tokens that a proposer guesses. Each row's logits
are those of a plain decode, bit for bit, and so is what is drawn from them. As long as what was drawn is what
was guessed, the next row is right, too. So a draft changes how many tokens a step gives, and nothing else.

`Repeats` guesses by the longest earlier run of tokens that ends as the text does now: edits, quotes and
results of tools repeat what is in the prompt (prompt lookup decoding, Saxena 2023). It needs no model.

Where a grammar leaves one text only, that is the draft.

A draft head (MTP), where the checkpoint has one, guesses from the model's own hidden state. The runner has
it: behind each draw it gives as many tokens as the step before asked for.

Which of them a sequence believes, and how far, follows from what came where they had guessed, also where the
guess was not run. Of all tokens that are proposed in a step, the likeliest ones run, as many as make a token
cheapest by what steps with so many rows took. Where none is worth its row, steps are plain ones. Guesses of
repeats and grammars cost no step anything. The head's do, so it is tried less and less often where they are
not worth it, by all sequences in the same step.

A GPU starts the next decode before the host has read this one (runtime/gpu/runner.py). It cannot where that
decode has a draft. So drafts are compared with steps that ran ahead, and come a step later than they could.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from deltic.engine.cost import FIT_S, made_up_step
from deltic.engine.guides import Guide, Guides
from deltic.engine.messages import EngineInfo
from deltic.engine.step import Chunk, Draw, Sequence, Step, StepResult
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

HEAD, GRAMMAR, REPEATS = "head", "grammar", ("repeats of 3", "of 4", "of 8", "of 16")
"""Names of proposers. Repeats are as good as the run is long that came before: by its least tokens."""

MAX_PAUSE = 256
"""Steps between two tries of a head whose guesses are not worth it, at most."""

FREE_TRIES = 4
"""Steps in which the head guesses for some sequences, of which one has a guess for each."""

KEPT = 0.98
"""Decay of a record with each token that is seen."""

LEAST_SEEN = 2.0
"""Tokens that a record counts for at the least: those of a new sequence, of which only others are known."""

KEPT_TIMES = 0.95
"""Decay of the statistics of times with each new one."""

KEPT_AHEAD, N_VALID = 0.8, 512
"""Decay of the known time of steps that run ahead, and the number of steps for which it is valid."""

BELIEF = 0.1
"""Weight of what is believed of times beside what is known: that of one step that ran this many tokens more,
or fewer, than others, squared.
"""

SURE = 2.0
"""Weight of one time of just so many tokens beside the line through all of them."""

MOST_LATE = 2.0
"""Factor by which a time may exceed what is expected; what is above says nothing of the work."""

N_FITTED = (1, 8, 64)
"""Numbers of sequences whose steps are timed at the start."""

OWN = 4.0
"""Cost of a sequence's own row, in rows of its draft, until that is known."""

HEAD_S = 0.1
"""Cost of a guess of the head, in steps without drafts, until that is known."""


def n_guessable(sequence: Sequence, n_drawn: int, n_beside: int = -1) -> int:
    """Counts the tokens that may be guessed behind n_drawn ones that the sequence does not have yet: rows of
    guesses need a place in its pages, and one token at least is drawn behind them.

    n_beside: rows of a block beside those of its guesses; -1: a head, whose last guess needs no row.
    """
    last = len(sequence.tokens) + n_drawn - 1
    n_places = PAGE_SIZE - last % PAGE_SIZE if last < len(sequence.pages) * PAGE_SIZE else 0
    n_left = sequence.request.params.max_tokens - sequence.n_generated - n_drawn - 1
    return max(0, min(n_places - n_beside, n_left))


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
    length: int = 0
    """Tokens of the run that was followed last."""

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
        self.length = length
        draft: list[int] = []
        for at in range(best, best + min(most, length)):  # behind the end the draft goes on with itself
            draft.append(tokens[at] if at < n else draft[at - n])
        return draft


@dataclass(slots=True, eq=False)
class Record:
    """Statistics of a proposer's tokens, the latest most: the chance that the next is right."""

    n_right: float = 1.5
    n_seen: float = LEAST_SEEN
    """Tokens that were right, and those and the first wrong ones. They begin as a guess."""

    @property
    def chance(self) -> float:
        """Chance of a token to be right, if those before are."""
        return self.n_right / self.n_seen

    def observe(self, n_right: int, is_wrong: bool) -> None:
        """Learns what became of a draft: n_right tokens came as guessed, and then another one."""
        n_seen = n_right + is_wrong
        self.n_right = KEPT**n_seen * self.n_right + n_right
        self.n_seen = KEPT**n_seen * self.n_seen + n_seen

    def doubt(self) -> None:
        """Believes half of what was seen, as that was some time ago."""
        part = max(0.5, LEAST_SEEN / self.n_seen) if self.n_seen > LEAST_SEEN else 1.0
        self.n_right, self.n_seen = part * self.n_right, part * self.n_seen

    def begun(self) -> Record:
        """Makes the record of a new sequence, of which no more is known."""
        return Record(LEAST_SEEN * self.chance, LEAST_SEEN)


@dataclass(slots=True, eq=False)
class Drafter:
    """The proposers of one sequence, what they propose, and how far they are to be trusted."""

    repeats: Repeats = field(default_factory=Repeats)
    guesses: list[int] = field(default_factory=list)
    """Guesses of the draft head, behind the last token."""
    records: dict[str, Record] = field(
        default_factory=lambda: {GRAMMAR: Record(19.0, 20.0)} | {name: Record() for name in (HEAD, *REPEATS)}
    )
    used: str = HEAD
    """The proposer of the draft that was proposed last."""
    proposed: dict[str, list[int]] = field(default_factory=dict)
    """Tokens that each has proposed behind the first n_before ones."""
    n_before: int = 0

    def begun(self) -> Drafter:
        """Makes the drafter of a new sequence."""
        return Drafter(records={name: record.begun() for name, record in self.records.items()})

    def learn(self, tokens: Ids[int], known: Drafter) -> None:
        """Learns what came where something was proposed, whether it was run or not. known: with the records
        of all sequences, which learn it, too.
        """
        for name, draft in self.proposed.items():
            came = tokens[self.n_before : self.n_before + len(draft)]
            n_right = 0
            while n_right < len(came) and came[n_right] == draft[n_right]:
                n_right += 1
            for record in (self.records[name], known.records[name]) if len(came) else ():
                record.observe(n_right, n_right < len(came))
        self.proposed = {}

    def propose(self, tokens: Ids[int], most: int, forced: Ids[int] = ()) -> list[int]:
        """Proposes a draft of up to `most` tokens: that of which more are expected to be right.

        forced: what a grammar leaves as the only text.
        """
        repeated = self.repeats.follow(tokens, most)
        name = REPEATS[self.repeats.length.bit_length() - 2] if repeated else REPEATS[0]
        drafts = {GRAMMAR: list(forced[:most]), HEAD: self.guesses[:most], name: repeated}
        self.proposed, self.n_before = {name: draft for name, draft in drafts.items() if draft}, len(tokens)
        likeliest, best, self.used = list[int](), 0.0, HEAD
        for name, draft in self.proposed.items():
            expected = sum(self.chances(name, len(draft)))
            if expected > best:
                likeliest, best, self.used = draft, expected, name
        return likeliest

    def chances(self, name: str, n: int) -> list[float]:
        """Chances of each of a draft's n tokens to be right."""
        chance = self.records[name].chance
        return [chance ** (i + 1) for i in range(n)]


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
        """Seconds with 0 to `most` tokens: of n sequences, or of the number nearest to it of which any are
        known. Empty: nothing is known of half to twice as many.
        """
        if n not in self._known:
            nearest = min(self._known, key=lambda other: max(n / other, other / n), default=4 * n)
            n = nearest if max(n / nearest, nearest / n) <= 2 else n
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


@dataclass(slots=True, eq=False)
class _Wish:
    """Tokens that may be drafted for one sequence."""

    draw: Draw
    chunk: Chunk
    drafter: Drafter
    draft: list[int]
    n_guessable: int
    """Tokens that the head may guess for the step behind."""
    is_next: bool
    """True if the draft is not for this step, but for the one behind it."""


class Drafting:
    """Decides how long the drafts of a step are: as many rows as make its tokens cheapest."""

    def __init__(
        self, max_drafts: int, has_head: bool, guides: Guides | None, runs_ahead: bool = False, block: int = 0
    ) -> None:
        """max_drafts: tokens of a draft. has_head, runs_ahead: whether the runner has a draft head, and
        whether it may run ahead. block: tokens that the head guesses at once; 0: it guesses one by one.
        """
        self.max_drafts, self.has_head, self.guides, self.runs_ahead = max_drafts, has_head, guides, runs_ahead
        self.block = min(block, max_drafts)
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
        self._tries: dict[int, tuple[int, int]] = {}
        """The step in which the head is tried next, and how long it pauses behind that, where its guesses
        are not worth it; by the number of sequences, in powers of two.
        """
        self._seen: set[tuple[int, bool]] = set()
        """Steps with drafts that have run before, by their tokens, and by whether the head guessed."""

    @classmethod
    def of(cls, info: EngineInfo, guides: Guides | None) -> Drafting | None:
        """Makes that of an engine; None: it has no drafts."""
        if not info.max_drafts:
            return None
        return cls(info.max_drafts, info.has_draft_head, guides, info.n_lookahead > 0, info.draft_block)

    def fit(self, run: Callable[[Step], StepResult], info: EngineInfo) -> None:
        """Times decodes with drafts of `run`, a runner's that nobody uses yet, for FIT_S beyond the first, so
        that it is known before the first request what rows and guesses cost. They write to the first pages
        and state slots.
        """
        deadline = time.perf_counter() + FIT_S
        for n in N_FITTED:
            most = min(self.max_drafts, PAGE_SIZE // n)
            for n_drafts in sorted({0, 1, most // 2, most}):
                if n > min(info.max_num_seqs, info.n_pages):
                    return
                step = made_up_step(n, 0, 1, 0, info.vocab_size, n_drafts, n_drafts if self.has_head else 0)
                for _ in range(2):  # the first may take longer: what it runs is put in place
                    begin = time.perf_counter()
                    result = run(step)
                    seconds = time.perf_counter() - begin
                    if begin + 2 * seconds > deadline:
                        break
                for chunk in step.chunks:
                    chunk.sequence.finish_reason = "length"
                if begin + 2 * seconds > deadline:
                    return
                self.steps.observe(n, n * n_drafts, seconds - result.guess_s)
                if result.guess_s:
                    self.guesses.observe(n, n_drafts, result.guess_s)

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
        in_sight = False
        if not self._is_probe(n):
            wishes = [self._wish(step, draw, is_late) for draw in step.draws]
            in_sight = self._share(n, wishes, is_late)
        for draw in step.draws:
            draw.sequence.runs_ahead = self.runs_ahead and not in_sight
        step.runs_ahead, self._is_ahead, self._is_late = not in_sight, ran_ahead and not in_sight, is_late

    def _is_probe(self, n: int) -> bool:
        """Returns whether to measure what a step of n sequences takes that runs ahead."""
        return self.runs_ahead and self._n_steps - self._ahead_s.get(n, (0.0, -N_VALID))[1] >= N_VALID

    def _wish(self, step: Step, draw: Draw, is_late: bool) -> _Wish:
        """Finds what may be drafted for a sequence in this step, or behind it where that is late."""
        chunk, sequence = step.chunks[draw.chunk], draw.sequence
        drafter = sequence.drafter = sequence.drafter or self.known.begun()
        drafter.learn(sequence.tokens, self.known)
        # At the end of a page, too, what counts is the step behind this one, if it may run ahead.
        is_next = is_late or (self.runs_ahead and n_drafted_at(len(sequence.tokens) - 1) <= 0)
        start = len(sequence.tokens) - 1 + is_next
        n_left = sequence.request.params.max_tokens - sequence.n_generated - 1 - is_next
        most = min(self.max_drafts, n_left, n_drafted_at(start))
        drafter.used, draft = HEAD, list[int]()
        if most > 0:
            draft = self._propose(sequence, most, is_next)
        deepest = min(self.block or self.max_drafts, n_left - 1, n_drafted_at(start + 1))
        return _Wish(draw, chunk, drafter, draft, deepest, is_next)

    def _propose(self, sequence: Sequence, most: int, is_next: bool) -> list[int]:
        """Proposes a draft. is_next: this step draws a token before it: the first that the grammar leaves, if
        that drafts.
        """
        drafter: Drafter = sequence.drafter
        guide = sequence.guide
        if not isinstance(guide, Guide) or self.guides is None:
            return drafter.propose(sequence.tokens, most)
        forced = guide.forced(most + is_next)
        draft = drafter.propose(sequence.tokens, most, forced[is_next:])
        if forced:
            drafter.proposed[GRAMMAR] = forced
        return draft

    def _share(self, n: int, wishes: list[_Wish], is_late: bool) -> bool:
        """Gives the rows that are worth it to the drafts of a decode of n sequences, and asks for guesses;
        where it is late, nothing. Returns whether any rows or guesses are worth it.
        """
        chances = [
            (chance, i)
            for i, wish in enumerate(wishes)
            for chance in wish.drafter.chances(wish.drafter.used, len(wish.draft))
        ]
        next_try, pause = self._tries.get(n.bit_length(), (0, 1))
        at = self._n_steps + is_late
        may_ask = self.has_head and at >= next_try
        asked = [(i, w) for i, w in enumerate(wishes) if may_ask and w.n_guessable > 0 and w.drafter.used == HEAD]
        if not chances and not asked:
            return False
        seconds = self._step_s(n)
        chances.sort(reverse=True)
        n_taken = Counter(i for _, i in chances[: self._n_worth(chances, seconds, n)[1]])
        n_guesses = self._n_asked(asked, seconds, n) if asked else Counter[int]()
        is_try, tried = bool(asked) and not n_guesses, list[Record]()
        if is_try or (n_guesses and at % FREE_TRIES == 0):  # one guess for all takes as long as one for some
            tried = [wish.drafter.records[HEAD] for i, wish in asked if not n_guesses[i]]
            n_guesses |= Counter(i for i, _ in asked)
        if is_late:
            return bool(n_taken or n_guesses)
        for i, wish in enumerate(wishes):
            chunk = wish.chunk
            if not wish.is_next:
                chunk.drafts, guide = wish.draft[: n_taken[i]], wish.draw.sequence.guide
                if n_taken[i] and isinstance(guide, Guide) and self.guides is not None:
                    chunk.drafts, chunk.rules = self.guides.ahead(guide, wish.draft[: n_taken[i]])
                chunk.length += len(chunk.drafts)
            wish.draw.n_guesses = n_guesses[i] if n_drafted_at(chunk.start + 1) > 0 else 0
        if any(wish.draw.n_guesses for wish in wishes):
            self._tries[n.bit_length()] = (at + pause, min(2 * pause, MAX_PAUSE)) if is_try else (0, max(1, pause // 2))
            for record in [*tried, *([self.known.records[HEAD]] if is_try else [])]:
                record.doubt()
        return bool(n_taken or n_guesses)

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

    def _n_asked(self, asked: list[tuple[int, _Wish]], seconds: list[float], n: int) -> Counter[int]:
        """Counts the tokens that the head guesses for the next step, by sequence: so deep that they give the
        most tokens a second, of the step and the head, which takes as long for one sequence as for some.
        """
        deepest = max(wish.n_guessable for _, wish in asked)
        guess_s = self.guesses.seconds(n, deepest)
        guess_s = guess_s or [HEAD_S * seconds[0] * (3 if self.block else k) for k in range(deepest + 1)]
        each = [[(chance, i) for chance in wish.drafter.chances(HEAD, wish.n_guessable)] for i, wish in asked]
        best, likeliest = n / seconds[0], list[tuple[float, int]]()
        for k in range(1, deepest + 1):
            chances = sorted((chance for chances_of_one in each for chance in chances_of_one[:k]), reverse=True)
            tokens_s, n_rows = self._n_worth(chances, [s + guess_s[k] for s in seconds], n)
            if tokens_s > best:
                best, likeliest = tokens_s, chances[:n_rows]
            elif not self.block:
                break  # deeper is not better, either
        return Counter(i for _, i in likeliest)

    def _step_s(self, n: int) -> list[float]:
        """Time of a step, by the number of rows that are drafts; in any unit where nothing is known. One
        without any may run ahead.
        """
        most = min(self.max_drafts * n, PAGE_SIZE)
        plain_s = self._ahead_s.get(n, (0.0, 0))[0]
        seconds = self.steps.seconds(n, most)
        seconds = seconds or [(plain_s or 1.0) * (1.0 + i / (OWN * n)) for i in range(most + 1)]
        return [min(plain_s or seconds[0], seconds[0]), *seconds[1:]]

    def count(self, n_drafted: int, n_accepted: int) -> None:
        """Counts what became of a sequence's draft."""
        self.drafted.update(str(1 + i) for i in range(n_drafted))
        self.accepted.update(str(1 + i) for i in range(n_accepted))

    def observe(self, step: Step, seconds: float, guess_s: float) -> None:
        """Learns what a step took, if it was one of decodes, and what of that the head did."""
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
