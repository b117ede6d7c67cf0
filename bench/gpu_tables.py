"""The tables of `deltic bench gpu` and of what `bench/gpu` measures of models, for `bench/tables.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from statistics import median

from bench.kept import Row, Run, Runs, grid, missing, percent, ranged, shown, source
from deltic.models.qwen.published import published_shape

GPU_SHAPES = ("qwen3.5-0.8b", "qwen3.5-27b", "qwen3.5-35b-a3b")
GPU_FORMATS = ("fp8", "int4-g128-bfloat16")
LARGE_SHAPES = ("qwen3.5-122b-a10b", "qwen3.5-397b-a17b")
NATIVE = ("drafters", "streams", "experts", "few-codes", "parts", "two-gpus", "as-sm_86", "as-sm_89", "as-sm_120")
"""What is run by `bench.gpu.native`."""
OFF = ("deep_codes", "few_codes")
"""Levers of kept runs that were off as it was served."""
ALONE = ("state_dtype", "kv_cache_dtype", "max_step_tokens", "expert_parallel")
"""Settings whose runs stand in tables of their own."""


def is_plain(data: Row) -> bool:
    """Whether a run is of a whole model as it is served, on its own card: with no lever switched."""
    levers, settings = data.get("levers") or {}, data.get("settings") or {}
    is_switched = isinstance(levers, dict) and any(bool(on) == (name in OFF) for name, on in levers.items())
    is_as_another = " as " in data.get("device", "")
    return not (is_switched or is_as_another or data.get("layers") or any(map(settings.get, ALONE)))


def goes_by_host(data: Row) -> bool:
    """Whether the sums of several GPUs went through the host's memory, and all else was as it is served."""
    levers = data.get("levers") or {}
    return (
        isinstance(levers, dict)
        and levers.get("peer") is False
        and is_plain(data | {"levers": levers | {"peer": True}})
    )


def plain_runs(runs: Runs) -> list[Run]:
    """The newest of each shape."""
    names = [f"gpu-{shape}-[0-9]*.json" for shape in GPU_SHAPES]
    return [found[-1] for name in names if (found := runs.newest(name, gpu=True, where=is_plain))]


def cell(row: Row) -> str:
    """Milliseconds of a step; runs that kept no rounds have their ninth decile instead."""
    if "round_ms" in row:
        return ranged(row["round_ms"], row["step_ms"])
    return f"{shown(row['step_ms'])} (p90 {shown(row['p90_ms'])})"


def by_shape(
    runs: Runs, kind: str, where: Callable[[Row], bool] = bool, shapes: Sequence[str] = GPU_SHAPES
) -> list[Run]:
    """The newest of a kind, such as `lora`, of each shape. where: of those whose data is so."""
    return [run for shape in shapes for run in runs.newest(f"gpu-{kind}-{shape}-*.json", gpu=True, where=where)]


def decodes(runs: Runs) -> str:
    """Decodes and prefills on a GPU, beside the roofs."""
    return decodes_and_prefills(plain_runs(runs), "python -m bench.figures gpu-load --only 0.8b,27b,35b-a3b")


def format_runs(runs: Runs, formats: Sequence[str] = GPU_FORMATS, kind: str = "gpu") -> list[Run]:
    """The newest of each shape and format of quantised weights."""
    names = [f"{kind}-{shape}-{format}-*.json" for shape in GPU_SHAPES for format in formats]
    return [run for name in names for run in runs.newest(name, gpu=True, where=is_plain)]


def formats(runs: Runs) -> str:
    """The same of quantised weights."""
    return decodes_and_prefills(format_runs(runs), "python -m bench.figures gpu-load")


def files(runs: Runs) -> str:
    """The same of files that mix types, and of Q8_0 beside e4m3."""
    found = format_runs(runs, ("ud-q4_k_xl", "[Qq]8_0", "fp8"), "gpu-files")
    return decodes_and_prefills(found, "python -m bench.figures gpu-files")


def fills(runs: Runs) -> str:
    """Contexts filled to their last token as another card, in its memory."""
    again = "python -m bench.gpu.fill --dummy qwen3.5-27b --format ud-q4_k_xl --as-chip sm_89 --max-model-len 65536"
    found = by_shape(runs, "fill")
    if not found:
        return missing(again)
    rows = []
    for run in found:
        data = run.data
        keys = data["settings"].get("kv_cache_dtype", "bf16") if "settings" in data else "not recorded"
        cells = [shown(data[name]) for name in ("free_gb", "planned_gb", "torch_gb", "left_gb", "start_s", "fill_s")]
        filled = " and ".join(f"{n} x {end}" for end, n in data["ended"].items())
        rows.append([data["shape"], data["device"].split()[-1], keys, str(data["max_drafts"]), filled, *cells])
    header = ["model", "as", "keys and values", "drafts", "sequences that ended"]
    header += ["free, GB", "planned", "torch had", "left", "start, s", "filling, s"]
    return "\n\n".join((grid(header, rows), source(found, again)))


def parallel(runs: Runs) -> str:
    """The same on several GPUs together."""
    found = by_shape(runs, "parallel", is_plain, (*GPU_SHAPES, *LARGE_SHAPES))
    return decodes_and_prefills(found, "python -m bench.figures gpu-several")


def through_host(runs: Runs) -> str:
    """The same of GPUs that do not reach each other's memory, or are told not to."""
    again = "python -m bench.figures gpu-several --only peer-off"
    return decodes_and_prefills(by_shape(runs, "parallel", goes_by_host), again)


def layers(runs: Runs) -> str:
    """What a layer of a model takes that needs more GPUs than there are, and all of them, computed."""
    again, shape, rows = "python -m bench.figures gpu-several --only layers-4,layers-8", LARGE_SHAPES[-1], []
    found = runs.newest(f"gpu-parallel-{shape}-*.json", gpu=True, where=lambda data: bool(data.get("layers")))
    by_layers = {run.data["layers"]: run for run in found}
    if len(by_layers) < 2:
        return missing(again)
    few, most = (by_layers[n] for n in (min(by_layers), max(by_layers)))
    n_layers, n_most = published_shape(shape).n_layers, most.data["layers"]
    for row, other in zip(few.data["rows"], most.data["rows"], strict=True):
        ms = (other["step_ms"] - row["step_ms"]) / (n_most - few.data["layers"])
        whole = other["step_ms"] + (n_layers - n_most) * ms
        rows.append([f"{row['n']}", *(shown(one) for one in (row["step_ms"], other["step_ms"], ms, whole))])
    header = ["N", *(f"{run.data['layers']} layers, ms" for run in (few, most)), "a layer", f"{n_layers}, computed"]
    text = (
        f"{most.data['shape'].partition('-layers')[0]} on {most.data['gpus']} GPUs. The last column is computed from those before it: "
        f"no step of {n_layers} layers was measured."
    )
    return "\n\n".join((grid(header, rows), text, source([few, most], again)))


def same_bits(runs: Runs) -> str:
    """Answers of one model on several numbers of GPUs, compared."""
    again = "python -m bench.figures gpu-several --only same-bits"
    found = runs.newest("gpu-same-bits-*.json", gpu=True)
    if not found:
        return missing(again)
    rows = [
        [run.data["shape"], f"{run.data['cuts']}", *(f"{row[of]:,}" for of in ("gpus", "compared", "tokens", "differ"))]
        for run in found
        for row in run.data["rows"]
    ]
    header = ["model", "parts", "GPUs", "answers", "tokens", "differ"]
    text = "Tokens and log-probabilities of an answer must be equal to the bit to those of the first row."
    return "\n\n".join((grid(header, rows), text, source(found, again)))


def native(runs: Runs) -> str:
    """Tests of kernels and engines that ran on a card, by what they are called together."""
    again = "python -m bench.figures gpu-native"
    found = [kept[-1] for name in NATIVE if (kept := runs.newest(f"gpu-native-{name}-[0-9]*.json", gpu=True))]
    if not found:
        return missing(again)
    outcomes = ("passed", "failed", "skipped")
    rows = [
        [run.data["shape"], run.data["device"], *(f"{run.data['counts'].get(of, 0):,}" for of in outcomes)]
        for run in found
    ]
    return "\n\n".join((grid(["tests", "on", *outcomes], rows), source(found, again)))


def streams(runs: Runs) -> str:
    """Decodes and prefills of Flash-Next, whole or of some layers, and steps behind contexts."""
    again, shape = "python -m bench.figures gpu-streams", "qwen3.8-flash-next"
    names = [f"gpu-{kind}{shape}-*.json" for kind in ("", "parallel-")]
    found = [run for name in names for run in runs.newest(name, gpu=True)]
    behind = runs.newest_of_each(f"gpu-context-{shape}-*.json", lambda data: data.get("layers"), gpu=True)
    parts = [decodes_and_prefills(found, again)] if found else []
    parts += [behind_contexts(behind, again)] if behind else []
    return "\n\n".join(parts) or missing(again)


def invariant(runs: Runs) -> str:
    """The same of one GPU with the bits of two, between one as it is and the two."""
    first = "deltic bench gpu --dummy qwen3.5-27b --format fp8 --n 1,16,64,128"
    again = [f"{first}{more}" for more in ("", " --tp-invariant 2", " --tensor-parallel 2")]
    return decodes_and_prefills(runs.newest("gpu-invariant-*.json", gpu=True), *again)


def name(run: Run) -> str:
    """The shape, and what is not usual: some layers alone, several GPUs, the bits of others, the format of
    states.
    """
    n_gpus, n_cuts = (run.data.get(of, 1) for of in ("gpus", "cuts"))
    is_whole = not run.data.get("layers") or "layers" in run.data["shape"]
    layers = "" if is_whole else f", {run.data['layers']} layers"
    where = f", {n_gpus} GPUs" if n_gpus > 1 else ""
    bits = f", the bits of {n_cuts} GPUs" if n_cuts > n_gpus else ""
    state_dtype = run.data.get("settings", run.data).get("state_dtype", "float32")
    states = f", {state_dtype} states" if state_dtype != "float32" else ""
    by_host = ", by the host's memory" if goes_by_host(run.data) else ""
    return f"{run.data['shape']}{layers}{where}{bits}{states}{by_host}"


def states(runs: Runs) -> str:
    """The same with states of 32 and of 16 bits."""
    first = "deltic bench gpu --dummy qwen3.5-27b --n 1,64,128 --prompt 128 --output 256"
    again = [f"{first}{more}" for more in ("", " --state-dtype bfloat16")]
    found = by_shape(runs, "states")
    return decodes_and_prefills(found, *again)


def contexts(runs: Runs) -> str:
    """Steps behind long contexts, by the formats of weights, and of keys and values."""
    again = (
        "python -m bench.gpu.contexts --dummy qwen3.5-27b --n 1,8,32 --context 1024,32768,262144 --kv-cache-dtype fp8"
    )
    names = [f"gpu-context-{shape}-{of}*.json" for shape in GPU_SHAPES for of in ("[0-9]", "fp8-")]
    found = [run for name in names for run in runs.newest(name, gpu=True)]
    return behind_contexts(found, again, "python -m bench.figures gpu-load --only contexts")


def behind_contexts(found: list[Run], *again: str) -> str:
    """A table of runs of `bench.gpu.contexts`."""
    if not found:
        return missing(*again)
    rows, read = [], [run.data["roofs"]["read"] / 1e12 for run in found]
    lengths = sorted({row["context"] for run in found for row in run.data["rows"]})
    for run in found:
        data = run.data
        by_place = {(row["context"], row["n"]): row for row in data["rows"]}
        sizes = sorted({row["n"] for row in data["rows"]})
        for n in sizes:
            of_n = [by_place.get((length, n)) for length in lengths]
            cells = [f"{shown(row['ms'])}, {percent(row['roof'])}" if row else "–" for row in of_n]
            rows.append([name(run) if n == sizes[0] else "", data["kv_cache_dtype"], str(n), *cells])
    header = ["model", "keys and values", "N", *(f"{length:,}" for length in lengths)]
    text = (
        "Milliseconds of a recorded step, replayed back to back behind so many tokens each, and the part of its roof: "
        f"the bytes of weights, states, keys and values over the bandwidth of reading in the same "
        f"run, {min(read):.2f} to {max(read):.2f} TB/s. Contexts are not "
        "computed. Where they need more pages than there are, pages are read again, some from the second-level cache."
    )
    return "\n\n".join((grid(header, rows), text, source(found, *again)))


def lora(runs: Runs) -> str:
    """Steps in which every sequence has an adapter, beside steps in which none has."""
    again = "python -m bench.gpu.lora --dummy qwen3.5-27b --n 1,16 --lora 16 --prompt 128 --output 64 --prefill 2048"
    found = by_shape(runs, "lora")
    if not found:
        return missing(again)
    rows = []
    for run in found:
        for row in run.data["rows"]:
            what = f"{row['what']} of {row['n']:,}{' tokens' if row['what'] == 'prefill' else ''}"
            plain, own = (median(row[f"{kind}_ms"]) for kind in ("plain", "lora"))
            cells = [ranged(row[f"{kind}_ms"]) for kind in ("plain", "lora")]
            rows.append([run.data["shape"], what, *cells, f"{own / plain:.2f}"])
    data = found[-1].data
    text = (
        f"{data['adapters']} adapters of rank {data['rank']}, with terms for all linear modules but routed experts; in a decode each "
        "sequence has another one. Rounds with and without take turns on one server."
    )
    return "\n\n".join((grid(["model", "ms", "without", "with adapters", "times"], rows), text, source(found, again)))


def outside(runs: Runs) -> str:
    """Decodes and prompts of mixtures whose experts are outside the GPU, by the memory of those in slots."""
    again = "python -m bench.figures gpu-outside"
    found = runs.newest_of_each("gpu-outside-*.json", itemgetter("shape"), gpu=True)
    if not found:
        return missing(again)
    rows, heads, answers = [], dict[str, None](), list[str]()
    for run in found:
        measured = [row for row in run.data["rows"] if "ms" in row]
        for gb, skew in sorted({(row["gb"], row["skew"]) for row in measured}, key=lambda at: (at[0] or 0, at[1])):
            of = [row for row in measured if (row["gb"], row["skew"]) == (gb, skew)]
            heads |= dict.fromkeys(
                f"prefill of {row['prefill']:,}" if "prefill" in row else f"N = {row['n']}" for row in of
            )
            shares = [[percent(row[share]) for share in ("hits", "roof") if share in row] for row in of]
            cells = [ranged(row["round_ms"], row["ms"]) for row in of]
            if gb is not None:
                cells = [", ".join((cell, *share)) for cell, share in zip(cells, shares, strict=True)]
            rows.append(
                [run.data["shape"], "all" if gb is None else f"{gb:g} GB, {of[0]['slots']}", f"{skew:g}", *cells]
            )
        compared = [row for row in run.data["rows"] if "compared" in row]
        n, differ = (sum(row[of] for row in compared) for of in ("compared", "differ"))
        answers.append(f"{differ} of {n:,} ({run.data['shape']})")
    links, read = ([run.data["link"] / 1e9 for run in found], [run.data["roofs"]["read"] / 1e12 for run in found])
    text = (
        "Milliseconds; of decodes the share of experts that were in slots, and the part of the roof, which is to read what is used "
        f"from the GPU's memory ({ranged(read)} TB/s) and to bring what is in no slot over the link ({ranged(links)} GB/s), one behind "
        "the other; of prompts the part of the link's speed. The longest row of a router is so many times as long as the shortest: 1 "
        f"is even routing. Answers that differ from those of all experts on the GPU: {', '.join(answers)}."
    )
    header = ["model", "experts in slots, of a layer", "longest row", *heads]
    return "\n\n".join((grid(header, rows), text, source(found, again)))


def sums(runs: Runs) -> str:
    """Microseconds of what lies between two layers of a model on several GPUs."""
    again = "python -m bench.figures gpu-several --only sums"
    found = [run for kind in ("", "e4m3-") for run in runs.newest(f"allreduce-{kind}[0-9]*.json", gpu=True)]
    parts = []
    for run in found:
        data, rows = run.data, dict[int, dict[str, str]]()
        for row in data["rows"]:
            rows.setdefault(row["rows"], {})[row["way"]] = ranged(row["us"])
        way_us, names = data["width"] * 4 / data["link"] * 1e6, list(rows[min(rows)])
        cells = [[f"{n:,}", *(of[name] for name in names), shown(n * way_us)] for n, of in rows.items()]
        rounded = ", rounded to e4m3, too" if data["bench"].endswith("e4m3") else ""
        text = f"{data['gpus']} GPUs, rows of {data['width']:,}{rounded}; a large copy has {data['link'] / 1e9:.0f} GB/s in the same run."
        parts += [grid(["rows", *names, "roof"], cells), text]
    text = (
        "In a recording of 40 calls, which waits for neither. Every way gives normed rows. The roof is the time that float32 rows take "
        "over the link once, at the speed of that copy; two shots send bfloat16 on the way back, and so may take less."
    )
    return "\n\n".join((*parts, text, source(found, again))) if found else missing(again)


def decodes_and_prefills(found: list[Run], *again: str) -> str:
    """A table of runs of `deltic bench gpu`."""
    if not found:
        return missing(*again)
    sizes = sorted({row["n"] for run in found for row in run.data["rows"]})
    rows = []
    for run in found:
        by_n = {row["n"]: row for row in run.data["rows"]}
        # a prefill without rounds has no range, and is left out
        prefill = next((p for p in run.data["prefill"].values() if "round_ms" in p), None)
        cells = [cell(by_n[n]) if n in by_n else "–" for n in sizes]
        rows.append([name(run), *cells, ranged(prefill["round_ms"], prefill["ms"]) if prefill else "–"])
        shares = [percent(by_n[n]["roof"]) if n in by_n else "–" for n in sizes]
        rows.append(["of the roof", *shares, percent(prefill["roof"]) if prefill else "–"])
    read = [run.data["roofs"]["read"] / 1e12 for run in found]
    multiply = [run.data["roofs"]["multiply"] / 1e12 for run in found]
    launches = ", ".join(f"{run.data['rows'][0]['launches']} ({name(run)})" for run in found)
    lengths = {(run.data.get("prompt"), run.data.get("output")) for run in found}
    told = " or ".join(f"{a} prompt and {b} generated tokens each" for a, b in lengths if a)
    text = (
        f"{told or 'Prompt and generated tokens are not in these runs'}. The roof of a decode is the bytes it must move over the "
        f"bandwidth of reading, {min(read):.2f} to {max(read):.2f} TB/s, that of a prefill its operations over the rate of a large "
        f"bfloat16 product, {min(multiply):.0f} to {max(multiply):.0f} TFLOP/s, both measured in each run. Kernels in a decode of one "
        f"sequence: {launches}."
    )
    header = ["ms", *(f"N = {n}" for n in sizes), "prefill of 8,192"]
    return "\n\n".join((grid(header, rows), text, source(found, *again)))


def drafts(runs: Runs, *, of_blocks: bool = False) -> str:
    """Milliseconds a token with drafts, beside those without. of_blocks: of a block drafter."""
    first, last = "python -m bench.gpu.drafts --dummy ", "--accept 0,0.75 --output 256 --n "
    models = [("27b", "1,8,16,64"), ("27b --format fp8", "1,16"), ("35b-a3b", "1,8,16,64")]
    again = [f"{first}qwen3.5-{model} {last}{sizes}" for model, sizes in models]
    kept, guesser = ("gpu-accept-block", "block drafter") if of_blocks else ("gpu-accept", "draft head")
    if of_blocks:
        again = ["python -m bench.figures gpu-block-drafts"]
    names = [f"{kept}-{shape}-{quantised}*.json" for shape in GPU_SHAPES[1:] for quantised in ("[0-9]", "[!0-9]")]

    def drafter_of(data: Row) -> str:
        """Runs of one kind of drafter alone do not say it."""
        return str(data.get("draft_model") or "").partition("-")[0]

    found = [
        run
        for name in names
        for run in runs.newest_of_each(name, drafter_of, True, lambda data: bool(drafter_of(data)) or not of_blocks)
    ]
    if not found:
        return missing(*again)
    rows = []
    for run in found:
        for row in run.data["rows"]:
            plain, cells = median(row["plain_ms"]), list[str]()
            for name in ("head", "free"):
                own = median(row[f"{name}_ms"])
                cells += [f"{ranged(row[f'{name}_ms'])}, {plain / own:.2f}", f"{row[f'{name}_tokens_a_step']:.2f}"]
            what = ", ".join(filter(None, (run.data["shape"], drafter_of(run.data))))
            rows.append([what, str(row["n"]), f"{row['accept']:g}", ranged(row["plain_ms"]), *cells])
    most = " and ".join(str(n) for n in sorted({run.data["max_drafts"] for run in found if "max_drafts" in run.data}))
    text = (
        "Right: how often a guess is, if those before it are; that is planted. Steps and guesses are real, and the engine chooses how many "
        f"tokens it guesses{f', at most {most}' if most else ''}. Guesses that are free stand for those of text that repeats, which no "
        "model makes"
        + (
            "; the drafter that nobody asks then goes on reading what the model says of each token."
            if of_blocks
            else "."
        )
    )
    header = [
        *("model", "N", "right", "ms a token", f"with the {guesser}, times as fast", "tokens a step"),
        *("guesses free, times as fast", "tokens a step"),
    ]
    return "\n\n".join((grid(header, rows), text, source(found, *again)))
