"""Takes the runs that the documents' tables are made of: `python -m bench.figures cpu`, on a machine that
does nothing else.

    python -m bench.figures cpu --minutes 60 --peers /tmp/peers --published /tmp/qwen-tts/bin/python
    python -m bench.figures gpu-load --minutes 9.5 --out $OUT/2026-11-30-h200 --commit COMMIT --pack
    python -m bench.figures gpu-several --check      (tries all of a plan but the measuring, on any machine)
    python -m bench.tables                           (writes what was taken into the documents)

Plans that begin with gpu- are in bench/card_plans.py. On several GPUs their steps run side by side, each on
GPUs and CPUs of its own. Results go to bench/runs/<date>-<machine>, what the commands print to a log beside
them. A step that the minutes left do not hold is passed over, one that is not over by then is ended; --only
and --skip choose. A tree with uncommitted changes is refused. --commit notes which commit it is where the
files are a copy, without history or with an older one.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.card_plans import CARD_PLANS
from bench.check import check
from bench.steps import ROOT, Figures, Step, visible_gpus
from deltic.bench.provenance import code, runs_directory

SPEECH = "python -m deltic bench speech --dummy qwen3-tts-0.6b --n 1 --no-plot --out {out}"
SPEECH_ROUND = (
    SPEECH + " --label bf16 --requests-per-n 4 --max-new-tokens 25",
    SPEECH + ' --label int8 --serve-args "--quantize int8" --requests-per-n 6 --max-new-tokens 49',
    "{published} bench/speech/published.py --shape 0.6b --threads {threads} --frames 24 --rounds 1 --out {out}",
)

PLANS: dict[str, tuple[Step, ...]] = {
    "cpu": (
        Step(
            "peers",
            34,
            (
                "python -m bench.peers --n 1,16 --prefill 512 --rounds 5 --minutes {minutes} --env {peers}/env --models {peers}/models --out {out}",
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
    **CARD_PLANS,
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


def main(given: Sequence[str] | None = None) -> int:
    """The command. Exit status 1 when a step failed or was passed over."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("plan", choices=sorted(PLANS), help="which machine, and which part of its runs")
    add(
        "--minutes",
        type=float,
        default=60.0,
        help="how long all may take: no step is begun that would not be over by then (default: 60)",
    )
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
    add("--pack", action="store_true", help="put results and log into one file, made again as they come")
    add("--check", action="store_true", help="parse each command and plan its model; run nothing")
    arguments = parser.parse_args(given)
    try:
        steps = chosen(PLANS[arguments.plan], arguments.only, arguments.skip)
    except ValueError as error:
        parser.error(str(error))
    if arguments.check:
        return 0 if check(steps) else 1
    made_by, commit = code(), arguments.commit
    if commit and "commit" in made_by and not is_foreign(commit):
        commit = None  # the history that is here says it
    if made_by.get("modified") and not arguments.dirty and commit is None:
        print("bench.figures: the tree has uncommitted changes; commit them, or try out with --dirty", file=sys.stderr)
        return 1
    out = runs_directory(arguments.out).absolute()
    gpus = visible_gpus() if arguments.plan in CARD_PLANS else []
    print(f"{sum(step.minutes for step in steps):g} minutes expected, of one step after the other", flush=True)
    print(f"{len(gpus)} GPUs; results in {out}" if gpus else f"results in {out}", flush=True)
    words = {"peers": arguments.peers, "published": arguments.published, "threads": os.cpu_count()}
    # commands are ended by it, also where this runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="deltic-figures-") as scratch:
        missed = Figures(
            plan=arguments.plan,
            out=out,
            scratch=Path(scratch),
            minutes=arguments.minutes,
            words=words,
            gpus=gpus,
            commit=commit,
            packed=arguments.pack,
        ).run(steps)
    print(f"not taken: {', '.join(missed)}" if missed else "all taken; now python -m bench.tables", flush=True)
    return 1 if missed else 0


def is_foreign(commit: str) -> bool:
    """Whether the history that is here does not have a commit: the files are newer than it."""
    found = subprocess.run(["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True)
    return found.returncode != 0


if __name__ == "__main__":
    sys.exit(main())
