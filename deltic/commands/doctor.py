"""`deltic doctor`: the machine, the kernels that it runs, and which promises hold here."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deltic import __version__
from deltic.machine import cpu_model, cuda_driver, free_memory_bytes, memory_bound, n_usable_cpus
from deltic.ops.contract import KernelError
from deltic.ops.cpu.program import INSTRUCTION_SETS, cpu_flags, instruction_set
from deltic.roofs import multiply_peak, read_bandwidth

PROMISES = (
    ("P1 batch", "holds", "a sequence's logits have the same bits alone and in any batch"),
    ("P2 chunking", "holds", "any cut of the prompt gives the same bits, not only cuts at multiples of 64"),
    ("P3 cache", "holds", "behind a cached prefix, from whatever tier, a prompt has the bits of a cold one"),
    (
        "P4 life",
        "holds",
        "a sequence that was preempted, or that finds its cache after a restart, goes on with the same bits",
    ),
    ("P5 speculation", "not yet", "there is no speculative decoding"),
    ("P6 sampling", "holds", "a token depends on its logits, the seed and the position only"),
)
"""Clause, state on the CPU, meaning."""

ASSERTED = (
    "tests/cpu/test_purity.py and test_prefix_bits.py assert those that hold, bit for bit: all on the library of the "
    "instruction set above, P1 and P2 on every library that this CPU can run, for bfloat16, int8 and int4 weights. Bits are "
    "equal within a library, not between libraries."
)
"""On what the tests show it."""

GPU_PROMISES = (
    ("P1 batch", "holds", "a sequence's logits have the same bits alone and in any batch"),
    ("P2 chunking", "holds", "a prompt is cut at multiples of 64 only; whichever of them, the bits are the same"),
    (
        "P3 cache",
        "holds",
        "as on the CPU; what was decoded is not shared, the next turn's prompt is computed by prefill",
    ),
    ("P4 life", "holds", "as on the CPU; lost tokens of an answer come back one decode each, in the same bits"),
    ("P5 speculation", "not yet", "there is no speculative decoding"),
    ("P6 sampling", "holds", "a token depends on its logits, the seed and the position only"),
)
"""Clause, state on a GPU, meaning."""

GPU_ASSERTED = (
    "tests/gpu asserts those that hold, bit for bit, on the GPU it runs on. Prefill and decode differ in bits there, so a token "
    "of a prompt always goes through the one and a generated one through the other. Bits of a CPU and of a GPU differ."
)

GPU_OPERATORS = (
    (
        "linear, decode",
        "Triton, K split by the weight's shape; the vendor's library for many rows where K is not split",
    ),
    ("linear, prefill", "the vendor's library from one full wave of tiles on, else Triton; the same bits"),
    ("gdn", "Triton: one read and one write of the state (decode), chunks of 64 tokens (prefill)"),
    ("attention", "Triton: splits by a row's own length (decode), tiles of 64 keys in order (prefill)"),
    ("moe", "Triton: streams of the experts' weights (decode), products of gathered rows (prefill)"),
    ("norms, sample", "Triton"),
)
"""Kernel families; which one runs follows from shapes alone."""

HOPPER = (9, 0)

SLOWER = 0.9
"""A rate below this part of another's is said to be slower: two measurements of a moment differ by less."""


def report() -> str:
    """The whole report as text. Takes about a second: it measures the CPU's two roofs."""
    out = StringIO()
    console = Console(file=out, width=110)
    console.print(f"deltic {__version__} · Python {sys.version.split()[0]} · {platform.platform()}")
    _cpu(console)
    _gpu(console)
    return out.getvalue()


def _cpu(console: Console) -> None:
    n_cpus = n_usable_cpus()
    console.print(f"{cpu_model()} · {n_cpus} usable CPUs · {free_memory_bytes() / 1e9:.1f} GB free{memory_bound()}")
    try:
        name = instruction_set()
    except KernelError as error:
        console.print(f"\n[bold red]{error}[/]")
        return
    better = [set_name for set_name, needed in INSTRUCTION_SETS if needed <= cpu_flags()]
    peaks = {name: multiply_peak(n_cpus, name) / 1e9 for name in ("bf16", "int8", "int4")}
    console.print(
        f"read bandwidth {read_bandwidth(n_cpus) / 1e9:.1f} GB/s · multiply: bfloat16 {peaks['bf16']:.0f}, "
        f"int8 {peaks['int8']:.0f}, int4 {peaks['int4']:.0f} Gop/s"
    )
    slower = [name for name in ("int8", "int4") if peaks[name] < SLOWER * peaks["bf16"]]
    if slower:
        console.print(
            f"[bold]Prompts are computed more slowly with --quantize {' or '.join(slower)} than in bfloat16 here: less memory, and faster "
            "decodes of few sequences, are what it brings.[/]"
        )
    console.print(
        f"instruction set: {name}" + ("" if better[0] == name else f" (the CPU could run {better[0]}: install again)")
    )
    _promises(console, "on the CPU", PROMISES, ASSERTED)


def _gpu(console: Console) -> None:
    if cuda_driver() is None:
        console.print("\nGPU: there is no NVIDIA driver here; models run on the CPU")
        return
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
        console.print(
            "\n[bold red]GPU: there is a driver, but torch or Triton is not installed: pip install 'deltic\\[gpu]', or give --device cpu[/]"
        )
        return
    import torch
    import triton

    if not torch.cuda.is_available():
        console.print(f"\nGPU: torch {torch.__version__} sees none; models run on the CPU")
        return

    from deltic.ops.gpu.launch import pdl_works

    chip, (free, total) = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info(0)
    capability = (chip.major, chip.minor)
    console.print(
        f"\n{chip.name} · {free / 1e9:.1f} of {total / 1e9:.1f} GB free · {chip.multi_processor_count} multiprocessors · "
        f"compute capability {chip.major}.{chip.minor}\n"
        f"torch {torch.__version__} · Triton {triton.__version__} · driver {_driver() or 'unknown'} · programmatic dependent "
        f"launch: {'yes' if pdl_works() else 'no'}"
    )
    if capability != HOPPER:
        console.print(
            "[bold]The GPU backend was measured and tested on compute capability 9.0 only. That tile shapes leave bits alone is "
            "a fact about that chip: run tests/gpu here before you rely on a promise.[/]"
        )
    table = Table("operator", "implementation", title="Operators on the GPU", title_justify="left")
    for operator in GPU_OPERATORS:
        table.add_row(*operator)
    console.print(table)
    _promises(console, "on the GPU", GPU_PROMISES, GPU_ASSERTED)


def _driver() -> str:
    """Version of the NVIDIA driver; empty where it cannot be read."""
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", path.read_text()) if path.exists() else None
    return found[0] if found else ""


def _promises(console: Console, where: str, promises: tuple[tuple[str, str, str], ...], note: str) -> None:
    table = Table("promise", "here", "meaning", title=f"Promises {where}", title_justify="left")
    for promise in promises:
        table.add_row(*promise)
    console.print(table)
    console.print(note)
