"""`deltic plan`: the memory plan of a model on this machine, what fits in it, and the speed that the roofs allow."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from deltic.config import ConfigError, EngineConfig
from deltic.engine.cache.cache import pages_for
from deltic.machine import free_memory_bytes
from deltic.models.checkpoint import locate, locate_speech, model_name, n_real_ids, speaks
from deltic.models.fields import CheckpointError
from deltic.models.packed import PACKED, resolve_quantize
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import Moe, empty_weights
from deltic.models.tts.shape import SpeechShape
from deltic.models.tts.weights import frame_bytes
from deltic.models.vocoder.shape import SAMPLE_RATE
from deltic.ops.geometry import N_CODES, PAGE_SIZE
from deltic.ops.matrix import Layout
from deltic.roofs import GpuRoofs, multiply_peak, read_bandwidth
from deltic.runtime.build import is_for_gpu
from deltic.runtime.cpu.plan import Plan, make_plan
from deltic.runtime.cpu.speech_plan import SpeechPlan, make_speech_plan


def report(config: EngineConfig) -> str:
    """What `deltic plan` prints: the memory plan, what fits in it, and the speed that the roofs allow. On the device that would
    serve; or, with --device cuda where there is no GPU, for one with --memory-gb of memory.

    Raises ConfigError or another ValueError when the model cannot be served with these settings.
    """
    out = StringIO()
    console = Console(file=out, width=100)
    if speaks(config):
        _report_speech(console, config)
        return out.getvalue()
    directory, shape = locate(config)
    sparse = f", {shape.n_active_params / 1e9:.2f} B active" if shape.is_moe else ""
    console.print(
        f"{model_name(config)}: {shape.n_params / 1e9:.2f} B parameters{sparse}, {shape.n_gdn_layers} DeltaNet + "
        f"{shape.n_attn_layers} attention layers"
    )
    if is_for_gpu(config):
        _report_gpu(console, config, directory, shape)
    else:
        _report_cpu(console, config, directory, shape)
    return out.getvalue()


def _report_cpu(console: Console, config: EngineConfig, directory: Path, shape: ModelShape) -> None:
    config = replace(config, quantize=resolve_quantize(config, directory))
    free = free_memory_bytes()
    wanted = int((config.memory_gb or 0) * 1e9)
    plan = make_plan(config, shape, n_real_ids(config, directory, shape), max(free, wanted))
    if wanted > free:
        console.print(f"[bold]for another machine: here only {free / 1e9:.1f} GB are free[/]")
    console.print(_memory_table(plan))
    console.print("Python, torch and the HTTP process take about 0.6 GB more.")
    _print_what_fits(console, config, plan)
    console.print(
        _speed_table(
            plan, read_bandwidth(plan.n_threads), multiply_peak(plan.n_threads, plan.quantize or "bf16")
        )
    )


def _report_speech(console: Console, config: EngineConfig) -> None:
    _, shape = locate_speech(config)
    free, wanted = free_memory_bytes(), int((config.memory_gb or 0) * 1e9)
    on_gpu = is_for_gpu(config)
    if on_gpu:
        free, plan = _gpu_speech_plan(config, shape, wanted)
    else:
        plan = make_speech_plan(config, shape, max(free, wanted))
    console.print(
        f"{model_name(config)}: {shape.n_params / 1e9:.2f} B parameters, talker of {shape.talker.n_layers} layers and predictor of "
        f"{shape.predictor.n_layers}, {N_CODES} codes a frame of 80 ms, {SAMPLE_RATE} Hz"
    )
    if wanted > free:
        console.print(f"[bold]for another machine: here only {free / 1e9:.1f} GB are free[/]")
    streams = plan.workspace["vocoder states"]
    table = Table("memory", "GB", "what", title="Allocated before ready", title_justify="left")
    for name, n_bytes, what in (
        (
            "weights",
            plan.weight_bytes,
            f"talker, predictor: {plan.quantize or 'bfloat16'} matrices, bfloat16 tables",
        ),
        ("vocoder", plan.vocoder_bytes, "float32"),
        ("workspace", plan.workspace_bytes - streams, f"a step of up to {plan.n_rows} rows"),
        ("streams", streams, f"states of {plan.n_streams} streams of audio"),
        (
            "pages",
            plan.pages_bytes,
            f"{plan.n_pages} of {PAGE_SIZE} rows or frames, {plan.page_bytes / 1e6:.2f} MB each",
        ),
        ("host tier", plan.host_bytes, "for preempted sequences"),
        ("total", plan.total_bytes, f"of {plan.budget_bytes / 1e9:.2f} GB; --memory-gb allows more or less"),
    ):
        table.add_row(name, f"{n_bytes / 1e9:.3f}", what)
    console.print(table)
    console.print("Python, torch and the HTTP process take about 0.6 GB more.")
    console.print(_speech_fit_table(plan))
    if not on_gpu:
        console.print(_speech_speed_table(plan))


def _gpu_speech_plan(config: EngineConfig, shape: SpeechShape, wanted: int) -> tuple[int, SpeechPlan]:
    """What is free on the GPU, 0 where there is none, and the plan."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "a plan for a GPU needs Triton, which comes with torch's CUDA build; or give --device cpu"
        )
    from deltic.ops.gpu.launch import parse_levers
    from deltic.runtime.gpu.plan import RESERVE_BYTES
    from deltic.runtime.gpu.speech_plan import make_gpu_speech_plan  # imports Triton

    is_here = torch.cuda.is_available()
    if not is_here and not wanted:
        raise ConfigError(
            "--device cuda: torch sees no GPU here; to plan for one elsewhere, say with --memory-gb how much of its memory may be used"
        )
    free = torch.cuda.mem_get_info()[0] if is_here else 0
    most = max(free, wanted + RESERVE_BYTES // 2 if wanted else 0)
    return free, make_gpu_speech_plan(config, shape, most, parse_levers(config.lever))


def _speech_fit_table(plan: SpeechPlan) -> Table:
    title = (
        f"Utterances of a length that run at once (longest: {plan.max_model_len} rows of prompt and frames)"
    )
    table = Table("seconds of audio", "utterances", "limited by", title=title, title_justify="left")
    for seconds in (10, 30, 120, 300):
        n_rows = 64 + int(seconds * 12.5)
        if n_rows <= plan.max_model_len:
            by_pages = plan.n_pages // pages_for(n_rows)
            limit = "--max-num-seqs" if by_pages >= plan.max_num_seqs else "pages"
            table.add_row(f"{seconds}", f"{min(by_pages, plan.max_num_seqs)}", limit)
    return table


def _speech_speed_table(plan: SpeechPlan) -> Table:
    """Roofs, not forecasts, without the vocoder: the larger of bytes over bandwidth and operations over the multiply rate."""
    bandwidth = read_bandwidth(plan.n_threads)
    peak = multiply_peak(plan.n_threads, plan.quantize or "bf16")
    talker, predictor = frame_bytes(plan.shape, plan.quantize)
    shape = plan.shape
    n_heads = N_CODES * shape.n_codebook * shape.predictor.hidden_size
    work = 2 * (shape.talker.layer_params + N_CODES * shape.predictor.layer_params + n_heads)
    title = (
        f"Codes of a frame (80 ms of audio): talker {talker / 1e9:.2f} GB, predictor {predictor / 1e9:.2f} GB, "
        f"{work / 1e9:.1f} Gop; at {bandwidth / 1e9:.1f} GB/s and {peak / 1e9:.0f} Gop/s (measured now)"
    )
    table = Table("streams", "ms a frame at least", "bound by", title=title, title_justify="left")
    for n in (n for n in (1, 2, 4, 8, 16) if n <= plan.max_num_seqs):
        memory_s, compute_s = (talker + predictor) / bandwidth, n * work / peak
        bound = "memory" if memory_s >= compute_s else "arithmetic"
        table.add_row(f"{n}", f"{1000 * max(memory_s, compute_s):.0f}", bound)
    return table


def _report_gpu(console: Console, config: EngineConfig, directory: Path, shape: ModelShape) -> None:
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "a plan for a GPU needs Triton, which comes with torch's CUDA build; or give --device cpu"
        )
    if config.dummy is None and (directory / PACKED).exists():
        raise CheckpointError(
            f"{directory}: packed for the CPU; give --device cpu, or the checkpoint it was packed from"
        )
    from deltic.ops.gpu.launch import parse_levers
    from deltic.runtime.gpu.plan import RESERVE_BYTES, make_gpu_plan  # imports Triton

    is_here = torch.cuda.is_available()
    if not is_here and config.memory_gb is None:
        raise ConfigError(
            "--device cuda: torch sees no GPU here; to plan for one elsewhere, say with --memory-gb how much of its memory may be used"
        )
    free = torch.cuda.mem_get_info()[0] if is_here else 0
    wanted = int((config.memory_gb or 0) * 1e9)
    plan = make_gpu_plan(
        config, shape, n_real_ids(config, directory, shape), max(free, wanted + RESERVE_BYTES // 2 if wanted else 0),
        parse_levers(config.lever),
    )  # fmt: skip
    if not is_here:
        console.print("[bold]for another machine: torch sees no GPU here[/]")
    elif wanted > free - RESERVE_BYTES // 2:
        console.print(f"[bold]for another machine: of this GPU's memory only {free / 1e9:.1f} GB are free[/]")
    console.print(_memory_table(plan, on_gpu=True))
    console.print(
        f"The driver, the compiled kernels and the recorded steps take up to {RESERVE_BYTES / 1e9:.1f} GB of the device more, "
        "Python, torch and the HTTP process a few GB of the host."
    )
    _print_what_fits(console, config, plan)
    console.print(_gpu_speed_table(plan, is_here))


def _print_what_fits(console: Console, config: EngineConfig, plan: Plan) -> None:
    console.print(_fit_table(plan))
    if config.prefix_cache:
        disk_bytes = int(config.cache_disk_gb * 1e9) if config.cache_dir is not None else None
        console.print(_cache_table(plan, config.cache_host_gb is not None, disk_bytes))


def _memory_table(plan: Plan, on_gpu: bool = False) -> Table:
    shape = plan.shape
    largest = sorted(plan.workspace.items(), key=lambda item: -item[1])[:3]
    most = ", ".join(f"{name} {n_bytes / 1e6:.0f} MB" for name, n_bytes in largest)
    page, state = f"{shape.page_bytes(PAGE_SIZE) / 1e3:.0f} kB", f"{plan.state_bytes / 1e6:.2f} MB"
    step = f"a step of up to {plan.n_batch_tokens} tokens"
    total, where = plan.total_bytes, ""
    if on_gpu:
        step = f"a decode of {plan.max_num_seqs} rows and a prefill of {plan.max_step_tokens} tokens"
        total, where = plan.total_bytes - plan.host_bytes, "not on the device: "
    table = Table("memory", "GB", "what", title="Allocated before ready", title_justify="left")
    for name, n_bytes, what in (
        ("weights", plan.weight_bytes, f"{plan.quantize or 'bfloat16'} matrices, float32 norms and gates"),
        ("workspace", plan.workspace_bytes, f"{step}; largest: {most}"),
        (
            "state slots",
            plan.slots_bytes,
            f"{plan.max_num_seqs} live + {plan.n_checkpoints} checkpoints of {state}",
        ),
        ("pages", plan.pages_bytes, f"{plan.n_pages} of {PAGE_SIZE} tokens, {page} each"),
        (
            "host tier",
            plan.host_bytes,
            f"{where}for preempted sequences; with --cache-host-gb for what is evicted as well",
        ),
        ("total", total, f"of {plan.budget_bytes / 1e9:.2f} GB; --memory-gb allows more or less"),
    ):
        table.add_row(name, f"{n_bytes / 1e9:.3f}", what)
    return table


def _fit_table(plan: Plan) -> Table:
    title = f"Sequences of a length that run at once (longest: {plan.max_model_len} tokens)"
    table = Table("tokens", "sequences", "limited by", title=title, title_justify="left")
    for length in _lengths(plan):
        by_pages = plan.n_pages // pages_for(length)
        by_slots = by_pages >= plan.max_num_seqs
        table.add_row(f"{length}", f"{min(by_pages, plan.max_num_seqs)}", "slots" if by_slots else "pages")
    return table


def _lengths(plan: Plan) -> list[int]:
    """Tokens of a sequence: a row of a table each."""
    return [n for n in (1024, 4096, 16384, 65536, 262144) if n < plan.max_model_len] + [plan.max_model_len]


def _cache_table(plan: Plan, on_host: bool, disk_bytes: int | None) -> Table:
    """How many conversations the prefix cache keeps, each with its pages and one checkpoint, by tier.

    While nothing runs the slots of sequences are checkpoints, too, but for the one that the next request takes.
    on_host: host memory was given for what is evicted. disk_bytes: size of the disk tier, None without one.
    """
    shape = plan.shape
    page, state = shape.page_bytes(PAGE_SIZE), plan.state_bytes
    title = (
        f"Conversations of a length that stay cached while nothing runs: {state / 1e6:.2f} MB a checkpoint, "
        f"{1024 * shape.kv_bytes_per_token / 1e6:.2f} MB for 1024 tokens"
    )
    table = Table("tokens", "in the pools", "limited by", title=title, title_justify="left")
    if on_host:
        table.add_column("+ on the host")
    if disk_bytes is not None:
        table.add_column("on disk")
    for length in _lengths(plan):
        n_pages = pages_for(length)
        by_pages, by_slots = plan.n_pages // n_pages, plan.n_slots - 1
        row = [f"{length}", f"{min(by_pages, by_slots)}", "slots" if by_pages >= by_slots else "pages"]
        if on_host:
            row.append(f"{plan.n_host_units // (n_pages + -(-state // page))}")
        if disk_bytes is not None:
            row.append(f"{disk_bytes // (n_pages * page + state)}")
        table.add_row(*row)
    return table


def decode_bytes(
    shape: ModelShape, quantize: str | None, n_seqs: int, context: int, layout: Layout = "strips"
) -> float:
    """Bytes that one decode step of n_seqs sequences must move: weights once (of a mixture the experts that uniform
    routing touches), each state read and written, each context's keys and values read."""
    weights = empty_weights(shape, quantize, shape.tie_word_embeddings, "meta", layout)
    n_bytes: float = weights.n_bytes
    if weights.lm_head is not weights.embed:
        n_bytes -= weights.embed.n_bytes  # a lookup
    if shape.is_moe:
        idle = (1 - shape.n_experts_per_tok / shape.n_experts) ** n_seqs
        experts = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, Moe)]
        n_bytes -= idle * sum(moe.gate_up.n_bytes + moe.down.n_bytes for moe in experts)
    return n_bytes + n_seqs * (2 * shape.state_bytes + context * shape.kv_bytes_per_token)


def _gpu_speed_table(plan: Plan, is_here: bool) -> Table | str:
    """What `_speed_table` says, with the GPU's roofs measured now; without a GPU the bytes of a step."""
    shape, context = plan.shape, min(1024, plan.max_model_len)
    n_seqs = [n for n in (1, 4, 16, 64, 128) if n <= plan.max_num_seqs]
    if is_here:
        try:
            roofs = GpuRoofs.measured()
        except torch.OutOfMemoryError:
            return "The roofs were not measured: too little of the GPU's memory is free."
        return _speed_table(plan, roofs.read, roofs.multiply, n_seqs)
    table = Table(
        "step", "GB", title="What a step must move; a GPU's bandwidth bounds the speed", title_justify="left"
    )
    for n in n_seqs:
        table.add_row(
            f"decode, {n} at {context} tokens",
            f"{decode_bytes(shape, None, n, context, 'rows') / 1e9:.2f}",
        )
    return table


def _speed_table(
    plan: Plan, bandwidth: float, peak: float, n_seqs_of: Sequence[int] = (1, 4, 16, 64)
) -> Table:
    """Roofs, not forecasts: the larger of bytes over bandwidth and operations over the multiply rate."""
    shape, context = plan.shape, min(1024, plan.max_model_len)
    head = 2 * shape.vocab_size * shape.hidden_size
    body = 2 * shape.n_active_params - head * (1 if shape.tie_word_embeddings else 2)
    title = f"Roofline at {bandwidth / 1e9:.1f} GB/s and {peak / 1e9:.0f} Gop/s (measured now)"
    table = Table("step", "tokens/s at most", "bound by", title=title, title_justify="left")
    for n_seqs in (n for n in n_seqs_of if n <= plan.max_num_seqs):
        memory_s = decode_bytes(shape, plan.quantize, n_seqs, context) / bandwidth
        compute_s = n_seqs * (body + head) / peak
        bound = "memory" if memory_s >= compute_s else "arithmetic"
        table.add_row(
            f"decode, {n_seqs} at {context} tokens", f"{n_seqs / max(memory_s, compute_s):.1f}", bound
        )
    table.add_row("prefill", f"{peak / body:.0f}", "arithmetic")
    return table
