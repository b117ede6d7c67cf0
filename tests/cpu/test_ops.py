"""Every CPU operator, at every compiled instruction set this machine runs, against the oracle in tests/reference.

Shapes are ugly, outputs and scratch are poisoned with NaN, and rows beyond the count must stay untouched.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from functools import partial
from itertools import product as pairs

import numpy as np
import pytest
import torch
from torch import Tensor

from deltic.engine.messages import SamplingParams
from deltic.ops.arrays import bfloat16, zeros
from deltic.ops.contract import KernelError
from deltic.ops.cpu.attention import AttentionInputs, attention, attn_prepare
from deltic.ops.cpu.dense import DraftNorms, draft_rows, embed, linear, rms_norm, silu_mul
from deltic.ops.cpu.gdn import GdnInputs, GdnMemory, gdn
from deltic.ops.cpu.moe import Experts, MoeScratch, moe
from deltic.ops.cpu.program import Program, usable_instruction_sets
from deltic.ops.cpu.sample import BatchParameters, DrawInputs, DrawScratch, logprobs, sample
from deltic.ops.formats import CODEBOOKS, FLOATS, WEIGHT_FORMATS
from deltic.ops.geometry import AttentionHeads, AttentionWeights, GdnHeads, GdnWeights, LogprobEntries, Routing
from deltic.ops.kv_formats import KvPages
from deltic.ops.matrix import Matrix, row_bytes
from tests.cpu.grid import grid
from tests.quantised_rows import random_rows
from tests.reference import layers as oracle
from tests.reference import sample as sample_oracle
from tests.tensors import TiledOrder, array_of, on_tensors, tensor_of

attention, attn_prepare, draft_rows, embed, linear, rms_norm, silu_mul, gdn, moe, logprobs, sample = map(
    on_tensors, (attention, attn_prepare, draft_rows, embed, linear, rms_norm, silu_mul, gdn, moe, logprobs, sample)
)

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
SETS = usable_instruction_sets()
FORMATS = ("bf16", "int8", "int4", "int4-symmetric")
"""What bfloat16 weights are packed as."""
ONE_BF16_ULP = 2**-7  # relative


@pytest.fixture(params=grid(SETS, SETS[:1], pytest.mark.long))
def program(request: pytest.FixtureRequest) -> Program:
    torch.manual_seed(0)
    return Program(2, library=request.param)


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=I32)


def count(n: int) -> Tensor:
    return torch.tensor(n, dtype=I32)


def poison(*size: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.full(size, float("nan"), dtype=dtype)


def close(actual: Tensor, expected: Tensor, relative: float, absolute: float = 1e-5) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), rtol=relative, atol=absolute)


def packed(values: Tensor, format: str = "bf16") -> Matrix:
    """values [N, K], or [E, N, K]."""
    n_matrices = 1 if values.dim() == 2 else len(values)
    return Matrix.empty(*values.shape[-2:], WEIGHT_FORMATS[format], n_matrices=n_matrices).pack(
        array_of(values.contiguous())
    )


def workspace(n_rows: int, k: int) -> Tensor:
    return torch.full((n_rows * row_bytes(k),), 255, dtype=torch.uint8)


@pytest.mark.parametrize("format", FORMATS)
def test_embed(program: Program, format: str) -> None:
    table, out = torch.randn(50, 96).to(BF16), poison(9, 96)
    w = packed(table, format)
    embed(program, w, i32(3, 49, 0, 7, 7, 1, 1, 1, 1), out, count(5))
    program.run()
    expected = table.float() if format == "bf16" else tensor_of(w.unpack()[0])
    assert torch.equal(out[:5], expected[[3, 49, 0, 7, 7]])
    assert out[5:].isnan().all()


# Of a group's largest value: half a step of 127; the fits of int4 clip what stands out.
STEP = {"bf16": 0.0, "int8": 0.5 / 127, "int4": 0.35, "int4-symmetric": 0.35}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (35, 96), (16, 128), (33, 4128)])
def test_packing_keeps_the_values(format: str, n: int, k: int) -> None:
    torch.manual_seed(n)
    values = torch.randn(n, k).to(BF16)
    values[0, : k // 2] = 0  # groups of nothing, too
    matrix = packed(values, format)
    found, group = tensor_of(matrix.unpack()[0]), matrix.whole.format.group or k
    for start in range(0, k, group):
        part = values[:, start : start + group].float()
        most = part.abs().amax(1, keepdim=True)
        assert ((found[:, start : start + group] - part).abs() <= STEP[format] * most + 1e-7).all()
    error = (found - values.float()).norm() / values.float().norm()
    assert error <= {"bf16": 0.0, "int8": 0.007, "int4": 0.085, "int4-symmetric": 0.105}[format]


@pytest.mark.parametrize("format", FORMATS)
def test_packed_bytes_are_the_same_on_every_machine(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 35, 160).to(BF16)
    expected = packed(values, format).whole.data
    for library in SETS:
        monkeypatch.setattr("deltic.ops.matrix.Program", partial(Program, library=library))
        assert (packed(values, format).whole.data == expected).all(), library


@pytest.mark.parametrize("name", ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_each_entry_of_a_codebook_stands_for_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed bytes are the same on every machine, and what each makes of them is what the rows mean."""
    rows = random_rows(name, 64, 512)
    book = CODEBOOKS[rows.format.codes]
    index = np.arange(64 * 512 // book.width) % (1 << book.bits + (not book.has_signs))
    each = rows.codes.reshape(-1, book.width)
    each[:, 0], each[:, 1] = index & 255, index >> 8
    expected = None
    for library in SETS:
        monkeypatch.setattr("deltic.ops.matrix.Program", partial(Program, library=library))
        matrix = Matrix.empty(64, 512, rows.format)
        matrix.whole.pack(rows)
        expected = matrix.whole.data if expected is None else expected
        assert np.array_equal(matrix.whole.data, expected), library
        assert np.array_equal(matrix.unpack()[0], rows.values()), library


def product(x: Tensor, w: Matrix) -> Tensor:
    """x W^T in float64, with x rounded to int8 by groups as a quantised product does."""
    x = x.float()
    format = w.whole.format
    if format.codes not in FLOATS:
        segments = []
        for part in x.split(format.group, 1):
            most = part.abs().amax(1, keepdim=True)
            inverse = torch.div(127.0 * torch.ones(()), most)  # 127 / most would multiply by a reciprocal
            segments.append((part * inverse).round() * (most / 127))
        x = torch.cat(segments, 1)
    return x.double() @ tensor_of(w.unpack()[0]).double().T


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", grid([1, 2, 5, 6, 7, 17, 33, 130], (1, 7, 33), pytest.mark.long))
@pytest.mark.parametrize(("n", "k"), [(1, 32), (35, 96), (70, 2048), (33, 4128)])
def test_linear(program: Program, rows: int, n: int, k: int, format: str) -> None:
    x, w = torch.randn(rows + 2, k).to(BF16), packed((torch.randn(n, k) / k**0.5).to(BF16), format)
    out, residual, space = poison(rows + 2, n), torch.randn(rows + 2, n), workspace(rows + 2, k)
    added = residual.clone()
    linear(program, x, w, out, space, count(rows))
    linear(program, x, w, added, space, count(rows), add=True)
    program.run()
    expected = product(x, w)
    close(out[:rows], expected[:rows], 1e-5, 5e-6)
    close(added[:rows], (residual + expected)[:rows], 1e-5, 5e-6)
    assert out[rows:].isnan().all() and torch.equal(added[rows:], residual[rows:])


def stored(name: str, n: int, k: int) -> Matrix:
    """Random rows of a format that a checkpoint may hold."""
    matrix = Matrix.empty(n, k, WEIGHT_FORMATS[name])
    if name in FORMATS:
        return packed((torch.randn(n, k) / k**0.5).to(BF16), name)
    matrix.whole.pack(random_rows(name, n, k))
    return matrix


@pytest.mark.parametrize("format", [name for name in WEIGHT_FORMATS if name != "bf16"])
@pytest.mark.parametrize(("n", "k"), [(35, 96), (16, 512), (3, 800)])
def test_stored_rows_keep_their_values(
    program: Program, format: str, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, on every instruction set."""
    monkeypatch.setattr("deltic.ops.matrix.Program", partial(Program, library=program.instruction_set))
    found, values = Matrix.empty(n, k, WEIGHT_FORMATS[format]), random_rows(format, n, k, seed=n)
    found.whole.pack(values)
    assert (found.unpack()[0] == values.values()).all()


@pytest.mark.parametrize("format", [name for name in WEIGHT_FORMATS if name not in FORMATS])
@pytest.mark.parametrize("rows", [1, 3, 14, 40])
def test_linear_of_stored_rows(program: Program, rows: int, format: str) -> None:
    n, k = 70, 800
    x, w = torch.randn(rows + 2, k).to(BF16), stored(format, n, k)
    out, space = poison(rows + 2, n), workspace(rows + 2, k)
    linear(program, x, w, out, space, count(rows))
    program.run()
    close(out[:rows], product(x, w)[:rows], 1e-5, 1e-5)
    assert out[rows:].isnan().all()


@pytest.mark.parametrize("format", [name for name, f in WEIGHT_FORMATS.items() if f.codes in CODEBOOKS])
def test_one_row_reads_nothing_behind_a_matrix(program: Program, format: str) -> None:
    """Units are looked up ahead of their products; behind the last one is no memory."""
    whole, x = Matrix.empty(48, 512, WEIGHT_FORMATS[format]), zeros((1, 512), bfloat16)
    whole.whole.pack(random_rows(format, 48, 512))
    x[:] = np.random.default_rng(0).standard_normal(512)
    end = -(-whole.n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, end + mmap.PAGESIZE), np.uint8)
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    assert mprotect(memory.ctypes.data + end, mmap.PAGESIZE, 0) == 0
    data = memory[end - whole.n_bytes : end].reshape(whole.whole.data.shape)
    data[:] = whole.whole.data
    outs = [zeros((1, 48), np.float32) for _ in range(2)]
    for out, at in zip(outs, (whole.whole.data, data), strict=True):
        matrix = replace(whole, segments=(replace(whole.whole, data=at),))
        linear(program, x, matrix, out, zeros((row_bytes(512),), np.uint8), np.array(1, np.int32))
    program.run()
    assert outs[0].any() and np.array_equal(*outs)


def test_linear_of_several_formats(program: Program) -> None:
    """A matrix of segments has the bits of its segments alone, added to what is there too."""
    k, rows = 512, 5
    names = ["Q4_K", "Q6_K", "bf16", "fp8", "Q5_K", "Q4_K", "int8"]
    segments = [stored(name, 7 + 9 * i, k) for i, name in enumerate(names)]
    n = sum(segment.n for segment in segments)
    w = Matrix(n, k, tuple(segment.whole for segment in segments))
    x, space = torch.randn(rows, k).to(BF16), workspace(rows, k)
    out, alone, added = poison(rows, n), [poison(rows, segment.n) for segment in segments], torch.ones(rows, n)
    linear(program, x, w, out, space, count(rows))
    linear(program, x, w, added, space, count(rows), add=True)
    for segment, expected in zip(segments, alone, strict=True):
        linear(program, x, segment, expected, space, count(rows))
    program.run()
    assert torch.equal(out, torch.cat(alone, 1)) and torch.equal(added, 1.0 + out)
    assert (w.unpack()[0] == np.concatenate([segment.unpack()[0] for segment in segments])).all()


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_linear_row_count_keeps_bits(program: Program, format: str) -> None:
    x, w = torch.randn(101, 4128).to(BF16), stored(format, 67, 4128)
    space = workspace(101, 4128)
    expected = poison(101, 67)
    linear(program, x, w, expected, space, count(101))
    program.run()
    for n_rows in (1, 3, 16, 30, 40):
        for n_threads in (1, 3):
            out, some = poison(n_rows, 67), Program(n_threads, library=program.instruction_set)
            linear(some, x[-n_rows:].contiguous(), w, out, space, count(n_rows))
            some.run()
            assert torch.equal(out.view(I32), expected[-n_rows:].view(I32))


def test_quantised_products_are_equal_on_all_instruction_sets_but_for_the_last_sum() -> None:
    """Sums within a group are exact integers; what is left is one fused multiply-add a group, which not all sets have."""
    torch.manual_seed(0)
    x, space = torch.randn(9, 640).to(BF16), workspace(9, 640)
    for format in ("int8", "int4"):
        w = packed(torch.randn(40, 640).to(BF16), format)
        outs = []
        for library in SETS:
            out, program = poison(9, 40), Program(1, library=library)
            linear(program, x, w, out, space, count(9))
            program.run()
            outs.append(out)
        for out in outs:
            close(out, outs[0], 1e-6, 1e-5)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_harms_no_other(program: Program, format: str, bad: float) -> None:
    x, w = torch.randn(5, 288).to(BF16), packed(torch.randn(20, 288).to(BF16), format)
    clean, out, space = poison(5, 20), poison(5, 20), workspace(5, 288)
    linear(program, x, w, clean, space, count(5))
    damaged = x.clone()
    damaged[2, 130] = bad
    linear(program, damaged, w, out, space, count(5))
    program.run()
    others = [0, 1, 3, 4]
    assert not out[2].isfinite().any()
    assert torch.equal(out[others].view(I32), clean[others].view(I32))


def test_linear_refuses_what_it_cannot_do(program: Program) -> None:
    with pytest.raises(KernelError, match="K a multiple of 32, found 40"):
        Matrix.empty(8, 40, WEIGHT_FORMATS["bf16"])
    w = packed(torch.zeros(8, 64).to(BF16))
    x, out = torch.zeros(2, 64).to(BF16), torch.zeros(2, 8)
    with pytest.raises(KernelError, match="a workspace for 2 rows"):
        linear(program, x, w, out, workspace(1, 64), count(1))
    with pytest.raises(KernelError, match=r"x \[T, 64\] and out \[T, 8\]"):
        linear(program, x, w, torch.zeros(2, 9), workspace(2, 64), count(1))
    with pytest.raises(KernelError, match=r"contiguous bfloat16 values of 1 x \[8, 64\]"):
        w.pack(array_of(torch.zeros(8, 32).to(BF16)))


@pytest.mark.parametrize("rows", [1, 65])
@pytest.mark.parametrize("width", [16, 144, 2048])
def test_rms_norm(program: Program, rows: int, width: int) -> None:
    x, w, out, picked = (
        torch.randn(rows + 1, width),
        torch.randn(width),
        poison(rows + 1, width, dtype=BF16),
        poison(2, width, dtype=BF16),
    )
    rms_norm(program, x, w, 1e-6, out, count(rows))
    rms_norm(program, x, w, 1e-6, picked, count(1), rows=i32(rows, 0))
    program.run()
    expected = oracle.rms_norm(x, w, 1e-6)
    close(out[:rows], expected[:rows], ONE_BF16_ULP)
    close(picked[0], expected[rows], ONE_BF16_ULP)
    assert out[rows:].isnan().all() and picked[1].isnan().all()


@pytest.mark.parametrize("n_streams", [1, 3])
@pytest.mark.parametrize("format", FORMATS)
def test_draft_rows(program: Program, format: str, n_streams: int) -> None:
    n, width = n_streams, n_streams * 96
    table, hidden = packed(torch.randn(50, 96).to(BF16), format), torch.randn(5, width).to(BF16)
    norms, out, scratch = (
        DraftNorms(torch.randn(96), torch.randn(width), 1e-6),
        poison(5 * n, 192, dtype=BF16),
        poison(5, width),
    )
    draft_rows(program, table, i32(3, 49, 0, 7, 1), hidden, norms, out, count(4), scratch)
    program.run()
    embedded = tensor_of(table.unpack()[0])[[3, 49, 0, 7]].repeat_interleave(n, 0)
    close(out[: 4 * n, :96], oracle.rms_norm(embedded, norms.embedding, 1e-6), ONE_BF16_ULP)
    close(out[: 4 * n, 96:], oracle.rms_norm(hidden[:4].float(), norms.hidden, 1e-6).view(4 * n, 96), ONE_BF16_ULP)
    assert out[4 * n :].isnan().all()


@pytest.mark.parametrize("n", [35, 48, 64, 70])
def test_some_rows_of_a_matrix(n: int) -> None:
    """In the same memory, of one segment and of several."""
    values = torch.randn(70, 64).to(BF16)
    for runs in (70, [(32, WEIGHT_FORMATS["int8"]), (38, WEIGHT_FORMATS["bf16"])]):
        format = WEIGHT_FORMATS["int4"] if isinstance(runs, int) else runs
        matrix = Matrix.empty(70, 64, format).pack(array_of(values))
        for begin in (0, 32):
            some = matrix.rows(begin, n)
            assert some.n == n - begin and np.array_equal(some.unpack(), matrix.unpack()[:, begin:n])
            assert all(any(np.shares_memory(a.data, b.data) for b in matrix.segments) for a in some.segments)


def test_silu_mul(program: Program) -> None:
    gate_up, out = torch.randn(7, 2 * 80) * 20, poison(7, 80, dtype=BF16)
    gate_up[0, :3] = torch.tensor([-1e4, 1e4, -90.0])
    silu_mul(program, gate_up, out, count(6))
    program.run()
    gate, up = gate_up.chunk(2, -1)
    close(out[:6], (torch.nn.functional.silu(gate) * up)[:6], ONE_BF16_ULP)
    assert out[6:].isnan().all()


HEADS = GdnHeads(n_k=2, n_v=6, k_dim=128, v_dim=128)
WINDOW = 5


class GdnCase:
    """Weights, state slots and a way to run the operator on chunks of sequences and the oracle on whole ones."""

    def __init__(self, program: Program, heads: GdnHeads, n_slots: int, dtype: torch.dtype = torch.float32) -> None:
        self.program, self.heads = program, heads
        self.weights = GdnWeights(
            conv=torch.randn(4, heads.channels) * 0.5,
            a_log=torch.rand(heads.n_v).mul(3).add(0.5).log(),
            dt_bias=torch.randn(heads.n_v) - 4,
            norm=1 + 0.1 * torch.randn(heads.v_dim),
        )
        self.state = poison(n_slots, heads.n_v, heads.k_dim, heads.v_dim, dtype=dtype)
        self.columns = poison(n_slots, 3, heads.channels, dtype=BF16)
        # Of two layers, of which this is the second. A sequence's batch slot is its state slot.
        self.window_columns = poison(n_slots, 2, WINDOW, heads.channels, dtype=BF16)
        self.window_gates = poison(n_slots, 2, WINDOW, 2 * heads.n_v)

    def projection(self, n_tokens: int) -> Tensor:
        return torch.randn(n_tokens, self.heads.channels + self.heads.n_v * self.heads.v_dim + 2 * self.heads.n_v)

    def run(
        self,
        chunks: list[tuple[int, int, Tensor]],
        starts: list[int] | None = None,
        snapshots: list[list[tuple[int, int]]] | None = None,
        redo: list[int] | None = None,
        lazy: list[bool] | None = None,
    ) -> list[Tensor]:
        """(state slot, tokens before, projection rows) of each sequence -> its output rows.

        starts: the state slots that they start from, when not their own. snapshots: of each sequence, (tokens, state slot). redo: tokens of its
        window. lazy: whether its rows are drafts.
        """
        h, proj = self.heads, torch.cat([rows for _, _, rows in chunks])
        snapshots = snapshots or [[]] * len(chunks)
        lengths = torch.tensor([len(rows) for _, _, rows in chunks])
        t, s = len(proj), len(chunks)
        out = poison(t, h.n_v * h.v_dim, dtype=BF16)
        program = Program(2, library=self.program.instruction_set)
        inputs = GdnInputs(
            n_seqs=count(s),
            seq_start=torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(I32),
            seq_context=i32(*(before for _, before, _ in chunks)),
            start_slot=i32(*(starts or [state_slot for state_slot, _, _ in chunks])), state_slot=i32(*(state_slot for state_slot, _, _ in chunks)),
            snapshot_begin=torch.tensor([0, *(len(kept) for kept in snapshots)]).cumsum(0).to(I32),
            snapshot_n=i32(*(n for kept in snapshots for n, _ in kept)),
            snapshot_slot=i32(*(state_slot for kept in snapshots for _, state_slot in kept)),
            n_redo=i32(*(redo or [0] * s)), is_lazy=i32(*(lazy or [0] * s)),
            batch_slot=i32(*(state_slot for state_slot, _, _ in chunks)),
        )  # fmt: skip
        windows = self.window_columns[:, 1], self.window_gates[:, 1]
        gdn(program, proj, h, self.weights, 1e-6, inputs, GdnMemory(self.columns, self.state, *windows, layer=1), out)
        program.run()
        return list(out.split(lengths.tolist()))

    def expected(self, proj: Tensor) -> tuple[Tensor, Tensor]:
        h, w = self.heads, self.weights
        qkv, z, b, a = proj.split([h.channels, h.n_v * h.v_dim, h.n_v, h.n_v], -1)
        u, _ = oracle.causal_conv(oracle.rounded(qkv, "bfloat16"), w.conv.T)
        q, k, v = u.split([h.n_k * h.k_dim, h.n_k * h.k_dim, h.n_v * h.v_dim], -1)
        q, k = (oracle.l2_norm(x.unflatten(-1, (h.n_k, h.k_dim))) for x in (q, k))
        beta, g = oracle.gdn_gates(b, a, w.a_log, w.dt_bias)
        v = v.unflatten(-1, (h.n_v, h.v_dim))
        store = None if self.state.dtype == torch.float32 else partial(oracle.stochastic_bfloat16, layer=1)
        o, state = oracle.naive_gdn(q * h.k_dim**-0.5, k, v, g, beta, tiled=h.tiled, store=store)
        y, z = oracle.gated_rms_norm(o, z.view_as(o), w.norm, 1e-6), z.view_as(o)
        return (y / z if h.sigmoid_gate else y).flatten(1), state  # SiLU is z sigmoid(z)


def bits(x: Tensor) -> Tensor:
    return x.view(I32 if x.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        (HEADS, torch.float32),
        (GdnHeads(1, 2, 64, 48), torch.float32),
        (GdnHeads(2, 6, 64, 48, tiled=True), torch.float32),
        (GdnHeads(1, 2, 64, 48, sigmoid_gate=True), torch.float32),
        (HEADS, BF16),
        (GdnHeads(2, 6, 64, 48, tiled=True), BF16),
    ],
)
def test_gdn(program: Program, heads: GdnHeads, dtype: torch.dtype) -> None:
    """Ragged chunks, decodes and continued sequences in one batch, against whole sequences by the oracle. In bfloat16 a sum in
    another order now and then rounds a value to its neighbour."""
    case = GdnCase(program, heads, n_slots=5, dtype=dtype)
    proj = {state_slot: case.projection(n) for state_slot, n in ((4, 70), (0, 1), (2, 9), (1, 131))}
    parts: dict[int, list[Tensor]] = {state_slot: [] for state_slot in proj}
    for cuts in (
        {4: (0, 64), 0: (0, 1), 2: (0, 2)},
        {4: (64, 65), 1: (0, 65), 2: (2, 3)},
        {2: (3, 9), 1: (65, 131), 4: (65, 70)},
    ):
        outputs = case.run([(state_slot, a, proj[state_slot][a:b]) for state_slot, (a, b) in cuts.items()])
        for state_slot, out in zip(cuts, outputs, strict=True):
            parts[state_slot].append(out)
    for state_slot, rows in proj.items():
        expected, state = case.expected(rows)
        if dtype == BF16:
            close(torch.cat(parts[state_slot]), expected, ONE_BF16_ULP, 2e-2)
            close(case.state[state_slot], state, ONE_BF16_ULP, 2e-2)
            assert (case.state[state_slot].float() == state).float().mean() > 0.98
        else:
            close(torch.cat(parts[state_slot]), expected, ONE_BF16_ULP, 1e-4)
            close(case.state[state_slot], state, 1e-4, 1e-5)
        n_kept = min(3, len(rows))
        assert torch.equal(case.columns[state_slot, 3 - n_kept :], rows[-n_kept:, : heads.channels].to(BF16))
    assert case.state[3].isnan().all() and case.columns[3].isnan().all()
    assert case.window_columns.isnan().all() and case.window_gates.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_gdn_chunks_keep_bits(program: Program, dtype: torch.dtype) -> None:
    """Any cut of a sequence, down to single tokens, gives the same bits."""
    case = GdnCase(program, HEADS, n_slots=3, dtype=dtype)
    rows = case.projection(67)
    (whole,) = case.run([(0, 0, rows)])
    stepped = torch.cat([case.run([(1, t, rows[t : t + 1])])[0] for t in range(67)])
    cut = torch.cat([case.run([(2, 0, rows[:5])])[0], case.run([(2, 5, rows[5:])])[0]])
    for other in (stepped, cut):
        assert torch.equal(whole.view(torch.int16), other.view(torch.int16))
    for state_slot in (1, 2):
        assert torch.equal(bits(case.state[0]), bits(case.state[state_slot]))


def test_gdn_keeps_what_is_not_finite(program: Program) -> None:
    """Random bits make no number of a NaN, whichever it is."""
    case = GdnCase(program, HEADS, n_slots=1, dtype=BF16)
    case.run([(0, 0, case.projection(5))])
    case.state.view(torch.int16)[0, 0, 3, 7], case.state.view(torch.int16)[0, 1, 4, 9] = 0x7FFF, -1
    case.run([(0, 5, case.projection(3))])
    assert case.state[0, 0, :, 7].isnan().all() and case.state[0, 1, :, 9].isnan().all()
    assert case.state[0].isnan().sum() == 2 * HEADS.k_dim


def same_slots(case: GdnCase, pairs: list[tuple[int, int]]) -> bool:
    """Whether the state slots of each pair hold the same bits, both halves."""
    return all(
        torch.equal(bits(case.state[a]), bits(case.state[b]))
        and torch.equal(case.columns[a].view(torch.int16), case.columns[b].view(torch.int16))
        for a, b in pairs
    )


@pytest.mark.parametrize(
    ("heads", "dtype"), [(HEADS, torch.float32), (GdnHeads(1, 2, 64, 48), torch.float32), (HEADS, BF16)]
)
def test_gdn_snapshots(program: Program, heads: GdnHeads, dtype: torch.dtype) -> None:
    """A snapshot is what a cut there would leave, wherever it is, and the chunk that takes it computes what it always does."""
    case = GdnCase(program, heads, n_slots=14, dtype=dtype)
    long, short = case.projection(200), case.projection(70)
    chunks = [(0, 0, long), (1, 0, short)]
    whole = case.run(chunks)
    kept = [[(64, 4), (128, 5), (192, 6)], [(64, 7)]]
    again = case.run([(2, 0, long), (3, 0, short)], snapshots=kept)
    for one, other in zip(whole, again, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))
    assert same_slots(case, [(2, 0), (3, 1)])
    case.run([(8, 0, long[:64])])
    assert same_slots(case, [(4, 8)])
    case.run([(8, 64, long[64:128])])
    assert same_slots(case, [(5, 8)])
    case.run([(8, 128, long[128:192]), (9, 0, short[:64])])
    assert same_slots(case, [(6, 8), (7, 9)])
    # Snapshots of a few tokens need columns from before the chunk, which the chunk's own end replaces.
    case.run([(8, 192, long[192:])], snapshots=[[(1, 10), (2, 11), (7, 12)]])
    assert same_slots(case, [(8, 0)])
    for n, state_slot in ((1, 10), (2, 11), (7, 12)):
        case.run([(13, 192, long[192 : 192 + n])], starts=[6])
        assert same_slots(case, [(13, state_slot)])


@pytest.mark.parametrize("length", [1, 2, 3, 66])
def test_gdn_starts_from_other_slots(program: Program, length: int) -> None:
    """Sequences that start from one state slot each go their own way, as from a state slot of their own; it stays as it is."""
    case = GdnCase(program, HEADS, n_slots=8)
    case.run([(0, 0, case.projection(64))])
    for state_slot in (1, 2, 3):
        case.state[state_slot], case.columns[state_slot] = case.state[0], case.columns[0]
    rows = [case.projection(length) for _ in range(3)]
    expected = case.run([(1 + i, 64, rows[i]) for i in range(3)])
    fresh = case.projection(length)
    # The last one starts from nothing, whatever its start state slot is.
    found = case.run([*((4 + i, 64, rows[i]) for i in range(3)), (7, 0, fresh)], starts=[0, 0, 0, 0])
    for one, other in zip(expected, found, strict=False):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))
    assert same_slots(case, [(4, 1), (5, 2), (6, 3)])
    (alone,) = case.run([(1, 0, fresh)])
    assert torch.equal(alone.view(torch.int16), found[3].view(torch.int16)) and same_slots(case, [(7, 1)])
    # What was read is as before: a chunk in it goes on like the others.
    case.run([(0, 64, rows[0])])
    assert same_slots(case, [(0, 4)])


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        (HEADS, torch.float32),
        (GdnHeads(2, 6, 64, 48, tiled=True), torch.float32),
        (GdnHeads(1, 3, 32, 144), torch.float32),
        (GdnHeads(1, 3, 32, 144), BF16),
    ],
)
def test_gdn_drafts_keep_bits(program: Program, heads: GdnHeads, dtype: torch.dtype) -> None:
    """Steps with drafts, whatever is accepted, give the outputs and leave the states of decodes of one token at a time.

    Slots 0 .. 5 are the sequences', 6 a start that two of them share, 7 and on those of the decodes: what is left after each token.
    """
    pick = np.random.default_rng(7)
    n_seqs, n_tokens, shared, decoded = 6, 100, 6, 7
    case = GdnCase(program, heads, n_slots=8, dtype=dtype)
    common = case.projection(10)
    rows = [case.projection(n_tokens) for _ in range(n_seqs)]
    rows[0][:10] = rows[1][:10] = common
    outputs: list[list[Tensor]] = [[] for _ in rows]
    states, columns = ([[torch.zeros_like(state_slots[0])] for _ in rows] for state_slots in (case.state, case.columns))
    for s, t in pairs(range(n_seqs), range(n_tokens)):
        outputs[s] += case.run([(decoded, t, rows[s][t : t + 1])])
        states[s].append(case.state[decoded].clone())
        columns[s].append(case.columns[decoded].clone())
    case.run([(shared, 0, common)])

    n_done, n_redo = [10, 10, 0, 0, 0, 0], [0] * n_seqs
    windows, gates = case.window_columns.clone(), case.window_gates.clone()
    first = ["lazy", "decode", "lazy", "prefill", "lazy", "decode"]  # two share a start, the others have none
    seen = set()
    for step in range(16):
        kinds = (
            first if step == 0 else [str(kind) for kind in pick.choice(["lazy", "lazy", "decode", "prefill"], n_seqs)]
        )
        lengths = {"decode": 1, "lazy": pick.integers(1, WINDOW + 1), "prefill": pick.integers(2, 9)}
        n_rows = [int(lengths[kind]) for kind in kinds]
        if step == 1:
            kinds[2], n_rows[2] = "prefill", 70  # more than one block, and the first one has tokens to redo
        running = [s for s in range(n_seqs) if n_done[s] + n_rows[s] <= n_tokens]
        n_right = [int(pick.integers(1, n + 1)) if kind == "lazy" else n for kind, n in zip(kinds, n_rows, strict=True)]
        # What goes on behind a wrong draft is of no sequence.
        tried = [
            torch.cat([rows[s][n_done[s] : n_done[s] + n_right[s]], case.projection(n_rows[s] - n_right[s])])
            for s in range(n_seqs)
        ]
        found = case.run(
            [(s, n_done[s], tried[s]) for s in running],
            starts=[shared if step == 0 and s < 2 else s for s in running],
            redo=[n_redo[s] for s in running],
            lazy=[kinds[s] == "lazy" for s in running],
        )
        for s, out in zip(running, found, strict=True):
            seen.add((kinds[s], min(n_redo[s], 2)))
            expected = torch.cat(outputs[s][n_done[s] : n_done[s] + n_right[s]])
            assert torch.equal(out[: n_right[s]].view(torch.int16), expected.view(torch.int16))
            is_lazy, n_kept = kinds[s] == "lazy", n_done[s]
            n_done[s] += n_right[s]
            n_redo[s] = n_right[s] if is_lazy else 0
            if is_lazy:
                windows[s, 1, : n_rows[s]] = tried[s][:, : heads.channels].to(BF16)
                gates[s, 1, : n_rows[s]] = tried[s][:, -2 * heads.n_v :]
            else:
                n_kept = n_done[s]
            assert torch.equal(bits(case.state[s]), bits(states[s][n_kept]))
            assert torch.equal(case.columns[s].view(torch.int16), columns[s][n_kept].view(torch.int16))
        assert torch.equal(case.window_columns.view(torch.int16), windows.view(torch.int16))
        assert torch.equal(case.window_gates.view(I32), gates.view(I32))
    assert seen == set(pairs(("lazy", "decode", "prefill"), range(3)))
    assert torch.equal(bits(case.state[shared]), bits(states[0][10]))


def test_gdn_refuses_a_window_that_does_not_fit() -> None:
    case = GdnCase(Program(1), GdnHeads(1, 2, 64, 48), n_slots=1)
    for columns, gates, word in (
        (poison(1, 2, 33, case.heads.channels, dtype=BF16), poison(1, 2, 33, 4), "1 to 32 tokens"),
        (case.window_columns.float(), case.window_gates, "bfloat16 columns"),
        (case.window_columns[..., 16:], case.window_gates, "window_columns"),
        (case.window_columns, case.window_gates[:, :, 1:], "window_gates"),
    ):
        case.window_columns, case.window_gates, kept = columns, gates, (case.window_columns, case.window_gates)
        with pytest.raises(KernelError, match=word):
            case.run([(0, 0, case.projection(1))])
        case.window_columns, case.window_gates = kept


@pytest.mark.parametrize("heads", [HEADS, GdnHeads(4, 12, 32, 48)])
def test_gdn_tiled_order_keeps_bits(program: Program, heads: GdnHeads) -> None:
    """Value heads in tiled order compute what they do in grouped order: prefill, snapshots, decodes in place and from a snapshot."""
    order = TiledOrder(heads)
    grouped, tiled = GdnCase(program, heads, n_slots=6), GdnCase(program, order.heads, n_slots=6)
    tiled.weights = order.weights(grouped.weights)
    long, short = grouped.projection(131), grouped.projection(6)
    for chunks, starts, snapshots in (
        ([(0, 0, long[:130]), (1, 0, short[:5])], [0, 1], [[(64, 2), (70, 3)], []]),
        ([(0, 130, long[130:]), (1, 5, short[5:]), (4, 70, long[70:71])], [0, 1, 3], [[], [(1, 5)], []]),
    ):
        expected = grouped.run(chunks, starts, snapshots)
        found = tiled.run(
            [(state_slot, before, rows[:, order.row]) for state_slot, before, rows in chunks], starts, snapshots
        )
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one[:, order.out].view(torch.int16), other.view(torch.int16))
    assert not grouped.state.isnan().any()
    assert torch.equal(grouped.state[:, order.head].view(I32), tiled.state.view(I32))
    assert torch.equal(grouped.columns[..., order.channel].view(torch.int16), tiled.columns.view(torch.int16))


@pytest.mark.parametrize(("n_q", "n_kv", "dim"), [(4, 2, 256), (6, 1, 64), (32, 1, 128)])
def test_attention(program: Program, n_q: int, n_kv: int, dim: int) -> None:
    """Two sequences over shuffled pages, prefilled in ragged chunks and a decode, against the oracle."""
    heads, rotary, eps = AttentionHeads(n_q, n_kv, dim), 32, 1e-6
    pages = poison(8, 2, n_kv, 64, dim, dtype=BF16)
    page_table = i32(5, 2, 7, -1, 0, 6, 1, -1).view(2, 4)
    q_norm, k_norm = 0.1 * torch.randn(dim), 0.1 * torch.randn(dim)
    inv_freq = torch.tensor([1e4 ** (-2 * i / rotary) for i in range(rotary // 2)], dtype=torch.float64)
    angles = (torch.arange(256)[:, None] * inv_freq).float()
    lengths = (141, 66)
    proj = [torch.randn(n, heads.row) for n in lengths]
    parts: list[list[Tensor]] = [[], []]
    done = [0, 0]
    for takes in ((64, 1), (70, 64), (6, 1), (1, 0)):
        live = [s for s in (0, 1) if takes[s]]
        rows = torch.cat([proj[s][done[s] : done[s] + takes[s]] for s in live])
        t = len(rows)
        counts = torch.tensor([takes[s] for s in live])
        state_slots = i32(*live)
        positions = torch.cat([torch.arange(done[s], done[s] + takes[s]) for s in live]).to(I32)
        q, out = poison(t, n_q * dim, dtype=BF16), poison(t, n_q * dim, dtype=BF16)
        step = Program(2, library=program.instruction_set)
        inputs = AttentionInputs(
            n_tokens=count(t), positions=positions, token_batch_slot=torch.repeat_interleave(state_slots, counts).to(I32),
            page_table=page_table, n_seqs=count(len(live)), seq_start=torch.cat([torch.zeros(1), counts.cumsum(0)]).to(I32),
            seq_context=i32(*(done[s] for s in live)), batch_slot=state_slots,
        )  # fmt: skip
        weights = AttentionWeights(q_norm, k_norm, eps, angles.cos(), angles.sin())
        attn_prepare(step, rows, heads, weights, inputs, KvPages(pages), q)
        attention(step, q, rows, heads, inputs, KvPages(pages), poison(*heads.records_size(256)), out)
        step.run()
        for s, part in zip(live, out.split(counts.tolist()), strict=True):
            parts[s].append(part)
            done[s] += takes[s]
    for s, length in enumerate(lengths):
        q, gate, k, v = proj[s].split([n_q * dim, n_q * dim, n_kv * dim, n_kv * dim], -1)
        at = torch.arange(length)
        q, k = (
            oracle.rounded(oracle.rope(oracle.rms_norm(x.unflatten(-1, (-1, dim)), w, eps), at, inv_freq), "bfloat16")
            for x, w in ((q, q_norm), (k, k_norm))
        )
        o = oracle.attention(q, k, oracle.rounded(v, "bfloat16").unflatten(-1, (-1, dim))).flatten(1)
        close(torch.cat(parts[s]), o * gate.sigmoid(), ONE_BF16_ULP, 2e-3)


@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize(("n_tokens", "n_experts", "k"), [(1, 16, 4), (37, 10, 3), (130, 16, 1)])
def test_moe(program: Program, n_tokens: int, n_experts: int, k: int, format: str) -> None:
    width, inner, t = 96, 64, n_tokens + 1
    h = torch.randn(t, width).to(BF16)
    router = torch.randn(n_experts + 1, width).to(BF16)
    gate_up = packed(torch.randn(n_experts, 2 * inner, width).to(BF16) / 8, format)
    down = packed(torch.randn(n_experts, width, inner).to(BF16) / 8, format)
    shared, residual = torch.randn(t, width), torch.randn(t, width)
    out, logits = residual.clone(), poison(t, n_experts + 1)
    scratch = MoeScratch(
        expert=torch.full((t, k), -1, dtype=I32), weight=poison(t, k), order=torch.full((t * k,), -1, dtype=I32),
        begin=torch.full((n_experts + 1,), -1, dtype=I32), probabilities=poison(t, n_experts + 16),
        rows=workspace(t * k, width), up=poison(t * k, 2 * inner), act=poison(t * k, inner, dtype=BF16), y=poison(t * k, width),
    )  # fmt: skip
    linear(program, h, packed(router), logits, workspace(t, width), count(n_tokens))
    moe(
        program, h, logits, Experts(gate_up, down, Routing(k, True)), shared, out, count(n_tokens), scratch
    )  # fmt: skip
    program.run()
    weights, ids = oracle.route(h.float(), router[:-1], k, True, "bfloat16")
    assert torch.equal(scratch.expert[:n_tokens], ids[:n_tokens].to(I32))
    gate = (h.float() @ router[-1].float()).sigmoid()
    up_rows, down_rows = tensor_of(gate_up.unpack()), tensor_of(down.unpack())
    expected = torch.empty(n_tokens, width)
    for token in range(n_tokens):
        expected[token] = residual[token] + gate[token] * shared[token]
        x = h[token : token + 1].float()
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            expected[token] += weight * oracle.swiglu(x, up_rows[expert], down_rows[expert], "bfloat16")[0]
    if format == "bf16":
        close(out[:n_tokens], expected, 1e-2, 1e-2)
    else:  # the rows were rounded to int8 twice
        assert (out[:n_tokens] - expected).norm() < 0.015 * expected.norm()
    assert torch.equal(out[n_tokens:], residual[n_tokens:])


@pytest.mark.parametrize("n_experts", [2, 12, 24])
def test_experts_on_the_disk_give_the_same_bits(program: Program, n_experts: int) -> None:
    """6 MB each: they are asked for at once, matrix by matrix, and in two blocks of experts a matrix."""
    width, inner, t, k = 1024, 1024, 40, 2
    h, logits = torch.randn(t, width).to(BF16), torch.randn(t, n_experts + 1)
    gate_up, down = (
        packed(torch.randn(n_experts, *size).to(BF16) / 32) for size in ((2 * inner, width), (width, inner))
    )
    outs = []
    for on_disk in (False, True):
        scratch = MoeScratch(
            expert=torch.full((t, k), -1, dtype=I32), weight=poison(t, k), order=torch.full((t * k,), -1, dtype=I32),
            begin=torch.full((n_experts + 1,), -1, dtype=I32), probabilities=poison(t, n_experts + 16),
            rows=workspace(t * k, width), up=poison(t * k, 2 * inner), act=poison(t * k, inner, dtype=BF16), y=poison(t * k, width),
        )  # fmt: skip
        outs.append(torch.zeros(t, width))
        experts = Experts(gate_up, down, Routing(k, True), on_disk=on_disk)
        moe(program, h, logits, experts, torch.zeros(t, width), outs[-1], count(t), scratch)
    program.run()
    assert torch.equal(*outs) and outs[0].any()


def test_of_equal_experts_the_first_are_chosen(program: Program) -> None:
    width, inner, t, n_experts, k = 32, 32, 3, 20, 4
    h, logits = torch.randn(t, width).to(BF16), torch.zeros(t, n_experts + 1)
    logits[1, 17] = logits[2, 5] = 1.0
    gate_up, down = (packed(torch.randn(n_experts, *size).to(BF16)) for size in ((2 * inner, width), (width, inner)))
    scratch = MoeScratch(
        expert=torch.full((t, k), -1, dtype=I32), weight=poison(t, k), order=torch.full((t * k,), -1, dtype=I32),
        begin=torch.full((n_experts + 1,), -1, dtype=I32), probabilities=poison(t, n_experts + 16),
        rows=workspace(t * k, width), up=poison(t * k, 2 * inner), act=poison(t * k, inner, dtype=BF16), y=poison(t * k, width),
    )  # fmt: skip
    moe(
        program, h, logits, Experts(gate_up, down, Routing(k, True)), torch.zeros(t, width), torch.zeros(t, width),
        count(t), scratch,
    )  # fmt: skip
    program.run()
    assert scratch.expert.tolist() == [[0, 1, 2, 3], [17, 0, 1, 2], [5, 0, 1, 2]]


def words(allowed: Tensor) -> Tensor:
    """A mask as the sampler reads it: int32 [n // 32 + 1]."""
    n_bytes = 4 * (len(allowed) // 32 + 1)
    bits = np.packbits(allowed.numpy(), bitorder="little")
    return torch.from_numpy(np.pad(bits, (0, n_bytes - len(bits))).view(np.int32))


class Draws:
    """One draw for each set of parameters, over given logits."""

    def __init__(
        self,
        program: Program,
        logits: Tensor,
        n_real: int,
        draws: list[tuple[SamplingParams, int, list[int], list[int]]],
        allowed: list[Tensor | None] | None = None,
    ) -> None:
        """allowed: for each draw the ids that its mask lets through, bool [V]; None: it has no mask."""
        n, n_vocab = len(draws), logits.shape[1]
        params = [p for p, *_ in draws]
        allowed = allowed or [None] * n

        def f32(name: str) -> Tensor:
            return torch.tensor([getattr(p, name) for p in params], dtype=F32)

        histories = [prompt + output for _, _, prompt, output in draws]
        batch_slots = BatchParameters(
            temperature=f32("temperature"), top_k=f32("top_k").to(I32), top_p=f32("top_p"), min_p=f32("min_p"),
            repetition=f32("repetition_penalty"), frequency=f32("frequency_penalty"), presence=f32("presence_penalty"),
            seed=torch.tensor([p.seed for p in params]),
            history=torch.tensor([h + [0] * (64 - len(h)) for h in histories], dtype=I32),
        )  # fmt: skip
        bias = [list(p.logit_bias.items()) for p in params]
        inputs = DrawInputs(
            n_draws=count(n), row=i32(*range(n)), batch_slot=i32(*range(n)), position=i32(*(d[1] for d in draws)),
            n_history=i32(*(len(h) for h in histories)), n_prompt=i32(*(len(d[2]) for d in draws)),
            bias_begin=torch.tensor([0, *(len(b) for b in bias)]).cumsum(0).to(I32),
            bias_ids=i32(*(id for b in bias for id, _ in b), 0), bias=torch.tensor([*(x for b in bias for _, x in b), 0.0]),
            banned_begin=torch.tensor([0, *(len(p.stop_token_ids) for p in params)]).cumsum(0).to(I32),
            banned=i32(*(id for p in params for id in p.stop_token_ids), 0),
            masked=i32(*(a is not None for a in allowed)),
            masks=torch.stack([poison(n_real // 32 + 1).view(I32) if a is None else words(a[:n_real]) for a in allowed]),
        )  # fmt: skip
        scratch = DrawScratch(
            poison(2, n_vocab), torch.zeros(2, n_vocab, dtype=I32), torch.zeros(2, n_vocab, dtype=torch.int64)
        )
        self.tokens = torch.full((n,), -1, dtype=I32)
        sample(program, logits, n_real, batch_slots, inputs, scratch, self.tokens)
        program.run()
        assert not scratch.counts.any()


def test_sample(program: Program) -> None:
    """1,200 draws over all parameters agree with the oracle, but where the draw falls on a boundary by rounding."""
    n_vocab, n_real = 300, 289
    generator = torch.Generator().manual_seed(7)
    pick = lambda *values: values[int(torch.randint(len(values), (), generator=generator))]  # noqa: E731
    draws, expected, masks = [], [], []
    logits = torch.randn(1200, n_vocab, generator=generator) * 3
    logits[::7, 5:9] = logits[::7].max()  # ties, also at the top
    for row in logits:
        params = SamplingParams(
            temperature=pick(0.0, 0.3, 1.0, 2.5), top_k=pick(0, 0, 1, 5, 40, 400), top_p=pick(1.0, 0.95, 0.5, 0.01),
            min_p=pick(0.0, 0.0, 0.1), repetition_penalty=pick(1.0, 1.3), frequency_penalty=pick(0.0, 0.7),
            presence_penalty=pick(0.0, 0.4), seed=int(torch.randint(2**62, (), generator=generator)),
            logit_bias=pick({}, {3: 4.0, 200: -100.0}), stop_token_ids=pick((), (0, 7)),
        )  # fmt: skip
        history = torch.randint(n_real, (20,), generator=generator).tolist()
        position = int(torch.randint(5000, (), generator=generator))
        draws.append((params, position, history[:11], history[11:]))
        masks.append(pick(None, None, torch.rand(n_vocab, generator=generator) < pick(0.02, 0.5, 0.98)))
        if masks[-1] is not None:
            masks[-1][100] = True  # a row without any is another test's
        expected.append(
            sample_oracle.sample(
                row,
                params,
                params.seed or 0,
                position,
                history[:11],
                history[11:],
                params.stop_token_ids,
                n_real,
                masks[-1],
            )
        )
    tokens = Draws(program, logits, n_real, draws, masks).tokens.tolist()
    differing = [i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b]
    assert len(differing) <= 2, [(draws[i], tokens[i], expected[i]) for i in differing]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 5, 287, 288])
def test_sample_refuses_logits_that_are_not_finite(program: Program, bad: float, at: int) -> None:
    logits = torch.randn(4, 300)
    logits[:, 290:] = float("nan")  # padding ids do not count
    logits[1:3, at] = bad
    params = [SamplingParams(seed=1, **kw) for kw in ({}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 400})]
    tokens = Draws(program, logits, 289, [(p, 0, [], []) for p in params]).tokens.tolist()
    assert tokens[1] == tokens[2] == -1 and min(tokens[0], tokens[3]) >= 0


def test_sample_with_everything_banned(program: Program) -> None:
    params = SamplingParams(seed=1, stop_token_ids=tuple(range(5)))
    assert Draws(program, torch.randn(1, 8), 5, [(params, 0, [], [])]).tokens.tolist() == [-1]


def test_logprobs(program: Program) -> None:
    logits, n_real, n = torch.randn(5, 300) * 4, 289, 5
    logits[0, 10:14] = logits.max()
    logprob, ids, top = poison(n), torch.full((n, 8), -1, dtype=I32), poison(n, 8)
    target = i32(0, 288, 17, 3, 3)
    entries = LogprobEntries(count(n), i32(0, 1, 2, 3, 0), target, i32(8, 0, -1, 3, 1), logprob, ids, top)
    logprobs(program, logits, n_real, entries)
    program.run()
    for i, (row, n_top) in enumerate(((0, 8), (1, 0), (2, -1), (3, 3), (0, 1))):
        expected = sample_oracle.token_logprobs(logits[row], n_real)
        if n_top < 0:
            assert logprob[i].isnan()
            continue
        close(logprob[i], expected[target[i]], 1e-5)
        values, order = expected.sort(descending=True, stable=True)
        assert ids[i, :n_top].tolist() == order[:n_top].tolist()
        close(top[i, :n_top], values[:n_top], 1e-5)
