"""How fast are linears whose weights are quantised, next to what the memory gives?

For three weights of 27B and the formats that are published most: narrow_linear by rows of x, as packed bytes
a second and as a share of the read bandwidth of the same run; wide_linear by rows, as operations a second and
as a share of the vendor's bfloat16 product. Weights are cold: a graph walks through copies that do not fit
into the L2 cache. Each product is checked against float32 on the device; bit for bit a row alone against the
same row among 128, and a wide product of 1024 rows against one of 64. Kernels are compiled first, by all
cores. `python -m bench.gpu.formats [--format NAME ...]`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from bench.gpu.experiment import DEVICE, graph_us, parser, run
from deltic.machine import n_usable_cpus
from deltic.ops.arrays import bfloat16
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.gpu.launch import Levers
from deltic.ops.gpu.linear import k_splits, narrow_linear, wide_linear, wide_scratch
from deltic.ops.gpu.operands import decode
from deltic.ops.gpu.roofs import GpuRoofs
from deltic.ops.gpu.weight import DeviceStore
from deltic.ops.matrix import Matrix
from deltic.runtime.gpu.compile import Compilation, collecting, fix_keys

SHAPES = {"gate_up": (34816, 5120), "down": (5120, 17408), "in_proj": (16480, 5120)}
FORMATS = ("bf16", "fp8", "int4-g128-bfloat16", "Q4_K", "Q6_K", "Q8_0", "NVFP4", "MXFP4")
NARROW, WIDE = (1, 4, 16, 64, 128), (1024, 8192)
COLD_BYTES = 256 << 20


def copies(m: int, k: int, name: str, device: str = DEVICE) -> list[Matrix]:
    """The same matrix again and again, until the L2 cache does not hold them."""
    format = WEIGHT_FORMATS[name]
    n = max(2, -(-COLD_BYTES // Matrix.empty(m, k, format, "rows", 1, DeviceStore("meta").empty).n_bytes))
    store = DeviceStore(device)
    w = Matrix.empty(m, k, format, "rows", n, store.empty)
    if device == DEVICE:
        block = (np.random.default_rng(0).standard_normal(4_194_301, np.float32) * k**-0.5).astype(bfloat16)
        store.tile(w.whole.one(0), block, 0)
        w.whole.data[1:] = w.whole.data[0]
    return [Matrix(m, k, (w.whole.one(i),)) for i in range(n)]


def calls(w: Matrix, n: int, device: str = DEVICE) -> Callable[[Matrix], torch.Tensor]:
    """A product of n rows with a matrix like w, into one out."""
    x = torch.empty(n, w.k, device=device, dtype=torch.bfloat16)
    if device == DEVICE:
        x.copy_(
            torch.randn(max(NARROW), w.k, generator=torch.Generator().manual_seed(n))[torch.arange(n) % max(NARROW)]
        )
    if n in NARROW:
        out = torch.empty(k_splits(w.n, w.k), n, w.n, device=device)
    else:
        out = torch.empty(n, w.n, device=device, dtype=torch.bfloat16)
    scratch = wide_scratch(
        n, w.n * w.k, w.k, {w.whole.format.codes}, lambda _, size, dtype: torch.empty(size, device=device, dtype=dtype)
    )

    def call(matrix: Matrix) -> torch.Tensor:
        if n in NARROW:
            narrow_linear(x, matrix, out, rows=scratch.rows)
        else:
            wide_linear(x, matrix, out, scratch=scratch)
        return out

    return call


def cold_us(call: Callable[[Matrix], torch.Tensor], matrices: list[Matrix]) -> float:
    def step() -> None:
        for w in matrices:
            call(w)

    return graph_us(step, len(matrices))


def compile_all(names: tuple[str, ...]) -> None:
    fix_keys()
    with collecting() as jobs:
        for m, k in SHAPES.values():
            for name in names:
                w = copies(m, k, name, "meta")[0]
                for n in (*NARROW, *WIDE):
                    calls(w, n, "meta")(w)
                for dtype in (torch.float32, torch.bfloat16):
                    decode(w.whole, torch.empty(1, m, k, device="meta", dtype=dtype))
    compilation = Compilation(n_usable_cpus())
    compilation.give(list(jobs))
    report = compilation.wait(lambda stage, done: None)
    print(
        f"{report.n_kernels} kernels, {report.n_failed} failed {compilation.errors[:2]}, {report.seconds:.1f} s",
        flush=True,
    )


def check(w: Matrix) -> dict[str, object]:
    """How far a product is from float32's, relative to the sum of what is added, and which bits agree."""
    x = torch.randn(1024, w.k, device=DEVICE).bfloat16()
    values = torch.empty(1, w.n, w.k, device=DEVICE)
    if w.whole.format.codes == "e4m3":
        decode(w.whole, values)
    else:
        operands = torch.empty_like(values, dtype=torch.bfloat16)
        decode(w.whole, operands)
        values.copy_(operands)
    few, splits = x[:128], k_splits(w.n, w.k)
    sums, alone = (torch.empty(splits, n, w.n, device=DEVICE) for n in (128, 1))
    scratch = wide_scratch(
        1024,
        w.n * w.k,
        w.k,
        {w.whole.format.codes},
        lambda _, size, dtype: torch.empty(size, device=DEVICE, dtype=dtype),
    )
    narrow_linear(few, w, sums, rows=scratch.rows)
    narrow_linear(few[:1], w, alone, rows=scratch.rows)
    exact, size = few.float() @ values[0].t(), few.float().abs() @ values[0].abs().t()
    many, some = (torch.empty(n, w.n, device=DEVICE, dtype=torch.bfloat16) for n in (1024, 64))
    wide_linear(x, w, many, scratch=scratch)
    wide_linear(x[64:128], w, some, scratch=scratch)
    return {
        "error": ((sums.sum(0) - exact) / size).abs().max().item(),
        "alone": torch.equal(alone[:, 0], sums[:, 0]),
        "wide_error": ((many[:128].float() - exact).norm() / exact.norm()).item(),
        "few_of_wide": torch.equal(some, many[64:128]),
    }


def measure(shape: str, names: tuple[str, ...], roofs: GpuRoofs, row: Callable[..., None]) -> None:
    m, k = SHAPES[shape]
    for name in names:
        all_ = copies(m, k, name)
        row(shape=shape, format=name, **check(all_[0]))
        for n in (*NARROW, *WIDE):
            some = all_ if n in NARROW else all_[:2]
            call = calls(some[0], n)
            us = cold_us(call, some)
            if n in NARROW:
                rate = some[0].n_bytes / us * 1e6
                row(shape=shape, format=name, n=n, us=us, GB_s=rate / 1e9, share=rate / roofs.read)
            else:
                rate = 2e6 * n * m * k
                row(shape=shape, format=name, n=n, us=us, TFLOP_s=rate / us / 1e12, share=rate / us / roofs.multiply)
        del all_


@Levers(pdl=False).bound()
def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--format", action="append", metavar="NAME", choices=tuple(WEIGHT_FORMATS), help="only these")
    flags.add_argument("--shape", action="append", metavar="NAME", choices=tuple(SHAPES), help="only these")
    arguments: argparse.Namespace = flags.parse_args()
    names = tuple(arguments.format or FORMATS)
    compile_all(names)
    roofs = GpuRoofs.measured()
    print(f"roofs: {roofs.read / 1e9:.0f} GB/s read, {roofs.multiply / 1e12:.0f} TFLOP/s", flush=True)
    parts = {shape: partial(measure, shape, names, roofs) for shape in arguments.shape or SHAPES}
    run("formats", parts, arguments)


if __name__ == "__main__":
    main()
