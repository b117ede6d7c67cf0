"""The vision tower on a GPU: its operators and its tokens against the reference, and its bits."""

from __future__ import annotations

import dataclasses
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deltic.models.fields import UnsupportedModelError
from deltic.models.rotary import rotary_tables
from deltic.models.vision.pixels import Patches, PictureRules
from deltic.models.vision.shape import VisionShape
from deltic.models.vision.weights import VisionWeights, empty_vision, load_vision
from tests.cpu.test_vision_tower import quantised_tower, shape_of, write
from tests.reference import vision as oracle
from tests.tiny_vision import PUBLISHED, TINY, random_tower, tower_of

pytest.importorskip("triton")
from deltic.models.loading import COUNTED_ROWS
from deltic.models.vision.gpu import PIECE, VisionGpu, check_vision_gpu, vision_buffers
from deltic.ops.gpu.chip import CHIPS, described, tiles_of
from deltic.ops.gpu.linear import ADD, BIAS, GELU_ERF, GELU_TANH, biased_linear
from deltic.ops.gpu.vision import HeadColumns, PatchGrid, layer_norm, patch_attention, patch_keys, patch_positions
from deltic.ops.gpu.weight import DeviceStore
from tests.gpu.matrices import in_rows

HAS_GPU = torch.cuda.is_available()
GRIDS = [(4, 6), (6, 34), (2, 2), (18, 16)]
"""Of patches: less than a tile of keys, several, the smallest, and more than a piece."""


@cache
def loaded(name: str, device: str) -> tuple[VisionShape, VisionWeights, dict[str, Tensor]]:
    sizes = PUBLISHED if name == "published" else TINY[name]
    tensors = random_tower(sizes)
    with tempfile.TemporaryDirectory() as folder:
        weights, notices = load_vision(write(Path(folder), tensors, sizes), shape_of(sizes), store=DeviceStore(device))
    assert not notices
    return shape_of(sizes), weights, tensors


def poisoned(device: str, name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """But for what must be zeros: columns that products do not write."""
    tensor = torch.zeros(size, dtype=dtype, device=device)
    return tensor if name in ("vision keys", "vision inner") or not dtype.is_floating_point else tensor.fill_(torch.nan)


def tower_on(device: str, name: str, n_rows: int = 2 * PIECE) -> VisionGpu:
    shape, weights, _ = loaded(name, device)
    buffers = vision_buffers(shape, 2 * PIECE, n_rows, lambda *args: poisoned(device, *args))
    return VisionGpu(shape, weights, PictureRules(), buffers)


def picture(grid: tuple[int, int], n_frames: int = 1, seed: int = 0) -> np.ndarray:
    size = n_frames, 16 * grid[0], 16 * grid[1], 3
    return np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)


def encoded(tower: VisionGpu, pixels: np.ndarray, n_rows: int = 2 * PIECE) -> Tensor:
    flat = torch.from_numpy(pixels.reshape(-1)).to(tower.levels.device)
    tower.buffers.pixels[: len(flat)].copy_(flat)
    grid = PatchGrid(pixels.shape[1] // 16, pixels.shape[2] // 16)
    found: list[Tensor] = []

    def put(first: int, tokens: Tensor) -> None:
        assert first == sum(map(len, found))
        found.append(tokens.clone())

    for _ in tower.pieces(grid, len(pixels), lambda stage, left: n_rows, put):
        pass
    return torch.cat(found)


@pytest.mark.parametrize(
    ("name", "n_grids"),
    [("heads of 72", 4), ("heads of 64", 1), pytest.param("heads of 64", 4, marks=pytest.mark.long)],
)
def test_tokens_are_those_of_the_reference(name: str, n_grids: int, device: str) -> None:
    tower, tensors = tower_on(device, name), loaded(name, device)[2]
    for grid, n_frames in [*zip(GRIDS, (1, 2, 1, 1), strict=True)][:n_grids]:
        pixels = picture(grid, n_frames)
        found = encoded(tower, pixels).float().cpu()
        patches = torch.from_numpy(Patches(pixels, PictureRules())[:])
        rounded = oracle.tower(patches, (1, *grid), tensors, tower_of(TINY[name]), "bfloat16")
        exact = oracle.tower(patches, (1, *grid), tensors, tower_of(TINY[name]))
        # As on a CPU, and the tokens are rounded: 2^-9 of what is 4 at the most.
        assert (found - rounded).abs().max() < 0.03 + 2**-7 and (found - rounded).abs().mean() < 0.003 + 2**-10
        assert (found - exact).abs().mean() < 0.01 * exact.abs().mean() + 0.005 + 2**-10


@pytest.mark.long
@pytest.mark.parametrize("name", TINY if HAS_GPU else ["heads of 72"])
def test_no_bit_depends_on_pieces_or_pictures_before(name: str, device: str) -> None:
    whole, small = tower_on(device, name), tower_on(device, name, PIECE)
    pixels = picture(GRIDS[3], seed=3)
    expected = encoded(whole, pixels)
    encoded(small, picture((20, 16), 2, seed=4))  # a larger one before it
    assert torch.equal(encoded(small, pixels, PIECE), expected)
    assert torch.equal(encoded(whole, pixels), expected)


@pytest.mark.skipif(not HAS_GPU, reason="minutes in the interpreter")
def test_a_published_shape(device: str) -> None:
    tower, tensors = tower_on(device, "published"), loaded("published", device)[2]
    pixels = picture((8, 6))
    found = encoded(tower, pixels).float().cpu()
    patches = torch.from_numpy(Patches(pixels, PictureRules())[:])
    exact, rounded = (
        oracle.tower(patches, (1, 8, 6), tensors, tower_of(PUBLISHED), precision)
        for precision in ("float32", "bfloat16")
    )
    error, expected = (found - exact).norm() / exact.norm(), (rounded - exact).norm() / exact.norm()
    assert error < 1.25 * expected and expected < 0.03, (error, expected)


@pytest.mark.parametrize("layout", ["fp8", "int8", "gptq"])
def test_a_quantised_tower(layout: str, tmp_path: Path, device: str) -> None:
    """Operands are decoded to bfloat16, e4m3 too."""
    sizes, shape, values = quantised_tower(tmp_path, layout)
    assert shape.formats
    weights, _ = load_vision(tmp_path, shape, store=DeviceStore(device))
    assert weights.n_bytes == empty_vision(shape, COUNTED_ROWS).n_bytes
    buffers = vision_buffers(shape, PIECE, PIECE, lambda *args: poisoned(device, *args))
    pixels = picture((4, 6))
    found = encoded(VisionGpu(shape, weights, PictureRules(), buffers), pixels).float().cpu()
    patches = torch.from_numpy(Patches(pixels, PictureRules())[:])
    expected = oracle.tower(patches, (1, 4, 6), values, tower_of(sizes), "bfloat16")
    assert (found - expected).abs().mean() < 0.01


def test_geometry_that_is_refused() -> None:
    shape = shape_of(TINY["heads of 64"])
    check_vision_gpu(shape)
    for change in ({"hidden_size": 200, "n_heads": 2}, {"hidden_size": 96, "n_heads": 12}):
        with pytest.raises(UnsupportedModelError, match="hidden_size"):
            check_vision_gpu(dataclasses.replace(shape, **change))


@pytest.mark.parametrize("dim", [64, 72, 128, 80, 16, 24, 96, 120])
def test_columns_of_a_head(dim: int) -> None:
    columns = HeadColumns.of(dim)
    assert columns.main & (columns.main - 1) == columns.tail & (columns.tail - 1) == 0
    assert columns.width >= dim and columns.main <= dim and columns.width < dim + 16
    assert HeadColumns.of(72) == HeadColumns(72, 64, 16) and HeadColumns.of(64).tail == 0


@pytest.mark.parametrize(("dim", "heads"), [(72, 2), (32, 1)])
def test_attention(dim: int, heads: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, n_most = PatchGrid(10, 14), 256
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(n_most, 3 * heads * dim, generator=generator)
    shape = VisionShape(depth=1, hidden_size=heads * dim, n_heads=heads, intermediate_size=1, out_hidden_size=1)
    cos, sin = (torch.from_numpy(table).to(device) for table in rotary_tables(shape.inv_freq(), 20))
    columns = HeadColumns.of(dim)
    memory = torch.full((3, heads, n_most, columns.width), torch.nan, dtype=torch.bfloat16, device=device)
    memory[..., dim:] = 0
    patch_keys(qkv.to(device), grid, cos, sin, memory, begin=0, dim=dim)
    q, k, v = qkv[: grid.n].view(grid.n, 3, heads, dim).unbind(1)
    place = oracle.coordinates(10, 14, 2)
    for i, x in enumerate((oracle.rotate(q, place), oracle.rotate(k, place), v)):
        found = memory[i, :, : grid.n, :dim].transpose(0, 1).float().cpu()
        torch.testing.assert_close(found, x, rtol=2**-7, atol=2e-3)
    q, k, v = (memory[i, :, : grid.n, :dim].transpose(0, 1).float().cpu() for i in range(3))
    expected = oracle.attention(q, k, v, "bfloat16").flatten(1)
    out = torch.full((n_most, heads * dim), torch.nan, dtype=torch.bfloat16, device=device)
    patch_attention(memory, grid, out, begin=0, dim=dim)
    torch.testing.assert_close(out[: grid.n].float().cpu(), expected, rtol=2**-6, atol=2**-7)
    part = torch.full((64, heads * dim), torch.nan, dtype=torch.bfloat16, device=device)
    patch_attention(memory, grid, part, begin=64, dim=dim)
    assert torch.equal(part, out[64:128])
    if not HAS_GPU:
        monkeypatch.setattr(described, "chip", CHIPS["sm_80"])
        assert isinstance(tiles_of(memory, 1, 64, 64, (1, 64)), tuple)
        patch_attention(memory, grid, part, begin=64, dim=dim)
        assert torch.equal(part, out[64:128]), "pointers and descriptors give the same bits"


def test_positions_and_norms(device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(49, 96, generator=generator).bfloat16()
    for rows, columns in ((2, 2), (14, 6), (8, 8)):
        out = torch.full((64, 96), torch.nan, device=device)
        patch_positions(table.to(device), PatchGrid(rows, columns), out, begin=0)
        expected = oracle.position_embedding(table.float(), rows, columns, 2)
        n = min(64, rows * columns)
        torch.testing.assert_close(out[:n].cpu(), expected[:n], rtol=1e-5, atol=1e-5)
    x, w, b = (torch.randn(size, generator=generator).to(device) for size in ((64, 96), (96,), (96,)))
    out = torch.full((64, 96), torch.nan, dtype=torch.bfloat16, device=device)
    layer_norm(x + 3, w, b, 1e-6, out)
    expected = torch.nn.functional.layer_norm(x + 3, (96,), w, b, 1e-6)
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=1e-5)


def test_what_follows_a_product(device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x, w = (torch.randn(size, generator=generator).bfloat16().to(device) for size in ((64, 96), (80, 96)))
    bias, before = (torch.randn(size, generator=generator).to(device) for size in ((80,), (64, 80)))
    exact = x.float() @ w.float().t() / 4 + bias
    w = (w.float() / 4).bfloat16()
    for how, expected in (
        (BIAS, exact),
        (GELU_TANH, torch.nn.functional.gelu(exact, approximate="tanh")),
        (GELU_ERF, torch.nn.functional.gelu(exact)),
        (ADD, before + exact),
    ):
        out = before.clone()
        biased_linear(x, in_rows(w), bias, out, how=how)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        if how != ADD:
            wide = torch.full((64, 96), 7.0, dtype=torch.bfloat16, device=device)
            biased_linear(x, in_rows(w), bias, wide[:, :80], how=how)
            assert torch.equal(wide[:, :80], out.bfloat16()) and (wide[:, 80:] == 7).all()
