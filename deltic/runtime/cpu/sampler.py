"""Logits to tokens: the sampling parameters in batch tensors, and the draws read back.

A chunk with a draft has a draw from each of its rows, as if the tokens before had been drawn as they were
drafted. Those up to the first that was not are what plain decodes draw.

Parameters are kept by batch slot and written once, when a sequence takes the batch slot. Each draw is a
function of its row of logits, the parameters, the seed and the position (P6): a sequence that is preempted or
shares a batch draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deltic.engine.messages import MAX_BIASES, MAX_LOGPROBS, SamplingParams, TokenLogprob
from deltic.engine.step import Rule, Sequence, Step, StepResult
from deltic.ops.arrays import Array
from deltic.ops.cpu.program import Program
from deltic.ops.cpu.sample import BatchParameters, DrawInputs, draw_scratch, logprobs, sample
from deltic.ops.geometry import Allocate, LogprobEntries


class _Draw(NamedTuple):
    """A draw: from which row of logits, and of which token of a sequence."""

    row: int
    batch_slot: int
    position: int
    n_history: int
    """Tokens that penalties see; 0: there are none."""
    n_prompt: int
    """Tokens of the prompt that penalties see."""
    sequence: Sequence
    rule: Rule


_ANY = Rule()


@dataclass(eq=False)
class Guess:
    """Tokens that may follow a sequence's."""

    sequence: Sequence
    drawn: list[int]
    """Tokens that the step drew: they are not among the sequence's tokens yet."""
    n_wanted: int
    tokens: list[int]


class Draws:
    """Draws of a step, up to n of them, as the operator reads them."""

    def __init__(
        self, n: int, n_real: int, eos_token_ids: tuple[int, ...], allocate: Allocate, name: str = "draw"
    ) -> None:
        """n_real: ids that may be drawn."""
        i32, self.n_real, self.eos_token_ids = np.int32, n_real, eos_token_ids
        self.inputs = DrawInputs(
            n_draws=allocate(f"n {name}s", (), i32),
            **{
                each: allocate(f"{name} {each}", (n,), i32)
                for each in ("row", "batch_slot", "position", "n_history", "n_prompt", "masked")
            },
            bias_begin=allocate(f"{name} bias begin", (n + 1,), i32),
            bias_ids=allocate(f"{name} bias ids", (n * MAX_BIASES,), i32),
            bias=allocate(f"{name} bias", (n * MAX_BIASES,), np.float32),
            banned_begin=allocate(f"{name} banned begin", (n + 1,), i32),
            banned=allocate(f"{name} banned", (n * MAX_BIASES,), i32),
            masks=allocate(f"{name} masks", (n, -(-n_real // 32)), i32),
        )
        self.has_lists = self._has_masks = False

    def fill(self, draws: Rows[_Draw]) -> None:
        """Writes what is drawn."""
        n, d = len(draws), self.inputs
        d.n_draws.fill(n)
        if not n:
            return
        d.row[:n], d.batch_slot[:n], d.position[:n], d.n_history[:n], d.n_prompt[:n], sequences, rules = zip(
            *draws, strict=True
        )
        lists: list[tuple[int, SamplingParams, bool]] = []
        masks: list[tuple[int, np.ndarray]] = []
        for i, (sequence, rule) in enumerate(zip(sequences, rules, strict=True)):
            params = sequence.request.params
            bans_end = rule.bans_end or (
                params.min_tokens and draws[i].position - sequence.n_prompt < params.min_tokens
            )
            if params.logit_bias or bans_end:
                lists.append((i, params, bool(bans_end)))
            if rule.mask is not None:
                masks.append((i, rule.mask))
        if lists or self.has_lists:
            self._fill_lists(n, lists)
        if masks or self._has_masks:
            self._has_masks = True  # before anything can fail half-way
            d.masked[:] = 0
            for i, mask in masks:
                d.masked[i], d.masks[i] = 1, mask[: d.masks.shape[1]]  # a draft head has the first ids only
            self._has_masks = bool(masks)

    def _fill_lists(self, n: int, lists: Rows[tuple[int, SamplingParams, bool]]) -> None:
        """Biases and, below min_tokens and in some thoughts, the ids that would end the sequence: ragged
        lists over the n draws.
        """
        d = self.inputs
        self.has_lists = True  # before anything can fail half-way
        bias_counts, banned_counts = np.zeros(n, np.int32), np.zeros(n, np.int32)
        bias_ids: list[int] = []
        biases: list[float] = []
        banned: list[int] = []
        for i, params, bans_end in lists:
            known = {id: bias for id, bias in params.logit_bias.items() if id < self.n_real}
            bias_ids += known.keys()
            biases += known.values()
            bias_counts[i] = len(known)
            if bans_end:
                ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
                ends = {id for id in ends if id < self.n_real}
                banned += ends
                banned_counts[i] = len(ends)
        d.bias_begin[1 : n + 1] = np.cumsum(bias_counts)
        d.banned_begin[1 : n + 1] = np.cumsum(banned_counts)
        d.bias_ids[: len(bias_ids)] = bias_ids
        d.bias[: len(biases)] = biases
        d.banned[: len(banned)] = banned
        self.has_lists = bool(lists)
        if not lists:  # leave neutral lists behind for every later number of draws
            d.bias_begin[:] = 0
            d.banned_begin[:] = 0


@dataclass(frozen=True)
class DrawnIds:
    """Ids of a model's logits."""

    n: int
    n_real: int
    """Ids that can be drawn: the first."""
    ends: tuple[int, ...]
    """Ids that end a sequence."""


class Sampler:
    """The buffers of up to n_batch_slots draws a step, n_drafts more of drafts, and n_logit_rows of
    prompts."""

    def __init__(
        self,
        n_batch_slots: int,
        max_model_len: int,
        n_logit_rows: int,
        ids: DrawnIds,
        n_threads: int,
        allocate: Allocate,
        penalises_prompt: bool = True,
        n_drafts: int = 0,
    ) -> None:
        """penalises_prompt: repetition_penalty sees prompt tokens too. They must be ids that can be drawn."""
        i32, f32 = np.int32, np.float32
        self.n_real = ids.n_real
        self.penalises_prompt = penalises_prompt
        self.batch_slots = BatchParameters(
            **{name: allocate(name, (n_batch_slots,), f32) for name in ("temperature", "top_p", "min_p")},
            **{name: allocate(name, (n_batch_slots,), f32) for name in ("repetition", "frequency", "presence")},
            top_k=allocate("top_k", (n_batch_slots,), i32),
            seed=allocate("seed", (n_batch_slots,), np.int64),
            history=allocate("history", (n_batch_slots, max_model_len), i32),
        )
        n_draws = n_batch_slots + n_drafts
        self.draws = Draws(n_draws, ids.n_real, ids.ends, allocate)
        self.scratch = draw_scratch(min(n_threads, n_draws), ids.n, allocate)
        n_entries = n_draws + n_logit_rows
        self._entries = LogprobEntries(
            n=allocate("n logprob entries", (), i32),
            row=allocate("logprob row", (n_entries,), i32),
            target=allocate("logprob target", (n_entries,), i32),  # the draws come first: tokens land here
            n_top=allocate("logprob n top", (n_entries,), i32),
            logprob=allocate("logprob", (n_entries,), f32),
            top_ids=allocate("top ids", (n_entries, MAX_LOGPROBS), i32),
            top_logprobs=allocate("top logprobs", (n_entries, MAX_LOGPROBS), f32),
        )
        self._owner: list[Sequence | None] = [None] * n_batch_slots
        self._n_history = [0] * n_batch_slots

    def record(self, program: Program, logits: Array) -> None:
        """Appends the draws and the log-probabilities to the step's program."""
        sample(program, logits, self.n_real, self.batch_slots, self.draws.inputs, self.scratch, self._entries.target)
        logprobs(program, logits, self.n_real, self._entries)

    def fill(self, step: Step, first_row: list[int]) -> None:
        """Writes the step's draws and the prompt positions whose log-probabilities are wanted."""
        draws: list[_Draw] = []
        n_top: list[int] = []
        for draw in step.draws:
            chunk, sequence, params = step.chunks[draw.chunk], draw.sequence, draw.sequence.request.params
            batch_slot, guide, row = sequence.batch_slot, sequence.guide, first_row[draw.chunk]
            assert batch_slot is not None
            if self._owner[batch_slot] is not sequence:
                self._take_batch_slot(batch_slot, sequence)
            if chunk.prompt_logprobs:
                row += len(chunk.logit_offsets(True)) - 1
            rule = _ANY if guide is None else Rule.of(guide)
            draws += self._draws_of(row, sequence, (), chunk.drafts, chunk.rules or [rule] * (1 + len(chunk.drafts)))
            n_top += [-1 if params.logprobs is None else params.logprobs] * (1 + len(chunk.drafts))
        self.draws.fill(draws)
        rows, n = [draw[0] for draw in draws], len(draws)
        targets: list[int] = []
        for c, chunk in enumerate(step.chunks):
            if chunk.prompt_logprobs:
                scored = chunk.scored
                row_of = {offset: row for row, offset in enumerate(chunk.logit_offsets(False), first_row[c])}
                targets += [id for _, id in scored]
                rows += [row_of[offset] for offset, _ in scored]
                n_top += [chunk.sequence.request.params.prompt_logprobs or 0] * len(scored)
        n_entries = n + len(targets)
        self._entries.row[:n_entries] = rows
        self._entries.n_top[:n_entries] = n_top
        self._entries.target[n:n_entries] = targets
        self._entries.n.fill(n_entries)

    def read(self, step: Step) -> StepResult:
        """The tokens drawn, and the log-probabilities that were asked for."""
        result = StepResult([], [], {})
        at, drawn = 0, self._entries.target.tolist()  # all at once: a list of one takes as long
        for draw in step.draws:
            chunk = step.chunks[draw.chunk]
            n_rows = 1 + len(chunk.drafts)
            tokens = chunk.accepted(drawn[at : at + n_rows])
            result.tokens.append(tokens)
            wanted = draw.sequence.request.params.logprobs is not None
            result.logprobs.append([self._entry(at + j) for j in range(len(tokens))] if wanted else None)
            at += n_rows
        for c, chunk in enumerate(step.chunks):
            if chunk.prompt_logprobs:
                n_entries = len(chunk.scored)
                result.prompt_logprobs[c] = [self._entry(at + i) for i in range(n_entries)]
                at += n_entries
        return result

    def _entry(self, i: int) -> TokenLogprob:
        k = int(self._entries.n_top[i])
        top = list(zip(self._entries.top_ids[i, :k].tolist(), self._entries.top_logprobs[i, :k].tolist(), strict=True))
        return TokenLogprob(int(self._entries.target[i]), float(self._entries.logprob[i]), top)

    def _take_batch_slot(self, batch_slot: int, sequence: Sequence) -> None:
        params, batch_slots = sequence.request.params, self.batch_slots
        self._owner[batch_slot] = sequence
        self._n_history[batch_slot] = 0
        batch_slots.temperature[batch_slot] = params.temperature
        batch_slots.top_k[batch_slot] = params.top_k
        batch_slots.top_p[batch_slot] = params.top_p
        batch_slots.min_p[batch_slot] = params.min_p
        batch_slots.repetition[batch_slot] = params.repetition_penalty
        batch_slots.frequency[batch_slot] = params.frequency_penalty
        batch_slots.presence[batch_slot] = params.presence_penalty
        batch_slots.seed[batch_slot] = np.uint64(sequence.seed & (2**64 - 1)).astype(np.int64)

    def _extend_history(self, batch_slot: int, sequence: Sequence, drafts: Rows[int]) -> int:
        """Gives the number of tokens that penalties know. The drafts stand behind them."""
        first = 0 if self.penalises_prompt else sequence.n_prompt
        known, n_tokens = self._n_history[batch_slot], len(sequence.tokens) - first
        self.batch_slots.history[batch_slot, known:n_tokens] = sequence.tokens[first + known :]
        self.batch_slots.history[batch_slot, n_tokens : n_tokens + len(drafts)] = drafts
        self._n_history[batch_slot] = n_tokens
        return n_tokens

    def _draws_of(
        self, row: int, sequence: Sequence, more: Rows[int], drafts: Rows[int], rules: Rows[Rule]
    ) -> list[_Draw]:
        """Draws behind a sequence's tokens and `more`, and behind each of the drafts, from this row on."""
        batch_slot, at = sequence.batch_slot, len(sequence.tokens) + len(more)
        assert batch_slot is not None
        known, n_prompt = 0, sequence.n_prompt if self.penalises_prompt else 0
        if has_penalties := _has_penalties(sequence.request.params):
            known = self._extend_history(batch_slot, sequence, [*more, *drafts]) + len(more)
        if not drafts:
            return [_Draw(row, batch_slot, at, known, n_prompt, sequence, rules[0])]
        return [
            _Draw(row + j, batch_slot, at + j, known + j if has_penalties else 0, n_prompt, sequence, rule)
            for j, rule in enumerate(rules)
        ]

    def record_guesses(self, program: Program, logits: Array, draws: Draws, out: Array) -> None:
        """Appends draws from a draft head's logits, which are as those of the model will be."""
        sample(program, logits, draws.n_real, self.batch_slots, draws.inputs, self.scratch, out)

    def fill_guesses(self, draws: Draws, guessed: Rows[tuple[Sequence, list[int]]]) -> None:
        """Writes the draws of a draft head: from row i what may follow a sequence's tokens and these, which a
        step has drawn or the head has. Penalties, biases and noise are those of the batch slot that it is
        for, and so is what a guide says, but for a grammar (Guide.behind).
        """
        rules = [_ANY if sequence.guide is None else sequence.guide.behind(more) for sequence, more in guessed]
        draws.fill([self._draws_of(i, *one, (), rules[i : i + 1])[0] for i, one in enumerate(guessed)])

    def go_on(self, draws: Draws, guessed: Rows[tuple[Sequence, list[int]]]) -> None:
        """Does what fill_guesses does, one token further: mostly only the positions change."""
        n = len(guessed)
        is_plain = not draws.has_lists and all(sequence.guide is None for sequence, _ in guessed)
        if n == draws.inputs.n_draws and is_plain and not draws.inputs.n_history[:n].any():
            draws.inputs.position[:n] += 1
        else:
            self.fill_guesses(draws, guessed)


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
