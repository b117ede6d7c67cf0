"""Products of up to 16 rows with codes on Hopper: hopper_few_codes.cu, compiled for a weight's formats.

Triton's kernel (linear.py) loads codes and decodes them in turn, and its tiles of 64 rows leave a part of a
wave idle. Here the weight's rows, and those of up to two smaller segments beside it, are spread over all
multiprocessors in sixteens; one thread copies ahead, before the kernel in front has ended, while the others
decode and multiply. The bits are the same.

It multiplies codes of up to 8 bits in groups of 16 to 256 columns, whose scales are not e4m3, where a slice
of K is a multiple of 256. Triton does the rest: codebooks, K of other sizes, what does not run at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from deltic.ops.formats import CODEBOOKS, CODES, SCALES, WeightFormat
from deltic.ops.gpu import hopper
from deltic.ops.gpu.chip import chip
from deltic.ops.gpu.decode import high_bits, low_bits
from deltic.ops.gpu.hopper import BFLOAT16, FLOAT32, SHORT, SOURCE_OF_ALL, SWIGLU, TensorMap
from deltic.ops.gpu.launch import bound_levers, launches
from deltic.ops.gpu.operands import assembly_of_pairs, lowered, packed_twice
from deltic.ops.matrix import Segment, planes

SOURCE = SOURCE_OF_ALL.with_name("hopper_few_codes.cu")
TOKENS = (8, 16)
"""Rows of x of a program."""
BLOCK = 256
"""Columns of a stage."""
MOST_TILES = 20
"""Tiles of 16 rows of w of a program: a warp has one."""
FEWEST_STAGES, BEFORE = 2, 3
"""Stages that a program must have room for; that are copied before the wait, where K is short."""
DECODING = 4
"""Bits of a weight that take as long to read as decoding it adds to the time of a tile."""

_SCALES = ("float16", "bfloat16", "float32", "k", "k.eighth", "e8m0")


@dataclass(frozen=True)
class FewForm:
    """A format as hopper_few_codes.cu knows it."""

    format: WeightFormat

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of a code in the first and in the second plane."""
        if self.format.codes == "bf16":
            return 16, 0
        codes = CODES.index(self.format.codes)
        return low_bits(codes), high_bits(codes)

    @property
    def scale_bytes(self) -> tuple[int, int]:
        """Bytes of a scale, and of a least value or zero."""
        if self.format.codes == "bf16":
            return 0, 0
        scale, least = (0 if dtype is None else np.dtype(dtype).itemsize for dtype in self.format.dtypes[:2])
        return scale, least

    @property
    def n_outer(self) -> int:
        return (1 + self.format.has_least) * self.format.scales.startswith("k")

    @property
    def n_subs(self) -> int:
        """Groups of a stage."""
        return BLOCK // self.format.group if self.format.group else 0

    @property
    def tile_bytes(self) -> int:
        """Shared memory of a tile's scales as they stand before operands."""
        return self.n_subs * 64 * (2 if self.is_lowered and self.format.has_least else 1)

    @property
    def is_lowered(self) -> bool:
        is_code = self.format.codes != "bf16"
        return is_code and bool(lowered(CODES.index(self.format.codes), SCALES.index(self.format.scales)))

    def source(self, name: str) -> str:
        """CUDA C++: a struct of this name."""
        kind, _, with_ = self.format.scales.partition(".")
        is_code, zero = self.format.codes != "bf16", 3 if self.format.codes == "int8" else 2
        scale = kind if with_ in ("", "least", "zero") else self.format.scales
        is_paired, (low, high) = is_code and packed_twice(self.format), self.bits
        values = {
            "LOW": low, "HIGH": high, "GROUP": self.format.group or BLOCK,
            "SCALE": _SCALES.index(scale) if is_code else 0, "N_OUTER": self.n_outer,
            "LEAST": {"least": 1, "zero": zero}.get(with_, 0),
            "IS_LOWERED": int(self.is_lowered), "IS_PAIRED": int(is_paired),
        }  # fmt: skip
        constants = "".join(f" static constexpr int {each} = {value};" for each, value in values.items())
        word, letter = ("u64", "l") if is_paired else ("u32", "r")
        decode = f"""  __device__ static __forceinline__ void decode(
      u32 (&v)[4], u32 first, u32 second, {word} scale, {word} scale_2) {{
    asm("{assembly_of_pairs(self.format)}"
        : "=&r"(v[0]), "=&r"(v[1]), "=&r"(v[2]), "=&r"(v[3])
        : "r"(first), "r"(second), "{letter}"(scale), "{letter}"(scale_2));
  }}
"""
        return f"struct {name} {{\n {constants}\n{decode if is_code else ''}}};\n"


@dataclass(frozen=True)
class FewCodes:
    """A kernel: forms of its segments, the largest first."""

    forms: tuple[FewForm, ...]
    tokens: int
    """Rows of x, at most."""
    warps: int
    """Number of warps that multiply."""
    swiglu: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps + 32

    def source(self) -> str:
        """CUDA C++."""
        names = [f"FewForm{i}" for i in range(len(self.forms))]
        forms = "".join(form.source(name) for form, name in zip(self.forms, names, strict=True))
        given = "".join(f", const __grid_constant__ Part g{i}" for i in range(len(names)))
        calls = "".join(
            f"  if (program < g{i}.n_programs)\n"
            f"    return product_of_few_codes<{name}, {self.tokens}, {str(self.swiglu).lower()}>"
            f"(g{i}, &x, program);\n  program -= g{i}.n_programs;\n"
            for i, name in enumerate(names)
        )
        entry = f"""extern "C" __global__ void __launch_bounds__({self.threads}, 1) linear(
    const __grid_constant__ TensorMap x{given}) {{
  int program = blockIdx.x;
{calls}}}
"""
        return "".join((SOURCE_OF_ALL.read_text(), SOURCE.read_text(), forms, entry))


class FewPart(ctypes.Structure):
    """`Part` of hopper_few_codes.cu."""

    _fields_ = (
        *((name, ctypes.c_uint8 * 128) for name in ("low", "high", "scale", "least", "outer")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("out_split", "out_row")),
        *((name, ctypes.c_int) for name in ("n", "m_used", "up", "n_blocks", "n_stages", "n_before", "tiles")),
        *((name, ctypes.c_int) for name in ("tiles_m", "n_tiles", "n_programs", "out_kind", "low_at", "high_at")),
        *((name, ctypes.c_int) for name in ("scale_at", "least_at", "outer_at", "stage_bytes", "copied_bytes")),
        *((name, ctypes.c_int) for name in ("half_scale_bytes", "half_least_bytes", "half_outer_bytes", "window")),
        ("unused", ctypes.c_uint8 * 16),
    )


def _aligned(n_bytes: int, to: int) -> int:
    return -(-n_bytes // to) * to


@dataclass(frozen=True)
class FewStage:
    """Shared memory of a stage: where its parts begin, and what is copied."""

    at: tuple[int, ...]
    """Places of the codes, their high bits, scales, least values and outer scales."""
    halves: tuple[int, ...]
    """Bytes of half of the rows of scales, least values and outer scales."""
    window: int
    """Rows of such a copy."""
    n_bytes: int
    copied: int


@cache
def stage_of(form: FewForm, tiles: int, tokens: int) -> FewStage:
    """The stage of a program of so many tiles."""
    half, (low, high) = 8 * tiles, form.bits
    window, outer_rows = _aligned(half, 16), form.n_outer
    scale, least = form.scale_bytes
    codes = [tokens * 2 * BLOCK, 2 * half * 32 * low, 2 * half * 32 * high]
    boxes = [form.n_subs * window * scale, form.n_subs * window * least, outer_rows * window * 2]
    at, sizes = [0], [*(_aligned(size, 1024) for size in codes), *(2 * _aligned(size, 128) for size in boxes)]
    for size in sizes:
        at.append(at[-1] + size)
    copied = sum(codes) + 2 * sum(boxes)
    halves = tuple(_aligned(size, 128) for size in boxes)
    return FewStage(tuple(at[1:6]), halves, window, _aligned(at[6], 1024), copied)


@dataclass(frozen=True)
class FewPlan:
    """Kernel of a product, and how its rows are spread over the chip."""

    kernel: FewCodes
    tiles: tuple[int, ...]
    """Tiles of 16 rows of a program, by segment."""
    programs: tuple[int, ...]
    """Number of programs, by segment."""
    stages: tuple[int, ...]
    """Stages that there is room for, by segment."""


def _fits(format: WeightFormat) -> bool:
    if format.codes == "bf16":
        return True
    is_code = format.codes != "e4m3" and format.codes not in CODEBOOKS
    return is_code and format.scales.partition(".")[0] in _SCALES and 16 <= format.group <= BLOCK


def _spread(
    costs: Sequence[float], tiles: Sequence[int], splits: int, n_sms: int
) -> tuple[list[int], list[int]] | None:
    """Tiles of a program of each segment, and its programs: so that the last one ends soonest. None if
    several segments do not all run at once. costs: time of a tile of each; tiles: that each has.
    """
    for limit in sorted({cost * count for cost in costs for count in range(1, MOST_TILES + 1)}):
        each = [min(int(limit / cost), MOST_TILES) for cost in costs]
        programs = [-(-n // count) * splits for n, count in zip(tiles, each, strict=True)] if all(each) else []
        if programs and sum(programs) <= n_sms:
            # as few in each as so many programs allow
            return [-(-n * splits // count) for n, count in zip(tiles, programs, strict=True)], programs
    if len(costs) > 1:
        return None
    rounds = {count: -(-(-(-tiles[0] // count) * splits) // n_sms) for count in range(1, MOST_TILES + 1)}
    count = min(rounds, key=lambda count: (rounds[count] * (count + 1), count))
    return [count], [n_sms]


@cache
def _plan(
    n: int, formats: tuple[WeightFormat, ...], heights: tuple[int, ...], splits: int, swiglu: bool, n_sms: int,
    shared: int,
) -> FewPlan | None:
    """heights: rows of each segment that are wanted; shared: memory of a program."""
    found = _spread([form.bits + DECODING for form in formats], [-(-m // 16) for m in heights], splits, n_sms)
    if found is None:
        return None
    tiles, programs = found
    tokens = next(count for count in TOKENS if n <= count)
    forms, stages = tuple(map(FewForm, formats)), []
    for form, each in zip(forms, tiles, strict=True):
        room = shared - 1024 - each * form.tile_bytes
        stages.append(room // (stage_of(form, each, tokens).n_bytes + 16))
    return FewPlan(FewCodes(forms, tokens, max(tiles), swiglu), tuple(tiles), tuple(programs), tuple(stages))


def plan_of(n: int, parts: Sequence[tuple[Segment, Tensor]], swiglu: bool) -> FewPlan | None:
    """Returns how n rows are multiplied by these segments, the largest first, each with its out, if here."""
    (segment, out), *_ = parts
    splits = len(out) if out.ndim == 3 else 1
    shaped = n <= TOKENS[-1] and segment.format.codes != "bf16" and segment.k // splits % BLOCK == 0
    shaped &= all(part.layout == "rows" and part.n_matrices == 1 and part.n % 16 == 0 for part, _ in parts)
    shaped &= all(_fits(part.format) and to.stride(-1) == 1 for part, to in parts) and not (swiglu and segment.n % 32)
    if not shaped:
        return None
    heights = (segment.n,) if swiglu else tuple(to.shape[-1] for _, to in parts)
    formats = tuple(part.format for part, _ in parts)
    plan = _plan(n, formats, heights, splits, swiglu, chip().n_sms, hopper.shared_bytes())
    return plan if plan is not None and min(plan.stages) >= FEWEST_STAGES else None


def pays(n: int, parts: Sequence[tuple[Segment, Tensor]], swiglu: bool) -> bool:
    """Returns whether n rows are multiplied by these segments here, as `hopper.pays` does. Of codes that are
    easily decoded more than 8 rows are faster in Triton.
    """
    levers, is_faster = bound_levers(), n <= TOKENS[0] or FewForm(parts[0][0].format).is_lowered
    return levers.hopper and hopper.works() and is_faster and plan_of(n, parts, swiglu) is not None


def x_map(x: Tensor, tokens: int) -> TensorMap:
    """Describes rows of x to the copies."""
    return TensorMap(x.data_ptr(), len(x), 2 * x.shape[1], 2, (tokens, 128))


def part_of(plan: FewPlan, i: int, part: tuple[Segment, Tensor], n: int) -> FewPart:
    """Arguments of a product of n rows with segment i of a plan."""
    (segment, out), form, tiles = part, plan.kernel.forms[i], plan.tiles[i]
    stage, half, k, m = stage_of(form, tiles, plan.kernel.tokens), 8 * tiles, segment.k, segment.n
    splits, swiglu = len(out) if out.ndim == 3 else 1, plan.kernel.swiglu
    g = FewPart(out=out.data_ptr(), out_split=out.stride(0) if out.ndim == 3 else 0, out_row=out.stride(-2))
    maps = list[tuple[str, TensorMap]]()
    at = {name: segment.data.data_ptr() + place for name, (place, _) in planes(m, k, segment.format).items()}
    codes = [place for name, place in at.items() if name.startswith("codes")] or [segment.data.data_ptr()]
    for name, bits, place in zip(("low", "high"), form.bits, codes, strict=False):
        each = 2 if bits == 16 else 1
        maps.append((name, TensorMap(place, m, k * bits // 8, each, (half, min(128, 32 * bits)))))
    for name, each in zip(("scale", "least"), form.scale_bytes, strict=True):
        if each:
            groups, box = segment.format.n_groups(k), (form.n_subs, stage.window * each)
            maps.append((name, TensorMap(at[name], groups, m * each, each, box, swizzled=False)))
    if form.n_outer:
        box = form.n_outer, 2 * stage.window
        maps.append(("outer", TensorMap(at["outer"], k // BLOCK * form.n_outer, 2 * m, 2, box, swizzled=False)))
    for name, described in maps:
        ctypes.memmove(getattr(g, name), described.address, 128)
    g.n, g.m_used, g.up = n, out.shape[-1], m // 2 if swiglu else 0
    g.n_blocks, g.n_stages, g.tiles = k // splits // BLOCK, plan.stages[i], tiles
    g.n_before = g.n_stages if k > SHORT else BEFORE
    g.tiles_m = -(-(m if swiglu else out.shape[-1]) // (16 * tiles))
    g.n_tiles, g.n_programs = g.tiles_m * splits, plan.programs[i]
    g.out_kind = SWIGLU if swiglu else FLOAT32 if out.dtype == torch.float32 else BFLOAT16
    g.low_at, g.high_at, g.scale_at, g.least_at, g.outer_at = stage.at
    g.half_scale_bytes, g.half_least_bytes, g.half_outer_bytes = stage.halves
    g.stage_bytes, g.copied_bytes, g.window = stage.n_bytes, stage.copied, stage.window
    return g


def multiply(x: Tensor, parts: Sequence[tuple[Segment, Tensor]], swiglu: bool) -> None:
    """Multiplies like `linear._multiply` what `pays` accepts. parts: the largest segment first."""
    plan = plan_of(len(x), parts, swiglu)
    assert plan is not None
    launches.n += 1
    if launches.compile_only:  # no weights are there yet
        hopper.begin(plan.kernel)
        return
    given = [part_of(plan, i, part, len(x)) for i, part in enumerate(parts)]
    rows = x_map(x, plan.kernel.tokens)
    addresses = [rows.address, *map(ctypes.addressof, given)]
    shape = sum(plan.programs), plan.kernel.threads, hopper.shared_bytes()
    hopper.start(plan.kernel, shape, addresses, x.device.index)
