"""The tables of pictures, for `bench/tables.py`."""

from __future__ import annotations

from statistics import median

from bench.kept import Runs, grid, missing, percent, ranged, shown, source
from deltic.bench.load import percentile
from deltic.logs import counted

_ON_GPU = {
    "qwen3.5-0.8b": "--sides 512,1024,2048 --pictures 2 --max-itl-ms 50",
    "qwen3.5-27b": "--sides 1024,2048 --rounds 3 --pictures 2 --max-itl-ms 50",
}


def gpu_pictures(runs: Runs) -> str:
    """The same of two shapes on a GPU."""
    return "\n\n".join(pictures(runs, shape) for shape in _ON_GPU)


def pictures(runs: Runs, on_gpu: str = "") -> str:
    """The vision tower, first tokens behind pictures, and the time between tokens beside them. on_gpu: the
    shape, which ran on one.
    """
    again = "python -m bench.pictures"
    if on_gpu:
        again += f" --device cuda --dummy {on_gpu} {_ON_GPU[on_gpu]}"
    found = runs.newest(f"pictures-gpu-{on_gpu}.json" if on_gpu else "pictures-qwen*.json", gpu=bool(on_gpu))
    if not found:
        return missing(again)
    data = found[-1].data
    again += " --env bench/.peers-venv" if "llama.cpp" in data else ""
    rows = []
    for row in data["towers"]:
        own = row["seconds"]["deltic"]
        shares = [row["operations"] / one / peak for one, peak in zip(own, row["peak"], strict=True)]
        times = [
            ranged(peer / one for peer, one in zip(all_s, own, strict=True))
            for name, all_s in row["seconds"].items()
            if name != "deltic"
        ]
        size = f"{row['side']} x {row['side']}"
        rows.append([size, str(row["tokens"]), ranged(1e3 * one for one in own), percent(median(shares)), *times])
    peers = [name for name in data["towers"][0]["seconds"] if name != "deltic"]
    header = ["picture", "tokens", "tower, ms", "of the multiply peak", *(f"{name}, times as long" for name in peers)]
    towers = grid(header, rows)
    rows = []
    for row in data["first_tokens"]:
        seconds = row["seconds"]
        beyond = [
            (new - tower) / text
            for new, tower, text in zip(seconds["new"], row["tower_s"], seconds["text"], strict=True)
        ]
        told = [ranged(1e3 * one for one in seconds[what]) for what in ("text", "new", "known", "again")]
        rows.append([str(row["tokens"]), *told, ranged(beyond)])
    header = ["tokens", "as text, ms", "new picture", "behind another text", "the same prompt, another end"]
    first = grid([*header, "new without the tower, of text"], rows)
    gaps = data["gaps"]
    rows = [
        [what, *(shown(percentile(all_ms, q) or 0.0) for q in (50, 95, 99, 100))]
        for what, all_ms in gaps["gaps_ms"].items()
    ]
    between = grid([f"ms between tokens of {gaps['sequences']} answers", "p50", "p95", "p99", "most"], rows)
    text = (
        f"Random weights of {data['shape']}, medians of {len(data['towers'][0]['seconds']['deltic'])} rounds in which all take turns. The "
        "towers of others have random weights of their own."
    )
    if "llama.cpp" in data:
        built = dict(data["llama.cpp"])
        flags = built.pop("built_with")
        named = ", ".join(f"{name} {version}" for name, version in built.items())
        text += f" llama.cpp: its mtmd, {named}, built with `{flags}`."
    last = (
        f"Beside: while {counted(gaps['pictures'], 'picture')} of {gaps['side']} x {gaps['side']} pixels came, with `--max-itl-ms "
        f"{gaps['max_itl_ms']:g}`."
    )
    return "\n\n".join((towers, first, between, f"{text} {last}", source(found[-1:], again)))
