"""Takes the runs that the documents' tables are made of: `python -m bench.figures cpu`, on a machine that
does nothing else.

    python -m bench.figures cpu --minutes 60 --peers /tmp/peers --published /tmp/qwen-tts/bin/python
    python -m bench.figures gpu-text --out $OUT --commit $(git rev-parse --short=12 HEAD)
    python -m bench.tables        (writes them into the documents; before it, gpu-more and gpu-speech)

Results go to bench/runs/<date>-<machine>, what the commands print to a log beside them. A step that the
minutes left do not hold is passed over; --only and --skip choose. A tree with uncommitted changes is refused.
--commit notes which commit it is where the files are a copy without history.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deltic.bench.provenance import code, runs_directory

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Step:
    """Commands that belong together.

    `minutes`: how long they take on the machines of the kept runs; `python` begins each. In a command {out},
    {scratch}, {peers}, {published} and {minutes} stand for the directory of the results, one that is thrown
    away, where the peers are, the other package's Python and the time left.
    """

    name: str
    minutes: float
    commands: tuple[str, ...]


GPU_27B, GPU_35B = "--dummy qwen3.5-27b --memory-gb 125", "--dummy qwen3.5-35b-a3b --memory-gb 125"
GPU_SMALL = "--dummy qwen3.5-0.8b --memory-gb 60"
OUTSIDE = "python -m bench.gpu.outside --dummy qwen3.6-35b-a3b --gb 4,8,12,16 --answers 250"
GPU_FLAGS = "--n 1,4,16,64,128 --prompt 128 --output 256 --prefill 8192 --rounds 3 --out {out}"
SPEECH = "python -m deltic bench speech --dummy qwen3-tts-0.6b --n 1 --no-plot --out {out}"
SPEECH_ROUND = (
    SPEECH + " --label bf16 --requests-per-n 4 --max-new-tokens 25",
    SPEECH + ' --label int8 --serve-args "--quantize int8" --requests-per-n 6 --max-new-tokens 49',
    "{published} bench/speech/published.py --shape 0.6b --threads {threads} --frames 24 --rounds 1 --out {out}",
)

PLANS = {
    "cpu": (
        Step(
            "peers",
            34,
            (
                "python -m bench.peers --n 1,16 --prefill 512 --rounds 5 --minutes {peer_minutes} --env {peers}/env --models {peers}/models --out {out}",
            ),
        ),
        Step("serve", 1, ("python -m deltic bench serve --n 1,4,16 --requests-per-n 32 --no-plot --out {out}",) * 3),
        Step("served", 3, ("python -m bench.served --out {out}",)),
        Step(
            "start",
            2,
            (
                "python -m bench.start --out {out}",
                "python -m bench.start --dummy qwen3.5-0.8b --weights-cache {scratch}/packed --starts 1 --out {scratch}",
                "python -m bench.start --dummy qwen3.5-0.8b --weights-cache {scratch}/packed --out {out}",
            ),
        ),
        Step("loading", 6, ("python -m bench.loading --out {out}",)),
        Step("install", 4, ("python -m bench.install --out {out}",)),
        Step("quality", 1, ("python -m deltic bench quality --out {out}",)),
        Step("kv", 2, ("python -m bench.kv qwen3.5-0.8b --rows 1,4,16 --out {out}",) * 3),
        Step(
            "kv-quality",
            1,
            (
                "python -m deltic bench quality --setting kv-cache-dtype=int8 kv-cache-dtype=k8v4 --out {out}",
                "python -m deltic bench quality --setting kv-cache-dtype=int8 kv-cache-dtype=k8v4 --context 2048 --out {out}",
            ),
        ),
        Step(
            "states-quality",
            1,
            tuple(
                f"python -m deltic bench quality --setting state-dtype=bfloat16 {context}--out {{out}}"
                for context in ("", "--context 1024 ", "--context 4000 ")
            ),
        ),
        Step("speech", 5, SPEECH_ROUND * 2),
        Step("host", 2, ("python -m bench.host --out {out}",) * 3),
        Step(
            "prefix",
            5,
            (
                "python -m bench.prefix --dummy qwen3.5-0.8b --quantize int8 --rounds 3 --out {out}",
                "python -m bench.prefix --items system,repeat,short --rounds 3 --out {out}",
            ),
        ),
        Step(
            "stalls",
            3,
            ("python -m bench.stalls --dummy qwen3.5-0.8b --quantize int8 --targets 400,0 --prompts 2 --out {out}",),
        ),
        Step(
            "agent",
            7,
            (
                "python -m bench.agent --dummy qwen3.5-0.8b --quantize int8 --sessions 3 --parallel 3 --max-tokens 12000 "
                "--memory-share 0.25 --cold-rounds 0 --out {out}",
            ),
        ),
    ),
    "gpu-text": (
        Step("0.8b", 1.5, (f"python -m deltic bench gpu {GPU_SMALL} {GPU_FLAGS}",)),
        Step("27b", 3, (f"python -m deltic bench gpu {GPU_27B} {GPU_FLAGS}",)),
        Step("35b-a3b", 2.5, (f"python -m deltic bench gpu {GPU_35B} {GPU_FLAGS}",)),
    ),
    "gpu-more": (
        Step(
            "start",
            3,
            (
                "python -m deltic warmup",
                "python -m deltic warmup --dummy qwen3.5-0.8b",
                f"python -m deltic warmup {GPU_35B}",
                "python -m bench.start --starts 3 --out {out}",
                "python -m bench.start --dummy qwen3.5-0.8b --starts 3 --out {out}",
                f"python -m bench.start {GPU_35B} --starts 3 --out {{out}}",
            ),
        ),
        Step(
            "constrained",
            3.5,
            (
                f"python -m bench.gpu.constrained {GPU_SMALL} --n 16,64 --out {{out}}",
                f"python -m bench.gpu.constrained {GPU_27B} --n 16,64 --out {{out}}",
            ),
        ),
        Step(
            "outside",
            8,
            tuple(f"{OUTSIDE} --format {format} --out {{out}}" for format in ("int4-g128-bfloat16", "fp8")),
        ),
        Step("soak", 1.7, ("python -m bench.soak --minutes 1.2 --out {out}",)),
    ),
    "gpu-speech": (
        Step("1.7b", 3.5, ("python -m bench.gpu.speech --n 1,16 --out {out}",)),
        Step(
            "0.6b",
            2,
            (
                "python -m deltic bench speech --dummy qwen3-tts-0.6b --n 1,16,64 --poisson 40 --duration 12 --warmup 2 --no-plot --out {out}",
            ),
        ),
        Step(
            "soak",
            2,
            ('python -m bench.soak --speech --minutes 1.2 --serve-args "--dummy qwen3-tts-1.7b" --out {out}',),
        ),
    ),
}


def chosen(plan: Sequence[Step], only: str, skip: str) -> list[Step]:
    """The steps that --only and --skip (names with commas between) leave.

    Raises ValueError for an unknown name.
    """
    wanted, unwanted = ({part for part in text.split(",") if part} for text in (only, skip))
    names = {step.name for step in plan}
    if unknown := (wanted | unwanted) - names:
        raise ValueError(f"no step {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in plan)}")
    return [step for step in plan if step.name not in unwanted and (not wanted or step.name in wanted)]


def stamp(directory: Path, since: set[Path], commit: str) -> None:
    """Notes the commit in result files that are new and have none."""
    for path in set(directory.glob("*.json")) - since:
        data = json.loads(path.read_text())
        made_by = data.setdefault("code" if "client" not in data else "client", {})
        if "commit" not in made_by:
            made_by |= {"commit": commit, "modified": False}
            path.write_text(json.dumps(data) + "\n")


def run(steps: Sequence[Step], arguments: argparse.Namespace, out: Path, scratch: Path) -> list[str]:
    """Runs the steps in order while time is left; the names of those that failed or were passed over."""
    begin, missed = time.monotonic(), []
    log = out / f"figures-{arguments.plan}.log"
    for i, step in enumerate(steps):
        left = arguments.minutes - (time.monotonic() - begin) / 60
        print(f"[{i + 1}/{len(steps)}] {step.name}: about {step.minutes:g} minutes, {left:.0f} left", flush=True)
        if left < step.minutes * (0.5 if i == 0 else 1.0):
            print("  passed over: too little time is left", flush=True)
            missed.append(step.name)
            continue
        words = {
            "out": out,
            "scratch": scratch,
            "peers": arguments.peers,
            "published": arguments.published,
            "threads": os.cpu_count(),
            "peer_minutes": f"{min(left, step.minutes) - 1:g}",
        }
        for text in step.commands:
            command = [part.format(**words) for part in shlex.split(text)]
            command[0] = sys.executable if command[0] == "python" else command[0]
            before, at = set(out.glob("*.json")), time.monotonic()
            with log.open("a") as file:
                file.write(f"$ {shlex.join(command)}\n")
                file.flush()
                status = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file).returncode
            if arguments.commit:
                stamp(out, before, arguments.commit)
            told = "" if status == 0 else f": FAILED with status {status}, see {log}"
            print(f"  {time.monotonic() - at:5.0f} s  {text}{told}", flush=True)
            missed += [step.name] if status else []
    return missed


def main(given: Sequence[str] | None = None) -> int:
    """The command. Exit status 1 when a step failed or was passed over."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("plan", choices=sorted(PLANS), help="which machine, and which part of its runs")
    add("--minutes", type=float, default=60.0, help="begin no step that would not be over by then (default: 60)")
    add("--only", default="", metavar="STEP,...", help="these steps and no others")
    add("--skip", default="", metavar="STEP,...", help="all steps but these")
    add("--out", help="directory of the results (default: bench/runs/<date>-<machine>)")
    add("--commit", help="which commit this is, where there is no git to ask")
    add("--dirty", action="store_true", help="run with uncommitted changes; no table will have the results")
    add("--peers", default="bench/.peers", metavar="DIR", help="environment and models of bench.peers, made if missing")
    add(
        "--published",
        default="/tmp/qwen-tts/bin/python",
        help="Python that has qwen-tts; see bench/speech/published.py",
    )
    arguments = parser.parse_args(given)
    try:
        steps = chosen(PLANS[arguments.plan], arguments.only, arguments.skip)
    except ValueError as error:
        parser.error(str(error))
    if code().get("modified") and not arguments.dirty:
        print("bench.figures: the tree has uncommitted changes; commit them, or try out with --dirty", file=sys.stderr)
        return 1
    out = runs_directory(arguments.out).absolute()
    print(f"{sum(step.minutes for step in steps):g} minutes expected, results in {out}", flush=True)
    with tempfile.TemporaryDirectory(prefix="deltic-figures-") as scratch:
        missed = run(steps, arguments, out, Path(scratch))
    print(
        f"not taken: {', '.join(dict.fromkeys(missed))}" if missed else "all taken; now python -m bench.tables",
        flush=True,
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
