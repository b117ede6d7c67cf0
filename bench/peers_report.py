"""Results of `bench.peers`: from raw figures to medians, ratios within a round, tables and the plot.

Pure but for the files. A figure is a dict: round, workload ("decode 16", "prefill 512"), lane
("llama.cpp-q8_0"), tok_s, and `others`: the CPUs that other work took meanwhile. A ratio is taken between
figures of one round, where both engines met the same machine; the median over the rounds is reported with its
range. Figures that were disturbed are left out, unless there are no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter
from rich.table import Table

Row = dict[str, Any]

MOST_OTHERS = 0.15
"""CPUs that may be busy with other work while a figure is taken; with more it is disturbed."""

OURS = "deltic"

FILES = ("q8_0", "q4_k_m", "q4_0", "ud_q4")
"""Formats that are one GGUF file, which both engines read; int8 and int4 are ours, made of the checkpoint."""


@dataclass(frozen=True)
class Lane:
    """One engine with one weight format.

    `width`: bits of a weight by its name, of the mixed file rounded. Formats that are not one file are set
    against each other by it.
    """

    engine: str
    format: str
    width: int

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.format}"


LANES = (
    Lane(OURS, "bf16", 16),
    Lane("llama.cpp", "bf16", 16),
    Lane("transformers", "bf16", 16),
    Lane(OURS, "int8", 8),
    Lane(OURS, "q8_0", 8),
    Lane("llama.cpp", "q8_0", 8),
    Lane(OURS, "int4", 4),
    Lane(OURS, "q4_k_m", 4),
    Lane("llama.cpp", "q4_k_m", 4),
    Lane(OURS, "q4_0", 4),
    Lane("llama.cpp", "q4_0", 4),
    Lane(OURS, "ud_q4", 6),
    Lane("llama.cpp", "ud_q4", 6),
)


@dataclass(frozen=True)
class Workload:
    """`decode` steps of `size` sequences, or the `prefill` of one prompt of `size` tokens."""

    kind: str
    size: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.size}"


@dataclass(frozen=True)
class Cost:
    """What a lane's model must do at least; states and cache are not counted.

    weight_bytes: read by every step. body_params, head_params: elements of the matrices that every token, and
    every sequence's last token, is multiplied with. expert_bytes: of the routed experts, of which a token
    uses the share `used`.
    """

    weight_bytes: int
    body_params: int
    head_params: int
    expert_bytes: int = 0
    used: float = 0.0

    def least_s(self, workload: Workload, read: float, multiply: float) -> float:
        """Seconds of a step, or of the one prefill, at the roofs (bytes and operations a second)."""
        n_heads = workload.size if workload.kind == "decode" else 1
        n_operations = 2.0 * (workload.size * self.body_params + n_heads * self.head_params)
        routed_evenly = 1 - (1 - self.used) ** workload.size
        read_bytes = self.weight_bytes + self.expert_bytes * routed_evenly
        return max(read_bytes / read, n_operations / multiply)


def pairs(lanes: Sequence[Lane]) -> list[tuple[Lane, Lane]]:
    """Ours and theirs: of the same file where ours reads one, else of the same width."""

    def meet(a: Lane, b: Lane) -> bool:
        return a.format == b.format if a.format in FILES else a.width == b.width

    return [(a, b) for a in lanes for b in lanes if a.engine == OURS != b.engine and meet(a, b)]


def rotated(lanes: Sequence[Lane], turn: int) -> list[Lane]:
    """The lanes from another one on each turn: nobody always comes first, neighbours stay neighbours."""
    at = turn % max(1, len(lanes))
    return [*lanes[at:], *lanes[:at]]


def fits(spent_s: float, round_s: float, limit_s: float) -> bool:
    """Whether another round of that length ends in time; without a limit (0) all do."""
    return not limit_s or spent_s + round_s <= limit_s


def spread(values: Iterable[float]) -> Row:
    """Median, least and greatest."""
    found = sorted(values)
    return {"median": median(found), "min": found[0], "max": found[-1], "n": len(found)}


def summarise(figures: Sequence[Row], roofs: Sequence[Row], lanes: Sequence[Lane], costs: Mapping[str, Cost]) -> Row:
    """Medians per lane and workload, ratios per pair and workload.

    roofs: one for each round and workload, taken just before it: `read`, `multiply_bf16` and `multiply_int8`.
    """
    by_key = {(f["workload"], f["lane"], f["round"]): f for f in figures}
    roof_of = {(roof["workload"], roof["round"]): roof for roof in roofs}
    rounds = sorted({f["round"] for f in figures})
    speeds, ratios = [], []

    def usable(workload: str, *names: str) -> tuple[list[int], bool]:
        """Rounds that have a figure of each lane, undisturbed ones if any; and whether they are disturbed."""
        found = [r for r in rounds if all((workload, name, r) in by_key for name in names)]
        calm = [r for r in found if all(by_key[workload, name, r]["others"] <= MOST_OTHERS for name in names)]
        return calm or found, not calm

    for name in dict.fromkeys(f["workload"] for f in figures):
        kind, size = name.split()
        workload = Workload(kind, int(size))
        for lane in lanes:
            taken, disturbed = usable(name, lane.name)
            if not taken:
                continue
            each = {r: by_key[name, lane.name, r]["tok_s"] for r in taken}
            shares = []
            for r, tok_s in each.items():
                roof = roof_of[name, r]
                multiply = roof["multiply_bf16" if lane.width == 16 else "multiply_int8"]
                least = costs[lane.name].least_s(workload, roof["read"], multiply)
                shares.append(least * tok_s / workload.size)
            row = {"workload": name, "lane": lane.name, "tok_s": spread(each.values()), "disturbed": disturbed}
            speeds.append(row | {"roof_share": round(median(shares), 4), "roof_most": round(max(shares), 4)})
        for ours, theirs in pairs(lanes):
            taken, disturbed = usable(name, ours.name, theirs.name)
            ratio = [by_key[name, ours.name, r]["tok_s"] / by_key[name, theirs.name, r]["tok_s"] for r in taken]
            if ratio:
                row = {"workload": name, "ours": ours.name, "theirs": theirs.name, "disturbed": disturbed}
                ratios.append(row | {"ratio": spread(ratio)})
    return {"speeds": speeds, "ratios": ratios}


def speed_cells(summary: Row) -> tuple[list[str], list[list[str]]]:
    """Header and rows: tok/s, median and range over the rounds, and the share of the roof.

    A star where the CPUs were shared with other work.
    """
    lanes = list(dict.fromkeys(s["lane"] for s in summary["speeds"]))
    rows: dict[str, list[str]] = {}
    for s in summary["speeds"]:
        row = rows.setdefault(s["workload"], [s["workload"]] + ["-"] * len(lanes))
        star = " *" if s["disturbed"] else ""
        tok_s = s["tok_s"]
        text = f"{tok_s['median']:.1f} ({tok_s['min']:.1f} .. {tok_s['max']:.1f}; {s['roof_share']:.0%}){star}"
        row[1 + lanes.index(s["lane"])] = text
    return ["tok/s (least .. most; of roof)", *lanes], list(rows.values())


def ratio_cells(summary: Row) -> tuple[list[str], list[list[str]]]:
    """Header and rows: ours over theirs, median and range over the rounds; a star as above."""
    versus = list(dict.fromkeys((r["ours"], r["theirs"]) for r in summary["ratios"]))
    rows: dict[str, list[str]] = {}
    for r in summary["ratios"]:
        row = rows.setdefault(r["workload"], [r["workload"]] + ["-"] * len(versus))
        ratio, star = r["ratio"], " *" if r["disturbed"] else ""
        text = f"{ratio['median']:.2f} ({ratio['min']:.2f} .. {ratio['max']:.2f}){star}"
        row[1 + versus.index((r["ours"], r["theirs"]))] = text
    return ["ours / theirs", *(f"{a} / {b}" for a, b in versus)], list(rows.values())


def rich_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """For the terminal."""
    table = Table()
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """For the file beside the plot."""
    ruler = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ruler, *rows)) + "\n"


def draw(summary: Row, lanes: Sequence[Lane], title: str, picture: Path) -> None:
    """Writes `picture` (PNG): a column for each weight width, decode above and prefill below."""
    widths = sorted({lane.width for lane in lanes}, reverse=True)
    kinds = [k for k in ("decode", "prefill") if any(s["workload"].startswith(k) for s in summary["speeds"])]
    figure = Figure(figsize=(5 * len(widths), 4 * len(kinds)))
    axes = figure.subplots(len(kinds), len(widths), squeeze=False)
    labels = {
        "decode": ("decode tok/s, all sequences", "sequences"),
        "prefill": ("prefill tok/s", "tokens of the prompt"),
    }
    for line, kind in zip(axes, kinds, strict=True):
        for axis, width in zip(line, widths, strict=True):
            ticks = set()
            for lane in (lane for lane in lanes if lane.width == width):
                points = [
                    (int(s["workload"].split()[1]), s["tok_s"]["median"])
                    for s in summary["speeds"]
                    if s["lane"] == lane.name and s["workload"].startswith(kind)
                ]
                ticks |= {x for x, _ in points}
                style = {"marker": "o", "linewidth": 2.4 if lane.engine == OURS else 1.4}
                axis.plot([x for x, _ in points], [y for _, y in points], label=lane.name, **style)
            axis.set_title(f"{labels[kind][0]}, {width} bits a weight")
            axis.set_xlabel(labels[kind][1])
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted(ticks))
            axis.xaxis.set_major_formatter(ScalarFormatter())
            axis.xaxis.set_minor_locator(NullLocator())
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
            axis.legend(frameon=False)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
