"""Operators of a block drafter on the GPU (or in the interpreter) against the reference."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from deltic.ops.contract import KernelError
from deltic.ops.geometry import AttentionHeads
from deltic.ops.gpu.attention_decode import keys_decode
from deltic.ops.gpu.block import (
    Chance,
    PairScores,
    Sight,
    add_scores,
    begin_block,
    block_attention,
    block_conv,
    block_scratch,
    bound_scores,
    candidates,
    guess_blocks,
    keys_of_layers,
    next_guess,
    scale_rows,
)
from deltic.ops.gpu.blocks import Drafts, Rows
from deltic.ops.gpu.launch import allocate_on
from deltic.ops.kv_formats import KvPages
from tests.gpu.test_gpu_attention_decode import EPS, TOLERANCE, Case, make
from tests.reference import dflash as reference
from tests.reference import layers

HEADS = AttentionHeads(8, 2, 64, is_gated=False)
N_BLOCK = 5
SEES = [(False, 0), (True, 0), (False, 70), (True, 3)]
"""Whether rows see no later one, and their window."""


def blocks(case: Case, device: str, sees: tuple[bool, int], which: list[int]) -> Tensor:
    """Rows of the blocks behind the keys of these batch slots, and an idle one."""
    torch.manual_seed(1)
    own = torch.randn(2, len(case.lengths), N_BLOCK, HEADS.row)
    n = len(which) * N_BLOCK + 1
    proj = torch.cat([own[:, which].flatten(1, 2), torch.full((2, 1, HEADS.row), torch.nan)], 1).to(device)

    def i32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    positions = [case.lengths[b] + i for b in which for i in range(N_BLOCK)] + [0]
    slots = [b for b in which for _ in range(N_BLOCK)]
    rows = Rows(i32([*slots, 0]), i32([*slots, -1]), i32(positions))
    ends = [case.lengths[b] + (i if sees[0] else N_BLOCK - 1) for b in which for i in range(N_BLOCK)] + [0]
    out = torch.full((n, HEADS.n_q * HEADS.dim), torch.nan, dtype=torch.bfloat16, device=device)
    cache = KvPages(case.pages.clone(), table=case.table)
    scratch = block_scratch(HEADS, n, allocate_on(device))
    for part in (scratch.output, scratch.weight):
        part.fill_(torch.nan)
    keys_decode(proj, HEADS, case.weights, rows=rows, cache=cache)
    block_attention(
        proj, HEADS, case.weights, rows=rows, sight=Sight(i32(ends), sees[1]), cache=cache, scratch=scratch, out=out
    )
    assert out[-1].isnan().all()
    return out[:-1].view(len(which), N_BLOCK, -1).cpu()


def expected(case: Case, sees: tuple[bool, int], batch_slot: int) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(2, len(case.lengths), N_BLOCK, HEADS.row).sum(0)[batch_slot]
    at = case.lengths[batch_slot] + torch.arange(N_BLOCK)
    inv_freq = 10_000.0 ** (-torch.arange(case.half).double() / case.half)
    q, k, v = x.split([HEADS.n_q * HEADS.dim] + [HEADS.n_kv * HEADS.dim] * 2, -1)
    q, k = (
        layers.rounded(
            layers.rope(layers.rms_norm(y.unflatten(-1, (-1, HEADS.dim)), w.cpu(), EPS), at, inv_freq), "bfloat16"
        )
        for y, w in ((q, case.q_norm), (k, case.k_norm))
    )
    v = layers.rounded(v, "bfloat16").unflatten(-1, (-1, HEADS.dim))
    old = case.history[batch_slot].float()
    keys = reference.Keys(torch.cat([old[0], k]), torch.cat([old[1], v]))
    return reference.attend(q, keys, case.lengths[batch_slot], *sees).flatten(1)


@pytest.mark.parametrize("sees", SEES)
def test_blocks_against_the_oracle(device: str, sees: tuple[bool, int]) -> None:
    """Of one tile, of as many as parts, and of more; a block alone has the bits that it has among others."""
    case = make(device, HEADS, 32, [3, 130, 600, 59, 640])  # the last for its angles
    together = blocks(case, device, sees, [0, 1, 2, 3])
    for batch_slot, found in enumerate(together):
        torch.testing.assert_close(found.float(), expected(case, sees, batch_slot), **TOLERANCE)
    assert torch.equal(blocks(case, device, sees, [2]).view(torch.int16)[0], together.view(torch.int16)[2])


def test_keys_of_layers_are_those_of_each(device: str) -> None:
    """Bit for bit, with another norm in each; a row that is idle writes nothing."""
    case = make(device, HEADS, 32, [3, 130, 59, 64])
    slots = [i32(device, *x) for x in ((0, 1, 2, 3), (0, 1, 2, -1), (3, 130, 59, 64))]
    rows, proj = Rows(*slots), torch.randn(2, 4, 3 * HEADS.row, device=device)
    norms = torch.stack([case.weights.k_norm * factor for factor in (1.0, 2.0, -0.5)])
    pages = torch.stack([case.pages] * 3, 1).contiguous()
    weights = replace(case.weights, k_norm=norms)
    keys_of_layers(proj, HEADS, weights, rows=rows, cache=KvPages(pages, table=case.table))
    assert not torch.equal(pages[:, 0], case.pages)
    for i, norm in enumerate(norms):
        alone, of_layer = case.pages.clone(), proj[:, :, i * HEADS.row : (i + 1) * HEADS.row]
        own = replace(case.weights, k_norm=norm)
        keys_decode(of_layer, HEADS, own, rows=rows, cache=KvPages(alone, table=case.table))
        assert torch.equal(pages[:, i].contiguous().view(torch.int16), alone.view(torch.int16)), i


@pytest.mark.parametrize("width", [96, 1024])
def test_convolutions_against_the_oracle(device: str, width: int) -> None:
    torch.manual_seed(2)
    taps, group, nth = 2, 16, [0, 1, 2, 0, 0, 1]
    n, base = len(nth), torch.randn(2 * taps, width)
    own = torch.randn(3, n, 2 * taps * (width // group)) / 8
    numbers = torch.tensor(nth, dtype=torch.int32, device=device)
    kernels = own.sum(0).unflatten(-1, (2, taps, -1))
    x = torch.randn(n, width).bfloat16()
    out = torch.full((n, width), torch.nan, dtype=torch.bfloat16, device=device)
    block_conv(x.to(device), base.to(device), own.to(device), group, nth=numbers, out=out)
    starts = [0, 3, 4, n]
    for begin, end in itertools.pairwise(starts):
        part = reference.convolve(x[begin:end].float(), kernels[begin:end, 0], base[:taps], group)
        torch.testing.assert_close(out[begin:end].cpu().float(), part, atol=2e-2, rtol=1e-2)
    y, residual = torch.randn(2, n, width), torch.randn(n, width)
    total = residual.clone().to(device)
    block_conv(y.to(device), base.to(device), own.to(device), group, nth=numbers, out=total)
    for begin, end in itertools.pairwise(starts):
        part = reference.convolve(y.sum(0)[begin:end], kernels[begin:end, 1], base[taps:], group)
        torch.testing.assert_close(total[begin:end].cpu(), residual[begin:end] + part, atol=1e-5, rtol=1e-5)


def i32(device: str, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_blocks_begin_behind_what_was_accepted(device: str) -> None:
    """Behind a draft of which one token was drawn, behind a row without one, and behind one that is idle; the first block has a row
    more than its pages.
    """
    drafts = Drafts(*(i32(device, *x) for x in ((0, 1, 2, 0, 0), (0, 41, 42, 0, 0), (3, 0, 0, 1, 1), (0,) * 5)))
    slots = (0, 0, 0, 1, 2), (5, 5, 5, 6, -1), (10, 11, 12, 30, 0)
    step = Rows(*(i32(device, *x) for x in slots), drafts=drafts)
    of_host = (0, 0, 0, 3, 3, 4, -1), (0, 1, 2, 0, 1, 0, 0), (3, 3, 3, 2, 2, 1, 0), (14, 14, 14, 64, 64, 64, 0)
    g = guess_blocks(tuple(i32(device, *x) for x in of_host), allocate_on(device))  # type: ignore[arg-type]
    used = [0, 1, 3, 4]
    for at_anchor in (False, True):
        history = torch.ones((3, 64), dtype=torch.int32, device=device)
        begin_block(step, i32(device, 41, 43, 99, 50, 60), g, history, 300, at_anchor=at_anchor)
        cleared = [[0, 13], [0, 14], [1, 32], [1, 33]] if at_anchor else [[0, 13], [1, 32]]
        assert (history == -1).nonzero().tolist() == cleared and (history != -1).sum() == (history == 1).sum()
        assert g.token.tolist()[:5] == [43, 300, 300, 50, 300]
        assert [g.end.tolist()[i] for i in used] == [13, 13, 32, 32]
        assert g.rows.state_slot.tolist() == [5, 5, -1, 6, 6, -1, -1]
        assert [g.rows.position.tolist()[i] for i in used] == [12, 13, 31, 32]
        assert g.turn.tolist() == ([0, 1, -1, 0, 1, -1, -1] if at_anchor else [-1, 0, -1, -1, 0, -1, -1])
        assert g.draws.batch_slot.tolist() == ([0, 0, -1, 1, 1, -1, -1] if at_anchor else [-1, 0, -1, -1, 1, -1, -1])
        assert [g.draws.position.tolist()[i] for i in used] == [13 - (not at_anchor) + i for i in (0, 1, 19, 20)]


N_VOCAB, N_REAL, RANK, TOP_K, WIDTH, LEAST = 2100, 2090, 32, 5, 48, 0.45
"""Two tiles of ids, of which some of the second are padding."""


def bounded(logits: Tensor) -> Tensor:
    shape = SimpleNamespace(output_multiplier=0.5, softcap=3.0)
    scores: Tensor = reference.logits_of(shape, logits, torch.eye(N_VOCAB))
    return scores


def test_candidates_are_the_likeliest_ids(device: str) -> None:
    """Of equal logits the lower ids; the others are ruled out, and padding stays as it is."""
    torch.manual_seed(4)
    logits = torch.randn(3, N_VOCAB).mul(2).round()
    logits[:, N_REAL:] = 99.0
    found, chosen = logits.clone().to(device), candidates(3, N_VOCAB, TOP_K, allocate_on(device))
    bound_scores(found, N_REAL, 0.5, 3.0, chosen)
    values, ids = bounded(logits)[:, :N_REAL].sort(descending=True, stable=True)
    assert chosen.id.cpu().tolist() == ids[:, :TOP_K].tolist()
    torch.testing.assert_close(chosen.logit.cpu(), values[:, :TOP_K], rtol=1e-5, atol=1e-6)
    assert (found[:, :N_REAL] == -1e30).all() and (found[:, N_REAL:] == 99.0).all()
    found = logits.clone().to(device)
    bound_scores(found, N_REAL, 1.0, 0.0)
    assert torch.equal(found.cpu(), logits)
    bound_scores(found, N_REAL, 0.5, 3.0)
    torch.testing.assert_close(found.cpu()[:, :N_REAL], bounded(logits)[:, :N_REAL], rtol=1e-5, atol=1e-6)
    scale_rows(found, 0.5)
    assert (found[:, N_REAL:] == 49.5).all()


def walked(device: str, kind: str, late: bool = False) -> tuple[list[list[int]], list[list[int]]]:
    """Guesses of several blocks, and those of the reference. late: a fault, the token before is that of the block."""
    torch.manual_seed(3)
    at_anchor, lengths = kind == "dspark", [4, 2, 6]
    nth = [i for n in lengths for i in range(n)] + [0]
    n, first, allocate = len(nth), int(kind != "dspark"), allocate_on(device)
    turn = [max(-1, i - first) for i in nth[:-1]] + [-1]
    anchors = [11 * i + 5 for i in range(len(lengths))]
    tokens = [a if i == 0 else 300 for a, length in zip(anchors, lengths, strict=True) for i in range(length)] + [0]
    zeros = i32(device, *[0] * n)
    g = guess_blocks((zeros, i32(device, *nth), zeros, zeros), allocate)
    for part, words in ((g.turn, turn), (g.token, tokens), (g.rows.batch_slot, range(n))):
        part.copy_(i32(device, *words))
    logits, books = 3 * torch.randn(n, N_VOCAB), [(torch.randn(N_VOCAB, RANK) / 2).bfloat16() for _ in range(2)]
    logits[:, N_REAL:] = 99.0
    of_rows, states = bounded(logits), torch.randn(n, WIDTH).bfloat16()
    of_rows[:, N_REAL:] = -torch.inf
    scores, guesses = logits.clone().to(device), i32(device, *[7] * n)
    before, embedded, pairs, chance = books[0].to(device), None, None, None
    weights: Any = SimpleNamespace(markov=None, selector=None, confidence=None)
    if kind == "dflash2":
        projected, chosen = torch.randn(2, n, RANK), candidates(n, N_VOCAB, TOP_K, allocate)
        bound_scores(scores, N_REAL, 0.5, 3.0, chosen)
        pairs, states = PairScores(books[1].to(device), projected.to(device), chosen), projected.sum(0)
        weights.selector = SimpleNamespace(predecessor=books[0], successor=books[1], projection=torch.eye(RANK))
    else:
        bound_scores(scores, N_REAL, 0.5, 3.0)
        weights.markov = SimpleNamespace(before=books[0], after=books[1].float())
        weights.confidence = SimpleNamespace(weight=torch.randn(WIDTH + RANK) / 8, bias=torch.tensor([1.0]))
        embedded = torch.full((n, RANK), torch.nan, dtype=torch.bfloat16, device=device)
        chance = Chance(
            states.to(device), *(part.to(device) for part in vars(weights.confidence).values()), least=LEAST
        )
    for _ in range(max(lengths) - first):
        seen = g.token if late else guesses
        next_guess(g, seen, scores, before, embedded, pairs, chance, guesses_at_anchor=at_anchor)
        if embedded is not None:
            add_scores(embedded.float() @ books[1].float().T.to(device), g.draws, scores, N_REAL)
        guesses = torch.where(g.draws.batch_slot >= 0, scores[:, :N_REAL].argmax(1).int(), guesses)
    assert guesses[-1] == 7 and (at_anchor or guesses[0] == 7), "rows without a guess"
    shape = SimpleNamespace(selector_top_k=TOP_K, confidence_sees_token=True)
    found, expected, end = list[list[int]](), list[list[int]](), 0
    for anchor, length in zip(anchors, lengths, strict=True):
        rows, end = slice(end + first, end + length), end + length
        path = reference.guess(weights, shape, states[rows], of_rows[rows], anchor)
        if chance is not None:
            chances = [
                reference.confidence(weights, shape, state.float(), token)
                for state, token in zip(states[rows], [anchor, *path], strict=False)
            ]
            n_kept = next((i for i, each in enumerate(chances) if each < LEAST), length)
            path = path[:n_kept] + [-1] * (length - n_kept)
        found.append(guesses[rows].tolist())
        expected.append(path)
    return found, expected


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_blocks_are_walked_as_the_reference_does(device: str, kind: str) -> None:
    found, expected = walked(device, kind)
    assert found == expected
    if kind == "dspark":
        assert 0 < sum(path.count(-1) for path in expected) < 10, "some end early"


def test_a_fault_of_the_walk_is_seen(device: str) -> None:
    found, expected = walked(device, "dflash2", late=True)
    assert found != expected


def test_what_does_not_fit_is_refused(device: str) -> None:
    x = torch.zeros(2, 32, dtype=torch.bfloat16, device=device)
    with pytest.raises(KernelError, match="kernels of width 32"):
        block_conv(x, torch.zeros(4, 16, device=device), torch.zeros(1, 2, 8, device=device), 16, nth=x, out=x.clone())
