"""`deltic doctor`: the machine, the operators chosen, and which promises hold here."""

from __future__ import annotations

import platform
import sys
from io import StringIO

from rich.console import Console
from rich.table import Table

from deltic import __version__
from deltic.bench.machine import cpu_model
from deltic.config import free_memory_bytes, n_usable_cpus
from deltic.ops.table import INSTRUCTION_SETS, KernelError, chosen, cpu_flags, instruction_set
from deltic.roofs import multiply_peak, read_bandwidth

PROMISES = (
    ("P1 batch", "holds", "a sequence's logits have the same bits alone and in any batch"),
    ("P2 chunking", "holds", "any cut of the prompt gives the same bits, not only cuts at multiples of 64"),
    ("P3 cache", "not yet", "there is no prefix cache: every prompt is computed"),
    (
        "P4 life",
        "holds",
        "a preempted sequence is computed again with the same bits; there is no disk tier yet",
    ),
    ("P5 speculation", "not yet", "there is no speculative decoding"),
    ("P6 sampling", "holds", "a token depends on its logits, the seed and the position only"),
)
"""Clause, state on the CPU, meaning."""

ASSERTED = (
    "tests/cpu/test_purity.py asserts those that hold, bit for bit and for bfloat16, int8 and int4 weights: all on the "
    "library of the instruction set above, P1 and P2 on every library that this CPU can run. Bits are equal within a "
    "library, not between libraries."
)
"""On what the tests show it."""


def report() -> str:
    """The whole report as text. Takes about a second: it measures the two roofs."""
    out = StringIO()
    console = Console(file=out, width=110)
    n_cpus = n_usable_cpus()
    console.print(f"deltic {__version__} · Python {sys.version.split()[0]} · {platform.platform()}")
    console.print(f"{cpu_model()} · {n_cpus} usable CPUs · {free_memory_bytes() / 1e9:.1f} GB free")
    try:
        name = instruction_set()
    except KernelError as error:
        console.print(f"\n[bold red]{error}[/]")
        return out.getvalue()
    better = [set_name for set_name, needed in INSTRUCTION_SETS if needed <= cpu_flags()]
    console.print(
        f"read bandwidth {read_bandwidth(n_cpus) / 1e9:.1f} GB/s · multiply: bfloat16 {multiply_peak(n_cpus) / 1e9:.0f}, "
        f"int8 {multiply_peak(n_cpus, 'int8') / 1e9:.0f}, int4 {multiply_peak(n_cpus, 'int4') / 1e9:.0f} Gop/s"
    )
    console.print(
        f"instruction set: {name}"
        + ("" if better[0] == name else f" (the CPU could run {better[0]}: install again)")
    )
    table = Table("operator", "implementation", title="Operators", title_justify="left")
    for operator, implementation in chosen().items():
        table.add_row(operator, implementation)
    console.print(table)
    table = Table("promise", "here", "meaning", title="Promises", title_justify="left")
    for row in PROMISES:
        table.add_row(*row)
    console.print(table)
    console.print(ASSERTED)
    return out.getvalue()
