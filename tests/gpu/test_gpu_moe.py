"""moe on a GPU against the reference: decode and prefill, ugly shapes, unused rows, and bits that neighbours cannot change.

Tolerance: both sides round x and the experts' activations to bfloat16 and sum in float32, so they differ by the order of sums and
by what a sum next to a rounding border does to the bfloat16 behind it (2^-8 of one activation; the interpreter truncates where a
GPU rounds, which makes that common). 1 % of the largest value is far above both and far below an expert or a slot gone wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bench.gpu.experts import Mixture
from deltic.models.qwen.weights import Moe
from deltic.ops.contract import KernelError
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.geometry import Routing
from deltic.ops.gpu.blocks import Blocks
from deltic.ops.gpu.chip import CHIPS, chip, described
from deltic.ops.gpu.launch import Levers, launches
from deltic.ops.gpu.moe import check_moe
from deltic.ops.gpu.moe_decode import MoeScratch, MoeTiles, moe_decode, moe_scratch
from deltic.ops.gpu.moe_prefill import (
    MoePrefillScratch,
    MoePrefillTiles,
    moe_prefill,
    moe_prefill_scratch,
    moe_prefill_tiles,
)
from deltic.ops.matrix import Matrix
from tests.gpu.matrices import in_rows
from tests.reference.layers import linear, route, swiglu


@dataclass(frozen=True)
class Case:
    """H, E, k, M, Ms."""

    hidden: int
    n_experts: int
    k: int
    width: int
    shared: int


TINY = Case(128, 8, 4, 32, 64)
ODD = Case(512, 6, 3, 64, 32)  # a K split, no powers of two in experts and slots
REAL = [Case(2048, 256, 8, 512, 512), Case(2048, 512, 10, 128, 128)]  # (Next's experts narrower: 0.8 GB)
CASES = [TINY, ODD, *(REAL if torch.cuda.is_available() else [])]


class Layer:
    """Random weights of a case, and the reference's output by slot."""

    def __init__(self, case: Case, device: str, seed: int = 0) -> None:
        self.case, self.device = case, device
        generator = torch.Generator(device).manual_seed(seed)

        def matrix(*size: int) -> Tensor:
            w = torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
            return w.mul_(size[-1] ** -0.5)

        h, e, m, shared = case.hidden, case.n_experts, case.width, case.shared
        self.weights = (
            matrix(e + 1, h),
            matrix(e, 2 * m, h),
            matrix(e, h, m),
            matrix(2 * shared, h),
            matrix(h, shared),
        )
        self.generator = generator
        self.own = 0, e
        """The experts that are here."""

    def moe(self) -> Moe:
        router, gate_up, down, *shared = self.weights
        first, end = self.own
        return Moe(*map(in_rows, (router, gate_up[first:end], down[first:end], *shared)), first)

    def rows(self, n: int) -> Tensor:
        size = (n, self.case.hidden)
        return (torch.randn(size, generator=self.generator, device=self.device) * 2).bfloat16()

    def parts(self, x: Tensor, normalise: bool = True) -> Tensor:
        """[k + 1, N, H] float32: what each slot and the shared expert add."""
        router, gate_up, down, shared_gate_up, shared_down = self.weights
        x = x.float()
        weights, ids = route(x, router[:-1], self.case.k, normalise, "bfloat16")
        parts = torch.zeros(self.case.k + 1, *x.shape, device=x.device)
        for expert in ids.unique().tolist():
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            y = swiglu(x[rows], gate_up[expert], down[expert], "bfloat16")
            parts[slots, rows] = weights[rows, slots, None] * y
        gate = torch.sigmoid(linear(x, router[-1:], "bfloat16"))
        parts[-1] = gate * swiglu(x, shared_gate_up, shared_down, "bfloat16")
        return parts

    def allocate(self, name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Workspaces start as NaN, or as numbers that are no index; the counters must start as 0."""
        if "counters" in name:
            return torch.zeros(size, dtype=dtype, device=self.device)
        bad = float("nan") if dtype.is_floating_point else 123_456_789
        return torch.full(size, bad, dtype=dtype, device=self.device)

    def scratch(self, n: int) -> MoeScratch:
        c = self.case
        return moe_scratch(n, c.n_experts, c.k, c.width, c.shared, self.allocate)

    def prefill_scratch(self, n: int) -> MoePrefillScratch:
        c = self.case
        return moe_prefill_scratch(n, c.hidden, c.n_experts, c.k, c.width, c.shared, self.allocate)

    def decode(
        self, x: Tensor, used: Tensor | None = None, scratch: MoeScratch | None = None, tiles: MoeTiles | None = None,
        normalise: bool = True,
    ) -> Tensor:  # fmt: skip
        n = x.shape[0]
        slots = torch.arange(n, dtype=torch.int32, device=self.device)
        if used is not None:
            slots = torch.where(used.to(self.device), slots, -1)
        out = torch.full((self.case.k + 1, n, self.case.hidden), float("nan"), device=self.device)
        moe_decode(
            x, self.moe(), Routing(self.case.k, normalise), row_slot=slots.int(), scratch=scratch or self.scratch(n), out=out,
            tiles=tiles,
        )  # fmt: skip
        return out

    def prefill(
        self, x: Tensor, n_tokens: list[int], scratch: MoePrefillScratch | None = None, dtype: torch.dtype = torch.float32,
        tiles: MoePrefillTiles | None = None,
    ) -> Tensor:  # fmt: skip
        t = x.shape[0]
        out = torch.full((t, self.case.hidden), float("nan"), device=self.device, dtype=dtype)
        moe_prefill(
            x, self.moe(), Routing(self.case.k, True), blocks=_blocks(n_tokens, self.device),
            scratch=scratch or self.prefill_scratch(t), out=out, tiles=tiles,
        )  # fmt: skip
        return out


def _blocks(n_tokens: list[int], device: str) -> Blocks:
    n = torch.tensor(n_tokens, dtype=torch.int32, device=device)
    return Blocks(n, *(torch.zeros_like(n) for _ in range(8)))


def _close(found: Tensor, expected: Tensor, share: float = 0.01) -> None:
    assert torch.isfinite(found).all()
    worst = ((found - expected).abs().max() / expected.abs().max()).item()
    assert worst < share, worst


@pytest.mark.parametrize("n", [1, 2, 7, 21])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_is_the_reference(device: str, case: Case, n: int) -> None:
    if device == "cpu" and n not in ((2, 21) if case == TINY else (1, 7)):
        pytest.skip("the interpreter is slow")
    layer = Layer(case, device)
    x = layer.rows(n)
    normalise = n != 2
    with Levers(split_k=n != 7).bound():
        found = layer.decode(x, normalise=normalise)
    _close(found, layer.parts(x, normalise))


def test_a_row_alone_has_the_bits_it_has_among_others(device: str) -> None:
    """Also where a workspace is larger than the call, is used again, and whatever tiles the bucket takes."""
    layer = Layer(REAL[0] if device == "cuda" else ODD, device)
    counts = (160, 128, 33, 5, 4) if device == "cuda" else (9, 3)
    x = layer.rows(counts[0])
    scratch = layer.scratch(counts[0])
    everything = layer.decode(x, scratch=scratch)
    for n in counts[1:]:
        assert torch.equal(layer.decode(x[:n], scratch=scratch), everything[:, :n]), n
    if device == "cuda":  # one row is routed without lists
        for row in (0, 1, counts[0] - 1):
            assert torch.equal(layer.decode(x[row : row + 1]), everything[:, row : row + 1])
    else:  # (NumPy, which multiplies for the interpreter, has other bits for other K blocks)
        one = x[8:9]
        assert torch.equal(layer.decode(one, tiles=MoeTiles(alone=True)), layer.decode(one, tiles=MoeTiles()))


@pytest.mark.parametrize("n", [1, 7, 37])
def test_experts_may_be_elsewhere(device: str, n: int) -> None:
    """Each of several parts has the bits of its own experts, and zeros for those of others, also in the places of rows before: these
    are NaN. Of a prefill each has what its experts add up to.
    """
    layer = Layer(REAL[0] if device == "cuda" else TINY, device)
    e, k = layer.case.n_experts, layer.case.k
    x, used = layer.rows(n), torch.arange(n) % 5 != 4
    whole, found = layer.decode(x, used), list[Tensor]()
    many, n_tokens = torch.full((128, layer.case.hidden), torch.nan, dtype=x.dtype, device=device), [n, 0]
    many[:n] = x
    sums = list[Tensor]()
    for own in ((0, e // 4), (e // 4, e // 2), (e // 2, e)):
        layer.own = own
        found.append(layer.decode(x, used))
        sums.append(layer.prefill(many, n_tokens)[:n])
        assert torch.equal(found[-1][k], whole[k])  # the shared expert is in each, here
    used = used.to(device)
    assert torch.equal(sum(part[:k, used] for part in found), whole[:k, used])
    assert all(0 < (part[:k, used] == 0).all(-1).sum() < k * used.sum() for part in found) or n == 1
    layer.own = 0, e
    shared = layer.parts(x)[k]
    _close(sum(sums) - 2 * shared, layer.prefill(many, n_tokens)[:n])


def test_a_mixture_of_the_bench_is_one(device: str) -> None:
    w = Mixture("bf16", hidden=128, n_experts=4, n_per_token=2, width=64).layer(device)
    assert check_moe(torch.zeros(1, 128, dtype=torch.bfloat16, device=device), w, 2) == (128, 4, 64, 64)


def test_unused_rows_route_nowhere(device: str) -> None:
    """Their values, NaN even, reach no other row; a step of unused rows only leaves nothing behind."""
    layer = Layer(TINY, device)
    x = layer.rows(9)
    used = torch.tensor([True, False, True, True, False, True, True, False, True])
    expected = layer.decode(x[used.to(device)].contiguous())
    x[~used.to(device)] = float("nan")
    scratch = layer.scratch(9)
    layer.decode(x, torch.zeros(9, dtype=torch.bool), scratch)
    out = layer.decode(x, used, scratch)
    assert torch.equal(out[:, used.to(device)], expected)
    assert out[:-1, ~used.to(device)].isnan().all()
    layer.decode(x[1:2], torch.zeros(1, dtype=torch.bool), scratch)
    assert torch.equal(layer.decode(x[:1], scratch=scratch), expected[:, :1])


def test_ties_go_to_the_lower_expert(device: str) -> None:
    """Zero rows of the router give equal p: slots are filled by expert number, on every way to route."""
    layer = Layer(TINY, device)
    layer.weights[0][:-1] = 0
    x = layer.rows(6)
    expected = layer.parts(x)
    _close(layer.decode(x), expected)
    _close(layer.decode(x[:1]), expected[:, :1])
    _close(layer.prefill(layer.rows(64).index_copy_(0, torch.arange(6, device=device), x), [6])[:6], expected.sum(0))


def test_one_expert_takes_all_rows(device: str) -> None:
    """More pairs than a tile has: the list of one expert goes over several entries."""
    layer = Layer(TINY, device)
    x = layer.rows(37)
    x[:, 0] = 1.0
    router = layer.weights[0]
    router[:, 0] = torch.linspace(0, 40, router.shape[0], device=device).bfloat16()
    _close(layer.decode(x), layer.parts(x))
    if device == "cuda":
        x = layer.rows(640)
        x[:, 0] = 1.0
        _close(layer.prefill(x, [64] * 10), layer.parts(x).sum(0))


def test_the_cut_changes_no_bit(device: str) -> None:
    layer = Layer(REAL[0] if device == "cuda" else ODD, device)
    x = layer.rows(5)
    expected = layer.decode(x, tiles=MoeTiles())
    ahead = layer.decode(x, tiles=MoeTiles(early=True, down_ahead=True, router_ahead=True))
    assert torch.equal(ahead, expected)
    # NumPy, which multiplies for the interpreter, has on some machines other bits for other blocks.
    if device == "cpu":
        _close(layer.decode(x, tiles=MoeTiles(block_n=32, block_f=16, block_m=128)), expected)
    else:  # fewer weight rows than 64 would not be a product of Hopper's kind
        cut = MoeTiles(
            block_n=32, block_f=64, block_m=128, up_k=64, down_k=128 if chip().multiplies_from_shared else 64
        )
        assert torch.equal(layer.decode(x, tiles=cut), expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill_is_the_reference(device: str, case: Case) -> None:
    """Partial blocks, blocks not in use, rows of padding that hold NaN; padding gives zeros."""
    layer = Layer(case, device)
    n_tokens = [64, 17, 0, 0] if case in REAL else [20, 3, 0, 0] if case == TINY else [9]
    x = layer.rows(64 * len(n_tokens))
    valid = torch.cat([torch.arange(64) < n for n in n_tokens]).to(device)
    expected = layer.parts(x[valid]).sum(0)
    x[~valid] = float("nan")
    out = layer.prefill(x, n_tokens)
    # the experts' outputs are rounded to bfloat16 before they are weighted: 2^-9 of each, 2^-8 when truncated
    _close(out[valid], expected, 0.02)
    assert (out[~valid] == 0).all()
    if device == "cuda":
        assert torch.equal(layer.prefill(x, n_tokens, dtype=torch.bfloat16), out.bfloat16())


def test_prefill_rows_do_not_know_their_neighbours(device: str) -> None:
    layer = Layer(REAL[0] if device == "cuda" else TINY, device)
    n_blocks = 24 if device == "cuda" else 2
    x = layer.rows(64 * n_blocks)
    n_tokens = [64] * (n_blocks - 2) + [50, 64] if device == "cuda" else [5, 9]
    scratch = layer.prefill_scratch(x.shape[0])
    everything = layer.prefill(x, n_tokens, scratch)
    for block in (0, n_blocks - 2):
        part = slice(64 * block, 64 * block + 64)
        assert torch.equal(layer.prefill(x[part], [n_tokens[block]], scratch), everything[part])


def test_prefill_and_decode_route_alike(device: str) -> None:
    """The K parts of the router are added in the same order in both: weights of the slots are equal in bits."""
    layer = Layer(REAL[0] if device == "cuda" else ODD, device)
    x = layer.rows(64)
    n = 64 if device == "cuda" else 4
    decode, prefill = layer.scratch(64), layer.prefill_scratch(64)
    on_cpu = device == "cpu"  # NumPy's bits depend on the K block
    layer.decode(x[:n], scratch=decode, tiles=MoeTiles() if on_cpu else None)
    layer.prefill(x, [n], prefill, tiles=MoePrefillTiles(router_k=128) if on_cpu else None)
    size = n * (layer.case.k + 1)
    assert torch.equal(decode.weight[:size], prefill.weight[:size])


def test_launches(device: str) -> None:
    layer = Layer(TINY, device)
    for n, expected in ((1, 3), (2, 4)):
        launches.n = 0
        layer.decode(layer.rows(n))
        assert launches.n == expected
    launches.n = 0
    layer.prefill(layer.rows(64), [1])
    assert launches.n == 8


def test_refuses_what_does_not_fit(device: str) -> None:
    layer = Layer(TINY, device)
    with pytest.raises(ValueError, match="workspaces are for 2 rows"):
        layer.decode(layer.rows(3), scratch=layer.scratch(2))
    with pytest.raises(ValueError, match="contiguous bfloat16"):
        layer.decode(layer.rows(1).float())
    layer.weights = (*layer.weights[:4], layer.weights[4][:, :32].contiguous())
    with pytest.raises(ValueError, match="shared expert"):
        layer.decode(layer.rows(1))
    layer = Layer(TINY, device)
    layer.weights, layer.own = (layer.weights[0][:-2].contiguous(), *layer.weights[1:]), (4, 8)
    with pytest.raises(ValueError, match="4 experts from 4 on, of 6"):
        layer.decode(layer.rows(1))


@pytest.mark.parametrize("i", range(5))
def test_a_format_without_a_kernel_is_refused(device: str, i: int) -> None:
    """Each of the five weights, in a decode and in a prefill."""
    layer = Layer(TINY, device)
    weights = [in_rows(w) for w in layer.weights]
    w = weights[i]
    weights[i] = Matrix.empty(w.n, w.k, WEIGHT_FORMATS["int8"], n_matrices=w.n_matrices)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(KernelError, match=r"moe: .*no kernel for int8 in panels$"):
        moe_decode(
            layer.rows(1), Moe(*weights), Routing(TINY.k, True), row_slot=slots, scratch=layer.scratch(1),
            out=torch.empty(TINY.k + 1, 1, TINY.hidden, device=device),
        )  # fmt: skip
    with pytest.raises(KernelError, match=r"moe: .*no kernel for int8 in panels$"):
        moe_prefill(
            layer.rows(64), Moe(*weights), Routing(TINY.k, True), blocks=_blocks([64], device), scratch=layer.prefill_scratch(64),
            out=torch.empty(64, TINY.hidden, device=device),
        )  # fmt: skip


def test_the_reference_sums_the_parts(device: str) -> None:
    """`parts` against the reference's own sum, so that the oracle of this file is the oracle."""
    from types import SimpleNamespace

    from tests.reference.model import feed_forward

    layer = Layer(TINY, "cpu")
    x = layer.rows(4).float()
    router, gate_up, down, shared_gate_up, shared_down = layer.weights
    mlp = SimpleNamespace(
        router=router[:-1], shared_gate=router[-1], gate_up=gate_up, down=down, shared_gate_up=shared_gate_up,
        shared_down=shared_down,
    )  # fmt: skip
    shape = SimpleNamespace(n_experts_per_tok=4, norm_topk_prob=True)
    assert torch.allclose(layer.parts(x).sum(0), feed_forward(x, mlp, shape, "bfloat16"), atol=1e-5)


def test_pointers_and_descriptors_give_the_same_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a chip has no descriptors, tiles are read by pointers; the rows of the shared expert may lie further apart than they are
    wide."""
    layer, tiles = Layer(REAL[0] if device == "cuda" else ODD, device), moe_prefill_tiles()
    x = layer.rows(64)
    expected = layer.prefill(x, [9], tiles=tiles)
    monkeypatch.setattr(described, "chip", CHIPS["sm_80"])
    assert torch.equal(layer.prefill(x, [9], tiles=tiles), expected)


def test_the_cut_of_prefill_changes_no_bit(device: str) -> None:
    layer = Layer(REAL[0] if device == "cuda" else TINY, device)
    n_tokens = [64] * 11 + [3] if device == "cuda" else [7]
    x = layer.rows(64 * len(n_tokens))
    expected = layer.prefill(x, n_tokens)
    tiles = MoePrefillTiles(block_f=64, up_warps=4, up_stages=3, block_n=256, down_warps=8, route_rows=1)
    assert torch.equal(layer.prefill(x, n_tokens, tiles=tiles), expected)
