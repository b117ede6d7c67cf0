"""The documents' tables, from the runs that are kept: `python -m bench.tables` writes them, `--check` looks.

A document says where: what stands between `<!-- table NAME -->` and `<!-- end -->` is written by the function
of that name in `TABLES`. `bench/kept.py` says which runs count, `bench.figures` takes them.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from bench import draft_tables, gpu_tables, kv_tables, peer_tables, picture_tables, quality_tables, routed_tables
from bench.kept import Row, Runs, grid, missing, percent, ranged, shown, source, spread

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "docs/performance.md", "docs/serving.md", "docs/formats.md", "docs/many-machines.md")
MAX_COLUMNS = 138
MARKED = re.compile(r"(<!-- table (?P<name>[a-z-]+) -->)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def start(runs: Runs, on_gpu: bool = False) -> str:
    """Seconds from the command to ready."""
    again = f"python -m bench.figures {'gpu-more' if on_gpu else 'cpu --only start'}"
    found = runs.newest("start-*.json", gpu=on_gpu)
    if not found:
        return missing(again)
    stages = {"ready": "ready over HTTP, s", "import": "of it the engine's imports", "weights": "weights"}
    stages |= {"compile": "compiling", "record": "recording"} if on_gpu else {"memory": "memory and warm-up"}
    rows = []
    for run in found:
        starts = run.data["starts"]
        cells = [ranged(one[stage] for one in starts) for stage in stages]
        rows.append([str(run.data.get("label", "")), str(len(starts)), *cells])
    header = ["model", "starts", *stages.values()]
    return "\n\n".join((grid(header, rows), source(found, again)))


def loading(runs: Runs, on_gpu: bool = False) -> str:
    """Seconds to load and to be ready, by format."""
    again = "python -m bench.loading" + on_gpu * " --device cuda --shape qwen3.5-35b-a3b --formats fp8"
    found = runs.newest("loading-*.json", gpu=on_gpu)
    if not found:
        return missing(again)
    rows = []
    for row in (row for run in found for row in run.data["rows"]):
        starts, loads = row["starts"], [one["seconds"] for one in row["loads"]]
        cells = [shown(row["file_gb"]), ranged(loads), ranged(row["copies"])]
        cells += [ranged(one[stage] for one in starts) for stage in ("ready", "record" if on_gpu else "memory")]
        if not on_gpu:
            cells.append(f"{max(one['beyond_gb'] for one in row['loads']):.2f}")
        rows.append([row["format"], *cells])
    busy = [load for run in found for row in run.data["rows"] for load in row["load_average"]]
    text = (
        f"{found[0].data['shape']}, {found[0].data['threads']} threads, files in the system's cache. The roof is to copy the "
        f"file's bytes to new memory by as many threads, in the same round. Load averages were {ranged(busy)}."
    )
    header = [
        "file",
        "GB",
        "weights alone, s",
        "roof, s",
        "command to ready, s",
        *(["of it recording"] if on_gpu else ["of it memory and warm-up", "grew beyond the weights, GB"]),
    ]
    return "\n\n".join((grid(header, rows), text, source(found, again)))


def install(runs: Runs) -> str:
    """From nothing to the first streamed token, and what an installed package takes."""
    again = "python -m bench.install"
    found = runs.newest("install-*.json")
    if not found:
        return missing(again)
    rows = [row for run in found for row in run.data["rounds"]]
    cells = []
    for how in dict.fromkeys(row["how"] for row in rows):
        of = [row for row in rows if row["how"] == how]
        later = [one for row in of for one in row["starts"][1:]]
        seconds = (ranged(row[name] for row in of) for name in ("install_s", "total_s"))
        starts = (ranged(one[name] for one in later) for name in ("ready_s", "memory_mb"))
        size = f"{shown(median(row['size_mb'] for row in of))}"
        if pip := of[-1].get("pip_mb"):
            size += f", of it pip {shown(pip)}"
        cells.append([f"`{how}`", *seconds, *starts, size])
    header = ["installed by", "installed, s", "first token, s", "later starts: ready, s", "memory, MB", "on disk, MB"]
    return "\n\n".join((grid(header, cells), source(found, again)))


def constrained(runs: Runs) -> str:
    """What sequences under a schema cost on a GPU beside free ones.

    Of runs that looked whether all came to their end.
    """
    again = "python -m bench.figures gpu-more"
    found = runs.newest("constrained-*.json", gpu=True, where=lambda data: all("output" in row for row in data["rows"]))
    if not found:
        return missing(again)
    rows = []
    for run in found:
        for row in run.data["rows"]:
            times = ranged(row["round_times_free"], row["times_free"])
            rows.append(
                [
                    run.data["flags"]["dummy"],
                    f"{row['n']}",
                    f"{row['constrained']}",
                    ranged(row["round_ms"], row["ms_a_token"]),
                    times,
                ]
            )
    header = ["model", "sequences", "under a schema", "ms a token", "times all free"]
    return "\n\n".join((grid(header, rows), source(found, again)))


def prefix_claim(runs: Runs) -> str:
    """One sentence: what a hit saves of the time to the first token."""
    found = runs.newest("prefix-qwen3.5-0.8b-int8-*.json")
    row = next((r for r in found[-1].data["summary"] if r["item"] == "system"), None) if found else None
    if row is None or row.get("median") is None:
        return "No run of the prefix cache is kept."
    return (
        "The first token of another question behind a known system message of 448 tokens came after "
        f"{spread(row)} of the time that the first question's took."
    )


def soak_claim(runs: Runs) -> str:
    """One sentence: what all soaks that are kept have checked, and what they found."""
    found = [run.data for run in runs.clean if run.path.match("soak-*.json")]
    if not found:
        return "No soak is kept."
    requests, tokens, kills = (
        sum(int(data[name]) for data in found) for name in ("requests", "generated_tokens_checked", "kills")
    )
    broken = sum(len(data["violations"]) for data in found)
    return (
        f"{len(found)} soaks are kept: {requests:,} random requests, {tokens:,} tokens or frames checked, the engine killed "
        f"{kills} times, {broken} promises broken."
    )


HEADLINE_SIZES = (1, 128)
"""Sequences of the steps that the README shows."""


def headline(runs: Runs) -> str:
    """The short table of the README."""
    rows = []
    for run in [*gpu_tables.plain_runs(runs)[1:], *gpu_tables.format_runs(runs)[:2]]:
        ends = [row for row in run.data["rows"] if row["n"] in HEADLINE_SIZES]
        device = run.data["device"].removeprefix("NVIDIA ")
        taken = [(row, row.get("round_ms", [])) for row in ends]
        if not all(ms and peer_tables.is_sound(len(ms), row["roof"] * row["step_ms"] / min(ms)) for row, ms in taken):
            continue
        sizes = " and of ".join(f"{row['n']}" for row in ends)
        roofs = " and ".join(percent(row["roof"]) for row in ends)
        one = f"{run.data['shape']}, {device}, a step of {sizes}"
        rows.append([one, f"{' and '.join(map(gpu_tables.cell, ends))} ms", f"{roofs} of the roof"])
    wanted = {
        ("decode 1", "bf16"),
        ("decode 16", "int8"),
        ("prefill 512", "bf16"),
        ("decode 1", "q8_0"),
        ("decode 1", "q4_k_m"),
    }
    for found in filter(None, (peer_tables.peers_run(runs), peer_tables.peers_run(runs, "files"))):
        for ours, _, ratios in peer_tables.peer_rows(found.data):
            if (ours["workload"], ours["lane"].removeprefix("deltic-")) in wanted and peer_tables.is_sound_peer(ours):
                beside = " · ".join(
                    f"{spread(row['ratio'])}{peer_tables.star(row)} times {peer_tables.peer_name(row['theirs'])}"
                    for row in ratios
                )
                where = f"{found.data['shape']}, {found.data['threads']} CPU threads"
                name = (
                    f"{where}, {peer_tables.workload_name(ours['workload'])}, {peer_tables.lane_format(ours['lane'])}"
                )
                rows.append([name, f"{spread(ours['tok_s'])} tok/s", beside])
    return grid(["random weights", "Deltic, median (least .. most)", "beside it"], rows)


def prefix(runs: Runs) -> str:
    """Time to first token with the prefix cache."""
    again = "python -m bench.prefix --dummy qwen3.5-0.8b --quantize int8", "python -m bench.prefix"
    found = [
        kept[-1] for name in ("qwen3.5-0.8b-int8", "built-in-bf16") if (kept := runs.newest(f"prefix-{name}-*.json"))
    ]
    if not found:
        return missing(*again)
    names = {
        "system": "another 64-token question behind a 448-token system message / the first",
        "repeat": "the same 512 tokens again / the first time",
        "cold 512": "a cold prompt of 512, cache on / off",
        "cold 2048": "a cold prompt of 2,048, cache on / off",
        "restart": "tokens found after a restart with `--cache-dir` / before it",
        "short": "time of 2,000 prompts of 200 tokens that share 128, cache on / off",
    }
    by_run = [{row["item"]: row for row in run.data["summary"]} for run in found]
    rows = [
        [text, *(spread(items[item]) if items.get(item, {}).get("median") is not None else "–" for items in by_run)]
        for item, text in names.items()
    ]
    header = [
        "",
        *(f"{run.data['model']}, {run.data['quantize'] or 'bf16'}, {run.data['rounds']} rounds" for run in found),
    ]
    return "\n\n".join((grid(header, rows), source(found, *again)))


def agent(runs: Runs) -> str:
    """How much of an agent trace's prompts is reused."""
    again = (
        "python -m bench.agent --dummy qwen3.5-0.8b --quantize int8 --sessions 3 --parallel 3 --max-tokens 12000 "
        "--memory-share 0.25 --cold-rounds 0"
    )
    found = runs.newest("agent-qwen3.5-0.8b-*.json")
    if not found:
        return missing(again)
    data, rows = found[-1].data, []
    for run in data["runs"]:
        memory = f"{run['label']}, {run['held']['bytes'] / 1e9:.1f} GB"
        tokens = (run["reuse"], run["best_reuse"], run["reuse_of_best"])
        first = f"{run['ttft_p50_s']:.2f} s, {run['ttft_p95_s']:.1f} s"
        rows.append([memory, *(f"{100 * share:.1f} %" for share in tokens), first])
    header = [
        "memory",
        "prompt tokens reused",
        "best possible on the 64-token grid",
        "of the best",
        "time to first token, p50, p95",
    ]
    return "\n\n".join((grid(header, rows), source(found[-1:], again)))


def quality(runs: Runs) -> str:
    """What the formats lose."""
    again = "deltic bench quality"
    found = runs.newest("quality-built-in-*.json")
    if not found:
        return missing(again)
    data, rows = found[-1].data, []
    for row in data["rows"]:
        loss = (
            f"{row['kl_mean']:.1e} ± {row['kl_error']:.0e}",
            f"{row['kl_p99']:.4f}",
            f"{row['kl_max']:.3f}",
            f"{100 * row['same_argmax']:.2f} %",
        )
        size = (f"{row['bytes'] / 1e6:.1f}", f"{row['bits_per_weight']:.2f}", f"{row['perplexity']:.5f}")
        rows.append([row["format"], *size, *(("",) * 4 if row["format"] == "bf16" else loss)])
    header = [
        "format",
        "MB",
        "bits a weight",
        "perplexity",
        "KL to bf16, mean",
        "p99",
        "largest",
        "same most likely token",
    ]
    text = f"{data['tokens']:,} tokens of held-out text that the built-in model knows; KL in nats a token."
    return "\n\n".join((grid(header, rows), text, source(found[-1:], again)))


def serve(runs: Runs) -> str:
    """The built-in model over HTTP."""
    again = "deltic bench serve --n 1,4,16 --requests-per-n 32"
    found = runs.newest("serve-built-in-*.json")
    if not found:
        return missing(again)
    by_run = [{row["value"]: row for row in run.data["rows"]} for run in found]
    at_once = sorted(set.intersection(*(set(rows) for rows in by_run)))

    def line(text: str, value: Callable[[Row], float]) -> list[str]:
        return [text, *(ranged(value(rows[n]) for rows in by_run) for n in at_once)]

    rows = [
        line("all answers together, tokens a second", lambda row: row["output_tok_s"]),
        line("of one request, after its first token", lambda row: row["decode_tok_s"]),
        line("time to first token, ms, p50", lambda row: row["ttft_ms"]["p50"]),
        line("p95", lambda row: row["ttft_ms"]["p95"]),
    ]
    data = found[-1].data
    lengths = data["rows"][0]["mean_prompt_tokens"], data["rows"][0]["mean_output_tokens"]
    text = f"Prompts of {lengths[0]:.0f} and answers of {lengths[1]:.0f} tokens, {len(found)} runs."
    header = ["requests at once", *(f"{n:g}" for n in at_once)]
    return "\n\n".join((grid(header, rows), text, source(found, again)))


def served(runs: Runs) -> str:
    """What serving costs beside the engine alone."""
    again = "python -m bench.served"
    found = runs.newest("served-qwen3.5-0.8b-*.json")
    if not found:
        return missing(again)
    data = found[-1].data
    rounds = data["rounds"]
    rows = [
        ["served / engine alone, tokens a second", ranged(r["served_tok_s"] / r["offline_tok_s"] for r in rounds)],
        ["served, tokens a second", ranged(r["served_tok_s"] for r in rounds)],
        ["engine alone, tokens a second", ranged(r["offline_tok_s"] for r in rounds)],
        ["a step beside the probes, ms", ranged(1e3 * r["step_s"] for r in rounds)],
        ["first token of a 64-token prompt that comes alone, ms", ranged(1e3 * r["prefill_s"] for r in rounds)],
        [f"while {data['n'] - 1} others decode, ms", ranged(1e3 * t for r in rounds for t in r["ttft_s"])],
    ]
    header = [f"{data['shape']}, {data['quantize'] or 'bf16'}, {data['n']} streams", f"{len(rounds)} rounds"]
    return "\n\n".join((grid(header, rows), source(found[-1:], again)))


def host(runs: Runs) -> str:
    """What the host's own work costs."""
    again = "python -m bench.host"
    found = runs.newest("host-*.json")
    if not found:
        return missing(again)
    names = {
        "engine_host_us": "engine, beside its program, µs a step",
        "server_us_a_token": "HTTP process, µs a token",
        "host_us_a_sequence": "both, µs a step and sequence",
    }
    by_run = [{row["n"]: row for row in run.data["rows"]} for run in found]
    rows = [[text, *(ranged(r[n][name] for r in by_run) for n in by_run[0])] for name, text in names.items()]
    header = [f"{len(found)} runs, built-in model", *(f"{n} sequences" for n in by_run[0])]
    return "\n\n".join((grid(header, rows), source(found, again)))


def speech(runs: Runs) -> str:
    """Speech on a CPU, beside the published package."""
    again = "python -m bench.figures cpu --only speech"
    ours, theirs = runs.newest("speech-*.json"), runs.newest("published-*.json")
    if not ours:
        return missing(again)
    rows = []
    for label in sorted({run.data["label"] for run in ours}):
        of = [run.data for run in ours if run.data["label"] == label]
        samples = [sample for data in of for sample in data["rows"][0]["samples"]]
        audio = of[0]["rows"][0]["mean_audio_s"]
        rows.append(
            [
                f"Deltic, {label}",
                f"{audio:.1f} s",
                ranged(s["e2e_s"] / s["audio_s"] for s in samples),
                ranged(s["ttfa_s"] for s in samples),
            ]
        )
    rounds = [r for run in theirs for r in run.data["rounds"]]
    if rounds:
        rtf = ranged((r["codes_s"] + r["wave_s"]) / (0.08 * r["frames"]) for r in rounds)
        frames = median(r["frames"] for r in rounds)
        name = f"qwen-tts {theirs[-1].data['version']}, {theirs[-1].data['dtype']}"
        rows.append([name, f"{0.08 * frames:.1f} s", rtf, "– (whole answers)"])
    read = [roof / 1e9 for run in theirs for roof in run.data.get("read", ())]
    text = (
        f"One stream, {len(ours) + len(theirs)} runs in turns"
        + (f"; memory read {ranged(read)} GB/s meanwhile" if read else "")
        + "."
    )
    header = ["", "audio", "RTF", "first audio, s"]
    return "\n\n".join((grid(header, rows), text, source([*ours, *theirs], again)))


def gpu_speech(runs: Runs) -> str:
    """Speech on a GPU, over HTTP and on the device."""
    again = "python -m bench.figures gpu-speech"
    shapes = ("qwen3-tts-1.7b", "qwen3-tts-0.6b")
    found = [kept[-1] for shape in shapes if (kept := runs.newest(f"speech-{shape}-*.json", gpu=True))]
    if not found:
        return missing(again)
    rows = []
    for run in found:
        for row in run.data["rows"]:
            streams = f"{row['value']:g} {'streams' if row['mode'] == 'closed' else 'requests a second at random'}"
            first = f"{row['ttfa_ms']['p50']:.1f} / {row['ttfa_ms']['p95']:.1f}"
            late = percent(row["continuous"])
            samples = [s["e2e_s"] / s["audio_s"] for s in row["samples"] if s["audio_s"]]
            rows.append([run.data["label"], streams, first, ranged(samples), shown(row["audio_s_per_s"]), late])
    header = ["", "", "first audio, ms, p50 / p95", "RTF", "seconds of audio a second", "never late"]
    parts = [grid(header, rows)]
    frames = runs.newest("frames-qwen3-tts-*.json", gpu=True)
    for run in frames[-1:]:
        alone = [row for row in run.data["rows"] if row.get("what") == "decode"]
        told = "; ".join(f"{ranged((row['ms_least'], row['ms_most']), row['ms'])} ms at {row['n']}" for row in alone)
        parts.append(
            f"A frame on the device ({run.data['flags']['dummy']}, {alone[0]['launches']} kernels), by number of streams: {told}."
        )
    return "\n\n".join((*parts, source([*found, *frames[-1:]], again)))


def soak(runs: Runs) -> str:
    """All soaks that are kept."""
    again = "python -m bench.soak"
    found = [run for run in runs.clean if run.path.match("soak-*.json")]
    if not found:
        return missing(again)
    rows = []
    for run in found:
        data = run.data
        growth = [
            f"{name} {sizes['second_third_mb']:.1f} → {sizes['last_third_mb']:.1f}"
            for name, sizes in data["memory_growth"].items()
            if sizes
        ]
        kind = "speech" if data.get("speech", "speech" in run.path.parent.name) else "text"
        kind += f", {data['with'].replace(',', ', ')}" if data.get("with") else ""
        kills = f"{data['kills']} ({ranged(data['recoveries_s'])} s)" if data["kills"] else "0"
        where = f"[{run.path.parent.name}](RUNS/{run.path.parent.name}/{run.path.name})"
        rows.append(
            [
                kind,
                where,
                f"{data['minutes']:.3g}",
                f"{data['requests']:,}",
                f"{data['generated_tokens_checked']:,}",
                kills,
                ", ".join(growth),
                str(len(data["violations"])),
            ]
        )
    header = [
        "",
        "run",
        "minutes",
        "requests",
        "tokens or frames checked",
        "engine kills (until ready)",
        "MB, second third → last",
        "violations",
    ]
    return grid(header, rows)


def stalls(runs: Runs) -> str:
    """The time between tokens while long prompts arrive."""
    again = "python -m bench.stalls --dummy qwen3.5-0.8b --quantize int8 --targets 400,0 --prompts 2"
    found = runs.newest("stalls-qwen3.5-0.8b-*.json")
    if not found:
        return missing(again)
    data, rows = found[-1].data, []
    for row in data["rows"]:
        alone, beside = (
            " / ".join(f"{row[name][p]:,.0f}" for p in ("p50", "p99", "max")) for name in ("alone_ms", "beside_ms")
        )
        target = f"{row['target_ms']:g} ms" if row["target_ms"] else "none"
        rows.append(
            [target, f"{alone} ms", f"{beside} ms", f"{row['prompt_s']:.1f} s, {row['prompt_tok_s']:.0f} tokens/s"]
        )
    header = [
        "bound",
        f"ITL of {data['n']} answers alone, p50 / p99 / max",
        f"beside {data['prompt_tokens']:,}-token prompts",
        "a prompt",
    ]
    return "\n\n".join((grid(header, rows), source(found[-1:], again)))


TABLES: dict[str, Callable[[Runs], str]] = {
    "headline": headline,
    "peers-claim": peer_tables.peers_claim,
    "prefix-claim": prefix_claim,
    "soak-claim": soak_claim,
    "gpu": gpu_tables.decodes,
    "gpu-formats": gpu_tables.formats,
    "gpu-files": gpu_tables.files,
    "gpu-fills": gpu_tables.fills,
    "gpu-drafts": gpu_tables.drafts,
    "gpu-blocks": lambda runs: gpu_tables.drafts(runs, of_blocks=True),
    "gpu-parallel": gpu_tables.parallel,
    "gpu-invariant": gpu_tables.invariant,
    "gpu-sums": gpu_tables.sums,
    "gpu-through-host": gpu_tables.through_host,
    "gpu-layers": gpu_tables.layers,
    "gpu-same-bits": gpu_tables.same_bits,
    "gpu-native": gpu_tables.native,
    "gpu-streams": gpu_tables.streams,
    "gpu-states": gpu_tables.states,
    "gpu-contexts": gpu_tables.contexts,
    "gpu-lora": gpu_tables.lora,
    "gpu-outside": gpu_tables.outside,
    "lora": kv_tables.lora,
    "gpu-start": lambda runs: start(runs, on_gpu=True),
    "constrained": constrained,
    "gpu-speech": gpu_speech,
    "peers": peer_tables.peers,
    "peers-on-files": peer_tables.peers_on_files,
    "peers-on-experts": peer_tables.peers_on_experts,
    "peers-on-disk": peer_tables.peers_on_disk,
    "prefix": prefix,
    "agent": agent,
    "quality": quality,
    "formats": quality_tables.formats,
    "formats-again": quality_tables.formats_again,
    "kv-capacity": kv_tables.capacity,
    "kv": kv_tables.speed,
    "kv-quality": kv_tables.lost,
    "states-quality": kv_tables.states_lost,
    "serve": serve,
    "served": served,
    "drafts": draft_tables.drafts,
    "drafts-right": draft_tables.right,
    "drafts-served": draft_tables.served,
    "pictures": picture_tables.pictures,
    "gpu-pictures": picture_tables.gpu_pictures,
    "host": host,
    "speech": speech,
    "start": start,
    "loading": loading,
    "loading-gpu": lambda runs: loading(runs, on_gpu=True),
    "install": install,
    "soak": soak,
    "stalls": stalls,
    "routed-trace": routed_tables.trace,
    "routed-overhead": routed_tables.overhead,
    "routed-soak": routed_tables.soak,
    "shared-tier": routed_tables.shared,
    "kv-events": routed_tables.events,
    "stages": routed_tables.stages,
}


def broken(part: str, n_before: int = 0) -> str:
    """A paragraph in lines of at most MAX_COLUMNS, the first behind n_before others; a table as it is."""
    if part.startswith("|"):
        return part
    filler = textwrap.TextWrapper(MAX_COLUMNS, break_long_words=False, break_on_hyphens=False)
    filler.initial_indent = " " * n_before
    return filler.fill(part)[n_before:]


def filled(text: str, runs: Runs, document: Path) -> str:
    """The document with its marked parts made anew. Raises KeyError for a name that is not in TABLES.

    A part that begins on the marker's line stays in its sentence. Lines of prose are broken; a table's are
    not.
    """
    to_runs = os.path.relpath(runs.directory, document.parent)

    def one(found: re.Match[str]) -> str:
        first, *others = TABLES[found["name"]](runs).replace("](RUNS/", f"]({to_runs}/").split("\n\n")
        gap = "\n" if found["body"].startswith("\n") else ""
        n_before = 0 if gap else found.end(1) - text.rfind("\n", 0, found.start()) - 1
        made = "\n\n".join([broken(first, n_before), *map(broken, others)])
        return f"{found[1]}{gap}{made}{gap}{found[4]}"

    return MARKED.sub(one, text)


def main(given: Sequence[str] | None = None) -> int:
    """The command. With --check exit status 1 where a document is not what the runs say."""
    parser = argparse.ArgumentParser(prog="python -m bench.tables", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say which documents would change")
    arguments = parser.parse_args(given)
    runs, stale = Runs(ROOT / "bench" / "runs"), []
    for name in DOCUMENTS:
        document = ROOT / name
        text = document.read_text()
        made = filled(text, runs, document)
        if made != text:
            stale.append(name)
            if not arguments.check:
                document.write_text(made)
    print(f"{'stale' if arguments.check else 'written'}: {', '.join(stale) or 'nothing'}")
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
