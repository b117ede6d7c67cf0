"""`deltic bench gpu`: how long decodes and prefills of a shape take on a GPU, beside its roofs.

A decode is measured as it is served: N prompts are prefilled, then every sequence decodes, and a step's time
is what passes between two steps of the engine, scheduler and all. Beside it stands the same recorded step
replayed alone. Roofs are measured in the same process: a read of memory that is larger than the cache, and a
matrix product of 8192 x 8192 x 8192.

bench/gpu measures more of a model with what is here: drafts, adapters, long contexts, levers.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from deltic.bench.provenance import checked, writer
from deltic.bench.sweep import numbers
from deltic.commands.plan import decode_bytes
from deltic.config import ConfigError, EngineConfig, changed
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.step import Chunk, HeldAdapter, silent
from deltic.engine.step import Sequence as Row
from deltic.json_types import JsonObject
from deltic.models.loading import COUNTED_ROWS, Store
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.shard import Cuts
from deltic.models.qwen.weights import Weights
from deltic.ops.geometry import PAGE_SIZE
from deltic.ops.gpu.chip import emulate
from deltic.ops.gpu.launch import Levers, parse_levers
from deltic.ops.gpu.roofs import GpuRoofs
from deltic.ops.gpu.weight import DeviceStore
from deltic.runtime.adapters import NO_ADAPTERS, AdapterRoom
from deltic.runtime.build import settle_text
from deltic.runtime.fit import make_plan
from deltic.runtime.gpu import device as gpu
from deltic.runtime.gpu.collect import collect
from deltic.runtime.gpu.compile import begin_compiling
from deltic.runtime.gpu.parallel import ParallelRunner
from deltic.runtime.gpu.record import Recording
from deltic.runtime.gpu.text import GpuTextRunner
from deltic.runtime.model import TextModel


@dataclass(frozen=True)
class GpuModel:
    """A shape and its weights on the device, with which runners are made.

    A model that is cut has the shape of its largest part, and by GPU the weights of each of its parts.
    """

    run: TextModel
    device: gpu.Gpu
    weights: list[list[Weights]]
    format: str | None
    """Format of random weights, see `dummy_formats`."""
    n_layers: int | None = None
    """Layers of a dummy that are run, the first ones; None: all."""

    @classmethod
    def load(cls, config: EngineConfig, format: str | None = None, n_layers: int | None = None) -> GpuModel:
        """Loads what the settings name, with the draft head if they have drafts, and without a vision tower.

        format, n_layers: of a dummy, see `settle_text`. Raises ConfigError.
        """
        device = gpu.Gpu(n_gpus=config.tensor_parallel, n_cuts=config.tp_invariant)
        device.find_reach()
        run = settle_text(config, device, format, n_layers)
        if run.shape.has_draft_head and device.n_cuts > 1:
            raise ConfigError("drafts are measured on one GPU: leave --tensor-parallel and --tp-invariant out")

        def load(store: Store, part: Cuts | None, i: int = 0) -> Weights:
            return run.load(store, silent, part)[0]

        has_experts = config.expert_memory is None
        weights = (
            device.parts(run.cuts, load, has_experts)
            if run.cuts
            else [[load(DeviceStore("cuda", has_experts=has_experts), None)]]
        )
        return cls(run, device, weights, format, n_layers)

    def engine(self, levers: Levers, n_rows: int, adapters: AdapterRoom = NO_ADAPTERS, **settings: Any) -> Engine:
        """Makes an engine for up to n_rows sequences, without a prefix cache: prompts come again. The one
        before must be gone.

        adapters: room for some. settings: those that are not the model's, such as drafts that are off.
        """
        gc.collect()
        torch.cuda.empty_cache()
        config = replace(
            self.run.config, max_num_seqs=max(n_rows, 8), prefix_cache=False, allow_cache_transfer=False, **settings
        )
        model = replace(settle_text(config, self.device, self.format, self.n_layers), tower=None, adapters=adapters)
        held = (
            sum(part.n_bytes for part in of_gpu) - (len(of_gpu) - 1) * of_gpu[0].embed.n_bytes
            for of_gpu in self.weights
        )
        in_host = sum(s.data.nbytes for s in self.weights[0][0].embed.segments if not s.data.is_cuda)
        free = self.device.free_bytes() + max(held) - in_host
        if self.run.config.expert_memory is not None:
            free -= sum(memory.nbytes for part in self.weights[0] for memory in part.experts().values())
        levers = replace(levers, peer=levers.peer and self.device.levers.peer)
        kind = gpu.TextOnGpu(levers)
        kind.check(model.shape)
        plan = make_plan(kind, model, free)
        with levers.bound():
            begin_compiling(plan, collect).wait(silent)
            drafters = model.load_drafters(self.device.stores(plan))[0]
            runner = gpu.text_runner(plan, self.device.devices, self.weights, drafters=drafters)
        runner.info = msgspec.structs.replace(runner.info, prefix_cache=False)
        return Engine(runner)


def decode(
    engine: Engine, n: int, n_prompt: int, n_output: int, seed: int = 0, adapters: Sequence[bytes] = (b"",)
) -> tuple[list[float], list[list[int]]]:
    """Measures seconds of each step in which all n sequences decode; returns the tokens drawn, too.

    adapters: keys of those that sequences have in turn.
    """
    draw = random.Random(seed)
    for i in range(n):
        prompt = [draw.randrange(engine.info.vocab_size) for _ in range(n_prompt)]
        params = SamplingParams(max_tokens=n_output, temperature=0.0, ignore_eos=True)
        adapter = adapters[i % len(adapters)]
        engine.add(Request(id=f"{seed}-{i}", prompt_ids=prompt, params=params, adapter=adapter))
    tokens: dict[str, list[int]] = {f"{seed}-{i}": [] for i in range(n)}
    times = []
    last = time.perf_counter()
    while engine.has_work():
        outputs = engine.step()
        elapsed, last = time.perf_counter() - last, time.perf_counter()
        for output in checked(outputs):
            tokens[output.id] += output.token_ids
        if min(map(len, tokens.values())) > 2 and max(map(len, tokens.values())) < n_output:
            times.append(elapsed)
    return times, list(tokens.values())


def runner_of(engine: Engine) -> GpuTextRunner | ParallelRunner:
    """The engine's runner, which is a GPU's."""
    assert isinstance(engine.runner, GpuTextRunner | ParallelRunner)
    return engine.runner


def replay_ms(
    runner: GpuTextRunner | ParallelRunner,
    n_rows: int,
    n_keys: int,
    n_replays: int = 50,
    n_rounds: int = 5,
    adapters: Sequence[int] = (),
) -> float:
    """Median milliseconds of one decode of n_rows rows with n_keys keys each, replayed back to back; of the
    slowest GPU. adapters: slots of the rows' adapters, if they have any.

    No sequence may be open, nor anything cached: pages and state slots are used as they come.
    """
    if isinstance(runner, ParallelRunner):
        return max(runner.on_all(lambda own: replay_ms(own, n_rows, n_keys, n_replays, n_rounds, adapters)))
    with torch.cuda.stream(runner.stream):
        bodies = _replayed(runner, n_rows, n_keys, n_keys + n_replays * n_rounds, adapters)
        times = []
        for _ in range(n_rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(n_replays):
                for body in bodies:
                    body.run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / n_replays)
    return float(sorted(times)[n_rounds // 2])


def _replayed(
    runner: GpuTextRunner, n_rows: int, n_keys: int, max_keys: int, adapters: Sequence[int]
) -> list[Recording]:
    """Fills the rows of a decode that is replayed until they have max_keys keys. Returns what it starts."""
    n_pages, recordings = -(-(max_keys + 10) // PAGE_SIZE), runner.recordings
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1 << 20)
    request, chunks = Request(id="", prompt_ids=[], params=params), []
    for i in range(n_rows):
        pages = [(i * n_pages + j) % runner.plan.n_pages for j in range(n_pages)]
        sequence = Row(request, 0, 0, array("i", [1]), n_keys, pages=pages, batch_slot=i, state_slot=i)
        sequence.adapter = HeldAdapter(adapters[i]) if adapters else None
        runner.batch_slots.decode(sequence, 1 + i, n_keys - 1)  # in a mixture, equal ones share experts
        chunks.append(Chunk(sequence, n_keys - 1, 1))
    n = recordings.size(n_rows)
    runner.batch_slots.rows(chunks, n)
    runner.batch_slots.flush()
    forward = recordings.decode(n_rows, max_keys, "adapted decode" if adapters else "decode")
    head = [] if runner.draft_head is None else [recordings.of("draft keys", n)]
    return [forward, recordings.of("draw", n), *head]


def n_launches(runner: GpuTextRunner | ParallelRunner, n_rows: int) -> int:
    """Kernels in the recorded decode of n_rows rows, on each GPU."""
    own = runner.first if isinstance(runner, ParallelRunner) else runner
    n, made = own.recordings.size(n_rows), own.recordings.made
    steps = [own.recordings.decode(n_rows, 1), made["draw", n, 0], made.get(("draft keys", n, 0))]
    return sum(step.n_launches for step in steps if step is not None)


def prefill_ms(engine: Engine, n_tokens: int, n: int = 5, adapter: bytes = b"") -> list[float]:
    """Measures milliseconds from a cold prompt to its first token, n times, behind one that is not counted.

    adapter: its key.
    """
    times = []
    for i in range(n + 1):
        draw = random.Random(1000 + i)
        prompt = [draw.randrange(engine.info.vocab_size) for _ in range(n_tokens)]
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        engine.add(Request(id=f"prefill {i}", prompt_ids=prompt, params=params, adapter=adapter))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        while engine.has_work():
            checked(engine.step())
        times.append((time.perf_counter() - begin) * 1000)
    return times[1:]


def decode_row(
    engine: Engine, shape: ModelShape, roofs: GpuRoofs, n: int, rounds: Sequence[Sequence[float]], context: int
) -> JsonObject:
    """The figures of decodes of n sequences. rounds: seconds of each step. context: the mean of the steps."""
    times, runner = sorted(second for steps in rounds for second in steps), runner_of(engine)
    ms = statistics.median(times) * 1000
    n_bytes = runner.plan.n_shards * decode_bytes(shape, runner.plan.quantize, n, context, COUNTED_ROWS)
    return {
        "n": n,
        "step_ms": round(ms, 4),
        "round_ms": [round(statistics.median(steps) * 1000, 4) for steps in rounds],
        "p90_ms": round(times[len(times) * 9 // 10] * 1000, 4),
        "tok_s": round(n / ms * 1000, 1),
        "gb": round(n_bytes / 1e9, 3),
        "roof": round(n_bytes / roofs.read / ms * 1000, 4),
    }


def prefill_row(
    shape: ModelShape, roofs: GpuRoofs, n_tokens: int, rounds: Sequence[Sequence[float]], n_shards: int
) -> JsonObject:
    """The figures of a cold prompt. rounds: milliseconds of each. n_shards: of this shape, that a GPU
    runs."""
    ms = statistics.median(ms for times in rounds for ms in times)
    return {
        "ms": round(ms, 3),
        "round_ms": [round(statistics.median(times), 3) for times in rounds],
        "tok_s": round(n_tokens / ms * 1000),
        "roof": round(n_shards * prefill_operations(shape, n_tokens) / roofs.multiply / ms * 1000, 4),
    }


def prefill_operations(shape: ModelShape, n_tokens: int) -> float:
    """Operations of a prompt: the linears, the chunked recurrence, and causal attention; the head once."""
    n_heads = 1 if shape.tie_word_embeddings else 2
    linear = 2.0 * (shape.n_active_params - n_heads * shape.vocab_size * shape.hidden_size)
    d = shape.gdn_k_dim
    gdn = shape.n_gdn_layers * shape.gdn_n_v_heads * (6.0 * d * shape.gdn_v_dim + 6 * 64 * d)
    attention = 4.0 * shape.n_attn_layers * shape.n_q_heads * shape.head_dim * n_tokens / 2
    return n_tokens * (linear + gdn + attention) + 2.0 * shape.vocab_size * shape.hidden_size


Rounds = dict[int, list[list[float]]]
"""Times of each round, by the number of sequences or by the length of the prompt."""


def measure(
    engine: Engine, arguments: argparse.Namespace, decodes: Rounds, prefills: Rounds, keep: Callable[[], object]
) -> None:
    """Measures seconds of steps and milliseconds of prefills; after each of them keep is called.

    A round has every number of sequences and every prompt once.
    """
    with Console(stderr=True).status("") as status:
        for n in decodes:
            decode(engine, n, arguments.prompt, 8, seed=1)
        for i in range(arguments.rounds):
            for n, done in decodes.items():
                status.update(f"round {i + 1}, N = {n}")
                done.append(decode(engine, n, arguments.prompt, arguments.output, seed=2 + i)[0])
                keep()
            for n, done in prefills.items():
                status.update(f"round {i + 1}, prefill of {n}")
                done.append(prefill_ms(engine, n))
                keep()


def bench_gpu(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """The command `deltic bench gpu`: a table and a JSON file. Raises ConfigError."""
    need_gpu(arguments.as_chip)
    rows, prompts = numbers(arguments.n, "--n", int), numbers(arguments.prefill, "--prefill", int)
    roofs, name, levers = GpuRoofs.measured(), shape_name(arguments, config), parse_levers(config.lever)
    name += f"-layers-{arguments.layers}" if arguments.layers else ""
    begin = time.perf_counter()
    model = GpuModel.load(config, arguments.format, arguments.layers)
    weights_s = time.perf_counter() - begin
    begin = time.perf_counter()
    engine = model.engine(levers, max(rows))
    record_s = time.perf_counter() - begin
    context, (n_gpus, n_cuts) = arguments.prompt + arguments.output // 2, (model.device.n_gpus, model.device.n_cuts)
    shape, runner = model.run.shape, runner_of(engine)
    decodes, prefills = ({n: list[list[float]]() for n in sizes} for sizes in (rows, prompts))
    result: JsonObject = {}
    head = {of: getattr(arguments, of) for of in ("layers", "prompt", "output", "rounds")}
    head |= {"gpus": n_gpus, "cuts": n_cuts, "levers": dataclasses.asdict(runner.levers), "settings": changed(config)}
    head |= {"roofs": dataclasses.asdict(roofs), "weights_s": weights_s, "record_s": record_s}
    kind = "gpu" if n_cuts == 1 else "gpu-parallel" if n_cuts == n_gpus else "gpu-invariant"
    write = writer(kind, name, engine.info.device, arguments.out, **head)

    def keep() -> None:
        result["rows"] = [decode_row(engine, shape, roofs, n, r, context) for n, r in decodes.items() if r]
        result["prefill"] = {n: prefill_row(shape, roofs, n, r, n_cuts // n_gpus) for n, r in prefills.items() if r}
        write(**result)

    measure(engine, arguments, decodes, prefills, keep)
    for row in result["rows"]:  # a recorded step, replayed: median of 5 times 50
        row["alone_ms"] = round(replay_ms(runner, row["n"], context), 4)
        row["launches"] = n_launches(runner, row["n"])
    title = f"{name} on {engine.info.device}: {arguments.prompt} prompt + {arguments.output} generated tokens, greedy"
    Console().print(_table(title, result["rows"]))
    for n, row in result["prefill"].items():
        print(f"prefill of {n}: {row['ms']:.2f} ms, {row['tok_s']:,} tok/s, {row['roof']:.0%} of the matrix rate")
    print(
        f"read {roofs.read / 1e12:.2f} TB/s, multiply {roofs.multiply / 1e12:.0f} TFLOP/s; weights {weights_s:.1f} s, "
        f"recorded in {record_s:.1f} s"
    )
    write(is_whole=True, **result)
    return 0


def shape_name(arguments: argparse.Namespace, config: EngineConfig) -> str:
    """Names the shape, and the format of its weights."""
    format = arguments.format or config.quantize
    return (config.dummy or config.model) + (f"-{format}" if format else "")


def _table(title: str, rows: Sequence[JsonObject]) -> Table:
    """The decodes for people."""
    heads = ("N", "ms a step", "of the rounds", "alone", "tok/s", "GB a step", "% of read roof", "launches")
    table = Table(*heads, title=title, title_justify="left")
    for row in rows:
        table.add_row(
            f"{row['n']}",
            f"{row['step_ms']:.3f}",
            f"{min(row['round_ms']):.3f} .. {max(row['round_ms']):.3f}",
            f"{row['alone_ms']:.3f}",
            f"{row['tok_s']:.0f}",
            f"{row['gb']:.2f}",
            f"{row['roof']:.0%}",
            f"{row['launches']}",
        )
    return table


def need_gpu(as_chip: str | None = None) -> None:
    """Raises ConfigError where there is none. as_chip: the chip that it is to answer as, see `emulate`."""
    if not torch.cuda.is_available():
        raise ConfigError("this bench needs a GPU, and torch sees none")
    if as_chip is not None:
        emulate(as_chip)
