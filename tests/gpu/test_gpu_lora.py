"""Adapters on a GPU: the kernels against NumPy's sums, and whole requests: bits of rows with an adapter, and of those without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from deltic.models.qwen.adapters import Adapter, Delta
from deltic.models.qwen.gpu_adapters import AdapterMemory
from deltic.ops.arrays import bfloat16
from deltic.ops.gpu.blocks import BLOCK, GROUP_ROWS, AdapterRows
from deltic.ops.gpu.launch import Levers
from deltic.ops.gpu.lora import WORDS, Target, expand, gather, n_sums, shrink
from deltic.runtime.gpu import adapters as store
from deltic.runtime.gpu.adapters import AdapterStore, adapter_bytes

LEVERS = Levers()


def terms(rng: np.random.Generator, k: int, rank: int, first: int, n: int, scale: float, n_matrices: int = 1) -> Delta:
    def values(*size: int) -> Any:
        return rng.normal(0, 0.5, size).astype(np.float32).astype(bfloat16)

    return Delta(first, values(n_matrices, rank, k), values(n_matrices, n, rank), scale)


def added(deltas: tuple[Delta, ...], x: Tensor, n: int) -> Tensor:
    """float64 [N, n]: what they add to the product with x, rounded where the kernels round."""
    found = torch.zeros(len(x), n, dtype=torch.float64)
    for delta in deltas:
        down, up = (torch.from_numpy(part[0].astype(np.float64)) for part in (delta.down, delta.up))
        v = (x.double().cpu() @ down.T * delta.scale).bfloat16().double()
        found[:, delta.first : delta.first + delta.n_rows] += v @ up.T
    return found


@dataclass
class Loaded:
    """One matrix's terms of several adapters on the device."""

    target: Target
    deltas: list[tuple[Delta, ...]]


def load(
    deltas: list[tuple[Delta, ...]], n: int, k: int, n_segments: int, rank: int, n_sums: int, device: str, monkeypatch: pytest.MonkeyPatch,
    name: str = "w",
) -> Loaded:  # fmt: skip
    monkeypatch.setattr(store, "sizes", lambda shape: {name: store_size(n, k)})
    monkeypatch.setattr(store, "n_segments", lambda name: n_segments)
    found = [Adapter(bytes(16), {name: of}, ()) for of in deltas]
    n_bytes = sum(adapter_bytes(one) for one in found)
    memory = AdapterMemory(
        torch.full((n_bytes // 2,), torch.nan, dtype=torch.bfloat16, device=device),
        torch.zeros((len(found), 1, WORDS), dtype=torch.int64, device=device),
        torch.full((n_sums,), torch.nan, device=device),
        None,
    )
    own = AdapterStore(None, memory, torch.cuda.Stream() if device == "cuda" else None)  # type: ignore[arg-type]
    for i, one in enumerate(found):
        own.put(i, one).result()
    own.close()
    return Loaded(Target(memory.table[:, 0], memory.arena, memory.sums, n, k, n_segments, rank), deltas)


def store_size(n: int, k: int) -> Any:
    from deltic.models.qwen.gpu_adapters import Sized

    return Sized(n, k)


def groups(adapters: list[int], device: str) -> AdapterRows:
    """Of the rows of a decode, as the host puts them together."""
    n, found = len(adapters), list[tuple[int, list[int]]]()
    for adapter in dict.fromkeys(adapters):
        rows = [i for i, one in enumerate(adapters) if one == adapter]
        found += [(adapter, rows[i : i + GROUP_ROWS]) for i in range(0, len(rows), GROUP_ROWS) if adapter >= 0]
    row = torch.full((n, GROUP_ROWS), -1, dtype=torch.int32)
    who = torch.full((n,), -1, dtype=torch.int32)
    for i, (adapter, rows) in enumerate(found):
        who[i], row[i, : len(rows)] = adapter, torch.tensor(rows, dtype=torch.int32)
    return AdapterRows(who.to(device), row.to(device), torch.tensor(adapters, dtype=torch.int32, device=device))


CASES = {
    "one term": (96, 64, [(0, 96, 3)]),
    "a fused matrix, of some rows": (200, 288, [(0, 130, 16), (130, 3, 17), (197, 3, 40)]),
    "a long sum": (40, 5216, [(8, 30, 5)]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("are_blocks", [False, True])
def test_against_the_sums(case: str, are_blocks: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two adapters of which one has fewer terms, and rows without any; and each row alone has the bits that it has among others."""
    n, k, parts = CASES[case]
    rng = np.random.default_rng(1)
    deltas = [
        tuple(terms(rng, k, rank, first, rows, 0.5) for first, rows, rank in of) for of in (parts, parts[:1])
    ]
    rank, n_segments = max(rank for _, _, rank in parts), len(parts)
    adapters = [0, -1, 1] if are_blocks else [1, 0, -1, *[0] * 17, -1]
    n_rows = len(adapters) * (BLOCK if are_blocks else 1)
    loaded = load(deltas, n, k, n_segments, rank, n_sums(n_rows, k, n_segments, rank, are_blocks), device, monkeypatch)
    x = torch.from_numpy(rng.normal(0, 1, (n_rows, k))).bfloat16().to(device)
    dtype = torch.bfloat16 if are_blocks else torch.float32
    before = torch.from_numpy(rng.normal(0, 1, (n_rows, n + 8))).to(dtype).to(device)

    def run(x: Tensor, out: Tensor, who: AdapterRows) -> Tensor:
        shrink(x, loaded.target, who, levers=LEVERS)
        expand(out[:, :n], loaded.target, who, levers=LEVERS)
        return out

    who = AdapterRows(torch.tensor(adapters, dtype=torch.int32, device=device)) if are_blocks else groups(adapters, device)
    out = run(x, before.clone(), who)
    each = BLOCK if are_blocks else 1
    for i, adapter in enumerate(adapters):
        rows = slice(i * each, (i + 1) * each)
        if adapter < 0:
            assert torch.equal(out[rows], before[rows])
            continue
        expected = before[rows, :n].double().cpu() + added(deltas[adapter], x[rows], n)
        error = (out[rows, :n].double().cpu() - expected).abs().max() / expected.abs().max()
        assert error < (0.01 if are_blocks else 0.004)
        assert torch.equal(out[rows, n:], before[rows, n:])
        if i < 4:
            alone = AdapterRows(who.adapter[i : i + 1]) if are_blocks else groups([adapter], device)
            assert torch.equal(run(x[rows].contiguous(), before[rows].clone(), alone), out[rows])


def test_of_tokens(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding's terms, of drafted tokens and of rows of pictures, too."""
    rng, n_vocab, h = np.random.default_rng(2), 50, 96
    delta = terms(rng, n_vocab, 5, 0, h, 0.25)
    loaded = load([(delta,)], h, n_vocab, 1, 5, n_sums(64, 1, 1, 5, True), device, monkeypatch, "embed")

    def on(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def expected(tokens: list[int]) -> Tensor:
        one_hot = torch.eye(n_vocab, dtype=torch.float64)[tokens]
        return added((delta,), one_hot, h)

    def far(found: Tensor, wanted: Tensor) -> float:
        return float((found.double().cpu() - wanted).abs().max())

    who, out = groups([0, -1, 0, 0], device), torch.zeros(4, h, device=device)
    by_place = on(9, 30, 17)
    gather(by_place, loaded.target, who, 4, levers=LEVERS, places=on(2, 0, 1, 1), drafts=(on(0, 0, 0, 1), on(0, 0, 0, 44)))
    expand(out, loaded.target, who, parts=1, levers=LEVERS)
    assert not out[1].any() and far(out[[0, 2, 3]], expected([17, 30, 44])) < 1e-5
    tokens, out = [*range(50), *[0] * 14], torch.zeros(64, h, device=device)
    who = AdapterRows(on(0))
    gather(on(-3, *tokens[1:]), loaded.target, who, 64, levers=LEVERS)
    expand(out, loaded.target, who, parts=1, levers=LEVERS)
    assert not out[0].any() and far(out[1:], expected(tokens[1:])) < 1e-5
