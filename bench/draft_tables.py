"""The tables of drafts on a CPU, for `bench/tables.py`."""

from __future__ import annotations

from bench.kept import Runs, grid, missing, percent, ranged, source, spread

MOST_LOAD = 4.0
"""The load average above which times over HTTP are those of other programs."""


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


def right(runs: Runs) -> str:
    """How good the built-in model's heads guess, if every guess is run."""
    again = "python -m bench.drafts_right --draft-model training/drafter"
    found = runs.newest("drafts-right.json")
    if not found:
        return missing(again)
    data = found[-1].data
    places = [str(place) for place in range(1, 1 + data["max_drafts"])]
    rows = []
    for row in data["rows"]:
        of_places = [percent(row["right"][place]) if place in row["right"] else "–" for place in places]
        name = f"{row['what']}, {row['guesses']}"
        times = f"{row['plain_cpu_ms_a_token'] / row['cpu_ms_a_token']:.2f}"
        rows.append([name, f"{row['temperature']:g}", f"{row['tokens_a_step']:.2f}", *of_places, times])
    text = (
        f"{data['model']} model, drafts of up to {data['max_drafts']} tokens in every step, whether they pay or not, {data['rows'][0]['answers']} "
        "answers each, the same as without drafts: the tokens that a step gives; of guesses for each place of a draft how many were right, "
        "with all before them; and the speed-up, in processor time a token, in one thread, with its prompt's share. The "
        f"machine was shared (load average {data['load']:.0f})."
    )
    header = ["", "temperature", "tokens a step", *(f"place {place}" for place in places), "speed-up"]
    return "\n\n".join((grid(header, rows), text, source(found[-1:], again)))


def served(runs: Runs) -> str:
    """How often a model's heads are right, and what that brings over HTTP, on a machine that was not busy."""
    again = "python -m bench.drafts_served"
    found = runs.newest("drafts-served.json", where=lambda data: data.get("load", 0) < MOST_LOAD)
    if not found:
        return missing(again)
    data = found[-1].data
    places = [str(place) for place in range(1, 5)]
    rows = []
    for row in data["rows"]:
        right = [percent(row["right"][place]) if place in row["right"] else "–" for place in places]
        times = spread({"min": row["least"], "max": row["most"], "median": row["times"]})
        name = ", ".join((row["what"], *([row["guesses"]] if "guesses" in row else [])))
        rows.append([name, f"{row['temperature']:g}", str(row["answers"]), *right, times])
    text = (
        f"{data['model']} model, drafts of up to {data['max_drafts']} tokens, the same answers from a server without: of guesses for the "
        "first place of a draft, and the next ones, how many were right, if those before were run; and how many times as fast answers "
        "were decoded, by answer."
    )
    header = ["", "temperature", "answers", *(f"place {place}" for place in places), "times as fast"]
    return "\n\n".join((grid(header, rows), text, source(found[-1:], again)))
