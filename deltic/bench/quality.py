"""`deltic bench quality`: what quantising loses, against the same model in bfloat16 on the same text.

Formats are those of --quantize, and checkpoints of the same model that others quantised (--beside). Each
reads the text through the kernels that serve, teacher-forced, 64 tokens a step, beside the bfloat16 model.
For each token that counts, with p the bfloat16 distribution over the vocabulary and q the quantised one:

    perplexity  exp(mean(-log q[token]))
    KL          sum p (log p - log q), in nats: mean with its standard error, 99th percentile, greatest
    same        share of tokens for which p and q have the same most likely one
    gap         p of its most likely token less p of q's, at worst: how near a tie q decided otherwise

The default text is from the built-in model's held-out corpus (training/held_out.py). A text that the model
does not know says little: there bfloat16 and its rounded copy are wrong together.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from deltic.bench.provenance import code, machine, now, runs_directory
from deltic.config import ConfigError, EngineConfig, resolve
from deltic.engine.cache.cache import pages_for
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.step import Chunk, Sequence, Step
from deltic.models.checkpoint import model_name, text_directory
from deltic.models.loading import shares_text
from deltic.models.qwen.weights import Weights
from deltic.ops.arrays import Array
from deltic.ops.cpu.program import instruction_set
from deltic.ops.geometry import PAGE_SIZE
from deltic.ops.matrix import Matrix
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from deltic.text import Tokenizer

Floats = NDArray[np.float64]

TEXT = Path(__file__).with_name("quality.jsonl")
REFERENCE = "bf16"
FORMATS = "int8,int4,int4-symmetric"
WINDOW = 2048
"""Tokens of the longest document; a longer text is cut into several."""
N_ANSWERS, ANSWER_TOKENS, LEAST_PROMPT = 3, 96, 8
_LINES = msgspec.json.Decoder(list[tuple[str, bool]])


@dataclass(frozen=True)
class Document:
    """Token ids, and for each whether the model's guess of it counts; that of the first never does."""

    ids: list[int]
    counts: list[bool]

    @property
    def prompt(self) -> list[int]:
        """What comes before the first token that counts; of a plain text, its beginning."""
        return self.ids[: max(LEAST_PROMPT, self.counts.index(True))]


def read_documents(file: Path, tokenizer: Tokenizer) -> list[Document]:
    """Lines of [[text, whether it counts], ...] from a .jsonl file, or any other file as plain text, all of
    which counts.

    Special tokens may be written out. Raises ConfigError for a file that cannot be read or has no token that
    counts.
    """
    try:
        text = file.read_text(encoding="utf-8")
        lines = _LINES.decode_lines(text) if file.suffix == ".jsonl" else [[(text, True)]]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {file}: cannot be read ({error})") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--text {file}: a line must be [[text, true or false], ...] ({error})") from None
    documents = []
    for segments in lines:
        parts = [(tokenizer.encode(part, "parse"), counts) for part, counts in segments]
        ids = [token for tokens, _ in parts for token in tokens]
        counts = [each for tokens, each in parts for _ in tokens]
        for start in range(0, len(ids), WINDOW):
            window = slice(start, start + WINDOW)
            documents.append(Document(ids[window], [False, *counts[window][1:]]))
    documents = [document for document in documents if any(document.counts)]
    if not documents:
        raise ConfigError(f"--text {file}: no token that counts; give a text of at least two tokens")
    return documents


@dataclass
class Losses:
    """What one format's distributions say of each token that counts: a float64 array a step."""

    nll: list[Floats] = field(default_factory=list)
    kl: list[Floats] = field(default_factory=list)
    gap: list[Floats] = field(default_factory=list)

    def add(self, log_q: Floats, log_p: Floats, targets: NDArray[np.int64]) -> None:
        """log_q, log_p: float64 [n, V], of this format and of bfloat16; targets: int64 [n]."""
        p, rows = np.exp(log_p), np.arange(len(targets))
        self.nll.append(-log_q[rows, targets])
        self.kl.append((p * (log_p - log_q)).sum(1))
        self.gap.append(p.max(1) - p[rows, log_q.argmax(1)])

    def summary(self) -> dict[str, float]:
        """The numbers of the module's first lines."""
        kl, gap = np.concatenate(self.kl), np.concatenate(self.gap)
        return {
            "perplexity": math.exp(np.concatenate(self.nll).mean()),
            "kl_mean": float(kl.mean()),
            "kl_error": float(kl.std()) / math.sqrt(len(kl)),
            "kl_p99": float(np.quantile(kl, 0.99)),
            "kl_max": float(kl.max()),
            "same_argmax": float((gap == 0).mean()),
            "gap_max": float(gap.max()),
        }


def compare(
    runners: dict[str, Runner], documents: list[Document], advance: Callable[[int], None]
) -> dict[str, dict[str, float]]:
    """The summary of each runner against the first, over all documents.

    advance: called with the tokens done.
    """
    losses = {name: Losses() for name in runners}
    for targets, found, n_tokens in distributions(runners, documents):
        log_p = next(iter(found.values()))
        for name, log_q in found.items():
            losses[name].add(log_q, log_p, targets)
        advance(n_tokens)
    return {name: each.summary() for name, each in losses.items()}


def distributions(
    runners: dict[str, Runner], documents: list[Document]
) -> Iterator[tuple[NDArray[np.int64], dict[str, Floats], int]]:
    """Of each step: the tokens that count [n], each runner's log-probabilities of them [n, V], and how many
    tokens it read.
    """
    n_real = next(iter(runners.values())).plan.n_real
    for document in documents:
        ids, pages = document.ids, list(range(pages_for(len(document.ids))))
        request = Request(id="quality", prompt_ids=ids, params=SamplingParams(prompt_logprobs=0))
        sequence = Sequence(request, 0, 0, array("i", ids), n_prompt=len(ids), pages=pages, slot=0, place=0)
        for start in range(0, len(ids), PAGE_SIZE):
            n_tokens = min(PAGE_SIZE, len(ids) - start)
            step = Step(chunks=[Chunk(sequence, start, n_tokens, prompt_logprobs=True)])
            counts, following = (each[start + 1 : start + 1 + n_tokens] for each in (document.counts, ids))
            rows = [row for row, counted in enumerate(counts) if counted]
            found = {}
            for name, runner in runners.items():
                runner.step(step)
                found[name] = _log_softmax(runner.logits(n_tokens)[rows, :n_real])
            yield np.array([following[row] for row in rows], np.int64), found, n_tokens


def _log_softmax(logits: Array) -> Floats:
    """float64 [n, V]."""
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


def answer(runner: Runner, prompt: list[int]) -> list[int]:
    """The greedy continuation, up to ANSWER_TOKENS."""
    engine = Engine(runner)
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
    engine.add(Request(id="answer", prompt_ids=prompt, params=params))
    tokens: list[int] = []
    while engine.has_work():
        tokens += [token for output in engine.step() for token in output.token_ids]
    return tokens


def sizes(weights: Weights) -> dict[str, float]:
    """Bytes in memory, and bits a parameter: scales, the parts that stay wider and padding included."""
    parts = [part for _, part in weights.named_parts()]
    n = sum(p.n_matrices * p.n * p.k if isinstance(p, Matrix) else p.size for p in parts)
    return {"bytes": weights.n_bytes, "bits_per_weight": weights.n_bytes * 8 / n}


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """The rows for people."""
    out = Table("format", title=title, title_justify="left")
    for name in ("MB", "bits/weight", "perplexity", "KL mean ± error", "p99", "max", "same argmax", "gap"):
        out.add_column(name, justify="right")
    for row in rows:
        kl = (f"{row['kl_mean']:.1e} ± {row['kl_error']:.0e}", f"{row['kl_p99']:.4f}", f"{row['kl_max']:.3f}")
        choice = (f"{row['same_argmax']:.2%}", f"{row['gap_max']:.3f}")
        loss = ("",) * 5 if row["format"] == REFERENCE else (*kl, *choice)
        out.add_row(
            row["format"],
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['bits_per_weight']:.2f}",
            f"{row['perplexity']:.5f}",
            *loss,
        )
    return out


def load(configs: dict[str, EngineConfig], progress: Progress) -> dict[str, Runner]:
    """A runner of each configuration, the reference first.

    Raises ConfigError for a reference whose weights are not bfloat16, and for a model with other ids.
    """
    runners: dict[str, Runner] = {}
    for name, config in configs.items():
        bar = progress.add_task(f"loading {name}", total=1.0)
        runner = build_runner(config, lambda stage, done, bar=bar: progress.update(bar, completed=done), Cpu())  # type: ignore[misc]
        assert isinstance(runner, Runner)
        progress.update(bar, completed=1.0)
        held = runner.plan.quantize or ", ".join(runner.model.weights.formats())
        if not runners and (runner.plan.quantize or runner.plan.shape.formats):
            raise ConfigError(
                f"{config.model} holds {held} weights only, so nothing says what they lost; give the original checkpoint"
            )
        runners[name] = runner
        n, expected = runner.plan.n_real, runners[REFERENCE].plan.n_real
        if n != expected:
            raise ConfigError(
                f"--beside {config.model}: has {n} tokens, and the reference {expected}; it is another model"
            )
    return runners


def chosen(config: EngineConfig, formats: list[str], beside: list[str], file: Path) -> dict[str, EngineConfig]:
    """The configuration of the reference, of each format and of each model beside it, by their names.

    file: the text, which all have to read as the same ids. Raises ConfigError.
    """
    found = {REFERENCE: dataclasses.replace(config, quantize=None)}
    found |= {name: dataclasses.replace(config, quantize=name) for name in formats}
    documents = read_documents(file, Tokenizer.load(text_directory(config)))
    for model in beside:
        other = dataclasses.replace(config, model=model, quantize=None, dummy=None)
        name = model_name(other)
        if name in found:
            raise ConfigError(f"--beside {model}: another is called {name}; rename one of them")
        if read_documents(file, Tokenizer.load(text_directory(other))) != documents:
            raise ConfigError(f"--beside {model}: its tokenizer reads the text as other tokens; it is another model")
        found[name] = other
    return found


def bench(arguments: argparse.Namespace, given: dict[str, Any]) -> int:
    """The command: a table, a JSON file with greedy answers of each format, and a last line of JSON."""
    wanted = FORMATS if arguments.formats is None and not arguments.beside else arguments.formats or ""
    formats = [name.strip() for name in wanted.split(",") if name]
    config = resolve(EngineConfig, given | {"quantize": None})
    for name in formats:
        config = resolve(EngineConfig, given | {"quantize": name})
    tokenizer = Tokenizer.load(text_directory(config))
    file = Path(arguments.text) if arguments.text else TEXT
    documents = read_documents(file, tokenizer)
    longest = max(len(document.ids) for document in documents) + ANSWER_TOKENS
    config = dataclasses.replace(config, max_num_seqs=1, max_step_tokens=PAGE_SIZE, max_model_len=longest, n_pages=None)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        runners = load(chosen(config, formats, arguments.beside, file), progress)
        bar = progress.add_task("reading", total=sum(len(document.ids) for document in documents))
        summaries = compare(runners, documents, lambda n: progress.advance(bar, n))
        prompts = [document.prompt for document in documents[:N_ANSWERS]]
        answers = {name: [answer(runner, prompt) for prompt in prompts] for name, runner in runners.items()}
    rows = [
        {"format": name, **sizes(runner.model.weights), **summaries[name]}
        | {"holds": shares_text(runner.model.weights.formats())}
        for name, runner in runners.items()
    ]
    n_tokens = sum(sum(document.counts) for document in documents)
    model = model_name(config)
    head = {
        "bench": "quality",
        "model": model,
        "date": now().isoformat(),
        "machine": machine(),
        "code": code(),
        "instructions": instruction_set(),
        "text": file.name,
        "tokens": n_tokens,
        "rows": rows,
    }
    texts = {
        "prompts": [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts],
        "answers": {name: [tokenizer.decode(ids) for ids in each] for name, each in answers.items()},
    }
    path = runs_directory(arguments.out) / f"quality-{Path(model).name}-{now():%H%M%S}.json"
    path.write_text(json.dumps(head | texts, indent=1, ensure_ascii=False) + "\n")
    title = f"{model} against {REFERENCE} on {n_tokens} tokens of {file.name}"
    Console(width=None if sys.stdout.isatty() else 120).print(table(rows, title))
    print(json.dumps(head | {"file": str(path)}))
    return 0
