"""attention_decode on the GPU (or in the interpreter) against the reference: ragged rows, splits, pages, purity."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from deltic.ops.contract import KernelError
from deltic.ops.geometry import PAGE_SIZE, AttentionHeads, AttentionWeights
from deltic.ops.gpu.attention_decode import FAN, SPLITS, AttentionScratch, Splits, attention_decode, attention_scratch
from deltic.ops.gpu.blocks import Drafts, Rows
from deltic.ops.gpu.fp8 import Operand
from deltic.ops.gpu.launch import Levers
from deltic.ops.kv_formats import BF16, KvFormat, KvPages
from tests.gpu.kv_pages import QUANTISED, quantised, values_of
from tests.gpu.matrices import assert_rounded, poisoned
from tests.reference import layers

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
EPS = 1e-6
# Against float32 from the same bfloat16 q, k, v: the softmax weights are rounded where they meet v (2^-9 each, of values of order
# 1, and they average), and so is the output. q or k may also fall to the other side of a rounding. Of quantised pages, from the values
# that they hold, weights are rounded once they are multiplied with a scale, which is as much.
TOLERANCE = dict(atol=0.01, rtol=0.01)


@dataclass
class Case:
    """A memory of pages with `lengths[batch_slot]` old tokens a batch slot, and one new token a row."""

    heads: AttentionHeads
    half: int
    lengths: list[int]
    proj: Tensor  # [S, batch slots, row]: row r of the case is the token of batch slot r
    history: list[Tensor]  # [2, n, nk, d] a batch slot, as pages hold it
    pages: Tensor  # [n, 2, nk, 64, d] or bytes, a view of two layers
    table: Tensor
    q_norm: Tensor
    k_norm: Tensor
    cos: Tensor
    sin: Tensor
    format: KvFormat = BF16

    @property
    def weights(self) -> AttentionWeights:
        return AttentionWeights(self.q_norm, self.k_norm, EPS, self.cos, self.sin)


def make(
    device: str,
    heads: AttentionHeads,
    half: int,
    lengths: list[int],
    n_partials: int = 1,
    seed: int = 0,
    format: KvFormat = BF16,
) -> Case:
    """Everything no row may read is NaN."""
    g = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=g)

    max_pages = max(n // PAGE_SIZE + 1 for n in lengths) + 1
    n_pages = sum(n // PAGE_SIZE + 1 for n in lengths) + 3
    both = torch.full((n_pages, 2, 2, heads.n_kv, PAGE_SIZE, heads.dim), torch.nan, dtype=torch.bfloat16)
    pages, table = both[:, 1], torch.full((len(lengths), max_pages), n_pages - 1, dtype=torch.int32)
    order, history, at = torch.randperm(n_pages - 1, generator=g).tolist(), [], 0
    for batch_slot, n in enumerate(lengths):
        old = randn(2, n, heads.n_kv, heads.dim).bfloat16()
        for i in range(n // PAGE_SIZE + 1):
            page, at = order[at], at + 1
            table[batch_slot, i] = page
            part = old[:, i * PAGE_SIZE : (i + 1) * PAGE_SIZE].transpose(1, 2)
            pages[page, :, :, : part.shape[2]] = part
        history.append(old)
    angle = (torch.arange(max(lengths) + 1)[:, None].double() * _inv_freq(half)).float()
    proj = randn(n_partials, len(lengths), heads.row)
    if not format.is_plain:
        both = torch.stack([quantised(layer, format) for layer in both.unbind(1)], 1)
        held = values_of(both[:, 1], format, heads.n_kv, heads.dim)
        for batch_slot, n in enumerate(lengths):
            ids = table[batch_slot, : n // PAGE_SIZE + 1].long()
            history[batch_slot] = held[ids].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :n]
    moved = both.to(device)
    return Case(
        heads, half, lengths, proj.to(device), history, moved[:, 1], table.to(device),
        0.3 * randn(heads.dim).to(device), 0.3 * randn(heads.dim).to(device),
        angle.cos().to(device), angle.sin().to(device), format,
    )  # fmt: skip


def _inv_freq(half: int) -> Tensor:
    return 10_000.0 ** (-torch.arange(half).double() / half)


def run(
    case: Case,
    batch_slots: list[int],
    *,
    max_len: int | None = None,
    scratch: AttentionScratch | None = None,
    splits: Splits = SPLITS,
    shift: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows for the given batch slots (-1: not in use) -> out, pages after it. The case is left as it was. shift: of their angles."""
    device, heads, pages = case.proj.device, case.heads, case.pages.clone()
    n = len(batch_slots)
    max_len = max_len or max(case.lengths) + 1
    out = torch.full((n, heads.n_q * heads.dim), torch.nan, dtype=torch.bfloat16, device=device)
    proj = torch.full((case.proj.shape[0], n, heads.row), torch.nan, device=device)
    for row, batch_slot in enumerate(batch_slots):
        if batch_slot >= 0:
            proj[:, row] = case.proj[:, batch_slot]

    def i32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def allocate(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    if scratch is None:
        scratch = attention_scratch(heads, n, max_len, allocate, splits)
        scratch.output.fill_(torch.nan)
        scratch.weight.fill_(torch.nan)
    made = poisoned(out, min(128, heads.dim // 2))
    attention_decode(
        proj, heads, case.weights,
        rows=Rows(
            batch_slot=i32([max(p, 0) for p in batch_slots]), state_slot=i32([3 if p >= 0 else -1 for p in batch_slots]),
            position=i32([case.lengths[p] if p >= 0 else 0 for p in batch_slots]),
            angle_shift=None if shift is None else i32([shift if p >= 0 else 0 for p in batch_slots]),
        ), cache=KvPages(pages, case.format, case.table), scratch=scratch, max_len=max_len, out=made,
    )  # fmt: skip
    assert not scratch.arrived.any(), "the counters are back at 0"
    assert_rounded(made)
    return out, pages


def expected(case: Case, batch_slot: int, new: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """-> out [nq d], k and v of the new token [nk, d]; float32 on the CPU. new: what its page holds of those, [2, nk, d]."""
    heads, d = case.heads, case.heads.dim
    nq, nk = heads.n_q, heads.n_kv
    row = case.proj[:, batch_slot].cpu().sum(0)
    q, gate, k, v = row.split([nq * d, nq * d, nk * d, nk * d])
    position = torch.tensor([case.lengths[batch_slot]])

    def head(x: Tensor, n: int, norm: Tensor) -> Tensor:
        x = layers.rope(layers.rms_norm(x.view(1, n, d), norm.cpu(), EPS), position, _inv_freq(case.half))
        return layers.rounded(x, "bfloat16")

    q, k = head(q, nq, case.q_norm), head(k, nk, case.k_norm)
    v = layers.rounded(v.view(1, nk, d), "bfloat16")
    if new is not None:
        k, v = new[:, None]
    old_k, old_v = case.history[batch_slot].float()
    n = old_k.shape[0] + 1
    o = layers.attention(q.expand(n, -1, -1), torch.cat([old_k, k]), torch.cat([old_v, v]))[-1]
    return o.reshape(-1) * torch.sigmoid(gate), k[0], v[0]


def compare(case: Case, batch_slots: list[int], **kw: object) -> None:
    out, pages = run(case, batch_slots, **kw)  # type: ignore[arg-type]
    written = case.pages.clone()
    for row, batch_slot in enumerate(batch_slots):
        if batch_slot < 0:
            continue
        o, k, v = expected(case, batch_slot)
        torch.testing.assert_close(out[row].float().cpu(), o, **TOLERANCE)
        at = case.lengths[batch_slot]
        page = int(case.table[batch_slot, at // PAGE_SIZE])
        # the rounding to bfloat16 may fall the other way: one unit in the last place, of the terms that a rotation subtracts
        torch.testing.assert_close(pages[page, 0, :, at % PAGE_SIZE].float().cpu(), k, atol=2e-4, rtol=2**-7)
        torch.testing.assert_close(pages[page, 1, :, at % PAGE_SIZE].float().cpu(), v, atol=1e-5, rtol=2**-7)
        written[page, :, :, at % PAGE_SIZE] = pages[page, :, :, at % PAGE_SIZE]
    same = torch.equal(written.view(torch.int16), pages.view(torch.int16))
    assert same, "nothing else in the pages is touched"


def compare_quantised(case: Case, plain: Case, batch_slots: list[int], **kw: object) -> None:
    """The same beside plain pages: what is written is the reference's, to the bit, of what is written there."""
    out, pages = run(case, batch_slots, **kw)  # type: ignore[arg-type]
    _, plain_pages = run(plain, batch_slots, **kw)  # type: ignore[arg-type]
    heads, format, written = (
        case.heads,
        case.format,
        values_of(case.pages, case.format, case.heads.n_kv, case.heads.dim),
    )
    held = values_of(pages, format, heads.n_kv, heads.dim)
    right = values_of(quantised(plain_pages, format), format, heads.n_kv, heads.dim)
    for row, batch_slot in enumerate(batch_slots):
        if batch_slot < 0:
            continue
        at = case.lengths[batch_slot]
        page, at = int(case.table[batch_slot, at // PAGE_SIZE]), at % PAGE_SIZE
        assert torch.equal(held[page, :, :, at], right[page, :, :, at])
        torch.testing.assert_close(
            out[row].float().cpu(), expected(case, batch_slot, held[page, :, :, at])[0], **TOLERANCE
        )
        written[page, :, :, at] = held[page, :, :, at]
    assert torch.equal(written.nan_to_num(7e4), held.nan_to_num(7e4)), "nothing else in the pages is touched"


TINY = AttentionHeads(n_q=2, n_kv=1, dim=32)


@pytest.mark.parametrize(
    ("n_q", "n_kv", "dim", "half"), [(4, 2, 32, 8), (6, 1, 64, 8), (2, 2, 64, 32), (9, 1, 32, 4), (3, 1, 32, 16)]
)
def test_ragged_rows_agree_with_the_reference(device: str, n_q: int, n_kv: int, dim: int, half: int) -> None:
    case = make(device, AttentionHeads(n_q, n_kv, dim), half, [0, 1, 63, 64, 200], n_partials=2)
    compare(case, [3, -1, 0, 4, 2, 1])


def test_splits_of_one_and_of_several_tiles_and_two_rounds_of_merging(device: str) -> None:
    case = make(device, TINY, 8, [64 * 7, 64 * 10 + 5, 64 * 5 - 1])
    for splits in (
        SPLITS,
        Splits(few=0, few_tiles=1),  # 8, 11 and 5 splits: two rounds for one of them
        Splits(few=0, few_tiles=3),
        Splits(few=2, few_tiles=1, most=3),
    ):
        compare(case, [1, 2, 0], splits=splits)


@pytest.mark.parametrize("format", QUANTISED, ids=lambda format: format.name)
def test_quantised_pages_agree_with_the_reference(device: str, format: KvFormat) -> None:
    heads, lengths = AttentionHeads(4, 2, 32), [64 * 10 + 5, 63, 0, 200]
    case, plain = (make(device, heads, 8, lengths, n_partials=2, format=f) for f in (format, BF16))
    compare_quantised(case, plain, [3, -1, 1, 0, 2])
    compare_quantised(case, plain, [1, 0], splits=Splits(few=0, few_tiles=1))


@pytest.mark.parametrize("n", [1, 8, 9, 17, 64, 65, 128, 129, 1000])
def test_split_sizes_fit_their_bounds(n: int) -> None:
    for splits in (
        Splits(),
        Splits(few=0),
        Splits(few_tiles=4),
        Splits(few=16, few_tiles=4, most=32),
        Splits(few_tiles=1),
    ):
        for n_tiles in range(1, n + 1):
            count = -(-n_tiles // splits.tiles(n_tiles))
            assert count <= splits.capacity(n * PAGE_SIZE) <= splits.most <= FAN * FAN


def test_bits_of_a_row_do_not_depend_on_its_neighbours_the_bucket_or_the_capacity(device: str) -> None:
    heads = AttentionHeads(n_q=4, n_kv=2, dim=32)
    case = make(device, heads, 8, [64 * 9 + 3, 5, 130], n_partials=2)
    alone, alone_pages = run(case, [0])
    among, pages = run(case, [-1, 2, 0, 1, -1], max_len=64 * 30)
    with Levers(pdl=False).bound():
        again, _ = run(case, [1, 0])
    assert torch.equal(alone[0].view(torch.int16), among[2].view(torch.int16))
    assert torch.equal(alone[0].view(torch.int16), again[1].view(torch.int16))
    page = int(case.table[0, 9])
    assert torch.equal(alone_pages[page, :, :, 3], pages[page, :, :, 3])
    short, _ = run(case, [2], max_len=131)
    assert torch.equal(short[0].view(torch.int16), among[1].view(torch.int16))


@pytest.mark.parametrize("format", [BF16, *QUANTISED], ids=lambda format: format.name)
def test_bits_do_not_depend_on_the_splits_of_a_program(device: str, format: KvFormat) -> None:
    """One, some, or all of a row's, in one round of merging and in two; of rows that have one, too."""
    lengths = [64 * 17 + 5, 64 * 7 + 63, 64 * 8, 64 * 2, 63, 0]
    case = make(device, AttentionHeads(4, 2, 32), 8, lengths, n_partials=2, format=format)
    batch_slots = [0, -1, 1, 2, 3, 4, 5]
    for splits in (SPLITS, Splits(few=0, few_tiles=1)):
        alone, alone_pages = run(case, batch_slots, splits=replace(splits, programs=1 << 30))
        assert not alone[[0, *range(2, 7)]].isnan().any()
        for programs in (0, 16, 64, 100, 128):
            out, pages = run(case, batch_slots, splits=replace(splits, programs=programs))
            assert torch.equal(out.view(torch.int16), alone.view(torch.int16)), programs
            assert torch.equal(pages.view(torch.uint8), alone_pages.view(torch.uint8))


def attend(
    case: Case, pages: Tensor, rows: list[tuple[int, int, int]], with_drafts: bool, splits: Splits = SPLITS
) -> Tensor:
    """Rows that are (batch slot, position, rows of its sequence in front); the token of a position has one projection. -> out"""
    device, heads = case.proj.device, case.heads
    g = torch.Generator().manual_seed(7)
    tokens = torch.randn(case.proj.shape[0], len(case.lengths), PAGE_SIZE, heads.row, generator=g).to(device)
    proj = torch.stack(
        [tokens[:, batch_slot, position % PAGE_SIZE] for batch_slot, position, _ in rows], 1
    ).contiguous()
    batch_slot, position, ahead = (torch.tensor(x, dtype=torch.int32, device=device) for x in zip(*rows, strict=True))
    out = torch.full((len(rows), heads.n_q * heads.dim), torch.nan, dtype=torch.bfloat16, device=device)
    scratch = attention_scratch(
        heads, len(rows), 1024, lambda _, size, dtype: torch.zeros(size, dtype=dtype, device=device), splits
    )
    made = poisoned(out, min(128, heads.dim))
    attention_decode(
        proj, heads, case.weights,
        rows=Rows(batch_slot, torch.zeros_like(batch_slot), position, drafts=Drafts(ahead, ahead, ahead, ahead) if with_drafts else None),
        cache=KvPages(pages, case.format, case.table), scratch=scratch, max_len=1024, out=made,
    )  # fmt: skip
    assert_rounded(made)
    return out


@pytest.mark.parametrize(
    ("n_q", "n_kv", "dim", "half", "format"),
    [(4, 2, 32, 8, BF16), (3, 1, 64, 16, BF16), *((2, 1, 32, 8, format) for format in QUANTISED)],
)
def test_rows_of_a_draft_have_the_bits_of_single_rows(
    device: str, n_q: int, n_kv: int, dim: int, half: int, format: KvFormat
) -> None:
    """Of sequences of one split and of several, from a page's beginning to its end, beside rows that stand alone."""
    n_rows = {0: 4, 1: 1, 2: 5, 3: 2, 4: 3}
    lengths = [64 * 3, 70, 64 * 10 + 57, 3, 64 * 8 + 20]
    case = make(device, AttentionHeads(n_q, n_kv, dim), half, [*lengths, 1000], n_partials=2, format=format)
    rows = [(batch_slot, lengths[batch_slot] + j, j) for batch_slot, n in n_rows.items() for j in range(n)]
    pages, expected_pages = case.pages.clone(), case.pages.clone()
    found = attend(case, pages, rows, with_drafts=True, splits=replace(SPLITS, programs=0))
    for i, (batch_slot, position, _) in enumerate(rows):
        expected = attend(case, expected_pages, [(batch_slot, position, 0)], with_drafts=False)
        assert torch.equal(found[i].view(torch.int16), expected[0].view(torch.int16)), (batch_slot, position)
    assert torch.equal(pages.view(torch.uint8), expected_pages.view(torch.uint8))
    assert not found.isnan().any()


def test_angles_behind_pictures(device: str) -> None:
    """A shift of 0 changes no bit; another is that of the tables."""
    case = make(device, AttentionHeads(4, 2, 32), 8, [64 * 9 + 3, 70], n_partials=2)
    plain, pages = run(case, [1, 0])
    zero, zero_pages = run(case, [1, -1, 0], shift=0)
    assert torch.equal(plain.view(torch.int16), zero[[0, 2]].view(torch.int16))
    assert torch.equal(pages.view(torch.int16), zero_pages.view(torch.int16))
    shifted, shifted_pages = run(case, [1, -1, 0], shift=-17)
    moved = replace(case, cos=case.cos.roll(17, 0), sin=case.sin.roll(17, 0))
    expected, expected_pages = run(moved, [1, 0])
    assert torch.equal(shifted[[0, 2]].view(torch.int16), expected.view(torch.int16))
    assert torch.equal(shifted_pages.view(torch.int16), expected_pages.view(torch.int16))
    assert not torch.equal(shifted[[0, 2]], plain)


def test_rows_not_in_use_touch_nothing(device: str) -> None:
    case = make(device, TINY, 8, [3])
    out, pages = run(case, [-1, -1])
    assert out.isnan().all()
    assert torch.equal(pages.view(torch.int16), case.pages.view(torch.int16))


def test_a_scratch_serves_step_after_step(device: str) -> None:
    """One scratch, larger than needed, for several launches in a row: the counters start each from 0."""
    case = make(device, TINY, 8, [64 * 8 + 1, 70])

    def allocate(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    scratch = attention_scratch(TINY, 4, 64 * 64, allocate)
    first, _ = run(case, [0, 1], scratch=scratch)
    scratch.output.fill_(torch.nan)
    second, _ = run(case, [1, 0, -1], scratch=scratch)
    assert torch.equal(first.view(torch.int16), second[[1, 0]].view(torch.int16))


def test_what_does_not_fit_is_refused(device: str) -> None:
    case = make(device, TINY, 8, [3])
    scratch = attention_scratch(TINY, 1, 64, lambda _, size, dtype: torch.zeros(size, dtype=dtype, device=device))
    with pytest.raises(KernelError, match="scratch"):
        run(case, [0], scratch=scratch, max_len=128)
    with pytest.raises(KernelError, match="query heads"):
        run(replace(case, heads=AttentionHeads(34, 2, 32), proj=case.proj.new_zeros(1, 1, 72 * 32)), [0])


@needs_gpu
@pytest.mark.parametrize(("n_q", "n_kv"), [(8, 2), (24, 4), (16, 2)])
def test_shapes_of_the_models(device: str, n_q: int, n_kv: int) -> None:
    lengths = [300, 127, 128, 511, 512, 1024, 4095, 9001, 0]
    case = make(device, AttentionHeads(n_q, n_kv, 256), 32, lengths, n_partials=2)
    compare(case, [0, 1, -1, 2, 3, 4, 5, 6, 7, 8])
    every, _ = run(case, list(range(9)) * 14, max_len=20_000)
    for batch_slot in range(9):
        alone, _ = run(case, [batch_slot], max_len=lengths[batch_slot] + 1)
        same = [torch.equal(alone[0].view(torch.int16), every[r].view(torch.int16)) for r in range(batch_slot, 126, 9)]
        assert all(same), f"{lengths[batch_slot]} keys: alone and among 125 others"


@needs_gpu
def test_recorded_and_replayed(device: str) -> None:
    """Counters, page writes and bits hold over replays of a recording with programmatic launch between its kernels."""
    case = make(device, AttentionHeads(8, 2, 256), 32, [2000, 300, 64], n_partials=1)
    want, _ = run(case, [0, 1, 2])
    i32 = dict(dtype=torch.int32, device=device)
    out = torch.empty_like(want)
    pages = case.pages.clone()
    scratch = attention_scratch(case.heads, 3, 4096, lambda _, s, t: torch.zeros(s, dtype=t, device=device))

    def step() -> None:
        for _ in range(4):
            attention_decode(
                case.proj, case.heads, case.weights, rows=Rows(rows, state_slots, positions),
                cache=KvPages(pages, case.format, case.table), scratch=scratch, max_len=4096, out=Operand(out),
            )  # fmt: skip

    state_slots, rows = torch.zeros(3, **i32), torch.arange(3, **i32)
    positions = torch.tensor(case.lengths, **i32)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.view(torch.int16), want.view(torch.int16))
