"""The built-in model in every format that published tools write, in Deltic and, of GGUF files, in llama.cpp.

    python -m bench.quality_peers --tools PYTHON --gptq PYTHON --llama PYTHON --out bench/runs/...

The three are interpreters of other environments: one with llmcompressor (which brings compressed-tensors and
auto-round), nvidia-modelopt and autoawq, one with gptqmodel, one with llama-cpp-python, gguf and torch. What
is not given is left out of the table. Checkpoints that are already in --work are not made again.

Each engine reads the held-out text of `deltic bench quality`, teacher-forced, from the same token ids. Both
are held to the model as it was trained: the published implementation (transformers) on the bfloat16 weights
in float32. So neither engine's arithmetic is the measure of the other. Standard errors are over tokens; of
the difference of two engines they are of the paired differences.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from bench.kept import Run
from bench.quality_tables import formats_table
from bench.tables import broken
from deltic.bench.provenance import code, machine, now, runs_directory
from deltic.bench.quality import REFERENCE, TEXT, Document, chosen, distributions, load, read_documents, sizes
from deltic.config import EngineConfig
from deltic.models.checkpoint import DEMO
from deltic.models.loading import shares_text
from deltic.ops.cpu.program import instruction_set
from deltic.ops.geometry import PAGE_SIZE
from deltic.runtime.cpu.text import Runner
from deltic.text import Tokenizer

PATH = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
"""Of the other environments, which run in --work: some write logs where they are."""
Floats = NDArray[np.float64]

TOOLS = (
    *("ct-fp8-block", "ct-fp8-channel", "ct-int8-channel", "ct-int8-packed", "ct-int4", "ct-int4-gptq"),
    *("ct-int4-zeros", "ct-int4-zeros-gptq", "ct-nvfp4", "ct-mxfp4"),
    *("auto-round", "auto-round-gptq", "auto-round-int8", "auto-round-awq", "autoawq"),
    *("modelopt-fp8", "modelopt-nvfp4", "modelopt-mxfp4"),
)
GPTQ = ("gptq-int4", "gptq-int8", "gptq-awq")
"""Recipes of bench/quality_files.py, by environment."""

BY_PACKAGE = ("BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4")
"""Types that the gguf package quantises; `gguf-` stands before their names here."""
BY_LLAMA = (
    *("Q8_0", "Q6_K", "Q5_K_M", "Q5_1", "Q5_0", "Q4_K_M", "IQ4_NL", "IQ4_XS", "Q4_1", "Q4_0"),
    *("Q3_K_M", "Q2_K"),
)
"""Types of files that llama.cpp quantises."""
N_CALIBRATION, CALIBRATION_TOKENS, CALIBRATION_SEED = 32, 256, 9_000_018


class Reading:
    """What one engine's log-probabilities lost: arrays over the tokens that count."""

    def __init__(self, log_q: Floats, log_p: Floats, targets: NDArray[np.int64]) -> None:
        """log_q, log_p: [n, V], of the engine and of the model as it was trained; targets: int64 [n]."""
        rows = np.arange(len(targets))
        p = np.exp(log_p)
        self.nll: Floats = -log_q[rows, targets]
        self.kl: Floats = (p * (log_p - log_q)).sum(1)
        self.same: Floats = (log_q.argmax(1) == log_p.argmax(1)).astype(np.float64)

    def summary(self) -> dict[str, float]:
        return {
            "perplexity": float(np.exp(self.nll.mean())),
            "nll_error": error(self.nll),
            "kl_mean": float(self.kl.mean()),
            "kl_error": error(self.kl),
            "kl_p99": float(np.quantile(self.kl, 0.99)),
            "kl_max": float(self.kl.max()),
            "same_argmax": float(self.same.mean()),
            "same_error": error(self.same),
        }


def error(values: Floats) -> float:
    """The standard error of their mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def apart(ours: Reading, theirs: Reading) -> dict[str, float]:
    """Ours less theirs, of the same tokens: means and their standard errors, for nll, kl and same."""
    found: dict[str, float] = {}
    for name in ("nll", "kl", "same"):
        difference = getattr(ours, name) - getattr(theirs, name)
        found |= {name: float(difference.mean()), f"{name}_error": error(difference)}
    return found


def calibration(tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of the training corpus, under a seed that neither training nor the held-out text has."""
    from training.corpus import Corpus

    ids: list[int] = []
    for document in Corpus(CALIBRATION_SEED, 450):
        ids += [token for text, _ in document.segments for token in tokenizer.encode(text, "parse")]
        if len(ids) >= N_CALIBRATION * CALIBRATION_TOKENS:
            break
    return [ids[i * CALIBRATION_TOKENS : (i + 1) * CALIBRATION_TOKENS] for i in range(N_CALIBRATION)]


def make_checkpoints(python: str, names: tuple[str, ...], work: Path) -> dict[str, dict[str, str]]:
    """What made each directory, or failed to. python: of the environment with the tools."""
    todo = [name for name in names if not (work / f"{name}.json").exists()]
    if todo:
        module = [python, "-m", "bench.quality_files", str(DEMO), str(work / "calibration.json"), str(work)]
        subprocess.run([*module, ",".join(todo)], cwd=work, env=PATH, check=True, stdout=sys.stderr)
    return {name: json.loads((work / f"{name}.json").read_text()) for name in names}


def make_gguf(work: Path) -> dict[str, Path]:
    """The files that the gguf package quantises, by name: all matrices, the tied head in at least 8 bits."""
    from tests.tiny_gguf import write_gguf

    found = {}
    for type in BY_PACKAGE:

        def pick(name: str, shape: tuple[int, ...], type: str = type) -> str:
            if len(shape) == 1 or "conv1d" in name:
                return "F32"
            return "Q8_0" if "embed_tokens" in name and type != "BF16" else type

        found[f"gguf-{type}"] = work / f"gguf-{type}.gguf"
        write_gguf(DEMO, found[f"gguf-{type}"], pick)
    return found


def trained(documents: list[Document], n_real: int) -> Floats:
    """[n, n_real]: log-probabilities of the published implementation in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for document in documents:
            logits = model(torch.tensor([document.ids])).logits[0, :-1, :n_real]
            rows = torch.tensor(document.counts[1:])
            found.append(torch.log_softmax(logits[rows].double(), -1).numpy())
    return np.concatenate(found)


def read_ours(
    models: dict[str, Path], documents: list[Document], log_p: Floats, threads: int
) -> tuple[dict[str, Reading], dict[str, Any]]:
    """Deltic's reading of the built-in model and of each other, and what each holds."""
    longest = max(len(document.ids) for document in documents)
    config = EngineConfig(max_num_seqs=1, max_step_tokens=PAGE_SIZE, max_model_len=longest + 1, threads=threads)
    readings, held = {}, {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for name, path in {REFERENCE: None, **models}.items():  # one at a time, since names may be alike
            beside = [] if path is None else [str(path)]
            runners = load(chosen(config, [], beside, TEXT), progress)
            runner: Runner = list(runners.values())[-1]
            parts = [(targets, found[name]) for targets, found, _ in distributions({name: runner}, documents)]
            targets, log_q = (np.concatenate(part) for part in zip(*parts, strict=True))
            readings[name] = Reading(log_q, log_p, targets)
            held[name] = {**sizes(runner.model.weights), "holds": shares_text(runner.model.weights.formats())}
    return readings, held


def read_theirs(
    python: str, files: dict[str, Path], documents: list[Document], log_p: Floats, work: Path, threads: int
) -> tuple[dict[str, Reading], dict[str, Path], dict[str, Any]]:
    """llama.cpp's reading of the files and of those that it quantises; all files; and what it is."""
    job = {
        "documents": [{"ids": document.ids, "counts": document.counts} for document in documents],
        "source": str(files["gguf-BF16"]),
        "out": str(work),
        "types": BY_LLAMA,
        "files": {name: str(path) for name, path in files.items()},
        "n_real": log_p.shape[1],
        "n_threads": threads,
    }
    (work / "job.json").write_text(json.dumps(job))
    command = [python, "-m", "bench.quality_llama", str(work / "job.json")]
    said = subprocess.run(command, cwd=work, env=PATH, check=True, stdout=subprocess.PIPE, text=True).stdout
    files = files | {name: work / f"{name}.gguf" for name in BY_LLAMA}
    targets = np.array([t for d in documents for t, counts in zip(d.ids, d.counts, strict=True) if counts])
    readings = {name: Reading(np.load(work / f"{name}.npy").astype(np.float64), log_p, targets) for name in files}
    return readings, files, json.loads(said.splitlines()[-1])


def row(name: str, made: dict[str, str], held: dict[str, Any], ours: Reading, theirs: Reading | None) -> dict[str, Any]:
    found = {"format": name, **made, **held, "ours": ours.summary()}
    if theirs is not None:
        found |= {"theirs": theirs.summary(), "apart": apart(ours, theirs)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", help="Python of the environment with llmcompressor, nvidia-modelopt and autoawq")
    parser.add_argument("--gptq", help="of that with gptqmodel")
    parser.add_argument("--llama", help="of that with llama-cpp-python")
    parser.add_argument("--work", type=Path, default=Path("build/quality"), help="where the files go")
    parser.add_argument("--text", type=Path, default=TEXT, help="another text than that of `deltic bench quality`")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", help="write the JSON result and its table into this directory")
    given = parser.parse_args()
    work: Path = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.load(DEMO)
    documents = read_documents(given.text, tokenizer)
    (work / "calibration.json").write_text(json.dumps(calibration(tokenizer)))
    made: dict[str, dict[str, str]] = {REFERENCE: {"by": "as trained", "how": ""}}
    for python, names in ((given.tools, TOOLS), (given.gptq, GPTQ)):
        made |= make_checkpoints(python, names, work) if python else {}
    models = {name: work / name for name, said in made.items() if name != REFERENCE and "error" not in said}
    log_p, engine = trained(documents, tokenizer.n_tokens), None
    theirs: dict[str, Reading] = {}
    if given.llama:
        theirs, files, engine = read_theirs(given.llama, make_gguf(work), documents, log_p, work, given.threads)
        for name in files:
            by, how = ("llama.cpp", "its own rounding") if name in BY_LLAMA else (f"gguf {version('gguf')}", "nearest")
            made[name] = {"by": by, "how": how}
        models |= files
    ours, held = read_ours(models, documents, log_p, given.threads)
    rows = [row(name, made[name], held[name], ours[name], theirs.get(name)) for name in ours]
    result = {
        "bench": "quality-formats",
        "date": now().isoformat(),
        "machine": machine(),
        "code": code(),
        "instructions": instruction_set(),
        "text": given.text.name,
        "tokens": sum(sum(document.counts) for document in documents),
        "llama": engine,
        "rows": rows,
        "failed_to_make": {name: said for name, said in made.items() if "error" in said},
    }
    kind = "formats" if given.text == TEXT else given.text.stem
    path = runs_directory(given.out) / f"quality-{kind}-{now():%H%M%S}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    table = formats_table(Run(path, result))
    path.with_suffix(".md").write_text("\n\n".join(map(broken, table.split("\n\n"))) + "\n")
    print(table)


if __name__ == "__main__":
    main()
