"""Weights in every format on the GPU: what is put into memory is read back, and multiplied as its values say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from deltic.ops.arrays import bfloat16
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.gpu import hopper, linear
from deltic.ops.gpu.blocks import BatchState, Rows
from deltic.ops.gpu.chip import CHIPS, HOPPER, chip
from deltic.ops.gpu.decode import k_block
from deltic.ops.gpu.fp8 import Fp8Rows, block_scales, fp8_linear, fp8_rows, fp8_tile, round_rows, vendor_multiplies
from deltic.ops.gpu.launch import launches
from deltic.ops.gpu.linear import (
    Narrow,
    WideScratch,
    narrow_linear,
    narrow_swiglu,
    product,
    silu_mul,
    silu_mul_rounded,
    wide_linear,
    wide_scratch,
)
from deltic.ops.gpu.norm import add_norm, begin_decode, embed
from deltic.ops.gpu.weight import MADE, DeviceStore, _random, unpack
from deltic.ops.matrix import Matrix, Segment, planes
from tests.gpu.matrices import e4m3_rows
from tests.quantised_rows import operands, random_rows

NAMES = [name for name in WEIGHT_FORMATS if name != "bf16"]


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_read_back(device: str, name: str) -> None:
    store = DeviceStore(device)
    for n, k in ((5, 96), (37, 512)):
        w = Matrix.empty(n, k, WEIGHT_FORMATS[name], "rows", 2, store.empty)
        rows = [random_rows(name, n, k, seed) for seed in (0, 1)]
        for i, each in enumerate(rows):
            store.put(w.whole.one(i), each)
        found = unpack(w.whole).cpu().numpy()
        assert np.array_equal(found, np.stack([each.values() for each in rows]))  # but for the sign of a zero


@pytest.mark.parametrize("name", ["fp8", "int4-g32-bfloat16.zero", "Q3_K", "Q5_K", "Q6_K", "Q8_0", "NVFP4"])
def test_rows_may_come_in_blocks(device: str, name: str) -> None:
    """Some rows of every matrix at a time, or of one, are stored as all at once."""
    n, k, store = 48, 256, DeviceStore(device)
    whole, parts = (Matrix.empty(n, k, WEIGHT_FORMATS[name], "rows", 3, store.empty).whole for _ in range(2))
    rows = random_rows(name, 3 * n, k, 0)
    each = np.arange(3 * n).reshape(3, n)
    store.put(whole, rows)
    store.put(parts, rows.take(each[:, :16].ravel()))
    for i in range(3):
        store.put(parts.one(i), rows.take(each[i, 16:]), 16)
    assert np.array_equal(unpack(parts).cpu().numpy(), unpack(whole).cpu().numpy())
    assert np.array_equal(unpack(whole).cpu().numpy().reshape(3 * n, k), rows.values())


def put(device: str, n: int, k: int, *runs: tuple[int, str]) -> tuple[Matrix, Tensor]:
    """A matrix of random rows in these formats, and what it is multiplied as: float64, rounded as the kernels do."""
    store, rows = DeviceStore(device), []
    w = Matrix.empty(n, k, [(height, WEIGHT_FORMATS[name]) for height, name in runs], "rows", 1, store.empty)
    for segment in w.segments:
        if segment.format.name == "bf16":
            values = torch.randn(segment.n, k).bfloat16()
            store.put(segment, values.view(torch.int16).numpy().view(bfloat16))
        else:
            found = random_rows(segment.format.name, segment.n, k)
            store.put(segment, found)
            values = torch.from_numpy(operands(found))
        rows.append(values.double())
    return w, torch.cat(rows).to(device)


def exact(x: Tensor, w: Tensor) -> Tensor:
    return x.double() @ w.t()


def multiplied(x: Tensor, name: str, block_k: int = 0) -> Tensor:
    """Rows as they are multiplied with this format."""
    return e4m3_rows(x, block_k) if WEIGHT_FORMATS[name].codes == "e4m3" else x.double()


def close(out: Tensor, x: Tensor, w: Tensor) -> None:
    """Float32 sums: next to the sum of what is added. A Hopper adds 8-bit products with 13 bits below the largest
    of them, which here are as large as all others together.
    """
    tolerance = 2e-3 if out.is_cuda and torch.equal(x, e4m3_rows(x.bfloat16())) else 4e-6
    size = x.abs() @ w.abs().t()
    assert ((out.double() - exact(x, w)).abs() <= tolerance * size + 1e-12).all()


@pytest.mark.parametrize("name", NAMES)
def test_linears_of_every_format(device: str, name: str) -> None:
    """Narrow and SwiGLU, of ugly shapes; a row has the same bits in any of them."""
    w, values = put(device, 74, 192, (74, name))
    x = torch.randn(64, 192).bfloat16().to(device)
    rows, used = fp8_scratch(device, 64, 192), multiplied(x, name)
    sums = torch.full((1, 64, 74), torch.nan, device=device)
    narrow_linear(x, w, sums, rows=rows)
    close(sums[0], used, values)
    for some in (slice(3, 4), slice(0, 16), slice(40, 64)):
        few = torch.full((1, len(x[some]), 74), torch.nan, device=device)
        narrow_linear(x[some].contiguous(), w, few, rows=rows)
        if device != "cpu":  # the interpreter's sums have numpy's order, which follows the shape
            assert torch.equal(few[0], sums[0, some])
        close(few[0], used[some], values)
    for n in (2, 20):
        out, gate_up = torch.empty(n, 37, device=device, dtype=torch.bfloat16), torch.empty_like(sums[:, :n])
        narrow_swiglu(x[:n], w, out, gate_up=gate_up, rows=rows)
        gate, up = exact(used[:n], values).chunk(2, 1)
        torch.testing.assert_close(out.double(), torch.nn.functional.silu(gate) * up, rtol=2**-7, atol=1e-4)


def fp8_scratch(device: str, n: int, k: int) -> Fp8Rows:
    return fp8_rows("rows", n, k, lambda _, size, dtype: torch.empty(size, dtype=dtype, device=device), 1 << 20)


def scratch(device: str, n_rows: int, w: Matrix) -> WideScratch:
    codes = {segment.format.codes for segment in w.segments}
    return wide_scratch(
        n_rows, w.n * w.k, w.k, codes, lambda _, size, dtype: torch.empty(size, dtype=dtype, device=device)
    )


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_wide_linears_of_every_format(device: str, name: str) -> None:
    """Of few rows, which are decoded on their way, and of many: the same bits. Of e4m3 rows are rounded, too."""
    w, values = put(device, 74, 192, (74, name))
    x = torch.randn(320, 192).bfloat16().to(device)
    many = torch.full((320, 74), torch.nan, device=device)
    wide_linear(x, w, many, scratch=scratch(device, 320, w))
    few = torch.full((64, 74), torch.nan, device=device, dtype=torch.bfloat16)
    wide_linear(x[64:128].contiguous(), w, few, scratch=scratch(device, 64, w))
    close(many, multiplied(x, name), values)
    torch.testing.assert_close(few.float(), many[64:128].bfloat16().float(), rtol=2**-7, atol=1e-5)
    if device != "cpu":
        assert torch.equal(few, many[64:128].bfloat16())


def test_rows_are_rounded_to_e4m3(device: str) -> None:
    """To the nearest code, as torch rounds; zeros, the smallest and the largest numbers, rows that lie apart."""
    x = torch.randn(70, 320)
    x[3], x[4, :64], x[5], x[6] = 0.0, 0.0, 1e-30, 3e38
    x[7] = torch.cat([torch.arange(160) * 2.0**-9, 448.0 - torch.arange(160) * 2.0])
    wide = torch.full((70, 512), torch.nan, device=device, dtype=torch.bfloat16)
    wide[:, :320] = x
    rows = fp8_rows("rows", 70, 320, lambda _, size, dtype: torch.zeros(size, dtype=dtype, device=device))
    for block_k in (64, 32):
        round_rows(wide[:, :320], rows, block_k)
        codes = rows.codes[: 70 * 320].view(70, 320).view(torch.float8_e4m3fn).double()
        scale = rows.scale[: 320 // block_k * 70].view(-1, 70).t().double()
        assert torch.equal(codes * scale.repeat_interleave(block_k, 1), e4m3_rows(wide[:, :320], block_k))


def vendors(device: str) -> None:
    if device == "cpu" or not chip().is_hopper:
        pytest.skip("the vendor's library multiplies e4m3 by blocks on Hopper alone")


@pytest.mark.parametrize("name", ["fp8", "fp8-row", "blocks"])
def test_the_vendors_e4m3_has_our_bits(device: str, name: str) -> None:
    """Of any number of rows, into columns of a wider matrix, and by scales of blocks."""
    vendors(device)
    for m, k in ((64, 256), (208, 384), (256, 640)):
        w, _ = put(device, m, k, (m, name if name != "blocks" else "fp8"))
        if name == "blocks":
            in_one_block(w)
        blocks = block_scales(w.whole)
        assert (blocks is not None) == (name == "blocks" and m % 128 == 0)
        x, found = torch.randn(1024, k).bfloat16().to(device), {}
        for t in (64, 128, 1024):
            rows = fp8_scratch(device, t, k)
            round_rows(x[:t], rows, 128)
            ours, wide = (torch.full((t, m + more), torch.nan, device=device, dtype=torch.bfloat16) for more in (0, 32))
            assert vendor_multiplies(w.whole, wide[:, 16 : 16 + m])
            fp8_linear(rows, w.whole, ours, tile=fp8_tile(t, m, 128))
            fp8_linear(rows, w.whole, wide[:, 16 : 16 + m], blocks=blocks)
            found[t] = wide[:, 16 : 16 + m]
            assert torch.equal(found[t], ours) and torch.equal(found[t][:64], found[64])


def in_one_block(w: Matrix) -> None:
    """Gives the rows of each 128 of an e4m3 matrix the scales of the first of them."""
    scale = scales_of(w.whole)
    scale.copy_(by_blocks(scale))


def scales_of(segment: Segment) -> Tensor:
    """float32 [groups, n] of an e4m3 matrix."""
    at, size = planes(segment.n, segment.k, segment.format)["scale"]
    return segment.data.view(-1)[at : at + size].view(torch.float32).view(-1, segment.n)


def by_blocks(scale: Tensor) -> Tensor:
    """[groups, n]: of each 128 rows the first one's."""
    return scale[:, torch.arange(scale.shape[1], device=scale.device) // 128 * 128]


@pytest.mark.parametrize("n", [48, 50, 68, 100])
def test_few_rows_by_the_vendors_e4m3(device: str, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """A decode's products have the same bits with it and without, alone and with SwiGLU behind them. It has
    none of a number of rows that is no multiple of 4.
    """
    vendors(device)
    for name in ("FEWEST", "FEWEST_SWIGLU"):
        monkeypatch.setattr(hopper, name, 1 << 30)
    k = 512
    w, _ = put(device, 512, k, (512, "fp8"))
    in_one_block(w)
    blocks, found = block_scales(w.whole), []
    x = torch.randn(n, k).bfloat16().to(device)
    for least in (1 << 62, 0):
        monkeypatch.setattr(linear, "VENDOR_E4M3_WORK", least)
        rows = fp8_scratch(device, n, k)
        out, gate_up = (torch.full((1, n, 512), torch.nan, device=device) for _ in range(2))
        inner = torch.full((n, 256), torch.nan, device=device, dtype=torch.bfloat16)
        narrow_linear(x, w, out, rows=rows, blocks=blocks)
        narrow_swiglu(x, w, inner, rows=rows, gate_up=gate_up, blocks=blocks)
        assert gate_up.isnan().all() == (least > 0 or n % 4 > 0)
        found.append((out, inner))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("format", "k", "rows"), [("fp8", 512, (3, 40, 64)), ("int4-g128-bfloat16", 256, (3, 70, 130))]
)
def test_other_tiles_of_more_rows(device: str, format: str, k: int, rows: tuple[int, ...]) -> None:
    """e4m3 with up to 64 rows, long blocks of int4 with more: alone, beside another segment, and with SwiGLU."""
    w, values = put(device, 256, k, (192, format), (64, "bf16"))
    whole, of_whole = put(device, 256, k, (256, format))
    x = torch.randn(rows[-1], k).bfloat16().to(device)
    used, found = multiplied(x, format), []
    for n in rows:
        scratch = fp8_scratch(device, n, k)
        sums, both = (torch.full((1, n, 256), torch.nan, device=device) for _ in range(2))
        out = torch.full((n, 128), torch.nan, device=device, dtype=torch.bfloat16)
        narrow_linear(x[:n], whole, sums, rows=scratch)
        narrow_linear(x[:n], w, both, rows=scratch)
        narrow_swiglu(x[:n], whole, out, rows=scratch)
        close(sums[0], used[:n], of_whole)
        close(both[0, :, :192], used[:n], values[:192])
        close(both[0, :, 192:], x[:n].double(), values[192:])
        gate, up = exact(used[:n], of_whole).chunk(2, 1)
        torch.testing.assert_close(out.double(), torch.nn.functional.silu(gate) * up, rtol=2**-7, atol=1e-4)
        found.append((sums[0], both[0], out))
    if device != "cpu":  # the interpreter's sums have numpy's order, which follows the shape
        for parts in found[1:]:
            assert all(torch.equal(one[: rows[0]], first) for one, first in zip(parts, found[0], strict=True))


@pytest.mark.parametrize(("n", "width", "slices"), [(1, 512, 4), (5, 2048, 9), (3, 5120, 2), (2, 1056, 0), (4, 96, 11)])
def test_the_norm_rounds_as_round_rows(device: str, n: int, width: int, slices: int) -> None:
    """The same codes and scales as by a kernel behind it, and the same rows, of all of them and of some."""
    residual, w, block_k = torch.randn(n, width).to(device), (torch.randn(width) / 8).to(device), k_block(width)
    partials = (torch.randn(slices, n, width) * torch.exp(torch.randn(width) * 4)).to(device) if slices else None
    for rows in (None, torch.tensor([n - 1, 0, n - 1], device=device, dtype=torch.int32)):
        found = []
        for rounds in (False, True):
            added, n_out, kept = residual.clone(), n if rows is None else 3, fp8_scratch(device, 5, width)
            out = torch.full((n_out, width), torch.nan, dtype=torch.bfloat16, device=device)
            kept.codes.fill_(0x7F)
            kept.scale.fill_(torch.nan)
            codes = kept.rounded_by(block_k if rounds else 0)
            add_norm(added, partials, w, 1e-6, out, rows=rows, codes=codes)
            round_rows(out, codes, block_k)
            found.append((added, out, kept.codes[: out.numel()], kept.scale[: out.numel() // block_k]))
        assert not found[0][3].isnan().any()
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_silu_mul_rounds_as_round_rows(device: str) -> None:
    for t, width in ((3, 384), (64, 1152), (5, 96)):
        gate_up = torch.randn(t, 2 * width).bfloat16().to(device)
        inner = torch.empty(t, width, dtype=torch.bfloat16, device=device)
        rows, wanted = fp8_scratch(device, t, width), fp8_scratch(device, t, width)
        silu_mul(gate_up, inner)
        round_rows(inner, wanted, k_block(width))
        assert silu_mul_rounded(gate_up, rows, width, k_block(width)).block_k == k_block(width)
        n_scales = t * (width // k_block(width))
        assert torch.equal(rows.codes[: t * width], wanted.codes[: t * width])
        assert torch.equal(rows.scale[:n_scales], wanted.scale[:n_scales])


@pytest.mark.parametrize("name", ["fp8", "int4-g128-bfloat16", "Q4_K", "NVFP4"])
def test_slices_and_blocks_of_k(device: str, name: str) -> None:
    """Slices that begin within a group, and blocks of any size."""
    w, values = put(device, 16, 640, (16, name))
    x = torch.randn(3, 640).bfloat16().to(device)
    for splits, block_k in ((1, 0), (2, 0), (2, 32), (10, 0)):
        out = torch.full((splits, 3, 16), torch.nan, device=device)
        config = Narrow(64, block_k, 4, 2) if block_k and name != "fp8" else None
        narrow_linear(x, w, out, rows=fp8_scratch(device, 3, 640), config=config)
        width = 640 // splits
        for s in range(splits):
            part = slice(s * width, (s + 1) * width)
            close(out[s], multiplied(x[:, part], name), values[:, part])


@pytest.mark.parametrize(
    "runs", [((70, "Q6_K"), (150, "Q4_K"), (6, "bf16")), ((40, "fp8"), (20, "Q8_0"), (70, "bf16"))]
)
def test_three_segments_are_one_launch(device: str, runs: tuple[tuple[int, str], ...]) -> None:
    """Whatever their order and their formats, with several tiles each, of few rows and of many."""
    m = sum(height for height, _ in runs)
    w, values = put(device, m, 512, *runs)
    for n in (1, 40):
        x = torch.randn(n, 512).bfloat16().to(device)
        sums, rows = torch.full((2, n, m), torch.nan, device=device), fp8_scratch(device, 64, 512)
        has_e4m3, launches.n = any(name == "fp8" for _, name in runs), 0
        narrow_linear(x, w, sums, rows=rows)
        assert launches.n == 1 + has_e4m3  # rows are rounded by a kernel
        for segment, columns, of in zip(
            w.segments, sums.split([height for height, _ in runs], -1), values.split([h for h, _ in runs]), strict=True
        ):
            close(columns.sum(0), multiplied(x, segment.format.name), of)
            alone = torch.full((2, n, segment.n), torch.nan, device=device)
            narrow_linear(x, Matrix(segment.n, 512, (segment,)), alone, rows=rows)
            if device != "cpu":  # the interpreter's sums have numpy's order, which follows the shape
                assert torch.equal(columns, alone)


def test_a_matrix_in_several_formats(device: str) -> None:
    w, values = put(device, 100, 256, (40, "Q4_K"), (10, "bf16"), (30, "Q6_K"), (20, "fp8"))
    x = torch.randn(64, 256).bfloat16().to(device)
    few, exactly = x[:5].contiguous(), x.double()
    for n in (3, 64, 40):
        sums = torch.full((2, n, 100), torch.nan, device=device)
        narrow_linear(x[:n], w, sums, rows=fp8_scratch(device, 64, 256))
        close(sums.sum(0)[:, :80], exactly[:n], values[:80])
        close(sums.sum(0)[:, 80:], e4m3_rows(x[:n]), values[80:])
        alone = torch.full((2, n, 10), torch.nan, device=device)
        narrow_linear(x[:n], Matrix(10, 256, (w.segments[1],)), alone)
        if device != "cpu":  # the interpreter's sums have numpy's order, which follows the shape
            assert torch.equal(sums[..., 40:50], alone)  # beside another segment as alone
    wide = torch.full((64, 100), torch.nan, device=device)
    wide_linear(x, w, wide, scratch=scratch(device, 64, w))
    close(wide[:, :80], exactly, values[:80])
    close(wide[:, 80:], e4m3_rows(x), values[80:])
    out, gate_up = torch.empty(5, 50, device=device, dtype=torch.bfloat16), torch.empty(1, 5, 100, device=device)
    narrow_swiglu(few, w, out, gate_up=gate_up, rows=fp8_scratch(device, 5, 256))
    both = torch.cat([exact(few, values[:80]), exact(e4m3_rows(few), values[80:])], 1)
    gate, up = both.chunk(2, 1)
    torch.testing.assert_close(out.double(), torch.nn.functional.silu(gate) * up, rtol=2**-7, atol=1e-4)
    rounded = torch.cat([*values[:80], *values[80:].bfloat16().double()]).view(100, 256)
    close(product(few, w), few.double(), rounded)


@pytest.mark.parametrize("name", ["int8", "Q6_K", "NVFP4", "fp8", "MXFP4"])
def test_an_embedding_in_any_format(device: str, name: str) -> None:
    """Not rounded."""
    w, _ = put(device, 20, 544, (20, name))
    expected = unpack(w.whole)[0][[19, 0, 7]]
    found = torch.full((3, 544), torch.nan, device=device)
    ids = torch.tensor([19, -1, 7], device=device, dtype=torch.int32)
    embed(ids, w, found)
    assert torch.equal(found, expected)
    pictures = torch.arange(544, device=device).bfloat16()[None]
    embed(ids, w, found, pictures)
    assert torch.equal(found[[0, 2]], expected[[0, 2]]) and torch.equal(found[1], pictures[0].float())
    rows = Rows(*(torch.zeros_like(ids) for _ in range(3)))
    begun, batch_slots = torch.full_like(found, torch.nan), torch.tensor([0, 1, 2], device=device, dtype=torch.int32)
    begin_decode(batch_slots, BatchState(ids, ids, ids, ids, ids), w, rows=rows, residual=begun)
    assert torch.equal(begun, expected)


@pytest.mark.parametrize("name", ["int8", "int4", "int4-symmetric"])
@pytest.mark.parametrize("k", [32, 288, 1024])
def test_what_is_rounded_at_load_is_what_a_cpu_makes(device: str, name: str, k: int) -> None:
    values = (np.random.default_rng(k).standard_normal((21, k)) * 0.05).astype(bfloat16)
    values[3], values[4, :40] = 0.0, 1.0
    w = Matrix.empty(21, k, WEIGHT_FORMATS[name], "rows", 1, DeviceStore(device).empty)
    DeviceStore(device).put(w.whole, values)
    assert np.array_equal(
        unpack(w.whole).cpu().numpy(), Matrix.empty(21, k, WEIGHT_FORMATS[name]).pack(values).unpack()
    )


def test_e4m3_is_rounded_by_blocks(device: str) -> None:
    """Of 128 x 128, within a matrix, and the same when rows come in two runs."""
    values = (np.random.default_rng(0).standard_normal((2 * 136, 160)) * 0.05).astype(bfloat16)
    values[128:136] = 0.0
    store, found = DeviceStore(device), []
    for runs in ((slice(0, 136),), (slice(0, 128), slice(128, 136))):
        w = Matrix.empty(136, 160, WEIGHT_FORMATS["fp8"], "rows", 2, store.empty)
        for run in runs:
            store.put(w.whole, np.concatenate([values[:136][run], values[136:][run]]), run.start)
        found.append(unpack(w.whole).cpu().numpy().reshape(-1, 160))
    assert np.array_equal(*found)
    floats = values.astype(np.float32)
    for rows in (slice(0, 128), slice(128, 136), slice(136, 264), slice(264, 272)):
        for group in (slice(0, 128), slice(128, 160)):
            wanted, rounded = np.abs(floats[rows, group]), np.abs(found[0][rows, group])
            errors = np.abs(found[0][rows, group] - floats[rows, group])
            assert (errors <= np.maximum(wanted / 16, wanted.max() / 448 / 1024 * 1.01)).all()
            assert np.allclose(rounded.max(), wanted.max(), rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_dummy_weights_are_as_large_as_they_would_be(device: str, name: str) -> None:
    store, block = DeviceStore(device), (np.random.default_rng(0).standard_normal(40_009) * 0.02).astype(bfloat16)
    w = Matrix.empty(24, 512, WEIGHT_FORMATS[name], "rows", 5, store.empty)
    w.whole.data.fill_(0x5A)  # a codebook is written, too
    store.tile(w.whole, block, 77)
    found = unpack(w.whole)
    assert 0.012 < float(found.std()) < 0.035 and abs(float(found.mean())) < 0.006
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in MADE])
def test_dummy_weights_make_nothing_of_what_inputs_have_in_common(name: str) -> None:
    """Inputs above 0 are met by as much below 0: else all tokens grow alike, and choose the same experts. A
    scale whose sign changed by rows alone left sums of up to 18 times what random weights have.
    """
    block = (np.random.default_rng(0).standard_normal((64, 2048)) * 0.02).astype(bfloat16)
    values = _random(WEIGHT_FORMATS[name], block).values()
    assert np.square(values.sum(1)).mean() < 3 * 2048 * values.var()


def test_dummies_in_e4m3_are_in_blocks(device: str) -> None:
    """As published checkpoints are, wherever a matrix begins in the values that are repeated."""
    store, block = DeviceStore(device), (np.random.default_rng(0).standard_normal(400_009) * 0.02).astype(bfloat16)
    w = Matrix.empty(384, 256, WEIGHT_FORMATS["fp8"], "rows", 3, store.empty)
    store.tile(w.whole, block, 256 * 717)
    for i in range(3):
        scale = scales_of(w.whole.one(i))
        assert torch.equal(scale, by_blocks(scale)) and len(scale.unique()) == 6
    found = [Matrix.empty(256, 17_408, WEIGHT_FORMATS["fp8"], "rows", 1, store.empty) for _ in range(2)]
    for i, each in enumerate(found):  # of long rows there is little more than one block
        store.tile(each.whole, block, 17_408 * 130 * i)
    assert not torch.equal(scales_of(found[0].whole), scales_of(found[1].whole))


@pytest.mark.parametrize(("sms", "shared"), [(132, 227 * 1024), (108, 163 * 1024), (142, 99 * 1024)])
def test_configurations_fit(monkeypatch: pytest.MonkeyPatch, sms: int, shared: int) -> None:
    target = HOPPER.target if shared > 128 * 1024 else CHIPS["sm_120"].target
    monkeypatch.setattr(linear, "chip", lambda: replace(HOPPER, target=target, n_sms=sms, shared_bytes=shared))
    for m, k, splits in (
        (34816, 5120, 1),
        (5120, 17408, 4),
        (1024, 3584, 8),
        (8224, 1024, 1),
        (72, 96, 1),
        (256, 256, 1),
    ):
        for name in ("fp8", "Q4_K", "Q6_K", "int4-g128-bfloat16"):
            format = WEIGHT_FORMATS[name]
            for n in (1, 8, 16, 48, 128, 256):
                width = k // splits
                c = linear.decoded_config(n, m, width, splits, format)
                assert width % (c.block_k * c.unroll) == 0 and (name != "fp8" or c.block_k == k_block(width))
                a_stage = c.unroll * linear.decoded_block_bytes(c.block_m, c.block_k, n, format)
                decoded = 2 * c.unroll * c.block_m * c.block_k
                small = shared < 128 * 1024 and c.num_stages > 2
                assert not small or c.num_stages * a_stage + decoded <= shared, "what is decoded has room, too"
                assert c.num_stages * a_stage <= shared
