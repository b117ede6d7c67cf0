"""Decides which ids the next token of a constrained sequence may have.

Such a sequence is a thought, then forced ids, then text of a grammar; and it never contains a bad word.

The grammar engine is llguidance. A few threads do the slow work beside the step: they compile grammars, take
drawn tokens and make the next masks. They share only two queues with the engine's thread. All tokens of one
step are one job, which the library spreads over threads of its own, so Python's lock changes hands twice a
step, not twice a sequence. A sequence without its mask sits the step out. The library makes its view of the
vocabulary once, which takes seconds where it is large: beside the loading of the weights.

A guide depends on the drawn tokens only: a sequence that is preempted or computed again finds it as it was.
"""

from __future__ import annotations

import copy
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from queue import Empty, PriorityQueue, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from deltic.engine.messages import Constraint
from deltic.engine.step import Rule, Sequence
from deltic.engine.turns import NamespaceShares, Turns
from deltic.machine import be_nice

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

N_WORKERS = 4
"""Number of masks' jobs done side by side. Slow ones hold up the others only when there are as many."""
LONG_GRAMMAR = 20_000
"""Characters of a grammar that may take a second to compile: a thread of low priority is for such."""
N_MASK_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""Threads of the library that make the masks of a job."""
SLOW_S, SLOW_EACH_S = 0.005, 0.0005
"""Seconds of a job, and more for each guide, beyond which one of its guides is slow: each then has its next
job to itself. Of a guide alone the processor's time counts, as on a busy machine all take longer.
"""
N_ALONE = 100
"""Number of jobs that a slow guide has to itself, the slow one included."""
HERE_S = 0.001
"""Seconds of a step for masks that the engine's thread makes, as waking another costs more than a few."""
SWITCH_S = 0.0002
"""Seconds that Python (by default 0.005) lets a thread keep the lock while another waits, with workers."""
LONGEST_WAIT_S, LONGEST_SHARE = 0.001, 0.1
"""The longest time that a step waits for missing masks, in seconds and in steps: the longer of both."""
POLL_S = 0.0001
"""Seconds between two looks of a waiting step whether the device has finished."""
LONGEST_CLOSE_S = 3.0
"""Seconds that `close` waits for the threads. Python crashes if it ends while one is in the library."""
AHEAD_S = 0.002
"""Seconds in which the engine's thread makes masks for the draft of one sequence."""
STACK_BYTES = 16_000_000
"""Stack of a worker: that of the server's thread which compiled the grammar before."""
N_KEPT = 32
"""Compiled grammars that are kept: an agent sends the same schema with every request."""

Words = np.ndarray
"""int32 [ceil(n_ids / 32)]: bit id % 32 of word id // 32 says whether the id may be drawn."""


class Lexicon:
    """The ids that a request allows anywhere in its answers, and those that would complete a bad word."""

    __slots__ = ("_allowed", "_bad", "n_before")

    def __init__(self, constraint: Constraint, n_ids: int) -> None:
        bits = np.zeros(-(-n_ids // 32) * 32, np.uint8)
        given = np.unpackbits(np.frombuffer(constraint.allowed, np.uint8), bitorder="little", count=n_ids)
        bits[:n_ids] = given if constraint.allowed else 1
        self._bad: dict[int, list[tuple[list[int], int]]] = {}
        """Keyed by the last id before the bad one: all ids before it, and the bad one."""
        for *before, last in constraint.bad_ids:
            if before:
                self._bad.setdefault(before[-1], []).append((before, last))
            else:
                bits[last] = 0
        self._allowed = np.packbits(bits, bitorder="little").view(np.int32)
        self.n_before = max(map(len, constraint.bad_ids), default=1)
        """Number of the ids drawn last that `narrow` needs, at most."""

    def narrow(self, words: Words | None, drawn: list[int]) -> Words:
        """The part of a mask (None: all ids) that is allowed after these ids."""
        words = self._allowed if words is None else words & self._allowed
        for before, last in self._bad.get(drawn[-1], ()) if drawn else ():
            if drawn[-len(before) :] == before:
                words = words.copy() if words is self._allowed else words
                words.view(np.uint32)[last // 32] &= ~np.uint32(1 << last % 32)
        return words


class Guide:
    """The position of one sequence in its constraint.

    Only the engine's thread reads it, and within a step the runner's, but for what `is_busy` guards.
    """

    def __init__(self, sequence: Sequence, constraint: Constraint, n_ids: int, lexicon: Lexicon | None = None) -> None:
        """lexicon: the request's, if it says what may be drawn anywhere."""
        self.sequence, self.constraint, self._n_ids, self._lexicon = sequence, constraint, n_ids, lexicon
        self._drawn: list[int] = []  # last, as far as the lexicon is to know them
        self.error = ""
        self.is_busy = False
        """True while a worker has the guide: it owns `matcher`, `words`, `is_satisfied` and `error` then."""
        self.is_late = False
        """True if a step has waited for its mask in vain."""
        self.is_satisfied = False
        """True if nothing but the end may follow in the grammar."""
        self.n_alone = 0
        """Number of further jobs that it has to itself, as it is slow or suspected to be."""
        self.matcher: LLMatcher | None = None
        self.words: Words | None = None
        self._mask: Words | None = None
        self._thinks = constraint.think_end_id is not None
        self._n_thought = 0
        self._forced: list[int] = []  # the last comes first
        if self._thinks and constraint.think_budget == 0:
            self._close()

    def _close(self) -> None:
        """Ends the thought with ids of our own."""
        self._thinks = False
        self._force((*self.constraint.close_ids, *self.constraint.begin_ids))

    def _force(self, ids: tuple[int, ...]) -> None:
        self._forced = list(reversed(ids))
        self._mask = None

    @property
    def is_ready(self) -> bool:
        """True if a token may be drawn now."""
        return self._thinks or bool(self._forced) or not self.is_busy

    @property
    def is_over(self) -> bool:
        """True if the answer ends here, without an end token."""
        return not (self._thinks or self._forced or self.is_busy) and self.is_satisfied

    @property
    def mask(self) -> Words | None:
        """The ids that may be drawn; None: all."""
        if not self._forced:
            words = None if self._thinks else self.words
            return words if self._lexicon is None else self._lexicon.narrow(words, self._drawn)
        if self._mask is None:
            words = np.zeros(-(-self._n_ids // 32), np.uint32)
            words[self._forced[-1] // 32] = 1 << self._forced[-1] % 32
            self._mask = words.view(np.int32)  # whole: several threads of a runner may read it
        return self._mask

    def leaves_any(self, banned: Iterable[int]) -> bool:
        """Returns whether any id other than these may be drawn."""
        mask = self.mask
        if mask is None:
            return True
        words = mask.view(np.uint32).copy()
        for id in banned:
            words[id // 32] &= ~np.uint32(1 << id % 32)
        return bool(words.any())

    @property
    def bans_end(self) -> bool:
        """True if end tokens are forbidden, because a grammar must follow the thought."""
        return self._thinks and bool(self.constraint.grammar)

    @property
    def next_is_free(self) -> bool:
        """True if the token after the next has no mask, unless the next is think_end_id."""
        c = self.constraint
        if self._lexicon is not None:
            return False
        if self._thinks:
            return c.think_budget is None or self._n_thought + 1 < c.think_budget
        return not self._forced and not c.grammar

    def forked(self) -> Guide:
        """A copy that `advance` moves, with the same matcher."""
        fork = copy.copy(self)
        fork._forced = self._forced[:]
        return fork

    def behind(self, tokens: Iterable[int]) -> Rule:
        """The rule behind these tokens, which were not taken, without a grammar that had to take them."""
        fork = self.forked()
        if any([fork.advance(token) for token in tokens]) or self.is_busy:
            fork.words = None
        return Rule.of(fork)

    def forced(self, most: int) -> list[int]:
        """Returns up to `most` ids that must come next, or that the grammar leaves as the only text."""
        if self._thinks:
            return []
        if self._forced:
            return self._forced[: -most - 1 : -1]
        return [] if self.is_busy or self.matcher is None or self.n_alone else self.matcher.compute_ff_tokens()[:most]

    def advance(self, token: int) -> bool:
        """Takes a drawn token. Returns whether the grammar must take it, too."""
        if self._lexicon is not None:
            self._drawn = [*self._drawn, token][-self._lexicon.n_before :]
        if self._thinks:
            self._n_thought += 1
            if token == self.constraint.think_end_id:
                self._thinks = False
                self._force(self.constraint.begin_ids)
            elif self._n_thought == self.constraint.think_budget:
                self._close()
        elif self._forced:
            self._forced.pop()
            self._mask = None
        else:
            return bool(self.constraint.grammar)
        return False


class VocabularyView(NamedTuple):
    """A vocabulary as the library has it."""

    tokenizer: LLTokenizer
    executor: LLExecutor
    foreign_end: int | None
    """The end id of the tokenizer that random weights borrow: not their own."""


class Vocabulary:
    """The ids of a tokenizer as the library sees them: made once, by whichever thread asks first."""

    def __init__(self, tokenizer_json: Callable[[], str]) -> None:
        """tokenizer_json: gives the text of the tokenizer.json."""
        self._tokenizer_json = tokenizer_json
        self._lock = threading.Lock()
        self._made: tuple[tuple[int, list[int]], VocabularyView] | None = None

    def begin(self, ids: Callable[[], tuple[int, Iterable[int]]]) -> None:
        """Starts to make the view, in a thread. ids: gives how many may be drawn, and which end a text."""

        def make() -> None:
            with suppress(Exception):  # who needs it hears what is wrong
                n_ids, eos = ids()
                self.view(n_ids, _ends(n_ids, eos))

        threading.Thread(target=make, name="vocabulary").start()  # no daemon: Python would crash at its end

    def view(self, n_ids: int, eos: list[int]) -> VocabularyView:
        """Raises ValueError."""
        with self._lock:
            if self._made is None or self._made[0] != (n_ids, eos):
                self._made = (n_ids, eos), self._make(n_ids, eos)
            return self._made[1]

    def _make(self, n_ids: int, eos: list[int]) -> VocabularyView:
        import llguidance  # few engines need it

        executor = llguidance.LLExecutor(N_MASK_THREADS)
        try:
            sealed, specials = _sealed(self._tokenizer_json())
        except OSError as error:
            raise ValueError(f"{error.filename}, which it needs, cannot be read: {error.strerror}") from None
        try:
            return VocabularyView(llguidance.LLTokenizer(sealed, n_vocab=n_ids, eos_token=eos), executor, None)
        except ValueError:
            if not specials:
                raise
            # Their first is the end of a text, which no grammar names.
            tokenizer = llguidance.LLTokenizer(sealed, n_vocab=n_ids, eos_token=specials[:1])
            return VocabularyView(tokenizer, executor, specials[0])


def _ends(n_ids: int, eos: Iterable[int]) -> list[int]:
    """Sorts the ids that end a text, without those that cannot be drawn."""
    return sorted({id for id in eos if id < n_ids})


class Guides:
    """The guides of an engine, and the threads that work for them."""

    def __init__(
        self, n_ids: int, ends: Iterable[int], vocabulary: Vocabulary | None, is_busy: Callable[[], bool] | None = None
    ) -> None:
        """n_ids: ids that may be drawn. is_busy: whether the device computes ahead, so waiting is free."""
        self.n_ids = n_ids
        self.n_busy = 0
        """Number of guides that workers have, or have finished but that were not collected."""
        self.has_tokenizer, self._vocabulary = vocabulary is not None, vocabulary
        self._is_busy = is_busy or (lambda: False)
        self._eos = _ends(n_ids, ends)
        self._only_eos = np.zeros(-(-n_ids // 32), np.uint32)
        for id in self._eos:
            self._only_eos[id // 32] |= np.uint32(1 << id % 32)
        self._todo: PriorityQueue[tuple[int, int, tuple[list[Guide], list[list[int]]] | None]] = PriorityQueue()
        """Jobs, by turn and arrival. Tenants take turns with those of slow guides; all others go first."""
        self._mask_turns = Turns()
        self._n_jobs = 0
        self._starts: list[PriorityQueue[tuple[int, int, list[Guide] | None]]] = [PriorityQueue(), PriorityQueue()]
        """Guides whose grammar is to be compiled, by turn and arrival; of long grammars in the second."""
        self._turns, self._n_starts = Turns(), 0
        self._done: SimpleQueue[list[Guide]] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._drew: dict[Guide, list[int]] = {}
        """Guides whose sequences drew in this step, and the tokens of each."""
        self._compiled: NamespaceShares[tuple[LLMatcher, Words, bool]] = NamespaceShares(N_KEPT)  # by grammar

    # The engine's thread.

    def prepare(self) -> None:
        """Has the vocabulary's view made before the first grammar needs it. Takes seconds if nobody began."""
        if self.has_tokenizer:
            with suppress(Exception):  # the first grammar will say what is wrong
                self._view()

    def open(self, sequences: list[Sequence]) -> None:
        """Gives guides to the sequences of one request, if it is constrained."""
        constraint = sequences[0].request.params.constraint
        if constraint is None:
            return
        is_lexical = constraint.allowed or constraint.bad_ids
        lexicon = Lexicon(constraint, self.n_ids) if is_lexical else None
        guides = [Guide(sequence, constraint, self.n_ids, lexicon) for sequence in sequences]
        for sequence, guide in zip(sequences, guides, strict=True):
            sequence.guide = guide
        if constraint.grammar:
            self._give(guides, [])

    def advance(self, sequence: Sequence, token: int) -> None:
        """Has a sequence's guide take the token that it drew. The next `give` starts to make its mask."""
        guide = sequence.guide
        if isinstance(guide, Guide) and guide.advance(token):
            guide.is_busy = True
            self._drew.setdefault(guide, []).append(token)

    def ahead(self, guide: Guide, draft: list[int]) -> tuple[list[int], list[Rule]]:
        """Cuts a draft to what may be drawn, and gives the rules of the token behind each part of it. It ends
        in front of a token that is not allowed or ends the answer, where a grammar that a worker has would
        follow, and where masks take too long. The guide must be ready.
        """
        kept, rules, fork = list[int](), [Rule.of(guide)], guide.forked()
        deadline, n_taken = time.perf_counter() + AHEAD_S, 0
        matcher = guide.matcher
        for token in draft:
            if token in self._eos or not rules[-1].allows(token) or guide.n_alone or time.perf_counter() > deadline:
                break
            takes = fork.advance(token)
            if not fork.is_ready:
                break
            if takes and matcher is not None:
                n_taken += 1
                words = self._empty(1)
                if not matcher.consume_token(token) or self._fill([matcher], words)[0]:
                    break
                fork.words = words[0]
            kept.append(token)
            rules.append(Rule.of(fork))
        if n_taken and matcher is not None:
            matcher.rollback(n_taken)
        return kept, rules

    def give(self) -> None:
        """Starts the masks behind a step's tokens: the workers, or this thread while the device is busy."""
        slow = [([guide], [tokens]) for guide, tokens in self._drew.items() if guide.n_alone]
        guides = [guide for guide in self._drew if not guide.n_alone]
        tokens = [self._drew[guide] for guide in guides]
        if guides and self._is_busy():
            deadline, words = time.perf_counter() + HERE_S, self._empty(len(guides))
            n = 0
            while n < len(guides) and time.perf_counter() < deadline:
                self.n_busy += 1
                guides[n].is_late = False
                self._do_timed(guides[n : n + 1], tokens[n : n + 1], words[n : n + 1])
                n += 1
            guides, tokens = guides[n:], tokens[n:]
        for job in ((guides, tokens), *slow):
            if job[0]:
                self._give(*job)
        self._drew = {}

    def _empty(self, n: int) -> Words:
        return np.empty((n, -(-self.n_ids // 32)), np.int32)

    def _give(self, guides: list[Guide], tokens: list[list[int]]) -> None:
        """tokens: of each; none where their grammar begins. A slow guide has a job of its own."""
        if not self._threads:  # the compiler recurses along chains of rules
            threading.stack_size(max(threading.stack_size(), STACK_BYTES))
            sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
            compilers: list[Callable[[], None]] = [partial(self._compile_all, starts) for starts in self._starts]
            for work in (*[self._work] * N_WORKERS, *compilers):
                self._threads.append(threading.Thread(target=work, name="grammar", daemon=True))
                self._threads[-1].start()
        for guide in guides:
            guide.is_busy, guide.is_late = True, False
        self.n_busy += len(guides)
        if tokens:
            turns, self._n_jobs = self._mask_turns, self._n_jobs + 1
            turn = turns.give(guides[0].sequence.request.tenant, 1) if guides[0].n_alone else turns.now
            self._todo.put((turn, self._n_jobs, (guides, tokens)))
            return
        self._n_starts += 1
        size = len(guides[0].constraint.grammar)
        turn = self._turns.give(guides[0].sequence.request.tenant, size)
        self._starts[size > LONG_GRAMMAR].put((turn, self._n_starts, guides))

    def collect(self, decodes: list[Sequence], step_s: float) -> list[Guide]:
        """Takes back finished guides. Returns those that failed, or whose answer is over.

        Waits once for each mask of `decodes`, but for guides that were slow alone: while the device computes
        ahead, and then the longer, the larger the share of decodes that would sit out step_s seconds.
        """
        if not self.n_busy:
            return []
        guides = [s.guide for s in decodes if isinstance(s.guide, Guide)]
        late = [guide for guide in guides if not (guide.is_ready or guide.is_late or guide.n_alone > 1)]
        ended: list[Guide] = []
        longest = min(max(LONGEST_WAIT_S, LONGEST_SHARE * step_s), step_s * len(late) / max(1, len(decodes)))
        deadline = time.monotonic() + longest
        while self.n_busy:
            left = 0.0
            if any(guide.is_busy for guide in late):
                left = deadline - time.monotonic()
                if left < POLL_S and self._is_busy():
                    left, deadline = POLL_S, time.monotonic() + longest
            try:
                guides = self._done.get(timeout=left) if left > 0 else self._done.get_nowait()
            except Empty:
                if left > 0:
                    continue
                break
            self.n_busy -= len(guides)
            for guide in guides:
                guide.is_busy = False
                if guide.error or guide.is_over:
                    ended.append(guide)
        for guide in late:
            guide.is_late = guide.is_busy
        return ended

    def wait(self, timeout_s: float) -> None:
        """Waits until a worker has finished a job, for a bounded time."""
        if self.n_busy:
            with suppress(Empty):
                self._done.put(self._done.get(timeout=timeout_s))

    def close(self) -> None:
        """Ends the threads once they have finished their jobs. No other call may follow."""
        if threading.current_thread() in self._threads:
            # The collector closes an LLM there, and may have come while the thread held a queue's lock.
            threading.Thread(target=self.close, name="end of grammars", daemon=False).start()
            return
        for n in range(len(self._threads)):
            self._todo.put((-1, -n, None))
        for starts in self._starts:
            starts.put((-1, 0, None))
        deadline = time.monotonic() + LONGEST_CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads = []

    # The workers.

    def _work(self) -> None:
        while True:
            turn, _, job = self._todo.get()
            if job is None:
                return
            self._mask_turns.now = max(turn, self._mask_turns.now)
            self._do_timed(*job)
            del job  # it may be long until the next

    def _compile_all(self, starts: PriorityQueue[tuple[int, int, list[Guide] | None]]) -> None:
        if starts is self._starts[1]:
            be_nice()
        while True:
            turn, _, guides = starts.get()
            if guides is None:
                return
            self._turns.now = turn
            self._do_timed(guides, [])
            del guides

    def _do_timed(self, guides: list[Guide], tokens: list[list[int]], words: Words | None = None) -> None:
        """Does a job, and notes slow guides. words: where the masks go."""
        clock = time.thread_time if len(guides) == 1 else time.perf_counter  # several: other threads
        start = clock()
        try:
            if any(guide.sequence.finish_reason is None for guide in guides):  # else nobody waits for it
                self._do(guides, tokens, words)
        except BaseException as error:  # panics of the library, too: they cost these sequences only
            for guide in guides:
                guide.error = guide.error or f"the grammar could not be followed ({error})"
        is_slow = bool(tokens) and clock() - start > SLOW_S + SLOW_EACH_S * len(guides)
        for guide in guides:
            guide.n_alone = (N_ALONE if len(guides) == 1 else 1) if is_slow else max(0, guide.n_alone - 1)
        self._done.put(guides)

    def _do(self, guides: list[Guide], tokens: list[list[int]], words: Words | None = None) -> None:
        """tokens: those that the guides' sequences drew. Without any, the grammar of all of them begins."""
        if not tokens:
            self._begin(guides)
            return
        end = self._view().foreign_end
        if end is not None:
            tokens = [[end if token in self._eos else token for token in drawn] for drawn in tokens]
        matchers = [guide.matcher for guide in guides if guide.matcher is not None]
        if len(guides) > 1 and all(len(drawn) == 1 for drawn in tokens):
            pairs = [(m, token) for m, (token,) in zip(matchers, tokens, strict=True)]
            taken = self._view().executor.consume_token_par(pairs)
        else:
            taken = [matcher.consume_tokens(drawn) for matcher, drawn in zip(matchers, tokens, strict=True)]
        words = self._empty(len(guides)) if words is None else words
        satisfied = self._fill(matchers, words)
        for i, (guide, drawn) in enumerate(zip(guides, tokens, strict=True)):
            guide.words, guide.is_satisfied = words[i], satisfied[i]
            guide.error = _error_of(matchers[i])
            if not taken[i]:
                guide.error = f"the grammar could not take {drawn}; {guide.error}"

    def _begin(self, guides: list[Guide]) -> None:
        namespace, grammar = guides[0].sequence.request.namespace, guides[0].constraint.grammar
        compiled = self._compiled.get(namespace, grammar)
        if compiled is None:
            compiled = self._compile(grammar)
            self._compiled.put(namespace, grammar, compiled)
        matcher, words, is_satisfied = compiled
        for guide in guides:
            guide.error = _error_of(matcher)
            guide.matcher, guide.words, guide.is_satisfied = matcher.deep_copy(), words, is_satisfied

    def _compile(self, grammar: str) -> tuple[LLMatcher, Words, bool]:
        """A matcher that is only ever copied, its first mask, and whether only the end may follow."""
        import llguidance  # few engines need it

        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._view().tokenizer, grammar, log_level=0, limits=limits)
        words = self._empty(1)
        return matcher, words[0], self._fill([matcher], words)[0]

    def _fill(self, matchers: list[LLMatcher], words: Words) -> list[bool]:
        """Writes masks, int32 [matchers, words]. Returns for each matcher whether only the end may follow."""
        satisfied = [bool(m.is_stopped()) and not m.is_error() for m in matchers]
        live = [(m, i) for i, m in enumerate(matchers) if not m.is_stopped()]  # what failed is stopped, too
        if len(live) == 1 == len(matchers):
            live[0][0].unsafe_compute_mask_ptr(words.ctypes.data, words[0].nbytes)
        elif live:
            self._view().executor.unsafe_compute_mask_ptr(live, words.ctypes.data, words[0].nbytes, len(words))
        end, eos = self._view().foreign_end, self._only_eos.view(np.int32)
        for matcher, i in live:
            if not matcher.is_accepting():
                continue
            row = words[i]
            if end is not None and row[end // 32] >> end % 32 & 1:
                row[end // 32] ^= np.uint32(1 << end % 32).view(np.int32)
                row |= eos
            # The first ids are the bytes: nearly whatever may follow, one of them may.
            satisfied[i] = np.array_equal(row[:64], eos[:64]) and np.array_equal(row, eos)
        return satisfied

    def _view(self) -> VocabularyView:
        """Raises ValueError."""
        assert self._vocabulary is not None
        return self._vocabulary.view(self.n_ids, self._eos)


def _sealed(text: str) -> tuple[str, list[int]]:
    """A tokenizer.json without special literals in text, and the ids of its special tokens.

    Where a grammar leaves only one text, the library takes the tokens that the tokenizer makes of it, which
    must have its bytes. So nothing is normalised, and added tokens have names that nobody can write.
    """
    fields = msgspec.json.decode(text)
    fields["normalizer"] = None
    secret, names = secrets.token_hex(16), {}
    for token in fields.get("added_tokens") or ():
        names[token["content"]] = token["content"] = f"<|{secret} {token['id']}|>"
    vocabulary = fields["model"]["vocab"]
    for name in names.keys() & vocabulary.keys():
        vocabulary[names[name]] = vocabulary.pop(name)
    specials = [token["id"] for token in fields.get("added_tokens") or () if token.get("special")]
    return msgspec.json.encode(fields).decode(), specials


def _error_of(matcher: LLMatcher) -> str:
    """The fault of a matcher, as a message; "": it has none."""
    error: str = matcher.get_error()
    if error.startswith("NoExtension"):
        return "no text can match the grammar from here on"
    return f"the grammar cannot be followed: {error}" if error else ""
