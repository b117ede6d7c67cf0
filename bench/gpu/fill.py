"""A model that is started as it is served, and as many sequences as its plan promises, each to its last
token.

    python -m bench.gpu.fill --dummy qwen3.5-27b --format ud-q4_k_xl --as-chip sm_89 --max-model-len 65536

With --as-chip a plan has the memory of that card, and so has torch: what a plan forgot ends in an error here.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch

from bench.flags import add_gpu_model
from bench.gpu.experiment import run_model
from deltic.bench.gpu import need_gpu, shape_name
from deltic.bench.provenance import checked, writer
from deltic.config import EngineConfig, changed
from deltic.engine.cache.cache import pages_for
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.ops.gpu.chip import free_bytes
from deltic.runtime.build import build_runner, gpu_device

N_GENERATED = 64
"""Tokens of each sequence that are drawn; the rest is its prompt."""


def fill(engine: Engine, n: int, length: int) -> dict[str, int]:
    """Runs n sequences of so many tokens. Returns how many each has at its end, by its finish reason."""
    draw, ended = random.Random(0), dict[str, int]()
    for i in range(n):
        prompt = [draw.randrange(engine.info.vocab_size) for _ in range(length - N_GENERATED)]
        params = SamplingParams(max_tokens=N_GENERATED, temperature=0.0, ignore_eos=True)
        engine.add(Request(id=str(i), prompt_ids=prompt, params=params))
    n_tokens = dict.fromkeys(map(str, range(n)), length - N_GENERATED)
    while engine.has_work():
        for output in checked(engine.step()):
            n_tokens[output.id] += len(output.token_ids)
            if output.finish_reason is not None:
                key = f"{output.finish_reason} at {n_tokens[output.id]}"
                ended[key] = ended.get(key, 0) + 1
    return ended


def bench(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """Starts, fills, prints a line and writes a JSON file. Exit status 1: a sequence did not end there."""
    need_gpu(arguments.as_chip)
    device = torch.device("cuda", 0)
    begun, free = time.perf_counter(), free_bytes(device)
    runner: Any = build_runner(config, lambda stage, done: None, gpu_device(config), arguments.format)
    start_s, plan = time.perf_counter() - begun, runner.plan
    n = min(plan.max_num_seqs, plan.n_pages // pages_for(plan.max_model_len))
    begun = time.perf_counter()
    ended = fill(Engine(runner), n, plan.max_model_len)
    result: dict[str, Any] = {
        "settings": changed(config),
        "sequences": n,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "max_step_tokens": plan.max_step_tokens,
        "max_drafts": plan.max_drafts,
        "n_pages": plan.n_pages,
        "n_checkpoints": plan.n_checkpoints,
        "free_gb": round(free / 1e9, 2),
        "planned_gb": round((plan.total_bytes - plan.host_bytes) / 1e9, 2),
        "torch_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2),
        "left_gb": round(free_bytes(device) / 1e9, 2),
        "start_s": round(start_s, 1),
        "stages_s": runner.info.start_s,
        "fill_s": round(time.perf_counter() - begun, 1),
        "ended": ended,
    }
    print(shape_name(arguments, config), result)
    write = writer("gpu-fill", shape_name(arguments, config), runner.info.device, arguments.out)
    write(is_whole=True, **result)
    return 0 if ended == {f"length at {plan.max_model_len}": n} else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_gpu_model(parser, "max_drafts", "max_num_seqs", "n_checkpoints", "cache_host_gb")
    run_model(parser, bench)
