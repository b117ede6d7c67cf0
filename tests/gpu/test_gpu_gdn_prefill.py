"""gdn_prefill on the GPU against the reference: chunks, segments, state slots, snapshots, padding; and bits that stay."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import deltic.ops.gpu.gdn_prefill as gdn_prefill_module
from deltic.ops.geometry import GdnHeads, GdnWeights
from deltic.ops.gpu.blocks import BLOCK, Blocks, StateSlots
from deltic.ops.gpu.gdn_prefill import chunk_blocks, gdn_prefill, gdn_scratch
from deltic.ops.gpu.gdn_prefill_kernels import _log1p_exp
from tests.reference import layers as oracle
from tests.tensors import TiledOrder

TINY = [GdnHeads(1, 1, 16, 16), GdnHeads(2, 4, 32, 16), GdnHeads(1, 3, 16, 48)]
REAL = [GdnHeads(16, 16, 128, 128), GdnHeads(16, 32, 128, 128), GdnHeads(16, 48, 128, 128)]
HEADS = TINY + (REAL if torch.cuda.is_available() else [])
GROUPED = [GdnHeads(2, 8, 16, 32), *HEADS[len(TINY) + 1 :]]
"""Several value heads for each of several key heads: what has a tiled order."""
EPS, LAYER = 1e-6, 1
# Products take operands rounded to bfloat16 (8 bits: 2^-9 each), and an output is a sum of a few of them; the gated norm then scales
# with the size of a head's output, so errors are told relative to the largest value near them.
TOLERANCE = 1.5e-2


@triton.jit
def _softplus_kernel(p_x, p_out, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(p_out + o, _log1p_exp(tl.load(p_x + o)))


def test_the_gates_softplus_is_exact_to_a_float(device: str) -> None:
    x = torch.linspace(-30, 30, 512, device=device)
    found = torch.empty_like(x)
    _softplus_kernel[(1,)](x, found, N=512)
    expected = torch.log1p(x.double().exp())
    assert ((found.double() - expected) / expected).abs().max() < 2e-6


@dataclass
class Part:
    """A run of tokens of one sequence: what a step computes of it, and where its state comes from and goes."""

    proj: Tensor  # [n, R]
    position: int
    start_slot: int
    state_slot: int
    snapshots: dict[int, int] = field(default_factory=dict)  # block of the part -> state slot


@dataclass
class Memory:
    columns: Tensor
    states: Tensor

    def clone(self) -> Memory:
        return Memory(self.columns.clone(), self.states.clone())


def memory(heads: GdnHeads, n_slots: int, device: str, dtype: torch.dtype = torch.float32) -> Memory:
    """As two layers' state slots, of which the second one is ours: state slots are apart by more than their size. Poisoned."""
    columns = torch.full((n_slots, 2, 4, heads.channels), torch.nan, dtype=torch.bfloat16, device=device)
    states = torch.full((n_slots, 2, heads.n_v, heads.v_dim, heads.k_dim), torch.nan, dtype=dtype, device=device)
    return Memory(columns[:, 1], states[:, 1])


def weights_of(heads: GdnHeads, device: str) -> GdnWeights:
    g = torch.Generator().manual_seed(7)
    step = torch.empty(heads.n_v).uniform_(math.log(1e-3), math.log(0.3), generator=g).exp_()
    return GdnWeights(
        conv=torch.empty(4, heads.channels).normal_(0.0, 0.5, generator=g).to(device),
        a_log=torch.empty(heads.n_v).uniform_(0.5, 4.0, generator=g).log_().to(device),
        dt_bias=(step + torch.log(-torch.expm1(-step))).to(device),
        norm=torch.empty(heads.v_dim).normal_(1.0, 0.1, generator=g).to(device),
    )


def proj_of(heads: GdnHeads, n: int, device: str, seed: int = 0) -> Tensor:
    width = heads.channels + heads.n_v * heads.v_dim + 2 * heads.n_v
    x = torch.empty(n, width).normal_(generator=torch.Generator().manual_seed(seed))
    return x.to(torch.bfloat16).to(device)


def run(
    parts: list[Part],
    heads: GdnHeads,
    memory: Memory,
    device: str,
    *,
    spare: int = 0,
    segments: int = 0,
    chunk: int | None = None,
    recorded: bool = False,
    weights: GdnWeights | None = None,
) -> list[Tensor]:
    """Outputs of the parts, in one call with `spare` blocks more than are used. Padding must have been left alone or zeroed.

    recorded: of a replay, after a call as it is; no part may end in the state slot it starts from.
    """
    sizes = [math.ceil(len(part.proj) / BLOCK) for part in parts]
    n_blocks, n_segments = sum(sizes) + spare, max(segments, len(parts))
    n, position, snapshot, owner = ([0] * n_blocks for _ in range(4))
    begin = [0]
    proj = torch.full((n_blocks * BLOCK, parts[0].proj.shape[1]), torch.nan, dtype=torch.bfloat16, device=device)
    for s, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        first = begin[-1]
        proj[first * BLOCK : first * BLOCK + len(part.proj)] = part.proj
        for i in range(size):
            n[first + i] = min(BLOCK, len(part.proj) - i * BLOCK)
            position[first + i] = part.position + i * BLOCK
            snapshot[first + i] = part.snapshots.get(i, -1)
            owner[first + i] = s
        begin.append(first + size)
    begin += [begin[-1]] * (n_segments + 1 - len(begin))
    idle = [0] * (n_segments - len(parts))

    def index(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    blocks = Blocks(
        n=index(n),
        position=index(position),
        batch_slot=index(owner),
        page=index([0] * n_blocks),
        snapshot=index(snapshot),
        segment_begin=index(begin),
        start_slot=index([part.start_slot for part in parts] + idle),
        state_slot=index([part.state_slot for part in parts] + idle),
        block_segment=index(owner),
    )
    scratch = gdn_scratch(
        heads, n_blocks, lambda _, shape, dtype: torch.full(shape, torch.nan, dtype=dtype, device=device)
    )
    out = torch.full((n_blocks * BLOCK, heads.n_v * heads.v_dim), torch.nan, dtype=torch.bfloat16, device=device)
    weights = weights or weights_of(heads, device)

    def step() -> None:
        slots, size = StateSlots(memory.columns, memory.states, LAYER), gdn_prefill_module.chunk_blocks
        with patch.object(gdn_prefill_module, "chunk_blocks", size if chunk is None else lambda n: chunk):
            gdn_prefill(proj, heads, weights, EPS, blocks=blocks, memory=slots, scratch=scratch, out=out)

    step()
    if recorded:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for x in (out, *vars(scratch).values(), *(memory.states[part.state_slot] for part in parts)):
            x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
    results = []
    for s, part in enumerate(parts):
        rows = out[begin[s] * BLOCK : begin[s + 1] * BLOCK]
        assert not rows[len(part.proj) :].any()
        results.append(rows[: len(part.proj)].clone())
    assert not out[begin[-1] * BLOCK :].any()
    return results


def expected(proj: Tensor, heads: GdnHeads) -> tuple[Tensor, Tensor]:
    """Output [T, Hv dv] and final state [Hv, dv, dk] of a whole sequence, from q, k and v as the kernels round them.

    They are not rounded in the reference, but where q is nearly at right angles to all keys, the norm of the output makes much
    of that rounding, and nothing could be told from it.
    """
    proj, w = proj.cpu().double(), weights_of(heads, "cpu")
    w = GdnWeights(*(getattr(w, f.name).double() for f in dataclasses.fields(w)))
    kd, vd = heads.n_k * heads.k_dim, heads.n_v * heads.v_dim
    qkv, z, b, a = proj.split([heads.channels, vd, heads.n_v, heads.n_v], -1)
    mixed, _ = oracle.causal_conv(qkv, w.conv.T)
    q, k, v = mixed.split([kd, kd, vd], -1)
    q, k = (oracle.l2_norm(x.unflatten(-1, (heads.n_k, heads.k_dim))) for x in (q, k))
    q, k, v = (x.bfloat16().double() for x in (q * heads.k_dim**-0.5, k, v))
    beta, g = oracle.gdn_gates(b, a, w.a_log, w.dt_bias)
    v = v.unflatten(-1, (heads.n_v, heads.v_dim))
    rule = oracle.naive_gdn if len(proj) < 1000 else oracle.chunk_gdn
    o, state = rule(q, k, v, g, beta, tiled=heads.tiled)
    y = oracle.gated_rms_norm(o, z.unflatten(-1, (heads.n_v, heads.v_dim)), w.norm, EPS)
    return y.flatten(1), state.transpose(1, 2)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.cpu().double() - want).norm() / want.norm())


def check_ring(ring: Tensor, proj: Tensor, heads: GdnHeads) -> None:
    """The ring holds the last inputs of the sequence, as they are."""
    for p in range(max(0, len(proj) - 4), len(proj)):
        assert torch.equal(ring[p % 4], proj[p, : heads.channels]), p


@pytest.mark.parametrize("heads", [*HEADS, *(TiledOrder(heads).heads for heads in GROUPED)], ids=str)
@pytest.mark.parametrize("n", [1, 3, 64, 150])
def test_against_reference(heads: GdnHeads, n: int, device: str) -> None:
    """One sequence from its start. The state slots hold NaN before, and scratch and padding too: nothing of them may be read."""
    proj, m = proj_of(heads, n, device), memory(heads, 4, device)
    (out,) = run([Part(proj, 0, -1, 2)], heads, m, device, spare=1)
    y, state = expected(proj, heads)
    assert error(out, y) < TOLERANCE
    assert error(m.states[2], state) < TOLERANCE
    check_ring(m.columns[2], proj, heads)
    assert m.states[[0, 1, 3]].isnan().all() and m.columns[[0, 1, 3]].isnan().all()


@pytest.mark.parametrize("heads", HEADS[1:2] + HEADS[4:], ids=str)
@pytest.mark.parametrize("cut, tail, in_place", [(64, 66, True), (64, 2, False), (64, 1, True)])
def test_cuts_keep_bits(heads: GdnHeads, cut: int, tail: int, in_place: bool, device: str) -> None:
    """P2: a sequence in one chunk, or in two through its state slot, gives the same outputs, state and columns."""
    proj, whole, parts = (proj_of(heads, cut + tail, device), memory(heads, 3, device), memory(heads, 3, device))
    (out,) = run([Part(proj, 0, 0, 1)], heads, whole, device)
    (head,) = run([Part(proj[:cut], 0, 2, 0)], heads, parts, device, spare=1)
    final = 0 if in_place else 1
    (rest,) = run([Part(proj[cut:], cut, 0, final)], heads, parts, device)
    assert torch.equal(out, torch.cat([head, rest]))
    assert torch.equal(whole.states[1], parts.states[final])
    for p in range(cut + tail - 3, cut + tail):
        assert torch.equal(whole.columns[1, p % 4], parts.columns[final, p % 4])
    check_ring(parts.columns[final], proj, heads)


@pytest.mark.parametrize("heads", HEADS[1:2] + HEADS[4:], ids=str)
def test_states_in_bfloat16(heads: GdnHeads, device: str) -> None:
    """Each block's state is that of float32, rounded as the reference does, and the next block begins with that: in one chunk, in
    several, and in snapshots."""
    proj = proj_of(heads, 160, device)
    rounded, single = memory(heads, 5, device, torch.bfloat16), memory(heads, 2, device)
    (out,) = run([Part(proj, 0, 0, 1, {0: 2, 1: 3})], heads, rounded, device)
    for begin, end, state_slot in ((0, 64, 2), (64, 128, 3), (128, 160, 1)):
        (rows,) = run([Part(proj[begin:end], begin, 0, 1)], heads, single, device)
        assert torch.equal(rows, out[begin:end])
        kept = oracle.stochastic_bfloat16(single.states[1].mT.cpu(), end - 1, LAYER).mT.to(device)
        assert torch.equal(kept, rounded.states[state_slot].float()) and not torch.equal(kept, single.states[1])
        single.states[0], single.columns[0] = kept, single.columns[1]
    for begin, end in ((0, 64), (64, 160)):
        run([Part(proj[begin:end], begin, 4, 4)], heads, rounded, device, chunk=1)
    assert torch.equal(rounded.states[4], rounded.states[1])


@pytest.mark.parametrize("heads", HEADS[1:2] + HEADS[4:], ids=str)
def test_neighbours_keep_bits(heads: GdnHeads, device: str) -> None:
    """P1: alone or between others, in a larger step: the same bits. Two of them start from the same state slot, which stays."""
    lengths = [64, 70, 1, 128]
    projs = [proj_of(heads, n, device, seed) for seed, n in enumerate(lengths)]
    m = memory(heads, 6, device)
    run([Part(projs[0], 0, 5, 0)], heads, m, device)
    parts = [Part(projs[1], 64, 0, 1), Part(projs[2], 64, 0, 2), Part(projs[3], 0, 0, 3, {0: 4})]
    together = m.clone()
    outs = run(parts, heads, together, device, spare=2, segments=5)
    for part, out in zip(parts, outs, strict=True):
        alone = m.clone()
        (single,) = run([part], heads, alone, device)
        assert torch.equal(out, single)
        assert torch.equal(together.states[part.state_slot], alone.states[part.state_slot])
        assert torch.equal(together.columns[part.state_slot], alone.columns[part.state_slot])
    assert torch.equal(together.states[0], m.states[0]) and torch.equal(together.columns[0], m.columns[0])


@pytest.mark.parametrize("heads", HEADS[2:3] + HEADS[4:5], ids=str)
def test_snapshots(heads: GdnHeads, device: str) -> None:
    """A snapshot is what the sequence would have left had it ended there, in bits; also where it does end."""
    proj, m = proj_of(heads, 128, device), memory(heads, 5, device)
    run([Part(proj, 0, 0, 0, {0: 3, 1: 4})], heads, m, device)
    for state_slot, n in ((3, 64), (4, 128)):
        cut = memory(heads, 1, device)
        run([Part(proj[:n], 0, 0, 0)], heads, cut, device)
        assert torch.equal(cut.states[0], m.states[state_slot])
        check_ring(m.columns[state_slot], proj[:n], heads)


@pytest.mark.parametrize("heads", GROUPED, ids=str)
def test_tiled_order_keeps_bits(heads: GdnHeads, device: str) -> None:
    """Value heads in tiled order compute what they do in grouped order; a second call starts from a snapshot and from a short end."""
    order, weights = TiledOrder(heads), weights_of(heads, device)
    long, short = proj_of(heads, 150, device), proj_of(heads, 68, device, 1)
    grouped = memory(heads, 6, device)
    tiled = Memory(grouped.columns.clone(), grouped.states.clone())
    for parts in (
        [Part(long[:140], 0, -1, 0, {0: 2, 1: 3}), Part(short[:64], 0, -1, 1)],
        [Part(long[128:], 128, 3, 4), Part(short[64:], 64, 1, 1, {0: 5})],
    ):
        moved = [dataclasses.replace(part, proj=part.proj[:, order.row]) for part in parts]
        expected = run(parts, heads, grouped, device, spare=1)
        found = run(moved, order.heads, tiled, device, spare=1, weights=order.weights(weights))
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one[:, order.out], other)
    assert not grouped.states.isnan().any()
    assert torch.equal(grouped.states[:, order.head], tiled.states)
    assert torch.equal(grouped.columns[..., order.channel], tiled.columns)


@pytest.mark.parametrize("heads", HEADS[1:2] + HEADS[4:5], ids=str)
def test_partial_block_is_a_prefix(heads: GdnHeads, device: str) -> None:
    """The first tokens of a block come out as they do when the block is full."""
    proj = proj_of(heads, 128, device)
    (full,) = run([Part(proj, 0, 0, 0)], heads, memory(heads, 1, device), device)
    (part,) = run([Part(proj[:101], 0, 0, 0)], heads, memory(heads, 1, device), device)
    assert torch.equal(full[:101], part)


@pytest.mark.parametrize("heads", HEADS[1:2] + HEADS[4:], ids=str)
@pytest.mark.parametrize("chunk", [3])
def test_chunks_keep_bits(heads: GdnHeads, chunk: int, device: str) -> None:
    """The stages of a few blocks beside those of others: the same bits, also where segments begin and end within a chunk."""
    projs = [proj_of(heads, n, device, seed) for seed, n in enumerate([70, 150, 64])]
    m = memory(heads, 6, device)
    run([Part(projs[2], 0, 0, 0)], heads, m, device)
    parts = [Part(projs[0], 0, 1, 1), Part(projs[1], 64, 0, 0, {0: 3, 1: 4}), Part(projs[2], 0, 2, 2)]
    whole, chunked = m.clone(), m.clone()
    outs = run(parts, heads, whole, device, chunk=0)
    others = run(parts, heads, chunked, device, spare=2, segments=4, chunk=chunk)
    for out, other in zip(outs, others, strict=True):
        assert torch.equal(out, other)
    assert torch.equal(whole.states.nan_to_num(), chunked.states.nan_to_num())
    assert torch.equal(whole.columns.nan_to_num(), chunked.columns.nan_to_num())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("heads", REAL, ids=str)
def test_recorded_chunks_keep_bits(heads: GdnHeads, device: str) -> None:
    """As many blocks as are served in chunks, in a replay: the bits of one chunk."""
    assert 0 < chunk_blocks(33) < 33
    parts = [Part(proj_of(heads, n, device, n), 0, -1, i) for i, n in enumerate([1700, 300])]
    whole, chunked = memory(heads, 2, device), memory(heads, 2, device)
    outs = run(parts, heads, whole, device, spare=1, chunk=0)
    others = run(parts, heads, chunked, device, spare=1, recorded=True)
    assert all(torch.equal(out, other) for out, other in zip(outs, others, strict=True))
    assert torch.equal(whole.states, chunked.states) and torch.equal(whole.columns, chunked.columns)


def test_equal_keys(device: str) -> None:
    """The same strong key at every token, no decay: powers of A grow to 1e17, its inverse stays near 1.

    Every token replaces the value of the one before, so that the state is a telescoping sum of up to 64 differences, each rounded
    to bfloat16: sqrt(64) roundings of a value's size are left, and more where q is nearly at right angles to the key.
    """
    heads = GdnHeads(1, 1, 16, 16)
    proj = proj_of(heads, 128, device)
    proj[:, 16:32] = 1.0
    proj[:, -2] = 9.0  # beta near 1
    proj[:, -1] = -30.0  # no decay
    m = memory(heads, 1, device)
    (out,) = run([Part(proj, 0, 0, 0)], heads, m, device)
    y, state = expected(proj, heads)
    assert error(out, y) < 0.1
    assert error(m.states[0], state) < 0.1


def test_strong_decay(device: str) -> None:
    """Decays that leave nothing: exponents far below float32's range give 0, not NaN."""
    heads = GdnHeads(1, 1, 16, 16)
    proj = proj_of(heads, 128, device)
    proj[:, -1] = 60.0
    m = memory(heads, 1, device)
    (out,) = run([Part(proj, 0, 0, 0)], heads, m, device)
    y, state = expected(proj, heads)
    assert error(out, y) < TOLERANCE
    assert error(m.states[0], state) < TOLERANCE


def test_the_gate_may_be_a_sigmoid(device: str) -> None:
    """In the place of SiLU, which is z times as large."""
    heads = GdnHeads(n_k=1, n_v=2, k_dim=16, v_dim=16)
    proj = proj_of(heads, 5, device)
    z = proj[:, heads.channels : heads.channels + heads.n_v * heads.v_dim].float()
    outs = [
        run([Part(proj, 0, 0, 0)], dataclasses.replace(heads, sigmoid_gate=gate), memory(heads, 1, device), device)[
            0
        ].float()
        for gate in (False, True)
    ]
    torch.testing.assert_close(outs[1] * z, outs[0], rtol=2**-6, atol=1e-3)


def test_refuses(device: str) -> None:
    heads = GdnHeads(2, 3, 16, 16)
    with pytest.raises(ValueError, match="Hv % Hk"):
        run([Part(proj_of(heads, 1, device), 0, 0, 0)], heads, memory(heads, 1, device), device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_state_does_not_drift(device: str) -> None:
    """8192 tokens with gates as trained models have them."""
    heads = GdnHeads(16, 16, 128, 128)
    proj, m = proj_of(heads, 8192, device), memory(heads, 1, device)
    (out,) = run([Part(proj, 0, 0, 0)], heads, m, device)
    y, state = expected(proj, heads)
    assert error(out[-1024:], y[-1024:]) < TOLERANCE
    assert error(m.states[0], state) < TOLERANCE
