"""Attention of a decode over a long context, by the format of keys and values, on a CPU:
`python -m bench.kv qwen3.5-0.8b --context 32768 --rows 1,4`.

One layer; each row is a sequence with as much context behind it, in pages of its own. Bytes are those of the
pages, the roof is them over the read bandwidth of the same run, and `of bf16` how much faster than bfloat16 a
format is. `a step` is what a decode step of the model would gain, if all else took the time of reading its
weights (`--quantize`) and states at that bandwidth.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.flags import add_some
from bench.ops import best_s, find_shape
from deltic.__main__ import finished
from deltic.bench.provenance import code, machine, now, runs_directory
from deltic.bench.sweep import numbers
from deltic.commands import settings
from deltic.config import EngineConfig
from deltic.engine.cache.cache import pages_for
from deltic.machine import n_usable_cpus
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import weight_bytes
from deltic.ops.arrays import Array, bfloat16, copy, zeros
from deltic.ops.cpu.attention import AttentionInputs, attention, attn_prepare, kv_pages
from deltic.ops.cpu.program import Program, instruction_set
from deltic.ops.geometry import PAGE_SIZE, AttentionWeights
from deltic.ops.kv_formats import KV_FORMATS, KvPages, on_device
from deltic.roofs import read_bandwidth


def written_pages(shape: ModelShape, name: str, n_pages: int, n_threads: int) -> Array:
    """Pages of one layer in this format, of random keys and values."""
    heads, kv = shape.heads, KV_FORMATS[name]
    size, dtype = kv_pages(n_pages, 1, heads, kv)
    pages = zeros(size, dtype)
    proj = np.random.default_rng(0).standard_normal((PAGE_SIZE, heads.row), np.float32)
    at, table = np.arange(PAGE_SIZE, dtype=np.int32), np.zeros((1, 1), np.int32)
    angles = np.ones((PAGE_SIZE, shape.rotary_dim // 2), np.float32)
    query, norm = zeros((PAGE_SIZE, heads.n_q * heads.dim), bfloat16), np.zeros(heads.dim, np.float32)
    program = Program(n_threads)
    inputs = AttentionInputs(
        n_tokens=np.array(PAGE_SIZE, np.int32), positions=at, token_batch_slot=at * 0, page_table=table,
        n_seqs=np.array(0, np.int32), seq_start=at, seq_context=at, batch_slot=at,
    )  # fmt: skip
    weights = AttentionWeights(norm, norm, 1e-6, angles, 0 * angles)
    attn_prepare(program, proj, heads, weights, inputs, KvPages(pages[:, 0], kv), query)
    program.run()
    raw = pages.view(np.uint8)
    raw[1:] = raw[0]
    return pages


def seconds_of(shape: ModelShape, name: str, rows: int, context: int, n_threads: int, seconds: float) -> float:
    """Of one layer's attention."""
    heads, n = shape.heads, pages_for(context)
    pages = written_pages(shape, name, rows * n, n_threads)
    table = np.random.default_rng(1).permutation(rows * n).astype(np.int32).reshape(rows, n)
    query, out = (zeros((rows, heads.n_q * heads.dim), bfloat16) for _ in range(2))
    copy(query, np.random.default_rng(2).standard_normal(query.shape, np.float32))
    program = Program(n_threads)
    own, cache = np.arange(rows, dtype=np.int32), KvPages(pages[:, 0], KV_FORMATS[name])
    inputs = AttentionInputs(
        n_tokens=np.array(rows, np.int32), positions=own * 0 + context - 1, token_batch_slot=own, page_table=table,
        n_seqs=np.array(rows, np.int32), seq_start=np.arange(rows + 1, dtype=np.int32),
        seq_context=np.full(rows, context - 1, np.int32), batch_slot=own,
    )  # fmt: skip
    proj, records = np.zeros((rows, heads.row), np.float32), zeros(heads.records_size(context), np.float32)
    attention(program, query, proj, heads, inputs, cache, records, out)
    return best_s(program.run, seconds)


def measure(shape: ModelShape, rows: list[int], context: int, config: EngineConfig, seconds: float) -> dict[str, Any]:
    n_threads = config.threads or n_usable_cpus()
    read = read_bandwidth(n_threads)
    found = []
    for n in rows:
        rest = weight_bytes(shape, config.quantize) + 2 * n * shape.state_bytes
        of_bf16: dict[str, float] = {}
        for name in on_device("cpu"):
            took = seconds_of(shape, name, n, context, n_threads, seconds)
            n_bytes = n * context * shape.n_kv_heads * KV_FORMATS[name].head_bytes(shape.head_dim)
            step = rest / read + shape.n_attn_layers * took
            of_bf16 = of_bf16 or {"attention": took, "step": step}
            found.append(
                {
                    "format": name,
                    "rows": n,
                    "us": round(took * 1e6, 1),
                    "bytes": n_bytes,
                    "gb_s": round(n_bytes / took / 1e9, 2),
                    "roof_share": round(n_bytes / read / took, 3),
                    "of_bf16": round(of_bf16["attention"] / took, 3),
                    "step_of_bf16": round(of_bf16["step"] / step, 3),
                }
            )
    return {"read_gb_s": round(read / 1e9, 1), "threads": n_threads, "rows": found}


def bench(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """Measures, prints a table and a last line of JSON, and writes a JSON file; 0."""
    name, shape, _ = find_shape(arguments.shape)
    rows = numbers(arguments.rows, "--rows", int)
    with Console(stderr=True).status("measuring"):
        found = measure(shape, rows, arguments.context, config, arguments.seconds)
    found = {"bench": "kv", "shape": name, "context": arguments.context, "quantize": config.quantize} | found
    found |= {"date": now().isoformat(), "machine": machine(), "code": code(), "instructions": instruction_set()}
    title = (
        f"{name}: attention of a layer at {arguments.context} tokens, {found['threads']} threads, {instruction_set()}, memory reads "
        f"{found['read_gb_s']} GB/s"
    )
    columns = ("rows", "format", "us", "GB/s", "of roof", "of bf16", "a step")
    table = Table(*columns, title=title, title_justify="left")
    for row in found["rows"]:
        table.add_row(
            str(row["rows"]), row["format"], f"{row['us']:.0f}", f"{row['gb_s']:.1f}", f"{row['roof_share']:.0%}",
            f"{row['of_bf16']:.2f}", f"{row['step_of_bf16']:.2f}",
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    path = runs_directory(arguments.out) / f"kv-{name}-{now():%H%M%S}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({"bench": "kv", "file": str(path)}))
    return 0


def main(given: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        "python -m bench.kv", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", nargs="?", default="qwen3.5-0.8b", metavar="SHAPE")
    parser.add_argument("--context", type=int, default=32768, help="tokens behind each row (default: 32768)")
    parser.add_argument("--rows", default="1,4", help="sequences that decode (default: 1,4)")
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each measurement (default: 1)")
    parser.add_argument("--out", metavar="DIR", help="write the JSON result into this directory")
    add_some(parser, "quantize", "threads")
    arguments = parser.parse_args(given)
    return finished(lambda: bench(arguments, settings.engine(arguments)))


if __name__ == "__main__":
    sys.exit(main())
