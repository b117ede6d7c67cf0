"""Attention over several splits of the keys: right, and the same bits however the work is shared out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from deltic.ops.contract import KernelError
from deltic.ops.cpu.attention import AttentionInputs, attention, attn_prepare, kv_pages
from deltic.ops.cpu.program import Program, usable_instruction_sets
from deltic.ops.geometry import SPLIT_KEYS, AttentionHeads, AttentionWeights
from deltic.ops.kv_formats import KV_FORMATS, KvFormat, KvPages, on_device
from tests.cpu.grid import grid
from tests.reference import kv as kv_oracle
from tests.reference import layers as oracle
from tests.tensors import array_of, on_tensors

attention, attn_prepare = map(on_tensors, (attention, attn_prepare))

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
HEADS = AttentionHeads(n_q=4, n_kv=2, dim=128)
ROTARY = 32
LENGTHS = (5 * SPLIT_KEYS + 9, SPLIT_KEYS, 70, SPLIT_KEYS + 1)
EVERY_SPLIT_A_TASK = 4096  # records

SETS = usable_instruction_sets()
every_set = pytest.mark.parametrize("library", grid(SETS, SETS[:1], pytest.mark.long))


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=I32)


class Sequences:
    """Sequences over shuffled pages, their projections, and a way to run chunks of them."""

    def __init__(
        self, library: str, heads: AttentionHeads = HEADS, lengths: tuple[int, ...] = LENGTHS, kv: str = "bf16"
    ) -> None:
        torch.manual_seed(0)
        self.kernels, self.heads, self.lengths, self.kv = library, heads, lengths, KV_FORMATS[kv]
        self.proj = [torch.randn(n, heads.row) for n in lengths]
        for proj in self.proj:  # a softmax that is not flat
            proj[:, : heads.n_q * heads.dim] *= 3
        n_pages = [-(-n // 64) for n in lengths]
        order = torch.randperm(sum(n_pages)).to(I32)
        self.table = torch.full((len(lengths), max(n_pages)), -1, dtype=I32)
        for row, pages in zip(self.table, order.split(n_pages), strict=True):
            row[: len(pages)] = pages
        size, dtype = kv_pages(sum(n_pages), 1, heads, self.kv)
        self.pages = torch.from_numpy(np.full(size, 255, np.uint8 if dtype == np.uint8 else np.uint16))[
            :, 0
        ]  # no numbers
        self.pages = self.pages if dtype == np.uint8 else self.pages.view(BF16)
        self.inv_freq = torch.tensor([1e4 ** (-2 * i / ROTARY) for i in range(ROTARY // 2)], dtype=torch.float64)
        angles = (torch.arange(max(lengths))[:, None] * self.inv_freq).float()
        self.cos, self.sin = angles.cos(), angles.sin()
        self.q_norm, self.k_norm = 0.1 * torch.randn(heads.dim), 0.1 * torch.randn(heads.dim)

    def run(self, chunks: list[tuple[int, int, int]], n_threads: int = 2, n_records: int = 0) -> list[Tensor]:
        """(sequence, first token, end) of each chunk -> its output rows."""
        h, rows = self.heads, torch.cat([self.proj[s][a:b] for s, a, b in chunks])
        counts = torch.tensor([b - a for _, a, b in chunks])
        state_slots = i32(*(s for s, _, _ in chunks))
        q, out = (torch.full((len(rows), h.n_q * h.dim), float("nan"), dtype=BF16) for _ in range(2))
        program = Program(n_threads, library=self.kernels)
        inputs = AttentionInputs(
            n_tokens=i32(len(rows)), positions=torch.cat([torch.arange(a, b) for _, a, b in chunks]).to(I32),
            token_batch_slot=torch.repeat_interleave(state_slots, counts).to(I32), page_table=self.table,
            n_seqs=i32(len(chunks)), seq_start=torch.cat([torch.zeros(1), counts.cumsum(0)]).to(I32),
            seq_context=i32(*(a for _, a, _ in chunks)), batch_slot=state_slots,
        )  # fmt: skip
        weights, cache = (
            AttentionWeights(self.q_norm, self.k_norm, 1e-6, self.cos, self.sin),
            KvPages(self.pages, self.kv),
        )
        attn_prepare(program, rows, h, weights, inputs, cache, q)
        attention(program, q, rows, h, inputs, cache, torch.full((n_records, h.dim + 16), float("nan"), dtype=F32), out)
        program.run()
        return [part.view(torch.int16) for part in out.split(counts.tolist())]

    def expected(self, s: int) -> Tensor:
        h, n = self.heads, self.lengths[s]
        q, gate, k, v = self.proj[s].split([h.n_q * h.dim] * 2 + [h.n_kv * h.dim] * 2, -1)
        q, k = (
            oracle.rounded(
                oracle.rope(oracle.rms_norm(x.unflatten(-1, (-1, h.dim)), w, 1e-6), torch.arange(n), self.inv_freq),
                "bfloat16",
            )
            for x, w in ((q, self.q_norm), (k, self.k_norm))
        )  # fmt: skip
        v = oracle.rounded(v, "bfloat16").unflatten(-1, (-1, h.dim))
        if not self.kv.is_plain:
            k, v = (
                torch.from_numpy(of(array_of(x.to(BF16))).values())
                for x, of in zip((k, v), kv_oracle.FORMATS[self.kv.name], strict=True)
            )
        return oracle.attention(q, k, v).flatten(1) * gate.sigmoid()


@every_set
@pytest.mark.parametrize("heads", [HEADS, AttentionHeads(6, 1, 96)])
def test_long_contexts_against_the_oracle(library: str, heads: AttentionHeads) -> None:
    lengths = (2 * SPLIT_KEYS + 9, SPLIT_KEYS, 70)
    sequences = Sequences(library, heads, lengths)
    whole = [(s, 0, n) for s, n in enumerate(lengths)]
    for s, out in enumerate(sequences.run(whole, n_records=EVERY_SPLIT_A_TASK)):
        torch.testing.assert_close(out.view(BF16).float(), sequences.expected(s), rtol=2**-7, atol=2e-3)


ROUNDED = [name for name in on_device("cpu") if name != "bf16"]
SHARES = [(library, "bf16") for library in SETS] + [(SETS[0], kv) for kv in ROUNDED]


@pytest.mark.parametrize(("library", "kv"), grid(SHARES, [(SETS[0], "bf16"), (SETS[0], "k8v4")], pytest.mark.long))
def test_shares_and_cuts_keep_bits(library: str, kv: str) -> None:
    """One task a block or one a split, in one wave or many; any number of threads; any cut; alone or among others."""
    sequences = Sequences(library, kv=kv)
    whole = sequences.run([(s, 0, n) for s, n in enumerate(LENGTHS)], n_threads=1)
    pages = sequences.pages.clone()
    last = [(s, n - 1, n) for s, n in enumerate(LENGTHS)]
    tail = LENGTHS[0] - 60  # four blocks; rows of the first three do not see the last split

    def check(chunks: list[tuple[int, int, int]], n_threads: int, n_records: int) -> None:
        """Says of bits that differ where they are, and whether they come back and the pages hold what they did."""
        found = torch.cat(sequences.run(chunks, n_threads, n_records))
        expected = torch.cat([whole[s][a:b] for s, a, b in chunks])
        if not torch.equal(found, expected):
            again = torch.cat(sequences.run(chunks, n_threads, n_records))
            at = (found != expected).nonzero()
            pytest.fail(
                f"{chunks}, {n_threads} threads, {n_records} records: {len(at)} values differ, first [row, column] {at[:8].tolist()}, "
                f"{found[*at[:8].T].tolist()} for {expected[*at[:8].T].tolist()}; run again {(again != expected).sum()} differ; "
                f"{(sequences.pages.view(torch.uint8) != pages.view(torch.uint8)).sum()} bytes of the pages changed"
            )

    # A row of a head that is given to a task a split is 6 records, and a block of 16 tokens is 192.
    for n_threads, n_records in ((2, 0), (1, 4096), (2, 10), (2, 200), (5, 500), (2, EVERY_SPLIT_A_TASK)):
        check(last, n_threads, n_records)
        for start in (tail, LENGTHS[0] - 1, SPLIT_KEYS - 7):
            check([(0, start, LENGTHS[0])], n_threads, n_records)
        check([(0, tail, LENGTHS[0]), *last[1:]], n_threads, n_records)


def unpacked(pages: Tensor, heads: AttentionHeads, kv: KvFormat) -> dict[str, np.ndarray]:
    """Codes [n, nk, 64, d] and scales [n, nk, 64] of pages of csrc/kv.h."""
    n, nk, d = len(pages), heads.n_kv, heads.dim
    raw = {name: pages.numpy()[:, at : at + size] for name, (at, size) in kv.sections(nk, d).items()}
    found = {
        name: np.ascontiguousarray(part).view(np.float32).reshape(n, nk, 64)
        for name, part in raw.items()
        if "_" in name
    }
    keys = raw["keys"].reshape(n, nk, d // 4, 64, 4).transpose(0, 1, 3, 2, 4).reshape(n, nk, 64, d)
    values = raw["values"].reshape(n, nk, 16, -1, 4)
    if kv.value_bits == 4:
        values = np.concatenate([values & 15, values >> 4], 3)
    values = values.transpose(0, 1, 2, 4, 3).reshape(n, nk, 64, d)
    found["keys"] = (keys ^ 128).view(np.int8)
    found["values"] = values if kv.value_bits == 4 else (values ^ 128).view(np.int8)
    return found


@every_set
@pytest.mark.parametrize("kv", ROUNDED)
def test_what_is_written_is_the_oracles(library: str, kv: str) -> None:
    """Codes and scales of what pages of bfloat16 hold, to the bit: rows of zeros, of one value, and those with infinities, too."""
    plain, rounded = (Sequences(library, HEADS, (128,), name) for name in ("bf16", kv))
    v_at = HEADS.row - HEADS.n_kv * HEADS.dim
    for sequences in (plain, rounded):
        sequences.proj[0][3, v_at:] = 0.0
        sequences.proj[0][4, v_at:] = -2.5
        sequences.proj[0][5, v_at:] *= 1e-35
        sequences.proj[0][6, v_at + 7] = float("inf")
        sequences.proj[0][7, HEADS.row - 2 * HEADS.n_kv * HEADS.dim] = float("nan")
        sequences.run([(0, 0, 128)])
    pages = plain.pages.view(2, 2, HEADS.n_kv, 64 * HEADS.dim)
    k = pages[:, 0].unflatten(-1, (HEADS.dim // 2, 64, 2)).transpose(2, 3).flatten(3)
    v = pages[:, 1].unflatten(-1, (64, HEADS.dim))
    found = unpacked(rounded.pages, HEADS, rounded.kv)
    for name, of, x in zip(("key", "value"), kv_oracle.FORMATS[kv], (k, v), strict=True):
        rows = of(array_of(x.contiguous()))
        np.testing.assert_array_equal(found[f"{name}_scales"], rows.scale)
        finite = np.isfinite(rows.scale)
        assert finite.sum() == finite.size - 1
        np.testing.assert_array_equal(found[f"{name}s"][finite], rows.codes[finite])
        if rows.least is not None:
            np.testing.assert_array_equal(found["least_values"][finite], rows.least[finite])


@every_set
@pytest.mark.parametrize("kv", ROUNDED)
@pytest.mark.parametrize("heads", [HEADS, AttentionHeads(7, 1, 96), AttentionHeads(2, 1, 32)])
def test_fewer_bits_against_the_oracle(library: str, kv: str, heads: AttentionHeads) -> None:
    """Products are with what the codes stand for: as close to the oracle as those of bfloat16."""
    lengths = (SPLIT_KEYS + 9, 70)
    sequences = Sequences(library, heads, lengths, kv)
    for s, out in enumerate(sequences.run([(s, 0, n) for s, n in enumerate(lengths)])):
        torch.testing.assert_close(out.view(BF16).float(), sequences.expected(s), rtol=2**-7, atol=2e-3)


@pytest.mark.parametrize(("library", "kv"), [(library, kv) for library in SETS for kv in ("bf16", *ROUNDED)])
@pytest.mark.parametrize("heads", [HEADS, AttentionHeads(6, 1, 96)])
def test_what_is_no_number_is_none_and_harms_no_row_before_it(library: str, kv: str, heads: AttentionHeads) -> None:
    """As where a draft is rejected: a row has the bits that it has by itself. At a page's first token, in its midst, at the
    end of a split.
    """
    length, group = SPLIT_KEYS + 9, heads.n_q // heads.n_kv
    for at in (6, 64, SPLIT_KEYS - 1, SPLIT_KEYS):
        alone, found = (Sequences(library, heads, (length,), kv) for _ in range(2))
        found.proj[0][at, -1] = float("inf")  # a value of the last head
        first = max(0, at - 5)
        if first:
            for sequences in (alone, found):
                sequences.run([(0, 0, first)])
        for n_records in (0, EVERY_SPLIT_A_TASK):
            (rows,) = found.run([(0, first, length)], n_records=n_records)
            for i in range(first, at):
                (expected,) = alone.run([(0, i, i + 1)], n_records=n_records)
                assert torch.equal(rows[i - first], expected[0])
            behind = rows[at - first :].view(BF16).unflatten(-1, (heads.n_q, heads.dim))
            assert not behind[:, -group:, -1].isfinite().any() and behind[:, :-group].isfinite().all()


@pytest.mark.long
def test_a_token_behind_a_million() -> None:
    """The last of the positions that --rope-scaling may give. Keys are few numbers wide, and come 64 Ki at a time."""
    n, heads, at_a_time = 1_010_000, AttentionHeads(n_q=2, n_kv=1, dim=32), 1 << 16
    torch.manual_seed(0)
    n_pages = -(-n // 64)
    table = torch.randperm(n_pages).to(I32)[None]
    pages = torch.zeros(n_pages, 2, 1, 64, 32, dtype=BF16)
    frequencies = torch.tensor([1e7 ** (-i / 16) for i in range(16)], dtype=torch.float64)
    angles = (torch.arange(n)[:, None] * frequencies).float()
    cos, sin, norm = angles.cos(), angles.sin(), torch.zeros(32)
    keys, values = [], []
    for first in range(0, n, at_a_time):
        rows = torch.randn(min(at_a_time, n - first), heads.row)
        positions, q = torch.arange(first, first + len(rows)), torch.zeros(len(rows), 64, dtype=BF16)
        program = Program(2, library=SETS[0])
        inputs = AttentionInputs(
            n_tokens=i32(len(rows)), positions=positions.to(I32), token_batch_slot=torch.zeros(len(rows), dtype=I32),
            page_table=table, n_seqs=i32(1), seq_start=i32(0, 1), seq_context=i32(n - 1), batch_slot=i32(0),
        )  # fmt: skip
        attn_prepare(program, rows, heads, AttentionWeights(norm, norm, 1e-6, cos, sin), inputs, KvPages(pages), q)
        program.run()
        k, v = rows[:, 128:].split(32, -1)
        keys.append(oracle.rope(oracle.rms_norm(k[:, None], norm, 1e-6), positions, frequencies)[:, 0].to(BF16))
        values.append(v.to(BF16))
    out = torch.zeros(1, 64, dtype=BF16)
    program = Program(2, library=SETS[0])
    records = torch.zeros(EVERY_SPLIT_A_TASK, heads.dim + 16)
    attention(program, q[-1:], rows[-1:], heads, inputs, KvPages(pages), records, out)
    program.run()
    weights = (q[-1].view(2, 32).double() @ torch.cat(keys).double().T / 32**0.5).softmax(-1)
    expected = (weights @ torch.cat(values).double()).flatten() * rows[-1, 64:128].double().sigmoid()
    torch.testing.assert_close(out[0].double(), expected, rtol=2**-6, atol=2e-5)


def test_a_key_that_is_not_finite_is_not_lost_in_the_merge() -> None:
    sequences = Sequences(SETS[0])
    sequences.run([(0, 0, LENGTHS[0])])
    values = sequences.pages[sequences.table[0, 9], 1]  # of the second split
    values[:, 3] = float("nan")
    for n_records in (0, EVERY_SPLIT_A_TASK):
        (out,) = sequences.run([(0, LENGTHS[0] - 1, LENGTHS[0])], n_records=n_records)
        assert out.view(BF16).isnan().all()


def test_more_blocks_than_a_wave_holds() -> None:
    sequences = Sequences(SETS[0], AttentionHeads(32, 1, 32), (700,))
    (whole,) = sequences.run([(0, 0, 700)])  # one token a block
    (last,) = sequences.run([(0, 699, 700)], n_records=10_000)
    assert torch.equal(whole[-1:], last)


def test_records_are_checked() -> None:
    sequences = Sequences(SETS[0], lengths=(1,))
    inputs = AttentionInputs(
        n_tokens=i32(1), positions=i32(0), token_batch_slot=i32(0), page_table=sequences.table, n_seqs=i32(1),
        seq_start=i32(0, 1), seq_context=i32(0), batch_slot=i32(0),
    )  # fmt: skip
    with pytest.raises(KernelError, match=r"attention: expected float32 records \[n, d \+ 16\]"):
        attention(
            Program(1), torch.zeros(1, 512, dtype=BF16), sequences.proj[0], HEADS, inputs, KvPages(sequences.pages),
            torch.zeros(4, 64), torch.zeros(1, 512, dtype=BF16),
        )  # fmt: skip
