"""hopper_few_codes.cu on a CPU: compiled by g++ with hopper_on_cpu.hpp in front of it, where hopper_base.cu is on a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from deltic.ops.gpu import few_codes, hopper
from deltic.ops.matrix import Segment

HEADER = Path(__file__).with_name("hopper_on_cpu.hpp")
BEHIND = """
static const TensorMap* x_given;
static const Part* given[3];
static void begin_thread() {
  linear(*x_given%s);
  cpu::fibers[cpu::current].done = true;
}
extern "C" const char* run(
    const TensorMap* x, const Part* const* parts, int programs, int threads, int shared, int seed) {
  static_assert(sizeof(Part) == %d);
  x_given = x;
  for (int i = 0; i < %d; ++i) given[i] = parts[i];
  return run_grid(programs, threads, shared, seed);
}
"""


class Map(ctypes.Structure):
    """A `TensorMap` of hopper_on_cpu.hpp, in the place of `hopper.TensorMap`."""

    _fields_ = (
        ("at", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("n_rows", "row_bytes", "each", "box_rows", "box_bytes", "is_swizzled")),
        ("is_behind_wait", ctypes.c_int),
        ("rest", ctypes.c_uint8 * 92),
    )

    def __init__(
        self, at: int, n_rows: int, row_bytes: int, each: int, box: tuple[int, int], swizzled: bool = True
    ) -> None:
        super().__init__(at, n_rows, row_bytes, each, *box, swizzled)

    @property
    def address(self) -> int:
        return ctypes.addressof(self)


def _value(name: str) -> str:
    if name.startswith("0f"):
        return f"0x{name[2:]}u"
    return f"static_cast<u32>({name})" if re.fullmatch(r"-?\d+", name) else name


def on_cpu(assembly: str) -> str:
    """C++ for the lines of PTX that make operands, whose registers are 32 bits."""
    given = ("v[0]", "v[1]", "v[2]", "v[3]", "first", "second", "scale", "scale_2")
    text = re.sub(r"%(\d)", lambda found: given[int(found[1])], assembly.strip("{} "))
    lines = ["u32 t, u, x, y, i, one, none, s0, s1, m0, m1, f0, f1, v0, v1, v2, v3;"]
    for line in (line.strip() for line in text.split(";")):
        name, _, rest = line.partition(" ")
        if not line or name == ".reg":
            continue
        if name == "mov.b64":
            low, high, source = re.findall(r"\w+", rest)
            lines.append(f"{low} = static_cast<u32>({source}); {high} = static_cast<u32>({source} >> 32);")
            continue
        to, *sources = (each.strip() for each in rest.split(","))
        a, b, c, last = (*map(_value, sources), "", "", "", "")[:4]
        number = "cpu::float_of({})".format
        made = {
            "mov.b32": a, "shl.b32": f"{a} << {b}", "shr.u32": f"{a} >> {b}", "and.b32": f"{a} & {b}",
            "or.b32": f"{a} | {b}", "mul.lo.u32": f"{a} * {b}", "prmt.b32": f"cpu::permuted({a}, {b}, {c})",
            "fma.rn.bf16x2": f"cpu::fma_two({a}, {b}, {c})", "neg.f32": f"cpu::bits_of(-{number(a)})",
            "mul.rn.f32": f"cpu::bits_of({number(a)} * {number(b)})",
            "add.rn.f32": f"cpu::bits_of({number(a)} + {number(b)})",
            "fma.rn.f32": f"cpu::bits_of(std::fma({number(a)}, {number(b)}, {number(c)}))",
            "cvt.rn.bf16x2.f32": f"two_bfloat16({number(b)}, {number(a)})", "lop3.b32": f"({a} & {b}) | {c}",
        }[name]  # fmt: skip
        assert name != "lop3.b32" or last == "0xEA", line
        lines.append(f"{to} = {made};")
    return " ".join(lines)


def source_on_cpu(kernel: few_codes.FewCodes, faults: Sequence[tuple[str, str]] = ()) -> str:
    """C++ of a kernel. faults: what is to be replaced in its CUDA C++, and by what."""
    text = kernel.source().removeprefix(hopper.SOURCE_OF_ALL.read_text())
    for right, wrong in faults:
        assert right in text, right
        text = text.replace(right, wrong)
    text = re.sub(r'    asm\("(.*?)"\n.*?\);\n', lambda found: f"    {on_cpu(found[1])}\n", text, flags=re.DOTALL)
    assert "asm" not in text
    shared = "extern __shared__ unsigned char unaligned[];"
    assert shared in text
    text = text.replace(shared, "unsigned char* const unaligned = cpu::shared;")
    n = len(kernel.forms)
    behind = BEHIND % ("".join(f", *given[{i}]" for i in range(n)), ctypes.sizeof(few_codes.FewPart), n)
    return f'#include "{HEADER}"\n{text}{behind}'


class Kernels:
    """Compiled kernels, each once."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("needs g++")
        self._folder, self._compiler = folder, compiler

    def load(self, kernel: few_codes.FewCodes, faults: Sequence[tuple[str, str]] = ()) -> Any:
        """The library. Raises CalledProcessError, whose stderr says what the compiler does."""
        text = source_on_cpu(kernel, faults)
        library = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
        if not library.exists():
            file = library.with_suffix(".cpp")
            file.write_text(text)
            flags = ("-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w", "-o", str(library))
            subprocess.run([self._compiler, *flags, str(file)], check=True, capture_output=True, text=True)
        found = ctypes.CDLL(str(library))
        found.run.restype = ctypes.c_char_p
        return found

    def multiply(
        self,
        x: Tensor,
        parts: Sequence[tuple[Segment, Tensor]],
        swiglu: bool = False,
        *,
        faults: Sequence[tuple[str, str]] = (),
        seed: int = 0,
    ) -> str:
        """`few_codes.multiply` of tensors in the host's memory. Returns what the chip would not have allowed."""
        plan = few_codes.plan_of(len(x), parts, swiglu)
        assert plan is not None
        rows: Any = few_codes.x_map(x, plan.kernel.tokens)
        rows.is_behind_wait = 1
        given = [few_codes.part_of(plan, i, part, len(x)) for i, part in enumerate(parts)]
        pointers = (ctypes.c_void_p * len(given))(*map(ctypes.addressof, given))
        shape = sum(plan.programs), plan.kernel.threads, hopper.shared_bytes(), seed
        said: bytes = self.load(plan.kernel, faults).run(ctypes.c_void_p(rows.address), pointers, *shape)
        return said.decode()
