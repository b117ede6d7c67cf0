"""Tables of formats of keys and values: how many tokens of context fit, from plans and not from runs; how
fast attention is; and what they lose.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench.kept import Row, Runs, grid, missing, percent, ranged, source
from bench.quality_tables import scaled
from deltic.config import EngineConfig
from deltic.models.qwen.published import PUBLISHED
from deltic.ops.kv_formats import KV_FORMATS, on_device
from deltic.runtime.fit import make_plan
from deltic.runtime.model import TextModel
from deltic.runtime.plan import TextKind

PLANS = (("qwen3.5-27b", "int4", 24), ("qwen3.5-27b", None, 139), ("qwen3.5-35b-a3b", None, 139))
"""Shape, what weights are rounded to, and GB of a GPU that are free."""
SEQS, CHECKPOINTS, STEP = 4, 4, 1024


def tokens(name: str, quantize: str | None, gb: float, kv: str, device: str) -> int:
    """Of pages that fit, where everything else is planned first."""
    if device == "cuda":
        from deltic.ops.gpu.launch import Levers
        from deltic.runtime.gpu.device import TextOnGpu

        kind: TextKind = TextOnGpu(Levers())
    else:
        from deltic.runtime.cpu.device import Cpu

        kind = Cpu.text
    config = EngineConfig(
        quantize=quantize, memory_gb=gb - kind.reserve_bytes / 1e9, max_num_seqs=SEQS, n_checkpoints=CHECKPOINTS,
        max_model_len=32768, max_step_tokens=STEP, cache_host_gb=0.0,
    )  # fmt: skip
    shape = replace(PUBLISHED[name], kv_cache_dtype=kv)
    config = replace(config, max_drafts=kind.max_drafts(config, shape))
    model = TextModel(config=config, directory=Path(), shape=shape, n_real=shape.vocab_size)
    plan = make_plan(kind, model, int(gb * 1e9), 64 * 10**9)
    return 64 * plan.n_pages


def capacity(runs: Runs) -> str:
    """By model and format; runs: none are read."""
    rows = []
    for device, plans in (("cuda", PLANS), ("cpu", (("qwen3.5-27b", "int4", 24),))):
        for name, quantize, gb in plans:
            found = {kv: tokens(name, quantize, gb, kv, device) for kv in on_device(device)}
            for kv, n in found.items():
                where = f"{gb} GB of {'a GPU' if device == 'cuda' else 'a CPU'}"
                size = f"{KV_FORMATS[kv].head_bytes(PUBLISHED[name].head_dim)}"
                rows.append([f"{name} in {quantize or 'bf16'}", where, kv, size, f"{n:,}", f"{n / found['bf16']:.2f}"])
    header = ["model", "memory", "keys and values", "bytes a token and head", "tokens", "of bf16"]
    text = (
        f"Of the planner (`deltic plan`), for {SEQS} sequences that run, {CHECKPOINTS} checkpoints, prefills of {STEP} tokens a step and "
        "no drafts: nothing was run. "
        "What is left for pages is the same for each format of a model."
    )
    return "\n\n".join((grid(header, rows), text))


def speed(runs: Runs) -> str:
    """Attention of a decode by format, from `python -m bench.kv`."""
    again = "python -m bench.kv qwen3.5-0.8b --rows 1,4,16"
    found = runs.newest("kv-*.json")
    if not found:
        return missing(again)
    data, rows = found[-1].data, []
    for row in data["rows"]:
        of_round = [
            r for run in found for r in run.data["rows"] if (r["format"], r["rows"]) == (row["format"], row["rows"])
        ]
        cells = [ranged(r[name] for r in of_round) for name in ("gb_s", "of_bf16", "step_of_bf16")]
        rows.append([str(row["rows"]), row["format"], *cells, percent(row["roof_share"])])
    header = ["sequences", "keys and values", "GB/s", "attention, of bf16", "a step, of bf16", "of the read bandwidth"]
    text = (
        f"{data['shape']}, {data['context']:,} tokens behind each sequence, {data['threads']} threads, {data['instructions']}. A step is "
        f"attention as measured, and weights ({data['quantize'] or 'bf16'}) and states at the bandwidth of the same run, "
        f"{data['read_gb_s']} GB/s."
    )
    return "\n\n".join((grid(header, rows), text, source(found, again)))


def lora(runs: Runs) -> str:
    """What adapters cost a decode step on a CPU, from `python -m bench.lora`."""
    again = "python -m bench.lora qwen3.5-0.8b --n 1,16"
    found = runs.newest("lora-*.json")
    if not found:
        return missing(again)
    rows = []
    for run in found:
        for row in run.data["rows"]:
            times = [ranged((row[k]["least_ms"], row[k]["most_ms"]), row[k]["ms"]) for k in ("without", "with")]
            ratio = row["with"]["ms"] / row["without"]["ms"]
            rows.append([run.data["quantize"] or "bf16", str(row["n"]), *times, f"{ratio:.2f}", f"{row['least']:.2f}"])
    data = found[-1].data
    text = (
        f"{data['shape']}, {data['threads']} threads, {data['instructions']}. "
        f"Each sequence has an adapter of rank {data['rank']} of its own, on every projection. "
        "Steps with and without take turns. The last column is what their bytes alone would cost."
    )
    header = ["weights", "sequences", "ms a step", "with adapters", "times", "by bytes"]
    return "\n\n".join((grid(header, rows), text, source(found, again)))


def lost(runs: Runs) -> str:
    """What formats of keys and values lose."""
    return _lost(runs, "kv-cache-dtype", "keys and values", "kv-cache-dtype=int8 kv-cache-dtype=k8v4 --context 2048")


def states_lost(runs: Runs) -> str:
    """What states in 16 bits lose."""
    return _lost(runs, "state-dtype", "states", "state-dtype=bfloat16 --context 4000")


def _lost(runs: Runs, setting: str, what: str, settings: str) -> str:
    """What a setting loses against its default, near and far, from `deltic bench quality --setting`."""
    again, default = f"deltic bench quality --setting {settings}", "float32" if setting == "state-dtype" else "bf16"

    def is_of(data: Row) -> bool:
        return all(row["format"].startswith(f"{setting}=") for row in data["rows"][1:])

    kept = [run for gpu in (False, True) for run in runs.newest("settings-*.json", gpu=gpu, where=is_of)]
    if not kept:
        return missing(again)
    rows = [
        [
            run.data["model"],
            f"{run.data['context']:,}" if run.data["context"] else "as they are",
            row["format"].removeprefix(f"{setting}="),
            f"{row['perplexity']:.5f}",
            scaled(row["kl_mean"], row["kl_error"]),
            f"{row['kl_p99']:.4f}",
            f"{100 * row['same_argmax']:.2f} %",
            percent(row["answers_same"]),
        ]
        for run in kept
        for row in run.data["rows"][1:]
    ]
    header = [
        "model",
        "texts of",
        what,
        "perplexity",
        f"KL to {default}",
        "p99",
        "same most likely token",
        "same answer",
    ]
    text = (
        "KL in 1e-5 nats a token, p99 in nats. Of long texts what counts are the last tokens. Of greedy answers the share "
        "before they part."
    )
    return "\n\n".join((grid(header, rows), text, source(kept, again)))
