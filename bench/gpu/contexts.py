"""A decode behind long contexts: `python -m bench.gpu.contexts --dummy SHAPE --context 1024,32768,262144`.

A recorded step is replayed alone behind contexts that are not computed: pages are used as they come, and
again where there are too few. Its roof has the bytes of keys and values.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.flags import add_gpu_model, add_layers
from bench.gpu.experiment import run_model
from deltic.bench.gpu import GpuModel, need_gpu, replay_ms, runner_of, shape_name
from deltic.bench.provenance import writer
from deltic.bench.sweep import numbers
from deltic.commands.plan import decode_bytes
from deltic.config import ConfigError, EngineConfig, changed
from deltic.models.loading import COUNTED_ROWS
from deltic.models.qwen.shape import ModelShape
from deltic.ops.gpu.launch import parse_levers
from deltic.ops.gpu.roofs import GpuRoofs
from deltic.runtime.gpu.parallel import ParallelRunner
from deltic.runtime.gpu.text import GpuTextRunner

CONTEXT_REPLAYS, CONTEXT_ROUNDS = 10, 5
"""Of a step behind a context, one token further each time."""
LEAST_CONTEXT = CONTEXT_REPLAYS * CONTEXT_ROUNDS + 11
"""`replay_ms` leaves 10 tokens free behind the last."""


def context_row(
    runner: GpuTextRunner | ParallelRunner, shape: ModelShape, roofs: GpuRoofs, n: int, context: int
) -> dict[str, Any]:
    """What a step of n sequences takes, the last of which have `context` keys, but for a few."""
    n_keys, n_shards = context - LEAST_CONTEXT + 1, runner.plan.n_shards
    ms = replay_ms(runner, n, n_keys, CONTEXT_REPLAYS, CONTEXT_ROUNDS)
    mean = n_keys + CONTEXT_REPLAYS * CONTEXT_ROUNDS // 2
    n_bytes = n_shards * decode_bytes(shape, runner.plan.quantize, n, mean, COUNTED_ROWS)
    n_kv_bytes = n_shards * n * mean * shape.kv_bytes_per_token
    return {
        "n": n,
        "context": context,
        "ms": round(ms, 4),
        "gb": round(n_bytes / 1e9, 3),
        "kv_gb": round(n_kv_bytes / 1e9, 3),
        "roof": round(n_bytes / roofs.read / ms * 1000, 4),
    }


def bench(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """Measures each context; prints a table and writes a JSON file. Raises ConfigError."""
    need_gpu(arguments.as_chip)
    sizes, contexts = numbers(arguments.n, "--n", int), numbers(arguments.context, "--context", int)
    if min(contexts) < LEAST_CONTEXT:
        raise ConfigError(f"--context {arguments.context}: at least {LEAST_CONTEXT} tokens each")
    config = replace(config, max_model_len=config.max_model_len or max(contexts))
    assert config.max_model_len is not None
    if max(contexts) > config.max_model_len:
        raise ConfigError(f"--context {arguments.context}: more than --max-model-len {config.max_model_len}")
    roofs, name = GpuRoofs.measured(), shape_name(arguments, config)
    model = GpuModel.load(config, arguments.format, arguments.layers)
    engine = model.engine(parse_levers(config.lever), max(sizes))
    runner, shape = runner_of(engine), model.run.shape
    write = writer(
        "gpu-context",
        name,
        engine.info.device,
        arguments.out,
        kv_cache_dtype=shape.kv_cache_dtype,
        gpus=model.device.n_gpus,
        cuts=model.device.n_cuts,
        layers=arguments.layers,
        levers=dataclasses.asdict(runner.levers),
        settings=changed(config),
        n_pages=runner.plan.n_pages,
        roofs=dataclasses.asdict(roofs),
    )
    rows = list[dict[str, Any]]()
    for context in contexts:
        for n in sizes:
            rows.append(context_row(runner, shape, roofs, n, context))
            write(rows=rows)
    title = f"{name} on {engine.info.device}: a step behind a context, keys and values in {shape.kv_cache_dtype}"
    heads = ("context", "N", "ms a step", "GB a step", "of keys and values", "% of read roof")
    table = Table(*heads, title=title, title_justify="left")
    for row in rows:
        table.add_row(
            f"{row['context']}",
            f"{row['n']}",
            f"{row['ms']:.3f}",
            f"{row['gb']:.2f}",
            f"{row['kv_gb']:.2f}",
            f"{row['roof']:.0%}",
        )
    Console(width=120).print(table)
    write(is_whole=True, rows=rows)
    return 0


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_gpu_model(flags)
    add_layers(flags)
    text = "tokens in front of a step (default: 1024,32768)"
    flags.add_argument("--context", default="1024,32768", metavar="T,T,...", help=text)
    run_model(flags, bench)


if __name__ == "__main__":
    main()
