"""The rows of a draft head (MTP) on a GPU: which run, with which ids, and what goes into its first product.

A row of the head is a token's hidden state and the id of the token behind it. In a decode the rows are those
of the step, at the same indices: what was accepted of a draft is found here, on the device, from what was
drawn. So the head runs behind the draws without the host. The last row that counts of each sequence guesses;
then, at the same index, the rows of its guesses, one after the other.

Spec: the first lines of `draft_states` in tests/reference/model.py; what counts is `Chunk.accepted`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.geometry import Allocate
from deltic.ops.gpu.blocks import Rows
from deltic.ops.gpu.chip import wait_for_front
from deltic.ops.gpu.launch import launch
from deltic.ops.gpu.norm import LANES, inverse_rms, load_pieces, norm_warps, pieces, tree_sum
from deltic.ops.gpu.sample import Draws

MOST_DRAFTS = 32
"""Lanes that compare drafts. A sequence has fewer drafts in a step."""


@dataclass(frozen=True)
class GuessRows:
    """Inputs and guesses of the draft head for the rows of a decode, int32 [N]."""

    known: Tensor  # the token behind the row where the host knows it: nothing is drawn then; else -1
    room: Tensor  # rows that its sequence may have, by the room in its pages and the length of its answer
    token: Tensor  # the id of the token behind the row
    kept: Tensor  # the row's state slot, if the row counts; else -1: its keys and values are kept
    last: Tensor  # the row's state slot, if it guesses; else -1
    position: Tensor  # of the row that guesses: the step's, then one more with each guess
    draws: Draws  # of the guesses
    # [1 + most guesses, all rows]: the latest guesses, the step's draws, the first guesses, the second, ...
    tokens: Tensor

    def front(self, n: int) -> GuessRows:
        """The first n rows, but all of `tokens`."""
        draws = Draws(*(part[:n] for part in (self.draws.row, self.draws.batch_slot, self.draws.position)))
        names = ("known", "room", "token", "kept", "last", "position")
        return replace(self, **{name: getattr(self, name)[:n] for name in names}, draws=draws)


def guess_rows(known: Tensor, room: Tensor, most: int, allocate: Allocate) -> GuessRows:
    """Allocates guesses for as many rows as `known` and `room` have. most: rows of a sequence in a decode, of
    which all but one may be guessed. allocate(name, size, dtype) gives zeroed tensors. The caller writes 0,
    1, ... to `draws.row`.
    """
    n, i32 = len(known), torch.int32
    check("guess", most <= MOST_DRAFTS, f"fewer than {MOST_DRAFTS} drafts, found {most - 1}")
    parts = {name: allocate(f"head {name}", (n,), i32) for name in ("token", "kept", "last", "position")}
    draws = Draws(*(allocate(f"guess {name}", (n,), i32) for name in ("row", "batch_slot", "position")))
    return GuessRows(known, room, **parts, draws=draws, tokens=allocate("guesses", (most, n), i32))


@triton.jit(do_not_specialize=["n_rows", "n_all"])
def _begin_guess_kernel(
    p_batch_slot, p_state_slot, p_position, p_ahead, p_draft, p_drawn, p_known, p_token, p_kept, p_last, p_at,
    p_draw_batch_slot, p_draw_position, p_tokens, n_rows, n_all, MOST: tl.constexpr, PDL: tl.constexpr,
):
    """A row behind the step's draws: its token, whether it counts, whether it is the last."""
    i = tl.program_id(0)
    if PDL:  # and nobody is let start early: later kernels read the row arrays before they wait
        tl.extra.cuda.gdc_wait()
    batch_slot, state_slot, position = tl.load(p_batch_slot + i), tl.load(p_state_slot + i), tl.load(p_position + i)
    ahead, drawn, known = tl.load(p_ahead + i), tl.load(p_drawn + i), tl.load(p_known + i)
    o = tl.arange(0, MOST)
    o_row = i - ahead + o
    before = o < ahead
    was_drawn = tl.load(p_drawn + o_row, mask=before, other=0)
    was_drafted = tl.load(p_draft + o_row + 1, mask=before, other=0)
    behind = tl.load(p_drawn + o_row + 1, mask=before, other=0)
    n_wrong = tl.sum(tl.where(before & ((was_drawn != was_drafted) | (behind < 0)), 1, 0), 0)
    has_next = i + 1 < n_rows
    has_next = has_next & (tl.load(p_ahead + i + 1, mask=has_next, other=0) == ahead + 1)
    next_drafted = tl.load(p_draft + i + 1, mask=has_next, other=0)
    next_drawn = tl.load(p_drawn + i + 1, mask=has_next, other=-1)
    next_counts = has_next & (drawn == next_drafted) & (next_drawn >= 0)
    token = tl.where(known >= 0, known, drawn)
    counts = (state_slot >= 0) & (n_wrong == 0) & (token >= 0)
    is_last = counts & (next_counts == 0)
    tl.store(p_token + i, token)
    tl.store(p_kept + i, tl.where(counts, state_slot, -1))
    tl.store(p_last + i, tl.where(is_last, state_slot, -1))
    tl.store(p_at + i, position)
    tl.store(p_draw_batch_slot + i, tl.where(is_last & (known < 0), batch_slot, -1))
    tl.store(p_draw_position + i, position + 2)
    tl.store(p_tokens + n_all + i, drawn)


@triton.jit(do_not_specialize=["n_all"])
def _go_on_kernel(
    p_batch_slot, p_position, p_known, p_room, p_token, p_last, p_at, p_draw_batch_slot, p_draw_position, p_tokens,
    n_all, PDL: tl.constexpr,
):
    """A row behind a guess: the guess is its token, where the sequence has room for it."""
    i = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    last, guess, at = tl.load(p_last + i), tl.load(p_tokens + i), tl.load(p_at + i) + 1
    n_guessed = at - tl.load(p_position + i)
    goes_on = (last >= 0) & (guess >= 0) & (tl.load(p_known + i) < 0) & (at < tl.load(p_room + i))
    tl.store(p_tokens + (1 + n_guessed) * n_all + i, guess)
    tl.store(p_token + i, guess)
    tl.store(p_last + i, tl.where(goes_on, last, -1))
    tl.store(p_at + i, at)
    tl.store(p_draw_batch_slot + i, tl.where(goes_on, tl.load(p_batch_slot + i), -1))
    tl.store(p_draw_position + i, at + 2)


@triton.jit
def _follow_kernel(p_next, p_drawn, p_token, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Ids behind the tokens of prompts: those that are not known yet, -1 - d, are those of the draws d."""
    wait_for_front(PDL)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_next = tl.load(p_next + o)
    b_drawn = tl.load(p_drawn - 1 - b_next, mask=b_next < 0, other=0)
    tl.store(p_token + o, tl.where(b_next < 0, b_drawn, b_next))


@triton.jit
def _joined(p_embedded, p_hidden, part, b_mask):
    """float32: of the first part the embedding, of others the hidden state, as bfloat16 has it."""
    b_x = tl.load(p_embedded, mask=b_mask & (part == 0), other=0.0)
    return b_x + tl.load(p_hidden, mask=b_mask & (part > 0), other=0.0).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _pair_kernel(
    p_embedded, p_hidden, p_embedding_norm, p_hidden_norm, p_streams, p_out, width, inverse_width, inverse_whole, eps,
    S: tl.constexpr, LANES: tl.constexpr, PIECES: tl.constexpr, PDL: tl.constexpr,
):
    """The embedding of a token, normed, in front in the rows of all its streams; or the part of the hidden
    state that is behind it in one. The streams are 0 then.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_stream = tl.maximum(part - 1, 0)
    p_w = tl.where(part == 0, p_embedding_norm, p_hidden_norm + i_stream * width)
    weights = load_pieces(p_w, width, LANES, PIECES)
    wait_for_front(PDL)
    o_lane = tl.arange(0, LANES)
    p_embedded += row * width
    p_hidden += row * S * width
    b_square = tl.zeros((LANES,), tl.float32)
    for s in tl.static_range(S):
        for j in tl.static_range(PIECES):
            o_col = j * LANES + o_lane
            b_mask = (o_col < width) & ((part > 0) | (s == 0))
            b_x = _joined(p_embedded + o_col, p_hidden + s * width + o_col, part, b_mask)
            b_square = tl.fma(b_x, b_x, b_square)
    inverse = tl.where(part == 0, inverse_width, inverse_whole)
    b_inverse = inverse_rms(tree_sum(b_square, LANES), inverse, eps)
    for j in tl.static_range(PIECES):
        o_col = j * LANES + o_lane
        b_mask = o_col < width
        b_x = _joined(p_embedded + o_col, p_hidden + i_stream * width + o_col, part, b_mask)
        b_y = (b_x * b_inverse * (1.0 + weights[j])).to(tl.bfloat16)
        for s in tl.static_range(S):
            tl.store(p_out + 2 * (row * S + s) * width + o_col, b_y, mask=b_mask & (part == 0))
            if p_streams is not None:
                p_zero = p_streams + (row * S + s) * width + o_col
                tl.store(p_zero, tl.zeros((LANES,), tl.float32), mask=b_mask & (part == 0))
        tl.store(p_out + (2 * (row * S + i_stream) + 1) * width + o_col, b_y, mask=b_mask & (part > 0))


def begin_guess(rows: Rows, drawn: Tensor, g: GuessRows) -> None:
    """Writes all of g but `known` and `room`, which are read, for a head that runs behind a step's draws.

    rows: of the step, int32 [N], with drafts; drawn: int32 [N], of each row, -1 where nothing could be drawn;
    g: of as many rows. A row counts if each token before it was drawn as it was drafted. The last that does,
    of each sequence, guesses. Raises KernelError where sizes or types do not fit.
    """
    n = len(g.known)
    assert rows.drafts is not None
    check("guess", len(rows.batch_slot) == len(rows.drafts.ahead) == n and len(drawn) >= n, f"{n} rows")
    check("guess", drawn.dtype == g.known.dtype == torch.int32, "int32 tokens")
    launch(
        _begin_guess_kernel, (n,), rows.batch_slot, rows.state_slot, rows.position, rows.drafts.ahead,
        rows.drafts.token, drawn, g.known, g.token, g.kept, g.last, g.position, g.draws.batch_slot, g.draws.position,
        g.tokens, n, g.tokens.shape[1], MOST=MOST_DRAFTS, num_warps=1,
    )


def go_on(rows: Rows, g: GuessRows) -> None:
    """Takes the latest guesses, which are the tokens of the next rows, one position further. A row whose
    guess is -1 or has no room ends.

    At most as often as there are guesses but one. Raises KernelError for another number of rows.
    """
    n = len(g.known)
    check("guess", len(rows.batch_slot) == n, f"{n} rows")
    launch(
        _go_on_kernel, (n,), rows.batch_slot, rows.position, g.known, g.room, g.token, g.last, g.position,
        g.draws.batch_slot, g.draws.position, g.tokens, g.tokens.shape[1], num_warps=1,
    )


def follow(next_ids: Tensor, drawn: Tensor, token: Tensor) -> None:
    """token[t] = next_ids[t], or drawn[d] where that is -1 - d. All int32; next_ids, token: [T], T % 64 == 0.

    Raises KernelError where sizes or types do not fit.
    """
    n = len(next_ids)
    check("guess", n % 64 == 0 and token.shape == (n,), f"{n} ids, a multiple of 64")
    check("guess", next_ids.dtype == drawn.dtype == token.dtype == torch.int32, "int32 ids")
    launch(_follow_kernel, (n // 64,), next_ids, drawn, token, BLOCK=64, num_warps=1)


def draft_pair(
    embedded: Tensor, hidden: Tensor, embedding_norm: Tensor, hidden_norm: Tensor, eps: float, out: Tensor,
    streams: Tensor | None = None,
) -> None:
    """out[t, s] = bfloat16 of rms_norm(embedded[t]), then of rms_norm(hidden[t])[s]; streams = 0.

    embedded: float32 [T, H]; hidden: [T, S * H], S streams in one norm, bfloat16 or float32, which is rounded
    to it; norms: float32 [H] and [S * H], zero-centred; out: bfloat16 [T * S, 2H]; streams: float32
    [T * S, H], may be `embedded`. The bits of a row depend on this row only. Of one stream they are those of
    `add_norm`. Raises KernelError where sizes or types do not fit.
    """
    n, width = embedded.shape
    n_streams = hidden.shape[1] // width
    fits = hidden.shape == (n, n_streams * width) and out.shape == (n * n_streams, 2 * width)
    check("draft_pair", fits and (streams is None or streams.numel() == hidden.numel()), f"{n} rows of {width}")
    check("draft_pair", out.dtype == torch.bfloat16 and hidden.dtype in (out.dtype, torch.float32), "bfloat16 out")
    check("draft_pair", embedded.dtype == embedding_norm.dtype == torch.float32, "float32 embeddings, norms")
    fits = embedding_norm.shape == (width,) and hidden_norm.shape == hidden.shape[1:]
    check("draft_pair", fits, "norms of both widths")
    check("draft_pair", all(x.is_contiguous() for x in (embedded, hidden, out)), "contiguous tensors")
    launch(
        _pair_kernel, (n, 1 + n_streams), embedded, hidden, embedding_norm, hidden_norm, streams, out, width,
        1.0 / width, 1.0 / (n_streams * width), eps, S=n_streams, LANES=LANES, PIECES=pieces(width),
        num_warps=norm_warps(n, width),
    )
