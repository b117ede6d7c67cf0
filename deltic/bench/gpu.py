"""`deltic bench gpu` and `deltic bench ablate`: what a GPU does with a shape, beside its roofs, and what each
lever brings.

A decode is measured as it is served: N prompts are prefilled, then every sequence decodes, and a step's time
is what passes between two steps of the engine, scheduler and all. Beside it stands the same recorded step
replayed alone. Roofs are measured in the same process: a read of memory that is larger than the cache, and a
matrix product of 8192 x 8192 x 8192.

With --accept a decode is measured with drafts whose tokens are right with this probability each, beside one
of a server without drafts. The steps are real, and so is the depth that the engine chooses; what is drawn is
planted (planted.py). Without the head's guesses they come from nowhere: what rows cost, and what the head.

With --context a recorded step is replayed alone behind contexts of so many tokens, which are not computed:
pages are used as they come, and again where there are too few. Its roof has the bytes of keys and values.
With --lora steps are measured in which sequences have adapters with random values of all linear modules,
beside steps in which none has.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from deltic.bench.planted import Planted
from deltic.bench.planted import decode as decode_planted
from deltic.bench.provenance import checked, code, machine, now, runs_directory
from deltic.bench.sweep import picture_sides
from deltic.commands.plan import decode_bytes
from deltic.config import ConfigError, EngineConfig, without_foreign
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.models.checkpoint import locate, n_real_ids
from deltic.models.loading import COUNTED_ROWS, Store
from deltic.models.qwen.adapters import random_adapter
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.shard import Cuts, cut
from deltic.models.qwen.weights import Weights, dummy_weights, load_weights, stored_shape
from deltic.models.stored import InFormat
from deltic.models.vision.gpu import PIECE, VisionGpu, vision_buffers
from deltic.models.vision.pixels import PictureRules
from deltic.models.vision.shape import CHANNELS, PATCH_SIZE, VisionShape
from deltic.models.vision.weights import VisionWeights, dummy_shape, dummy_vision
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.gpu.launch import Levers, parse_levers
from deltic.ops.gpu.roofs import GpuRoofs
from deltic.ops.gpu.vision import PatchGrid
from deltic.ops.gpu.weight import DeviceStore
from deltic.runtime.gpu import device as gpu
from deltic.runtime.gpu.adapters import adapter_bytes
from deltic.runtime.gpu.buffers import PIECE_ROWS
from deltic.runtime.gpu.collect import collect
from deltic.runtime.gpu.compile import begin_compiling
from deltic.runtime.gpu.parallel import ParallelRunner
from deltic.runtime.gpu.text import GpuTextRunner
from deltic.runtime.kv_cache import resolve_kv_cache
from deltic.runtime.plan import AdapterRoom, make_plan


@dataclass(frozen=True)
class Model:
    """A shape and its weights on the device, with which runners are made. Of a model that is cut, the shape
    of the largest part, and by GPU the weights of each of its parts.
    """

    config: EngineConfig
    shape: ModelShape
    n_real: int
    device: gpu.Gpu
    weights: list[list[Weights]]
    cuts: tuple[Cuts, ...]

    @classmethod
    def load(cls, config: EngineConfig, format: str | None = None, *, drafts: bool = False) -> Model:
        """format: of a dummy's projections. Raises ConfigError for one that there is not.

        And beside --quantize, which would round the rest. drafts: with the draft head, if there is one.
        """
        if format is not None and (not config.dummy or config.quantize or format not in WEIGHT_FORMATS):
            raise ConfigError(
                f"--format {format}: with --dummy, without --quantize, and one of {', '.join(WEIGHT_FORMATS)}"
            )
        config = without_foreign(config, "cuda", "text")
        directory, shape = locate(config)
        if format is not None:
            shape = replace(shape, formats=InFormat(WEIGHT_FORMATS[format]))
        device = gpu.Gpu(n_gpus=config.tensor_parallel, n_cuts=config.tp_invariant)
        if drafts and device.n_cuts > 1:
            raise ConfigError("drafts are measured on one GPU: leave --tensor-parallel and --tp-invariant out")
        device.check_reach()
        shape = replace(shape, has_draft_head=drafts) if config.dummy else stored_shape(directory, shape, drafts)
        config, _ = resolve_kv_cache(config, directory, "cuda")
        shape = replace(shape, kv_cache_dtype=config.kv_cache_dtype)
        n_real = n_real_ids(config, directory, shape)
        largest, cuts = cut(shape, device.n_cuts, are_even=config.tp_invariant is not None)

        def load(store: Store, part: Cuts | None, i: int = 0) -> Weights:
            own = largest if part is None else part.shape
            if config.dummy:
                return dummy_weights(own, config.seed, quantize=config.rounded, store=store)
            return load_weights(directory, own, cuts=part, quantize=config.rounded, store=store)[0]

        weights = device.parts(cuts, load) if cuts else [[load(DeviceStore("cuda"), None)]]
        return cls(config, largest, n_real, device, weights, cuts)

    def engine(self, levers: Levers, n_rows: int, max_drafts: int = 0, adapters: AdapterRoom | None = None) -> Engine:
        """A fresh engine for up to n_rows sequences; the one before must be gone. max_drafts: most tokens of
        a draft; with drafts the head is run, if it was loaded. adapters: room for some.
        """
        gc.collect()
        torch.cuda.empty_cache()
        config = replace(self.config, max_num_seqs=max(n_rows, 8), prefix_cache=False, max_drafts=max_drafts)
        shape = replace(self.shape, has_draft_head=self.shape.has_draft_head and max_drafts > 0)
        held = (
            sum(part.n_bytes for part in of_gpu) - (len(of_gpu) - 1) * of_gpu[0].embed.n_bytes
            for of_gpu in self.weights
        )
        free = self.device.free_bytes() + max(held)
        n_gpus = self.device.n_gpus
        kind = gpu.text(levers)
        plan = make_plan(config, shape, kind, self.n_real, free, cuts=self.cuts, n_gpus=n_gpus, adapters=adapters)
        begin_compiling(plan, levers, collect).wait(lambda stage, done: None)
        return Engine(gpu.text_runner(plan, self.device.devices, self.weights, levers))


def decode(
    engine: Engine, n: int, n_prompt: int, n_output: int, seed: int = 0, adapters: Sequence[bytes] = (b"",)
) -> tuple[list[float], list[list[int]]]:
    """Seconds of each step in which all n sequences decode, and the tokens drawn. adapters: keys of those
    that sequences have in turn.
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


def replayed_ms(engine: Engine, n: int, n_keys: int) -> float:
    """Milliseconds of one recorded decode of n rows, replayed alone: median of 5 times 50."""
    runner = engine.runner
    assert isinstance(runner, GpuTextRunner | ParallelRunner)
    return runner.replay_ms(n, n_keys)


def prefill_ms(engine: Engine, n_tokens: int, n: int = 5, adapter: bytes = b"") -> list[float]:
    """Milliseconds from a cold prompt of n_tokens to its first token, n times, behind one that is not
    counted. adapter: its key.
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
) -> dict[str, Any]:
    """What the rounds (seconds of each step) of n sequences come to. context: the mean of their steps."""
    times = sorted(second for found in rounds for second in found)
    runner = engine.runner
    assert isinstance(runner, GpuTextRunner | ParallelRunner)
    ms = statistics.median(times) * 1000
    n_bytes = runner.plan.n_parts * decode_bytes(shape, runner.plan.quantize, n, context, COUNTED_ROWS)
    return {
        "n": n,
        "step_ms": round(ms, 4),
        "round_ms": [round(statistics.median(found) * 1000, 4) for found in rounds],
        "alone_ms": round(replayed_ms(engine, n, context), 4),
        "p90_ms": round(times[len(times) * 9 // 10] * 1000, 4),
        "tok_s": round(n / ms * 1000, 1),
        "gb": round(n_bytes / 1e9, 3),
        "roof": round(n_bytes / roofs.read / ms * 1000, 4),
        "launches": runner.n_launches(n),
    }


def prefill_row(
    shape: ModelShape, roofs: GpuRoofs, n_tokens: int, rounds: Sequence[Sequence[float]], n_parts: int
) -> dict[str, Any]:
    """What the rounds (milliseconds of each prompt) come to. n_parts: of this shape, that a GPU runs."""
    ms = statistics.median(ms for found in rounds for ms in found)
    return {
        "ms": round(ms, 3),
        "round_ms": [round(statistics.median(found), 3) for found in rounds],
        "tok_s": round(n_tokens / ms * 1000),
        "roof": round(n_parts * prefill_operations(shape, n_tokens) / roofs.multiply / ms * 1000, 4),
    }


def tower(shape: VisionShape, weights: VisionWeights, side: int, levers: Levers) -> Callable[[], None]:
    """What starts the kernels that encode a square picture of `side` pixels, in buffers of its own."""
    rows, size = side // PATCH_SIZE, side**2 * CHANNELS
    n = -(-(rows**2) // PIECE) * PIECE
    n_rows = min(n, PIECE_ROWS)
    buffers = vision_buffers(
        shape, n, n_rows, lambda name, size, dtype: torch.zeros(size, dtype=dtype, device=weights.norm.weight.device)
    )
    buffers.pixels[:size].copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
    forward = VisionGpu(shape, weights, PictureRules(), buffers, levers)

    def start() -> None:
        for _ in forward.pieces(PatchGrid(rows, rows), 1, lambda stage, left: n_rows, lambda first, tokens: None):
            pass

    return start


TOGETHER, PICTURE_ROUNDS = 8, 5
"""Pictures that are started one behind another, and how often they and one alone are timed."""


def tower_row(shape: VisionShape, weights: VisionWeights, roofs: GpuRoofs, side: int, levers: Levers) -> dict[str, Any]:
    """A picture alone, and one of TOGETHER: medians, behind a time that is not counted."""
    start, found = tower(shape, weights, side, levers), {1: list[float](), TOGETHER: list[float]()}
    for i in range(1 + PICTURE_ROUNDS):
        for n, times in found.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(n):
                start()
            torch.cuda.synchronize()
            if i:
                times.append((time.perf_counter() - begin) * 1000 / n)
    alone, together = (statistics.median(times) for times in found.values())
    ideal = shape.n_operations((side // PATCH_SIZE) ** 2) / roofs.multiply * 1000
    return {"ms": round(alone, 3), "ms_of_8": round(together, 3), "roof": round(ideal / together, 4)}


def tower_rows(pictures: str, config: EngineConfig, roofs: GpuRoofs, levers: Levers) -> dict[int, dict[str, Any]]:
    """By the sides of --pictures, with random weights of the model's tower. Raises ConfigError for a model
    without one, and for other sides.
    """
    if not pictures:
        return {}
    sides = picture_sides(pictures)
    directory, text = locate(config)
    shape = dummy_shape(config.dummy, directory, text.hidden_size)
    if shape is None:
        raise ConfigError(f"--pictures {pictures}: this model has no vision tower")
    weights = dummy_vision(shape, store=DeviceStore("cuda"))
    return {side: tower_row(shape, weights, roofs, side, levers) for side in sides}


def bench_gpu(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """The command `deltic bench gpu`: a table and a JSON file.

    A round has every number of sequences and every prompt once.
    """
    need_gpu()
    if arguments.accept and arguments.pictures:
        raise ConfigError("--accept measures nothing else; leave --pictures out")
    if arguments.context and (arguments.accept or arguments.pictures):
        raise ConfigError("--context measures nothing else; leave --accept and --pictures out")
    if arguments.accept:
        return _bench_accept(arguments, config)
    if arguments.context:
        return _bench_contexts(arguments, config)
    if arguments.n_loras:
        return _bench_lora(arguments, config)
    rows, prompts = ([int(n) for n in text.split(",")] for text in (arguments.n, arguments.prefill))
    roofs, shape_name = GpuRoofs.measured(), _shape_name(arguments, config)
    pictures = tower_rows(arguments.pictures, config, roofs, parse_levers(config.lever))
    begin = time.perf_counter()
    model = Model.load(config, arguments.format)
    weights_s = time.perf_counter() - begin
    begin = time.perf_counter()
    engine = model.engine(parse_levers(config.lever), max(rows))
    record_s = time.perf_counter() - begin
    decodes: dict[int, list[list[float]]] = {n: [] for n in rows}
    prefills: dict[int, list[list[float]]] = {n: [] for n in prompts}
    with Console(stderr=True).status("") as status:
        for n in rows:
            decode(engine, n, arguments.prompt, 8, seed=1)
        for i in range(arguments.rounds):
            for n, found in decodes.items():
                status.update(f"round {i + 1}, N = {n}")
                found.append(decode(engine, n, arguments.prompt, arguments.output, seed=2 + i)[0])
            for n, found in prefills.items():
                status.update(f"round {i + 1}, prefill of {n}")
                found.append(prefill_ms(engine, n))
    context = arguments.prompt + arguments.output // 2
    measured = [decode_row(engine, model.shape, roofs, n, found, context) for n, found in decodes.items()]
    n_parts = model.device.n_cuts // model.device.n_gpus
    prefill = {n: prefill_row(model.shape, roofs, n, found, n_parts) for n, found in prefills.items()}
    title = (
        f"{shape_name} on {engine.info.device}: {arguments.prompt} prompt + {arguments.output} generated tokens, greedy"
    )
    Console().print(_table(title, measured))
    for n_tokens, row in prefill.items():
        print(
            f"prefill of {n_tokens}: {row['ms']:.2f} ms, {row['tok_s']:,} tok/s, {row['roof']:.0%} of the matrix rate"
        )
    for side, row in pictures.items():
        of_many = f"{row['ms_of_8']:.2f} of {TOGETHER} in a row, {row['roof']:.0%} of the matrix rate"
        print(f"picture of {side} x {side}: {row['ms']:.2f} ms, {of_many}")
    print(
        f"read {roofs.read / 1e12:.2f} TB/s, multiply {roofs.multiply / 1e12:.0f} TFLOP/s; weights {weights_s:.1f} s, recorded in {record_s:.1f} s"
    )
    n_gpus, n_cuts = model.device.n_gpus, model.device.n_cuts
    write_result(
        "gpu" if n_cuts == 1 else "gpu-parallel" if n_cuts == n_gpus else "gpu-invariant",
        shape_name,
        engine.info.device,
        arguments.out,
        gpus=n_gpus,
        cuts=n_cuts,
        levers=dataclasses.asdict(parse_levers(config.lever)),
        state_dtype=config.state_dtype,
        prompt=arguments.prompt,
        output=arguments.output,
        rounds=arguments.rounds,
        roofs=dataclasses.asdict(roofs),
        weights_s=weights_s,
        record_s=record_s,
        rows=measured,
        prefill=prefill,
        pictures=pictures,
    )
    return 0


def _shape_name(arguments: argparse.Namespace, config: EngineConfig) -> str:
    """The shape, the format of its weights, and that of its states where it is not the default."""
    format = arguments.format or config.quantize
    states = "" if config.state_dtype == "float32" else f"-{config.state_dtype}-states"
    return (config.dummy or config.model) + (f"-{format}" if format else "") + states


MOST_DRAFTED = 8
"""Tokens of a draft where --max-drafts does not say: as on a CPU."""


def accept_rows(
    runner: Any,
    n: int,
    accepts: Sequence[float],
    prompts: dict[str, list[int]],
    answers: dict[str, list[int]],
    rounds: int,
) -> list[dict[str, Any]]:
    """What drafts of n sequences come to, for each probability of a guess to be right: milliseconds a token
    of each sequence and tokens a step, with the runner's draft head and with guesses that cost nothing.

    The first round, in which the engine learns what rows cost, does not count.
    """
    head, found = runner.draft_head, []
    for accept in accepts:
        row: dict[str, Any] = {"n": n, "accept": accept}
        for name, own in (("head", head), ("free", None)):
            if name == "head" and head is None:
                continue
            runner.info.has_draft_head = True  # without one, too, guesses are asked for
            engine = Engine(Planted(runner, answers, accept, own, is_free=own is None))
            measured = [decode_planted(engine, prompts, answers) for _ in range(1 + rounds)][1:]
            row[f"{name}_ms"] = [round(ms, 4) for ms, _ in measured]
            row[f"{name}_tokens_a_step"] = round(statistics.median(tokens for _, tokens in measured), 3)
        found.append(row)
    runner.draft_head, runner.info.has_draft_head = head, head is not None
    return found


CONTEXT_REPLAYS, CONTEXT_ROUNDS = 10, 5
"""Of a step behind a context, one token further each time."""
LEAST_CONTEXT = CONTEXT_REPLAYS * CONTEXT_ROUNDS + 11
"""`replay_ms` leaves 10 tokens free behind the last."""


def context_row(
    runner: GpuTextRunner | ParallelRunner, shape: ModelShape, roofs: GpuRoofs, n: int, context: int
) -> dict[str, Any]:
    """What a step of n sequences takes, the last of which have `context` keys, but for a few."""
    n_keys, n_parts = context - LEAST_CONTEXT + 1, runner.plan.n_parts
    ms = runner.replay_ms(n, n_keys, CONTEXT_REPLAYS, CONTEXT_ROUNDS)
    mean = n_keys + CONTEXT_REPLAYS * CONTEXT_ROUNDS // 2
    n_bytes = n_parts * decode_bytes(shape, runner.plan.quantize, n, mean, COUNTED_ROWS)
    n_kv_bytes = n_parts * n * mean * shape.kv_bytes_per_token
    return {
        "n": n,
        "context": context,
        "ms": round(ms, 4),
        "gb": round(n_bytes / 1e9, 3),
        "kv_gb": round(n_kv_bytes / 1e9, 3),
        "roof": round(n_bytes / roofs.read / ms * 1000, 4),
    }


def _bench_contexts(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """`deltic bench gpu --context T,...`: a table and a JSON file."""
    sizes, contexts = ([int(n) for n in text.split(",")] for text in (arguments.n, arguments.context))
    if min(contexts) < LEAST_CONTEXT:
        raise ConfigError(f"--context {arguments.context}: at least {LEAST_CONTEXT} tokens each")
    config = replace(config, max_model_len=config.max_model_len or max(contexts))
    assert config.max_model_len is not None
    if max(contexts) > config.max_model_len:
        raise ConfigError(f"--context {arguments.context}: more than --max-model-len {config.max_model_len}")
    roofs, shape_name = GpuRoofs.measured(), _shape_name(arguments, config)
    model = Model.load(config, arguments.format)
    engine = model.engine(parse_levers(config.lever), max(sizes))
    runner, shape = engine.runner, model.shape
    assert isinstance(runner, GpuTextRunner | ParallelRunner)
    rows = [context_row(runner, shape, roofs, n, context) for context in contexts for n in sizes]
    title = f"{shape_name} on {engine.info.device}: a step behind a context, keys and values in {shape.kv_cache_dtype}"
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
    write_result(
        "gpu-context",
        shape_name,
        engine.info.device,
        arguments.out,
        kv_cache_dtype=shape.kv_cache_dtype,
        gpus=model.device.n_gpus,
        cuts=model.device.n_cuts,
        n_pages=runner.plan.n_pages,
        roofs=dataclasses.asdict(roofs),
        rows=rows,
    )
    return 0


def _bench_accept(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """`deltic bench gpu --accept P,...`: a table and a JSON file."""
    sizes, accepts = [int(n) for n in arguments.n.split(",")], [float(p) for p in arguments.accept.split(",")]
    model, shape_name = Model.load(config, arguments.format, drafts=True), _shape_name(arguments, config)
    max_drafts, levers = config.max_drafts or MOST_DRAFTED, parse_levers(config.lever)
    engine = model.engine(levers, max(sizes))
    plain: dict[int, list[float]] = {}
    for n in sizes:
        decode(engine, n, arguments.prompt, 8, seed=1)
        times = [decode(engine, n, arguments.prompt, arguments.output, seed=2 + i)[0] for i in range(arguments.rounds)]
        plain[n] = [round(statistics.median(found) * 1000, 4) for found in times]
    del engine
    runner: Any = model.engine(levers, max(sizes), max_drafts).runner
    rng, rows = random.Random(1), list[dict[str, Any]]()
    for n in sizes:
        prompts, answers = (
            {str(i): rng.choices(range(1000), k=k) for i in range(n)} for k in (arguments.prompt, arguments.output)
        )
        for row in accept_rows(runner, n, accepts, prompts, answers, arguments.rounds):
            rows.append(row | {"plain_ms": plain[n]})
    title = f"{shape_name} on {runner.info.device}: drafts of up to {max_drafts} tokens, right as often as planted"
    Console(width=120).print(_accept_table(title, rows))
    write_result("gpu-accept", shape_name, runner.info.device, arguments.out, max_drafts=max_drafts, rows=rows)
    return 0


def _accept_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """The drafts for people."""
    heads = ("N", "right", "plain: ms a token", "head: tokens a step", "ms a token", "x", "free: tokens a step")
    table = Table(*heads, "ms a token", "x", title=title, title_justify="left")
    for row in rows:
        ms, cells = statistics.median(row["plain_ms"]), list[str]()
        for name in ("head", "free"):
            if f"{name}_ms" not in row:
                cells += ["no head", "", ""]
                continue
            own = statistics.median(row[f"{name}_ms"])
            cells += [f"{row[f'{name}_tokens_a_step']:.2f}", f"{own:.3f}", f"{ms / own:.2f}"]
        table.add_row(f"{row['n']}", f"{row['accept']:g}", f"{ms:.3f}", *cells)
    return table


def _bench_lora(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """`deltic bench gpu --lora N`: decodes whose sequences have N adapters in turn, and prompts with one,
    beside the same without, in turns on one server; a table and a JSON file.
    """
    sizes, prompts = ([int(n) for n in text.split(",")] for text in (arguments.n, arguments.prefill))
    model, shape_name = Model.load(config, arguments.format), _shape_name(arguments, config)
    if model.cuts:
        raise ConfigError("--lora: adapters are measured on one GPU: leave --tensor-parallel and --tp-invariant out")
    levers, one = parse_levers(config.lever), random_adapter(model.shape, arguments.lora_rank, seed=1)
    linears = {name: deltas for name, deltas in one.deltas.items() if len(deltas[0].down) == 1}
    n_bytes = adapter_bytes(replace(one, deltas=linears))
    room = AdapterRoom(arguments.n_loras, arguments.lora_rank, arguments.n_loras * n_bytes)
    engine = model.engine(levers, max(sizes), adapters=room)
    runner: Any = engine.runner
    keys = [i.to_bytes(16, "little") for i in range(1, 1 + arguments.n_loras)]
    for key in keys:
        runner.adapters.load_now(replace(one, key=key, deltas=linears))
    kinds: dict[str, Sequence[bytes]] = {"plain": [b""], "lora": keys}
    decodes = {n: {kind: list[float]() for kind in kinds} for n in sizes}
    prefills = {n: {kind: list[float]() for kind in kinds} for n in prompts}
    for i in range(1 + arguments.rounds):  # the first does not count
        for kind, own in kinds.items():
            for n, found in decodes.items():
                times = decode(engine, n, arguments.prompt, arguments.output if i else 8, seed=1 + i, adapters=own)[0]
                found[kind] += [statistics.median(times) * 1000] if i else []
            for n, found in prefills.items():
                found[kind] += [statistics.median(prefill_ms(engine, n, adapter=own[0]))] if i else []
    context, rows = arguments.prompt + arguments.output // 2, list[dict[str, Any]]()
    for what, measured in (("decode", decodes), ("prefill", prefills)):
        for n, found in measured.items():
            rows.append(
                {"what": what, "n": n} | {f"{kind}_ms": [round(ms, 4) for ms in of] for kind, of in found.items()}
            )
            if what == "decode":
                slots = [i % len(keys) for i in range(n)]
                rows[-1] |= {"alone_ms": round(replayed_ms(engine, n, context), 4)}
                rows[-1] |= {"lora_alone_ms": round(runner.replay_ms(n, context, adapters=slots), 4)}
    title = f"{shape_name} on {engine.info.device}: {arguments.n_loras} adapters of rank {arguments.lora_rank}"
    Console(width=120).print(_lora_table(title, rows))
    given = {"adapters": arguments.n_loras, "rank": arguments.lora_rank, "adapter_bytes": n_bytes}
    write_result("gpu-lora", shape_name, engine.info.device, arguments.out, **given, rows=rows)
    return 0


def _lora_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """For people."""
    table = Table("what", "N", "plain: ms", "adapters: ms", "x", "alone: x", title=title, title_justify="left")
    for row in rows:
        plain, own = (statistics.median(row[f"{kind}_ms"]) for kind in ("plain", "lora"))
        alone = f"{row['lora_alone_ms'] / row['alone_ms']:.3f}" if "alone_ms" in row else ""
        table.add_row(row["what"], f"{row['n']}", f"{plain:.3f}", f"{own:.3f}", f"{own / plain:.3f}", alone)
    return table


def write_result(bench: str, shape: str, device: str, out: str | None, **found: Any) -> None:
    """Writes a result's file under runs_directory(out), and prints its name."""
    path = runs_directory(out) / f"{bench}-{shape.replace('/', '-')}-{now():%H%M%S}.json"
    made: dict[str, Any] = {
        "bench": bench,
        "date": now().isoformat(timespec="seconds"),
        "shape": shape,
        "device": device,
    }
    made |= {"torch": torch.__version__, "machine": machine(), "code": code()}
    path.write_text(json.dumps(made | found, indent=1) + "\n")
    print(path)


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
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


def prefill_operations(shape: ModelShape, n_tokens: int) -> float:
    """Operations of a prompt: the linears, the chunked recurrence, and causal attention; the head once."""
    n_heads = 1 if shape.tie_word_embeddings else 2
    linear = 2.0 * (shape.n_active_params - n_heads * shape.vocab_size * shape.hidden_size)
    d = shape.gdn_k_dim
    gdn = shape.n_gdn_layers * shape.gdn_n_v_heads * (6.0 * d * shape.gdn_v_dim + 6 * 64 * d)
    attention = 4.0 * shape.n_attn_layers * shape.n_q_heads * shape.head_dim * n_tokens / 2
    return n_tokens * (linear + gdn + attention) + 2.0 * shape.vocab_size * shape.hidden_size


def variants(max_drafts: int) -> list[tuple[str, Levers, int]]:
    """Name, levers and most tokens of a draft: the base, one lever switched off at a time, and drafts, where
    there are any.
    """
    base = Levers()
    names = [field.name for field in dataclasses.fields(Levers)]
    found = [("all on", base, 0), *((f"{name}=off", replace(base, **{name: False}), 0) for name in names)]
    return found + ([(f"max_drafts={max_drafts}", base, max_drafts)] if max_drafts else [])


def bench_ablate(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """The command `deltic bench ablate`: for each lever the time of a step with and without, launches, and
    whether bits change; with --max-drafts for drafts, too, of which of random weights hardly any is right.
    """
    need_gpu()
    rows = [int(n) for n in arguments.n.split(",")]
    max_drafts, shape_name = config.max_drafts or 0, config.dummy or config.model
    model = Model.load(config, drafts=max_drafts > 0)
    found: list[dict[str, Any]] = []
    base: dict[int, tuple[float, list[list[int]]]] = {}
    table = Table(
        "lever",
        *(f"N={n}: ms, x" for n in rows),
        "launches",
        "same tokens",
        "says",
        "what it does",
        title=f"{shape_name}: one lever changed at a time",
    )
    console = Console(stderr=True)
    for name, levers, n_drafts in variants(max_drafts):
        with console.status(name):
            engine = model.engine(levers, max(rows), n_drafts)
            row: dict[str, Any] = {"lever": name}
            cells, exact = [], True
            for n in rows:
                decode(engine, n, 128, 8, seed=1)
                times, tokens = decode(engine, n, 128, arguments.output, seed=2)
                # a step with drafts gives several tokens: of all those steps, the time of one token
                ms = 1000 * (sum(times) / (arguments.output - 3) if n_drafts else statistics.median(times))
                base.setdefault(n, (ms, tokens))
                exact = exact and tokens == base[n][1]
                cells.append(f"{ms:.3f}, {ms / base[n][0]:.3f}")
                row[f"ms_{n}"] = round(ms, 4)
            runner = engine.runner
            assert isinstance(runner, GpuTextRunner | ParallelRunner)
            field = Levers.__dataclass_fields__.get(name.partition("=")[0])
            says, text = ("exact", "tokens that are guessed ahead, by --max-drafts") if n_drafts else ("", "")
            if field is not None:
                says, text = "exact" if field.metadata["exact"] else "other bits", field.metadata["text"]
            table.add_row(name, *cells, f"{runner.n_launches(rows[0])}", "yes" if exact else "no", says, text)
            found.append(row | {"launches": runner.n_launches(rows[0]), "same_tokens": exact, "exact": says})
            del engine, runner
    Console(width=170).print(table)
    write_result("ablate", shape_name, torch.cuda.get_device_name(), arguments.out, rows=found)
    return 0


def need_gpu() -> None:
    """Raises ConfigError where there is none."""
    if not torch.cuda.is_available():
        raise ConfigError("this bench needs a GPU, and torch sees none")
