"""One model on several machines with GPUs: stages of layers, whose answers are one GPU's, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from deltic.commands.plan import report
from deltic.config import BUILT_IN, ConfigError, EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.guides import Vocabulary
from deltic.engine.messages import Output
from deltic.engine.step import RunnerLostError
from deltic.models.qwen.shape import stage_of
from deltic.runtime import build
from deltic.runtime.build import build_runner, settle, settle_text
from deltic.runtime.fit import make_plan
from deltic.runtime.gpu.device import Gpu
from deltic.runtime.gpu.text import GpuTextRunner
from tests import tiny
from tests.cpu.test_joint_head import decider
from tests.cpu.test_stages import Chain, said
from tests.cpu.test_stages_drafts import guesses
from tests.gpu.test_gpu_drafts import SMALL
from tests.gpu.test_gpu_engine import guided_request, prompt, request
from tests.gpu.test_gpu_lora import adapter_of
from tests.staged import Stage
from tests.tiny_gguf import tiny_gguf
from tests.tiny_quantised import tiny_quantised

HAS_GPU = torch.cuda.is_available()
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 256,
    "max_step_tokens": 128,
    "n_pages": 16,
    "n_checkpoints": 4,
    "cache_host_gb": 0.0,
    "max_drafts": 3,
}


@cache
def checkpoint(kind: str, n_layers: int, tied: bool = False, has_mtp: bool = False) -> Path:
    """Smaller than those of other tests, interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_GPU:
            tiny.set_sizes(patch, SMALL)
        return tiny.tiny_checkpoint(kind, n_layers=n_layers, tied=tied, has_mtp=has_mtp, seed=2)


def runner_of(config: EngineConfig, begin: int, end: int) -> GpuTextRunner:
    """A runner of some layers."""
    device = Gpu(config.lever)
    model = settle_text(config, device)
    if (begin, end) != (0, model.shape.n_layers):
        model = replace(model, shape=stage_of(model.shape, begin, end))
    plan = make_plan(device.text, model, device.free_bytes())
    weights, _ = device.text_weights(model, plan, lambda stage, done: None)
    runner = device.text_runner(plan, weights, None, lambda stage, done: None)
    assert isinstance(runner, GpuTextRunner)
    return runner


def answers(
    runner: Any, config: EngineConfig, rounds: int = 2, adapter: bytes = b""
) -> list[dict[tuple[str, int], list[Output]]]:
    """What requests are answered, all together; the second time from the prefix cache. With drafts that are right, a grammar
    behind a thought, penalties, log-probabilities of prompts and answers, two sequences of one prompt, and preemption. Some of them have
    the adapter."""
    vocabulary = Vocabulary((checkpoint("dense", 8) / "tokenizer.json").read_text)  # all models have this one
    engine, found = Engine(runner, vocabulary=vocabulary), []
    for _ in range(rounds):
        outputs: dict[tuple[str, int], list[Output]] = {}
        every = [
            request("a", prompt(1, 70), 3),
            request("b", prompt(2, 20), 4, prompt_logprobs=2, temperature=1.0, seed=3),
            request("c", prompt(3, 5), 3, n=2, temperature=1.0, seed=5, repetition_penalty=1.2),
            request("d", [*prompt(4, 7), *[7] * 60], 8, logit_bias={7: 100.0}),
            guided_request("e", prompt(5, 9), 5, seed=1),
        ]
        for i, one in enumerate(every):
            one.adapter = adapter if i % 2 else b""
            engine.add(one)
        for n in itertools.count():
            if n == 3:
                engine.scheduler._preempt(engine.scheduler._decodes[0])
            for output in engine.step():
                assert output.error is None, output.error
                outputs.setdefault((output.id, output.index), []).append(output)
            if not engine.has_work():
                break
        engine.check()
        found.append(outputs)
    stats = engine.stats()
    engine.close(0)
    assert stats.n_preemptions and stats.cache.n_hit_tokens and sum(stats.accepted.values()), stats
    return found


@dataclass(frozen=True)
class Case:
    path: Callable[[int], Path]
    settings: dict[str, Any] = field(default_factory=dict)
    n_stages: int = 2
    is_adapted: bool = False


def of_kind(kind: str, tied: bool = False) -> Callable[[int], Path]:
    return lambda n_layers: checkpoint(kind, n_layers, tied)


LORA = {"allow_lora_loading": True, "max_loras": 2, "max_lora_rank": 20, "lora_gb": 0.01}
CASES = {
    "dense": Case(of_kind("dense")),
    "moe": Case(of_kind("moe")),
    "next": Case(of_kind("next")),
    "three, tied": Case(of_kind("dense", tied=True), n_stages=3),
    "fp8": Case(of_kind("dense"), {"quantize": "fp8"}),
    "int8": Case(of_kind("dense"), {"quantize": "int8"}),
    "fp8 keys": Case(of_kind("dense"), {"kv_cache_dtype": "fp8"}),
    "k8v4 keys": Case(of_kind("moe"), {"kv_cache_dtype": "turboquant_k8v4"}),
    "bfloat16 states": Case(of_kind("dense"), {"state_dtype": "bfloat16"}),
    "int4": Case(of_kind("dense"), {"quantize": "int4"}),
    "qwen-fp8": Case(lambda n: tiny_quantised("dense", "qwen-fp8", n_layers=n).path),
    "w4a16": Case(lambda n: tiny_quantised("dense", "w4a16", n_layers=n).path),
    "nvfp4": Case(lambda n: tiny_quantised("dense", "nvfp4", n_layers=n).path),
    "gguf": Case(lambda n: tiny_gguf("dense", "Q8_0", n_layers=n)),
    "adapters": Case(of_kind("dense"), LORA, is_adapted=True),
    "adapters moe": Case(of_kind("moe"), LORA, is_adapted=True),
}
SHORT = ("dense", "moe", "three, tied", "adapters")


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_layers_that_are_run_apart_are_the_model(name: str) -> None:
    case = CASES[name]
    n_layers = 4 * case.n_stages
    config = EngineConfig(model=str(case.path(n_layers)), **SETTINGS, **case.settings)
    alone = runner_of(config, 0, n_layers)
    stages = [runner_of(config, 4 * i, 4 * i + 4) for i in range(case.n_stages)]
    assert sum(stage.plan.weight_bytes for stage in stages) < alone.plan.weight_bytes * 1.1
    assert [stage.workspace.decode.logits.numel() > 0 for stage in stages] == [False] * (case.n_stages - 1) + [True]
    adapter = adapter_of(alone.plan.shape, 1) if case.is_adapted else None
    for runner in (alone, *stages) if adapter is not None else ():
        assert runner.adapters is not None  # a slot has the same number everywhere
        assert runner.adapters.load_now(adapter.of_stage(runner.plan.shape)).error is None
    key = b"" if adapter is None else adapter.key
    expected = answers(alone, config, adapter=key)
    for found, wanted in zip(answers(Chain(stages), config, adapter=key), expected, strict=True):
        assert said(found) == said(wanted)


@pytest.mark.parametrize(("kind", "tied"), [("dense", False), pytest.param("moe", True, marks=pytest.mark.long)])
def test_the_head_guesses_on_the_last_machine(kind: str, tied: bool) -> None:
    """What it would on one GPU; and it changes no bit."""
    config = EngineConfig(model=str(checkpoint(kind, 8, tied, has_mtp=True)), **SETTINGS)
    alone, stages = runner_of(config, 0, 8), [runner_of(config, 0, 4), runner_of(config, 4, 8)]
    assert alone.draft_head is not None and stages[0].draft_head is None and stages[1].draft_head is not None
    expected, chain = guesses(alone, 4), Chain(stages)
    assert chain.info.has_draft_head and any(any(made) for _, made in expected)
    assert guesses(chain, 4) == expected
    drawn = answers(alone, config)
    for found, wanted in zip(answers(chain, config), drawn, strict=True):
        assert said(found) == said(wanted)


def test_the_plan_of_each_machine() -> None:
    """For GPUs that are not here, too: the embedding is on the first alone, the head and room for logits on the last."""
    config = EngineConfig(dummy="qwen3.5-27b", device="cuda", memory_gb=40, stages=("10.0.0.2:7000",))
    said = " ".join(report(config).split())
    assert "Layers 0 to 31 of 64, here:" in said and "Layers 32 to 63 of 64, 10.0.0.2:7000:" in said
    assert "Rows from and to other machines take 0.17 GB of each host's memory more" in said
    device = Gpu()
    whole = settle_text(replace(config, stages=()), device).shape
    stages = [
        make_plan(device.text, settle_text(config, device, stage=number), 41 * 10**9, 1 << 36) for number in range(2)
    ]
    n_bytes = device.text.weight_bytes(whole, None) + whole.hidden_size * 4  # the last norm is on both
    assert sum(plan.weight_bytes + plan.table_bytes for plan in stages) == n_bytes
    assert [plan.workspace["logits"] > 0 for plan in stages] == [False, True]


INTERPRETED = """
import sys
from tests.gpu import conftest  # which mends the interpreter
from deltic.runtime import build
build.sees_gpu = lambda: True
from deltic.__main__ import main
sys.exit(main())
"""


def stage(*arguments: str) -> Stage:
    """A process that is another machine, whose GPU is interpreted where there is none."""
    return Stage(*arguments, program=("-m", "deltic") if HAS_GPU else ("-c", INTERPRETED))


def test_processes_that_are_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines as they are started: the bits of one GPU; and when the second one dies, the end of both."""
    monkeypatch.setattr(build, "sees_gpu", lambda: True)
    path = str(checkpoint("dense", 8))
    config = EngineConfig(model=path, device="cuda", **SETTINGS)
    expected = answers(runner_of(config, 0, 8), config)
    second = stage(path)
    try:
        staged: Any = build_runner(replace(config, stages=(second.address,)), lambda stage, done: None)
        told = [note for note in staged.info.notices if "layers" in note]
        assert [note.partition(" (")[0] for note in told] == [
            "layers 0 to 3 of 8 run here", f"layers 4 to 7 of 8 run on {second.address}"
        ]  # fmt: skip
        assert all("Triton" in note for note in told) and staged.info.n_lookahead == 0
        for found, wanted in zip(answers(staged, config), expected, strict=True):
            assert said(found) == said(wanted)
        second.kill_worker()
        with pytest.raises(RunnerLostError, match=second.address):
            answers(staged, config)
    finally:
        second.close()


def test_a_gpu_and_a_cpu_are_not_stages_of_one_model() -> None:
    path = str(checkpoint("dense", 8))
    second = stage(path, "--device", "cpu")
    try:
        config = EngineConfig(model=path, device="cuda", stages=(second.address,), **SETTINGS)
        said = "--device cpu: it runs on a CPU, and the layers in front on a GPU, whose bits are others"
        with pytest.raises(ConfigError, match=f"stage {second.address}: {said}"):
            build_runner(config, lambda stage, done: None, Gpu())
    finally:
        second.close()


NONE_YET = "a model on several machines .* has none yet"
REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "several GPUs each": (lambda: {"tensor_parallel": 2}, f"--tensor-parallel: {NONE_YET}"),
    "parts": (lambda: {"tp_invariant": 2}, f"--tp-invariant: {NONE_YET}"),
    "experts dealt out": (lambda: {"expert_parallel": True}, f"--expert-parallel: {NONE_YET}"),
    "experts outside": (lambda: {"expert_memory": 1.0}, f"--expert-memory: {NONE_YET}"),
    "pictures": (lambda: {"max_picture_tokens": 64}, f"--max-picture-tokens: {NONE_YET}"),
    "the host's memory": (lambda: {"cache_host_gb": 1.0}, f"--cache-host-gb: {NONE_YET}"),
    "the disk": (lambda: {"cache_dir": Path("/tmp")}, f"--cache-dir: {NONE_YET}"),
    "block drafts": (lambda: {"draft_model": "x"}, f"--draft-model: {NONE_YET}"),
    "flash": (lambda: {"model": str(checkpoint("flash", 8))}, "Flash-Next is not run on several machines yet"),
    "vectors": (lambda: {"model": str(tiny.tiny_embedder())}, "an embedder .* is not run on several machines yet"),
    "joint head": (lambda: {"model": str(decider())}, "a joint head is not run on several machines yet"),
    "speech": (lambda: {"model": BUILT_IN, "dummy": "qwen3-tts-0.6b"}, "--stages .* is for a text model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_machines_with_gpus_do_not_have(case: str) -> None:
    """It is refused by name, before anything is loaded."""
    settings, said = REFUSED[case]
    with pytest.raises(ConfigError, match=said):
        settle(EngineConfig(**{"model": str(checkpoint("dense", 8)), "stages": ("127.0.0.1:1",), **settings()}), Gpu())
