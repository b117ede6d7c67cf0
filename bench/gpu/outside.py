"""Experts outside the GPU: `python -m bench.gpu.outside --dummy qwen3.6-35b-a3b --format fp8 --gb 4,8,12,16`.

A model is measured with all experts on the GPU, and then with so many GB of them: what a decode of one and
of several sequences takes, the share of experts that were in slots, and prompts. Then come answers of 8
tokens, as many at once as the largest --n. Every token that is drawn in a decode is compared with that of
the first.

The roof of a decode is the time to read what is on the GPU, of experts those that the decode used, and to
bring what was in no slot over the link, one behind the other, at the speeds of the same run. That of a
prompt is the link alone, for what came over it. --skew makes rows of the routers longer, other ones in
each layer, as texts favour some experts. Rows say how many experts of a layer a decode used: random weights
send tokens to fewer than even routing does.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.flags import add_gpu_model
from bench.gpu.experiment import run_model
from deltic.bench.gpu import GpuModel, decode, need_gpu, prefill_ms, runner_of, shape_name
from deltic.bench.provenance import checked, writer
from deltic.bench.sweep import numbers
from deltic.commands.plan import decode_bytes
from deltic.config import ConfigError, EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.events import ExpertStats
from deltic.engine.messages import Request, SamplingParams
from deltic.models.loading import COUNTED_ROWS
from deltic.models.qwen.gpu_experts import layers_of_experts
from deltic.ops.gpu.launch import parse_levers
from deltic.ops.gpu.roofs import GpuRoofs, host_link
from deltic.ops.gpu.weight import rows_of

PROMPT, ANSWER = 64, 8
"""Tokens of a decode's prompts, and of the answers that are only compared."""

Part = tuple[dict[str, Any], list[list[int]]]
"""A row of the result, and the tokens that its sequences drew."""


@dataclass(frozen=True)
class Outside:
    """A model whose experts are on the GPU, or of which so many GB are."""

    model: GpuModel
    config: EngineConfig
    arguments: argparse.Namespace
    roofs: GpuRoofs
    link: float

    def measure(self, gb: float | None) -> Iterator[Part]:
        """Measures with slots of so many GB. None: all experts are on the GPU."""
        given = self.arguments
        sizes, skews = numbers(given.n, "--n", int), numbers(given.skew, "--skew", float)
        engine = self.model.engine(parse_levers(self.config.lever), max(sizes), expert_memory=gb)
        own = routers(self.model)
        even = [rows.clone() for rows in own]
        for skew in skews:
            for i, rows in enumerate(own):
                favour(rows, even[i], skew, i)
            torch.cuda.synchronize()
            decode(engine, max(sizes), PROMPT, given.output, seed=1)  # slots are warm
            for n in sizes:
                row, tokens = self._decodes(engine, n)
                yield {"gb": gb, "skew": skew} | row, tokens
            for n in numbers(given.prefill, "--prefill", int):
                yield {"gb": gb, "skew": skew} | self._prefills(engine, n), []
        if given.answers:
            yield {"gb": gb, "skew": skew, "answers": given.answers}, answers(engine, given.answers)
        for rows, before in zip(own, even, strict=True):
            rows.copy_(before)

    def _decodes(self, engine: Engine, n: int) -> Part:
        runner, shape, n_output = runner_of(engine), self.model.run.shape, self.arguments.output
        before, rounds, tokens = runner.experts or ExpertStats(), list[list[float]](), list[list[int]]()
        for i in range(self.arguments.rounds):
            times, drawn = decode(engine, n, PROMPT, n_output, seed=2 + i)
            rounds.append(times)
            tokens += drawn
        after, n_steps = runner.experts or ExpertStats(), self.arguments.rounds * (n_output - 1)
        n_hits, n_fetched = after.n_hits - before.n_hits, after.n_fetched - before.n_fetched
        brought = (after.n_bytes - before.n_bytes) / n_steps
        ms = 1000 * statistics.median(second for times in rounds for second in times)
        row: dict[str, Any] = {"slots": runner.plan.n_expert_slots, "n": n, "ms": round(ms, 3)}
        row |= {"round_ms": [round(1000 * statistics.median(times), 3) for times in rounds]}
        row |= {"tok_s": round(1000 * n / ms, 1)}
        if not n_hits + n_fetched:  # nobody has counted
            return row, tokens
        used = (n_hits + n_fetched) / n_steps  # `decode_bytes` has as many as even routing uses
        even = shape.n_layers * shape.n_experts * (1 - (1 - shape.n_experts_per_tok / shape.n_experts) ** n)
        inside = decode_bytes(shape, runner.plan.quantize, n, PROMPT + n_output // 2, COUNTED_ROWS)
        inside += (used - even) * runner.plan.outside_bytes / (len(routers(self.model)) * shape.n_experts)
        least_s = inside / self.roofs.read + brought / self.link
        row |= {"hits": round(n_hits / (n_hits + n_fetched), 4), "mb": round(brought / 1e6, 1)}
        return row | {"experts": round(used / shape.n_layers, 1), "roof": round(1000 * least_s / ms, 4)}, tokens

    def _prefills(self, engine: Engine, n_tokens: int) -> dict[str, Any]:
        runner, before = runner_of(engine), (runner_of(engine).experts or ExpertStats()).n_prefill_bytes
        rounds = prefill_ms(engine, n_tokens, self.arguments.rounds)
        ms, n_brought = statistics.median(rounds), (runner.experts or ExpertStats()).n_prefill_bytes - before
        brought = n_brought / (1 + self.arguments.rounds)  # one prompt has no time
        return {
            "slots": runner.plan.n_expert_slots,
            "prefill": n_tokens,
            "ms": round(ms, 2),
            "tok_s": round(1000 * n_tokens / ms),
            "round_ms": [round(one, 2) for one in rounds],
            "mb": round(brought / 1e6, 1),
            "roof": round(1000 * brought / self.link / ms, 4),
        }


def routers(model: GpuModel) -> list[Tensor]:
    """The routers' rows, bfloat16 [E + 1, H] each, of all layers."""
    return [rows_of("bench", moe.router) for moe in layers_of_experts(model.weights[0][0]).values()]


def favour(rows: Tensor, even: Tensor, skew: float, i_layer: int) -> None:
    """Writes rows of a router, even [E + 1, H], times 1 to skew in an order of the layer's own; the last, of
    the shared expert, as it is.
    """
    order = torch.randperm(len(rows) - 1, generator=torch.Generator().manual_seed(i_layer)).to(rows.device)
    rows[:-1] = even[:-1] * (1 + (skew - 1) * (order / len(rows))[:, None]).bfloat16()


def answers(engine: Engine, n: int) -> list[list[int]]:
    """The tokens of n answers to prompts of 1 to 72 tokens."""
    draw, tokens = random.Random(n), dict[str, list[int]]()
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    for i in range(n):
        ids = [draw.randrange(engine.info.vocab_size) for _ in range(draw.randrange(1, 73))]
        tokens[f"{i}"] = []
        engine.add(Request(id=f"{i}", prompt_ids=ids, params=params))
    while engine.has_work():
        for output in checked(engine.step()):
            tokens[output.id] += output.token_ids
    return list(tokens.values())


def bench(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """Prints a line for each measurement and writes a JSON file. Raises ConfigError."""
    need_gpu()
    if arguments.output < 4:
        raise ConfigError("--output must be at least 4: the first tokens of an answer are not counted")
    begin, roofs, link, name = time.perf_counter(), GpuRoofs.measured(), host_link(), shape_name(arguments, config)
    whole = Outside(GpuModel.load(config, arguments.format), config, arguments, roofs, link)
    expected, rows = list(whole.measure(None)), list[dict[str, Any]]()
    rows += [row for row, _ in expected]
    del whole
    print(f"{name}: link {link / 1e9:.1f} GB/s, read {roofs.read / 1e12:.2f} TB/s", *map(json.dumps, rows), sep="\n")
    model = GpuModel.load(replace(config, expert_memory=0.0), arguments.format)
    outside, device = Outside(model, config, arguments, roofs, link), torch.cuda.get_device_name()
    given = {flag: getattr(arguments, flag) for flag in ("skew", "output", "rounds")}
    told = {"roofs": {"read": roofs.read}, "link": link, "prompt": PROMPT, **given}
    write = writer("gpu-outside", name, device, arguments.out, **told)
    for gb in numbers(arguments.gb, "--gb", float):
        if time.perf_counter() - begin > 60 * arguments.minutes:
            print(f"{gb:g} GB and what follows are left out: {arguments.minutes:g} minutes are over")
            break
        for (row, tokens), (_, others) in zip(outside.measure(gb), expected, strict=True):
            differ = sum(one != other for one, other in zip(tokens, others, strict=True))
            rows.append(row | {"differ": differ, "compared": len(tokens)})
            print(json.dumps(rows[-1]), flush=True)
            write(rows=rows)
    write(is_whole=True, rows=rows)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_gpu_model(parser)
    parser.set_defaults(n="1,4,16")
    parser.add_argument("--gb", default="4,8,12,16", help="memory for experts, in GB")
    parser.add_argument("--prefill", default="8192", help="tokens of prompts")
    parser.add_argument("--output", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--answers", type=int, default=0, help="answers that are only compared, for each memory")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no other memory when they are over")
    parser.add_argument(
        "--skew",
        default="1,3",
        help="how many times as long as the shortest row of a router the longest is; 1: as random weights make them",
    )
    run_model(parser, bench)


if __name__ == "__main__":
    main()
