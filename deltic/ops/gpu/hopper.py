"""Products of up to some hundreds of rows on Hopper: hopper.cu, compiled for the width that suits a weight.

Triton's kernels (linear.py, fp8.py) hold a tile of few rows of w in a program, and wait for each block of
it in turn. Here the weight's rows are spread over the multiprocessors as evenly as multiples of 16 allow, one
warp copies ahead for the others, and weights are on their way before the kernel in front has ended. The bits
are the same.

Codes of 4 bits are the left side of the product, decoded by the warps that multiply (hopper_codes.cu). So is
e4m3 where rows of x are few (hopper_few.cu): such a product waits for memory alone, and its programs stand
beside those of the kernel in front.

The source is CUDA C++. The compiler (NVRTC) and its bindings come with torch; what it makes is kept beside
Triton's cache. Where it cannot compile, Triton's kernels do all.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import triton
from torch import Tensor

from deltic.machine import n_usable_cpus
from deltic.ops.formats import WeightFormat
from deltic.ops.gpu.chip import chip
from deltic.ops.gpu.fp8 import Fp8Rows
from deltic.ops.gpu.launch import INTERPRETED, bound_levers, launches, pdl_works
from deltic.ops.matrix import Segment, planes

try:
    from cuda.bindings import driver, nvrtc
except ImportError:  # a CPU, or a torch without CUDA
    driver = nvrtc = None

log = logging.getLogger("deltic.engine")

SOURCE = Path(__file__).with_suffix(".cu")
SOURCE_OF_ALL = SOURCE.with_name("hopper_base.cu")
SOURCE_OF_CODES = SOURCE.with_name("hopper_codes.cu")
SOURCE_OF_FEW = SOURCE.with_name("hopper_few.cu")
WIDTHS = (32, 48, 64, 80, 96, 112, 128, 144, 160)
"""Rows of w that a group of warps may have. Of more, e4m3's two sums of each do not fit into registers."""
WIDE = 128
"""Width above which e4m3 takes registers from the warps that copy."""
TOKENS, MAX_TILES = 64, 2
"""Rows of x of an instruction; instructions for a block of K."""
FEWEST, FEWEST_SWIGLU, MOST = 33, 17, 1024
"""Rows of x from which, with SwiGLU in e4m3 from which, and up to which this is faster than Triton's kernels
where K is cut.
"""
MOST_WHOLE, MOST_SWIGLU, MOST_BF16 = 96, 160, 128
"""Rows up to which it is faster than the vendor's library: where e4m3 is not cut along K, where its SwiGLU is
part of the product, and in bfloat16.
"""
FEWEST_SMALL_GROUPS, MOST_CODES = 65, 256
"""Rows from which groups of fewer than 128 codes were measured, and up to which all were."""
FEW_TOKENS, MOST_FEW_WIDTH = (8, 16), 320
"""Rows of x of a program of few, and rows of w that it may have: more do not run at once, or leave too few
blocks on their way.
"""
LONG, SHORT, SHORT_BEFORE = 5120, 2048, 8
"""Columns of K of a product of few rows that leaves a multiprocessor to the norm in front, where it is not
cut; and up to which it has so many blocks copied before its wait: more would slow that norm.
"""
CODE_ROWS, MOST_GROUPS = 64, {64: 5, 96: 4, 128: 3}
"""Rows of codes of a group of warps; groups whose sums fit into registers, by rows of x of a program."""
CODE_STAGES = {2: 5, 3: 4, 4: 3, 5: 3}
"""Stages of 256 columns of codes, for groups of warps: some 70 KiB on their way."""

BF16, E4M3, CODES = range(3)


@dataclass(frozen=True)
class HopperFormat:
    """A format of weights as hopper.cu reads it; of codes of 4 bits with their groups.

    in_blocks: of e4m3 whose scales are those of blocks of 128 x 128 (`block_scales`): fewer instructions, the
    same bits.
    """

    kind: int
    group: int = 0
    half_scales: bool = False
    least: int = 0
    """1: there are least values, 2: zeros."""
    in_blocks: bool = False

    @property
    def block(self) -> int:
        """Columns that are copied at once."""
        return (64, 128, 256)[self.kind]


def hopper_format(format: WeightFormat, in_blocks: bool = False) -> HopperFormat | None:
    """Returns the form of a format, or None for one that is not multiplied here."""
    if format.codes == "bf16":
        return HopperFormat(BF16)
    if format.codes == "e4m3" and format.scales == "float32" and format.group in (0, 128):
        return HopperFormat(E4M3, in_blocks=in_blocks)
    kind, _, with_ = format.scales.partition(".")
    if format.codes == "uint4" and kind in ("float16", "bfloat16") and format.group in (32, 64, 128):
        return HopperFormat(CODES, format.group, kind == "float16", {"": 0, "least": 1, "zero": 2}[with_])
    return None


@dataclass(frozen=True)
class Kernel:
    """A form of hopper.cu: the constants that it is compiled with. Rows of w are the right side of a product.
    """

    width: int
    """Rows of w of a group of warps; of codes, of a program."""
    tokens: int
    """Rows of x of a program, at most."""
    form: HopperFormat
    side_width: int = 0
    """Width of a second weight beside it, in bfloat16; 0: there is none."""
    swiglu: bool = False
    """True for one of few rows that ends in SwiGLU."""
    files: ClassVar[tuple[Path, ...]] = (SOURCE_OF_ALL, SOURCE)

    @property
    def groups(self) -> int:
        """Groups of four warps that multiply."""
        return 2

    @property
    def token_tiles(self) -> int:
        """Tiles of rows of x, but of codes."""
        return 1 if self.tokens <= TOKENS else MAX_TILES

    @property
    def is_wide(self) -> bool:
        return self.form.kind == E4M3 and self.width > WIDE

    @property
    def threads(self) -> int:
        return 384 if self.is_wide else 128 * self.groups + 32

    @property
    def x_blocks(self) -> int:
        """Blocks of 64 columns of x in a stage beside codes."""
        return 2 if self.tokens <= 64 else 1

    @property
    def x_rows(self) -> int:
        """Rows of x of a program."""
        return TOKENS * self.token_tiles

    @property
    def rows(self) -> int:
        """Rows of w of a program."""
        return self.width * (2 if self.token_tiles == 1 else 1)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a block of K of 128 bytes, with scales of e4m3, and two barriers."""
        return (128 + 4 * (self.form.kind == E4M3)) * (self.x_rows + self.rows) + 16

    @property
    def codes(self) -> tuple[int, int]:
        """Stages of 256 columns of codes, and shared memory of each, with all that is stored of them."""
        return 0, 0

    @property
    def beside(self) -> Kernel:
        """The same of the second weight."""
        return Kernel(self.side_width, self.tokens, HopperFormat(BF16))

    @property
    def instruction(self) -> str:
        return _instruction(self.width, self.form.kind == E4M3)

    def box_rows(self, swiglu: bool) -> int:
        """Rows of w that are copied at once."""
        return self.width // (2 if swiglu else 1)

    def table_bytes(self, n_blocks: int) -> int:
        """Shared memory beside stages, where a program multiplies so many blocks of K."""
        return 0

    def source(self) -> str:
        """CUDA C++."""
        names = {
            "WIDTH": self.width,
            "SIDE_WIDTH": self.side_width,
            "TOKEN_TILES": self.token_tiles,
            "FORM": self.form.kind,
            "GROUP": self.form.group,
            "HALF_SCALES": int(self.form.half_scales),
            "LEAST": self.form.least,
            "IN_BLOCKS": int(self.form.in_blocks),
            "WIDE": int(self.is_wide),
            "GROUPS": self.groups,
            "TOKENS": self.tokens,
            "PIECE": 2 if self.groups <= (2 if self.form.group == 32 else 3) else 1,
            "X_BLOCKS": self.x_blocks,
            "FEW": int(isinstance(self, FewKernel)),
            "IS_SWIGLU": int(self.swiglu),
        }
        defined = "".join(f"#define {name} {value}\n" for name, value in names.items())
        made = {self.instruction} | ({self.beside.instruction} if self.side_width else set())
        return "".join((defined, _DECLARED, *sorted(made), *(file.read_text() for file in self.files)))


class CodesKernel(Kernel):
    """The same with codes of 4 bits: their rows are the left side, CODE_ROWS a group of warps."""

    files = (SOURCE_OF_ALL, SOURCE, SOURCE_OF_CODES)

    @property
    def groups(self) -> int:
        return self.width // CODE_ROWS

    @property
    def x_rows(self) -> int:
        return self.tokens

    @property
    def rows(self) -> int:
        return self.width

    @property
    def stage_bytes(self) -> int:
        """Shared memory of x_blocks of x alone, and two barriers."""
        return 128 * self.tokens * self.x_blocks + 16

    @property
    def codes(self) -> tuple[int, int]:
        each = 2 + (0, 2, 1)[self.form.least]
        return CODE_STAGES[self.groups], self.width * (128 + 256 // self.form.group * each) + 16

    @property
    def instruction(self) -> str:
        return _instruction(self.tokens, decoded=True)

    def box_rows(self, swiglu: bool) -> int:
        return CODE_ROWS // 2


class FewKernel(Kernel):
    """The same of few rows of x: rows of w are the left side, those of a program in two halves."""

    files = (SOURCE_OF_ALL, SOURCE, SOURCE_OF_FEW)

    @property
    def is_wide(self) -> bool:
        return False

    @property
    def x_rows(self) -> int:
        return self.tokens

    @property
    def rows(self) -> int:
        return self.width

    @property
    def stage_bytes(self) -> int:
        return 128 * (self.tokens + self.width) + 16

    @property
    def beside(self) -> Kernel:
        return FewKernel(self.side_width, self.tokens, HopperFormat(BF16))

    @property
    def instruction(self) -> str:
        return _instruction(self.tokens, self.form.kind == E4M3)

    def box_rows(self, swiglu: bool) -> int:
        return self.width // 2

    def table_bytes(self, n_blocks: int) -> int:
        half = self.width // 2
        scales = 2 * (-(-half // 128) + 1) + self.tokens if self.form.kind == E4M3 else 0
        return -half % 64 * 128 + 4 * n_blocks * scales  # and what the last tile reads behind its rows


_DECLARED = """template <int N, bool IS_E4M3>
__device__ void multiply(float (&d)[N / 2], unsigned long long a, unsigned long long b, int add);
template <int N>
__device__ void multiply_decoded(float (&d)[N / 2], const unsigned int (&a)[4], unsigned long long b, int add);
"""


def _instruction(n: int, e4m3: bool = False, decoded: bool = False) -> str:
    """`multiply<n, e4m3>`, or `multiply_decoded<n>`: wgmma names each of its registers."""
    size, n_left = n // 2, 4 if decoded else 1
    name = f"m64n{n}" + ("k32.f32.e4m3.e4m3" if e4m3 else "k16.f32.bf16.bf16")
    registers, outs = (", ".join(text % i for i in range(size)) for text in ("%%%d", '"+f"(d[%d])'))
    left = ", ".join(f"%{size + i}" for i in range(n_left))
    given = ", ".join(f'"r"(a[{i}])' for i in range(4)) if decoded else '"l"(a)'
    function, a = f"multiply<{n}, {str(e4m3).lower()}>", "unsigned long long a"
    if decoded:
        function, a, left = f"multiply_decoded<{n}>", "const unsigned int (&a)[4]", f"{{{left}}}"
    majors = ", 0" * (0 if e4m3 else 1 if decoded else 2)
    return f"""template <>
__device__ __forceinline__ void {function}(float (&d)[{size}], {a}, unsigned long long b, int add) {{
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{size + n_left + 1}, 0;"
               " wgmma.mma_async.sync.aligned.{name} {{{registers}}}, {left}, %{size + n_left}, p, 1, 1{majors}; }}"
               : {outs} : {given}, "l"(b), "r"(add));
}}
"""


# Which product is made here, and by which kernel.


@cache
def _has_compiler() -> bool:
    """Returns whether a small kernel can be compiled. If not, the log says why, where there is a GPU."""
    error: object = "no package cuda-bindings"
    if nvrtc is not None:
        try:
            _compile(Kernel(WIDTHS[0], 1, HopperFormat(BF16)))
            return True
        except Exception as raised:  # what a missing library raises is the bindings' own
            error = raised
    if torch.cuda.is_available():
        log.warning("NVRTC cannot compile: Triton multiplies e4m3, and %d rows and more, slower: %s", FEWEST, error)
    return False


def works() -> bool:
    """Returns whether these products are compiled for the chip: Hopper, where there is a compiler."""
    return not INTERPRETED and chip().is_hopper and _has_compiler()


def pays(n: int, parts: Sequence[tuple[Segment, Tensor]], swiglu: bool, in_blocks: bool) -> bool:
    """Returns whether n rows are multiplied by these segments here: one, or one and a smaller one in
    bfloat16. parts: each with its out, as `narrow_linear` has them. in_blocks: the first has `block_scales`.
    """
    (segment, out), *others = parts
    splits, form = len(out) if out.ndim == 3 else 1, hopper_format(segment.format)
    fewest = FEWEST_SWIGLU if swiglu and form is not None and form.kind == E4M3 else FEWEST
    few = _few_kernel(n, parts, swiglu) if in_blocks else None
    if form is None or (n < fewest and few is None) or not bound_levers().hopper:
        return False
    if form.kind == E4M3:
        most = MOST if splits > 1 or others else MOST_SWIGLU if swiglu else MOST_WHOLE
    elif form.kind == CODES:
        most = MOST_CODES
    else:
        most = MOST_BF16 if swiglu or splits > 1 else 0
    if n > most or (0 < form.group < 128 and n < FEWEST_SMALL_GROUPS) or not works():
        return False
    shaped = all(part.layout == "rows" and part.n_matrices == 1 and part.n % 16 == 0 for part, _ in parts)
    shaped &= segment.k // splits % form.block == 0 and segment.n % 32 == 0
    shaped &= n % 4 == 0 or form.kind != E4M3 or few is not None  # scales of x are copied by 16 bytes
    shaped &= all(to.stride(-1) == 1 and to.storage_offset() % 4 == 0 for _, to in parts)
    # two are written at once
    shaped &= all(stride % 2 == 0 for _, to in parts for stride in to.stride()[:-1])
    beside = len(others) <= 1 and all(part.format.codes == "bf16" and part.n <= 2 * WIDTHS[2] for part, _ in others)
    return shaped and beside and segment.n >= WIDTHS[0] * 2


def _is_alone(k: int, splits: int) -> bool:
    """Returns whether programs of few rows take all shared memory of a multiprocessor: the norm in front
    has one of its own then.
    """
    return k >= LONG and splits == 1


def _few_kernel(n: int, parts: Sequence[tuple[Segment, Tensor]], swiglu: bool) -> Kernel | None:
    """The kernel of n rows by these segments, e4m3 in blocks first, if they are few, and all its programs run
    at once.
    """
    (segment, out), *others = parts
    form, splits, m = hopper_format(segment.format, True), len(out) if out.ndim == 3 else 1, out.shape[-1]
    tokens = next((tokens for tokens in FEW_TOKENS if n <= tokens), 0)
    side, m = sum(part.n for part, _ in others), 2 * m if swiglu else m
    sms = chip().n_sms - _is_alone(segment.k, splits)
    widths = range(32, MOST_FEW_WIDTH + 16, 16)
    width = next((w for w in widths if -(-m // w) * splits <= sms - bool(side)), 0)
    if not tokens or not width or form is None or form.kind != E4M3:
        return None
    left = sms - -(-m // width) * splits
    side_width = next((few for few in range(16, side + 16, 16) if -(-side // few) <= left), 0)
    return FewKernel(width, tokens, form, side_width, swiglu)


def kernel_for(n: int, m: int, splits: int, form: HopperFormat, side: int = 0) -> Kernel:
    """The kernel that has the last multiprocessor done first. m: rows of w; side: of the one beside it.

    The time of a program grows with its rows of w, and with a share for the rows of x.
    """
    tokens, widths = TOKENS * (1 if n <= TOKENS else MAX_TILES), list(WIDTHS)
    if form.kind == CODES:
        tokens = next((tokens for tokens in MOST_GROUPS if n <= tokens), max(MOST_GROUPS))
        widths = [CODE_ROWS * groups for groups in range(2, MOST_GROUPS[tokens] + 1)]
    n_tiles, side_each = -(-n // tokens) * splits, 2 if tokens <= TOKENS else 1
    each = 1 if form.kind == CODES else side_each
    sms = max(1, chip().n_sms - (n_tiles if side else 0))  # a program fills one

    def n_programs(rows: int, width: int) -> int:
        return n_tiles * -(-rows // width)

    def cost(width: int) -> int:
        return -(-n_programs(m, width * each) // sms) * (width * each + 32)

    width = min(widths, key=cost)
    # what is beside it is done sooner with all multiprocessors that are left
    left = max(n_tiles, chip().n_sms - n_programs(m, width * each))
    side_width = next((few for few in range(16, side + 16, 16) if n_programs(side, few * side_each) <= left), 0)
    return (CodesKernel if form.kind == CODES else Kernel)(width, tokens, form, side_width)


# Compiling and loading.


def _check(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the values of a call. Raises RuntimeError with the name of its error."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"CUDA: {status.name}")
    return tuple(values)


class Compiled(Protocol):
    """Kernel that says its source, and is equal to another one that says the same."""

    def source(self) -> str: ...
    def __hash__(self) -> int: ...


def _file(kernel: Compiled) -> Path:
    """The file that keeps the machine code."""
    digest = hashlib.sha256(f"{_check(nvrtc.nvrtcVersion())} {kernel.source()}".encode()).hexdigest()
    return Path(triton.knobs.cache.dir) / f"deltic-{digest[:24]}.cubin"


def _compile(kernel: Compiled) -> bytes:
    """Makes the machine code, or finds it beside Triton's cache. Raises RuntimeError: the compiler's log."""
    file = _file(kernel)
    if file.exists():
        return file.read_bytes()
    (program,) = _check(nvrtc.nvrtcCreateProgram(kernel.source().encode(), SOURCE.name.encode(), 0, None, None))
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    # the bindings write into bytes: one alone would be Python's own, which all share
    sizes = _check(nvrtc.nvrtcGetProgramLogSize(program)) + _check(nvrtc.nvrtcGetCUBINSize(program))
    buffers: list[bytes] = [b" " * max(2, size) for size in sizes]
    said, code = buffers
    _check(nvrtc.nvrtcGetProgramLog(program, said))
    if int(status):
        raise RuntimeError(f"NVRTC cannot compile {kernel}: {said.decode()}")
    log.debug("%s: %s", kernel, said.decode())
    _check(nvrtc.nvrtcGetCUBIN(program, code))
    _check(nvrtc.nvrtcDestroyProgram(program))
    with suppress(OSError):  # it is only compiled again
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(f".{os.getpid()}.{id(code)}")
        written.write_bytes(code)
        written.replace(file)
    return code


_compiled: dict[Compiled, Future[bytes]] = {}


@cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_usable_cpus(), "hopper")


def begin(kernel: Compiled) -> Future[bytes]:
    if kernel not in _compiled:
        _compiled[kernel] = _compilers().submit(_compile, kernel)
    return _compiled[kernel]


def wait() -> list[str]:
    """Waits until all that was begun is compiled. Returns what failed."""
    errors = [future.exception() for future in _compiled.values()]
    return [str(error) for error in errors if error is not None]


@cache
def _function(kernel: Compiled, device: int) -> Any:
    """The function, loaded on the current device. device: its number."""
    try:
        (module,) = _check(driver.cuModuleLoadData(begin(kernel).result()))
    except RuntimeError:  # a file that was cut off
        _file(kernel).unlink(missing_ok=True)
        (module,) = _check(driver.cuModuleLoadData(_compile(kernel)))
    (function,) = _check(driver.cuModuleGetFunction(module, b"linear"))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _check(driver.cuFuncSetAttribute(function, attribute, chip().shared_bytes))
    return function


# Starting.


class _Arguments(ctypes.Structure):
    """`Arguments` of hopper.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("w_scale", "w_least", "x_scale", "out")),
        *((name, ctypes.c_uint64) for name in ("out_split", "out_row")),
        *((name, ctypes.c_int) for name in ("n", "m", "m_used", "up", "n_blocks", "scale_blocks", "n_code_stages")),
        ("n_before", ctypes.c_int),
        *((name, ctypes.c_int) for name in ("tiles_n", "tiles_m", "n_tiles", "out_kind")),
    )


FLOAT32, BFLOAT16, SWIGLU = range(3)
_ALIGNED = 64


@cache
def _library() -> ctypes.CDLL:
    """The driver: the bindings' descriptors do not stand at multiples of 64, as it wants them."""
    return ctypes.CDLL("libcuda.so.1")


class TensorMap:
    """Describes rows in memory to the copies: boxes of so many of them, and of so many bytes of each."""

    def __init__(
        self, at: int, n_rows: int, row_bytes: int, each: int, box: tuple[int, int], swizzled: bool = True
    ) -> None:
        """at: the address; each: bytes of an element, 1, 2 or 4; box: rows, and bytes of each, 128, 64 or 32
        where they are swizzled.
        """
        self.memory = ctypes.create_string_buffer(128 + _ALIGNED)
        self.address = -(-ctypes.addressof(self.memory) // _ALIGNED) * _ALIGNED
        dtypes, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
        dtype = {1: dtypes.CU_TENSOR_MAP_DATA_TYPE_UINT8, 2: dtypes.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                 4: dtypes.CU_TENSOR_MAP_DATA_TYPE_UINT32}[each]  # fmt: skip
        swizzle = getattr(swizzles, f"CU_TENSOR_MAP_SWIZZLE_{f'{box[1]}B' if swizzled else 'NONE'}")
        status = _library().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self.address), int(dtype), 2, ctypes.c_void_p(at),
            (ctypes.c_uint64 * 2)(row_bytes // each, n_rows), (ctypes.c_uint64 * 1)(row_bytes),
            (ctypes.c_uint32 * 2)(box[1] // each, box[0]), (ctypes.c_uint32 * 2)(1, 1),
            0, int(swizzle), int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B), 0,
        )  # fmt: skip
        if status:
            raise RuntimeError(f"CUDA: cuTensorMapEncodeTiled gives {status}")


def shared_bytes() -> int:
    """Shared memory of a program: what leaves room for one of the kernel in front, a norm, beside it, where
    registers do (not those of wide ones).
    """
    return chip().shared_bytes - 16 * 1024


def _room(kernel: Kernel, k: int, splits: int) -> int:
    """Shared memory of a program of a product that walks k columns in so many slices."""
    return chip().shared_bytes if isinstance(kernel, FewKernel) and _is_alone(k, splits) else shared_bytes()


@dataclass(frozen=True)
class _Given:
    """Arguments of a product with one weight."""

    w: TensorMap
    x: TensorMap
    arguments: _Arguments
    n_stages: ctypes.c_int

    @property
    def addresses(self) -> list[int]:
        return [self.w.address, self.x.address, ctypes.addressof(self.arguments), ctypes.addressof(self.n_stages)]


ALIGNMENTS = 2048
"""Bytes of shared memory that two alignments to 1024 may take."""


def _given(
    kernel: Kernel, part: tuple[Segment, Tensor], x: Tensor, rows: Fp8Rows | None, swiglu: bool
) -> _Given:
    """rows: x rounded, where the weight is e4m3."""
    (segment, out), (code_stages, code_bytes), n = part, kernel.codes, len(x)
    splits, half = len(out) if out.ndim == 3 else 1, segment.n // 2 if swiglu else 0
    each, row_bytes = (2, 2 * segment.k) if rows is None else (1, segment.k)
    a = _Arguments(out=out.data_ptr(), out_split=out.stride(0) if out.ndim == 3 else 0, out_row=out.stride(-2))
    at = {
        name: segment.data.data_ptr() + place
        for name, (place, _) in planes(segment.n, segment.k, segment.format).items()
    }
    a.w_scale, a.w_least = at.get("scale"), at.get("least")
    a.x_scale = None if rows is None else rows.scale.data_ptr()
    a.n, a.m, a.m_used, a.up = n, segment.n, out.shape[-1], half
    a.n_blocks, a.scale_blocks, a.n_code_stages = row_bytes // splits // 128, segment.format.group // 128, code_stages
    a.tiles_n = -(-n // kernel.x_rows)
    a.tiles_m = -(-out.shape[-1] // (kernel.rows // (2 if swiglu else 1)))
    a.n_tiles = a.tiles_n * a.tiles_m * splits
    a.out_kind = SWIGLU if swiglu else FLOAT32 if out.dtype == torch.float32 else BFLOAT16
    beside_stages = ALIGNMENTS + kernel.table_bytes(a.n_blocks) + code_stages * code_bytes
    a.n_before = a.n_blocks if segment.k > SHORT else SHORT_BEFORE
    n_stages = (_room(kernel, segment.k, splits) - beside_stages) // kernel.stage_bytes
    assert n_stages >= 2, "a block is released when the next one is being multiplied"
    w_bytes, w_each = int(segment.k * segment.format.bits) // 8, 2 if segment.format.codes == "bf16" else 1
    return _Given(
        TensorMap(segment.data.data_ptr(), segment.n, w_bytes, w_each, (kernel.box_rows(swiglu), 128)),
        TensorMap((x if rows is None else rows.codes).data_ptr(), n, row_bytes, each, (kernel.x_rows, 128)),
        a,
        ctypes.c_int(n_stages),
    )


def multiply(
    x: Tensor, parts: Sequence[tuple[Segment, Tensor]], swiglu: bool, rows: Fp8Rows | None, in_blocks: bool
) -> None:
    """Multiplies like `linear._multiply` what `pays` accepts. parts: the larger segment first, which is
    `in_blocks`.
    """
    (segment, out), *others = parts
    n, form, splits = len(x), hopper_format(segment.format, in_blocks), len(out) if out.ndim == 3 else 1
    assert form is not None
    kernel = _few_kernel(n, parts, swiglu) if in_blocks else None
    if kernel is None:
        kernel = kernel_for(n, out.shape[-1] * (2 if swiglu else 1), splits, form, sum(part.n for part, _ in others))
    launches.n += 1
    if launches.compile_only:  # no weights are there yet
        begin(kernel)
        return
    given = _given(kernel, parts[0], x, rows if form.kind == E4M3 else None, swiglu)
    beside = _given(kernel.beside, others[0], x, None, False) if others else None
    n_beside = beside.arguments.n_tiles if beside else 0
    n_programs = min(given.arguments.n_tiles, max(1, chip().n_sms - n_beside))
    programs = ctypes.c_int(n_programs)
    addresses = [*given.addresses, ctypes.addressof(programs), *(beside.addresses if beside else ())]
    shape = n_programs + n_beside, kernel.threads, _room(kernel, segment.k, splits)
    start(kernel, shape, addresses, x.device.index)


def start(kernel: Compiled, shape: tuple[int, int, int], addresses: Sequence[int], device: int) -> None:
    """Starts a kernel. shape: programs, threads of each, and bytes of shared memory; addresses: of its
    arguments.
    """
    config = driver.CUlaunchConfig()
    config.gridDimX, config.blockDimX, config.sharedMemBytes = shape
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.hStream = torch.cuda.current_stream().cuda_stream
    if bound_levers().pdl and pdl_works():
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    _check(driver.cuLaunchKernelEx(config, _function(kernel, device), ctypes.addressof(pointers), 0))
