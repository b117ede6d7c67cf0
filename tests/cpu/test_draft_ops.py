"""Operators of a block drafter on a CPU against the oracle: rows beyond the count stay as they were, and outputs begin as NaN."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from deltic.ops.contract import KernelError
from deltic.ops.cpu.draft import (
    BlockRows,
    Candidates,
    ConvKernels,
    block_conv,
    block_scores,
    confidence,
    keep_features,
    scale_rows,
)
from deltic.ops.cpu.program import Program
from tests.cpu.test_ops import BF16, F32, ONE_BF16_ULP, SETS, close, count, i32, poison
from tests.reference import dflash as reference
from tests.tensors import on_tensors

block_conv, block_scores, confidence, keep_features, scale_rows = map(
    on_tensors, (block_conv, block_scores, confidence, keep_features, scale_rows)
)


@pytest.fixture(params=SETS)
def program(request: pytest.FixtureRequest) -> Program:
    torch.manual_seed(0)
    return Program(2, library=request.param)


def test_features_stand_side_by_side(program: Program) -> None:
    x, out = torch.randn(7, 48), poison(7, 112, dtype=BF16)
    keep_features(program, x, out, 64, count(5))
    program.run()
    assert torch.equal(out[:5, 64:], x[:5].to(BF16)) and out[:, :64].isnan().all() and out[5:].isnan().all()


def test_rows_are_scaled(program: Program) -> None:
    x = torch.randn(7, 48)
    before = x.clone()
    scale_rows(program, x, 1.5, count(5))
    program.run()
    assert torch.equal(x, torch.cat([1.5 * before[:5], before[5:]]))


@pytest.mark.parametrize(("width", "group", "taps"), [(96, 16, 2), (1056, 48, 3), (64, 32, 4)])
def test_convolutions(program: Program, width: int, group: int, taps: int) -> None:
    """Of blocks of several lengths behind one another: none sees a row of the one before."""
    nth, starts = [0, 1, 2, 3, 4, 0, 0, 1, 9, 9], [0, 5, 6, 8]
    n, base, own = len(nth), torch.randn(2 * taps, width), torch.randn(len(nth), 2 * taps * width // group) / 4
    x, out = torch.randn(n, width).to(BF16), poison(n, width, dtype=BF16)
    y, residual = torch.randn(n, width), torch.randn(n, width)
    total, kernels = residual.clone(), ConvKernels(base, own, group)
    block_conv(program, x, kernels, i32(*nth), out, count(8))
    block_conv(program, y, kernels, i32(*nth), total, count(8))
    program.run()
    own = own.unflatten(-1, (2, taps, -1))
    for begin, end in itertools.pairwise(starts):
        part = reference.convolve(x[begin:end].float(), own[begin:end, 0], base[:taps], group)
        close(out[begin:end], part, ONE_BF16_ULP, 1e-2)
        part = reference.convolve(y[begin:end], own[begin:end, 1], base[taps:], group)
        close(total[begin:end], residual[begin:end] + part, 1e-5)
    assert out[8:].isnan().all() and torch.equal(total[8:], residual[8:])


N_VOCAB, N_REAL, RANK = 70, 67, 32


def scored(program: Program, logits: Tensor, bounds: tuple[float, float], selector: Candidates | None) -> Tensor:
    """Scores of three blocks, whose rows are not in order."""
    out = poison(5, N_VOCAB)
    block_scores(program, logits, N_REAL, BlockRows(ROW, BEFORE, count(3)), bounds, selector, out)
    program.run()
    assert out[3:].isnan().all()
    return out[:3, :N_REAL]


ROW, BEFORE = i32(2, 0, 2, 9, 9), i32(5, 66, 0, -1, -1)


def bounded(logits: Tensor, factor: float, cap: float) -> Tensor:
    shape = SimpleNamespace(output_multiplier=factor, softcap=cap)
    return reference.logits_of(shape, logits, torch.eye(N_VOCAB))


@pytest.mark.parametrize("bounds", [(1.0, 0.0), (0.5, 0.0), (0.5, 3.0)])
def test_scores_are_bounded_logits(program: Program, bounds: tuple[float, float]) -> None:
    logits = 5 * torch.randn(4, N_VOCAB)
    found = scored(program, logits, bounds, None)
    close(found, bounded(logits, *bounds)[ROW[:3].long(), :N_REAL], 1e-5)


@pytest.mark.parametrize("top_k", [1, 5, 64])
def test_scores_of_a_selector(program: Program, top_k: int) -> None:
    """Of equal logits the lower ids are candidates; ids that are padding never are."""
    logits = torch.randn(4, N_VOCAB).mul(2).round()
    logits[:, N_REAL:] = 99.0
    books, projected = [(torch.randn(N_VOCAB, RANK) / 4).to(BF16) for _ in range(2)], torch.randn(4, RANK)
    found = scored(program, logits, (0.5, 3.0), Candidates(top_k, *books, projected))
    shape = SimpleNamespace(selector_top_k=top_k)
    selector = SimpleNamespace(predecessor=books[0], successor=books[1], projection=torch.eye(RANK))
    weights, of_rows = SimpleNamespace(markov=None, selector=selector), bounded(logits, 0.5, 3.0)
    of_rows[:, N_REAL:] = -torch.inf
    for s, (row, before) in enumerate(zip(ROW[:3].tolist(), BEFORE[:3].tolist(), strict=True)):
        expected = reference.step_scores(weights, shape, projected[row], of_rows[row], before)[:N_REAL]
        assert torch.equal(found[s] == -1e30, expected == -torch.inf)
        kept = expected > -torch.inf
        assert int(kept.sum()) == top_k
        close(found[s][kept], expected[kept], 1e-5)


@pytest.mark.parametrize("sees", [False, True])
def test_chances(program: Program, sees: bool) -> None:
    state, table = torch.randn(4, 48).to(BF16), torch.randn(N_VOCAB, RANK).to(BF16)
    head = torch.randn(48 + RANK * sees) / 8, torch.tensor([0.3])
    embedded, out = table[BEFORE.clamp(min=0).long()] if sees else None, poison(5)
    confidence(program, state, BlockRows(ROW, BEFORE, count(3)), embedded, head, out)
    program.run()
    shape = SimpleNamespace(confidence_sees_token=sees)
    of_head = SimpleNamespace(weight=head[0], bias=head[1])
    weights = SimpleNamespace(confidence=of_head, markov=SimpleNamespace(before=table))
    for s in range(3):
        expected = reference.confidence(weights, shape, state[ROW[s]].float(), int(BEFORE[s]))
        assert abs(float(out[s]) - expected) < 1e-5
    assert out[3:].isnan().all()


def test_what_does_not_fit_is_refused() -> None:
    program, x, nth = Program(1), torch.zeros(2, 32, dtype=BF16), i32(0, 1)
    with pytest.raises(KernelError, match="kernels of width 32"):
        block_conv(program, x, ConvKernels(torch.zeros(4, 16), torch.zeros(2, 8), 16), nth, x.clone(), count(2))
    with pytest.raises(KernelError, match="room for 32 columns"):
        keep_features(program, torch.zeros(2, 32), torch.zeros(2, 48, dtype=BF16), 32, count(2))
    rows, logits = BlockRows(ROW, BEFORE, count(1)), torch.zeros(4, N_VOCAB, dtype=F32)
    with pytest.raises(KernelError, match="at most 64 candidates"):
        block_scores(program, logits, N_REAL, rows, (1.0, 0.0), Candidates(65, logits, logits, logits), logits)
