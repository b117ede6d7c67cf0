"""Experts outside the GPU: `python -m bench.gpu.outside --dummy qwen3.6-35b-a3b --format int4 --gb 4,8`.

A model is measured with all experts on the GPU, and then with so many GB of them: what a decode of one and of
several sequences takes, the share of experts that were in slots, and prompts. Every token that is drawn is
compared with that of the first. The roof of a decode is the time to read what is on the GPU and to bring what
was not over the link, at the speeds of the same run, one behind the other. --skew makes routers favour some
experts, as those of texts do; 0 leaves them as random weights make them, nearly even.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.flags import add_gpu_model
from bench.gpu.experiment import run_model
from deltic.bench.gpu import GpuModel, decode, need_gpu, prefill_ms, runner_of, shape_name, write_result
from deltic.bench.sweep import numbers
from deltic.commands.plan import decode_bytes
from deltic.config import EngineConfig
from deltic.engine.messages import ExpertStats
from deltic.models.loading import COUNTED_ROWS
from deltic.models.qwen.gpu_experts import layers_of_experts
from deltic.ops.gpu.launch import parse_levers
from deltic.ops.gpu.roofs import GpuRoofs, host_link
from deltic.ops.gpu.weight import rows_of
from deltic.runtime.gpu.parallel import ParallelRunner
from deltic.runtime.gpu.text import GpuTextRunner


def favour(model: GpuModel, skew: float) -> None:
    """Makes rows of the routers longer, other ones in each layer: a longer row is chosen more often."""
    for i, moe in enumerate(layers_of_experts(model.weights[0][0]).values()):
        rows = rows_of("bench", moe.router)
        order = torch.randperm(len(rows) - 1, generator=torch.Generator().manual_seed(i)).to(rows.device)
        rows[:-1] *= 1 + skew * (order / len(rows))[:, None].bfloat16()


def seen(runner: GpuTextRunner | ParallelRunner) -> tuple[int, int, int]:
    """Experts in slots, others, and their bytes."""
    stats = runner.experts or ExpertStats()
    return stats.n_hits, stats.n_fetched, stats.n_bytes


def measure(
    model: GpuModel, arguments: argparse.Namespace, config: EngineConfig, gb: float | None, roofs: GpuRoofs, link: float
) -> tuple[list[dict[str, Any]], list[list[list[int]]]]:
    """Rows of the table, and the tokens of each decode."""
    sizes, prompts = numbers(arguments.n, "--n", int), numbers(arguments.prefill, "--prefill", int)
    engine = model.engine(parse_levers(config.lever), max(sizes), expert_memory=gb)
    runner, shape = runner_of(engine), model.run.shape
    found, tokens = [], []
    for n in sizes:
        decode(engine, n, 64, arguments.output, seed=1)  # slots are warm
        before = seen(runner)
        times, drawn = decode(engine, n, 64, arguments.output, seed=2)
        tokens.append(drawn)
        hits, fetched, n_bytes = (b - a for a, b in zip(before, seen(runner), strict=True))
        ms, brought = statistics.median(times) * 1000, n_bytes / max(1, arguments.output)
        inside = decode_bytes(shape, runner.plan.quantize, n, 64 + arguments.output // 2, COUNTED_ROWS)
        roof_ms = 1000 * (inside / roofs.read + brought / link)
        row = {
            "gb": gb,
            "slots": runner.plan.n_expert_slots,
            "n": n,
            "ms": round(ms, 3),
            "tok_s": round(1000 * n / ms, 1),
        }
        row |= {"hits": round(hits / max(1, hits + fetched), 4), "mb": round(brought / 1e6, 1)}
        found.append(row | {"roof": round(roof_ms / ms, 3)})
    for n_tokens in prompts:
        ms = statistics.median(prefill_ms(engine, n_tokens, 3))
        away = runner.plan.outside_bytes * (1 - runner.plan.n_expert_slots / max(1, shape.n_experts))
        n_chunks = -(-n_tokens // runner.plan.max_step_tokens)
        row = {"gb": gb, "slots": runner.plan.n_expert_slots, "prefill": n_tokens, "ms": round(ms, 2)}
        found.append(row | {"tok_s": round(1000 * n_tokens / ms), "roof": round(1000 * n_chunks * away / link / ms, 3)})
    return found, tokens


def bench(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """Prints a table and writes a JSON file. Raises ConfigError."""
    need_gpu()
    roofs, link, name = GpuRoofs.measured(), host_link(), shape_name(arguments, config)
    whole = GpuModel.load(config, arguments.format)
    favour(whole, arguments.skew)
    rows, expected = measure(whole, arguments, config, None, roofs, link)
    del whole
    config = replace(config, expert_memory=0.0)
    model = GpuModel.load(config, arguments.format)
    favour(model, arguments.skew)
    for gb in numbers(arguments.gb, "--gb", float):
        found, tokens = measure(model, arguments, config, gb, roofs, link)
        n_answers = sum(map(len, expected))
        differ = sum(
            a != b for one, other in zip(expected, tokens, strict=True) for a, b in zip(one, other, strict=True)
        )
        rows += [row | {"differ": f"{differ} of {n_answers}"} for row in found]
    heads = ("gb", "slots", "n", "prefill", "ms", "tok_s", "hits", "mb", "roof", "differ")
    table = Table(
        *heads, title=f"{name}: experts in so many GB; link {link / 1e9:.1f} GB/s, read {roofs.read / 1e12:.2f} TB/s"
    )
    for row in rows:
        table.add_row(*(str(row.get(head, "")) for head in heads))
    Console(width=140).print(table)
    write_result(
        "gpu-outside", name, torch.cuda.get_device_name(), arguments.out, skew=arguments.skew, link=link, rows=rows
    )
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_gpu_model(parser)
    parser.set_defaults(n="1,4,16")
    parser.add_argument("--gb", default="4,8,12,16", help="memory for experts, in GB")
    parser.add_argument("--prefill", default="8192", help="tokens of prompts")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--skew", type=float, default=0.0, help="how much routers favour some experts")
    run_model(parser, bench)


if __name__ == "__main__":
    main()
