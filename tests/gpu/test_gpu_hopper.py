"""The product of hopper.cu: it has the bits of Triton's kernels for every width, and it compiles for sm_90a without spills."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from torch import Tensor

from deltic.models.qwen.gpu_linears import Linears
from deltic.ops.arrays import bfloat16
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.gpu import hopper, linear, norm
from deltic.ops.gpu.chip import HOPPER, chip, described
from deltic.ops.gpu.fp8 import block_scales, fp8_rows
from deltic.ops.gpu.launch import Levers, allocate_on, launches
from deltic.ops.gpu.linear import Narrow, decoded_config, narrow_config, narrow_linear, narrow_swiglu
from deltic.ops.gpu.weight import DeviceStore
from deltic.ops.matrix import Matrix, planes
from tests.quantised_rows import random_rows

on_hopper = pytest.mark.skipif(not torch.cuda.is_available() or not chip().is_hopper, reason="needs a Hopper GPU")
FP8 = hopper.HopperFormat(hopper.E4M3)
BLOCKS = hopper.HopperFormat(hopper.E4M3, in_blocks=True)
INT4 = hopper.HopperFormat(hopper.CODES, 128)
SMALL_GROUPS = hopper.HopperFormat(hopper.CODES, 32, True, 2)
INTEGERS = ("int4-g128-bfloat16", "int4-g64-float16.zero", "int4", "Q4_0")


@pytest.mark.parametrize("side", [0, 32, 96])
@pytest.mark.parametrize("name", ["fp8", "bf16", "int4-g128-bfloat16", "int4-g64-float16.zero", "Q4_1"])
@pytest.mark.parametrize("n", [33, 64, 65, 128, 500])
def test_kernels_fill_the_chip(n: int, name: str, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    form = hopper.hopper_format(WEIGHT_FORMATS[name])
    assert form is not None
    monkeypatch.setattr(described, "chip", HOPPER)
    for m, splits in ((5120, 4), (34816, 1), (5120, 2), (16384, 1), (1024, 8), (96, 1), (248320, 1)):
        kernel = hopper.kernel_for(n, m, splits, form, side)
        if form.kind == hopper.CODES:
            assert kernel.width % 64 == 0 and 2 <= kernel.groups <= hopper.MOST_GROUPS[kernel.tokens]
        else:
            assert kernel.width in hopper.WIDTHS and kernel.tokens == (64 if n <= 64 else 128)
        assert kernel.side_width % 16 == 0 and kernel.beside.rows < side + 32
        assert bool(kernel.side_width) == bool(side)
        free = hopper.shared_bytes() - hopper.ALIGNMENTS - kernel.codes[0] * kernel.codes[1]
        assert kernel.stage_bytes * 3 < free, "three blocks on their way"
    # one program for each multiprocessor, all with as many rows as they can be equal in
    assert hopper.kernel_for(64, 5120, 4, FP8) == hopper.Kernel(80, 64, FP8)
    assert hopper.kernel_for(128, 5120, 4, FP8) == hopper.Kernel(160, 128, FP8)
    # what is beside it has the multiprocessors that are left
    assert hopper.kernel_for(128, 16384, 1, FP8, 96) == hopper.Kernel(128, 128, FP8, 32)
    # of codes 64 to each group of warps, as many as one wave needs
    assert hopper.kernel_for(64, 5120, 4, INT4) == hopper.CodesKernel(192, 64, INT4)
    assert hopper.kernel_for(64, 34816, 1, INT4) == hopper.CodesKernel(320, 64, INT4)
    assert hopper.kernel_for(96, 34816, 1, INT4) == hopper.CodesKernel(192, 96, INT4)
    assert hopper.kernel_for(256, 16384, 1, INT4) == hopper.CodesKernel(128, 128, INT4)


def test_few_rows_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All programs, with three blocks on their way in each; what would not goes to Triton."""
    monkeypatch.setattr(described, "chip", HOPPER)
    monkeypatch.setattr(hopper, "works", lambda: True)

    def chosen(n: int, m: int, k: int, splits: int, swiglu: bool = False, side: int = 0) -> hopper.Kernel | None:
        runs = [(m, WEIGHT_FORMATS["fp8"]), *([(side, WEIGHT_FORMATS["bf16"])] if side else [])]
        w = Matrix.empty(m + side, k, runs, "rows", 1, DeviceStore("meta").empty)
        out = torch.empty((n, m // 2) if swiglu else (splits, n, w.n), device="meta")
        columns = [out] if swiglu else out.split([segment.n for segment in w.segments], -1)
        parts = list(zip(w.segments, columns, strict=True))
        with Levers().bound():
            assert hopper.pays(n, parts, swiglu, True) == (hopper._few_kernel(n, parts, swiglu) is not None)
            assert not hopper.pays(n, parts, swiglu, False)
        return hopper._few_kernel(n, parts, swiglu)

    for n in (1, 8, 9, 16):
        tokens = 8 if n <= 8 else 16
        assert chosen(n, 34816, 5120, 1, swiglu=True) == hopper.FewKernel(272, tokens, BLOCKS, swiglu=True)
        assert chosen(n, 16384, 5120, 1, side=96) == hopper.FewKernel(128, tokens, BLOCKS, 32)
        assert chosen(n, 5120, 17408, 4) == hopper.FewKernel(160, tokens, BLOCKS)
    assert chosen(1, 248320, 5120, 1) is None and chosen(16, 12288, 2048, 1, side=64) is not None
    for width, n_blocks in ((272, 40), (320, 200), (32, 8)):
        kernel = hopper.FewKernel(width, 16, BLOCKS)
        free = hopper.shared_bytes() - hopper.ALIGNMENTS - kernel.table_bytes(n_blocks)
        assert kernel.stage_bytes * 3 < free
    # behind a norm of long rows nobody stands beside, and one multiprocessor is left
    kernel = hopper.FewKernel(128, 8, BLOCKS, 32)
    assert hopper._room(kernel, 5120, 1) == HOPPER.shared_bytes > hopper._room(kernel, 5120, 2) == hopper.shared_bytes()
    assert hopper._room(kernel.beside, 5120, 1) == HOPPER.shared_bytes and not hopper._is_alone(2048, 1)
    assert HOPPER.n_sms - 1 == -(-16384 // 128) + -(-96 // 32)


@pytest.mark.parametrize("n, width, block_k, is_early", [(1, 5120, 128, True), (16, 5120, 128, True), (17, 5120, 128, False),
                                                         (1, 2048, 128, False), (1, 5120, 0, False)])  # fmt: skip
def test_norms_of_few_long_rows_let_a_product_start(
    n: int, width: int, block_k: int, is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(norm, "launch", lambda *_, EARLY, **__: told.append(EARLY))
    x, rows = torch.empty(n, width, device="meta"), fp8_rows("rows", n, width, allocate_on("meta"))
    norm.add_norm(x, None, x[0], 1e-6, x.bfloat16(), codes=rows.rounded_by(block_k))
    assert told == [is_early]


def test_what_cannot_compile_is_told_and_not_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(kernel: hopper.Kernel) -> bytes:
        raise RuntimeError("no builtins")

    monkeypatch.setattr(hopper, "_compile", fail)
    monkeypatch.setattr(hopper, "nvrtc", object())
    monkeypatch.setattr(hopper, "INTERPRETED", False)
    monkeypatch.setattr(described, "chip", HOPPER)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    hopper._has_compiler.cache_clear()
    try:
        assert not hopper.works() and not hopper.works()
        (said,) = (record.message for record in caplog.records)
        assert "Triton multiplies e4m3, and 33 rows and more, slower: no builtins" in said
    finally:
        hopper._has_compiler.cache_clear()


@pytest.mark.parametrize(
    "kernel",
    [hopper.Kernel(160, 128, FP8), hopper.Kernel(160, 128, BLOCKS), hopper.Kernel(144, 64, BLOCKS), hopper.Kernel(128, 128, FP8, 96),
     hopper.Kernel(64, 64, FP8, 48), hopper.Kernel(160, 128, hopper.HopperFormat(hopper.BF16)), hopper.FewKernel(272, 16, BLOCKS, swiglu=True),
     hopper.FewKernel(160, 8, BLOCKS), hopper.FewKernel(128, 16, BLOCKS, 32), hopper.CodesKernel(192, 128, SMALL_GROUPS, 96),
     hopper.CodesKernel(320, 64, SMALL_GROUPS), hopper.CodesKernel(128, 64, SMALL_GROUPS, 48), hopper.CodesKernel(192, 128, INT4), hopper.CodesKernel(256, 96, INT4)],
    ids=str,
)  # fmt: skip
def test_it_compiles_without_spills(kernel: hopper.Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if hopper.nvrtc is None:
        pytest.skip("NVRTC comes with torch for CUDA")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    code = hopper._compile(kernel)
    (file,) = tmp_path.glob("deltic-*.cubin")
    assert file.read_bytes() == code == hopper._compile(kernel)
    tool = triton.knobs.nvidia.cuobjdump.path
    said = subprocess.run([tool, "-res-usage", str(file)], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    most = 112 if isinstance(kernel, hopper.FewKernel) else 168
    assert registers <= most and stack == 0, said


def rows_in(name: str, *runs: int, k: int) -> Matrix:
    """A matrix of random rows: as many as `runs` say, the second run of them in bf16. name: of a format, or
    "fp8 in blocks": blocks of 128 x 128 have a scale each.
    """
    name, in_blocks = name.removesuffix(" in blocks"), name.endswith(" in blocks")
    store, formats = DeviceStore("cuda"), (name, "bf16")
    w = Matrix.empty(
        sum(runs), k, [(n, WEIGHT_FORMATS[f]) for n, f in zip(runs, formats, strict=False)], "rows", 1, store.empty
    )
    for segment in w.segments:
        if segment.format.codes == "bf16":
            store.put(segment, torch.randn(segment.n, k).bfloat16().view(torch.int16).numpy().view(bfloat16))
        else:
            store.put(segment, random_rows(segment.format.name, segment.n, k))
        if in_blocks and segment.format.codes == "e4m3":
            at, size = planes(segment.n, k, segment.format)["scale"]
            scales = segment.data.view(-1)[at : at + size].view(torch.float32).view(-1, segment.n // 128, 128)
            scales.copy_(scales[..., :1].expand_as(scales))
            assert block_scales(segment) is not None
    return w


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def config_for(n: int, w: Matrix, splits: int) -> Narrow:
    size, format = (
        (n, w.whole.n if len(w.segments) == 1 else w.segments[0].n, w.k // splits, splits),
        w.segments[0].format,
    )
    return narrow_config(*size) if format.codes == "bf16" else decoded_config(*size, format)


@pytest.mark.parametrize("name", ["fp8", "fp8-group", "fp8-row", "bf16", "int4-g128-bfloat16"])
def test_only_what_a_format_uses_is_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of e4m3 that is stored in blocks of 128 x 128 the kernel that knows it."""
    begun: list[hopper.Kernel] = []
    monkeypatch.setattr(hopper, "works", lambda: True)
    monkeypatch.setattr(hopper, "begin", begun.append)
    monkeypatch.setattr(launches, "compile_only", True)
    w = Matrix.empty(1024, 4096, WEIGHT_FORMATS[name], "rows", 1, DeviceStore("meta").empty)
    rows = fp8_rows("rows", 64, 4096, allocate_on("meta"))
    x, out = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta"), torch.empty(8, 64, 1024, device="meta")
    Linears([("w", w)]).project("w", x, out, rows)
    assert [kernel.form.in_blocks for kernel in begun] == [name == "fp8"]


@on_hopper
@pytest.mark.parametrize("name", ["fp8", "fp8 in blocks", "bf16", *INTEGERS])
@pytest.mark.parametrize(
    "runs, k, splits",
    [((16384,), 512, 1), ((1024,), 2048, 4), ((864,), 1024, 1), ((5120,), 1024, 2), ((2048, 96), 512, 1), ((1536, 64), 512, 2),
     ((256, 32), 1024, 1)],
)  # fmt: skip
def test_it_has_the_bits_of_the_narrow_kernel(
    monkeypatch: pytest.MonkeyPatch, name: str, runs: tuple[int, ...], k: int, splits: int
) -> None:
    if name == "bf16" and splits == 1:
        pytest.skip("what is not cut is faster elsewhere")
    if name == "fp8 in blocks" and runs[0] % 128:
        pytest.skip("blocks of 128 rows")
    if name == "bf16" and len(runs) > 1:
        pytest.skip("rows of one format are one segment")
    for most in ("MOST_BF16", "MOST_WHOLE", "MOST_CODES"):
        monkeypatch.setattr(hopper, most, 1024)
    monkeypatch.setattr(hopper, "FEWEST_SMALL_GROUPS", hopper.FEWEST)
    w = rows_in(name, *runs, k=k)
    blocks = block_scales(w.segments[0])
    assert (blocks is not None) == (name == "fp8 in blocks")
    few = (1, 3, 8, 9, 16) if blocks is not None else ()
    for n in (*few, 36, 64, 68, 128, 132, 300, 512):
        x = torch.randn(n, k, generator=torch.Generator().manual_seed(n)).cuda().bfloat16()
        rows = fp8_rows("rows", n, k, lambda _, size, dtype: torch.empty(size, device="cuda", dtype=dtype))
        ours, theirs = (torch.full((splits, n, w.n), torch.nan, device="cuda") for _ in range(2))
        narrow_linear(x, w, theirs, rows=rows, config=config_for(n, w, splits))
        parts = list(zip(w.segments, ours.split([segment.n for segment in w.segments], -1), strict=True))
        assert hopper.pays(n, parts, False, blocks is not None)
        narrow_linear(x, w, ours, rows=rows, blocks=blocks)
        assert same(ours, theirs) and not ours.isnan().any(), n
        if splits == 1 == len(runs) and name.startswith("fp8"):
            half, theirs_half = (torch.full((n, w.n), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            narrow_linear(x, w, half, rows=rows, blocks=blocks)
            narrow_linear(x, w, theirs_half, rows=rows, config=config_for(n, w, 1))
            assert same(half, theirs_half), "rounded once"


@on_hopper
@pytest.mark.parametrize("name", ["fp8", "fp8 in blocks", "bf16", *INTEGERS])
@pytest.mark.parametrize("m, k", [(34816, 256), (1024, 512), (256, 1024), (288, 1024)])
def test_it_has_the_bits_of_the_narrow_swiglu(monkeypatch: pytest.MonkeyPatch, name: str, m: int, k: int) -> None:
    if name == "fp8 in blocks" and m % 128:
        pytest.skip("blocks of 128 rows")
    for most in ("MOST_BF16", "MOST_SWIGLU", "MOST_CODES"):
        monkeypatch.setattr(hopper, most, 1024)
    monkeypatch.setattr(hopper, "FEWEST_SMALL_GROUPS", hopper.FEWEST)
    w = rows_in(name, m, k=k)
    blocks = block_scales(w.whole)
    few = ((1, 5, 16) if blocks is not None else ()) + ((20, 32) if name.startswith("fp8") else ())
    for n in (*few, 36, 64, 68, 128, 300):
        x = torch.randn(n, k, generator=torch.Generator().manual_seed(n)).cuda().bfloat16() * 3
        rows = fp8_rows("rows", n, k, lambda _, size, dtype: torch.empty(size, device="cuda", dtype=dtype))
        ours, theirs = (torch.full((n, m // 2), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        with monkeypatch.context() as patch:
            patch.setattr(linear, "VENDOR_ROWS", 1 << 30)
            with Levers(hopper=False).bound():
                narrow_swiglu(x, w, theirs, rows=rows)
        assert hopper.pays(n, [(w.whole, ours)], True, blocks is not None)
        narrow_swiglu(x, w, ours, rows=rows, blocks=blocks)
        assert same(ours, theirs) and not ours.isnan().any(), n


@on_hopper
def test_rows_do_not_see_each_other() -> None:
    """A row alone among padding, among others, and at another place has the same bits."""
    w, k = rows_in("fp8", 1024, k=2048), 2048
    x = torch.randn(128, k).cuda().bfloat16()
    found = []
    for n, place in ((64, 3), (128, 3), (128, 100)):
        given = torch.roll(x, place - 3, 0)[:n].contiguous()
        rows = fp8_rows("rows", n, k, lambda _, size, dtype: torch.empty(size, device="cuda", dtype=dtype))
        out = torch.full((4, n, 1024), torch.nan, device="cuda")
        narrow_linear(given, w, out, rows=rows)
        found.append(out[:, place])
    assert same(found[0], found[1]) and same(found[0], found[2])
