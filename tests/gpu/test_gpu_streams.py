"""Hyper-connections on a GPU against their equations; a row's bits are its own, and every format of weights is read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltic.ops.contract import KernelError
from deltic.ops.gpu.streams import gates, read, streams_norm
from tests.gpu.matrices import in_rows
from tests.reference import layers

EPS = 1e-6
SIZES = [(2, 64, 32), (4, 64, 64)] + ([(4, 2560, 320)] if torch.cuda.is_available() else [])
"""Streams, width of one, rank."""


def randn(device: str, *size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize(("n_streams", "width", "_"), SIZES)
@pytest.mark.parametrize("n_slices", [0, 1, 3])
def test_norm_adds_the_block_in_front(device: str, n_streams: int, width: int, _: int, n_slices: int) -> None:
    n = 5
    x, w = randn(device, n, n_streams, width), 0.3 * randn(device, n_streams * width, seed=1)
    block = randn(device, n_slices, n, width, seed=2) if n_slices else None
    inject = randn(device, n, n_streams, seed=3).abs()
    expected = x if block is None else x + inject[:, :, None] * block.sum(0)[:, None]
    normed = layers.rms_norm(expected, w.view(n_streams, width), EPS).flatten(1)
    streams, out = x.clone(), torch.full((n, n_streams * width), torch.nan, dtype=torch.bfloat16, device=device)
    streams_norm(streams, block, inject if n_slices else None, w, EPS, out)
    assert torch.allclose(streams, expected, atol=1e-5) and torch.allclose(out.float(), normed, atol=0.02, rtol=0.01)
    rows = torch.tensor([3, 0], dtype=torch.int32, device=device)
    picked, before = torch.full_like(out[:2], torch.nan), x.clone()
    streams_norm(before, block, inject if n_slices else None, w, EPS, picked, rows=rows)
    assert torch.equal(picked, out[[3, 0]]) and torch.equal(before, x)


@pytest.mark.parametrize(("n_streams", "_", "rank"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates(device: str, n_streams: int, _: int, rank: int, dtype: torch.dtype) -> None:
    sums = randn(device, 3, 7, rank + n_streams).to(dtype)
    low = torch.full((7, rank), torch.nan, dtype=torch.bfloat16, device=device)
    inject = torch.full((7, n_streams), torch.nan, device=device)
    gates(sums, low, inject, n_streams)
    total = sums.float().sum(0) / n_streams
    assert torch.allclose(low.float(), torch.nn.functional.silu(total[:, :rank]), atol=1e-2, rtol=1e-2)
    assert torch.allclose(inject, 2 * torch.sigmoid(total[:, rank:]), atol=1e-5)
    last = torch.full_like(low, torch.nan)
    gates(sums[:, :, :rank].contiguous(), last, None, n_streams)
    assert torch.equal(last, low)


@pytest.mark.parametrize(("n_streams", "width", "rank"), SIZES)
def test_read(device: str, n_streams: int, width: int, rank: int) -> None:
    most = 130
    low, normed = randn(device, most, rank).bfloat16(), randn(device, most, n_streams * width, seed=1).bfloat16()
    up = (randn(device, n_streams * width, rank, seed=2) * rank**-0.5).bfloat16()
    mixed = torch.sigmoid(low.float() @ up.float().T) * normed.float()
    expected = mixed.view(most, n_streams, width).mean(1)
    alone: list[Tensor] = []
    for n in (1, 16, 17, most):
        out = torch.full((n, width), torch.nan, dtype=torch.bfloat16, device=device)
        read(low[:n].contiguous(), in_rows(up), normed[:n].contiguous(), out)
        assert torch.allclose(out.float(), expected[:n], atol=0.01, rtol=0.01)
        alone.append(out)
    assert all(torch.equal(out, alone[-1][: len(out)]) for out in alone)


def test_read_refuses_what_does_not_fit(device: str) -> None:
    x = torch.zeros(1, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(KernelError, match="2, 4 or 8 streams"):
        read(x, in_rows(torch.zeros(3 * 64, 64, dtype=torch.bfloat16, device=device)), x.repeat(1, 3), x.clone())
