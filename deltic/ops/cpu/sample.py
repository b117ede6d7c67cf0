"""sample and logprobs: rows of logits to tokens and log-probabilities (csrc/sample.cpp; oracle
reference/sample.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deltic.ops.arrays import Array, stride
from deltic.ops.contract import check
from deltic.ops.cpu.program import Program
from deltic.ops.geometry import Allocate, LogprobEntries


@dataclass(frozen=True)
class BatchParameters:
    """Sampling parameters by batch slot: they are written when a sequence takes the batch slot, not every
    step.

    float32 [batch_slots] each; top_k int32; seed int64 holding the bits of an unsigned one; history int32
    [batch_slots, max_len], the sequence's tokens, kept only where penalties need them.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition: Array
    frequency: Array
    presence: Array
    seed: Array
    history: Array


@dataclass(frozen=True)
class DrawInputs:
    """Inputs that change from step to step, int32 [D]: the logits row, batch slot and position of each draw,
    the lengths of its history (0: no penalties), bias and banned ids as ragged lists (begin [D + 1]), and
    masks.

    masked: 0 where any id may be drawn. masks [D, ceil(n_real / 32)]: bit id % 32 of word id // 32 says
    whether id may.
    """

    n_draws: Array
    row: Array
    batch_slot: Array
    position: Array
    n_history: Array
    n_prompt: Array
    bias_begin: Array
    bias_ids: Array
    bias: Array
    banned_begin: Array
    banned: Array
    masked: Array
    masks: Array


@dataclass(frozen=True)
class DrawScratch:
    """values float32 [n, V], counts int32 [n, V] (zero between calls), candidates int64 [n, V]; n rows: one
    for each thread, or one for each draw where that is less.
    """

    values: Array
    counts: Array
    candidates: Array


def draw_scratch(n: int, n_ids: int, allocate: Allocate, name: str = "draw") -> DrawScratch:
    """Allocates that of n threads or draws."""
    return DrawScratch(
        values=allocate(f"{name} values", (n, n_ids), np.float32),
        counts=allocate(f"{name} counts", (n, n_ids), np.int32),
        candidates=allocate(f"{name} candidates", (n, n_ids), np.int64),
    )


def sample(
    program: Program,
    logits: Array,
    n_real: int,
    batch_slots: BatchParameters,
    draws: DrawInputs,
    scratch: DrawScratch,
    out: Array,
) -> None:
    """Draws one token for each of the n_draws first entries; out: int32 [D].

    logits: float32 [R, V], ids from n_real on are never drawn. Temperature 0 is the argmax, lowest id on
    ties.
    -1 where a logit is not finite, or no id may be drawn. A token depends on its row of logits, the
    parameters, the seed and the position, on nothing else (P6).
    """
    n_vocab = logits.shape[1]
    check("sample", 0 < n_real <= n_vocab, f"1 to {n_vocab} real ids, found {n_real}")
    check("sample", draws.masks.shape[1] * 32 >= n_real, f"masks of {n_real} bits")
    n_scratch = scratch.values.shape[0]
    check("sample", n_scratch >= min(program.n_threads, draws.row.shape[0]), "scratch for every thread or draw")
    p, d = batch_slots, draws
    program.call(
        "deltic_sample",
        *(logits, n_vocab, n_real),
        *(d.n_draws, d.row, d.batch_slot, d.position, d.n_history, d.n_prompt),
        *(p.temperature, p.top_k, p.top_p, p.min_p, p.repetition, p.frequency, p.presence, p.seed),
        *(p.history, stride(p.history)),
        *(d.bias_begin, d.bias_ids, d.bias, d.banned_begin, d.banned, d.masked, d.masks, stride(d.masks)),
        *(scratch.values, scratch.counts, scratch.candidates, n_scratch, out),
    )


def logprobs(program: Program, logits: Array, n_real: int, entries: LogprobEntries) -> None:
    """Log-softmax of the raw logits, float32 [R, V], at each entry's target, and of its n_top likeliest
    ids.
    """
    e = entries
    outputs = e.top_ids.shape[1], e.logprob, e.top_ids, e.top_logprobs
    program.call("deltic_logprobs", logits, logits.shape[1], n_real, e.n, e.row, e.target, e.n_top, *outputs)
