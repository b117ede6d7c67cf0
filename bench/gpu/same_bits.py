"""The same bits on any number of GPUs.

    python -m bench.gpu.same_bits --dummy qwen3.5-27b --tp-invariant 8 --on 1,2,4,8

A model that is cut into as many parts as --tp-invariant says answers the same prompts on so many GPUs each,
all at once and then one of them alone. Tokens and log-probabilities must be equal to the bit to those of the
first number of GPUs; a difference is an error.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from bench.flags import add_gpu_model, add_layers
from bench.gpu.experiment import run_model
from deltic.bench.gpu import GpuModel, need_gpu, shape_name
from deltic.bench.provenance import checked, writer
from deltic.bench.sweep import numbers
from deltic.config import ConfigError, EngineConfig, changed
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.ops.gpu.launch import parse_levers

LONGEST, LOGPROBS = 600, 3
"""Tokens of the longest prompt, and log-probabilities beside each token's own."""
ROWS = 16
"""Sequences at once."""

Answer = list[tuple[int, float, list[float]]]
"""Tokens, their log-probabilities, and those of the likeliest."""


def answers(engine: Engine, prompts: Sequence[list[int]], n_output: int) -> list[Answer]:
    """What the engine answers, every other one drawn by a seed."""
    found: dict[str, Answer] = {}
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=n_output, temperature=float(i % 2), seed=i, ignore_eos=True, logprobs=LOGPROBS
        )
        engine.add(Request(id=f"{i}", prompt_ids=prompt, params=params))
        found[f"{i}"] = []
    while engine.has_work():
        for output in checked(engine.step()):
            for token in output.logprobs or []:
                found[output.id].append((token.token_id, token.logprob, [other for _, other in token.top]))
    return list(found.values())


def bench(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """Prints a line for each number of GPUs and writes a JSON file. Exit status 1: answers differ."""
    need_gpu(arguments.as_chip)
    most, sizes, name = config.tp_invariant, numbers(arguments.on, "--on", int), shape_name(arguments, config)
    if most is None:
        raise ConfigError("--tp-invariant: say how many parts the model is cut into, as --tp-invariant 8")
    sizes = [n for n in sizes if n <= torch.cuda.device_count()]
    rows, first = list[dict[str, Any]](), list[Answer]()
    write = writer(
        "gpu-same-bits",
        name,
        torch.cuda.get_device_name(),
        arguments.out,
        cuts=most,
        layers=arguments.layers,
        settings=changed(config),
        prompts=arguments.prompts,
        output=arguments.output,
    )
    for n in sizes:
        begin = time.perf_counter()
        model = GpuModel.load(replace(config, tensor_parallel=n), arguments.format, arguments.layers)
        engine, draw = model.engine(parse_levers(config.lever), ROWS), random.Random(0)
        ids = range(engine.info.n_prompt_ids or engine.info.vocab_size)
        prompts = [draw.choices(ids, k=draw.randrange(1, LONGEST)) for _ in range(arguments.prompts)]
        found = answers(engine, prompts, arguments.output)
        first = first or found
        alone = answers(engine, prompts[:1], arguments.output)
        differ = sum(one != other for one, other in zip([*found, *alone], [*first, first[0]], strict=True))
        n_tokens = sum(map(len, found)) + len(alone[0])
        seconds = round(time.perf_counter() - begin, 1)
        rows.append({"gpus": n, "compared": len(prompts) + 1, "tokens": n_tokens, "differ": differ, "seconds": seconds})
        print(json.dumps(rows[-1]), flush=True)
        write(rows=rows)
        del engine, model
    write(is_whole=True, rows=rows)
    return int(any(row["differ"] for row in rows))


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_gpu_model(flags)
    add_layers(flags)
    add = flags.add_argument
    add("--on", default="1,2,4,8", metavar="N,N,...", help="numbers of GPUs; more than there are: left out")
    add("--prompts", type=int, default=40, metavar="N", help="default: 40")
    add("--output", type=int, default=48, metavar="TOKENS", help="of each answer (default: 48)")
    run_model(flags, bench)


if __name__ == "__main__":
    main()
