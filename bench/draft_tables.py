"""The tables of drafts on a CPU, for `bench/tables.py`."""

from __future__ import annotations

from bench.kept import Runs, grid, missing, percent, ranged, source, spread


def drafts(runs: Runs) -> str:
    """How many times as fast steps with drafts are, and the tokens that they give."""
    again = "python -m bench.drafts --n 1,4,16 --accept 0,0.8 --tokens 120 --trace-tokens 200 --rounds 4"
    found = runs.newest("drafts-qwen*.json", where=lambda data: "what" in data["rows"][0])
    if not found:
        return missing(again)
    data = found[-1].data
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in data["rows"]:
        ratios = [plain / drafted for plain, drafted in zip(row["plain_ms"], row["drafts_ms"], strict=True)]
        told = f"{ranged(ratios)}, {row['tokens_a_step']:.2f}"
        cells.setdefault((row["what"], row["quantize"]), {})[row["n"]] = told
    sizes = sorted({row["n"] for row in data["rows"]})
    names = {what: what.replace("accept ", "guesses right: ") for what, _ in cells}
    rows = [
        [names[what], quantize, *(by_n.get(n, "–") for n in sizes)] for (what, quantize), by_n in sorted(cells.items())
    ]
    text = (
        f"{data['shape']}, random weights; times as fast as without drafts, medians of "
        f"{len(data['rows'][0]['plain_ms'])} rounds in which both took turns, and tokens a step. What is drawn is planted: "
        "each guess of the draft head is right with the probability given, if those before are, or the answer edits a file "
        "that the prompt holds and no head guesses. Steps and guesses are real, and the engine chooses how many tokens it "
        "guesses."
    )
    header = ["", "weights", *(f"N = {n}" for n in sizes)]
    return "\n\n".join((grid(header, rows), text, source(found[-1:], again)))


def served(runs: Runs) -> str:
    """How often a model's own head is right, and what that brings over HTTP."""
    again = "python -m bench.drafts_served"
    found = runs.newest("drafts-served.json")
    if not found:
        return missing(again)
    data = found[-1].data
    places = [str(place) for place in range(1, 5)]
    rows = []
    for row in data["rows"]:
        right = [percent(row["right"][place]) if place in row["right"] else "–" for place in places]
        times = spread({"min": row["least"], "max": row["most"], "median": row["times"]})
        rows.append([row["what"], f"{row['temperature']:g}", str(row["answers"]), *right, times])
    text = (
        f"{data['model']} model, drafts of up to {data['max_drafts']} tokens, the same answers from a server without: of guesses for the "
        "first place of a draft, and the next ones, how many were right, if those before were run; and how many times as fast answers "
        "were decoded, by answer."
    )
    header = ["", "temperature", "answers", *(f"place {place}" for place in places), "times as fast"]
    return "\n\n".join((grid(header, rows), text, source(found[-1:], again)))
