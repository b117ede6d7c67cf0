"""The tables of speeds beside other engines, for `bench/tables.py`."""

from __future__ import annotations

from collections.abc import Iterator

from bench.kept import Row, Run, Runs, grid, missing, percent, ranged, shown, source, spread

MIN_ROUNDS, MOST_OF_ROOF = 3, 1.02
"""What a row of the README needs. A round that is faster than its roof shows that one of the two is wrong."""


def is_sound(n_rounds: int, most: float) -> bool:
    """most: of its roof, in any round."""
    return n_rounds >= MIN_ROUNDS and most <= MOST_OF_ROOF


def is_sound_peer(ours: Row) -> bool:
    """Whether a speed beside another engine's is.

    Runs that kept no share of each round have the median's roof.
    """
    speed = ours["tok_s"]
    return is_sound(speed["n"], ours.get("roof_most", ours["roof_share"] * speed["max"] / speed["median"]))


FORMATS = {"bf16": "bfloat16", "int8": "8 bits", "int4": "4 bits"}


def lane_format(lane: str) -> str:
    """What our lane's weights are called; those that are not in FORMATS are a file that both engines read."""
    form = lane.rpartition("-")[2]
    return FORMATS.get(form, f"one {form.upper()} file")


def workload_name(name: str) -> str:
    kind, size = name.split()
    return f"decode, N = {size}" if kind == "decode" else f"prefill of {size}"


def peer_rows(data: Row) -> Iterator[tuple[Row, list[Row], list[Row]]]:
    """(our speed, theirs, ratios) of each workload and lane of ours.

    Prefills count where all engines had been warmed up alike.
    """
    summary = data["summary"]
    for ours in (row for row in summary["speeds"] if row["lane"].startswith("deltic-")):
        if ours["workload"].startswith("prefill") and "prefill_warm_up" not in data:
            continue
        ratios = [
            row for row in summary["ratios"] if (row["workload"], row["ours"]) == (ours["workload"], ours["lane"])
        ]
        speed = {row["lane"]: row for row in summary["speeds"] if row["workload"] == ours["workload"]}
        yield ours, [speed[row["theirs"]] for row in ratios], ratios


def peer_name(lane: str) -> str:
    engine, _, form = lane.rpartition("-")
    return engine if form == "bf16" else f"{engine} {form.upper()}"


def star(row: Row) -> str:
    """Where the CPUs were shared with other work in all rounds."""
    return " \\*" if row["disturbed"] else ""


def peers_kind(data: Row) -> str:
    """What engines are compared by: a checkpoint, files that both read, experts of such a file, or those on
    the disk.
    """
    costs = data.get("costs", {"deltic-bf16": {}})
    if data.get("memory_gb"):
        return "disk"
    if any(cost.get("expert_bytes") for cost in costs.values()):
        return "experts"
    return "checkpoint" if "deltic-bf16" in costs else "files"


def peers_run(runs: Runs, kind: str = "checkpoint") -> Run | None:
    """The newest of a kind; of several in one night the one with the most rounds, then formats."""
    found = runs.newest("peers-*.json", where=lambda data: peers_kind(data) == kind)
    return max(found, key=lambda run: (int(run.data["rounds"]), len(run.data.get("costs", ()))), default=None)


def peers_on_files(runs: Runs) -> str:
    """Tokens a second beside llama.cpp, both with the same files."""
    return peers(runs, "files")


def peers_on_experts(runs: Runs) -> str:
    """Tokens a second of a part of a mixture beside llama.cpp, both with the same files."""
    return peers(runs, "experts")


def peers_on_disk(runs: Runs) -> str:
    """Tokens a second of a part of a mixture that memory does not hold."""
    return peers(runs, "disk")


def peers(runs: Runs, kind: str = "checkpoint") -> str:
    """Tokens a second beside llama.cpp and transformers."""
    again = "python -m bench.peers --n 1,16 --prefill 512"
    run = peers_run(runs, kind)
    if run is None:
        return missing(again)
    data, rows = run.data, []
    is_on_disk = kind == "disk"

    def of_roof(row: Row) -> str:
        return "" if is_on_disk else f", {percent(row['roof_share'])}"

    for ours, theirs, ratios in peer_rows(data):
        name = f"{workload_name(ours['workload'])}, {lane_format(ours['lane'])}"
        peers_cell = " · ".join(f"{peer_name(row['lane'])} {spread(row['tok_s'])}{star(row)}" for row in theirs)
        rows.append(
            [
                name,
                f"{spread(ours['tok_s'])}{of_roof(ours)}{star(ours)}",
                peers_cell,
                " · ".join(spread(row["ratio"]) + star(row) for row in ratios),
            ]
        )
    read = [roof["read"] / 1e9 for roof in data["roofs"]]
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    n_others = sum(figure["others"] > 0.15 for figure in data["figures"])
    text = (
        f"{data['rounds']} interleaved rounds, {data['threads']} threads; decodes of {data['steps']} tokens behind prompts of "
        f"{data['context']}, the same for all; ratios are taken within a round. Memory read {ranged(read)} GB/s meanwhile. "
        f"Other work took part of the CPUs in {n_others} of {len(data['figures'])} figures; such count only where a cell has no others, and a star marks it. "
        f"{versions}, llama.cpp built with `{data['llama_build']}`."
    )
    if any(ours["roof_share"] > 1 for ours, _, _ in peer_rows(data)):
        text += " A share of over 100 % says that memory was slower as it was read for the roof than a moment later."
    if without_amx(run):
        text += " Deltic used AMX; llama.cpp's AMX kernels end it with a general protection fault on this machine."
    if is_on_disk:
        text += f" Each engine had {data['memory_gb']:g} GB, file cache included; the disk gave {data['disk'] / 1e9:.2f} GB/s."
    header = ["tokens a second", "Deltic" if is_on_disk else "Deltic, of its roof", "peers", "ours / theirs"]
    return "\n\n".join((grid(header, rows), text, source([run], data.get("command", again))))


def peers_claim(runs: Runs) -> str:
    """The least and the greatest ratio of medians, and of any round; and what the peer had to do without."""
    found = [run for kind in ("checkpoint", "files") if (run := peers_run(runs, kind)) is not None]
    if not found:
        return "No run beside another engine is kept."
    rows = [row for run in found for row in peer_rows(run.data) if is_sound_peer(row[0])]
    if not rows:
        return f"No run of {MIN_ROUNDS} rounds beside another engine is kept."
    theirs = dict.fromkeys(row["theirs"].rpartition("-")[0] for _, _, found in rows for row in found)
    does = dict.fromkeys(f"{ours['workload'].split()[0]}s" for ours, _, _ in rows)
    ratios = [row["ratio"] for _, _, found in rows for row in found]
    medians = [row["median"] for row in ratios]
    text = (
        f"On the CPUs we measured, it {' and '.join(does)} {shown(min(medians))} to {shown(max(medians))} times as fast as "
        f"{' and '.join(theirs)} by the median, and {shown(min(row['min'] for row in ratios))} times in the slowest round."
    )
    if any(map(without_amx, found)):
        text += " Where Deltic used AMX, llama.cpp's AMX kernels crash and were left out."
    return text


def without_amx(run: Run) -> bool:
    """Whether llama.cpp was built without instructions that the machine has and Deltic used."""
    return "GGML_NATIVE=OFF" in run.data["llama_build"] and "amx_bf16" in run.data["machine"]["isa"]
