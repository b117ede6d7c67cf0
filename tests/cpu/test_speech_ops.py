"""The operators of a speech model against their contracts, on every instruction set, with poisoned outputs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from deltic.ops.cpu.attention import AttentionInputs, attention, attn_prepare
from deltic.ops.cpu.dense import gather
from deltic.ops.cpu.program import Program, usable_instruction_sets
from deltic.ops.cpu.speech import SIDE_KEPT, SIDE_NONE, SIDE_VOICE, add_bias, code_rows, keep_rows, talker_rows
from deltic.ops.geometry import AttentionHeads, AttentionWeights
from deltic.ops.kv_formats import KvPages
from tests.cpu.grid import grid
from tests.tensors import on_tensors

attention, attn_prepare, add_bias, code_rows, gather, keep_rows, talker_rows = map(
    on_tensors, (attention, attn_prepare, add_bias, code_rows, gather, keep_rows, talker_rows)
)

WIDTHS = (16, 96, 1024)
SETS = usable_instruction_sets()


@pytest.fixture(params=grid(SETS, SETS[:1], pytest.mark.long))
def library(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def count(n: int) -> Tensor:
    return torch.tensor(n, dtype=torch.int32)


def poisoned(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(size, torch.nan, dtype=dtype)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows(library: str, width: int) -> None:
    torch.manual_seed(0)
    table = torch.randn(50, width).bfloat16()
    voice, text = torch.randn(6, width), torch.randn(4, width)
    side = ints(SIDE_KEPT, 7, SIDE_NONE, SIDE_VOICE - 5, 49, SIDE_VOICE, SIDE_NONE)
    text_row = ints(2, -1, 0, 3, 1, -1, -1)
    out = poisoned(8, width)
    out[0] = kept = torch.randn(width)
    program = Program(2, library)
    talker_rows(program, side, text_row, table, voice, text, out, count(7))
    picked, rows = ints(49, 0, 3), poisoned(4, width, dtype=torch.bfloat16)
    gather(program, table, picked, rows, count(3))
    state_slots = poisoned(9, width, dtype=torch.bfloat16)
    keep_rows(program, rows, ints(8, 0, 4), state_slots, count(3))
    program.run()
    t, zero = table.float(), torch.zeros(width)
    expected = [kept + text[2], t[7], text[0], voice[5] + text[3], t[49] + text[1], voice[0], zero]
    assert torch.equal(out[:7], torch.stack(expected)) and out[7].isnan().all()
    assert torch.equal(rows[:3], table[[49, 0, 3]]) and rows[3].isnan().all()
    assert torch.equal(state_slots[[8, 0, 4]], rows[:3]) and state_slots[[1, 2, 3, 5, 6, 7]].isnan().all()


@pytest.mark.parametrize("width", WIDTHS)
def test_bias(library: str, width: int) -> None:
    torch.manual_seed(1)
    x, bias = torch.randn(4, width) * 3, torch.randn(width)
    added, out = x.clone(), poisoned(4, width, dtype=torch.bfloat16)
    program = Program(2, library)
    add_bias(program, added, bias, count(3), silu_out=out)
    add_bias(program, added, bias, count(3))
    program.run()
    assert torch.equal(added[:3], (x + bias)[:3]) and torch.equal(added[3], x[3])
    expected = torch.nn.functional.silu(x + bias)[:3]
    torch.testing.assert_close(out[:3].float(), expected, rtol=2**-7, atol=1e-6)
    assert out[3].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_codes(library: str, width: int, dtype: torch.dtype) -> None:
    """The sum of a frame's embeddings, and what the predictor gets of each; a code that was not drawn spoils its frame only."""
    torch.manual_seed(2)
    table, past = torch.randn(50, width).bfloat16(), torch.randn(5, width).bfloat16()
    first, second, state_slot = ints(3, 49, 0), ints(1, -1, 2), ints(4, 0, 2)
    sums, rows, next_rows = (poisoned(4, width), poisoned(8, width, dtype=dtype), poisoned(4, width, dtype=dtype))
    program = Program(2, library)
    code_rows(program, first, table, sums, count(3), rows=rows, past=past, state_slot=state_slot)
    code_rows(program, second, table, sums, count(3), rows=next_rows)
    code_rows(program, first, table, sums, count(3))
    program.run()
    t = table.float()
    expected = t[first] + t[second.clamp(min=0)] + t[first]
    assert torch.equal(sums[[0, 2]], expected[[0, 2]]) and sums[[1, 3]].isnan().all()
    assert torch.equal(rows[0:6:2], past[[4, 0, 2]].to(dtype)) and torch.equal(rows[1:6:2], table[first].to(dtype))
    assert torch.equal(next_rows[[0, 2]], table[[1, 2]].to(dtype)) and rows[6:].isnan().all()


@pytest.mark.parametrize(("n_q", "n_kv", "dim"), [(16, 8, 128), (4, 2, 32), (3, 1, 96)])
def test_attention_without_gates(library: str, n_q: int, n_kv: int, dim: int) -> None:
    """The oracle's softmax, for contexts within and beyond 16 keys, and a decode's bits are a prefill's."""
    torch.manual_seed(3)
    heads = AttentionHeads(n_q, n_kv, dim, is_gated=False)
    n = 70
    proj = torch.randn(n, heads.row)
    norms = torch.randn(2, dim) * 0.1
    angles = torch.arange(n)[:, None] * 1e6 ** (-torch.arange(0, dim, 2) / dim)
    table = ints(1, 0)[None]

    def run(cuts: list[int]) -> Tensor:
        pages, out = torch.zeros(2, 2, n_kv, 64, dim, dtype=torch.bfloat16), []
        for start, end in itertools.pairwise(cuts):
            t, batch_slot = end - start, ints(0)
            query, mixed = (poisoned(t, n_q * dim, dtype=torch.bfloat16), poisoned(t, n_q * dim, dtype=torch.bfloat16))
            program = Program(2, library)
            inputs = AttentionInputs(
                n_tokens=count(t), positions=torch.arange(start, end, dtype=torch.int32), page_table=table,
                token_batch_slot=torch.zeros(t, dtype=torch.int32), n_seqs=count(1), seq_start=ints(0, t),
                seq_context=ints(start), batch_slot=batch_slot,
            )  # fmt: skip
            weights = AttentionWeights(norms[0], norms[1], 1e-6, angles.cos(), angles.sin())
            rows = proj[start:end].contiguous()
            attn_prepare(program, rows, heads, weights, inputs, KvPages(pages), query)
            attention(program, query, rows, heads, inputs, KvPages(pages), torch.zeros(64, dim + 16), mixed)
            program.run()
            out.append(mixed)
        return torch.cat(out)

    whole = run([0, n])
    assert torch.equal(run([0, 1, 2, 15, 16, 17, 18, 64, 65, n]), whole)
    q, k, v = proj.split([n_q * dim, n_kv * dim, n_kv * dim], 1)

    def rotated(x: Tensor, norm: Tensor) -> Tensor:
        x = x.view(n, -1, dim)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + norm)
        a, b = x.chunk(2, -1)
        c, s = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1).bfloat16().float()

    q, k = rotated(q, norms[0]), rotated(k, norms[1]).repeat_interleave(n_q // n_kv, 1)
    v = v.view(n, -1, dim).bfloat16().float().repeat_interleave(n_q // n_kv, 1)
    scores = torch.einsum("thd,shd->hts", q, k) * dim**-0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    expected = torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)
    torch.testing.assert_close(whole.float(), expected, rtol=2**-6, atol=2e-2)
