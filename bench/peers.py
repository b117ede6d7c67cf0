"""Deltic side by side with llama.cpp and transformers: the same random checkpoint, machine and minutes.

    python -m bench.peers                     (from the root of a checkout with the CPU kernels built)
    python -m bench.peers --rounds 1 --n 1,16 --prefill 512 --engines deltic,llama.cpp-bf16
    python -m bench.peers --threads 2 --engines q8_0,q4_k_m,q4_0,ud_q4     (both engines on the same files)
    python -m bench.peers --shape qwen3.6-35b-a3b --layers 4 --engines q4_k_m       (a tenth of a mixture)
    python -m bench.peers --shape qwen3.6-35b-a3b --layers 4 --engines q8_0 --memory-gb 2.5  (on the disk)

Makes an environment of its own for the peers (llama.cpp is compiled for this machine: minutes to half an
hour), writes the checkpoint and its GGUF forms, checks that all engines give the same logits, then measures
in interleaved rounds. Each engine is a process that has its model loaded; all but the one that is measured
are stopped (SIGSTOP), since idle thread pools spin. All decode as many tokens behind prompts of one length,
and all have computed a prompt of the same length before a prefill counts. Options of llama.cpp are tried for
each of its formats and each number of sequences. Ours is timed with everything a step does, theirs without
sampling. With --minutes no round begins that would end too late. Writes JSON, a table and a plot to
bench/runs/.

Without a network, --wheels names a folder to install from. It has the wheels of llama-cpp-python and of what
that needs (numpy, jinja2, markupsafe, diskcache, typing-extensions), and a file `llama-build` with the
CMAKE_ARGS that it was built with; with transformers, also that, torch and what they need. --prepare ends
before anything is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from bench import peers_busy as busy
from bench import peers_report as report
from bench.peers_environment import (
    ROOT,
    MemoryGroup,
    PeerFailed,
    Worker,
    built_with,
    forget,
    make_environment,
    packages,
)
from bench.peers_model import cut_shape
from bench.peers_report import FILES, LANES, MOST_OTHERS, OURS, Cost, Lane, Workload
from deltic.bench.provenance import code, machine, machine_name, now, runs_directory
from deltic.bench.sweep import numbers
from deltic.config import ConfigError
from deltic.machine import free_memory_bytes, n_usable_cpus
from deltic.models.gguf import open_gguf
from deltic.models.qwen.shape import ModelShape
from deltic.roofs import disk_bandwidth

LEAST_COSINE = {16: 0.99, 8: 0.9, 6: 0.3, 4: 0.3}
"""By bits a weight: between the logits of an engine and those of transformers in bfloat16, for it to be the
same model.
"""

LEAST_FILE_COSINE = 0.93
"""Between two engines that read the same file.

The weights are equal, but each rounds activations to 8 bits in its way, and random layers amplify that: at
0.8B each engine's cosine to a float32 forward of the file is 0.97 to 0.99, and to each other 0.96 to 0.99.
Two files, of 8 and of 4 bits, give 0.8 or less.
"""

TUNE_TOKENS = 64
"""Of each sequence before llama.cpp's options are tried on it."""

PREFILL_WARM_UP = "a prompt of the same length"
"""What every engine computes just before a prefill that counts; llama.cpp besides the prompt itself once, in
its fresh context.
"""

N_ATTEMPTS = 3
"""Times that a figure is taken when it is disturbed."""


def make_models(directory: Path, model: Sequence[str], python: Path, files: Sequence[str]) -> dict[str, int]:
    """Writes what is missing of the checkpoint and of those of its GGUF forms, on all CPUs; the bytes of
    weights that a step reads of each, if it uses all experts. model: the shape's name, and its layers if not
    all.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory.parent / ".gitignore").write_text("*\n")
    checkpoint, sizes = directory / "hf", directory / "bytes.json"
    if not (checkpoint / "config.json").exists():
        print(f"writing a random checkpoint of {model[0]} to {checkpoint}", flush=True)
        command = [sys.executable, "-m", "bench.peers_model", model[0], str(checkpoint), *model[1:]]
        subprocess.run(command, cwd=ROOT, check=True)
    known: dict[str, int] = json.loads(sizes.read_text()) if sizes.exists() else {}
    commands = []
    if "bf16" not in known:
        commands += [[sys.executable, "-m", "bench.peers_gguf", str(checkpoint), str(directory / "bf16.gguf")]]
    if absent := [name for name in files if name not in known]:
        commands += [[str(python), "-m", "bench.peers_quantise", str(directory), str(n_usable_cpus()), *absent]]
    if commands:
        print("writing it as GGUF and quantising it", flush=True)
        with (directory / "gguf.log").open("w") as log:
            for command in commands:
                subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=True)
        known |= {name: bytes_per_step(directory / f"{name}.gguf") for name in ("bf16", *absent) if name not in known}
        sizes.write_text(json.dumps(known))
    return known


def bytes_per_step(file: Path) -> int:
    """Bytes of weights that a decode step reads of a GGUF file: all but an embedding that is not the head
    too.
    """
    tensors = {name: tensor.end - tensor.begin for name, tensor in open_gguf(file).tensors.items()}
    return sum(tensors.values()) - (tensors["token_embd.weight"] if "output.weight" in tensors else 0)


def chosen_lanes(text: str | None) -> list[Lane]:
    """The lanes of --engines: engines, formats or lanes, with commas between. Raises ConfigError."""
    if text is None:
        return list(LANES)
    names = {lane: (lane.engine, lane.format, lane.name) for lane in LANES}
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    for part in wanted:
        if not any(part in known for known in names.values()):
            known = ", ".join(dict.fromkeys(name for each in names.values() for name in each))
            raise ConfigError(f"--engines: {part!r} is not known; known: {known}")
    return [lane for lane in LANES if any(name in wanted for name in names[lane])]


def check_memory(lanes: Sequence[Lane], shape: ModelShape) -> None:
    """All models are in memory together. Raises ConfigError when they surely do not fit."""
    needed = sum(shape.n_params * lane.width / 8 for lane in lanes)
    free = free_memory_bytes()
    if needed > 0.85 * free:
        raise ConfigError(
            f"the models of {len(lanes)} lanes take {needed / 1e9:.0f} GB together, and {free / 1e9:.0f} GB are free; "
            "name fewer with --engines, such as deltic-bf16,llama.cpp-bf16, and run the others after"
        )


def prompts(seed: str, n: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random prompts, the same for the same seed."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(n)]


def model_costs(
    lanes: Sequence[Lane], shape: ModelShape, gguf_bytes: Mapping[str, int], infos: Mapping[str, Any]
) -> dict[str, Cost]:
    """What each lane's model must read and multiply; of a file that both engines read, its bytes."""
    head = shape.vocab_size * shape.hidden_size
    other = 0 if shape.tie_word_embeddings else head
    n_read, n_used = shape.n_params - other, shape.n_active_params - other
    n_experts = 3 * shape.n_layers * shape.n_experts * shape.hidden_size * shape.moe_intermediate_size
    used = shape.n_experts_per_tok / shape.n_experts if shape.is_moe else 0.0
    costs = {}
    for lane in lanes:
        is_ours = lane.engine == OURS and lane.format not in FILES
        n_bytes = (infos[lane.name]["weight_bytes"] if is_ours else gguf_bytes.get(lane.format)) or 2 * n_read
        of_experts = n_bytes * n_experts // n_read
        costs[lane.name] = Cost(n_bytes - of_experts, n_used - head, head, of_experts, used)
    return costs


def same_files(lanes: Sequence[Lane], logits: Mapping[str, np.ndarray]) -> dict[str, float]:
    """By file, the least cosine between the logits of the two engines that read it, [positions, V] by lane
    and of length 1 each. Raises PeerFailed.
    """
    found = {}
    for ours, theirs in report.pairs([lane for lane in lanes if lane.format in FILES]):
        cosine = float((logits[ours.name] * logits[theirs.name]).sum(axis=1).min())
        found[ours.format] = round(cosine, 5)
        print(f"{ours.format}.gguf: cosine between {ours.engine} and {theirs.engine} at least {cosine:.4f}")
        if not cosine >= LEAST_FILE_COSINE:  # nor when it is no number
            raise PeerFailed(
                f"{ours.name} and {theirs.name} read the same file and give other logits; nothing is compared"
            )
    return found


class Comparison:
    """All workers, loaded, and what is asked of them."""

    def __init__(self, arguments: argparse.Namespace, lanes: Sequence[Lane], python: Path, models: Path) -> None:
        self.arguments, self.lanes = arguments, lanes
        self.shape = cut_shape(arguments.shape, arguments.layers)
        self.workers: dict[str, Worker] = {}
        self.logs = models / "logs"
        self.logs.mkdir(exist_ok=True)
        self.modules = {
            OURS: (Path(sys.executable), "bench.peers_deltic"),
            "llama.cpp": (python, "bench.peers_llama"),
            "transformers": (python, "bench.peers_transformers"),
        }
        self.models = models
        self.begun = time.monotonic()
        self.figures: list[dict[str, Any]] = []
        self.roofs: list[dict[str, Any]] = []
        self.tuning: dict[str, Any] = {}
        """llama.cpp's options for decode and prefill by lane and number of sequences, and the trials that
        chose them.
        """
        self.workloads = [Workload("decode", n) for n in arguments.n] + [
            Workload("prefill", n) for n in arguments.prefill
        ]

    def load(self) -> None:
        """Starts the workers, one after another."""
        a = self.arguments
        limits = {
            "n_threads": a.threads,
            "context": a.context,
            "n_steps": a.steps,
            "max_n": max(a.n),
            "max_prefill": max(a.prefill),
        }
        self._start("machine", OURS, {"n_threads": a.threads})
        for lane in self.lanes:
            is_gguf = lane.engine == "llama.cpp" or lane.format in FILES
            file = f"{lane.format}.gguf" if is_gguf else "hf"
            config = limits | {"model": str((self.models / file).resolve())}
            if lane.engine == OURS and lane.format in ("int8", "int4"):
                config["quantize"] = lane.format
            if a.memory_gb:
                packed = self.models / "packed"
                config["weights_cache"] = str(packed)
                for kept in (self.models / file, *packed.glob("*")):
                    forget(kept)
            print(f"loading {lane.name}", flush=True)
            self._start(lane.name, lane.engine, config)
            if lane.engine == "llama.cpp":
                self.tuning[lane.name] = self._tune(self.workers[lane.name])

    def _tune(self, worker: Worker) -> dict[int, dict[str, Any]]:
        """llama.cpp's faster settings on this machine, for this lane and each number of sequences.

        It keeps them.
        """
        vocab_size = self.shape.vocab_size
        (prompt,) = prompts("tune", 1, 256, vocab_size)
        found: dict[int, dict[str, Any]] = {}
        for n in self.arguments.n:
            batch = prompts("tune", n, TUNE_TOKENS, vocab_size)
            take = partial(worker.ask, "tune", prompts=batch, prompt=prompt if not found else None)
            found[n] = self.calmly(worker, lambda attempt, take=take: take())  # type: ignore[misc]
        print(f"{worker.name} runs with { ({n: tried['options'] for n, tried in found.items()}) }", flush=True)
        return found

    def _start(self, name: str, engine: str, config: dict[str, Any]) -> None:
        python, module = self.modules[engine]
        is_bound = self.arguments.memory_gb and "model" in config
        group = MemoryGroup(name, int(self.arguments.memory_gb * 1e9)) if is_bound else None
        self.workers[name] = Worker(name, python, module, config, self.logs / f"{name}.log", group)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()

    def check(self) -> dict[str, Any]:
        """Each lane's logits against those of transformers, or else of another engine than ours: least cosine
        over the positions, and at how many of them the likeliest token is the same; and each file's logits in
        both engines. Raises PeerFailed when they disagree.
        """
        (prompt,) = prompts("check", 1, 48, self.shape.vocab_size)
        (follow,) = prompts("follow", 1, 8, self.shape.vocab_size)
        found: dict[str, np.ndarray] = {}
        for lane in self.lanes:
            file = self.logs / f"{lane.name}.logits"
            self.workers[lane.name].ask("check", prompt=prompt, follow=follow, file=str(file.resolve()))
            logits = np.fromfile(file, np.float32).reshape(1 + len(follow), -1).astype(np.float64)
            found[lane.name] = logits / np.linalg.norm(logits, axis=1, keepdims=True)
            file.unlink()
        widest = max(lane.width for lane in self.lanes)
        full = [lane for lane in self.lanes if lane.width == widest]
        first = min(full, key=lambda lane: (lane.engine == OURS, lane.engine != "transformers")).name
        reference = found[first]
        result = {}
        for lane in self.lanes:
            cosine = float((reference * found[lane.name]).sum(axis=1).min())
            n_same = int((reference.argmax(1) == found[lane.name].argmax(1)).sum())
            result[lane.name] = {"least_cosine": round(cosine, 5), "same_top": n_same, "of": len(reference)}
            print(f"{lane.name}: cosine to {first} at least {cosine:.4f}, same top at {n_same} of {len(reference)}")
            if not cosine >= LEAST_COSINE[lane.width]:  # nor when it is no number
                raise PeerFailed(
                    f"{lane.name} gives other logits than {first}: not the same model, nothing is compared"
                )
        return {"reference": first, "lanes": result, "files": same_files(self.lanes, found)}

    def calmly(self, worker: Worker, take: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
        """What `take` (given the attempt) finds, with `others`: the attempt with the least other work beside
        it, ended by the first that had the CPUs to itself.
        """
        tried = []
        patience = self.arguments.patience
        for attempt in range(N_ATTEMPTS):
            patience -= busy.wait_until_idle(MOST_OTHERS, patience)
            before = busy.read(worker.pid)
            found = take(attempt)
            tried.append(found | {"others": round(busy.others(before, busy.read(worker.pid)), 3)})
            if tried[-1]["others"] <= MOST_OTHERS or patience <= 0:
                break
        return min(tried, key=lambda found: found["others"])

    def _measure(self, seed: str, workload: Workload, worker: Worker) -> dict[str, Any]:
        a, vocab_size = self.arguments, self.shape.vocab_size
        if workload.kind == "decode":
            batch = prompts(seed, workload.size, a.context, vocab_size)
            steps = sorted(worker.ask("decode", prompts=batch, n_steps=a.steps)["step_s"])
            step_s = {
                "median": median(steps),
                "mean": sum(steps) / len(steps),
                "least": steps[0],
                "p90": steps[len(steps) * 9 // 10],
                "most": steps[-1],
            }
            return {"tok_s": workload.size / step_s["median"]} | {
                "step_s": {name: round(s, 6) for name, s in step_s.items()}
            }
        (prompt,) = prompts(seed, 1, workload.size, vocab_size)
        (warm_up,) = prompts(seed + " warm-up", 1, workload.size, vocab_size)
        worker.ask("prefill", prompt=warm_up)
        seconds = worker.ask("prefill", prompt=prompt)["seconds"]
        return {"tok_s": workload.size / seconds, "seconds": round(seconds, 6)}

    def run(self) -> None:
        """All rounds, into `figures` and `roofs`."""
        machine_worker = self.workers["machine"]
        longest = 0.0
        for r in range(self.arguments.rounds):
            begin = time.monotonic()
            if r and not report.fits(begin - self.begun, longest, self.arguments.minutes * 60):
                print(f"{self.arguments.minutes:g} minutes would be over before another round is", flush=True)
                break
            print(f"round {r + 1} of {self.arguments.rounds}", flush=True)
            for i, workload in enumerate(self.workloads):
                roof = self.calmly(machine_worker, lambda attempt: machine_worker.ask("roofs"))
                self.roofs.append({"round": r, "workload": workload.name} | roof)
                shown = ", ".join(f"{k} {v / 1e9:.1f} G/s" for k, v in roof.items() if k != "others")
                print(f"  {workload.name:>12}  machine: {shown}", flush=True)
                for lane in report.rotated(self.lanes, r + i):
                    self._take(r, workload, lane)
            longest = max(longest, time.monotonic() - begin)

    def _take(self, r: int, workload: Workload, lane: Lane) -> None:
        worker = self.workers[lane.name]
        found = self.calmly(worker, lambda attempt: self._measure(f"{r} {attempt} {workload.name}", workload, worker))
        self.figures.append({"round": r, "workload": workload.name, "lane": lane.name} | found)
        note = "" if found["others"] <= MOST_OTHERS else f"  (others used {found['others']:.1f} CPUs)"
        print(f"  {workload.name:>12}  {lane.name:<18} {found['tok_s']:9.1f} tok/s{note}", flush=True)


def write(result: dict[str, Any], lanes: Sequence[Lane], directory: Path) -> None:
    """JSON, Markdown and plot into the directory, the tables to the terminal."""
    summary = result["summary"]
    name = f"peers-{result['shape']}-{now():%H%M%S}"
    (directory / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    read = median(roof["read"] for roof in result["roofs"]) / 1e9
    bf16, int8 = (median(roof[f"multiply_{kind}"] for roof in result["roofs"]) / 1e9 for kind in ("bf16", "int8"))
    title = f"{result['shape']} on {result['machine']['cpu']}, {result['threads']} threads, {result['date'][:10]}"
    n_disturbed = sum(figure["others"] > MOST_OTHERS for figure in result["figures"])
    n_figures = len(result["figures"])
    facts = (
        f"Memory reads {read:.1f} GB/s, multiplies {bf16:.0f} GFLOP/s in bfloat16 and {int8:.0f} GOP/s in int8; "
        f"{result['rounds']} rounds; {versions}."
    )
    if n_disturbed:
        facts += f" {n_disturbed} of {n_figures} figures shared the CPUs with other work; a star marks cells that have no others."
    tables = [cells for cells in (report.speed_cells(summary), report.ratio_cells(summary)) if cells[1]]
    text = "\n".join(report.markdown_table(*cells) for cells in tables)
    command = result["command"]
    (directory / f"{name}.md").write_text(f"# {title}\n\n{facts}\n\n{text}\nRepeat: `{command}`\n")
    note = f"; {n_disturbed} of {n_figures} figures disturbed by other work" if n_disturbed else ""
    report.draw(summary, lanes, title + note, directory / f"{name}.png")
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(title, facts, sep="\n", highlight=False)
    for cells in tables:
        console.print(report.rich_table(*cells))
    print(directory / f"{name}.json")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait, for each figure, until other work ends; 0 takes the machine as it is (default: 60)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument("--n", default="1,2,4,8,16,32", help="sequences that decode at once (default: 1,2,4,8,16,32)")
    parser.add_argument("--prefill", default="128,512,2048", help="tokens of a prompt (default: 128,512,2048)")
    parser.add_argument("--context", type=int, default=128, help="tokens before the first decode step (default: 128)")
    parser.add_argument(
        "--steps", type=int, default=256, help="decode steps of a figure: their median counts (default: 256)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=0.0,
        metavar="M",
        help="begin no round that would end later; 0: all rounds (default: 0)",
    )
    parser.add_argument("--engines", help="engines, formats or lanes, such as deltic,llama.cpp-q8_0 (default: all)")
    parser.add_argument("--shape", default="qwen3.5-0.8b", help="a published shape (default: qwen3.5-0.8b)")
    parser.add_argument("--layers", type=int, metavar="N", help="a part of it: so many layers and as many ids")
    parser.add_argument(
        "--memory-gb",
        type=float,
        default=0.0,
        metavar="GB",
        help="memory of each engine, what it keeps of files included (default: the machine's)",
    )
    parser.add_argument(
        "--threads", type=int, default=n_usable_cpus(), help="threads of every engine (default: the usable CPUs)"
    )
    parser.add_argument("--env", type=Path, default=Path("bench/.peers-venv"), help="environment of the peers")
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="folder that an environment is installed from (default: from PyPI)"
    )
    parser.add_argument("--prepare", action="store_true", help="make the environment and the checkpoints, and end")
    parser.add_argument(
        "--models", type=Path, default=Path("bench/.peers-models"), help="where checkpoints are written"
    )
    parser.add_argument("--out", help="directory of the results (default: bench/runs/<date>-<machine>-peers)")
    arguments = parser.parse_args(argv)
    arguments.n = numbers(arguments.n, "--n", int)
    arguments.prefill = numbers(arguments.prefill, "--prefill", int)
    for flag in ("rounds", "context", "steps", "threads"):
        if getattr(arguments, flag) < 1:
            raise ConfigError(f"--{flag} {getattr(arguments, flag)}: must be at least 1")
    return arguments


def command(arguments: argparse.Namespace) -> str:
    """What repeats the measurement: the flags that change it, not those that say where files are."""
    flags = {
        "--shape": arguments.shape,
        "--layers": arguments.layers,
        "--memory-gb": arguments.memory_gb or None,
        "--threads": arguments.threads,
        "--rounds": arguments.rounds,
        "--n": ",".join(map(str, arguments.n)),
        "--prefill": ",".join(map(str, arguments.prefill)),
        "--context": arguments.context,
        "--steps": arguments.steps,
        "--engines": arguments.engines,
    }
    given = [str(part) for flag, value in flags.items() if value is not None for part in (flag, value)]
    return shlex.join(["python", "-m", "bench.peers", *given])


def compare(arguments: argparse.Namespace) -> int:
    """Everything. Raises ConfigError, UnsupportedModelError, PeerFailed and CalledProcessError."""
    shape, lanes = cut_shape(arguments.shape, arguments.layers), chosen_lanes(arguments.engines)
    check_memory(lanes, shape)
    model = [arguments.shape, *([str(arguments.layers)] if arguments.layers else [])]
    env, models = arguments.env.absolute(), arguments.models.absolute() / "-".join(model).lower()
    python, versions = make_environment(env, packages(lanes), arguments.wheels)
    gguf_bytes = make_models(
        models, model, python, [name for name in FILES if any(name == lane.format for lane in lanes)]
    )
    if arguments.prepare:
        return 0
    comparison = Comparison(arguments, lanes, python, models)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: with what was measured
    try:
        comparison.load()
        agreement = comparison.check()
        comparison.run()
    except KeyboardInterrupt:
        if not comparison.figures:
            raise
        print("interrupted: what was measured is written", flush=True)
    finally:
        comparison.close()
    infos = {name: worker.info for name, worker in comparison.workers.items()}
    costs = model_costs(lanes, shape, gguf_bytes, infos)
    figures, roofs = comparison.figures, comparison.roofs
    result = {
        "bench": "peers",
        "shape": arguments.shape,
        "layers": shape.n_layers,
        "memory_gb": arguments.memory_gb,
        "disk": disk_bandwidth(models / "bf16.gguf") if arguments.memory_gb else None,
        "date": now().isoformat(),
        "machine": machine(),
        "code": code(),
        "versions": versions,
        "llama_build": built_with(env),
        "command": command(arguments),
        "threads": arguments.threads,
        "rounds": len({figure["round"] for figure in figures}),
        "context": arguments.context,
        "steps": arguments.steps,
        "prefill_warm_up": PREFILL_WARM_UP,
        "engines": infos,
        "costs": {name: dataclasses.asdict(cost) for name, cost in costs.items()},
        "agreement": agreement,
        "llama_tuning": comparison.tuning,
        "roofs": roofs,
        "summary": report.summarise(figures, roofs, lanes, costs),
        "figures": figures,
    }
    write(result, lanes, runs_directory(arguments.out or f"bench/runs/{now():%Y-%m-%d}-{machine_name()}-peers"))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return compare(parse(argv))
    except subprocess.CalledProcessError as error:
        print(
            f"bench.peers: {shlex.join(map(str, error.cmd[:6]))} ended with status {error.returncode}", file=sys.stderr
        )
    except (ValueError, PeerFailed) as error:
        print(f"bench.peers: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
