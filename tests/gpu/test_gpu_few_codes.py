"""hopper_few_codes.cu: its bits, on a CPU, where its threads, barriers and copies are played; it compiles for sm_90a without spills."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from deltic.ops.arrays import Array, bfloat16
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.gpu import few_codes, hopper
from deltic.ops.gpu.chip import HOPPER, described
from deltic.ops.gpu.launch import Levers
from deltic.ops.gpu.linear import narrow_linear, narrow_swiglu
from deltic.ops.gpu.weight import DeviceStore
from deltic.ops.matrix import Matrix, Segment
from tests.gpu.hopper_on_cpu import Kernels, Map
from tests.gpu.test_gpu_hopper import config_for, on_hopper, rows_in, same
from tests.quantised_rows import operands, random_rows

FORMATS = [name for name, format in WEIGHT_FORMATS.items() if format.codes != "bf16" and few_codes._fits(format)]

SHORT = ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS", "MXFP4", "int4-g128-bfloat16", "int8-g32-bfloat16.zero")
"""Formats of the tests that are not long: each way to make operands."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def small_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper with few multiprocessors, whose maps are those of the CPU."""
    monkeypatch.setattr(few_codes, "TensorMap", Map)
    monkeypatch.setattr(described, "chip", replace(HOPPER, n_sms=5))


def matrix(runs: list[tuple[int, str]], k: int) -> tuple[Matrix, list[Array]]:
    """A matrix of random rows, and the operands of each run, float64."""
    store = DeviceStore("cpu")
    w = Matrix.empty(sum(n for n, _ in runs), k, [(n, WEIGHT_FORMATS[f]) for n, f in runs], "rows", 1, store.empty)
    found = []
    for i, segment in enumerate(w.segments):
        if segment.format.codes == "bf16":
            values = torch.randn(segment.n, k, generator=torch.Generator().manual_seed(i)).bfloat16()
            store.put(segment, values.view(torch.int16).numpy().view(bfloat16))
            found.append(values.double().numpy())
        else:
            rows = random_rows(segment.format.name, segment.n, k, seed=i)
            store.put(segment, rows)
            found.append(operands(rows))
    return w, found


def sums(x: Tensor, w: Array, splits: int) -> Array:
    """float32 [S, N, M]: 16 of K at once, in order, rounded once each."""
    rows, (m, k) = x.double().numpy(), w.shape
    out = np.zeros((splits, len(rows), m), np.float32)
    for s in range(splits):
        for at in range(s * k // splits, (s + 1) * k // splits, 16):
            exact = out[s].astype(np.float64)
            for column in range(at, at + 16):
                exact += rows[:, None, column] * w[None, :, column]
            out[s] = exact.astype(np.float32)
    return out


def rows_of_x(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n)).bfloat16()


def parts_of(w: Matrix, out: Tensor) -> list[tuple[Segment, Tensor]]:
    return list(zip(w.segments, out.split([segment.n for segment in w.segments], -1), strict=True))


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in FORMATS]
)
def test_sums_have_the_order_of_k(name: str, kernels: Kernels, small_chip: None) -> None:
    """Of every format: its operands, 16 columns after 16, in one sum."""
    n, m, k, splits = (1, 144, 512, 1) if FORMATS.index(name) % 2 else (16, 96, 1024, 2)
    w, (made,) = matrix([(m, name)], k)
    x, out = rows_of_x(n, k), torch.full((splits, n, m), torch.nan)
    assert kernels.multiply(x, [(w.whole, out)]) == ""
    assert np.array_equal(out.numpy(), sums(x, made, splits))


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_rows_do_not_see_each_other(name: str, kernels: Kernels, small_chip: None) -> None:
    """1 to 16 rows: each has the bits that it has alone, and nothing is written behind the last."""
    w, (made,) = matrix([(80, name)], 256)
    x = rows_of_x(16, 256)
    right = sums(x, made, 1)
    for n in range(1, 17):
        out = torch.full((1, 16, 80), torch.nan)
        assert kernels.multiply(x[:n].contiguous(), [(w.whole, out[:, :n])], seed=n) == ""
        assert np.array_equal(out[:, :n].numpy(), right[:, :n]) and out[:, n:].isnan().all()


@pytest.mark.parametrize("n", [3, 12])
@pytest.mark.parametrize("sms, shared", [(5, 227), (2, 227), (2, 170), (1, 227)])
def test_programs_take_turns(
    n: int, sms: int, shared: int, kernels: Kernels, small_chip: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than run at once, in rings of two stages and more; two tiles of a warp, of which the last may be none."""
    monkeypatch.setattr(described, "chip", replace(HOPPER, n_sms=sms, shared_bytes=shared * 1024))
    w, (made,) = matrix([(560, "Q5_K")], 512)
    x, out = rows_of_x(n, 512), torch.full((2, n, 560), torch.nan)
    plan = few_codes.plan_of(n, [(w.whole, out)], False)
    assert plan is not None and (shared == 227 or plan.stages == (2,))
    assert kernels.multiply(x, [(w.whole, out)]) == ""
    assert np.array_equal(out.numpy(), sums(x, made, 2))


@pytest.mark.parametrize("name", ["Q4_K", "int4-g128-bfloat16", "IQ4_XS"])
@pytest.mark.parametrize("n, width", [(1, 80), (16, 176)])
def test_swiglu_is_that_of_the_sums(n: int, width: int, name: str, kernels: Kernels, small_chip: None) -> None:
    """To an eighth bit: the chip's exp2 and division are not a CPU's."""
    w, (made,) = matrix([(2 * width, name)], 256)
    x, out = 8 * rows_of_x(n, 256), torch.full((n, width + 8), torch.nan, dtype=torch.bfloat16)
    assert kernels.multiply(x, [(w.whole, out[:, :width])], swiglu=True) == ""
    both = torch.from_numpy(sums(x, made, 1)[0]).double()
    right = torch.nn.functional.silu(both[:, :width]) * both[:, width:]
    assert torch.allclose(out[:, :width].double(), right, rtol=2**-7, atol=1e-30)
    assert right.abs().max() > 1e-3 and out[:, width:].isnan().all()


@pytest.mark.parametrize("n", [1, 9])
def test_segments_stand_beside_each_other(
    n: int, kernels: Kernels, small_chip: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In_proj of a mixed file: three formats, one of them bfloat16, in one launch."""
    monkeypatch.setattr(described, "chip", replace(HOPPER, n_sms=9))
    runs = [(192, "Q6_K"), (96, "Q4_K"), (32, "bf16")]
    w, made = matrix(runs, 512)
    x, out = rows_of_x(n, 512), torch.full((1, n, 320), torch.nan)
    assert kernels.multiply(x, parts_of(w, out)) == ""
    assert np.array_equal(out.numpy(), np.concatenate([sums(x, each, 1) for each in made], -1))


def test_some_rows_are_rounded_once(kernels: Kernels, small_chip: None) -> None:
    """Bfloat16 out, and the first 128 rows of a higher matrix."""
    w, (made,) = matrix([(192, "Q8_0")], 256)
    x, out = rows_of_x(5, 256), torch.full((5, 160), torch.nan, dtype=torch.bfloat16)
    assert kernels.multiply(x, [(w.whole, out[:, :128])]) == ""
    right = torch.from_numpy(sums(x, made, 1)[0, :, :128]).bfloat16()
    assert torch.equal(out[:, :128], right) and out[:, 128:].isnan().all()


def test_all_multiprocessors_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of 27B: one wave of programs with as many rows as they can be equal in, and a ring of 64 KB and more."""
    monkeypatch.setattr(described, "chip", HOPPER)

    def chosen(
        n: int, runs: list[tuple[int, str]], k: int, splits: int = 1, swiglu: bool = False
    ) -> few_codes.FewPlan | None:
        w = Matrix.empty(
            sum(m for m, _ in runs), k, [(m, WEIGHT_FORMATS[f]) for m, f in runs], "rows", 1, DeviceStore("meta").empty
        )
        out = torch.empty((n, w.n // 2) if swiglu else (splits, n, w.n), device="meta")
        parts = [(w.whole, out)] if swiglu else parts_of(w, out)
        with Levers().bound(), monkeypatch.context() as patch:
            patch.setattr(hopper, "works", lambda: True)
            plan = few_codes.plan_of(n, parts, swiglu)
            is_slower = n > 8 and runs[0][1].startswith("int4")  # a card has timed it
            assert few_codes.pays(n, parts, swiglu) == (plan is not None and not is_slower)
        return plan

    for name in ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS", "int4-g128-bfloat16"):
        for n in (1, 16):
            for m, k, splits, swiglu, tiles in (
                (34816, 5120, 1, True, 17), (5120, 17408, 4, False, 10), (5120, 6144, 2, False, 5), (16384, 5120, 1, False, 8),
            ):  # fmt: skip
                plan = chosen(n, [(m, name)], k, splits, swiglu)
                assert plan is not None and plan.tiles == (tiles,) and plan.programs == (128,)
                stage = few_codes.stage_of(plan.kernel.forms[0], tiles, plan.kernel.tokens)
                assert stage.n_bytes * (plan.stages[0] - 1) > 64 * 1024
                assert stage.n_bytes * plan.stages[0] < hopper.shared_bytes() and plan.kernel.warps == tiles
    mixed = chosen(1, [(10240, "Q6_K"), (6144, "Q4_K"), (96, "bf16")], 5120)
    assert mixed is not None and sum(mixed.programs) <= HOPPER.n_sms and mixed.tiles == (8, 10, 3)
    head = chosen(1, [(248320, "Q6_K")], 5120)
    assert head is not None and head.programs == (HOPPER.n_sms,) and head.tiles[0] >= 16
    no = (
        (17, "Q4_K", 5120),
        (1, "IQ2_S", 5120),
        (1, "NVFP4", 5120),
        (1, "fp8", 5120),
        (1, "bf16", 5120),
        (1, "Q8_0", 5120 - 128),
    )
    for n, name, k in no:
        assert chosen(n, [(4096, name)], k) is None
    assert chosen(1, [(4096 + 8, "Q8_0")], 5120) is None


FORMS = {
    "gate_up": (["Q4_K"], 16, 17, True), "in_proj": (["Q6_K", "Q4_K", "bf16"], 16, 10, False),
    "down": (["Q5_K"], 8, 10, False), "zeros": (["int4-g32-float16.zero"], 16, 20, True), "head": (["Q6_K"], 16, 20, False),
    "bytes": (["int8-g32-bfloat16.zero", "bf16"], 16, 20, False), "table": (["IQ4_XS"], 16, 20, True),
    "two bits": (["Q2_K"], 16, 20, True), "three bits": (["Q3_K"], 16, 20, True),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_it_compiles_without_spills(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By NVRTC, which comes with torch, or by nvcc: 21 warps have 96 registers for a thread."""
    formats, tokens, warps, swiglu = FORMS[name]
    forms = tuple(few_codes.FewForm(WEIGHT_FORMATS[format]) for format in formats)
    kernel = few_codes.FewCodes(forms, tokens, warps, swiglu)
    file = tmp_path / "kernel.cubin"
    if hopper.nvrtc is not None:
        monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
        file.write_bytes(hopper._compile(kernel))
    elif nvcc := shutil.which("nvcc"):
        source = file.with_suffix(".cu")
        source.write_text(kernel.source())
        subprocess.run([nvcc, "-arch=sm_90a", "-std=c++17", "-cubin", "-o", str(file), str(source)], check=True)
    else:
        pytest.skip("NVRTC comes with torch for CUDA; there is no nvcc either")
    tool = triton.knobs.nvidia.cuobjdump.path
    said = subprocess.run([tool, "-res-usage", str(file)], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    assert registers * kernel.threads <= 65536 and stack == 0, said


SHAPES = (((2048, 96), 512, 1), ((16384,), 512, 1), ((1024,), 2048, 4), ((5120,), 1024, 2), ((73728,), 256, 1))
GATED = ((1024, 512), (34816, 256), (288, 1024))
SOME = ("Q4_K", "Q6_K", "Q8_0", "int4-g128-bfloat16")


@on_hopper
@pytest.mark.parametrize(
    "name, runs, k, splits", [(name, *shape) for name in FORMATS for shape in (SHAPES if name in SOME else SHAPES[:1])]
)
def test_it_has_the_bits_of_the_narrow_kernel(name: str, runs: tuple[int, ...], k: int, splits: int) -> None:
    w = rows_in(name, *runs, k=k)
    for n in (1, 2, 7, 8, 9, 15, 16):
        x = rows_of_x(n, k).cuda()
        ours, theirs = (torch.full((splits, n, w.n), torch.nan, device="cuda") for _ in range(2))
        narrow_linear(x, w, theirs, config=config_for(n, w, splits))
        with Levers().bound():
            if few_codes.pays(n, parts_of(w, ours), False):
                narrow_linear(x, w, ours)
            else:
                assert n > 8
                few_codes.multiply(x, parts_of(w, ours), False)
        assert same(ours, theirs) and not ours.isnan().any(), n


@on_hopper
@pytest.mark.parametrize(
    "name, m, k", [(name, *shape) for name in FORMATS for shape in (GATED if name in SOME else GATED[:1])]
)
def test_it_has_the_bits_of_the_narrow_swiglu(name: str, m: int, k: int) -> None:
    w = rows_in(name, m, k=k)
    for n in (1, 5, 8, 16):
        x = rows_of_x(n, k).cuda() * 3
        ours, theirs = (torch.full((n, m // 2), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        with Levers().bound():
            if few_codes.pays(n, [(w.whole, ours)], True):
                narrow_swiglu(x, w, ours)
            else:
                assert n > 8
                few_codes.multiply(x, [(w.whole, ours)], True)
        with Levers(hopper=False).bound():
            narrow_swiglu(x, w, theirs)
        assert same(ours, theirs) and not ours.isnan().any(), n


FAULTS = {
    "a stage is written before it is empty": ("      barrier_wait(empty + 8 * s, parity);\n", ""),
    "a stage is read before it is full": ("        barrier_wait(full + 8 * s, parity);\n", ""),
    "the first stage is read before it is full": ("  barrier_wait(full, 0);\n", ""),
    "a ring forgets its turn": ("    if (++s == g.n_stages) s = 0, parity ^= 1;\n", "    if (++s == g.n_stages) s = 0;\n"),
    "x is read before the wait": ("    wait_for_front();\n    for", "    for"),
    "a stage is given back before loads of it have ended": ("    end_loads();\n", ""),
    "a product before the wait": ("  wait_for_front();  // nobody", "  // nobody"),
    "one arrival too many": ("barrier_init(empty + 8 * s, g.tiles)", "barrier_init(empty + 8 * s, g.tiles + 1)"),
    "one byte too few": ("barrier_expect(barrier, g.copied_bytes)", "barrier_expect(barrier, g.copied_bytes + 16)"),
    "codes are not swizzled": ("chunk_at<128>(r8, q) +", "16 * q +"),
    "high bits are not swizzled": ("chunk_at<64>(r8, q / 2) + q % 2 * 8 + 2 * t);\n          if", "q * 8 + 2 * t);\n          if"),
    "x is not swizzled": ("16 * (lane / 8 ^ lane % 8)", "16 * (lane / 8)"),
    "rows change places": ("{v[0][2 * k], v[1][2 * k],", "{v[1][2 * k], v[0][2 * k],"),
    "halves of K change places": ("b[j][2 * k], b[j][2 * k + 1]", "b[j][2 * k + 1], b[j][2 * k]"),
    "the first scale of two": ("+ sub % S::HALVES;", "+ 0;"),
    "scales of the row above": ("8 * warp + lane % 8 +", "8 * warp + (lane + 7) % 8 +"),
    "scales of the next group": ("lane + 32 * e) / 16, S::SUBS - 1)", "lane + 32 * e) / 16 + 2, S::SUBS - 1)"),
    "the second outer scale": ("shared_value<unsigned short>(outer_at));", "shared_value<unsigned short>(outer_at + 2));"),
    "rows of the next tile": ("begin(p, p.tile + g.n_programs);", "begin(p, p.tile + g.n_programs + 1);"),
    "sums are not begun again": ("      d[j] = 0.0f;\n", ""),
    "sums stay small": ("if constexpr (F::IS_LOWERED) value = __fmul_rn(value, 4294967296.0f);", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, kernels: Kernels, small_chip: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted in the source: the play of the chip stops it, or a sum is another."""
    monkeypatch.setattr(described, "chip", replace(HOPPER, n_sms=1, shared_bytes=170 * 1024))
    w, (made,) = matrix([(272, "Q6_K")], 2048)
    x, out = rows_of_x(8, 2048), torch.full((2, 8, 272), torch.nan)
    said = kernels.multiply(x, [(w.whole, out)], faults=[FAULTS[fault]])
    is_right = said == "" and np.array_equal(out.numpy(), sums(x, made, 2))
    assert not is_right, said
