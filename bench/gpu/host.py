"""What the host costs a step on a GPU, without one: `python -m bench.gpu.host`.

An engine for a tiny model runs on the CPU with recordings that start nothing, so that only the host's work is
left: schedule, send changes, read tokens, commit. Prints microseconds of a step in which all sequences
decode, of all threads' CPU and of the wall. With --ranks 2 two GPUs are played by two such runners, each with
its thread. What starting a recording and a copy takes the driver is not in it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import time
from unittest import mock

os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}  # a GPU that is here has no part in it

import torch

from deltic.bench.provenance import checked, code, machine, now, runs_directory
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.runtime.build import build_runner
from deltic.runtime.gpu import device
from deltic.runtime.gpu.parallel import GpuThread, ParallelRunner
from deltic.runtime.gpu.text import GpuTextRunner
from tests.tiny import tiny_checkpoint

N_STEPS = 200


def make_runner(n: int) -> GpuTextRunner:
    """Makes a runner for n sequences that computes nothing, and draws one token for ever."""
    config = EngineConfig(
        model=str(tiny_checkpoint("dense")), max_num_seqs=n, max_model_len=512, max_step_tokens=2048, n_pages=8 * n,
        n_checkpoints=64, cache_host_gb=0.0,
    )  # fmt: skip
    with mock.patch.object(device, "INTERPRETED_BYTES", 8 << 30):
        runner = build_runner(config, lambda stage, done: None, device.Gpu())
    assert isinstance(runner, GpuTextRunner)
    for recording in runner.recordings.made.values():
        recording.body = lambda: None
    for drawn in runner.workspace.out.values():
        drawn.token.fill_(5)
    return runner


def as_ranks(runners: list[GpuTextRunner]) -> ParallelRunner:
    """Makes one of them, as of GPUs that hold parts of a model."""
    joint, first = object.__new__(ParallelRunner), runners[0]
    names = ("plan", "levers", "max_logit_rows", "tiers", "pictures", "adapters", "pools", "info", "replays")
    for name in names:
        setattr(joint, name, getattr(first, name))
    joint.runners, joint.first, joint._lost = runners, first, None
    joint._threads = [GpuThread(torch.device("cpu")) for _ in runners]
    return joint


def steps_us(runner: GpuTextRunner | ParallelRunner, n: int) -> list[tuple[float, float]]:
    """Microseconds of each step of n decodes: of all threads' CPU, and of the wall."""
    engine, rng = Engine(runner), random.Random(0)
    params = SamplingParams(max_tokens=N_STEPS + 100, temperature=1.0, seed=1, ignore_eos=True)
    for i in range(n):
        engine.add(Request(id=f"{i}", prompt_ids=[rng.randrange(250) for _ in range(64)], params=params))
    times = list[tuple[float, float]]()
    while len(times) < N_STEPS:
        begin = time.process_time(), time.perf_counter()
        outputs = engine.step()
        if len(checked(outputs)) == n and engine.n_steps > n // 16 + 5:  # no prompt is beside them
            times.append(((time.process_time() - begin[0]) * 1e6, (time.perf_counter() - begin[1]) * 1e6))
    for i in range(n):
        engine.abort(f"{i}")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", default="1,64,256,512")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    sizes = [int(n) for n in arguments.n.split(",")]
    runners = [make_runner(max(sizes)) for _ in range(arguments.ranks)]
    runner: GpuTextRunner | ParallelRunner = as_ranks(runners) if len(runners) > 1 else runners[0]
    gc.collect()
    gc.freeze()  # as the engine's process does
    rows = []
    for n in sizes:
        times, walls = (sorted(part) for part in zip(*steps_us(runner, n), strict=True))
        row = {"n": n, "step_us": statistics.median(times), "p90_us": times[len(times) * 9 // 10]}
        rows.append(row | {"wall_us": statistics.median(walls)})
        print(json.dumps({name: round(value, 1) for name, value in rows[-1].items()}), flush=True)
    path = runs_directory(arguments.out) / f"steps-gpu-{now():%H%M%S}.json"
    head = {
        "bench": "host-gpu",
        "ranks": arguments.ranks,
        "date": now().isoformat(),
        "machine": machine(),
        "code": code(),
    }
    path.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
