"""Launching the GPU kernels: levers, programmatic dependent launch, and the count of launches.

Every kernel of a step is started through `launch` (Triton) or `matmul` (the vendor's library), so that what a
recorded step contains can be counted and asserted. With `TRITON_INTERPRET=1` the same kernels run on the CPU:
slow, and for tests.

Programmatic dependent launch (PDL, Hopper and later): a kernel may be started before the one in front of it
has ended. Each of our kernels that takes part (a constexpr argument PDL) calls `gdc_wait`, which returns when
the kernel in front has ended and its writes are seen. Where it pays, it lets the next one start before that,
first of all. This is safe: the kernel in front ended after its own wait, so everything before it has ended,
too. Before its wait a kernel may read only what no other of the same step writes: weights, what earlier steps
left (a recorded step starts when the one before has ended), and the row arrays of `begin_decode`, which does
not let the next one start early.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from deltic.ops.geometry import Allocate
from deltic.ops.gpu.chip import chip

# Sums of products stay float32 to the end, whatever the shape (bench/gpu/e7_cublas_rows.py).
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True if kernels run in Triton's interpreter, on the CPU. Decided when Triton is imported."""


def _lever(text: str, *, exact: bool = True) -> bool:
    """Declares a lever. text: what it does, for people; exact: whether it leaves every bit as it is."""
    field: bool = dataclasses.field(default=True, metadata={"text": text, "exact": exact})
    return field


@dataclass(frozen=True)
class Levers:
    """Every optimisation that can be switched for a measurement. The defaults are what is served.

    Read where a step is planned or recorded, never inside a kernel's arithmetic: none changes what is
    computed, and `exact` says which leave every bit as it is. No operator takes them: those hold that are
    `bound`.
    """

    graphs: bool = _lever("replay recorded steps")
    run_ahead: bool = _lever("start the next decode before the last one was read")
    pdl: bool = _lever("start a kernel before the one in front ends")
    split_k: bool = _lever("narrow projections split along K", exact=False)
    silu_epilogue: bool = _lever("SwiGLU gate inside gate_up")
    hopper: bool = _lever("multiply in CUDA C++ where it is faster, on Hopper")
    fused_sums: bool = _lever("sums over GPUs inside the norm")
    peer: bool = _lever("GPUs write to each other's memory, not to the host's")

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Lets these hold for what this thread plans, records and starts meanwhile. It also decorates what
        is to run by them later.
        """
        token = _bound.set(self)
        try:
            yield
        finally:
            _bound.reset(token)


_bound: ContextVar[Levers] = ContextVar("levers")


def bound_levers() -> Levers:
    """Levers that hold here. Raises LookupError where none are bound: no default is taken unseen."""
    levers = _bound.get(None)
    if levers is None:
        raise LookupError("no levers are bound in this thread; start operators within `with levers.bound():`")
    return levers


def parse_levers(settings: tuple[str, ...]) -> Levers:
    """Levers with these changes, each NAME=on or NAME=off. Raises ValueError."""
    names = [field.name for field in dataclasses.fields(Levers)]
    values: dict[str, bool] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in names:
            raise ValueError(f"--lever {setting}: no such lever; there are {', '.join(names)}")
        if value not in ("on", "off"):
            raise ValueError(f"--lever {setting}: must be one of {name}=on, {name}=off")
        values[name] = value == "on"
    return Levers(**values)


class _Launches:
    """State of kernel launches: their number, and whether they only compile."""

    n = 0
    """Started since this was last set to 0."""
    compile_only = False
    """True if nothing is started: Triton is told of the kernels, and tensors may be on torch's "meta" device
    (runtime/gpu/compile.py).
    """


launches = _Launches()


def pdl_works() -> bool:
    """Returns whether this chip has programmatic dependent launch."""
    return not INTERPRETED and chip().has_hopper_copies


def launch(
    kernel: triton.JITFunction, grid: tuple[int, ...] | Callable[..., object], *args: object, pdl: int = True,
    **meta: object
) -> None:
    """Starts a Triton kernel. pdl: whether one that has the constexpr argument PDL may start early."""
    launches.n += 1
    if "PDL" in kernel.arg_names:
        meta["PDL"] = pdl = pdl and bound_levers().pdl and pdl_works()
        if pdl:
            meta["launch_pdl"] = True
    if INTERPRETED:
        for option in ("num_warps", "num_stages", "launch_pdl", "maxnreg"):
            meta.pop(option, None)
    if launches.compile_only:
        kernel.warmup(*args, grid=grid, **meta)
    else:
        kernel[grid](*args, **meta)


def _library(call: Callable[..., object], *args: object, **options: object) -> None:
    """Starts what is not Triton's."""
    launches.n += 1
    if not launches.compile_only:
        call(*args, **options)


def matmul(x: Tensor, w: Tensor, out: Tensor) -> None:
    """out[m, n] = sum_k x[m, k] w[n, k] by the vendor's library: all bfloat16, float32 sum."""
    _library(torch.mm, x, w.t(), out=out)


def matmul_slices(x: Tensor, w: Tensor, out: Tensor) -> None:
    """out[s] = x W^T over slice s of K, by the vendor's library: x bfloat16 [N, K], w bfloat16 [M, K], out
    float32 [S, N, M].
    """
    n_slices, (n, k) = out.shape[0], x.shape
    if n_slices == 1:
        _library(torch.mm, x, w.t(), out_dtype=torch.float32, out=out[0])
    else:
        slices = w.view(-1, n_slices, k // n_slices).permute(1, 2, 0)
        _library(
            torch.bmm, x.view(n, n_slices, k // n_slices).transpose(0, 1), slices, out_dtype=torch.float32, out=out
        )


def scaled_matmul(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, out: Tensor, *, in_blocks: bool) -> None:
    """out[t, m] = the sum over blocks of 128 of K of (sum of x[t, k] w[m, k]) x_scale[block, t] and the
    block's scale of w, by the vendor's library: e4m3 codes as uint8 [T, K] and [M, K], float32 scales,
    bfloat16 or float32 out.

    w_scale: [K / 128, M]; in_blocks, one for 128 rows: [M / 128, K / 128 rounded up to a multiple of 4].
    """
    kinds, e4m3 = torch.nn.functional.ScalingType, torch.float8_e4m3fn
    recipes = [kinds.BlockWise1x128.value], [(kinds.BlockWise128x128 if in_blocks else kinds.BlockWise1x128).value]
    _library(
        torch.ops.aten._scaled_mm_v2.out, x.view(e4m3), w.view(e4m3).t(), [x_scale.t()], recipes[0], [], [w_scale.t()],
        recipes[1], [], None, out.dtype, out=out,
    )


def spread_rows(row: Tensor, out: Tensor) -> Tensor:
    """out, after each of its rows is this one."""
    _library(out.copy_, row.expand_as(out))
    return out


def copy_rows(x: Tensor, out: Tensor) -> None:
    """out = x."""
    _library(out.copy_, x)


def take_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """out[r] = x[rows[r]]; rows: int32."""
    _library(torch.index_select, x, 0, rows, out=out)


def allocate_on(device: torch.device | str) -> Allocate:
    """Allocates what a plan has counted, filled with zeros."""
    return lambda name, size, dtype: torch.zeros(size, dtype=dtype, device=device)


def allocate_in_host(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocates memory of the host that every GPU reads and writes, filled with zeros."""
    return torch.zeros(size, dtype=dtype, pin_memory=not INTERPRETED)


def next_power_of_2(n: int) -> int:
    return int(triton.next_power_of_2(n))
