"""gdn_decode: against the reference, one step and many; nothing but its own rows is touched; a row's bits are its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial as bound

import pytest
import torch
from torch import Tensor

from deltic.ops.contract import KernelError
from deltic.ops.geometry import GdnHeads, GdnWeights
from deltic.ops.gpu.blocks import Drafts, Rows, StateSlots, Windows, window_rows
from deltic.ops.gpu.fp8 import Operand
from deltic.ops.gpu.gdn_decode import gdn_decode
from deltic.ops.gpu.launch import Levers, launches
from tests.gpu.matrices import assert_rounded, poisoned
from tests.reference import layers
from tests.tensors import TiledOrder

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp"
)  # of numpy, in a sigmoid; the limit is right
EPS = 1e-6
N_LAYERS, LAYER = 3, 1  # pools hold several layers; the operator sees a view of one

SMALL = [
    GdnHeads(n_k=1, n_v=2, k_dim=16, v_dim=16),
    GdnHeads(n_k=2, n_v=2, k_dim=32, v_dim=16),
    GdnHeads(n_k=1, n_v=3, k_dim=48, v_dim=80),  # neither a power of 2 nor equal
    GdnHeads(n_k=1, n_v=1, k_dim=256, v_dim=128),  # more than fits the registers at once: two tiles of value rows
]
REAL = [
    GdnHeads(n_k=16, n_v=16, k_dim=128, v_dim=128),
    GdnHeads(n_k=16, n_v=32, k_dim=128, v_dim=128),
    GdnHeads(n_k=16, n_v=48, k_dim=128, v_dim=128),
    GdnHeads(n_k=2, n_v=2, k_dim=256, v_dim=256),
]
HEADS = SMALL + (REAL if torch.cuda.is_available() else [])
GROUPED = [GdnHeads(n_k=2, n_v=8, k_dim=16, v_dim=32), *HEADS[len(SMALL) + 1 : -1]]
"""Several value heads for each of several key heads: what has a tiled order."""


def name(heads: GdnHeads) -> str:
    return f"{heads.n_k}-{heads.n_v}-{heads.k_dim}-{heads.v_dim}{'-tiled' * heads.tiled}"


@dataclass
class Case:
    """A pool, and rows that step in it."""

    heads: GdnHeads
    weights: GdnWeights
    state_slots: list[int]
    positions: list[int]
    proj: Tensor
    columns: Tensor
    states: Tensor

    def part(self, rows: list[int]) -> Case:
        """Some of the rows, in this order, in a copy of the pool."""
        return Case(
            self.heads, self.weights, [self.state_slots[r] for r in rows], [self.positions[r] for r in rows],
            self.proj[:, rows].contiguous(), self.columns.clone(), self.states.clone(),
        )  # fmt: skip

    def step(self, block_k: int = 0) -> Tensor:
        """-> out, rounded to e4m3 as well: by heads, or by blocks of so many columns."""
        device = self.proj.device
        out = torch.full(
            (len(self.state_slots), self.heads.n_v * self.heads.v_dim), torch.nan, dtype=torch.bfloat16, device=device
        )
        made = poisoned(out, block_k or self.heads.v_dim)
        state_slot, position = (
            torch.tensor(x, dtype=torch.int32, device=device) for x in (self.state_slots, self.positions)
        )
        gdn_decode(
            self.proj, self.heads, self.weights, EPS,
            rows=Rows(state_slot, state_slot, position),
            memory=StateSlots(self.columns[:, LAYER], self.states[:, LAYER], LAYER), out=made,
        )  # fmt: skip
        assert_rounded(made)
        return out


def make(
    heads: GdnHeads,
    state_slots: list[int],
    positions: list[int],
    *,
    splits: int = 1,
    seed: int = 0,
    device: str = "cpu",
    n_slots: int = 8,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Random rows; NaN wherever the operator has no business to look."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    c, n = heads.channels, len(state_slots)
    weights = GdnWeights(
        conv=normal(4, c) * 0.5,
        a_log=normal(heads.n_v),
        dt_bias=normal(heads.n_v) - 1,
        norm=1 + 0.1 * normal(heads.v_dim),
    )
    proj = normal(splits, n, c + heads.n_v * heads.v_dim + 2 * heads.n_v) * splits**-0.5
    columns = torch.full((n_slots, N_LAYERS, 4, c), torch.nan, dtype=torch.bfloat16)
    states = torch.full((n_slots, N_LAYERS, heads.n_v, heads.v_dim, heads.k_dim), torch.nan, dtype=dtype)
    for r, (state_slot, position) in enumerate(zip(state_slots, positions, strict=True)):
        if state_slot < 0:
            proj[:, r] = torch.nan
            continue
        for p in range(max(0, position - 3), position):
            columns[state_slot, LAYER, p % 4] = normal(c).bfloat16()
        if position > 0:
            states[state_slot, LAYER] = normal(heads.n_v, heads.v_dim, heads.k_dim) * 0.3
    weights = GdnWeights(*(w.to(device) for w in (weights.conv, weights.a_log, weights.dt_bias, weights.norm)))
    return Case(heads, weights, state_slots, positions, proj.to(device), columns.to(device), states.to(device))


def reference(
    heads: GdnHeads, weights: GdnWeights, proj: Tensor, window: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """T tokens of one sequence: proj [S, T, R], window [C, 3], state [Hv, dk, dv] -> out [T, Hv dv] and the state."""
    total = proj[0].clone()
    for partial in proj[1:]:
        total += partial
    kd, vd, hv = heads.n_k * heads.k_dim, heads.n_v * heads.v_dim, heads.n_v
    qkv, z, b, a = total.split([2 * kd + vd, vd, hv, hv], -1)
    mixed, _ = layers.causal_conv(layers.rounded(qkv, "bfloat16"), weights.conv.T, window)
    q, k, v = (
        x.unflatten(-1, (-1, d))
        for x, d in zip(mixed.split([kd, kd, vd], -1), (heads.k_dim, heads.k_dim, heads.v_dim), strict=True)
    )
    beta_g = layers.gdn_gates(b, a, weights.a_log, weights.dt_bias)
    o, state = layers.naive_gdn(
        layers.l2_norm(q) * heads.k_dim**-0.5, layers.l2_norm(k), v, beta_g[1], beta_g[0], state, tiled=heads.tiled
    )
    out = layers.gated_rms_norm(o, z.unflatten(-1, (hv, heads.v_dim)), weights.norm, EPS)
    return layers.rounded(out.flatten(-2), "bfloat16"), state


def host(case: Case) -> Case:
    """A copy on the host."""
    w = case.weights
    return Case(
        case.heads, GdnWeights(*(x.cpu() for x in (w.conv, w.a_log, w.dt_bias, w.norm))), case.state_slots,
        case.positions, case.proj.cpu().clone(), case.columns.cpu().clone(), case.states.cpu().clone(),
    )  # fmt: skip


def assert_close(out: Tensor, expected: Tensor) -> None:
    """Within two units in the last place of bfloat16 where values are large; sums of float32 in another order, divided by a norm
    of about 1, differ by far less, so most values are equal and the rest are neighbours."""
    out, expected = out.float().cpu(), expected.float().cpu()
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2e-4)
    assert (out != expected).sum() <= 2 + 0.02 * out.numel()


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def rounding(dtype: torch.dtype, position: int) -> Callable[[Tensor], Tensor]:
    """What is kept of a state behind the token of this position."""
    if dtype == torch.float32:
        return lambda state: state
    return bound(layers.stochastic_bfloat16, position=position, layer=LAYER)


ONE_STEP = [(heads, n) for heads in (*HEADS, *(TiledOrder(heads).heads for heads in GROUPED)) for n in (1, 3)]


@pytest.mark.parametrize(
    ("heads", "splits", "dtype"),
    [(*case, torch.float32) for case in ONE_STEP] + [(heads, 1, torch.bfloat16) for heads in HEADS[1:]],
    ids=lambda x: name(x) if isinstance(x, GdnHeads) else str(x),
)
def test_one_step(heads: GdnHeads, splits: int, dtype: torch.dtype, device: str) -> None:
    state_slots, positions = [5, -1, 0, 2, 7, 4], [0, 9, 1, 2, 3, 1026]
    if heads.n_v * heads.v_dim * heads.k_dim > 1 << 13 and device == "cpu":
        state_slots, positions = state_slots[1::4], positions[1::4]
    case = make(heads, state_slots, positions, splits=splits, device=device, dtype=dtype)
    before = host(case)
    launches.n = 0
    out = case.step()
    assert launches.n == 1
    after = host(case)
    for r, (state_slot, position) in enumerate(zip(state_slots, positions, strict=True)):
        if state_slot < 0:
            assert out[r].isnan().all()
            continue
        window = torch.zeros(heads.channels, 3)
        for i in range(min(3, position)):
            window[:, 2 - i] = before.columns[state_slot, LAYER, (position - 1 - i) % 4].float()
        state = before.states[state_slot, LAYER].mT.float() if position else None
        expected, state = reference(heads, before.weights, before.proj[:, r : r + 1], window, state)
        assert_close(out[r], expected[0])
        # float32 sums of at most 256 terms of about 0.3, in another order, which may round to the neighbour in bfloat16
        kept, found = rounding(dtype, position)(state).mT, after.states[state_slot, LAYER].float()
        near = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(found, kept, rtol=near, atol=1e-5)
        assert dtype == torch.float32 or (found == kept).float().mean() > 0.99
        inputs = before.proj[0, r]
        for partial in before.proj[1:, r]:
            inputs = inputs + partial
        before.columns[state_slot, LAYER, position % 4] = inputs[: heads.channels].bfloat16()
        before.states[state_slot, LAYER] = after.states[state_slot, LAYER]
    assert torch.equal(after.columns.view(torch.int16), before.columns.view(torch.int16))
    assert torch.equal(bits(after.states), bits(before.states))


@pytest.mark.parametrize("heads", [SMALL[0], *HEADS[len(SMALL) :]], ids=name)
def test_steps_follow_a_sequence(heads: GdnHeads, device: str) -> None:
    """From position 0 on, past the ring's end, as the reference goes over the whole sequence."""
    n_tokens = 11
    case = make(heads, [3], [0], device=device)
    g = torch.Generator().manual_seed(1)
    proj = torch.randn(1, n_tokens, case.proj.shape[2], generator=g)
    outs = []
    for t in range(n_tokens):
        case.proj, case.positions = proj[:, t : t + 1].contiguous().to(device), [t]
        outs.append(case.step())
    expected, state = reference(heads, host(case).weights, proj)
    assert_close(torch.cat(outs), expected)
    torch.testing.assert_close(case.states[3, LAYER].cpu(), state.mT, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("heads", [SMALL[1], *HEADS[len(SMALL) :]], ids=name)
def test_bits_are_the_rows_own(heads: GdnHeads, device: str) -> None:
    """Alone, among others, in another batch slot, in a larger bucket, started early or not: same bits of output, state and ring."""
    n = 128 if device == "cuda" else 5
    state_slots = [(5 * r + 3) % (n + 1) for r in range(n)]
    case = make(heads, state_slots, [r % 7 for r in range(n)], splits=2, device=device, n_slots=n + 1)
    everything = case.part(list(range(n)))
    with Levers(pdl=False).bound():
        out_everything = everything.step()
    for rows in ([2], [4, 2], list(range(n - 1, 0, -2))):
        some = case.part(rows)
        out = some.step()
        assert torch.equal(out, out_everything[rows])
        assert not out.isnan().any()
        taken = [state_slots[r] for r in rows]
        assert torch.equal(some.states[taken, LAYER], everything.states[taken, LAYER])
        assert torch.equal(
            some.columns[taken, LAYER].view(torch.int16), everything.columns[taken, LAYER].view(torch.int16)
        )


@pytest.mark.parametrize("heads", GROUPED, ids=name)
def test_tiled_order_keeps_bits(heads: GdnHeads, device: str) -> None:
    """Value heads in tiled order compute what they do in grouped order: outputs, states and rings of two steps."""
    order = TiledOrder(heads)
    grouped = make(heads, [5, -1, 0, 4], [0, 9, 2, 1026], splits=2, device=device)
    columns = grouped.columns[..., order.channel].contiguous()
    states, proj = grouped.states[:, :, order.head].contiguous(), grouped.proj[..., order.row].contiguous()
    tiled = Case(
        order.heads, order.weights(grouped.weights), grouped.state_slots, grouped.positions, proj, columns, states
    )
    for positions in ([0, 9, 2, 1026], [1, 9, 3, 1027]):
        grouped.positions = tiled.positions = positions
        expected, out = grouped.step()[:, order.out], tiled.step()
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))
        assert torch.equal(tiled.states.view(torch.int32), grouped.states[:, :, order.head].view(torch.int32))
        assert torch.equal(tiled.columns.view(torch.int16), grouped.columns[..., order.channel].view(torch.int16))


def test_unused_rows_change_nothing(device: str) -> None:
    case = make(SMALL[0], [-1, -1], [0, 4], device=device)
    before = host(case)
    assert case.step().isnan().all()
    assert torch.equal(case.states.cpu().view(torch.int32), before.states.view(torch.int32))
    assert torch.equal(case.columns.cpu().view(torch.int16), before.columns.view(torch.int16))


@pytest.mark.parametrize("a", [-40.0, -12.0, -4.0, 0.0, 19.9, 20.1, 80.0])
def test_decay_from_never_to_at_once(a: float, device: str) -> None:
    """The gate's whole range; with beta = 0 the state is multiplied by alpha alone.

    The exponent of alpha reaches 20 before 1e-9 hides the rest; a few units in its last place are 1e-5 of alpha.
    """
    heads = SMALL[0]
    case = make(heads, [1], [5], device=device)
    z_end = heads.channels + heads.n_v * heads.v_dim
    case.proj[:, :, z_end : z_end + heads.n_v] = -200.0
    case.proj[:, :, z_end + heads.n_v :] = a - case.weights.dt_bias
    before = host(case)
    case.step()
    g = -torch.exp(before.weights.a_log.double()) * torch.nn.functional.softplus(
        torch.tensor(a).double(), threshold=1e9
    )
    expected = before.states[1, LAYER].double() * g.exp()[:, None, None]
    torch.testing.assert_close(case.states[1, LAYER].cpu().double(), expected, rtol=3e-5, atol=1e-9)


MAX_DRAFTS = 4


@dataclass
class Drafting:
    """Sequences in state slots and places of their own, whose steps may have drafts. `truth` is what their tokens bring."""

    case: Case
    truth: Tensor  # [S, sequences, T, columns]
    windows: Windows
    n_run: list[int] = field(default_factory=list)
    """Tokens that were run and right."""
    n_window: list[int] = field(default_factory=list)
    """Of those, the last ones that the state has not seen."""

    def step(self, which: list[int], n_drafts: list[int], n_right: list[int]) -> dict[int, Tensor]:
        """Runs a step of these sequences; gives the outputs of rows whose tokens before were right."""
        case, device, n_pad = self.case, self.case.proj.device, 2
        rows: list[tuple[int, ...]] = []
        proj: list[Tensor] = []
        for s, n, right in zip(which, n_drafts, n_right, strict=True):
            for j in range(1 + n):
                length, redo = (1 + n, self.n_window[s]) if j == 0 else (0, 9999)
                rows.append((case.state_slots[s], case.positions[s] + self.n_run[s] + j, s, j, length, redo))
                row = self.truth[:, s, self.n_run[s] + j]
                proj.append(row if j <= right else torch.randn_like(row))
        n = len(rows)
        rows += [(-1, 0, 0, 0, 0, 0)] * n_pad
        proj += [torch.full_like(proj[0], torch.nan)] * n_pad
        state_slot, position, batch_slot, ahead, length, redo = (
            torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*rows, strict=True)
        )
        out = torch.full((n + n_pad, case.heads.n_v * case.heads.v_dim), torch.nan, dtype=torch.bfloat16, device=device)
        made = poisoned(out, case.heads.v_dim)
        gdn_decode(
            torch.stack(proj, 1).contiguous(), case.heads, case.weights, EPS,
            rows=Rows(batch_slot, state_slot, position, drafts=Drafts(ahead, ahead, length, redo)),
            memory=StateSlots(case.columns[:, LAYER], case.states[:, LAYER], LAYER, self.windows), out=made,
        )  # fmt: skip
        assert_rounded(made)
        assert out[n:].isnan().all() and not out[:n].isnan().any()
        found, at = {}, 0
        for s, n, right in zip(which, n_drafts, n_right, strict=True):
            found[s] = out[at : at + 1 + min(n, right)]
            self.n_run[s] += 1 + min(n, right)
            self.n_window[s] = 1 + min(n, right) if n else 0
            at += 1 + n
        return found


def drafting(
    heads: GdnHeads, positions: list[int], n_tokens: int, splits: int, device: str, dtype: torch.dtype = torch.float32
) -> Drafting:
    state_slots = [(3 * s + 2) % (len(positions) + 1) for s in range(len(positions))]
    case = make(heads, state_slots, positions, splits=splits, device=device, n_slots=len(positions) + 1, dtype=dtype)
    g, n, w = torch.Generator().manual_seed(4), len(positions), window_rows(1 + MAX_DRAFTS)
    truth = torch.randn(splits, n, n_tokens + MAX_DRAFTS, case.proj.shape[2], generator=g).to(device)
    columns = torch.full((n, N_LAYERS, w, heads.channels), torch.nan, dtype=torch.bfloat16, device=device)
    gates = torch.full((n, N_LAYERS, w, 2 * heads.n_v), torch.nan, device=device)
    return Drafting(case, truth, Windows(columns[:, LAYER], gates[:, LAYER]), [0] * n, [0] * n)


DRAFTED = [*SMALL[:3], TiledOrder(GROUPED[0]).heads, *HEADS[len(SMALL) : -1]]


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [(heads, torch.float32) for heads in DRAFTED]
    + [(heads, torch.bfloat16) for heads in [SMALL[0], *HEADS[len(SMALL) : -1]]],
    ids=lambda x: name(x) if isinstance(x, GdnHeads) else str(x),
)
def test_drafts_have_the_bits_of_single_steps(heads: GdnHeads, dtype: torch.dtype, device: str) -> None:
    """Sequences of one row beside others of several, of which any number was right: outputs, and what states and rings have seen."""
    n_tokens, positions, splits, draw = 12, [0, 1, 30], 1 + heads.tiled, random.Random(1)
    plain = drafting(heads, positions, n_tokens, splits, device, dtype)
    states, rings = [plain.case.states.clone()], [plain.case.columns.clone()]
    single: list[Tensor] = []
    for t in range(n_tokens + MAX_DRAFTS):
        plain.case.proj = plain.truth[:, :, t].contiguous()
        single.append(plain.case.step())
        plain.case.positions = [p + 1 for p in plain.case.positions]
        states.append(plain.case.states.clone())
        rings.append(plain.case.columns.clone())
    found = drafting(heads, positions, n_tokens, splits, device, dtype)
    n_lazy = n_redone = 0
    while least := [s for s in range(len(positions)) if found.n_run[s] < n_tokens]:
        which = draw.sample(least, draw.randrange(1, len(least) + 1))
        n_drafts = [min(draw.choice((0, 0, 1, 2, MAX_DRAFTS)), n_tokens - found.n_run[s]) for s in which]
        before = dict(zip(which, [found.n_run[s] for s in which], strict=True))
        n_redone += sum(found.n_window[s] > 0 for s in which)
        outs = found.step(which, n_drafts, [draw.randrange(1 + MAX_DRAFTS) for _ in which])
        n_lazy += sum(n > 0 for n in n_drafts)
        for s, rows in outs.items():
            for j, row in enumerate(rows):
                assert torch.equal(row.view(torch.int16), single[before[s] + j][s].view(torch.int16))
        for s, state_slot in enumerate(found.case.state_slots):
            n_seen = found.n_run[s] - found.n_window[s]
            assert torch.equal(bits(found.case.states[state_slot, LAYER]), bits(states[n_seen][state_slot, LAYER]))
            for p in range(max(0, positions[s] + n_seen - 3), positions[s] + n_seen):
                ring, expected = found.case.columns[state_slot, LAYER, p % 4], rings[n_seen][state_slot, LAYER, p % 4]
                assert torch.equal(ring.view(torch.int16), expected.view(torch.int16))
    assert n_lazy > 5 and n_redone > 5
    for pool in (found.case.states, found.case.columns):
        assert pool[:, :LAYER].isnan().all() and pool[:, LAYER + 1 :].isnan().all()


def test_one_row_a_sequence_is_a_plain_step(device: str) -> None:
    """Whether a recording knows drafts or not: the same bits of output, state and ring."""
    heads, positions = GROUPED[0], [0, 2, 9]
    plain, found = (drafting(heads, positions, 1, 2, device) for _ in range(2))
    plain.case.proj = plain.truth[:, :, 0].contiguous()
    expected = plain.case.step()
    outs = found.step([0, 1, 2], [0, 0, 0], [0, 0, 0])
    assert torch.equal(torch.cat([outs[s] for s in range(3)]).view(torch.int16), expected.view(torch.int16))
    assert torch.equal(found.case.states.view(torch.int32), plain.case.states.view(torch.int32))
    assert torch.equal(found.case.columns.view(torch.int16), plain.case.columns.view(torch.int16))
    assert found.windows.columns.isnan().all()


def test_blocks_that_are_no_heads_are_rounded_by_a_kernel_of_their_own(device: str) -> None:
    case = make(GROUPED[0], [5, 0, 7], [0, 1, 3], device=device)
    other = case.part([0, 1, 2])
    launches.n = 0
    by_heads = case.step()
    assert launches.n == 1
    assert torch.equal(other.step(block_k=GROUPED[0].v_dim // 2).view(torch.int16), by_heads.view(torch.int16))
    assert launches.n == 3


def test_the_gate_may_be_a_sigmoid(device: str) -> None:
    """In the place of SiLU, which is z times as large; of a decode with drafts, too (tests/gpu/test_gpu_gdn_prefill.py: of a prefill)."""
    for step in (Case.step, drafted):
        case = make(SMALL[0], [3, 1], [2, 0], device=device)
        z = case.proj[0, :, case.heads.channels :][:, : case.heads.n_v * case.heads.v_dim]
        plain = step(case.part([0, 1]))
        case.heads = replace(case.heads, sigmoid_gate=True)
        torch.testing.assert_close((step(case) * z).float(), plain.float(), rtol=2**-6, atol=1e-3)


def drafted(case: Case) -> Tensor:
    """A step of rows of one token each by the kernel of drafts."""
    n, device = len(case.state_slots), case.proj.device
    out = torch.zeros((n, case.heads.n_v * case.heads.v_dim), dtype=torch.bfloat16, device=device)
    state_slot, position, none, one = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (case.state_slots, case.positions, [0] * n, [1] * n)
    )
    windows = Windows(
        torch.zeros(8, window_rows(2), case.heads.channels, dtype=torch.bfloat16, device=device),
        torch.zeros(8, window_rows(2), 2 * case.heads.n_v, device=device),
    )
    gdn_decode(
        case.proj, case.heads, case.weights, EPS,
        rows=Rows(state_slot, state_slot, position, drafts=Drafts(none, none, one, none)),
        memory=StateSlots(case.columns[:, LAYER], case.states[:, LAYER], LAYER, windows), out=Operand(out, None),
    )  # fmt: skip
    return out


def test_contract(device: str) -> None:
    case = make(SMALL[0], [1], [5], device=device)
    case.proj = case.proj[:, :, :-1].contiguous()
    with pytest.raises(KernelError, match="six projections"):
        case.step()
    with pytest.raises(KernelError, match="at most 128 x 128 for drafts"):
        drafting(SMALL[3], [1], 1, 1, device).step([0], [1], [1])
