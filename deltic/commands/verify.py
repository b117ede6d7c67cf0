"""`deltic verify`: whether a model's files are what they should be, and Deltic makes of them what others
do.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from deltic.bench.provenance import code, machine, now
from deltic.commands.endpoint import Endpoint, EndpointError
from deltic.commands.plan import decode_roof
from deltic.config import BUILT_IN, ConfigError, EngineConfig, changed
from deltic.engine.engine import Engine
from deltic.machine import free_memory_bytes
from deltic.models.checkpoint import DEMO, model_directory, model_name, resolve_model, speaks
from deltic.models.fields import CheckpointError
from deltic.models.files import PACKED
from deltic.models.loading import COUNTED
from deltic.runtime.build import build_runner, settle
from deltic.runtime.cpu.device import Cpu
from deltic.verify import bits, layers, servers, texts
from deltic.verify.files import Files, check_configuration, check_hashes, check_index
from deltic.verify.page import Check, Page, Tell, error_text
from deltic.verify.values import check_against, check_numbers

MOST_TOKENS, LAYER_TOKENS = 512, 48
"""Tokens of a text that are run, and those that go through every layer of transformers."""

SETTINGS = {"max_model_len": 1024, "max_num_seqs": 16, "n_pages": 256}
"""Settings where none are given: what the texts need, so that memory is left for others."""

ADVICE = "transformers and torch are not installed: pip install transformers torch, to compare with the published implementation"


def verify(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """Checks a model, prints the page, and writes it with its JSON where --out says. Exit status 1: something
    is wrong.

    Raises ConfigError for settings, CheckpointError for a model that is not there.
    """
    if config.dummy is not None:
        raise ConfigError("--dummy has no files to verify. Give a MODEL.")
    if config.max_model_len is not None and config.max_model_len < LAYER_TOKENS + bits.N_TIMED:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: give {LAYER_TOKENS + bits.N_TIMED} or more, or leave it out"
        )
    if arguments.out is not None:
        try:
            Path(arguments.out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {arguments.out}: {error_text(error)}. Give a directory to write to.") from None
    urls = [each for each in arguments.against if "://" in each]
    others = [each for each in arguments.against if "://" not in each]
    if len(urls) > 1 or len(others) > 1:
        raise ConfigError("--against takes a server's URL and a checkpoint, one each. Verify the rest in another run.")
    path = DEMO if config.model == BUILT_IN else model_directory(config)
    files = Files(path.absolute(), model_name(config))
    other = None
    if others:
        there = resolve_model(others[0], download_dir=config.download_dir)
        other = Files(there.absolute(), model_name(EngineConfig(model=others[0])))
        if (other.path / PACKED).exists():
            raise ConfigError(
                f"--against {others[0]}: packed weights are not compared. Give what they were packed from."
            )
    page = Page(
        _head(files, config),
        secrets=(arguments.api_key or "", os.environ.get("HF_TOKEN", "")),
        places=dict(_place(each) for each in (other, files) if each is not None),
    )
    if urls:
        page.places[Endpoint(urls[0], arguments.api_key, arguments.cacert).url] = "the server of --against"
    verification = Verification(page, files, other, urls[0] if urls else None, arguments, config)
    with _telling() as tell:
        verification.run(tell)
    print(page.text())
    if arguments.out is not None:
        stem = Path(arguments.out) / f"verify-{Path(files.name).name}"
        Path(f"{stem}.md").write_text(page.text(), encoding="utf-8")
        Path(f"{stem}.json").write_text(json.dumps(page.json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(page.verdict == "wrong")


def _place(files: Files) -> tuple[str, str]:
    """The directory of a model, and what the page has for it."""
    return (f"{files.path.parent}/", "") if files.is_gguf else (str(files.path), files.name)


def _head(files: Files, config: EngineConfig) -> dict[str, str]:
    """The first lines of the page."""
    own, here = code(), machine()
    told = {"model", "download_dir", "dummy"}
    given = {name: value for name, value in changed(config).items() if name not in told}
    settings = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
    return {
        "model": f"{files.name}, {'GGUF' if files.is_gguf else 'safetensors'}",
        "settings": settings or "the defaults",
        "deltic": f"{own['version']}{', commit ' + str(own['commit']) if 'commit' in own else ''}",
        "machine": f"{here['cpu']}, {here['cores']} cores, {here['memory_gb']} GB, {here['system']}, Python {here['python']}",
        "date": f"{now():%Y-%m-%d}",
    }


@contextmanager
def _telling() -> Iterator[Tell]:
    """Shows what is done: a bar in stderr where that is a terminal, else a line for each thing."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar, last = progress.add_task("", total=1.0), ""

        def tell(stage: str, done: float) -> None:
            nonlocal last
            progress.update(bar, description=stage, completed=done)
            if stage != last and not console.is_terminal:
                print(f"deltic: {stage}", file=sys.stderr, flush=True)
            last = stage

        yield tell


@dataclasses.dataclass
class Verification:
    """Checks of a model, all of them, one after the other."""

    page: Page
    files: Files
    other: Files | None
    """The checkpoint of --against."""
    url: str | None
    """The server of --against."""
    arguments: argparse.Namespace
    config: EngineConfig

    def run(self, tell: Tell) -> None:
        """Fills the page."""
        page, files, other = self.page, self.files, self.other
        with page.check("files") as check:
            check_hashes(files, check, tell)
        is_packed = (files.path / PACKED).exists()
        if is_packed or speaks(self.config):
            with page.check("tensors") as check:
                settle(self.config, Cpu()).check_files(COUNTED)
                check.note("names, shapes and types are those of the configuration")
            with page.check("the rest") as check:
                advice = ". Verify the checkpoint that they were packed from." if is_packed else ""
                what = "packed weights" if is_packed else "a speech model"
                check.skip(f"of {what} no more than the files is checked{advice}")
            return
        with page.check("tensors") as tensors:
            check_index(files, tensors)
        with page.check("configuration") as check:
            check_configuration(files, other, check)
        is_whole = tensors.verdict != "wrong"
        if is_whole:
            with page.check("values") as check:
                check_numbers(files, check, tell)
            if other is not None:
                with page.check(f"values beside {other.name}") as check:
                    check_against(files, other, check, tell)
        wording = self._wording(tell)
        if is_whole and wording is not None:
            self._run(*wording, tell)
        else:
            for name in ("layers", "log-probabilities", "bits", "speed"):
                with page.check(name) as check:
                    check.skip("the model cannot be loaded, as is said above")

    def _wording(self, tell: Tell) -> tuple[texts.Wording, servers.Answers | None] | None:
        """Checks tokenizer and template, and asks the server. None: there is no tokenizer that can be
        read.
        """
        page, answers = self.page, None
        with page.check("tokenizer") as tokenizer:
            wording = texts.Wording.of(self.files.path)
            short = {name: ids[:LAYER_TOKENS] for name, ids in wording.ids.items()}
        if tokenizer.verdict == "wrong":
            return None
        if self.url is not None:
            with page.check("server") as check:
                try:
                    answers = servers.ask(self.url, self.arguments.api_key, self.arguments.cacert, short, tell)
                    check.note(f"{answers.kind}, which knows the model as {answers.model!r}")
                    for refused in answers.refused:
                        check.note(refused)
                except EndpointError as error:
                    check.look(f"nothing was compared with it: {error}")
        with page.check("chat template") as template:
            if wording.template is None:
                template.skip("the model has none")
            else:
                n, most = len(wording.prompts), len(texts.CHATS)
                (template.note if n == most else template.look)(f"{n} of {most} chats are taken")
        tell("reading texts and chats", 0.0)
        before = [(check, len(check.said)) for check in (tokenizer, template)]
        if _has_transformers():
            with _caught(tokenizer, "transformers cannot read this"):
                ids, prompts = texts.published_wording(wording)
                texts.check_ids(wording, ids, "transformers", tokenizer)
                texts.check_prompts(wording, prompts, "transformers", template)
        if self.other is not None:
            with _caught(tokenizer, f"{self.other.name} cannot be read"):
                others = texts.Wording.of(self.other.path)
                texts.check_rules(wording, others, self.other.name, tokenizer)
                texts.check_ids(wording, others.ids, self.other.name, tokenizer)
                texts.check_prompts(
                    wording, {k: others.written(v) for k, v in others.prompts.items()}, self.other.name, template
                )
        if answers is not None:
            texts.check_ids(wording, answers.ids, answers.kind, tokenizer)
            texts.check_prompts(wording, answers.prompts, answers.kind, template)
        for check, n_said in before:
            if len(check.said) == n_said and check.verdict == "ok":
                why = "transformers reads the same here" if _has_transformers() else ADVICE
                check.skip(f"nothing was compared: {why}, or give --against")
        return wording, answers

    def _run(self, wording: texts.Wording, answers: servers.Answers | None, tell: Tell) -> None:
        """Loads the model and runs it."""
        page = self.page
        longest = self.files.shape.max_position_embeddings
        given: dict[str, Any] = {
            name: getattr(self.config, name) or min(value, longest) for name, value in SETTINGS.items()
        }
        config = dataclasses.replace(self.config, **given)
        with page.check("loading") as check:
            runner: Any = build_runner(config, tell)
            if runner.info.no_pictures:
                check.look(runner.info.no_pictures)
            for notice in runner.info.notices:
                check.note(notice)
            check.note(f"{runner.info.device}, {runner.info.precision}, {runner.info.kernels} kernels")
            engine = Engine(runner)
        if check.verdict == "wrong":
            return
        short = {name: ids[:LAYER_TOKENS] for name, ids in wording.ids.items()}
        theirs = self._layers(runner, short, tell)
        if runner.info.embedder is not None:
            with page.check("the rest") as check:
                check.skip("an embedder draws no tokens")
            engine.close(0.0)
            return
        most = min(MOST_TOKENS, runner.info.max_model_len - bits.N_TIMED)
        prompts = {name: ids[:most] for name, ids in wording.ids.items()}
        told: dict[str, bits.Told] = {}
        with page.check("bits") as check:
            told |= bits.check_bits(engine, prompts, check, tell)
        with page.check("log-probabilities") as check:
            mine = {name: each.prompt[: LAYER_TOKENS - 1] for name, each in told.items()}
            if theirs and mine:
                bits.check_logprobs(mine, theirs, "transformers", check)
            if answers is not None and answers.logprobs and mine:
                bits.check_logprobs(mine, answers.logprobs, answers.kind, check)
            if not check.said:
                check.skip(self._none_compared(bool(mine)))
        with page.check("speed") as check, _caught(check, "nothing was timed"):
            longest_text = max(prompts.values(), key=len)
            bits.check_speed(engine, longest_text, decode_roof(runner.plan, runner.info.on_gpu), check, tell)
        engine.close(0.0)

    def _none_compared(self, are_known: bool) -> str:
        """Says why no log-probabilities were compared. are_known: those of Deltic."""
        if not are_known:
            return "Deltic told none, as is said under bits"
        why = "transformers told none, as is said under layers" if _has_transformers() else ADVICE
        return f"{why}; {'give --against URL of a server' if self.url is None else 'the server told none, as is said there'}"

    def _layers(self, runner: Any, short: dict[str, list[int]], tell: Tell) -> dict[str, Any]:
        """Log-probabilities of texts by transformers, whose layers are compared; {} where it cannot run."""
        files = self.files
        with self.page.check("layers") as check:
            if not _has_transformers():
                check.skip(ADVICE)
            elif files.shape.n_streams > 1:
                check.skip("layers over several residual streams are not compared with those of transformers")
            elif (needed := 2 * layers.layer_bytes(files)) > (free := free_memory_bytes()):
                check.skip(f"a layer in float32 takes {needed / 1e9:.1f} GB, of which {free / 1e9:.1f} are free")
            else:
                ours = {}
                if len(runner.plan.cuts) <= 1 and not self.config.stages:
                    ours = {name: layers.residuals(runner, ids) for name, ids in short.items()}
                else:
                    check.skip(
                        "layers of a model in parts are not compared: leave --tensor-parallel, --tp-invariant and --stages out"
                    )
                with _caught(check, "transformers cannot run this"):
                    return layers.check_layers(files, short, ours, runner.plan, check, tell)
        return {}


def _has_transformers() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


@contextmanager
def _caught(check: Check, what: str) -> Iterator[None]:
    """Makes a finding of what the block raises: wrong are errors of the files. what: words before others."""
    try:
        yield
    except CheckpointError as error:
        check.wrong(str(error))
    except Exception as error:
        check.look(f"{what}: {error_text(error)}")
