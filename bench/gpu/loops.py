"""What bounds each product of a decode, by what its kernel is made of: no GPU takes part.

    python -m bench.gpu.loops --dummy qwen3.5-27b --format ud-q4_k_xl --n 1

Each matrix of a model, by kind and format: Triton's kernel is compiled for Hopper and disassembled. Of its
loop over K, for each weight: instructions of a thread, and those of the integer units, which have half of the
rate. Of a program: registers and shared memory; programs that a multiprocessor holds, and how often the chip
has to be filled. Microseconds for all matrices of the kind: what reading them takes at H200's rate, and what
their instructions take at CLOCK if none ever waits. A segment is taken as a product of its own. The same of
the kernel in CUDA C++ (few_codes.py), where it multiplies and NVRTC or nvcc is here: in a turn of 256
columns.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton

from bench.gpu.experiment import parser
from deltic.bench.provenance import code, now
from deltic.models.qwen.published import published_shape
from deltic.models.qwen.weights import dummy_formats, empty_weights
from deltic.ops.gpu import few_codes, hopper, linear
from deltic.ops.gpu.chip import CHIPS
from deltic.ops.gpu.launch import Levers
from deltic.ops.gpu.weight import DeviceStore
from deltic.ops.matrix import Matrix, Segment
from deltic.runtime.gpu.compile import collecting, compile_for, fix_keys

CHIP = CHIPS["sm_90"]
READ, CLOCK = 4.37e12, 1.755e9
"""Bytes and cycles a second of an H200: what its runs have measured, and what it is specified for."""
REGISTERS, SHARED, SCHEDULERS = 65_536, 228 << 10, 4
"""Of a multiprocessor; 1 KiB of shared memory a program is the system's."""
INTEGER = re.compile(r"(LOP3|PLOP3|SHF|PRMT|IADD3|VIADD|LEA|SEL|ISETP|VIMNMX|F2FP|SGXT|MOV)\b")


@dataclass(frozen=True)
class Loop:
    """A kernel's loop over K, counted in instructions of a warp, and what a program of it takes."""

    instructions: int
    integer: int
    registers: int
    shared: int


def loop_of(text: str) -> Counter[str]:
    """Instructions by name of the smallest loop that multiplies, in a disassembly. Empty if there is none."""
    names: list[str] = []
    labels: dict[str, int] = {}
    found: list[Counter[str]] = []
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif one := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([\w.]+)(.*);", line):
            names.append(one[1])
            to = re.search(r"\(\s*(\.L_x_\d+)\)", one[2]) if one[1].startswith("BRA") else None
            if to and to[1] in labels and any("MMA" in name for name in names[labels[to[1]] :]):
                found.append(Counter(names[labels[to[1]] :]))
    return min(found, key=Counter.total, default=Counter())


def turn_of(text: str) -> Counter[str]:
    """Instructions by name of a turn of the loop around all that multiplies, but for what is jumped over
    where another turn follows.
    """
    names: list[str] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif one := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([\w.]+)(.*);", line):
            if one[1].startswith("BRA") and (to := re.search(r"\(\s*(\.L_x_\d+)\)", one[2])):
                jumps.append((len(names), to[1]))
            names.append(one[1])
    multiply = [i for i, name in enumerate(names) if "MMA" in name]
    around = [(labels[to], at + 1) for at, to in jumps if labels[to] <= multiply[0] and at > multiply[-1]]
    begin, end = min(around, key=lambda loop: loop[1] - loop[0])
    over = next((at + 1, labels[to]) for at, to in jumps if at > multiply[-1] and at < labels[to] <= end)
    return Counter(names[begin : over[0]] + names[over[1] : end])


def in_cuda(segment: Segment, splits: int, n: int, swiglu: bool, scratch: Path) -> dict[str, Any]:
    """Cells of the kernel in CUDA C++; none where it does not multiply, or nothing compiles it."""
    out = torch.empty((n, segment.n // 2) if swiglu else (splits, n, segment.n), device="meta")
    plan = few_codes.plan_of(n, [(segment, out)], swiglu)
    has_nvrtc = vars(hopper)["nvrtc"] is not None
    if plan is None or not (has_nvrtc or shutil.which("nvcc")):
        return {}
    if has_nvrtc:
        scratch.write_bytes(hopper._compile(plan.kernel))
    else:
        source = scratch.with_suffix(".cu")
        source.write_text(plan.kernel.source())
        subprocess.run(["nvcc", "-w", "-arch=sm_90a", "-std=c++17", "-cubin", "-o", scratch, source], check=True)
    names, weights = turn_of(disassembly(scratch)), 128
    stage = few_codes.stage_of(plan.kernel.forms[0], plan.tiles[0], plan.kernel.tokens)
    return {
        "cuda_instructions": names.total() / weights, "cuda_registers": registers_of(scratch),
        "cuda_integer": sum(count for name, count in names.items() if INTEGER.match(name)) / weights,
        "cuda_tiles": plan.tiles[0], "cuda_programs": plan.programs[0], "cuda_stages": plan.stages[0],
        "cuda_stage_bytes": stage.n_bytes,
    }  # fmt: skip


def disassembly(file: Path) -> str:
    """Says what is in a file of machine code."""
    tool = triton.knobs.nvidia.nvdisasm.path
    return subprocess.run([tool, "-c", str(file)], capture_output=True, text=True, check=True).stdout


def registers_of(file: Path) -> int:
    """Registers of a thread."""
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"REG:(\d+)", said)[-1])


def compiled(segment: Segment, splits: int, n: int, swiglu: bool, scratch: Path) -> tuple[Loop, linear.Narrow, int]:
    """The loop, the configuration and the number of programs of a product of n rows with a segment."""
    m, k = segment.n, segment.k
    config = (
        linear.narrow_config(n, m, k // splits, splits)
        if segment.format.codes == "bf16"
        else linear.decoded_config(n, m, k // splits, splits, segment.format)
    )
    x = torch.empty(n, k, device="meta", dtype=torch.bfloat16)
    out = (
        torch.empty(n, m // 2, device="meta", dtype=torch.bfloat16)
        if swiglu
        else torch.empty(splits, n, m, device="meta")
    )
    linear._narrow_kernel.device_caches.clear()  # what was compiled before is a job again
    with collecting() as jobs:
        linear._multiply(x, [(segment, out)], swiglu, config)
    (job,) = jobs
    kernel = job.kernel.preload(job.specialisation)
    scratch.write_bytes(kernel.asm["cubin"])
    names = loop_of(disassembly(scratch))
    integer = sum(count for name, count in names.items() if INTEGER.match(name))
    loop = Loop(names.total(), integer, registers_of(scratch), kernel.metadata.shared)
    return loop, config, -(-m // config.block_m) * splits * -(-n // linear._token_tile(n))


def row(name: str, segment: Segment, splits: int, n: int, times: int, scratch: Path) -> dict[str, Any]:
    """A line of the table."""
    loop, config, programs = compiled(segment, splits, n, name == "gate_up", scratch)
    each = config.block_m * config.block_k * config.unroll / (32 * config.num_warps)  # weights of a thread
    registers = -(-loop.registers // 8) * 8 * 32 * config.num_warps
    together = min(REGISTERS // registers, SHARED // (loop.shared + 1024))
    weights = times * segment.n * segment.k
    cycles = weights / 32 / SCHEDULERS / CHIP.n_sms
    cuda = in_cuda(segment, splits, n, name == "gate_up", scratch)
    if cuda:
        tiles = cuda["cuda_tiles"]
        rounds = -(-(-(-segment.n // (16 * tiles)) * splits) // cuda["cuda_programs"])
        busiest = rounds * tiles * 16 * CHIP.n_sms / segment.n / splits  # beside what all have in the mean
        most = max(cuda["cuda_instructions"], 2 * cuda["cuda_integer"])
        cuda["cuda_issue_us"] = cycles * most * busiest / CLOCK * 1e6
    return {
        "product": name, "format": segment.format.name, "n": segment.n, "k": segment.k, "splits": splits,
        "times": times, "MB": times * segment.data.nbytes / 1e6, "tile": f"{config.block_m} x {config.block_k}",
        "stages": config.num_stages, "instructions": loop.instructions / each, "integer": loop.integer / each,
        "registers": loop.registers, "shared": loop.shared, "together": together,
        "waves": programs / (together * CHIP.n_sms), "programs": programs,
        "read_us": times * segment.data.nbytes / READ * 1e6,
        "issue_us": cycles / each * max(loop.instructions, 2 * loop.integer) / CLOCK * 1e6, **cuda,
    }  # fmt: skip


def products(arguments: SimpleNamespace) -> Counter[tuple[str, Matrix]]:
    """Matrices of a decode, by the last word of their names, and how many there are alike."""
    shape = published_shape(arguments.dummy)
    shape = replace(shape, formats=dummy_formats(shape, arguments.format)) if arguments.format != "bf16" else shape
    weights = empty_weights(shape, None, shape.tie_word_embeddings, DeviceStore("meta"))
    found: Counter[Any] = Counter()
    kept: dict[Any, tuple[str, Matrix]] = {}
    for name, part in weights.named_parts():
        if isinstance(part, Matrix) and part.n_matrices == 1 and name.startswith(("layers", "lm_head")):
            key = name.rpartition(".")[2], part.n, part.k, tuple((s.n, s.format) for s in part.segments)
            kept.setdefault(key, (key[0], part))
            found[key] += 1
    return Counter({kept[key]: count for key, count in found.items()})


@Levers().bound()
def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--dummy", default="qwen3.5-27b", metavar="SHAPE")
    flags.add_argument("--format", default="ud-q4_k_xl", metavar="NAME")
    flags.add_argument("--n", type=int, default=1, help="rows of x (default: 1)")
    arguments: Any = flags.parse_args()
    compile_for(CHIP)
    fix_keys()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        for (name, w), times in products(arguments).items():
            for segment in w.segments:
                splits = linear.k_splits(w.n, w.k) if name not in ("gate_up", "lm_head") else 1
                rows.append(row(name, segment, splits, arguments.n, times, Path(folder) / "kernel.cubin"))
                print(
                    json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in rows[-1].items()}), flush=True
                )
    for key in ("MB", "read_us", "issue_us", "cuda_issue_us"):
        print(key, round(sum(each.get(key, each["issue_us"]) for each in rows)))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        about = {"bench": "loops", "date": now().isoformat(), "triton": triton.__version__, "code": code()}
        about |= {"dummy": arguments.dummy, "format": arguments.format, "n": arguments.n}
        file = arguments.out / f"loops-{arguments.dummy}-{arguments.format}-{arguments.n}.json"
        file.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
