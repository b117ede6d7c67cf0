"""What serving costs beside the engine alone, in one run: `python -m bench.served --shape qwen3.5-0.8b`.

Each round measures, one after another on the same machine with the same random weights:
  offline   the engine in this process: the median step of N decodes
  served    `deltic serve` and N streams over HTTP: tokens a second while all N are running
  prefill   over HTTP, nobody else running: time to the first token of a 64-token prompt
  TTFT      the same while N - 1 others decode
The client is on the same cores as the server, as the offline engine's caller is.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from typing import Any

import msgspec

from deltic.bench.load import percentile
from deltic.bench.provenance import checked, code, fault_of, machine, now, runs_directory
from deltic.commands.endpoint import DONE, Endpoint, LocalServer
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu

PROMPT_TOKENS = 64
MODEL = "dummy"
N_PROBES = 8
"""Prompts a round whose first token is timed, alone and among others."""


class Offline:
    """The engine without a server."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = Engine(build_runner(config, lambda stage, done: None, Cpu()))
        self.n_requests = 0

    def step_s(self, prompts: list[list[int]], n_steps: int) -> float:
        """The median step in which every sequence decodes one token."""
        ids = [f"{self.n_requests}-{i}" for i in range(len(prompts))]
        self.n_requests += 1
        params = SamplingParams(max_tokens=n_steps + 64, temperature=0.0, ignore_eos=True, seed=0)
        for id, prompt in zip(ids, prompts, strict=True):
            self.engine.add(Request(id=id, prompt_ids=prompt, params=params))
        waiting = set(ids)
        while waiting:
            waiting -= {output.id for output in checked(self.engine.step()) if output.token_ids}
        times = []
        for _ in range(n_steps):
            begin = time.perf_counter()
            outputs = self.engine.step()
            times.append(time.perf_counter() - begin)
            checked(outputs, len(ids))
        for id in ids:
            self.engine.abort(id)
        return statistics.median(times)


async def stream(endpoint: Endpoint, prompt: list[int], max_tokens: int) -> list[float]:
    """Arrival times of the events with a token, the time of sending first.

    Raises RuntimeError for a refusal, and for an answer of another length.
    """
    times, reason, n_tokens = [time.perf_counter()], None, 0
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    reply = await endpoint.open("POST", "/v1/completions", body)
    if reply.status != 200:
        raise RuntimeError((await reply.read()).decode())
    async for arrival, payload in reply.events():
        event = {} if payload == DONE else msgspec.json.decode(payload)
        if event.get("choices"):
            times.append(arrival)
            reason = event["choices"][0]["finish_reason"] or reason
        if event.get("usage"):
            n_tokens = event["usage"]["completion_tokens"]
    if fault := fault_of(reason, n_tokens, max_tokens):
        raise RuntimeError(fault)
    return times


async def decode_rate(endpoint: Endpoint, prompts: list[list[int]], n_steps: int) -> float:
    """Tokens a second of all streams together, from when all have begun until the first ends."""
    found = await asyncio.gather(*(stream(endpoint, prompt, n_steps + 40) for prompt in prompts))
    begin, end = max(times[1] for times in found), min(times[-1] for times in found)
    steps = [b - a for times in found for a, b in itertools.pairwise(times[1:]) if begin <= a and b <= end]
    return len(prompts) / statistics.mean(steps)


async def first_tokens(endpoint: Endpoint, n_others: int, draw: Any) -> tuple[list[float], float | None]:
    """Seconds to the first token of each probe, while n_others decode; and the median step of those."""
    others = [asyncio.create_task(stream(endpoint, draw(), 100_000)) for _ in range(n_others)]
    gaps: list[float] = []
    if others:
        await asyncio.sleep(3.0)  # their own prompts are over
    found = []
    for _ in range(N_PROBES):
        await asyncio.sleep(random.uniform(0.05, 0.3))
        times = await stream(endpoint, draw(), 1)
        found.append(times[1] - times[0])
    if others:
        watched = await stream(endpoint, draw(), 12)
        gaps = [b - a for a, b in itertools.pairwise(watched[1:])]
    for task in others:
        if task.done():
            task.result()  # it failed
            raise RuntimeError("an answer ended before the probes did: there were fewer beside them")
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return found, statistics.median(gaps) if gaps else None


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(0)

    def draw() -> list[int]:
        return [rng.randrange(1000) for _ in range(PROMPT_TOKENS)]

    settings: dict[str, Any] = {"dummy": arguments.shape, "max_num_seqs": 32, "max_model_len": 4096}
    if arguments.quantize:
        settings["quantize"] = arguments.quantize
    offline = Offline(EngineConfig(**settings))
    flags = [part for name, value in settings.items() for part in ("--" + name.replace("_", "-"), str(value))]
    server = LocalServer([*flags, "--served-model-name", MODEL])
    rounds = []
    try:
        endpoint = await server.wait_ready()
        for i in range(arguments.rounds):
            prompts = [draw() for _ in range(arguments.n)]
            offline_s = offline.step_s(prompts, 24)
            served = await decode_rate(endpoint, prompts, 24)
            alone, _ = await first_tokens(endpoint, 0, draw)
            among, step_s = await first_tokens(endpoint, arguments.n - 1, draw)
            await asyncio.sleep(1.0)  # the cancelled ones are gone
            row = {
                "offline_tok_s": arguments.n / offline_s,
                "served_tok_s": served,
                "prefill_s": statistics.median(alone),
                "ttft_s": among,
                "step_s": step_s,
            }
            rounds.append(row)
            print(f"round {i + 1}: " + json.dumps(row, default=lambda x: x), flush=True)
    finally:
        server.stop()
    ttft = percentile([t for row in rounds for t in row["ttft_s"]], 95)
    step, prefill = (statistics.median(row[name] for row in rounds) for name in ("step_s", "prefill_s"))
    return {
        "rounds": rounds,
        "served_over_offline": statistics.median(row["served_tok_s"] / row["offline_tok_s"] for row in rounds),
        "ttft_p95_s": ttft,
        "two_steps_and_prefill_s": 2 * step + prefill,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.5-0.8b")
    parser.add_argument("--quantize")
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments))
    head = {"bench": "served", "shape": arguments.shape, "quantize": arguments.quantize, "n": arguments.n}
    path = (
        runs_directory(arguments.out) / f"served-{arguments.shape}-{arguments.quantize or 'bf16'}-{now():%H%M%S}.json"
    )
    path.write_text(
        json.dumps(head | {"date": now().isoformat(), "machine": machine(), "code": code()} | result, indent=1)
    )
    print(
        f"served / offline {result['served_over_offline']:.3f}; TTFT p95 {result['ttft_p95_s'] * 1e3:.0f} ms, two steps and "
        f"its own prefill {result['two_steps_and_prefill_s'] * 1e3:.0f} ms; {path}"
    )


if __name__ == "__main__":
    main()
