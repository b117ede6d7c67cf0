"""attention_prefill on the GPU, or in Triton's interpreter: against the reference, and bit for bit against itself."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from deltic.models.rotary import axis_of_angle
from deltic.ops.geometry import AttentionHeads, AttentionWeights
from deltic.ops.gpu import attention_prefill as attention_module
from deltic.ops.gpu.attention_prefill import Axes, FlashTile, attention_prefill, flash_tile
from deltic.ops.gpu.blocks import BLOCK, Blocks
from deltic.ops.gpu.chip import CHIPS, described, tiles_of
from deltic.ops.kv_formats import BF16, KvFormat, KvPages
from tests.gpu.kv_pages import QUANTISED, quantised, values_of
from tests.reference import layers

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of poison that a mask takes away

EPS = 1e-6
N_LAYERS = 2
"""The pages hold two layers; the second is under test, so the page stride is not the layer's own size."""
LAYER = 1


@dataclass
class World:
    """Sequences with their projections and a poisoned pool of pages."""

    heads: AttentionHeads
    lengths: list[int]
    half: int
    device: str
    format: KvFormat = BF16
    projections: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(7)
        d = self.heads.dim
        self.projections = [
            torch.randn(n, self.heads.row, generator=g).bfloat16().to(self.device) for n in self.lengths
        ]
        self.q_norm, self.k_norm = (0.3 * torch.randn(2, d, generator=g)).to(self.device)
        self.inv_freq = 10000.0 ** -(torch.arange(self.half, dtype=torch.float64) / self.half)
        angle = (torch.arange(max(self.lengths)).double()[:, None] * self.inv_freq).float()
        self.cos, self.sin = angle.cos().to(self.device), angle.sin().to(self.device)
        n_pages = [-(-n // BLOCK) for n in self.lengths]
        ids = torch.randperm(sum(n_pages), generator=g).to(torch.int32)
        self.page_table = torch.full((len(n_pages) + 1, max(n_pages) + 1), -1, dtype=torch.int32)
        for i, part in enumerate(ids.split(n_pages)):
            self.page_table[i, : part.numel()] = part
        self.clear()

    def clear(self) -> None:
        n, heads = int(self.page_table.max()) + 2, self.heads
        if self.format.is_plain:
            shape = (n, N_LAYERS, 2, heads.n_kv, BLOCK, heads.dim)
            self.all_pages = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=self.device)
        else:  # bytes of 255 are NaN in e4m3 and in float16
            n_bytes = self.format.layer_bytes(heads.n_kv, heads.dim)
            self.all_pages = torch.full((n, N_LAYERS, n_bytes), 255, dtype=torch.uint8, device=self.device)
        self.pages = self.all_pages[:, LAYER]

    def step(
        self,
        parts: list[tuple[int, int, int]],
        spare: int = 0,
        tile: FlashTile | None = None,
        n_launches: int = 1,
        angles: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """Prefills parts (sequence, start, stop) in one call with `spare` unused blocks; their rows of out, in order. n_launches: how
        often, all of which must agree. angles: [3, T] of each sequence, with SECTIONS."""
        rows = [(i, p, min(stop - p, BLOCK)) for i, start, stop in parts for p in range(start, stop, BLOCK)]
        capacity = len(rows) + spare

        def row(values: list[int]) -> Tensor:
            # unused blocks hold what an earlier step may have left there
            return torch.tensor(values + [0] * (capacity - len(values)), dtype=torch.int32, device=self.device)

        pages = [int(self.page_table[i, p // BLOCK]) for i, p, _ in rows]
        nothing = row([])
        blocks = Blocks(
            n=row([n for *_, n in rows]), position=row([p for _, p, _ in rows]), batch_slot=row([i for i, *_ in rows]),
            page=row(pages), snapshot=nothing, segment_begin=nothing, start_slot=nothing, state_slot=nothing,
            block_segment=nothing,
        )  # fmt: skip
        heads, size = self.heads, BLOCK * capacity
        proj = torch.full((size, heads.row), torch.nan, dtype=torch.bfloat16, device=self.device)
        for b, (i, p, n) in enumerate(rows):
            proj[b * BLOCK : b * BLOCK + n] = self.projections[i][p : p + n]
        query, out = (
            torch.full((size, heads.n_q * heads.dim), torch.nan, dtype=torch.bfloat16, device=self.device)
            for _ in range(2)
        )
        table = self.page_table.clamp(min=0).to(self.device)
        words = None
        if angles is not None:
            words = torch.zeros((3, size), dtype=torch.int32)
            for b, (i, p, n) in enumerate(rows):
                words[:, b * BLOCK : b * BLOCK + n] = angles[i][:, p : p + n]
            words = words.to(self.device)
        outs = []
        with pytest.MonkeyPatch.context() as patch:
            if tile is not None:
                patch.setattr(attention_module, "flash_tile", lambda heads: tile)
            for _ in range(n_launches):
                attention_prefill(
                    proj, heads, AttentionWeights(self.q_norm, self.k_norm, EPS, self.cos, self.sin),
                    blocks=blocks, cache=KvPages(self.pages, self.format, table), query=query, out=out, axes=Axes(words, SECTIONS),
                )  # fmt: skip
                outs.append(out.clone())
        assert n_launches == 1 or all(torch.equal(one, out) for one in outs)
        used = out[: BLOCK * len(rows)]
        assert used.isfinite().all(), "padding of a block in use must stay finite"
        assert out[BLOCK * len(rows) :].isnan().all(), "blocks not in use are left alone"
        taken = [used[b * BLOCK : b * BLOCK + n] for b, (*_, n) in enumerate(rows)]
        sizes = [-(-(stop - start) // BLOCK) for _, start, stop in parts]
        return [torch.cat(taken[sum(sizes[:j]) : sum(sizes[: j + 1])]) for j in range(len(parts))]

    def kv(self, i: int) -> tuple[Tensor, Tensor]:
        """k and v [T, nk, d] of a sequence, from its pages."""
        ids = self.page_table[i, : -(-self.lengths[i] // BLOCK)].long().to(self.device)
        pages = self.pages[ids]
        if not self.format.is_plain:
            pages = values_of(pages, self.format, self.heads.n_kv, self.heads.dim)
        both = pages.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : self.lengths[i]]
        return both[0], both[1]

    def expected(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """The reference's k, v and output, float32."""
        nq, nk, d = self.heads.n_q, self.heads.n_kv, self.heads.dim
        x = self.projections[i].float().cpu()
        q, gate, k, v = (y.unflatten(1, (-1, d)) for y in x.split([nq * d, nq * d, nk * d, nk * d], 1))
        positions = torch.arange(x.shape[0])
        q, k = (
            layers.rope(layers.rms_norm(y, w.cpu(), EPS), positions, self.inv_freq)
            for y, w in ((q, self.q_norm), (k, self.k_norm))
        )
        rounded = [layers.rounded(y, "bfloat16") for y in (q, k, v)]
        if not self.format.is_plain:
            rounded[1:] = self.kv(i)
        return rounded[1], v, (layers.attention(*rounded) * torch.sigmoid(gate)).flatten(1)


SECTIONS = 3, 3, 2
"""Of 8 angles."""
LAYOUTS = [(4, 2, 32, 8), (3, 1, 64, 6), (2, 2, 32, 16)]
if torch.cuda.is_available():
    LAYOUTS += [(8, 2, 256, 32), (24, 4, 256, 32), (16, 2, 256, 32)]


def lengths(device: str) -> list[int]:
    return [130, 64, 1, 70] if device == "cpu" else [1100, 64, 1, 70, 640, 257]


def whole(world: World) -> list[tuple[int, int, int]]:
    return [(i, 0, n) for i, n in enumerate(world.lengths)]


def test_pointers_and_descriptors_give_the_same_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a chip has no descriptors, tiles are read by pointers."""
    heads = AttentionHeads(4, 2, 64)
    world, tile = World(heads, lengths(device), 8, device), flash_tile(heads)
    expected = world.step(whole(world))
    world.clear()
    monkeypatch.setattr(described, "chip", CHIPS["sm_80"])
    assert isinstance(tiles_of(world.pages, 1, 64, 64, (1, 64)), tuple)
    assert all(torch.equal(a, b) for a, b in zip(world.step(whole(world), tile=tile), expected, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_the_reference(layout: tuple[int, int, int, int], device: str) -> None:
    nq, nk, d, half = layout
    world = World(AttentionHeads(nq, nk, d), lengths(device), half, device)
    outputs = world.step(whole(world), spare=1)
    for i, out in enumerate(outputs):
        k, v, expected = world.expected(i)
        found_k, found_v = (x.float().cpu() for x in world.kv(i))
        # one bfloat16 rounding of a float32 value that may differ in its last bits
        torch.testing.assert_close(found_k, k, rtol=2**-7, atol=1e-5)
        assert torch.equal(found_v, v)
        # q and k may round to the other neighbour, the weights are rounded (2^-9 each), the result too (2^-9): all relative to
        # values of about 1 that a mean may cancel
        torch.testing.assert_close(out.float().cpu(), expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("format", QUANTISED, ids=lambda format: format.name)
@pytest.mark.parametrize("layout", [LAYOUTS[0], *LAYOUTS[3:]])
def test_quantised_pages(layout: tuple[int, int, int, int], format: KvFormat, device: str) -> None:
    """What is written is the reference's, to the bit, of what plain pages hold, and what is read is that. No bit follows from a cut."""
    nq, nk, d, half = layout
    heads, n = AttentionHeads(nq, nk, d), lengths(device)[:4]
    plain, world = (World(heads, n, half, device, f) for f in (BF16, format))
    plain.step(whole(plain))
    together = world.step(whole(world), spare=1)
    kept = world.all_pages.clone()
    plain.pages = quantised(plain.pages, format)
    plain.format = format
    for i, out in enumerate(together):
        for found, right in zip(world.kv(i), plain.kv(i), strict=True):
            assert torch.equal(found, right)
        torch.testing.assert_close(out.float().cpu(), world.expected(i)[2], rtol=2**-6, atol=2**-6)
    world.clear()
    cuts = [n // 2 // BLOCK * BLOCK for n in world.lengths]
    first = [world.step([(i, 0, cut)])[0] if cut else together[i][:0] for i, cut in enumerate(cuts)]
    rest = world.step([(i, cut, n) for i, (cut, n) in enumerate(zip(cuts, world.lengths, strict=True))], spare=1)
    assert all(torch.equal(out, torch.cat([a, b])) for out, a, b in zip(together, first, rest, strict=True))
    assert torch.equal(kept, world.all_pages)


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1], *LAYOUTS[3:]])
def test_bits_do_not_depend_on_cuts_or_neighbours(layout: tuple[int, int, int, int], device: str) -> None:
    nq, nk, d, half = layout
    world = World(AttentionHeads(nq, nk, d), lengths(device), half, device)
    together = world.step(whole(world))
    kept = world.all_pages.clone()
    world.clear()
    alone = [world.step([part], spare=2)[0] for part in whole(world)]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    assert torch.equal(kept.view(torch.int16), world.all_pages.view(torch.int16))
    # every sequence in two parts, the second parts among each other, the first parts one by one
    world.clear()
    cuts = [n // 2 // BLOCK * BLOCK for n in world.lengths]
    first = [world.step([(i, 0, cut)])[0] if cut else together[i][:0] for i, cut in enumerate(cuts)]
    rest = world.step([(i, cut, n) for i, (cut, n) in enumerate(zip(cuts, world.lengths, strict=True))], spare=1)
    for i, out in enumerate(together):
        assert torch.equal(out, torch.cat([first[i], rest[i]]))
    assert torch.equal(kept.view(torch.int16), world.all_pages.view(torch.int16))


def test_angles_of_their_own(device: str) -> None:
    """Of text they are those of positions. Each angle of a picture's token is that of the axis it belongs to."""
    world = World(AttentionHeads(4, 2, 32), lengths(device), 8, device)
    expected = world.step(whole(world))
    text = [torch.arange(n, dtype=torch.int32).expand(3, n) for n in world.lengths]
    world.clear()
    assert all(torch.equal(a, b) for a, b in zip(world.step(whole(world), spare=1, angles=text), expected, strict=True))
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, world.lengths[0], (3, world.lengths[0]), generator=generator, dtype=torch.int32)
    world.clear()
    found = world.step([(0, 0, world.lengths[0])], angles=[rows])[0]
    axes = torch.from_numpy(axis_of_angle(8, SECTIONS)).long()
    assert axes.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    angle = torch.arange(8)
    made = [table.cpu()[rows.long()[axes].T, angle].contiguous().to(device) for table in (world.cos, world.sin)]
    world.clear()
    world.cos, world.sin = made
    assert torch.equal(found, world.step([(0, 0, world.lengths[0])])[0])
    assert not torch.equal(found, expected[0])


def test_writes_only_its_own_tokens(device: str) -> None:
    world = World(AttentionHeads(4, 2, 32), [70, 64], 8, device)
    world.step([(0, 0, 70)], spare=1)
    touched = world.page_table[0, :2].tolist()
    others = [i for i in range(world.pages.shape[0]) if i not in touched]
    assert world.all_pages[others].isnan().all()
    assert world.all_pages[:, 1 - LAYER].isnan().all()
    last = world.pages[touched[1]]
    assert last[0, :, 6:].isnan().all(), "keys of padding are not written"
    assert (last[1, :, 6:] == 0).all(), "values of padding are zero"
    assert last[:, :, :6].isfinite().all()


def test_what_was_left_in_a_page_does_not_reach_the_result(device: str) -> None:
    world = World(AttentionHeads(4, 2, 32), [70], 8, device)
    clean = world.step(whole(world))[0]
    world.all_pages.fill_(torch.inf)
    assert torch.equal(clean, world.step(whole(world))[0])


@pytest.mark.parametrize("layout", LAYOUTS[3:] or LAYOUTS[:1])
def test_tiles_agree_in_every_bit(layout: tuple[int, int, int, int], device: str) -> None:
    nq, nk, d, half = layout
    world = World(AttentionHeads(nq, nk, d), lengths(device), half, device)
    ours = world.step(whole(world))
    tiles = [FlashTile(2, 8, 2, kv_outer=False)]
    if device != "cpu":  # numpy's products depend on their shape
        tiles += [FlashTile(2, 8, 2), FlashTile(1, 4, 2), FlashTile(1, 4, 1)]
    for tile in tiles:
        for a, b in zip(ours, world.step(whole(world), spare=1, tile=tile), strict=True):
            assert torch.equal(a, b), tile


NEIGHBOUR = """
import torch
a = torch.full((8192, 8192), torch.nan, device="cuda", dtype=torch.bfloat16)
print("busy", flush=True)
while True:
    for _ in range(10): a @ a
    torch.cuda.synchronize()
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="two processes in turns on one GPU")
def test_bits_stay_where_another_process_has_its_turns() -> None:
    """A kernel whose warps specialise gave NaN in one of 1,000 launches."""
    world = World(AttentionHeads(16, 8, 128), [43, 250], 64, "cuda")
    alone = world.step(whole(world))
    with subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE, text=True) as neighbour:
        try:
            assert neighbour.stdout is not None and neighbour.stdout.readline() == "busy\n"
            until_s = time.monotonic() + 8
            while time.monotonic() < until_s:
                here = world.step(whole(world), tile=flash_tile(world.heads), n_launches=200)
                assert all(torch.equal(a, b) for a, b in zip(alone, here, strict=True))
        finally:
            neighbour.kill()


def test_refuses_what_it_does_not_serve(device: str) -> None:
    with pytest.raises(ValueError, match="head_dim"):
        World(AttentionHeads(2, 1, 48), [1], 8, device).step([(0, 0, 1)])
    with pytest.raises(ValueError, match="rotary"):
        World(AttentionHeads(2, 1, 32), [1], 32, device).step([(0, 0, 1)])
