"""Plots of `deltic bench serve` and `bench speech` results: one file, or several over each other to compare
servers or changes.

python -m deltic.bench.plot A.json B.json -o compared.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator, ScalarFormatter

from deltic.json_types import JsonObject

Row = JsonObject


def _percentiles(key: str) -> dict[str, Callable[[Row], float | None]]:
    return {form: partial(lambda q, row: row[key][q], q) for q, form in (("p50", ".-"), ("p95", ".--"), ("p99", ".:"))}


PANELS: dict[str, list[tuple[str, dict[str, Callable[[Row], float | None]]]]] = {
    "serve": [
        ("output tok/s, all requests", {"-o": lambda row: row["output_tok_s"]}),
        ("decode tok/s, one request (median)", {"-o": lambda row: row["decode_tok_s"]}),
        ("TTFT ms: p50, p95 dashed, p99 dotted", _percentiles("ttft_ms")),
        ("ITL ms: p50, p95 dashed, p99 dotted", _percentiles("itl_ms")),
    ],
    "speech": [
        ("audio s a second, all streams", {"-o": lambda row: row["audio_s_per_s"]}),
        ("RTF: p50, p95 dashed, p99 dotted", _percentiles("rtf")),
        ("TTFA ms: p50, p95 dashed, p99 dotted", _percentiles("ttfa_ms")),
        ("underrun ms: p50, p95 dashed, p99 dotted", _percentiles("underrun_ms")),
    ],
}
"""Panels of a line, by bench: title, and what is drawn there by the form of its line."""


def draw(paths: Sequence[Path], picture: Path) -> None:
    """Writes `picture` (PNG): speed and latency over requests in flight and over the arrival rate.

    One row of four panels for each mode found in the files; percentiles are lines of one colour per file.
    """
    results = [json.loads(path.read_text()) for path in paths]
    modes = [mode for mode in ("closed", "open") if any(row["mode"] == mode for r in results for row in r["rows"])]
    figure, axes = pyplot.subplots(len(modes), 4, figsize=(18, 4.2 * len(modes)), squeeze=False)
    for line, mode in zip(axes, modes, strict=True):
        label = "requests in flight" if mode == "closed" else "requests a second"
        for result, color in zip(results, pyplot.rcParams["axes.prop_cycle"].by_key()["color"] * 9, strict=False):
            rows = sorted((row for row in result["rows"] if row["mode"] == mode), key=lambda row: row["value"])
            if rows:
                _draw_rows(line, rows, result["bench"], color, result["label"])
        for axis in line:
            _scale(axis, sorted({row["value"] for r in results for row in r["rows"] if row["mode"] == mode}))
            axis.set_xlabel(label)
        line[0].legend(frameon=False)
    machine = results[0]["machine"]
    figure.suptitle(
        f"{_title(results[0])} · client on {machine['cpu']}, {machine['cores']} cores · {results[0]['date'][:10]}"
    )
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def _draw_rows(axes: Sequence[Axes], rows: list[Row], bench: str, color: str, label: str) -> None:
    for axis, (title, lines) in zip(axes, PANELS[bench], strict=True):
        for form, value in lines.items():
            points = [(row["value"], y) for row in rows if (y := value(row)) is not None]
            axis.plot([x for x, _ in points], [y for _, y in points], form, color=color, label=label)
        axis.set_title(title)


def _title(result: JsonObject) -> str:
    """Returns what was asked of the server, as a title."""
    load = result["load"]
    if result["bench"] == "speech":
        return str(result["title"])
    return f"{load['prompt_tokens']} prompt + {load['output_tokens']} output tokens, {load['kind']}"


def _scale(axis: Axes, ticks: list[float]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks)
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def main() -> None:
    """Compares result files in one picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of one of the two")
    parser.add_argument("-o", "--out", type=Path, default=Path("compared.png"))
    arguments = parser.parse_args()
    draw(arguments.results, arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
