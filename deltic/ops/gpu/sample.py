"""sample and prompt_logprobs on a GPU: rows of logits to tokens, by the rule of reference/sample.py, and the
step's self-advance.

Three launches, always the same, so that they can be recorded; a row that does not need one leaves it at once:
1. `scan`, a program for each tile of a row: biases, penalties, bans and the mask; of each tile the likeliest
   id and the sums of weights.
2. `collect`, for rows with top-k, min-p or top-p: the ids that the sums of the tiles do not rule out, as a
   list.
3. `finish`, a program for each row: the cut, the draw, log-probabilities, and what the next decode reads.

With PDL each kernel lets the next one start at once, and before it waits reads only what no kernel of the
step writes but its first: which rows draw, and parameters.

Candidates are ordered by value, equal ones by id, in one int64, so every filter keeps what is at or above one
number, which is found by halving. Weights are relative to the likeliest, which weighs 1, in fixed point
(2**-38): integer sums have no order, so it does not matter in which order the programs of `collect` append to
the list, and nothing depends on the rows beside. Float sums (of a tile) have one fixed shape. Against the
reference a draw can differ only where u times the whole falls within rounding of the border between two ids,
or a cut within rounding of the border between two candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.geometry import Allocate, LogprobEntries
from deltic.ops.gpu.blocks import Rows
from deltic.ops.gpu.launch import launch, next_power_of_2
from deltic.ops.gpu.sample_kernels import collect, finish, finish_raw, scan, scan_raw

TILE = 2048
"""Ids of a tile. The float sums of plain sampling are by tile: another tile is another order of the sum."""
CAP = 2048
"""Candidates that one program holds in registers.

Longer lists take passes over memory. The same integers come out.
"""
MAX_VOCAB = 1 << 20
MAX_DRAWS = 256
"""Draws of a launch. More take turns in the scratch, which would else be twice as large as their logits."""
COLLECT_EACH = 4
"""Tiles of a program of `collect`: few enough for one row to be quick, and few programs to start for rows
that leave at once.
"""
BLOCK = 1024
"""Candidates of one pass of a loop over a list longer than CAP. Each is compared with WAYS borders."""
WAYS = 8
PART = 256
"""Ids of a tile that biases and penalties take at once."""
SCAN_WARPS = 4
FINISH_WARPS = 8


@dataclass(frozen=True)
class BatchParameters:
    """Sampling parameters and state by batch slot, as the host writes them when a sequence takes the batch
    slot.

    float32 [P] unless said; ids are int32 [P, MAX_BIASES], rows of which the first n_... count (int32 [P]).
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    top_k: Tensor  # int32; 0: all
    seed: Tensor  # int64, the bits of an unsigned one
    n_prompt: Tensor  # int32
    history: Tensor  # int32 [P, max_len]: tokens of prompt and answer; a drawn token is added at its position
    uses_history: Tensor  # int32: whether penalties count
    bias_ids: Tensor  # all different
    bias: Tensor  # float32 [P, MAX_BIASES]
    n_bias: Tensor
    banned: Tensor
    n_banned: Tensor
    banned_until: Tensor  # int32: they are banned from positions below it
    mask_row: Tensor  # int32: the row of `masks` (of a draft, the first) that says what may be drawn; -1: any
    stop_ids: Tensor
    n_stop: Tensor
    max_position: Tensor  # int32: the last position that may be fed
    n_logprobs: Tensor  # int32: -1 none, else how many of the likeliest, too
    last_token: Tensor  # int32; these three are what the draw leaves for the next decode
    position: Tensor  # int32
    done: Tensor  # int32
    # Not by batch slot: bit id % 32 of word id // 32 says whether id may be drawn.
    masks: Tensor  # int32 [any, ceil(n_real / 32)]


@dataclass(frozen=True)
class Draws:
    """Draws of a step, int32 [D]."""

    row: Tensor  # of the logits
    batch_slot: Tensor  # -1: no draw, nothing is written
    position: Tensor  # of the token to be drawn


@dataclass(frozen=True)
class Drawn:
    """Results of D draws. Any of these may be longer."""

    token: Tensor  # int32 [D]
    logprob: Tensor  # float32 [D]
    top_ids: Tensor  # int32 [D, K], likeliest first
    top_logprobs: Tensor  # float32 [D, K]


@dataclass(frozen=True)
class SampleScratch:
    """Scratch of D draws, with T tiles of a row. More draws take turns. Any contents will do."""

    best: Tensor  # int64 [D, T]: the likeliest of a tile, value and id, after biases, penalties and bans
    total: Tensor  # float32 [D, T]: sum of exp((value - likeliest) / temperature)
    raw_best: Tensor  # int64 [D, T]: the same of the logits themselves
    raw_total: Tensor  # float32 [D, T]
    bad: Tensor  # int32 [D, T]: whether a logit is not finite
    values: Tensor  # float32 [D, V]: rows after biases, penalties and bans
    listed: Tensor  # int32 [D, V]: ids that filters may keep; before that, of penalised rows, counts
    n_listed: Tensor  # int32 [D]
    special: Tensor  # int32 [D]: whether a row is in `values`
    few: Tensor  # int32 [D, cap]
    tile: int
    cap: int


def sample_scratch(
    n_draws: int, n_vocab: int, allocate: Allocate, tile: int = TILE, cap: int = CAP
) -> SampleScratch:
    """The workspace of n_draws draws: 8 bytes for each logit of MAX_DRAWS of them at most.

    Raises KernelError from MAX_VOCAB ids or a cap above CAP on.
    """
    check("sample", n_vocab < MAX_VOCAB, f"fewer than {MAX_VOCAB} ids, found {n_vocab}")
    check("sample", cap <= CAP, f"a cap of at most {CAP}, found {cap}")
    i32, i64, f32, n_tiles = torch.int32, torch.int64, torch.float32, -(-n_vocab // tile)
    n_draws = min(n_draws, MAX_DRAWS)
    return SampleScratch(
        best=allocate("sample best", (n_draws, n_tiles), i64), total=allocate("sample total", (n_draws, n_tiles), f32),
        raw_best=allocate("sample raw best", (n_draws, n_tiles), i64),
        raw_total=allocate("sample raw total", (n_draws, n_tiles), f32),
        bad=allocate("sample bad", (n_draws, n_tiles), i32), values=allocate("sample values", (n_draws, n_vocab), f32),
        listed=allocate("sample listed", (n_draws, n_vocab), i32), n_listed=allocate("sample n", (n_draws,), i32),
        special=allocate("sample special", (n_draws,), i32),
        few=allocate("sample few", (n_draws, cap), i32), tile=tile, cap=cap,
    )


def sample(
    logits: Tensor, n_real: int, draws: Draws | Rows, batch_slots: BatchParameters, scratch: SampleScratch, out: Drawn,
    *, early: bool = True,
) -> None:
    """Draws D tokens and moves their sequences on: last_token, position, done and history of their batch
    slots.

    logits: float32 [R, V], of which ids from n_real on are never drawn. draws: of the rows of a decode, row r
    draws for its batch slot the token behind its position, rows with state slot -1 draw nothing. Of a draft
    each row draws as if those in front had given what is in history, and what is left for the next decode is
    that of any of them. More draws than the scratch holds take turns; history then has what those before
    drew, which is the same for every row of a draft that counts. out.token is -1 where a logit is not finite
    or no id may be drawn. Where n_logprobs >= 0: out.logprob under the softmax of the raw logits, and the
    n_logprobs likeliest. early: the kernel in front has not written which rows draw, so the first one may
    start before it ends. Oracle: reference/sample.py.
    """
    p, s = batch_slots, scratch
    row, state_slot = (draws.batch_slot, draws.state_slot) if isinstance(draws, Rows) else (draws.row, draws.batch_slot)
    n_vocab, n_draws = logits.shape[1], draws.batch_slot.shape[0]
    outs = (out.token, out.logprob, out.top_ids, out.top_logprobs)
    check("sample", 0 < n_real <= n_vocab, f"1 to {n_vocab} real ids, found {n_real}")
    check("sample", logits.stride(1) == 1 and logits.stride(0) == n_vocab, "contiguous logits")
    check("sample", s.values.shape[1] >= n_vocab, f"scratch for {n_vocab} ids")
    check("sample", all(x.shape[0] >= n_draws for x in outs), f"outputs of {n_draws} draws")
    check("sample", p.masks.shape[1] * 32 >= n_real, f"masks of {n_real} bits")
    n_tiles, n_ids, max_len = -(-n_vocab // s.tile), p.bias_ids.shape[1], p.history.shape[1]
    ahead = draws.drafts.ahead if isinstance(draws, Rows) and draws.drafts is not None else None
    tiles, ids = next_power_of_2(n_tiles), next_power_of_2(n_ids)
    meta: dict[str, int] = {"DECODE": isinstance(draws, Rows), "TILE": s.tile}
    for begin in range(0, n_draws, len(s.values)):
        part = slice(begin, min(begin + len(s.values), n_draws))
        n = part.stop - begin
        common = (
            logits[part] if isinstance(draws, Rows) else logits, n_vocab, n_real, row[part], draws.batch_slot[part],
            state_slot[part], draws.position[part],
        )
        launch(
            scan, (n_tiles, n), *common, p.temperature, p.repetition, p.frequency, p.presence, p.n_prompt, p.history,
            max_len, p.uses_history, p.bias_ids, p.bias, p.n_bias, p.banned, p.n_banned, p.banned_until, p.mask_row,
            n_ids, p.n_logprobs, p.masks, p.masks.shape[1], s.best, s.total, s.raw_best, s.raw_total, s.bad, s.values,
            s.listed, s.n_listed, s.special, None if ahead is None else ahead[part],
            DRAFTS=ahead is not None, IDS=min(ids, 128), PART=min(PART, s.tile), num_warps=SCAN_WARPS, pdl=early,
            **meta,
        )
        launch(
            collect, (-(-n_tiles // COLLECT_EACH), n), *common, p.temperature, p.top_k, p.top_p, p.min_p, s.best,
            s.total, s.values, s.listed, s.n_listed, s.special, n_tiles, TILES=tiles, EACH=COLLECT_EACH,
            num_warps=SCAN_WARPS, **meta,
        )
        launch(
            finish, (n,), *common, p.temperature, p.top_k, p.top_p, p.min_p, p.seed, p.stop_ids, p.n_stop, n_ids,
            p.max_position, p.n_logprobs, p.history, max_len, p.last_token, p.position, p.done, s.best, s.total,
            s.raw_best, s.raw_total, s.bad, s.values, s.listed, s.n_listed, s.special, s.few, n_tiles,
            *(out[part] for out in outs), outs[2].shape[1], TILES=tiles, CAP=s.cap, BLOCK=min(BLOCK, s.cap), WAYS=WAYS,
            IDS=ids, num_warps=FINISH_WARPS, **meta,
        )


def prompt_logprobs(logits: Tensor, n_real: int, entries: LogprobEntries, tile: int = TILE) -> None:
    """Log-softmax of the raw logits, float32 [R, V], at each entry's target, and of its n_top likeliest ids.

    Allocates a little for itself, so it is not for recorded steps.
    """
    e, n, n_vocab = entries, entries.row.shape[0], logits.shape[1]
    check("prompt_logprobs", n_vocab < MAX_VOCAB, f"fewer than {MAX_VOCAB} ids, found {n_vocab}")
    n_tiles = -(-n_vocab // tile)
    best = torch.empty((n, n_tiles), dtype=torch.int64, device=logits.device)
    total = torch.empty((n, n_tiles), dtype=torch.float32, device=logits.device)
    launch(
        scan_raw, (n_tiles, n), logits, n_vocab, n_real, e.row, e.n_top, e.n, best, total, TILE=tile,
        num_warps=SCAN_WARPS
    )
    launch(
        finish_raw, (n,), logits, n_vocab, n_real, e.row, e.target, e.n_top, e.n, best, total, n_tiles, e.logprob,
        e.top_ids, e.top_logprobs, e.top_ids.shape[1], TILE=tile, TILES=next_power_of_2(n_tiles),
        num_warps=FINISH_WARPS,
    )
