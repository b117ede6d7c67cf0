"""`deltic bench quality`: what quantising loses, against the same model in bfloat16 on the same text; or what
another setting does, such as --setting kv-cache-dtype=int8, against the default.

Formats are those of --quantize, and checkpoints of the same model that others quantised (--beside). Each
reads the text through the kernels that serve, teacher-forced, 64 tokens a step, beside the bfloat16 model.
For each token that counts, with p the reference's distribution over the vocabulary and q the other one:

    perplexity  exp(mean(-log q[token]))
    KL          sum p (log p - log q), in nats: mean with its standard error, 99th percentile, greatest
    same        share of tokens for which p and q have the same most likely one
    gap         p of its most likely token less p of q's, at worst: how near a tie q decided otherwise
    answers     share of the tokens of greedy answers up to where they part from the reference's

With --context N, what counts are the last tokens of texts of N tokens, made of all lines in a row; --setting
on a GPU reads them by one runner after the other, so that the weights fit.

The default text is from the built-in model's held-out corpus (training/held_out.py). A text that the model
does not know says little: there bfloat16 and its rounded copy are wrong together.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from deltic.bench.provenance import code, machine, now, runs_directory
from deltic.config import ENV_PREFIX, ConfigError, EngineConfig, nearest
from deltic.config_sources import resolve
from deltic.engine.cache.cache import pages_for
from deltic.engine.engine import Engine, StepRunner
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.step import Chunk, Sequence, Step, silent
from deltic.json_types import JsonObject
from deltic.models.checkpoint import model_name, text_directory
from deltic.models.loading import shares_text
from deltic.models.qwen.weights import Weights
from deltic.ops.arrays import Array
from deltic.ops.cpu.program import instruction_set
from deltic.ops.geometry import PAGE_SIZE
from deltic.ops.matrix import Matrix
from deltic.runtime.build import build_runner, gpu_device
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from deltic.text import Tokenizer, n_alike

if TYPE_CHECKING:
    from deltic.runtime.gpu.device import Gpu

Floats = NDArray[np.float64]

TEXT = Path(__file__).with_name("quality.jsonl")
REFERENCE = "bf16"
"""Reference of formats of weights; settings alone are held to the DEFAULT."""
DEFAULT = "default"
FORMATS = "int8,int4,int4-symmetric"
WINDOW = 2048
"""Tokens of the longest document; a longer text is cut into several."""
N_ANSWERS, ANSWER_TOKENS, LEAST_PROMPT = 3, 96, 8
FAR_TOKENS, FAR_STEP = 512, 512
"""Tokens of a long text that count at most, and tokens read in a step before them."""
_LINES = msgspec.json.Decoder(list[tuple[str, bool]])


@dataclass(frozen=True)
class Document:
    """Token ids, and for each whether the model's guess of it counts; that of the first never does."""

    ids: list[int]
    counts: list[bool]

    @property
    def prompt(self) -> list[int]:
        """Ids before the first token that counts; of a plain text, its beginning."""
        return self.ids[: max(LEAST_PROMPT, self.counts.index(True))]


def far_documents(documents: list[Document], n: int) -> list[Document]:
    """Texts of n tokens, of all documents in a row, in which only tokens of the last FAR_TOKENS count. Raises
    ConfigError where there are too few.
    """
    ids = [token for document in documents for token in document.ids]
    counts = [each for document in documents for each in document.counts]
    far = max(n - FAR_TOKENS, n // 2)
    counted = [
        Document(ids[at : at + n], [False] * far + counts[at + far : at + n]) for at in range(0, len(ids) - n + 1, n)
    ]
    counted = [document for document in counted if any(document.counts)]
    if not counted:
        raise ConfigError(f"--context {n}: the text has {len(ids)} tokens; give a longer --text, or a shorter context")
    return counted


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
    """Distances of one format's distributions at each token that counts: a float64 array a step."""

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
    for targets, log_probs, n_tokens in distributions(runners, documents):
        log_p = next(iter(log_probs.values()))
        for name, log_q in log_probs.items():
            losses[name].add(log_q, log_p, targets)
        advance(n_tokens)
    return {name: each.summary() for name, each in losses.items()}


def distributions(
    runners: dict[str, Runner], documents: list[Document]
) -> Iterator[tuple[NDArray[np.int64], dict[str, Floats], int]]:
    """Yields for each step the tokens that count [n], each runner's log-probabilities of them [n, V], and how
    many tokens it read.
    """
    for steps in zip(*(readings(runner, documents) for runner in runners.values()), strict=True):
        targets, _, n_tokens = steps[0]
        yield targets, {name: log_q for name, (_, log_q, _) in zip(runners, steps, strict=True)}, n_tokens


def readings(runner: Any, documents: list[Document]) -> Iterator[tuple[NDArray[np.int64], Floats, int]]:
    """Yields for each step that has tokens that count, these [n], the log-probabilities of all tokens there
    [n, V], and how many tokens were read since the last one. runner: of a language model.
    """
    n_real, n_read = runner.plan.n_real, 0
    longest = runner.plan.max_step_tokens
    for document in documents:
        ids, pages = document.ids, list(range(pages_for(len(document.ids))))
        request = Request(id="quality", prompt_ids=ids, params=SamplingParams(prompt_logprobs=0))
        sequence = Sequence(request, 0, 0, array("i", ids), n_prompt=len(ids), pages=pages, state_slot=0, batch_slot=0)
        start, first = 0, max(0, document.counts.index(True) - 1) // PAGE_SIZE * PAGE_SIZE
        while start < len(ids):
            far = start < first
            n_tokens = min(longest, first - start) if far else min(PAGE_SIZE, len(ids) - start)
            asks = not far and isinstance(runner, Runner)  # on a GPU `logits` makes them
            runner.step(Step(chunks=[Chunk(sequence, start, n_tokens, prompt_logprobs=asks)]))
            counts, following = (each[start + 1 : start + 1 + n_tokens] for each in (document.counts, ids))
            rows = [row for row, counted in enumerate(counts) if counted]
            start, n_read = start + n_tokens, n_read + n_tokens
            if rows:
                log_q = _log_softmax(np.asarray(runner.logits(n_tokens))[rows, :n_real])
                yield np.array([following[row] for row in rows], np.int64), log_q, n_read
                n_read = 0


def compare_in_turn(
    configs: dict[str, EngineConfig], device: Cpu | Gpu, documents: list[Document], advance: Callable[[int], None]
) -> tuple[dict[str, dict[str, float]], dict[str, list[list[int]]]]:
    """The summaries of `compare`, and greedy answers, of one runner after the other: memory for the weights
    of one, and for the reference's probabilities.
    """
    known: list[NDArray[np.float32]] = []
    losses, answers = {}, {}
    for name, config in configs.items():
        runner, loss = build_runner(config, silent, device), Losses()
        for i, (targets, log_q, n_tokens) in enumerate(readings(runner, documents)):
            if i == len(known):  # the reference
                known.append(log_q.astype(np.float32))
            loss.add(log_q, known[i].astype(np.float64), targets)
            advance(n_tokens)
        losses[name] = loss.summary()
        answers[name] = [answer(runner, document.prompt) for document in documents[:N_ANSWERS]]
        del runner
        gc.collect()
        if device.text.on_gpu:  # the next plan counts what is free
            import torch

            torch.cuda.empty_cache()
    return losses, answers


def same_answers(answers: list[list[int]], known: list[list[int]]) -> float:
    """The share of the reference's tokens before the answers part."""
    n_same = sum(map(n_alike, answers, known))
    return n_same / max(1, sum(map(len, known)))


def _log_softmax(logits: Array) -> Floats:
    """float64 [n, V]."""
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


def answer(runner: StepRunner, prompt: list[int]) -> list[int]:
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


def table(rows: list[JsonObject], title: str) -> Table:
    """The rows for people."""
    out = Table("format", title=title, title_justify="left")
    for name in ("MB", "bits/weight", "perplexity", "KL mean ± error", "p99", "max", "same argmax", "gap", "answers"):
        out.add_column(name, justify="right")
    for row in rows:
        kl = (f"{row['kl_mean']:.1e} ± {row['kl_error']:.0e}", f"{row['kl_p99']:.4f}", f"{row['kl_max']:.3f}")
        choice = (f"{row['same_argmax']:.2%}", f"{row['gap_max']:.3f}", f"{row['answers_same']:.0%}")
        loss = ("",) * 6 if row is rows[0] else (*kl, *choice)
        size = (f"{row['bytes'] / 1e6:.1f}", f"{row['bits_per_weight']:.2f}") if "bytes" in row else ("", "")
        out.add_row(row["format"], *size, f"{row['perplexity']:.5f}", *loss)
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
        if not runners and name == REFERENCE and (runner.plan.quantize or runner.plan.shape.formats):
            raise ConfigError(
                f"{config.model} holds {held} weights only, so nothing says what they lost; give the original checkpoint"
            )
        runners[name] = runner
        n, expected = runner.plan.n_real, next(iter(runners.values())).plan.n_real
        if n != expected:
            raise ConfigError(
                f"--beside {config.model}: has {n} tokens, and the reference {expected}; it is another model"
            )
    return runners


def chosen(config: EngineConfig, formats: list[str], beside: list[str], file: Path) -> dict[str, EngineConfig]:
    """The configuration of the reference, of each format and of each model beside it, by their names.

    file: the text, which all have to read as the same ids. Raises ConfigError.
    """
    configs = {REFERENCE: dataclasses.replace(config, quantize=None)}
    configs |= {name: dataclasses.replace(config, quantize=name) for name in formats}
    documents = read_documents(file, Tokenizer.load(text_directory(config)))
    for model in beside:
        other = dataclasses.replace(config, model=model, quantize=None, dummy=None)
        name = model_name(other)
        if name in configs:
            raise ConfigError(f"--beside {model}: another is called {name}; rename one of them")
        if read_documents(file, Tokenizer.load(text_directory(other))) != documents:
            raise ConfigError(f"--beside {model}: its tokenizer reads the text as other tokens; it is another model")
        configs[name] = other
    return configs


def changed_by(text: str) -> dict[str, object]:
    """The field that a --setting changes, as NAME=VALUE. Raises ConfigError."""
    name, equals, value = text.partition("=")
    field = name.strip().removeprefix("--").replace("-", "_")
    known = {each.name for each in dataclasses.fields(EngineConfig)}
    if not equals or field not in known or field in ("model", "dummy", "device", "quantize"):
        hint = nearest(field, known) if field not in known else ""
        hint = hint or "give NAME=VALUE of a flag of deltic serve, e.g. kv-cache-dtype=int8"
        raise ConfigError(f"--setting {text}: {hint}")
    config = resolve(EngineConfig, {}, {f"{ENV_PREFIX}{field.upper()}": value})
    return {field: getattr(config, field)}


def bench(arguments: argparse.Namespace, given: dict[str, object]) -> int:
    """The command: a table, a JSON file with greedy answers of each format, and a last line of JSON."""
    settings = arguments.setting
    is_default = arguments.formats is None and not arguments.beside and not settings
    formats = [name.strip() for name in (FORMATS if is_default else arguments.formats or "").split(",") if name]
    config = resolve(EngineConfig, given | {"quantize": None})
    for name in formats:
        config = resolve(EngineConfig, given | {"quantize": name})
    changed = {text: changed_by(text) for text in settings}
    tokenizer = Tokenizer.load(text_directory(config))
    file = Path(arguments.text) if arguments.text else TEXT
    documents = read_documents(file, tokenizer)
    if arguments.context is not None:
        documents = far_documents(documents, arguments.context)
    longest = max(len(document.ids) for document in documents) + ANSWER_TOKENS
    step = PAGE_SIZE if arguments.context is None else FAR_STEP
    config = dataclasses.replace(config, max_num_seqs=1, max_step_tokens=step, max_model_len=longest, n_pages=None)
    others = {text: resolve(EngineConfig, dataclasses.asdict(config) | of, {}) for text, of in changed.items()}
    on_gpu = settings and config.device == "cuda"
    if on_gpu and (formats or arguments.beside):
        raise ConfigError("formats of weights are compared on a CPU: leave --device out, or --quantize and --beside")
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    prompts = [document.prompt for document in documents[:N_ANSWERS]]
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        n_read = sum(len(document.ids) for document in documents)
        if on_gpu:
            configs = {DEFAULT: config} | others
            bar = progress.add_task("reading", total=n_read * len(configs))
            device = gpu_device(config)
            summaries, answers = compare_in_turn(configs, device, documents, lambda n: progress.advance(bar, n))
            held: dict[str, JsonObject] = {name: {} for name in summaries}
        else:
            configs = (
                chosen(config, formats, arguments.beside, file) if formats or arguments.beside else {DEFAULT: config}
            )
            runners = load(configs | others, progress)
            bar = progress.add_task("reading", total=n_read)
            summaries = compare(runners, documents, lambda n: progress.advance(bar, n))
            answers = {name: [answer(runner, prompt) for prompt in prompts] for name, runner in runners.items()}
            held = {
                name: sizes(runner.model.weights) | {"holds": shares_text(runner.model.weights.formats())}
                for name, runner in runners.items()
            }
    known = next(iter(answers.values()))
    rows = [
        {"format": name, **held[name], **summaries[name], "answers_same": same_answers(answers[name], known)}
        for name in summaries
    ]
    n_tokens = sum(sum(document.counts) for document in documents)
    model = model_name(config)
    head: JsonObject = {
        "bench": "quality",
        "model": model,
        "date": now().isoformat(),
        "machine": machine(),
        "code": code(),
    }
    head |= {"instructions": instruction_set(), "text": file.name, "context": arguments.context}
    head |= {"tokens": n_tokens, "rows": rows}
    texts = {
        "prompts": [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts],
        "answers": {name: [tokenizer.decode(ids) for ids in each] for name, each in answers.items()},
    }
    stem = "settings" if settings and not formats and not arguments.beside else "quality"
    path = runs_directory(arguments.out) / f"{stem}-{Path(model).name}-{now():%H%M%S}.json"
    path.write_text(json.dumps(head | texts, indent=1, ensure_ascii=False) + "\n")
    title = f"{model} against {rows[0]['format']} on {n_tokens} tokens of {file.name}"
    if arguments.context is not None:
        title += f", at the end of texts of {arguments.context}"
    Console(width=None if sys.stdout.isatty() else 120).print(table(rows, title))
    print(json.dumps(head | {"file": str(path)}))
    return 0
