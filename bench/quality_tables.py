"""The table of what each format loses, from a run of `python -m bench.quality_peers`."""

from __future__ import annotations

import math

from bench.kept import Row, Run, Runs, grid, missing, source

AGAIN = "python -m bench.quality_peers --tools PYTHON --gptq PYTHON --llama PYTHON"


def scaled(value: float, error: float) -> str:
    """In units of 1e-5, with its standard error, whose first figure is the last that is shown."""
    digits = min(max(0, -math.floor(math.log10(1e5 * error))), 2) if error else 0
    return f"{1e5 * value + 0.0:.{digits}f} ± {1e5 * error:.{digits}f}"


def line(row: Row) -> list[str]:
    ours, theirs, apart = row["ours"], row.get("theirs"), row.get("apart")
    same = [f"{100 * found['same_argmax']:.1f}" for found in (ours, theirs) if found]
    perplexity = [f"{found['perplexity']:.5f}" for found in (ours, theirs) if found]
    how = f"{row['by']}, {row['how']}" if row["how"] else row["by"]
    return [
        row["format"],
        how,
        f"{row['bits_per_weight']:.2f}",
        scaled(ours["kl_mean"], ours["kl_error"]),
        scaled(theirs["kl_mean"], theirs["kl_error"]) if theirs else "",
        scaled(apart["kl"], apart["kl_error"]) if apart else "",
        " · ".join(perplexity),
        " · ".join(same) + " %",
    ]


def verdict(rows: list[Row]) -> str:
    """In how many files ours is better than theirs and in how many worse, by two standard errors."""
    both = [row for row in rows if "apart" in row]
    said = []
    for name, sign, words in (("kl", 1, "KL"), ("nll", 1, "perplexity"), ("same", -1, "the most likely token")):
        sigmas = {row["format"]: sign * row["apart"][name] / row["apart"][f"{name}_error"] for row in both}
        worse = [f"{file}, by {sigma:.1f}" for file, sigma in sigmas.items() if sigma > 2]
        n_better = sum(sigma < -2 for sigma in sigmas.values())
        named = f" ({'; '.join(worse)})" if worse else ""
        said.append(f"in {words} better in {n_better}, worse in {len(worse)}{named}")
    n = f"Of the {len(both)} files that both read, by more than two standard errors of the paired difference, Deltic is "
    return n + "; ".join(said) + "; the others do not differ so much." if both else ""


def formats_table(run: Run) -> str:
    """Rows, what they mean, and the verdict."""
    data = run.data
    header = [
        "file",
        "made by",
        "bits a weight",
        "KL, Deltic",
        "KL, llama.cpp",
        "Deltic less llama.cpp",
        "perplexity",
        "same most likely token",
    ]
    text = (
        f"{data['tokens']:,} tokens of {data['text']}, the same ids for both engines. KL in 1e-5 nats a token, to the published "
        "implementation on the bfloat16 weights in float32, with standard errors over tokens; those of the difference are of "
        "paired differences. Of two figures in a cell the second is llama.cpp's."
    )
    parts = [grid(header, map(line, data["rows"])), text, verdict(data["rows"])]
    if engine := data.get("llama"):
        parts[1] += f" llama-cpp-python {engine['version']}."
    failed = [f"{name} ({made['by']}: {made['error'][:100]})" for name, made in data["failed_to_make"].items()]
    if failed:
        parts.append(f"Not made: {'; '.join(failed)}.")
    return "\n\n".join(part for part in parts if part)


def formats(runs: Runs) -> str:
    """What each format loses on the built-in model, beside llama.cpp."""
    found = runs.newest("quality-formats-*.json")
    if not found:
        return missing(AGAIN)
    return "\n\n".join((formats_table(found[-1]), source(found[-1:], AGAIN)))


def formats_again(runs: Runs) -> str:
    """The verdict on another and longer text, of GGUF files only."""
    again = (
        "python -m training.held_out 9000019 200000 > long.jsonl",
        "python -m bench.quality_peers --llama PYTHON --text long.jsonl",
    )
    found = runs.newest("quality-long-*.json")
    if not found:
        return missing(*again)
    data = found[-1].data
    text = f"On another text, of {data['tokens']:,} tokens: {verdict(data['rows'])}"
    return "\n\n".join((text, source(found[-1:], *again)))
