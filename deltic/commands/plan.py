"""`deltic plan`: the memory plan of a model on this machine, what fits in it, and the speed that the roofs
allow.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from deltic.config import ConfigError, EngineConfig, ModelConfig
from deltic.engine.cache.cache import pages_for
from deltic.models.checkpoint import ALL_FILES, DEMO, model_name, speaks, text_directory, tokenizer_directory
from deltic.models.files import PACKED
from deltic.models.gguf import is_gguf
from deltic.models.hub import is_hub_name, outline, wanted_of
from deltic.models.loading import COUNTED, COUNTED_ROWS, Store, shares_text
from deltic.models.packed import cache_file
from deltic.models.qwen.adapters import Adapter
from deltic.models.qwen.shape import ModelShape, all_stages
from deltic.models.qwen.shard import whole
from deltic.models.qwen.weights import Moe, Weights, active_weights, empty_weights
from deltic.models.tts.weights import frame_bytes
from deltic.models.vocoder.shape import SAMPLE_RATE
from deltic.ops.geometry import N_CODES, PAGE_SIZE
from deltic.roofs import beyond_caches, disk_bandwidth, multiply_peak, read_bandwidth
from deltic.runtime.adapters import given_adapters
from deltic.runtime.build import gpu_device, is_for_gpu, plan_of, sees_gpu, settle, settle_text
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.fit import make_plan, refuse_little_memory
from deltic.runtime.model import SpeechModel, TextModel
from deltic.runtime.plan import Plan, TextPlan, brought, shared_sizes
from deltic.text import SamplingDefaults, Tokenizer

if TYPE_CHECKING:
    from deltic.runtime.gpu.device import Gpu

LEAST_PART = 0.05
"""A format that takes part in less of a token's products is left out of their roof."""

CONTEXT = 1024
"""Tokens behind which the speed of a decode is told."""

ROWS_PER_S = 12.5
"""Frames of a speech model; a prompt is said to take 64 rows."""


def report(config: EngineConfig, format: str | None = None) -> str:
    """The output of `deltic plan`: the memory plan, what fits in it, and the speed that the roofs allow.

    Of names on the hub only what the files say of themselves is read. It is for the device that would serve;
    or, with --device cuda where there is no GPU, for one with --memory-gb of memory. format: of random
    weights, see `settle`. Raises ConfigError or another ValueError when the model cannot be served with these
    settings.
    """
    said = dict[str, str]()

    def sketched(name: str, revision: str | None = None, has_tokenizer: bool = True) -> Path:
        wanted = wanted_of(name, ALL_FILES, revision, config.download_dir)
        said["models--" + wanted.name.partition(":")[0].replace("/", "--")] = wanted.name
        return outline(wanted, Path(folder), has_tokenizer=has_tokenizer)

    with tempfile.TemporaryDirectory(prefix="deltic-plan-") as folder:
        planned, has_vocabulary = config, True
        try:
            if config.draft_model is not None and is_hub_name(config.draft_model):
                planned = dataclasses.replace(planned, draft_model=str(sketched(config.draft_model)))
            if config.dummy is None and is_hub_name(config.model):
                path = sketched(config.model, config.revision, config.tokenizer is not None)
                planned, has_vocabulary = dataclasses.replace(planned, model=str(path), revision=None), is_gguf(path)
            return _report(planned, has_vocabulary, format)
        except ValueError as error:
            places = rf"{re.escape(folder)}/([^/]*)/snapshots/\w*"
            error.args = (re.sub(places, lambda found: said[found[1]], str(error)),)
            raise


def _check_text(config: EngineConfig, has_vocabulary: bool) -> None:
    """Raises what a server does for a tokenizer, a chat template, and defaults of a request. has_vocabulary:
    without it the template is tried with the built-in model's.
    """
    spoken = tokenizer_directory(config)
    tokenizer = Tokenizer.load(spoken if has_vocabulary or config.tokenizer is not None else DEMO)
    if not speaks(config):
        from deltic.server.chat.template import ChatTemplate  # 0.1 s, which speech does without

        ChatTemplate.load(spoken, tokenizer)
    SamplingDefaults.load(text_directory(config), ModelConfig())


def _report(config: EngineConfig, has_vocabulary: bool = True, format: str | None = None) -> str:
    """Reports like `report` on a model that is here. has_vocabulary: whether its vocabulary is here, too."""
    on_gpu = is_for_gpu(config)
    device = gpu_device(config, is_here=False) if on_gpu else Cpu()
    is_here = not on_gpu or sees_gpu()
    if not is_here and config.memory_gb is None:
        raise ConfigError(
            "--device cuda: torch sees no GPU here. To plan for one elsewhere, say with --memory-gb how much of its memory may be used."
        )
    beside = device.text.reserve_bytes // 2
    free, wanted = device.free_bytes() if is_here else 0, int((config.memory_gb or 0) * 1e9)
    model, store = settle(config, device, format), device.text.counted
    most = max(free, wanted + beside if wanted else 0)
    plan: Plan[Any] = plan_of(model, device, most)
    if is_here:
        refuse_little_memory(plan)
    model.check_files(store)
    _check_text(config, has_vocabulary)
    weights = _stored(plan, store)
    out = StringIO()
    console = Console(file=out, width=100)
    console.print(f"{model_name(config)}: {_parts(plan)}", markup=False)
    if not is_here:
        console.print("[bold]for another machine: torch sees no GPU here[/]")
    elif wanted > free - beside:
        whose = " of the GPU's memory" if on_gpu else ""
        console.print(f"[bold]for another machine: here only {free / 1e9:.1f} GB{whose} are free[/]")
    stages = model.config.stages  # none of a speech model, whatever the environment says
    parts = _stages(config, device, plan, most) if stages else [("", plan)]
    for layers, part in parts:
        if layers:
            console.print(layers, markup=False)
        console.print(_memory_table(part, weights if part is plan else _stored(part, store), on_gpu))
    common = [shared_sizes(part) for _, part in parts]
    least = {name: min(sizes[name] for sizes in common) for name in common[0]}
    plan = dataclasses.replace(plan, **least)  # type: ignore[arg-type]
    for notice in model.notices:
        console.print(f"{notice[:1].upper()}{notice[1:]}.", markup=False)
    if on_gpu:
        console.print(
            f"The driver, the compiled kernels and the recorded steps take up to {device.text.reserve_bytes / 1e9:.1f} GB of the "
            "device more, Python, torch and the HTTP process a few GB of the host."
        )
        if stages:
            n_bytes = plan.workspace["residual"] + plan.workspace["prefill residual"]
            console.print(f"Rows from and to other machines take {n_bytes / 1e9:.2f} GB of each host's memory more.")
        if meeting_bytes := device.text.meeting_bytes(plan):
            console.print(
                f"Sums on their way between GPUs take {meeting_bytes / 1e9:.2f} GB of the host's memory more."
            )
    else:
        console.print("Python and the HTTP process take about 0.2 GB more.")
    decoders_gb = plan.decoders_bytes / 1e9
    if decoders_gb:
        console.print(f"Decoders of pictures may take up to {decoders_gb:.1f} GB of the host's memory more.")
    table_bytes = model.ngram_table_bytes(in_memory=on_gpu) if isinstance(model, TextModel) else 0
    if table_bytes:
        where = "stays in its files", " Memory that nothing else takes keeps what was read."
        if on_gpu:
            where = "is copied to the host's memory, once for all GPUs", ""
        n_rows = f"a token reads {plan.shape.ngrams.n_heads} rows of it"
        console.print(f"The table of n-grams, {table_bytes / 1e9:.1f} GB, {where[0]}: {n_rows}.{where[1]}")
    if on_gpu and (read_bytes := table_bytes + plan.table_bytes + plan.outside_bytes):
        console.print(
            f"{read_bytes / 1e9:.1f} GB of the host's memory must be free for what GPUs read there, beside the host tier."
        )
    console.print(_fit_table(plan))
    if config.lora and not plan.speaks:
        for name, adapter in given_adapters(config, whole(plan.shape, plan.cuts)).items():
            console.print(_adapter_table(name, adapter))
    if config.prefix_cache and not plan.speaks:
        disk_bytes = int(config.cache_disk_gb * 1e9) if config.cache_dir is not None else None
        console.print(_cache_table(plan, config.cache_host_gb is not None, disk_bytes))
    if stages:
        console.print("Speeds are of the layers here: a token takes the time of all machines, one behind the other.")
    try:
        roofs = _roofs(plan, weights, on_gpu) if is_here else None
        console.print(_speed_table(plan, weights, store, roofs, _link(plan, model) if roofs else None))
    except RuntimeError:  # torch's out of memory
        console.print("The roofs were not measured: too little of the GPU's memory is free.")
    return out.getvalue()


def _stages(config: EngineConfig, device: Cpu | Gpu, first: TextPlan, free: int) -> list[tuple[str, TextPlan]]:
    """Says what each machine of --stages runs, with its plan, as if it had the memory that this one has."""
    n, found = len(first.shape.model_layer_types), list[tuple[str, TextPlan]]()
    for number, place in enumerate(("here", *config.stages)):
        plan = make_plan(device.text, settle_text(config, device, stage=number), free) if number else first
        begin = plan.shape.first_layer
        found.append((f"Layers {begin} to {begin + plan.shape.n_layers - 1} of {n}, {place}:", plan))
    return found


def _stored(plan: TextPlan, store: Store) -> Weights | None:
    """Weights of a plan that take no memory; None: of a speech model."""
    return None if plan.speaks else _weights(plan.shape, plan.quantize, store)


def _weights(shape: ModelShape, quantize: str | None, store: Store) -> Weights:
    """Makes weights that take no memory: all that the model has, also where random ones would not fit."""
    shape = dataclasses.replace(shape, shares_experts=False)
    return empty_weights(shape, quantize, shape.tie_word_embeddings, store)


def _parts(plan: Plan[Any]) -> str:
    shape: Any = whole(plan.shape, plan.cuts)
    shape = shape if plan.speaks else all_stages(shape)
    size = f"{shape.n_params / 1e9:.2f} B parameters"
    if plan.speaks:
        return (
            f"{size}, talker of {shape.talker.n_layers} layers and predictor of {shape.predictor.n_layers}, {N_CODES} codes a frame of "
            f"80 ms, {SAMPLE_RATE} Hz"
        )
    sparse = f", {shape.n_active_params / 1e9:.2f} B active" if shape.is_moe else ""
    if shape.ngrams is not None:
        sparse += f", {shape.ngrams.n_params / 1e9:.2f} B in a table of n-grams"
    return f"{size}{sparse}, {shape.n_gdn_layers} DeltaNet + {shape.n_attn_layers} attention layers"


def _weights_text(plan: Plan[Any], weights: Weights | None) -> str:
    kind = plan.quantize or "bfloat16"
    if weights is None:
        return f"{kind} matrices of talker and predictor, bfloat16 tables"
    if not plan.shape.formats:
        return f"{kind} matrices, float32 norms and gates"
    rest = f" (16 bits rounded to {kind})" if plan.quantize else ""
    return f"as stored{rest}: {shares_text(weights.formats())}; float32 norms and gates"


def _memory_table(plan: Plan[Any], weights: Weights | None, on_gpu: bool) -> Table:
    buffers = dict(plan.workspace)
    streams = buffers.pop("vocoder states", 0)
    pictures = sum(n_bytes for name, n_bytes in buffers.items() if name == "pictures" or name.startswith("vision "))
    adapters = buffers.pop("adapters", 0)
    buffers = {name: n for name, n in buffers.items() if name != "pictures" and not name.startswith("vision ")}
    largest = sorted(buffers.items(), key=lambda item: -item[1])[:3]
    most = ", ".join(f"{name} {n_bytes / 1e6:.0f} MB" for name, n_bytes in largest)
    unit = "tokens"
    step = f"a step of up to {plan.n_batch_tokens} tokens"
    host = "for preempted sequences; with --cache-host-gb for what is evicted as well"
    if plan.speaks:
        unit, step = "rows or frames", f"a step of up to {plan.n_rows} rows"
        host = "for preempted sequences"
    if plan.n_gpus > 1:
        host = f"of all GPUs, {host}"
    if on_gpu:
        step = f"a decode of {plan.max_num_seqs} rows and a prefill of {plan.max_step_tokens} {unit.split()[0]}"
        host = f"not on the device: {host}"
    where = f" on each of {plan.n_gpus} GPUs" if plan.n_gpus > 1 else ""
    if plan.n_shards > 1:
        where += f", {plan.n_shards} of {len(plan.cuts)} parts"
    table = Table("memory", "GB", "what", title=f"Allocated before ready{where}", title_justify="left")
    rows = {
        "weights": (plan.weight_bytes, _weights_text(plan, weights)),
        "embedding": (plan.table_bytes, "in the host's memory: a step reads one row of it for a token"),
        "vocoder": (plan.vocoder_bytes, "float32"),
        "vision tower": (plan.tower_bytes, "as stored; the buffers are in the next line"),
        "pictures": (
            pictures,
            f"one of up to {plan.max_picture_tokens} tokens at work, {plan.n_picture_blocks} blocks of {PAGE_SIZE} ready"
            + ", room for pixels that wait" * ("vision pixels that wait" in plan.workspace),
        ),
        "draft model": (
            plan.drafter_bytes,
            "as stored, or rounded as the model is; its keys and values are in the pages",
        ),
        "workspace": (sum(buffers.values()), f"{step}; largest: {most}"),
        "streams": (streams, f"states of {plan.n_streams} streams of audio"),
        "state slots": (
            0 if plan.speaks else plan.slots_bytes,
            f"{plan.max_num_seqs} live + {plan.n_slots - plan.max_num_seqs} checkpoints of {plan.state_bytes / 1e6:.2f} MB"
            + ("" if plan.speaks else f", {plan.shape.state_dtype}"),
        ),
        "pages": (plan.pages_bytes, _pages_text(plan, unit)),
        "host tier": (plan.host_bytes, host),
        "adapters": (
            adapters,
            f"room for {plan.adapters.n} of rank up to {plan.adapters.rank}; their buffers are in the workspace",
        ),
        "experts": (
            plan.outside_bytes,
            f"not on the device: all are in the host's memory, {plan.n_expert_slots} of a layer in the workspace, too"
            if plan.n_expert_slots
            else "not in memory: on the disk, and read when they are used",
        ),
        "total": (
            plan.total_bytes - (plan.host_bytes if on_gpu else 0),
            f"of {plan.budget_bytes / 1e9:.2f} GB; --memory-gb allows more or less",
        ),
    }
    for name, (n_bytes, what) in rows.items():
        if n_bytes or name == "host tier":
            table.add_row(name, f"{n_bytes / 1e9:.3f}", what)
    return table


def _adapter_table(name: str, adapter: Adapter) -> Table:
    """Makes the table of which rows of which matrices an adapter changes; layers and experts that are alike
    are one line.
    """
    title = f"Adapter {name}: rank {adapter.rank}, {len(adapter.covers)} modules"
    table = Table("module", "matrix", "rows", "layers", title=title, title_justify="left")
    layers: dict[tuple[str, str, str], set[int]] = {}
    for module, matrix, first, end in adapter.covers:
        layer = re.search(r"layers\.(\d+)\.", module)
        alike = re.sub(r"layers\.\d+\.", "layers.*.", re.sub(r"experts\.\d+\.", "experts.*.", module))
        key = alike, re.sub(r"layers\.\d+\.", "layers.*.", matrix), f"{first} to {end - 1}"
        layers.setdefault(key, set()).update({int(layer[1])} if layer else ())
    for (module, matrix, rows), numbers in layers.items():
        table.add_row(module, matrix, rows, _ranges(sorted(numbers)))
    return table


def _ranges(numbers: list[int]) -> str:
    """Numbers for people, such as "0-2, 4"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def _pages_text(plan: Plan[Any], unit: str) -> str:
    text = f"{plan.n_pages} of {PAGE_SIZE} {unit}, {plan.page_bytes / 1e3:.0f} kB each"
    if plan.speaks:
        return text
    return f"{text}: {plan.n_pages * PAGE_SIZE} tokens, keys and values in {plan.shape.kv_cache_dtype}"


def _fit_table(plan: Plan[Any]) -> Table:
    """Makes the table of how many sequences, or utterances, of a length run at once."""
    lengths = {str(n): n for n in _lengths(plan)}
    what, unit, longest = "sequences", "tokens", f"{plan.max_model_len} tokens"
    if plan.speaks:
        lengths = {str(s): PAGE_SIZE + int(s * ROWS_PER_S) for s in (10, 30, 120, 300)}
        what, unit, longest = ("utterances", "seconds of audio", f"{plan.max_model_len} rows of prompt and frames")
    title = f"{what.capitalize()} of a length that run at once (longest: {longest})"
    table = Table(unit, what, "limited by", title=title, title_justify="left")
    for name, length in lengths.items():
        if length <= plan.max_model_len:
            by_pages = plan.n_pages // pages_for(length)
            limit = "slots" if by_pages >= plan.max_num_seqs else "pages"
            table.add_row(name, f"{min(by_pages, plan.max_num_seqs)}", limit)
    return table


def _lengths(plan: Plan[Any]) -> list[int]:
    """Tokens of a sequence: a row of a table each."""
    return [n for n in (1024, 4096, 16384, 65536, 262144) if n < plan.max_model_len] + [plan.max_model_len]


def _cache_table(plan: TextPlan, on_host: bool, disk_bytes: int | None) -> Table:
    """Makes the table of how many conversations the prefix cache keeps, each with its pages and one
    checkpoint, by tier.

    While nothing runs the slots of sequences are checkpoints, too, but for the one that the next request
    takes. on_host: host memory was given for what is evicted. disk_bytes: size of the disk tier, None without
    one.
    """
    page, state = plan.host_page_bytes, plan.n_gpus * plan.state_bytes
    title = (
        f"Conversations of a length that stay cached while nothing runs: {state / 1e6:.2f} MB a checkpoint, "
        f"{1024 / PAGE_SIZE * page / 1e6:.2f} MB for 1024 tokens"
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


def decode_bytes(shape: ModelShape, quantize: str | None, n_seqs: int, context: int, store: Store = COUNTED) -> float:
    """Bytes that one decode step of n_seqs sequences must move: weights once (of a mixture the experts that
    uniform routing touches), each state read and written, each context's keys and values read.
    """
    return _decode_bytes(_weights(shape, quantize, store), shape, n_seqs, context)


def _decode_bytes(weights: Weights, shape: ModelShape, n_seqs: int, context: int) -> float:
    n_bytes: float = weights.n_bytes
    if weights.lm_head is not weights.embed:
        n_bytes -= weights.embed.n_bytes  # a lookup
    if shape.is_moe:
        idle = (1 - shape.n_experts_per_tok / shape.n_experts) ** n_seqs
        experts = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, Moe)]
        n_bytes -= idle * sum(moe.gate_up.n_bytes + moe.down.n_bytes for moe in experts)
    return n_bytes + n_seqs * (2 * shape.state_bytes + _context_bytes(shape, context))


def _context_bytes(shape: ModelShape, context: int) -> int:
    """Bytes of keys and values that a token reads: of all tokens, or of those that an index chooses, and of
    it the keys of all groups.
    """
    index = shape.index
    if index is None:
        return context * shape.kv_bytes_per_token
    of_token = shape.n_kv_heads * shape.kv_format.head_bytes(shape.head_dim)
    groups = context // index.ratio * index.dim * 2 if context > index.budget else 0
    return shape.n_kv_layers * (min(context, index.budget) * of_token + groups)


def decode_roof(plan: TextPlan, on_gpu: bool) -> float:
    """Tokens a second of one sequence behind CONTEXT tokens, if the memory's speed, measured now, were all.

    Raises torch.OutOfMemoryError.
    """
    weights = _weights(plan.shape, plan.quantize, COUNTED_ROWS if on_gpu else COUNTED)
    return _roofs(plan, weights, on_gpu)[0] / (plan.n_shards * _decode_bytes(weights, plan.shape, 1, CONTEXT))


def _roofs(plan: Plan[Any], weights: Weights | None, on_gpu: bool) -> tuple[float, float]:
    """Bytes read and operations multiplied per second, measured now. Raises torch.OutOfMemoryError."""
    if on_gpu:
        from deltic.ops.gpu.roofs import GpuRoofs

        roofs = GpuRoofs.measured()
        return roofs.read, roofs.multiply
    read = read_bandwidth(plan.n_threads, beyond_caches())
    if weights is None or not plan.shape.formats:
        return read, multiply_peak(plan.n_threads, plan.quantize or "bf16")
    active = active_weights(weights, plan.shape)
    most = {name: n for name, n in active.items() if n >= LEAST_PART * sum(active.values())}
    seconds = sum(n / multiply_peak(plan.n_threads, name) for name, n in most.items())
    return read, sum(most.values()) / seconds


def _link(plan: TextPlan, model: TextModel | SpeechModel) -> float | None:
    """Bytes a second, measured now, at which experts come that are outside: over a GPU's link, or from the
    disk. None: none are, or they are not there yet.
    """
    if not plan.outside_bytes:
        return None
    if plan.n_expert_slots:
        from deltic.ops.gpu.roofs import host_link

        return host_link()
    files = [model.directory / PACKED]
    if model.config.weights_cache is not None:
        files.append(cache_file(model.config, model.directory, plan.shape.has_draft_head))
    file = next((file for file in files if file.exists()), None)
    return None if file is None else disk_bandwidth(file)


def _speed_table(
    plan: Plan[Any], weights: Weights | None, store: Store, roofs: tuple[float, float] | None, link: float | None = None
) -> Table:
    """Roofs, not forecasts, and without a vocoder: the larger of bytes over bandwidth and operations over the
    multiply rate. Without roofs, the bytes of a step. link: as of `_link`; what is outside comes before it
    is read.
    """
    shape, context = plan.shape, min(CONTEXT, plan.max_model_len)
    if plan.speaks:
        parts = frame_bytes(shape, plan.quantize, store)
        heads = N_CODES * shape.n_codebook * shape.predictor.hidden_size
        work = 2 * (shape.talker.layer_params + N_CODES * shape.predictor.layer_params + heads)
        what, speed, sizes = "streams", "ms a frame at least", (1, 2, 4, 8, 16)
        title = (
            f"Codes of a frame (80 ms of audio): talker {parts[0] / 1e9:.2f} GB, predictor {parts[1] / 1e9:.2f} GB, "
            f"{work / 1e9:.1f} Gop"
        )
    else:
        head = 2 * shape.vocab_size * shape.hidden_size
        body = plan.n_shards * (2 * shape.n_active_params - head * (1 if shape.tie_word_embeddings else 2))
        work = body + plan.n_shards * 2 * (shape.head_rows or shape.vocab_size) * shape.hidden_size
        what, speed, sizes = "step", "tokens/s at most", (1, 4, 16, 64, 128)
        title = "Roofline" if roofs else "What a step must move; a GPU's bandwidth bounds the speed"
    if roofs:
        title += f" at {roofs[0] / 1e9:.1f} GB/s and {roofs[1] / 1e9:.0f} Gop/s (measured now)"
    if link:
        title += f", experts from outside at {link / 1e9:.1f} GB/s, evenly chosen"
    outside = "the link" if plan.n_expert_slots else "the disk"
    more = (f"GB over {outside}, evenly chosen",) if plan.outside_bytes else ()
    columns = (speed, "bound by") if roofs else ("GB", *more)
    table = Table(what, *columns, title=title, title_justify="left")
    for n in (n for n in sizes if n <= plan.max_num_seqs):
        n_bytes = sum(parts) if weights is None else plan.n_shards * _decode_bytes(weights, shape, n, context)
        name = f"{n}" if plan.speaks else f"decode, {n} at {context} tokens"
        if roofs is None:
            table.add_row(name, f"{n_bytes / 1e9:.2f}", *(f"{brought(plan, n) / 1e9:.2f}" for _ in more))
            continue
        memory_s, compute_s = n_bytes / roofs[0], n * work / roofs[1]
        brought_s = brought(plan, n) / link if link else 0.0
        least_s = max(memory_s, compute_s) + brought_s
        value = f"{1000 * least_s:.0f}" if plan.speaks else f"{n / least_s:.1f}"
        slower = "memory" if memory_s >= compute_s else "arithmetic"
        table.add_row(name, value, outside if brought_s > max(memory_s, compute_s) else slower)
    if more and roofs is None:
        n = plan.max_step_tokens
        table.add_row(f"prefill of {n} tokens", "–", f"{brought(plan, n) / 1e9:.2f}")
    if roofs and not plan.speaks:  # what is outside comes while the layer in front computes
        n = plan.max_step_tokens
        compute_s, brought_s = n * body / roofs[1], brought(plan, n) / link if link else 0.0
        slower = outside if brought_s > compute_s else "arithmetic"
        table.add_row("prefill", f"{n / max(compute_s, brought_s):.0f}", slower)
    return table
