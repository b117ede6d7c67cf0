"""A runner without a model, which keeps the engine's books honest.

Its pages hold the tokens that were written to them and its state slots a hash of the tokens they saw, so what it
draws comes through the memory that the scheduler handed out: a page given to two owners, a state slot not copied, a
prefix that is another's, a chunk run twice or left out is an AssertionError in the step that meets it, not a wrong
word much later. As a GPU, whose prefill and decode differ in bits, it marks what decode wrote, so that a prefix which holds some of
it, a prompt that was decoded or an answer that was prefilled is noticed as well; and it runs ahead. FakeTiers is host memory and disk below that, as slow and as unreliable as it is told to be.

Run as a program, this is an engine process with that runner: `python tests/fakes.py [--step-ms MS] [--hold FOLDER] LAUNCH`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from deltic.config import ConfigError, EngineConfig
from deltic.engine.cache.directory import Entry
from deltic.engine.cache.disk import Search
from deltic.engine.cache.tiers import Move
from deltic.engine.cache.tree import Kind
from deltic.engine.events import ExpertStats, ReplayStats
from deltic.engine.messages import EngineInfo, SamplingParams, TokenLogprob
from deltic.engine.step import Chunk, Draw, Progress, Sequence, Step, StepResult
from deltic.host import process
from deltic.ops.geometry import PAGE_SIZE

VOCAB_SIZE = 1000
EOS = 0
POISON = 13
"""A step with this token in a chunk raises."""

START_STATE = 17
MASK = (1 << 61) - 1

DECODED = 1 << 20
"""Added to a token in a page that decode wrote, where that is not what prefill would have written."""

NAN = -3
"""In a page or a state: what is not finite. What is computed of it is not either, and nothing can be drawn."""

UNITS_PER_STATE = 2
"""A state takes as much memory as so many pages."""


def fold(state: int, token: int) -> int:
    """The recurrent state after one more token."""
    return (state * 6364136223846793005 + token + 1442695040888963407) & MASK


def fold_decoded(state: int, token: int) -> int:
    """The same where decode differs from prefill: above the bits that are drawn from, it counts the tokens that were decoded."""
    return fold(state & MASK, token) | (state >> 61) + 1 << 61


def draw(state: int, seed: int, params: SamplingParams, n_generated: int) -> int:
    """The token drawn in `state`; eos only when it may come, POISON never."""
    token = (state & MASK ^ (seed * 0x9E3779B97F4A7C15) & MASK) % 999983 % VOCAB_SIZE
    if token == POISON or (token == EOS and n_generated < params.min_tokens):
        return token + 1
    return token


def guided(token: int, guide: Any) -> int:
    """The token, or where a constraint does not let it through, another one; -1 where there is none."""
    if guide is None:
        return token
    if guide.mask is None:
        return token + 1 if token == EOS and guide.bans_end else token
    allowed = np.flatnonzero(np.unpackbits(guide.mask.view(np.uint8), bitorder="little"))
    return token if token in allowed else int(allowed[token % len(allowed)]) if len(allowed) else -1


def expected_tokens(prompt_ids: list[int], params: SamplingParams, seed: int | None = None) -> list[int]:
    """What a sequence with this seed generates, up to and including the token that ends it."""
    state = START_STATE
    for token in prompt_ids:
        state = fold(state, token)
    tokens: list[int] = []
    while len(tokens) < params.max_tokens:
        token = draw(state, params.seed or 0 if seed is None else seed, params, len(tokens))
        tokens.append(token)
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            break
        state = fold(state, token)
    return tokens


class FakeRunner:
    """Draws tokens that depend on the sequence's tokens and its seed alone."""

    pictures = None

    def __init__(
        self,
        *,
        n_pages: int = 256,
        max_num_seqs: int = 8,
        max_model_len: int = 4096,
        max_step_tokens: int = 512,
        n_slots: int | None = None,
        max_logit_rows: int | None = None,
        prefix_cache: bool = True,
        step_s: float = 0.0,
        gpu: bool = False,
        max_prefill_seqs: int = 0,
        n_lookahead: int = 0,
        max_drafts: int = 0,
        head: Random | None = None,
        rng: Random | None = None,
    ) -> None:
        """gpu: prefill and decode differ, and prefills take whole blocks. head: there is a draft head, whose guesses are
        wrong now and then. rng: says which of the decodes run ahead; without it
        all do for which there are pages."""
        self.n_pages = n_pages
        self.n_slots = max_num_seqs + 8 if n_slots is None else n_slots
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.max_step_tokens = max_step_tokens
        self.max_logit_rows = max_logit_rows or max_num_seqs + PAGE_SIZE
        self.step_s = step_s
        self.tiers: Any = None
        self.adapters: Any = None
        self.replays: ReplayStats | None = None
        self.experts: ExpertStats | None = None
        self.n_steps = 0
        self.n_tokens_run = 0
        self.info = EngineInfo(
            model_name="fake",
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS],
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            n_pages=n_pages,
            n_slots=self.n_slots,
            device="none",
            prefix_cache=prefix_cache,
            page_bytes=1,
            state_bytes=UNITS_PER_STATE,
            canonical_decode=not gpu,
            n_lookahead=n_lookahead,
            max_drafts=max_drafts,
            has_draft_head=head is not None,
            block_size=PAGE_SIZE if gpu else 1,
            max_prefill_seqs=max_prefill_seqs,
        )
        self.gpu = gpu
        self._rng, self._head = rng, head
        self._ahead: dict[Sequence, int] = {}
        """The position that a decode has computed which is to be asked for yet."""
        self.n_ran_ahead = self.n_replayed = self.n_dropped = 0
        self.pages = np.full((n_pages, PAGE_SIZE), -1, np.int32)
        """The tokens of each page."""
        self.states = [0] * self.n_slots
        # The page table, kept as the real one is: a row is written anew when another sequence has it, or says so.
        self._page_table = np.zeros((max_num_seqs, n_pages), np.int32)
        self._holder: list[tuple[Sequence, int] | None] = [None] * max_num_seqs
        self._n_pages_known = [0] * max_num_seqs
        self._truth: dict[Sequence, list[int]] = {}

    def is_busy(self) -> bool:
        return False

    def step(self, step: Step) -> StepResult:
        """Runs the chunks, the copies, the draws. Raises AssertionError for a step that breaks a promise."""
        self.n_steps += 1
        if self.step_s:
            time.sleep(self.step_s)
        self._check_limits(step)
        self._check_state_slots(step)
        self._drop_ahead(step)
        for chunk in step.chunks:
            self._check_start(chunk)
        if any(POISON in c.sequence.tokens[c.start : c.start + c.length] for c in step.chunks):
            for chunk in step.chunks:
                self._spoil(chunk)
            raise RuntimeError("poisoned token")
        for chunk in step.chunks:
            if self._ahead.pop(chunk.sequence, None) is None:
                self._run(chunk)
            else:
                assert not chunk.drafts, "it ran without them"
                assert not any(draw.n_guesses for draw in step.draws), "it cannot guess behind what ran ahead"
                guide = chunk.sequence.guide
                assert guide is None or guide.mask is None, "it drew ahead without its mask"
                self.n_tokens_run += 1
        for source, destination in step.slot_copies:
            self.states[destination] = self.states[source]
        for source, destination in step.page_copies:
            self.pages[destination] = self.pages[source]
        tokens, logprobs, guesses = [], [], []
        for drawn in step.draws:
            sequence, params, drafts = drawn.sequence, drawn.sequence.request.params, step.chunks[drawn.chunk].drafts
            state = self._check_memory(sequence, is_lazy=bool(drafts))
            row: list[int] = []
            for n_more, draft in enumerate([*drafts, -1]):
                token = -1
                if state != NAN:
                    rules = step.chunks[drawn.chunk].rules
                    rule = rules[n_more] if rules else sequence.guide
                    token = guided(draw(state, sequence.seed, params, sequence.n_generated + n_more), rule)
                row.append(token)
                if token != draft:
                    break
                state = fold(state, token)
            tokens.append(row)
            guesses.append([] if self._head is None else self._guess(drawn, fold(state, row[-1]), len(row)))
            n_top = params.logprobs
            logprobs.append(None if n_top is None else [self._logprob(token, n_top) for token in row])
        prompt_logprobs = {}
        for i, chunk in enumerate(step.chunks):
            if chunk.prompt_logprobs:
                n_top = chunk.sequence.request.params.prompt_logprobs or 0
                prompt_logprobs[i] = [self._logprob(token, n_top) for _, token in chunk.scored]
        for drawn, (token,) in (
            zip(step.draws, tokens, strict=True) if self.info.n_lookahead and step.runs_ahead else []
        ):
            guide = drawn.sequence.guide
            if guide is None or (guide.next_is_free and token != guide.constraint.think_end_id):
                self._run_ahead(drawn.sequence, token)
        return StepResult(tokens, logprobs, prompt_logprobs, guesses)

    def _guess(self, drawn: Draw, state: int, n_more: int) -> list[int]:
        """Behind what was drawn."""
        sequence, guesses = drawn.sequence, list[int]()
        while state != NAN and len(guesses) < drawn.n_guesses:
            token = draw(state, sequence.seed, sequence.request.params, sequence.n_generated + n_more + len(guesses))
            guesses.append(token if self._head and self._head.random() < 0.8 else 20)
            state = fold(state, guesses[-1])
        return guesses

    def _check_limits(self, step: Step) -> None:
        n_decodes = sum(c.is_decode for c in step.chunks)
        assert step.chunks
        if self.gpu:
            prefills = step.chunks[n_decodes:]
            assert not any(c.is_decode for c in prefills), "a decode behind a prefill"
            n_blocks = sum(-(-c.length // PAGE_SIZE) for c in prefills)
            assert n_decodes <= self.max_num_seqs and n_blocks * PAGE_SIZE <= self.max_step_tokens
            assert len(prefills) <= (self.info.max_prefill_seqs or len(prefills))
        else:
            assert step.n_tokens <= max(self.max_step_tokens, n_decodes + PAGE_SIZE)
        assert len(step.draws) <= self.max_num_seqs
        rows = {d.chunk for d in step.draws}
        n_rows = sum(len(c.logit_offsets(i in rows)) for i, c in enumerate(step.chunks))
        assert n_rows <= self.max_logit_rows, f"{n_rows} rows of logits"
        sequences = [id(c.sequence) for c in step.chunks]
        assert len(set(sequences)) == len(sequences), "a sequence has two chunks"
        batch_slots = [c.sequence.batch_slot for c in step.chunks]
        assert None not in batch_slots and len(set(batch_slots)) == len(batch_slots), (
            "two sequences have one batch slot"
        )

    def _check_state_slots(self, step: Step) -> None:
        """A state slot that is written has one writer in the step, and nobody who starts from it but that one."""
        written = [chunk.sequence.state_slot for chunk in step.chunks]
        written += [state_slot for chunk in step.chunks for _, state_slot in chunk.snapshots]
        written += [destination for _, destination in step.slot_copies]
        assert None not in written and len(set(written)) == len(written), "a state slot has two writers"
        read = {chunk.sequence.start_slot for chunk in step.chunks} - {None}
        assert not read & set(written), "a state slot that others start from is written"

    def _check_start(self, chunk: Chunk) -> None:
        """What a chunk builds on must be what its sequence's tokens say: context in the pages, state in the state slot."""
        sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.length
        name = f"{sequence.request.id}/{sequence.index}"
        assert (
            start == sequence.n_computed + sequence.n_window and chunk.n_redo == sequence.n_window and chunk.length > 0
        )
        if chunk.drafts:
            assert chunk.is_decode and start + 1 == len(sequence.tokens) and len(chunk.drafts) <= self.info.max_drafts
            assert start % PAGE_SIZE + chunk.length < PAGE_SIZE, "a window reaches the end of a page"
        elif not self.gpu:
            is_fork = sequence.branch is not None and end == sequence.n_shared - 1
            assert is_fork or end == len(sequence.tokens) or end % PAGE_SIZE == 0, "cut off the grid"
        elif start < sequence.n_prompt:
            assert start % PAGE_SIZE == 0 and end <= sequence.n_prompt, "not whole blocks of the prompt"
            assert end == sequence.n_prompt or end % PAGE_SIZE == 0, "cut off the grid"
        else:
            assert chunk.length == 1 and sequence.start_slot is None, "not a decode"
        n_done = start + (sequence in self._ahead)
        at = [n for n, _ in chunk.snapshots]
        assert at == sorted(set(at)) and all(0 < n < chunk.length and (start + n) % PAGE_SIZE == 0 for n in at)
        row = self._row(sequence)
        assert row.tolist() == sequence.pages, f"the page table of {name} is out of date"
        context = self.pages[row].ravel()[:n_done]
        right = context == self._content(sequence, 0, n_done)
        assert (right | (context == NAN)).all(), f"pages of {name} are not its own"
        state_slot = sequence.state_slot if sequence.start_slot is None else sequence.start_slot
        assert state_slot is not None
        if start:
            n_seen = n_done - chunk.n_redo
            assert self.states[state_slot] in (self._state_after(sequence, n_seen), NAN), f"state slot of {name} is off"

    def _row(self, sequence: Sequence) -> np.ndarray:
        """The sequence's row of the page table, brought up to date as the real one is."""
        batch_slot, holder = sequence.batch_slot, (sequence, sequence.pages_version)
        assert batch_slot is not None
        if self._holder[batch_slot] != holder:
            self._holder[batch_slot] = holder
            self._n_pages_known[batch_slot] = 0
        known, n_pages = self._n_pages_known[batch_slot], len(sequence.pages)
        if known < n_pages:
            self._page_table[batch_slot, known:n_pages] = sequence.pages[known:]
            self._n_pages_known[batch_slot] = n_pages
        return self._page_table[batch_slot, :n_pages]

    def _run(self, chunk: Chunk) -> None:
        sequence, end = chunk.sequence, chunk.start + chunk.length
        state = START_STATE
        if chunk.start:
            state_slot = sequence.state_slot if sequence.start_slot is None else sequence.start_slot
            assert state_slot is not None
            state = self.states[state_slot]
            if (self.pages[sequence.pages].ravel()[: chunk.start] == NAN).any():
                state = NAN
        is_spoilt = state == NAN
        step_on = fold_decoded if self.gpu and chunk.is_decode else fold
        drafts = [token + DECODED * self.gpu for token in chunk.drafts]
        content = [*self._content(sequence, chunk.start, end), *drafts]
        self._write(chunk, [NAN] * chunk.length if is_spoilt else content)
        snapshots = dict(chunk.snapshots)
        for token in sequence.tokens[chunk.start - chunk.n_redo : chunk.start]:
            state = state if is_spoilt else step_on(state, token)
        if chunk.drafts:
            end = chunk.start
        for n, token in enumerate(sequence.tokens[chunk.start : end], start=1):
            if not is_spoilt:
                state = step_on(state, token)
            if n in snapshots:
                self.states[snapshots[n]] = state
        assert sequence.state_slot is not None
        self.states[sequence.state_slot] = state
        self.n_tokens_run += chunk.length
        self.n_replayed += chunk.is_decode and end < len(sequence.tokens)

    def _drop_ahead(self, step: Step) -> None:
        """What was computed ahead for a sequence that starts over, or has ended, is of no use."""
        for chunk in step.chunks:
            if self._ahead.get(chunk.sequence, chunk.start) != chunk.start:
                assert chunk.start < chunk.sequence.n_prompt, "started over among generated tokens"
                del self._ahead[chunk.sequence]
                self.n_dropped += 1
        self._ahead = {s: n for s, n in self._ahead.items() if s.finish_reason is None}

    def _run_ahead(self, sequence: Sequence, token: int) -> None:
        """Decodes a token that the scheduler has not seen, in the memory that the sequence has now."""
        n_tokens = len(sequence.tokens)
        if token < 0:
            return
        if n_tokens >= len(sequence.pages) * PAGE_SIZE or (self._rng and self._rng.random() < 0.2):
            return
        self.pages[sequence.pages[n_tokens // PAGE_SIZE], n_tokens % PAGE_SIZE] = token + DECODED
        assert sequence.state_slot is not None
        if self.states[sequence.state_slot] != NAN:
            self.states[sequence.state_slot] = fold_decoded(self.states[sequence.state_slot], token)
        self._ahead[sequence] = n_tokens
        self.n_ran_ahead += 1

    def _spoil(self, chunk: Chunk) -> None:
        """A step that fails may leave anything in what it was to write."""
        self._write(chunk, [-2] * chunk.length)
        assert chunk.sequence.state_slot is not None
        for state_slot in [chunk.sequence.state_slot, *(state_slot for _, state_slot in chunk.snapshots)]:
            self.states[state_slot] = -2

    def _write(self, chunk: Chunk, tokens: Any) -> None:
        positions = np.arange(chunk.start, chunk.start + chunk.length)
        row = self._page_table[chunk.sequence.batch_slot]
        self.pages[row[positions // PAGE_SIZE], positions % PAGE_SIZE] = tokens

    def _check_memory(self, sequence: Sequence, is_lazy: bool = False) -> int:
        """The state of a sequence that draws, after comparing its memory with its tokens; NAN if anything of it is.
        is_lazy: that in its state slot lacks the last token."""
        assert sequence.state_slot is not None
        n_tokens = len(sequence.tokens)
        written = self.pages[sequence.pages].ravel()[:n_tokens]
        name = f"{sequence.request.id}/{sequence.index}"
        right, spoilt = written == self._content(sequence, 0, n_tokens), written == NAN
        assert (right | spoilt).all(), f"pages of {name} are not its own"
        state = self._state_after(sequence, n_tokens)
        kept = self._state_after(sequence, n_tokens - is_lazy)
        assert self.states[sequence.state_slot] in (kept, NAN), f"state slot of {name} is off"
        return NAN if spoilt.any() or self.states[sequence.state_slot] == NAN else state

    def _state_after(self, sequence: Sequence, n_tokens: int) -> int:
        """The state after the first n_tokens of a sequence, from its tokens alone."""
        if sequence not in self._truth:
            self._truth = {s: states for s, states in self._truth.items() if s.finish_reason is None}
        states = self._truth.setdefault(sequence, [START_STATE])
        for i in range(len(states) - 1, n_tokens):
            is_decoded = self.gpu and i >= sequence.n_prompt
            states.append((fold_decoded if is_decoded else fold)(states[-1], sequence.tokens[i]))
        return states[n_tokens]

    def _content(self, sequence: Sequence, start: int, end: int) -> Any:
        """What the pages of tokens start … end - 1 hold, from the sequence's tokens alone."""
        content = np.array(sequence.tokens[start:end])
        if self.gpu:
            content[max(0, sequence.n_prompt - start) :] += DECODED
        return content

    @staticmethod
    def _logprob(token: int, n_top: int) -> TokenLogprob:
        return TokenLogprob(token, -1.0, [(i, -1.0 - i) for i in range(n_top)])


@dataclass(slots=True)
class Saved:
    """An object on a FakeTiers' disk."""

    parent: bytes
    depth: int
    content: Any


@dataclass(slots=True)
class Ticket:
    """Moves that were asked for together, and how often `finished` is yet to be asked before they are done."""

    is_load: bool
    moves: list[Move]
    contents: list[Any]
    """What the source (or the destination, if that is the device) held when they were asked for."""
    n_polls: int


class FakeTiers:
    """Host memory and disk of a FakeRunner: what `deltic.engine.cache.tiers.Tiers` is to the real one.

    Moves take a random number of polls and fail at random, with `rng`. A buffer that is written or taken away while it is
    moved is an AssertionError when the move is done. The disk is a dict that outlives the object: a later one restores it.
    """

    def __init__(
        self, runner: FakeRunner, n_units: int, disk: dict[tuple[Kind, bytes], Saved] | None = None,
        disk_bytes: int = 1 << 20, rng: Random | None = None, p_failure: float = 0.0, n_most_polls: int = 4,
    ) -> None:  # fmt: skip
        """disk_bytes: of pages of 1 and states of UNITS_PER_STATE bytes. p_failure: of one move to or from the disk."""
        self.n_units = n_units
        self.can_save = self.takes_evicted = True
        self.units_per_state = UNITS_PER_STATE
        self.largest = {Kind.PAGE: 1, Kind.STATE: UNITS_PER_STATE}
        self.files = disk if disk is not None else {}
        self.disk = self if disk is not None else None
        self.directory = self
        self.disk_bytes = disk_bytes
        self.entries = [
            Entry(kind, key, saved.parent, saved.depth, 1 if kind is Kind.PAGE else UNITS_PER_STATE, 0.0)
            for (kind, key), saved in self.files.items()
        ]
        self.is_full = self.may_have_foreign = False
        self.may_delete = self.has_locks = True
        self.foreign_bytes = self.n_others = 0
        self.surveyed = None
        self.notices: list[str] = []
        self.read_bytes = {"host": 0, "disk": 0}
        self.written_bytes = {"host": 0, "disk": 0}
        self.n_damaged = self.n_moved = 0
        self.p_failure = p_failure
        self._runner = runner
        self._rng = rng or Random(0)
        self._n_most_polls = n_most_polls
        self._units: list[Any] = [None] * n_units
        self._pending: dict[int, Ticket] = {}
        self._n_tickets = 0

    @property
    def n_pending(self) -> int:
        return len(self._pending)

    def survey(self) -> None: ...

    def follow(self) -> None: ...

    def search(self, search: Search) -> int:
        return self._ask(Ticket(True, [], [search], self._delay()))

    def _look(self, search: Search) -> None:
        keys = search.keys
        while search.n_pages < len(keys) and (Kind.PAGE, keys[search.n_pages]) in self.files:
            search.n_pages += 1
        states = [n for n in range(search.n_usable + 1, search.n_pages + 1) if (Kind.STATE, keys[n - 1]) in self.files]
        search.state_at = max(states, default=0)

    def forget(self, kind: Kind, key: bytes) -> None: ...

    def copy_out(self, move: Move) -> None:
        assert len(move.units) == self._size(move)
        for unit in move.units:
            self._units[unit] = move.kind, self._device(move)
        self.written_bytes["host"] += self._size(move)

    def copy_in(self, move: Move) -> None:
        self._put(move, self._host(move))
        self.read_bytes["host"] += self._size(move)

    def load(self, moves: list[Move]) -> int:
        for move in moves:
            self._put(move, [-7] * PAGE_SIZE if move.kind is Kind.PAGE else -7)
        return self._ask(Ticket(True, moves, [self._device(move) for move in moves], self._delay()))

    def save(self, moves: list[Move]) -> int:
        return self._ask(Ticket(False, moves, [self._source(move) for move in moves], self._delay()))

    def finished(self) -> list[tuple[int, list[Move]]]:
        done = []
        for number, ticket in list(self._pending.items()):
            if ticket.n_polls:
                ticket.n_polls -= 1
                continue
            if not ticket.moves:
                self._look(ticket.contents[0])
            for move, content in zip(ticket.moves, ticket.contents if ticket.moves else [], strict=True):
                (self._finish_load if ticket.is_load else self._finish_save)(move, content)
            del self._pending[number]
            self.n_moved += len(ticket.moves)
            done.append((number, ticket.moves))
        return done

    def wait(self, timeout_s: float) -> None:
        for ticket in self._pending.values():
            ticket.n_polls = 0

    def delete(self, kind: Kind, key: bytes) -> None:
        self.files.pop((kind, key), None)

    def clear(self) -> None:
        self.files.clear()

    def close(self, timeout_s: float) -> None:
        self._pending.clear()

    def _ask(self, ticket: Ticket) -> int:
        self._n_tickets += 1
        self._pending[self._n_tickets] = ticket
        return self._n_tickets

    def _delay(self) -> int:
        return self._rng.randrange(self._n_most_polls) if self._n_most_polls else 0

    def _finish_load(self, move: Move, content: Any) -> None:
        assert self._device(move) == content, f"the {move.kind} {move.device} was used while it was loaded"
        saved = self.files.get((move.kind, move.key))
        if not move.units and (saved is None or self._rng.random() < self.p_failure):
            self.n_damaged += 1
            move.is_bad = True
            return
        self._put(move, self._host(move) if move.units else saved.content)
        self.read_bytes["host" if move.units else "disk"] += self._size(move)
        move.ok = True

    def _finish_save(self, move: Move, content: Any) -> None:
        assert self._source(move) == content, f"the {move.kind} {move.device} changed while it was saved"
        if self._rng.random() >= self.p_failure:
            self.files[move.kind, move.key] = Saved(move.parent, move.depth, content)
            self.written_bytes["disk"] += self._size(move)
            move.ok = True

    @staticmethod
    def _size(move: Move) -> int:
        return 1 if move.kind is Kind.PAGE else UNITS_PER_STATE

    def _source(self, move: Move) -> Any:
        return self._host(move) if move.device < 0 else self._device(move)

    def _device(self, move: Move) -> Any:
        runner = self._runner
        return runner.pages[move.device].tolist() if move.kind is Kind.PAGE else runner.states[move.device]

    def _host(self, move: Move) -> Any:
        assert len(move.units) == self._size(move)
        (kind, content), *rest = [self._units[unit] for unit in move.units]
        assert kind == move.kind and all(other == (kind, content) for other in rest), "units of another object"
        return content

    def _put(self, move: Move, content: Any) -> None:
        if move.kind is Kind.PAGE:
            self._runner.pages[move.device] = content
        else:
            self._runner.states[move.device] = content


def wait_while_held(folder: Path | None, stage: str) -> None:
    """Waits while the folder has a file of the stage's name."""
    while folder is not None and (folder / stage).exists():
        time.sleep(0.01)


def build_runner(config: EngineConfig, progress: Progress, step_s: float = 0.0, hold: Path | None = None) -> FakeRunner:
    """A FakeRunner of the configured sizes. Raises ConfigError for the model "missing"."""
    progress("load", 0.0)
    wait_while_held(hold, "load")
    if config.model == "missing":
        raise ConfigError("no checkpoint at 'missing'; give a directory")
    runner = FakeRunner(
        n_pages=config.n_pages or 256,
        max_num_seqs=config.max_num_seqs or 8,
        max_model_len=config.max_model_len or 4096,
        max_step_tokens=config.max_step_tokens or 512,
        prefix_cache=config.prefix_cache,
        step_s=step_s,
    )
    progress("load", 1.0)
    return runner


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--hold", type=Path, help="it waits while this folder has a file of the name plan, or load")
    parser.add_argument("launch")
    args = parser.parse_args()
    if json.loads(args.launch)["allowance"] is not None:
        process.die_with_parent()
        wait_while_held(args.hold, "plan")
    return process.main(
        lambda config, progress: build_runner(config, progress, args.step_ms / 1000, args.hold), args.launch
    )


if __name__ == "__main__":
    sys.exit(main())
