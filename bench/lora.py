"""What adapters cost a decode step on a CPU: `python -m bench.lora qwen3.5-0.8b --n 1,16 --rank 16`.

Of n sequences each has an adapter of its own, of this rank on every projection, experts included. Steps with
and without adapters take turns on one model of random weights. The last column is the bytes of the adapters
that such a step must read over those of the model: what it would cost at the same bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from array import array
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.flags import add_some
from bench.ops import find_shape
from deltic.__main__ import finished
from deltic.bench.provenance import code, machine, now, runs_directory
from deltic.bench.sweep import numbers
from deltic.commands import settings
from deltic.commands.plan import decode_bytes
from deltic.config import EngineConfig
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.step import Chunk, Draw, HeldAdapter, Sequence, Step
from deltic.machine import n_usable_cpus
from deltic.models.qwen.adapters import Adapter, Delta
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import empty_weights
from deltic.ops.arrays import bfloat16
from deltic.ops.cpu.program import instruction_set
from deltic.ops.matrix import Matrix
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.adapters import adapter_bytes
from deltic.runtime.cpu.device import Cpu

CONTEXT = 64


def random_adapter(shape: ModelShape, rank: int, seed: int) -> Adapter:
    """An adapter of this rank on every matrix of the layers but routers, for where sizes matter."""
    rng, deltas = np.random.default_rng(seed), dict[str, tuple[Delta, ...]]()
    for name, part in empty_weights(shape, None, True).named_parts():
        if isinstance(part, Matrix) and name.startswith("layers.") and not name.endswith(".router"):
            down, up = (
                rng.normal(0, 0.02, (part.n_matrices, *size)).astype(np.float32).astype(bfloat16)
                for size in ((rank, part.k), (part.n, rank))
            )
            deltas[name] = (Delta(0, down, up, 1.0),)
    return Adapter(f"{rank} {seed}".encode(), deltas, (), rank)


def measured(name: str, asked: EngineConfig, n: int, rank: int, n_threads: int, rounds: int) -> dict[str, Any]:
    """Medians and ranges of ms a step without and with adapters."""
    _, shape, _ = find_shape(name)
    quantize = asked.quantize
    adapters = [random_adapter(shape, rank, seed) for seed in range(n)]
    n_bytes = sum(map(adapter_bytes, adapters))
    config = EngineConfig(
        dummy=name, quantize=quantize, threads=n_threads, max_num_seqs=n, max_model_len=512, allow_lora_loading=True,
        max_loras=n, max_lora_rank=rank, lora_gb=n_bytes / 1e9 + 0.001, prefix_cache=False,
    )  # fmt: skip
    runner: Any = build_runner(config, lambda stage, done: None, Cpu())
    held = [runner.adapters.find(runner.adapters.load_now(adapter).key) for adapter in adapters]
    found: dict[bool, list[float]] = {False: [], True: []}
    for i in range(2 * rounds + 4):
        adapted = bool(i % 2)
        step = decode(n, held if adapted else [None] * n)
        begin = time.perf_counter()
        runner.step(step)
        if i >= 4:
            found[adapted].append(1000 * (time.perf_counter() - begin))
    both = {("with" if adapted else "without"): _spread(times) for adapted, times in found.items()}
    least = n_bytes / decode_bytes(shape, quantize, n, CONTEXT)
    return {
        "model": name,
        "quantize": quantize or "bf16",
        "n": n,
        "rank": rank,
        "adapter_bytes": n_bytes,
        "least": 1 + least,
        **both,
    }


def decode(n: int, held: list[HeldAdapter | None]) -> Step:
    """A decode of one token each, behind CONTEXT."""
    params = SamplingParams(temperature=0.0)
    chunks, draws = [], []
    for i in range(n):
        request = Request(id=f"{i}", prompt_ids=[], params=params)
        tokens = array("i", [1 + i] * (CONTEXT + 1))
        pages = list(range(2 * i, 2 * i + 2))
        sequence = Sequence(
            request, 0, 0, tokens, CONTEXT, CONTEXT, pages=pages, batch_slot=i, state_slot=i, adapter=held[i]
        )
        chunks.append(Chunk(sequence, CONTEXT, 1))
        draws.append(Draw(i, sequence))
    return Step(chunks=chunks, draws=draws)


def _spread(times: list[float]) -> dict[str, float]:
    return {"ms": statistics.median(times), "least_ms": min(times), "most_ms": max(times)}


def bench(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """Measures, prints a table and a last line of JSON, and writes a JSON file; 0."""
    rows, n_threads = [], config.threads or n_usable_cpus()
    table = Table("N", "ms a step", "with adapters", "x", "x of bytes", title_justify="left")
    table.title = f"{arguments.shape}, {config.quantize or 'bf16'}: an adapter of rank {arguments.rank} a sequence, {n_threads} threads"
    for n in numbers(arguments.n, "--n", int):
        with Console(stderr=True).status(f"measuring {n}"):
            row = measured(arguments.shape, config, n, arguments.rank, n_threads, arguments.rounds)
        rows.append(row)
        without, adapted = row["without"]["ms"], row["with"]["ms"]
        table.add_row(f"{n}", f"{without:.1f}", f"{adapted:.1f}", f"{adapted / without:.2f}", f"{row['least']:.2f}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    found = {"bench": "lora", "shape": arguments.shape, "quantize": config.quantize, "rank": arguments.rank}
    found |= {"threads": n_threads, "rows": rows, "date": now().isoformat(), "machine": machine(), "code": code()}
    found["instructions"] = instruction_set()
    path = runs_directory(arguments.out) / f"lora-{arguments.shape}-{now():%H%M%S}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({"bench": "lora", "file": str(path)}))
    return 0


def main(given: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        "python -m bench.lora", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", nargs="?", default="qwen3.5-0.8b", metavar="SHAPE")
    parser.add_argument("--n", default="1,16", help="sequences that decode (default: 1,16)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default: 16)")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each kind (default: 15)")
    parser.add_argument("--out", metavar="DIR", help="write the JSON result into this directory")
    add_some(parser, "quantize", "threads")
    arguments = parser.parse_args(given)
    return finished(lambda: bench(arguments, settings.engine(arguments)))


if __name__ == "__main__":
    sys.exit(main())
