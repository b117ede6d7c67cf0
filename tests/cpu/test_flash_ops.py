"""Operators of Qwen3.8-Flash-Next on a CPU, each against its equation: streams, n-grams, and the index over keys.

Bits do not depend on rows, chunks or threads. Outputs and scratch are poisoned with NaN.
"""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.ops.cpu.attention import AttentionInputs, attention, attn_prepare, kv_pages
from deltic.ops.cpu.gdn import GdnInputs
from deltic.ops.cpu.index import IndexBuffers, index_prepare, index_select
from deltic.ops.cpu.ngrams import NgramHash, NgramMemory, NgramRows, NgramWeights, ngram_conv, ngram_gate, ngram_rows
from deltic.ops.cpu.program import Program, usable_instruction_sets
from deltic.ops.cpu.streams import (
    BlockOutput,
    StreamRows,
    connection_gate,
    connection_mix,
    connection_norm,
    inject,
    round_rows,
    spread,
)
from deltic.ops.geometry import PAGE_SIZE, AttentionHeads, AttentionWeights, IndexHeads
from deltic.ops.kv_formats import KV_FORMATS, KvPages, on_device
from tests.cpu.grid import grid
from tests.tensors import array_of, on_tensors

(attention, attn_prepare, index_prepare, index_select, ngram_conv, ngram_gate, ngram_rows) = map(
    on_tensors, (attention, attn_prepare, index_prepare, index_select, ngram_conv, ngram_gate, ngram_rows)
)
(connection_gate, connection_mix, connection_norm, inject, round_rows, spread) = map(
    on_tensors, (connection_gate, connection_mix, connection_norm, inject, round_rows, spread)
)

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
SETS = usable_instruction_sets()
EPS = 1e-6
every_set = pytest.mark.parametrize("library", grid(SETS, SETS[:1], pytest.mark.long))


def poison(*size: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.full(size, float("nan"), dtype=dtype)


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=I32)


def count(n: int) -> Tensor:
    return torch.tensor(n, dtype=I32)


def normed(x: Tensor, w: Tensor, n_streams: int) -> Tensor:
    x = x.unflatten(-1, (n_streams, -1))
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return x.flatten(-2) * (1 + w)


def same(a: Tensor, b: Tensor) -> bool:
    kind = torch.int16 if a.dtype == BF16 else I32
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


S, H, RANK = 4, 96, 32


def connect(x: Tensor, w: Tensor, block: Tensor, low: Tensor, up: Tensor, library: str, n_threads: int) -> list[Tensor]:
    """StreamRows after the block before, its norm, the gate and the mix of rows, given what the products are."""
    n = len(x)
    x, target = x.clone(), poison(n, H)
    out, gate, mixed = poison(n, S * H, dtype=BF16), poison(n, RANK, dtype=BF16), poison(n, H, dtype=BF16)
    program = Program(n_threads, library=library)
    connection_norm(program, StreamRows(x, S, count(n)), w, EPS, out, BlockOutput(block, low))
    connection_gate(program, low, gate, count(n), S)
    connection_mix(program, up, out, mixed, count(n), target)
    program.run()
    assert (target == 0).all()
    return [x, out, gate, mixed]


@every_set
def test_a_connection_is_its_equation_in_any_company(library: str) -> None:
    torch.manual_seed(0)
    n = 37
    x, w, block = torch.randn(n, S * H), 0.1 * torch.randn(S * H), torch.randn(n, H)
    low, up = 3 * torch.randn(n, RANK + S), torch.randn(n, S * H)
    found = connect(x, w, block, low, up, library, 2)
    factor = 2 * torch.sigmoid(low[:, RANK:] / S)
    streams = x + (factor[:, :, None] * block[:, None]).flatten(1)
    n_ = normed(streams, w, S)
    mixed = (up.sigmoid() * found[1].float()).unflatten(-1, (S, H)).mean(1)
    torch.testing.assert_close(found[0], streams, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1].float(), n_, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(found[2].float(), F.silu(low[:, :RANK] / S), rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(found[3].float(), mixed, rtol=2**-7, atol=1e-5)
    for rows in (slice(0, 1), slice(5, 22)):
        some = connect(x[rows], w, block[rows], low[rows], up[rows], library, 1)
        assert all(same(a, b[rows]) for a, b in zip(some, found, strict=True))


def test_streams_begin_alike_and_are_read_by_rows() -> None:
    torch.manual_seed(0)
    x, row, block, low = poison(6, S * H), torch.randn(6, H), torch.randn(6, H), torch.randn(6, S)
    program = Program(2)
    spread(program, StreamRows(x, S, count(5)), row)
    inject(program, StreamRows(x, S, count(5)), BlockOutput(block, low))
    out, first, rows = poison(3, S * H, dtype=BF16), poison(3, S * H, dtype=BF16), i32(4, 0, 0)
    round_rows(program, StreamRows(x, S, count(2), rows), out)
    w = torch.randn(S * H)
    connection_norm(program, StreamRows(x, S, count(2), rows), w, EPS, first)
    program.run()
    expected = row[:, None] + 2 * torch.sigmoid(low / S)[:, :, None] * block[:, None]
    torch.testing.assert_close(x[:5], expected.flatten(1)[:5], rtol=1e-6, atol=1e-6)
    assert x[5].isnan().all() and out[2].isnan().all() and first[2].isnan().all()
    assert torch.equal(out[:2], x[[4, 0]].to(BF16))
    torch.testing.assert_close(first[:2].float(), normed(x[[4, 0]], w, S), rtol=2**-7, atol=1e-5)


TABLE_TYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32, "fp8": ml_dtypes.float8_e4m3fn}


@every_set
@pytest.mark.parametrize("name", TABLE_TYPES)
def test_rows_of_ngrams(library: str, name: str) -> None:
    """Products of 64 bits, rows of three parts, any type."""
    generator = np.random.default_rng(0)
    primes, width, part_rows = (101, 103, 107, 109), 16, 140
    multipliers = generator.integers(2**43, 2**44, 3) * 2 + 1
    offsets = np.cumsum([0, *primes[:-1]])
    parts = [generator.standard_normal((part_rows, width)).astype(TABLE_TYPES[name]) for _ in range(3)]
    addresses = np.array([part.ctypes.data for part in parts], np.int64)
    scale = 0.37 if name == "fp8" else 1.0
    ids, previous = (generator.integers(0, 248_320, (9, n)).astype(np.int32) for n in (1, 2))
    out = array_of(poison(9, 4 * width, dtype=BF16))
    program = Program(2, library=library)
    table = NgramRows(addresses, part_rows, width, np.dtype(TABLE_TYPES[name]), scale)
    hashed = NgramHash(multipliers.astype(np.int64), np.array(primes, np.int64), offsets.astype(np.int64))
    ngram_rows(program, table, hashed, ids[:, 0].copy(), previous, out, np.array(8, np.int32))
    program.run()
    for t in range(8):
        rows, mixed = [], int(ids[t, 0]) * int(multipliers[0])
        for n in range(2):
            mixed ^= int(previous[t, n]) * int(multipliers[n + 1])
            for h in (2 * n, 2 * n + 1):
                row = mixed % primes[h] + int(offsets[h])
                rows.append(parts[row // part_rows][row % part_rows].astype(np.float32) * np.float32(scale))
        assert (out[t] == np.concatenate(rows).astype(ml_dtypes.bfloat16)).all()
    assert np.isnan(out[8].astype(np.float32)).all()


def gate(kv: Tensor, x: Tensor, w: NgramWeights, library: str, n_threads: int) -> tuple[Tensor, Tensor]:
    x, out, program = x.clone(), poison(*x.shape, dtype=BF16), Program(n_threads, library=library)
    ngram_gate(program, kv, x, w, EPS, out, count(len(x)), S)
    program.run()
    return x, out


@every_set
def test_gates_of_ngrams(library: str) -> None:
    torch.manual_seed(0)
    kv, x = torch.randn(21, S * H + H), torch.randn(21, S * H)
    kv[3] = 0  # a gate of exactly 0
    w = NgramWeights(*(0.1 * torch.randn(S * H) for _ in range(3)), torch.randn(4, S * H))
    found, out = gate(kv, x, w, library, 2)
    key, value = kv.split([S * H, H], -1)
    g = (normed(key, w.key_norm, S) * normed(x, w.query_norm, S)).unflatten(-1, (S, H)).sum(-1) / math.sqrt(H)
    g = g.abs().clamp_min(1e-6).sqrt() * g.sign()
    u = (g.sigmoid()[:, :, None] * value[:, None]).flatten(1)
    torch.testing.assert_close(found, x + u, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.float(), normed(u, w.conv_norm, S), rtol=2**-7, atol=1e-4)
    for rows in (slice(0, 1), slice(4, 20)):
        some = gate(kv[rows], x[rows], w, library, 1)
        assert same(some[0], found[rows]) and same(some[1], out[rows])


CHANNELS, DILATION, N_WINDOW = 272, 3, 6


class Convolved:
    """Sequences whose state slots, batch slots and windows are numbered alike, and a way to run chunks of them."""

    def __init__(self, library: str, n_slots: int) -> None:
        torch.manual_seed(0)
        self.library, self.conv = library, torch.randn(4, CHANNELS)
        self.columns = poison(n_slots, 3 * DILATION, CHANNELS, dtype=BF16)
        self.window = poison(n_slots, N_WINDOW, CHANNELS, dtype=BF16)

    def run(self, chunks: list[dict], n_threads: int = 2) -> list[Tensor]:
        """Each chunk: slot, before, inputs; start, snapshots, redo, lazy as of `gdn`."""
        inputs = torch.cat([chunk["inputs"] for chunk in chunks])
        lengths = torch.tensor([len(chunk["inputs"]) for chunk in chunks])
        x, kept = torch.zeros(len(inputs), CHANNELS), [chunk.get("snapshots", []) for chunk in chunks]
        steps = GdnInputs(
            n_seqs=count(len(chunks)),
            seq_start=torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(I32),
            seq_context=i32(*(chunk["before"] for chunk in chunks)),
            batch_slot=i32(*(chunk["slot"] for chunk in chunks)),
            start_slot=i32(*(chunk.get("start", chunk["slot"]) for chunk in chunks)),
            state_slot=i32(*(chunk["slot"] for chunk in chunks)),
            snapshot_begin=torch.tensor([0, *map(len, kept)]).cumsum(0).to(I32),
            snapshot_n=i32(*(n for one in kept for n, _ in one)),
            snapshot_slot=i32(*(slot for one in kept for _, slot in one)),
            n_redo=i32(*(chunk.get("redo", 0) for chunk in chunks)),
            is_lazy=i32(*(chunk.get("lazy", 0) for chunk in chunks)),
        )
        program = Program(n_threads, library=self.library)
        ngram_conv(program, inputs, x, self.conv, steps, NgramMemory(self.columns, self.window))
        program.run()
        return list(x.split(lengths.tolist()))

    def expected(self, inputs: Tensor) -> Tensor:
        padded = F.pad(inputs.float(), (0, 0, 3 * DILATION, 0))
        total = sum(padded[j * DILATION : j * DILATION + len(inputs)] * self.conv[j] for j in range(4))
        return F.silu(total)


@every_set
def test_the_convolution_of_ngrams_in_chunks_drafts_and_snapshots(library: str) -> None:
    case = Convolved(library, 8)
    inputs, other = torch.randn(90, CHANNELS).to(BF16), torch.randn(70, CHANNELS).to(BF16)
    whole, alone = case.run([dict(slot=0, before=0, inputs=inputs), dict(slot=1, before=0, inputs=other)])
    torch.testing.assert_close(whole, case.expected(inputs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(alone, case.expected(other), rtol=1e-5, atol=1e-5)
    ends = case.columns[:2].clone()
    case.columns[:2] = float("nan")
    # A prompt in three chunks, of which the second begins from a checkpoint and leaves two snapshots, one of them short.
    parts = case.run([dict(slot=0, before=0, inputs=inputs[:5])], 1)
    parts += case.run([dict(slot=2, start=0, before=5, inputs=inputs[5:65], snapshots=[(2, 3), (59, 4)])])
    parts += case.run([dict(slot=2, before=65, inputs=inputs[65:])])
    assert same(torch.cat(parts), whole) and same(case.columns[2], ends[0])
    for slot, n in ((3, 7), (4, 64)):
        (rest,) = case.run([dict(slot=5, start=slot, before=n, inputs=inputs[n:])])
        assert same(rest, whole[n:])
    # Drafts: of five, two stay; then of four all.
    case.run([dict(slot=6, before=0, inputs=inputs[:20])])
    drafts = torch.cat([inputs[20:23], torch.full((3, CHANNELS), float("nan")).to(BF16)])
    (first,) = case.run([dict(slot=6, before=20, inputs=drafts, lazy=1)])
    assert same(first[:3], whole[20:23])
    (second,) = case.run([dict(slot=6, before=23, inputs=inputs[23:28], redo=3, lazy=1)])
    (last,) = case.run([dict(slot=6, before=28, inputs=inputs[28:], redo=5)])
    assert same(second, whole[23:28]) and same(last, whole[28:]) and same(case.columns[6], ends[0])


INDEX = IndexHeads(n_q=4, dim=128, ratio=4, budget=128)
HEADS = AttentionHeads(n_q=6, n_kv=2, dim=96)
ROTARY = 64


class Indexed:
    """Sequences over shuffled pages, their projections, and a way to run chunks of them."""

    def __init__(self, library: str, lengths: tuple[int, ...], kv: str = "bf16") -> None:
        torch.manual_seed(0)
        self.library, self.lengths, self.kv = library, lengths, KV_FORMATS[kv]
        self.proj = [torch.randn(n, HEADS.row) for n in lengths]
        self.index = [torch.randn(n, INDEX.row) for n in lengths]
        n_pages = [-(-n // PAGE_SIZE) for n in lengths]
        order = torch.randperm(sum(n_pages)).to(I32)
        self.table = torch.full((len(lengths), max(n_pages)), -1, dtype=I32)
        for row, pages in zip(self.table, order.split(n_pages), strict=True):
            row[: len(pages)] = pages
        size, dtype = kv_pages(sum(n_pages), 1, HEADS, self.kv)
        memory = torch.from_numpy(np.full(size, 255, np.uint8 if dtype == np.uint8 else np.uint16))[:, 0]
        self.pages = memory if dtype == np.uint8 else memory.view(BF16)
        self.index_pages = poison(sum(n_pages), 2, INDEX.page_rows, INDEX.dim, dtype=BF16)[:, 1]
        angles = torch.arange(max(lengths))[:, None] * 1e4 ** (-2 * torch.arange(ROTARY // 2) / ROTARY)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.norms = [0.1 * torch.randn(n) for n in (HEADS.dim, HEADS.dim, INDEX.dim, INDEX.dim)]

    def run(
        self, chunks: list[tuple[int, int, int]], n_threads: int = 2, *, is_chosen: bool = True, n_rows: int = 5
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(sequence, first token, end) of each chunk -> its output rows, and the groups that were chosen."""
        rows, index = (torch.cat([part[s][a:b] for s, a, b in chunks]) for part in (self.proj, self.index))
        counts, slots = torch.tensor([b - a for _, a, b in chunks]), i32(*(s for s, _, _ in chunks))
        positions = torch.cat([torch.arange(a, b) for _, a, b in chunks]).to(I32)
        inputs = AttentionInputs(
            n_tokens=count(len(rows)), positions=positions, angles=positions, group_angles=positions // 4 * 4,
            token_batch_slot=torch.repeat_interleave(slots, counts).to(I32), page_table=self.table,
            n_seqs=count(len(chunks)), seq_start=torch.cat([torch.zeros(1), counts.cumsum(0)]).to(I32),
            seq_context=i32(*(a for _, a, _ in chunks)), batch_slot=slots,
        )  # fmt: skip
        q, out = (poison(len(rows), HEADS.n_q * HEADS.dim, dtype=BF16) for _ in range(2))
        buffers = IndexBuffers(
            index, poison(len(rows), INDEX.n_q * INDEX.dim, dtype=BF16), poison(n_rows, 16 * self.table.shape[1]),
            torch.full((len(rows), INDEX.n_groups), -1, dtype=I32),
        )  # fmt: skip
        of_heads, of_index = (
            AttentionWeights(a, b, EPS, self.cos, self.sin) for a, b in (self.norms[:2], self.norms[2:])
        )
        program = Program(n_threads, library=self.library)
        cache = KvPages(self.pages, self.kv, chosen=buffers.chosen if is_chosen else None)
        attn_prepare(program, rows, HEADS, of_heads, inputs, cache, q)
        index_prepare(program, index, INDEX, of_index, inputs, self.index_pages, buffers.query)
        index_select(program, INDEX, inputs, self.index_pages, buffers)
        attention(program, q, rows, HEADS, inputs, cache, poison(64, HEADS.dim + 16), out)
        program.run()
        return list(out.split(counts.tolist())), list(buffers.chosen.split(counts.tolist()))

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        a, b = x[..., : ROTARY // 2], x[..., ROTARY // 2 : ROTARY]
        shape = [len(positions)] + [1] * (x.dim() - 2) + [-1]
        cos, sin = self.cos[positions].view(shape), self.sin[positions].view(shape)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., ROTARY:]], -1).to(BF16).float()

    def scores(self, s: int) -> Tensor:
        """[T, groups]: of all groups of a sequence, whether whole or not to a token."""
        query, key = self.index[s].split([INDEX.n_q * INDEX.dim, INDEX.dim], -1)
        n = len(key)
        query = normed(query.unflatten(-1, (INDEX.n_q, -1)), self.norms[2], 1)
        mean = key[: n // 4 * 4].to(BF16).float().unflatten(0, (-1, 4)).mean(1).to(BF16).float()
        keys = self.rotated(normed(mean, self.norms[3], 1), torch.arange(0, n // 4 * 4, 4))
        return torch.relu(torch.einsum("thd,gd->thg", self.rotated(query, torch.arange(n)), keys)).sum(1)


@every_set
def test_the_index_chooses_the_best_groups(library: str) -> None:
    case = Indexed(library, (333, 150))
    _, chosen = case.run([(0, 0, 333), (1, 0, 150)])
    for s, found in enumerate(chosen):
        scores = case.scores(s)
        for t, row in enumerate(found):
            n_groups = (t + 1) // 4
            if n_groups <= INDEX.n_groups:
                assert (row == -1).all()  # not written: all are read
                continue
            assert (row[1:] > row[:-1]).all() and row[0] >= 0 and row[-1] < n_groups
            least = scores[t, :n_groups].topk(INDEX.n_groups).values[-1]
            left = torch.ones(n_groups, dtype=torch.bool)
            left[row.long()] = False
            assert scores[t, row.long()].min() >= least - 1e-3 and scores[t, :n_groups][left].max() <= least + 1e-3


def test_among_equals_the_earlier_group_is_chosen() -> None:
    case = Indexed(SETS[0], (300,))
    case.index[0][:, INDEX.n_q * INDEX.dim :] = 0  # keys of 0: every score is 0
    case.index[0][200:204, INDEX.n_q * INDEX.dim :] = case.index[0][200:204, : INDEX.dim]
    _, (chosen,) = case.run([(0, 0, 300)])
    for t in range(4 * INDEX.n_groups + 3, 300):
        others = [group for group in chosen[t].tolist() if group != 50]
        assert others == list(range(len(others)))


@every_set
def test_choices_and_outputs_have_the_same_bits_however_they_come(library: str) -> None:
    case = Indexed(library, (333, 150))
    (whole, other), (chosen, others) = case.run([(0, 0, 333), (1, 0, 150)])
    for cuts, n_threads in (((0, 1, 64, 129, 130, 131, 132, 333), 1), ((0, 63, 65, 128, 200, 333), 3)):
        case = Indexed(library, (333, 150))
        outs, choices = [], []
        for a, b in itertools.pairwise(cuts):
            out, choice = case.run([(0, a, b)], n_threads, n_rows=1 if n_threads == 1 else 64)
            outs, choices = outs + out, choices + choice
        assert same(torch.cat(outs), whole) and torch.equal(torch.cat(choices), chosen)
    case = Indexed(library, (333, 150))
    case.run([(0, 0, 140), (1, 0, 140)])
    (_, late), (_, choice) = case.run([(0, 140, 141), (1, 140, 150)])
    assert same(late, other[140:]) and torch.equal(choice, others[140:])


@pytest.mark.parametrize("kv", on_device("cpu"))
def test_attention_reads_what_was_chosen(kv: str) -> None:
    """As attention over a sequence of only these tokens, in bits; up to the budget as attention without an index."""
    case = Indexed(SETS[0], (260,), kv)
    (found,), (chosen,) = case.run([(0, 0, 260)])
    plain = Indexed(SETS[0], (260,), kv)
    (all_keys,), _ = plain.run([(0, 0, 260)], is_chosen=False)
    n_plain = INDEX.budget + 3
    assert same(found[:n_plain], all_keys[:n_plain]) and not same(found[n_plain:], all_keys[n_plain:])
    for t in (n_plain, 195, 256, 259):
        tokens = [4 * group + i for group in chosen[t].tolist() for i in range(4)]
        tokens += range((t + 1) // 4 * 4, t + 1)
        # Pages that hold these tokens alone, as they were stored: the query follows from the last one's place.
        small = Indexed(SETS[0], (len(tokens),), kv)
        small.norms, small.cos, small.sin = case.norms, case.cos, case.sin
        assert same(found[t], gathered(case, small, t, tokens))


def gathered(case: Indexed, small: Indexed, t: int, tokens: list[int]) -> Tensor:
    """Attention of token t over these tokens, written to the pages of `small` with the angles that they have in `case`."""
    n, slots = len(tokens), torch.zeros(len(tokens), dtype=I32)

    def inputs(positions: Tensor, angles: Tensor) -> AttentionInputs:
        m = len(positions)
        return AttentionInputs(
            n_tokens=count(m), positions=positions, angles=angles, token_batch_slot=slots[:m], page_table=small.table,
            n_seqs=count(1), seq_start=i32(0, m), seq_context=positions[:1], batch_slot=i32(0),
        )  # fmt: skip

    weights = AttentionWeights(*case.norms[:2], EPS, case.cos, case.sin)
    rows, row, program = case.proj[0][tokens], case.proj[0][t : t + 1], Program(1, library=case.library)
    q, own, out = (poison(m, HEADS.n_q * HEADS.dim, dtype=BF16) for m in (n, 1, 1))
    cache, spare = KvPages(small.pages, case.kv), KvPages(torch.empty_like(small.pages), case.kv)
    at = torch.arange(n).to(I32)
    attn_prepare(program, rows, HEADS, weights, inputs(at, torch.tensor(tokens, dtype=I32)), cache, q)
    attn_prepare(program, row, HEADS, weights, inputs(at[-1:], i32(t)), spare, own)  # its key may not be among them
    attention(program, own, row, HEADS, inputs(at[-1:], i32(t)), cache, poison(0, HEADS.dim + 16), out)
    program.run()
    return out[0]
