"""Operators of a block drafter on the GPU (or in the interpreter) against the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from deltic.ops.contract import KernelError
from deltic.ops.geometry import AttentionHeads
from deltic.ops.gpu.attention_decode import keys_decode
from deltic.ops.gpu.block import Sight, block_attention, block_conv, block_scratch
from deltic.ops.gpu.blocks import Rows
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


@pytest.mark.parametrize("width", [96, 1024])
def test_convolutions_against_the_oracle(device: str, width: int) -> None:
    torch.manual_seed(2)
    taps, group, nth = 2, 16, [0, 1, 2, 0, 0, 1]
    n, base = len(nth), torch.randn(2 * taps, width)
    own = torch.randn(n, 2 * taps * (width // group)) / 4
    numbers = torch.tensor(nth, dtype=torch.int32, device=device)
    kernels = own.unflatten(-1, (2, taps, -1))
    x = torch.randn(n, width).bfloat16()
    out = torch.full((n, width), torch.nan, dtype=torch.bfloat16, device=device)
    block_conv(x.to(device), base.to(device), own.to(device), group, nth=numbers, out=out)
    starts = [0, 3, 4, n]
    for begin, end in itertools.pairwise(starts):
        part = reference.convolve(x[begin:end].float(), kernels[begin:end, 0], base[:taps], group)
        torch.testing.assert_close(out[begin:end].cpu().float(), part, atol=2e-2, rtol=1e-2)
    y, residual = torch.randn(n, width), torch.randn(n, width)
    total = residual.clone().to(device)
    block_conv(y.to(device), base.to(device), own.to(device), group, nth=numbers, out=total)
    for begin, end in itertools.pairwise(starts):
        part = reference.convolve(y[begin:end], kernels[begin:end, 1], base[taps:], group)
        torch.testing.assert_close(total[begin:end].cpu(), residual[begin:end] + part, atol=1e-5, rtol=1e-5)


def test_what_does_not_fit_is_refused(device: str) -> None:
    x = torch.zeros(2, 32, dtype=torch.bfloat16, device=device)
    with pytest.raises(KernelError, match="kernels of width 32"):
        block_conv(x, torch.zeros(4, 16, device=device), torch.zeros(2, 8, device=device), 16, nth=x, out=x.clone())
