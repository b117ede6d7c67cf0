"""The index of an attention layer on a GPU: keys, scores and the order among equals; attention over what is chosen; a token's bits are
its own, whatever the cut."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deltic.ops.contract import KernelError
from deltic.ops.geometry import PAGE_SIZE, AttentionHeads, AttentionWeights, IndexHeads
from deltic.ops.gpu.attention_decode import attention_decode, attention_scratch
from deltic.ops.gpu.attention_prefill import TEXT, Axes, attention_prefill
from deltic.ops.gpu.blocks import BLOCK, Blocks, Drafts, Rows
from deltic.ops.gpu.fp8 import Operand
from deltic.ops.gpu.index import IndexPages, index_decode, index_prefill, index_scratch
from deltic.ops.gpu.launch import allocate_on
from deltic.ops.kv_formats import BF16, KV_FORMATS, KvFormat, KvPages
from tests.gpu.kv_pages import values_of
from tests.reference import layers

EPS = 1e-6
INDEX = IndexHeads(n_q=4, dim=32, ratio=4, budget=80)
HEADS = AttentionHeads(n_q=4, n_kv=1, dim=32)
HALF = 4
MOST = 150
QUANTISED = pytest.param("turboquant_k8v4", marks=pytest.mark.long)
in_formats = pytest.mark.parametrize("format", ["bf16", "fp8", QUANTISED])


@dataclass
class Model:
    """A layer's projections of one text, and memory for it."""

    index_proj: Tensor  # bfloat16 values [T, row]
    proj: Tensor
    of_index: AttentionWeights
    of_heads: AttentionWeights
    pages: Tensor
    index: Tensor
    table: Tensor
    heads: AttentionHeads = HEADS
    format: KvFormat = BF16

    def cleared(self) -> Model:
        """The same with memory in which nothing was written."""
        return Model(
            self.index_proj, self.proj, self.of_index, self.of_heads, torch.zeros_like(self.pages),
            torch.full_like(self.index, torch.nan), self.table, self.heads, self.format,
        )  # fmt: skip


def model(
    device: str,
    *,
    n: int = MOST,
    seed: int = 0,
    index: IndexHeads = INDEX,
    heads: AttentionHeads = HEADS,
    format: str = "bf16",
) -> Model:
    g = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=g)

    n_pages = -(-n // PAGE_SIZE)
    angle = torch.arange(n + PAGE_SIZE)[:, None] * 100.0 ** (-torch.arange(HALF) / HALF)
    cos, sin = angle.cos().to(device), angle.sin().to(device)
    norms = [(0.3 * randn(d)).to(device) for d in (index.dim, index.dim, heads.dim, heads.dim)]
    pages, of = (n_pages + 1, 2), KV_FORMATS[format]
    both = torch.zeros(*pages, 2, heads.n_kv, PAGE_SIZE, heads.dim, dtype=torch.bfloat16, device=device)
    if not of.is_plain:  # codes and scales are no numbers where nothing was written
        both = torch.full((*pages, of.layer_bytes(heads.n_kv, heads.dim)), 127, dtype=torch.uint8, device=device)
    keys = torch.full((n_pages + 1, 2, index.page_rows, index.dim), torch.nan, dtype=torch.bfloat16, device=device)
    order = torch.randperm(n_pages, generator=g).int()
    return Model(
        randn(n, index.row).bfloat16().to(device), randn(n, heads.row).bfloat16().to(device),
        AttentionWeights(norms[0], norms[1], EPS, cos, sin), AttentionWeights(norms[2], norms[3], EPS, cos, sin),
        both[:, 1], keys[:, 1], order[None].repeat(2, 1).to(device), heads, of,
    )  # fmt: skip


def expected(m: Model, t: int, index: IndexHeads = INDEX) -> tuple[Tensor, Tensor, Tensor]:
    """Query [heads, dim], keys of the whole groups that token t sees and their scores, by the published equations."""
    proj, w = m.index_proj.float().cpu(), m.of_index
    inv = 100.0 ** (-torch.arange(HALF).double() / HALF)
    q = layers.rms_norm(proj[t, : -index.dim].view(1, index.n_q, index.dim), w.q_norm.cpu(), EPS)
    q = layers.rope(q, torch.tensor([t]), inv)[0].bfloat16().float()
    n = (t + 1) // index.ratio
    raw = proj[: n * index.ratio, -index.dim :].view(n, index.ratio, index.dim)
    mean = raw.mean(1).bfloat16().float()
    keys = layers.rope(layers.rms_norm(mean, w.k_norm.cpu(), EPS)[:, None], torch.arange(n) * index.ratio, inv)[:, 0]
    keys = keys.bfloat16().float()
    return q, keys, torch.relu(keys @ q.T).sum(1)


def prefill(
    m: Model, chunks: list[int], *, chooses: bool = True, index: IndexHeads = INDEX, axes: Axes = TEXT
) -> tuple[Tensor, Tensor]:
    """The text in chunks of so many tokens -> attention's output [T, nq d] and the chosen groups [T, n]."""
    device, n, heads = m.proj.device, len(m.proj), m.heads
    outs, picks = [], []
    start = 0
    for length in chunks:
        n_blocks = -(-length // BLOCK)
        rows = n_blocks * BLOCK
        place = slice(start, start + length)
        proj = torch.full((rows, heads.row), torch.nan, dtype=torch.bfloat16, device=device)
        index_proj = torch.full((rows, index.row), torch.nan, dtype=torch.bfloat16, device=device)
        proj[:length], index_proj[:length] = m.proj[place], m.index_proj[place]
        blocks = blocks_of(m, start, length)
        scratch = index_scratch(index, rows, n, allocate_on(device), name="index", is_prefill=True)
        scratch.chosen.fill_(-1)
        chosen = index_prefill(
            index_proj, index, m.of_index, blocks=blocks, pages=IndexPages(m.index, m.table), scratch=scratch, max_len=n,
            axes=axes,
        )  # fmt: skip
        out = torch.zeros(rows, heads.n_q * heads.dim, dtype=torch.bfloat16, device=device)
        cache = KvPages(m.pages, m.format, m.table, chosen if chooses else None, INDEX.ratio)
        attention_prefill(proj, heads, m.of_heads, blocks=blocks, cache=cache, query=torch.zeros_like(out), out=out)
        outs.append(out[:length])
        picks.append(chosen[:length].clone())
        start += length
    return torch.cat(outs), torch.cat(picks)


def blocks_of(m: Model, start: int, length: int) -> Blocks:
    n_blocks, device = -(-length // BLOCK), m.proj.device

    def i32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    n = [BLOCK] * n_blocks
    n[-1] = length - (n_blocks - 1) * BLOCK
    pages = m.table[0, start // BLOCK : start // BLOCK + n_blocks].tolist()
    return Blocks(
        i32(n), i32(list(range(start, start + length, BLOCK))), i32([0] * n_blocks), i32(pages), i32([-1] * n_blocks),
        i32([0, n_blocks]), i32([0]), i32([0]), i32([0] * n_blocks),
    )  # fmt: skip


def decode(
    m: Model,
    positions: list[int],
    *,
    n_splits: int = 1,
    drafts: bool = False,
    chooses: bool = True,
    index: IndexHeads = INDEX,
    begun: Axes = TEXT,
    shift: int = 0,
) -> tuple[Tensor, Tensor]:
    """A row for each of these positions, of the one text -> output and chosen groups."""
    device, n, heads = m.proj.device, len(positions), m.heads

    def parts(x: Tensor) -> Tensor:
        x = x[positions].float()
        return torch.stack([x] + [torch.zeros_like(x)] * (n_splits - 1))

    def i32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    ahead = i32([p - positions[0] for p in positions])
    rows = Rows(
        i32([0] * n), i32([0] * n), i32(positions), angle_shift=i32([shift] * n) if shift else None,
        drafts=Drafts(ahead, ahead, ahead, ahead) if drafts else None,
    )  # fmt: skip
    most, allocate = len(m.proj), allocate_on(device)
    scratch = index_scratch(index, n, most, allocate, name="index", is_prefill=False)
    scratch.chosen.fill_(-1)
    chosen = index_decode(
        parts(m.index_proj), index, m.of_index, rows=rows, pages=IndexPages(m.index, m.table), scratch=scratch,
        max_len=most, begun=begun,
    )  # fmt: skip
    out = torch.full((n, heads.n_q * heads.dim), torch.nan, dtype=torch.bfloat16, device=device)
    cache = KvPages(m.pages, m.format, m.table, chosen if chooses else None, INDEX.ratio)
    attention_decode(
        parts(m.proj), heads, m.of_heads, rows=rows, cache=cache, scratch=attention_scratch(heads, n, most, allocate),
        max_len=most, out=Operand(out, None),
    )  # fmt: skip
    return out, chosen.clone()


def seen_keys(m: Model, t: int, groups: Tensor | None) -> Tensor:
    """Tokens that token t reads."""
    if groups is None:
        return torch.arange(t + 1)
    tail = torch.arange((t + 1) // INDEX.ratio * INDEX.ratio, t + 1)
    return torch.cat([(groups[:, None] * INDEX.ratio + torch.arange(INDEX.ratio)).flatten().cpu(), tail])


def attended(m: Model, t: int, groups: Tensor | None) -> Tensor:
    """Output of token t over these keys by tests/reference; of quantised ones over what pages hold."""
    heads, d = m.heads, m.heads.dim
    inv = 100.0 ** (-torch.arange(HALF).double() / HALF)
    q, gate, k, v = (
        x.unflatten(-1, (-1, d))
        for x in m.proj.float().cpu().split([heads.n_q * d, heads.n_q * d, heads.n_kv * d, heads.n_kv * d], -1)
    )
    where = torch.arange(len(q))
    q = layers.rope(layers.rms_norm(q, m.of_heads.q_norm.cpu(), EPS), where, inv).bfloat16().float()
    k = layers.rope(layers.rms_norm(k, m.of_heads.k_norm.cpu(), EPS), where, inv).bfloat16().float()
    if not m.format.is_plain:
        held = values_of(m.pages[m.table[0].long()], m.format, heads.n_kv, d)
        k, v = held.permute(1, 0, 3, 2, 4).flatten(1, 2)
    seen = seen_keys(m, t, groups)
    k, v = (x[seen].repeat_interleave(heads.n_q // heads.n_kv, 1) for x in (k, v))
    weights = (torch.einsum("hd,shd->hs", q[t], k) * d**-0.5).softmax(-1)
    return (torch.einsum("hs,shd->hd", weights, v) * torch.sigmoid(gate[t])).flatten()


TOLERANCE = 0.02


@in_formats
def test_prefill_chooses_and_attends_as_the_equations_say(format: str, device: str) -> None:
    m = model(device, format=format)
    out, chosen = prefill(m, [MOST])
    first = (INDEX.n_groups + 1) * INDEX.ratio - 1
    assert (chosen[:first] == -1).all()
    for t in (*range(first, first + 6), 127, 128, MOST - 1):
        _, keys, scores = expected(m, t)
        groups = chosen[t].long().cpu()
        assert (groups[1:] > groups[:-1]).all() and groups[-1] < (t + 1) // INDEX.ratio
        best = scores.sort(descending=True).values[: INDEX.n_groups]
        assert torch.allclose(scores[groups].sort(descending=True).values, best, atol=0.05, rtol=0.02)
        assert torch.allclose(out[t].float().cpu(), attended(m, t, groups), atol=TOLERANCE, rtol=TOLERANCE)
        held = m.index[m.table[0].long(), PAGE_SIZE:].flatten(0, 1)[: len(keys)].float().cpu()
        assert torch.allclose(held, keys, atol=0.02, rtol=0.02)
    for t in (0, 3, first - 1):
        assert torch.allclose(out[t].float().cpu(), attended(m, t, None), atol=TOLERANCE, rtol=TOLERANCE)


@in_formats
def test_prefill_is_the_same_however_it_is_cut(format: str, device: str) -> None:
    whole = prefill(model(device, format=format), [MOST])
    cut = prefill(model(device, format=format), [64, MOST - 64])
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


@in_formats
def test_decode_continues_a_prefill(format: str, device: str) -> None:
    """Groups whose first tokens are a prompt's are completed, and each token attends by the equations, alone and in company."""
    n_prompt = 91
    m = model(device, n=110, format=format)
    prefill(m, [n_prompt])
    for t in range(n_prompt, n_prompt + 6):
        out, chosen = decode(m, [t], n_splits=2)
        _, keys, scores = expected(m, t)
        groups = chosen[0].long().cpu()
        best = scores.sort(descending=True).values[: INDEX.n_groups]
        assert torch.allclose(scores[groups].sort(descending=True).values, best, atol=0.05, rtol=0.02)
        assert torch.allclose(out[0].float().cpu(), attended(m, t, groups), atol=TOLERANCE, rtol=TOLERANCE)
        held = m.index[m.table[0].long(), PAGE_SIZE:].flatten(0, 1)[: len(keys)].float().cpu()
        assert torch.allclose(held, keys, atol=0.02, rtol=0.02)
        company, _ = decode(m, [t, 10, 88], n_splits=2)
        assert torch.equal(company[0], out[0])


@pytest.mark.parametrize("drafts", [False, True])
def test_a_group_that_begins_in_a_picture_has_the_key_of_a_prefill(drafts: bool, device: str) -> None:
    """Its first token's angles are those of the picture's row and column, also where a decode completes it."""
    n_prompt, first = 90, 88
    angles = torch.arange(100, dtype=torch.int32).repeat(3, 1)
    angles[:, 80:90] = torch.tensor([[80], [83], [91]])
    angles[:, 90:] += 2
    sections = [2, 1, 1]
    begun = torch.tensor([[first, *angles[:, first].tolist()], [-1, 0, 0, 0]], dtype=torch.int32)
    found, whole, text = (model(device, n=100) for _ in range(3))
    for m, n in ((found, n_prompt), (text, n_prompt), (whole, 100)):
        of_blocks = torch.zeros(3, BLOCK * 2, dtype=torch.int32)
        of_blocks[:, :n] = angles[:, :n]
        prefill(m, [n], axes=Axes(of_blocks.to(device), sections))
    shift, steps = 2, [[90, 91], [92, 93, 94, 95]] if drafts else [[t] for t in range(90, 96)]
    for positions in steps:
        decode(found, positions, drafts=drafts, begun=Axes(begun.to(device), sections), shift=shift)
        decode(text, positions, drafts=drafts, shift=shift)
    keys = [m.index[m.table[0, 1].long(), PAGE_SIZE + 6 : PAGE_SIZE + 8] for m in (found, whole, text)]
    assert torch.equal(keys[0], keys[1])
    assert torch.equal(keys[2][1], keys[1][1]) and not torch.equal(keys[2][0], keys[1][0])


@in_formats
def test_drafted_rows_have_the_bits_of_single_ones(format: str, device: str) -> None:
    n_prompt, n = 94, 6
    one, many = (model(device, n=110, format=format) for _ in range(2))
    prefill(one, [n_prompt])
    prefill(many, [n_prompt])
    alone = [decode(one, [t]) for t in range(n_prompt, n_prompt + 2)]
    for t in (n_prompt, n_prompt + 1):
        decode(many, [t])
    alone += [decode(one, [t]) for t in range(96, 96 + n)]
    out, chosen = decode(many, [*range(96, 96 + n)], drafts=True)
    assert torch.equal(out, torch.cat([o for o, _ in alone[2:]]))
    assert torch.equal(chosen, torch.cat([c for _, c in alone[2:]]))
    assert torch.equal(one.index[one.table[0].long()].nan_to_num(), many.index[many.table[0].long()].nan_to_num())


@in_formats
def test_short_contexts_have_the_bits_of_plain_attention(format: str, device: str) -> None:
    """Up to the budget and a tail of less than a group nothing is left out."""
    n = INDEX.budget + INDEX.ratio - 1
    one, other = (model(device, n=n + 20, format=format) for _ in range(2))
    chosen, plain = prefill(one, [n])[0], prefill(other, [n], chooses=False)[0]
    assert torch.equal(chosen, plain)
    for t in (0, 3, 40, 64, n - 2, n - 1):
        assert torch.equal(decode(one, [t])[0], decode(other, [t], chooses=False)[0])


def test_among_equals_the_earlier_group_is_chosen(device: str) -> None:
    """One text in which every token is the same, at angles that do not differ: all scores are equal."""
    m = model(device, n=120)
    m.index_proj[:] = m.index_proj[:1].clone()
    m.of_index.cos.fill_(1)
    m.of_index.sin.fill_(0)
    _, chosen = prefill(m, [120])
    assert torch.equal(chosen[119].cpu(), torch.arange(INDEX.n_groups).int())
    assert torch.equal(decode(m, [119])[1][0].cpu(), torch.arange(INDEX.n_groups).int())
    m.index_proj[:100, -INDEX.dim :] = 0
    m.index_proj[100:, -INDEX.dim :] = m.index_proj[100:, : INDEX.dim]  # these score best
    _, chosen = prefill(m.cleared(), [120])
    assert chosen[119].tolist() == [*range(INDEX.n_groups - 5), *range(25, 30)]


def test_a_budget_beyond_the_context_takes_no_memory_and_has_the_same_bits(device: str) -> None:
    budget = IndexHeads(n_q=4, dim=32, ratio=4, budget=1 << 30)
    for is_prefill in (False, True):
        scratch = index_scratch(budget, 2, MOST, allocate_on("meta"), name="index", is_prefill=is_prefill)
        assert scratch.chosen.shape == (2, MOST // 4)
    plain, found = (model(device, n=100) for _ in range(2))
    expected, _ = prefill(plain, [100], chooses=False)
    out, _ = prefill(found, [100], index=budget)
    assert torch.equal(out, expected)
    assert torch.equal(decode(found, [99], index=budget)[0], decode(plain, [99], chooses=False)[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: many groups")
@pytest.mark.parametrize("n", [2052, 2055, 9000, 40_003])
def test_many_groups(n: int) -> None:
    """At the published sizes: none that is left out scores better, none is there twice, and a row's choice is its own."""
    heads, allocate, per = IndexHeads(4, 128, 4, 2048), allocate_on("cuda"), -(-n // PAGE_SIZE)
    m = model("cuda", n=64, index=heads)
    angle = torch.arange(n, device="cuda")[:, None] * 100.0 ** (-torch.arange(32, device="cuda") / 32)
    w = AttentionWeights(m.of_index.q_norm, m.of_index.k_norm, EPS, angle.cos(), angle.sin())
    g = torch.Generator("cuda").manual_seed(n)
    index = torch.randn(per, heads.page_rows, heads.dim, generator=g, device="cuda").bfloat16()
    table = torch.randperm(per, generator=g, device="cuda").int()[None]
    found = []
    for positions in ([n - 1], [5, n - 1, 2050]):
        where = torch.tensor(positions, dtype=torch.int32, device="cuda")
        rows = Rows(where * 0, where * 0, where)
        scratch = index_scratch(heads, len(positions), n, allocate, name="index", is_prefill=False)
        scratch.chosen.fill_(-1)
        proj = m.index_proj[:1].float().expand(1, len(positions), -1).contiguous()
        chosen = index_decode(proj, heads, w, rows=rows, pages=IndexPages(index, table), scratch=scratch, max_len=n)
        found.append(chosen[positions.index(n - 1)].clone())
    groups = found[0].long()
    assert torch.equal(*found) and (groups[1:] > groups[:-1]).all()
    keys = index[table[0].long(), PAGE_SIZE:].flatten(0, 1)[: n // 4].float()
    query = scratch.query[1].float().view(heads.n_q, heads.dim)
    scores = torch.relu(keys.double() @ query.double().T).sum(1)
    rest = torch.ones(n // 4, dtype=torch.bool, device="cuda")
    rest[groups] = False
    assert scores[groups].min() >= scores[rest].max() - 1e-3
    assert (chosen[0] == -1).all() and (n == 2052 or (chosen[2] == -1).all())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: many keys")
@in_formats
def test_attention_at_the_published_sizes(format: str) -> None:
    """Behind the budget prompts and decodes attend by the equations; in company a token is the same."""
    index, n_prompt = IndexHeads(4, 128, 4, 2048), 2240
    m = model("cuda", n=n_prompt + 8, index=index, heads=AttentionHeads(24, 2, 256), format=format)
    out, chosen = prefill(m, [n_prompt], index=index)
    found = {
        t: (out[t], chosen[t].long().cpu() if t > 2050 else None) for t in (64, 2047, 2050, 2051, 2055, n_prompt - 1)
    }
    for t in range(n_prompt, n_prompt + 5):
        one, groups = decode(m, [t], n_splits=2, index=index)
        found[t] = one[0], groups[0].long().cpu()
        assert torch.equal(decode(m, [n_prompt, t], n_splits=2, index=index)[0][1], one[0])
    for t, (row, groups) in found.items():
        assert torch.allclose(row.float().cpu(), attended(m, t, groups), atol=0.004, rtol=TOLERANCE), t


def test_what_does_not_fit_is_refused(device: str) -> None:
    m = model(device, n=64)
    heads = IndexHeads(n_q=3, dim=32, ratio=4, budget=64)
    scratch = index_scratch(heads, 64, 64, allocate_on(device), name="index", is_prefill=True)
    with pytest.raises(KernelError, match="1 to 16 query heads"):
        proj = torch.zeros(64, heads.row, dtype=torch.bfloat16, device=device)
        blocks = blocks_of(m, 0, 64)
        index_prefill(
            proj, heads, m.of_index, blocks=blocks, pages=IndexPages(m.index, m.table), scratch=scratch, max_len=64
        )
