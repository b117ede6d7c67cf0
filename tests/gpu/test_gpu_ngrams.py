"""The n-gram embedding on a GPU against tests/reference: rows of the table, gates, the dilated convolution over cuts, state slots,
drafts and company."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deltic.models.qwen.gpu_streams import hashed_table, reachable_table
from deltic.models.qwen.ngram_table import ngram_row_ids, ngram_table_of
from deltic.models.qwen.shape import ModelShape
from deltic.ops.arrays import bfloat16
from deltic.ops.contract import KernelError
from deltic.ops.gpu.blocks import BLOCK, Blocks, Rows
from deltic.ops.gpu.launch import allocate_in_host
from deltic.ops.gpu.ngrams import (
    STORED,
    HashedTable,
    NgramScratch,
    NgramVectors,
    ngram_add_decode,
    ngram_add_prefill,
    ngram_rows_decode,
    ngram_rows_prefill,
)
from tests.reference import flash_next
from tests.tiny import tiny_checkpoint
from tests.tiny_gguf import tiny_gguf

EPS = 1e-6
S, H, N_HEADS, WIDTH = 4, 64, 4, 32
RING = 14
NGRAMS = SimpleNamespace(
    primes=(1009, 1013, 1019, 1021), offsets=(0, 1009, 2022, 3041), multipliers=(2**44 + 1, 2**43 + 5, 2**45 - 19),
    size=3, eos_id=7, n_rows=4096,
)  # fmt: skip
SHAPE = SimpleNamespace(n_streams=S, hidden_size=H, rms_norm_eps=EPS, ngrams=NGRAMS)
IDS = [7, 3, 7, 7, 2, 100, 7, 250_000, 12, 13, 14, 15, 7, 1]


def rows_in(device: str, kind: str) -> tuple[HashedTable, Tensor, list[Tensor]]:
    """A table in parts of the host's memory, its values, and the parts."""
    values = torch.randn(NGRAMS.n_rows, WIDTH, generator=torch.Generator().manual_seed(0))
    scale = 0.25 if kind == "fp8" else 1.0
    stored = values.to(torch.float8_e4m3fn).view(torch.uint8) if kind == "fp8" else values.to(STORED[kind])
    parts = []
    for part in stored.split(1024):
        memory = allocate_in_host("part", tuple(part.shape), part.dtype)
        parts.append(memory.copy_(part))
    shown = stored.view(torch.float8_e4m3fn).float() * scale if kind == "fp8" else stored.float()

    def i64(integers: Any) -> Tensor:
        return torch.tensor(integers, dtype=torch.int64, device=device)

    table = HashedTable(
        i64([part.data_ptr() for part in parts]), 1024, WIDTH, kind, scale, NGRAMS.eos_id,
        i64(NGRAMS.multipliers), i64(NGRAMS.primes), i64(NGRAMS.offsets),
    )  # fmt: skip
    return table, shown, parts


def i32(device: str, values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("kind", list(STORED))
def test_rows_of_n_grams(device: str, kind: str) -> None:
    """A decode's from the history, and a prefill's from ids that the host makes, are those of the reference."""
    table, values, parts = rows_in(device, kind)
    expected = values[flash_next.ngram_ids(IDS, NGRAMS)].flatten(1).bfloat16()
    n = len(IDS)
    history = torch.full((3, n + 4), -1, dtype=torch.int32)
    history[1, :n] = torch.tensor(IDS)
    rows = Rows(i32(device, [1] * n), i32(device, [0] * (n - 1) + [-1]), i32(device, list(range(n))))
    out = torch.full((n, N_HEADS * WIDTH), torch.nan, dtype=torch.bfloat16, device=device)
    ngram_rows_decode(table, history.to(device), rows=rows, out=out)
    assert torch.equal(out[:-1].cpu(), expected[:-1]) and out[-1].isnan().all()
    before = [NGRAMS.eos_id, *IDS[:-1]]
    two = [7 if last == 7 else second for last, second in zip(before, [7, 7, *IDS[:-2]], strict=True)]
    ngram_rows_prefill(table, i32(device, [IDS, before, two]), out=out)
    assert torch.equal(out.cpu(), expected)
    assert len(parts) == 4  # they are there as long as the table


@pytest.mark.parametrize("stored", ["parts", "blocks"])
def test_rows_of_a_checkpoint_are_those_that_a_cpu_reads(device: str, stored: str) -> None:
    """Also of a table in GGUF's blocks, which is values where a GPU reads it."""
    path = tiny_gguf("flash", "Q8_0") if stored == "blocks" else tiny_checkpoint("flash")
    shape = ModelShape.from_directory(path)
    ngrams, table = shape.ngrams, ngram_table_of(path, shape.ngrams)
    assert ngrams is not None and table is not None
    reached = reachable_table(table, lambda done, total: None)
    assert reachable_table(reached, lambda done, total: pytest.fail("once is enough")) is reached
    ids = torch.randint(shape.vocab_size, (ngrams.size, 40), generator=torch.Generator().manual_seed(0)).int()
    expected, out = (
        np.empty((40, ngrams.width), bfloat16),
        torch.empty(40, ngrams.width, dtype=torch.bfloat16, device=device),
    )
    table.gather(ngram_row_ids(ngrams, ids[0].numpy(), ids[1:].T.numpy()), expected)
    ngram_rows_prefill(hashed_table(reached, ngrams, torch.device(device)), ids.to(device), out=out)
    assert out.cpu().view(torch.int16).numpy().tobytes() == expected.tobytes()


def weights(device: str) -> tuple[NgramVectors, SimpleNamespace]:
    g = torch.Generator().manual_seed(1)
    norms = [0.3 * torch.randn(S * H, generator=g) for _ in range(3)]
    conv = torch.randn(S * H, 4, generator=g)
    key, query, of_conv = (x.to(device) for x in norms)
    own = NgramVectors(key, query, of_conv, conv.T.contiguous().to(device), 3, EPS)
    return own, SimpleNamespace(key_norm=norms[0], query_norm=norms[1], conv_norm=norms[2], conv=conv)


def text(n: int) -> tuple[Tensor, Tensor]:
    """Streams [n, S, H] and kv [n, (S + 1) H], whose values are bfloat16's."""
    g = torch.Generator().manual_seed(2)
    kv = torch.randn(n, (S + 1) * H, generator=g).bfloat16()
    kv[-1, :H] = 0  # a gate at 0
    return torch.randn(n, S, H, generator=g), kv


def expected(x: Tensor, kv: Tensor, of: SimpleNamespace) -> Tensor:
    """By tests/reference, whose product is one with the identity."""
    layer = SimpleNamespace(proj=torch.eye((S + 1) * H), **vars(of))
    return x + flash_next.ngram_embedding(x.flatten(1), kv.float(), layer, SHAPE, "bfloat16").view(x.shape)


def columns_in(device: str) -> Tensor:
    return torch.full((4, 2, RING, S * H), torch.nan, dtype=torch.bfloat16, device=device)[:, 1]


def decode(x: Tensor, kv: Tensor, own: NgramVectors, columns: Tensor, positions: list[int], slots: list[int]) -> Tensor:
    """Rows of one token each. kv in two slices."""
    device = columns.device
    streams = x.clone().to(device)
    parts = torch.stack([kv.float(), torch.zeros_like(kv, dtype=torch.float32)]).to(device)
    rows = Rows(*(i32(str(device), v) for v in (slots, slots, positions)))
    gate = torch.full((len(x), S), torch.nan, device=device)
    ngram_add_decode(streams, None, None, parts, own, rows=rows, gate=gate, columns=columns)
    return streams.cpu()


def prefill(
    x: Tensor, kv: Tensor, own: NgramVectors, columns: Tensor, start: int, slots: tuple[int, int], snapshot: int = -1
) -> Tensor:
    """A chunk of one sequence from `start`, from one state slot into another; the snapshot is of its first block."""
    device, n = str(columns.device), len(x)
    n_blocks = -(-n // BLOCK)
    streams = torch.full((n_blocks * BLOCK, S, H), 5.0, device=device)
    given = torch.full((1, n_blocks * BLOCK, (S + 1) * H), 5.0, dtype=torch.bfloat16, device=device)
    streams[:n], given[0, :n] = x.to(device), kv.to(device)
    lengths = [BLOCK] * (n_blocks - 1) + [n - (n_blocks - 1) * BLOCK]
    blocks = Blocks(
        *(i32(device, v) for v in (
            lengths, list(range(start, start + n, BLOCK)), [0] * n_blocks, [0] * n_blocks,
            [snapshot] + [-1] * (n_blocks - 1), [0, n_blocks], [slots[0]], [slots[1]], [0] * n_blocks,
        ))
    )  # fmt: skip
    made = NgramScratch(
        torch.full((n_blocks * BLOCK, S), torch.nan, device=device),
        torch.full((n_blocks * BLOCK, S * H), torch.nan, dtype=torch.bfloat16, device=device),
    )
    ngram_add_prefill(streams, None, None, given, own, blocks=blocks, made=made, columns=columns)
    return streams[:n].cpu()


def test_prefill_and_decode_follow_the_reference(device: str) -> None:
    """Chunks of any length, a snapshot between, other state slots, and then tokens one by one, in company."""
    own, of = weights(device)
    n = 67
    x, kv = text(n + 3)
    whole = expected(x, kv, of)
    columns = columns_in(device)
    for cuts in ([n], [64, n - 64]):
        columns = columns_in(device)
        at, outs, slot = 0, [], 0
        for i, length in enumerate(cuts):
            part = slice(at, at + length)
            outs.append(prefill(x[part], kv[part], own, columns, at, (slot, i + 1), snapshot=3 if length >= 64 else -1))
            at, slot = at + length, i + 1
        assert torch.allclose(torch.cat(outs), whole[:n], atol=0.02, rtol=0.01)
        if len(cuts) == 1:
            first, kept = torch.cat(outs), columns.clone()
        else:
            assert torch.equal(torch.cat(outs), first)
            last = [p % RING for p in range(n - 9, n)]
            assert torch.equal(columns[2, last], kept[1, last])
            snap = [p % RING for p in range(64 - 9, 64)]
            assert torch.equal(columns[3, snap], kept[3, snap])
    for t in range(n, n + 3):
        two = torch.tensor([t, 0])
        out = decode(x[two], kv[two], own, columns, [t, 0], [2, 0])
        assert torch.allclose(out[0], whole[t], atol=0.02, rtol=0.01)
        assert torch.allclose(out[1], whole[0], atol=0.02, rtol=0.01)


def test_a_short_prompt(device: str) -> None:
    own, of = weights(device)
    x, kv = text(7)
    columns = columns_in(device)
    assert torch.allclose(
        prefill(x[:4], kv[:4], own, columns, 0, (0, 0)), expected(x, kv, of)[:4], atol=0.02, rtol=0.01
    )
    for t in range(4, 7):
        out = decode(x[t : t + 1], kv[t : t + 1], own, columns, [t], [0])
        assert torch.allclose(out[0], expected(x, kv, of)[t], atol=0.02, rtol=0.01)


def test_rows_of_a_draft_have_the_bits_of_single_ones(device: str) -> None:
    """They read each other's, and what a wrong draft has left is written over."""
    own, _ = weights(device)
    x, kv = text(24)
    one, many = columns_in(device), columns_in(device)
    alone = torch.cat([decode(x[t : t + 1], kv[t : t + 1], own, one, [t], [1]) for t in range(24)])
    for t in range(12):
        decode(x[t : t + 1], kv[t : t + 1], own, many, [t], [1])
    wrong = [12, *range(1, 5)]
    decode(x[wrong], kv[wrong], own, many, [*range(12, 17)], [1] * 5)
    for begin in range(13, 24, 5):
        part = slice(begin, min(begin + 5, 24))
        n = part.stop - begin
        assert torch.equal(decode(x[part], kv[part], own, many, [*range(begin, begin + n)], [1] * n), alone[part])


def test_block_in_front_is_added_first(device: str) -> None:
    own, _ = weights(device)
    x, kv = text(3)
    g = torch.Generator().manual_seed(3)
    block, inject = torch.randn(2, 3, H, generator=g), torch.rand(3, S, generator=g)
    added = x + inject[:, :, None] * (block[0] + block[1])[:, None]
    rows = Rows(*(i32(device, v) for v in ([0, 1, 2], [0, 1, -1], [0, 0, 0])))
    outs = []
    for streams, front, factors in ((x, block.to(device), inject.to(device)), (added, None, None)):
        out = streams.clone().to(device)
        gate = torch.zeros(3, S, device=device)
        given = kv.float()[None].to(device), own
        ngram_add_decode(out, front, factors, *given, rows=rows, gate=gate, columns=columns_in(device))
        outs.append(out.cpu())
    assert torch.allclose(outs[0][:2], outs[1][:2], atol=1e-4) and torch.equal(outs[0][2], x[2])


def test_a_ring_that_is_too_short_is_refused(device: str) -> None:
    own, _ = weights(device)
    x, kv = text(1)
    with pytest.raises(KernelError, match="a ring longer than the taps span"):
        decode(x, kv, own, columns_in(device)[:, :9], [0], [0])
