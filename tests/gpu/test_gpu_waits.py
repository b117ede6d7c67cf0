"""Steps of a GPU with all that a server may have at once: drafts, pictures, adapters, grammars, forks, and two GPUs. Nothing in them waits
for the device but the events that say so, which torch watches (`without_syncs`). `tests/null/test_gpu_syncs.py` looks at the code.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from msgspec.structs import replace

pytest.importorskip("triton")
from deltic.bench.gpu import GpuModel, decode
from deltic.config import EngineConfig
from deltic.engine.drafts import Drafting
from deltic.engine.engine import Engine
from deltic.engine.guides import Vocabulary
from deltic.engine.messages import Constraint, Picture, Request
from deltic.engine.step import Step, StepResult
from deltic.models.qwen.shard import whole
from deltic.ops.gpu.launch import Levers
from deltic.runtime.build import build_runner
from deltic.runtime.gpu.device import Gpu
from tests.cpu.test_picture_prompts import picture, request
from tests.gpu.test_gpu_engine import GRAMMAR, HAS_GPU, answers, needs_gpu
from tests.gpu.test_gpu_lora import adapter_of
from tests.tiny import tiny_checkpoint

N_TOKENS = 60 if HAS_GPU else 6
AGAIN = "Say it again: again again again again again "


def guess_at_random(patch: pytest.MonkeyPatch) -> None:
    """Has the draft head guess in every other step that may have drafts."""
    plan, rng = Drafting.plan, Random(1)

    def guessing(drafting: Drafting, step: Step) -> None:
        ran_ahead = any(draw.sequence.runs_ahead for draw in step.draws)
        plan(drafting, step)
        if ran_ahead or not all(chunk.is_decode for chunk in step.chunks) or rng.random() < 0.5:
            return
        step.runs_ahead = False
        for draw in step.draws:
            draw.n_guesses, draw.sequence.runs_ahead = rng.randrange(3), False

    patch.setattr(Drafting, "plan", guessing)


def count(runner: Any, patch: pytest.MonkeyPatch) -> Counter[str]:
    """What steps have, counted as they run."""
    inner, seen = runner.step, Counter[str]()

    def counted(step: Step) -> StepResult:
        result: StepResult = inner(step)
        seen["drafted"] += sum(len(chunk.drafts) for chunk in step.chunks)
        seen["guessed"] += sum(map(len, result.guesses))
        seen["pictures"] += sum(len(chunk.pictures) for chunk in step.chunks)
        seen["adapted"] += sum(chunk.sequence.adapter is not None for chunk in step.chunks)
        seen["guided"] += sum(draw.sequence.guide is not None for draw in step.draws)
        seen["forked"] += len(step.slot_copies)
        return result

    patch.setattr(runner, "step", counted)
    return seen


def requests(adapter: bytes) -> list[Request]:
    """Texts that repeat, pictures, a grammar and a fork; with an adapter, some of them a second time."""
    constraint = Constraint(grammar=GRAMMAR)
    shown: list[str | Picture] = [AGAIN, picture(3, 5), AGAIN, picture(2, 4, 6, 2), "?"]
    found = [
        request("text", AGAIN, max_tokens=N_TOKENS, logprobs=3),
        request("pictures", *shown, max_tokens=N_TOKENS, logprobs=3),
        request("grammar", AGAIN, max_tokens=N_TOKENS, logprobs=3, constraint=constraint),
        request(
            "fork", AGAIN * 2, max_tokens=N_TOKENS, logprobs=3, n=2, temperature=0.8, top_p=0.9, presence_penalty=0.5
        ),
    ]
    adapted = found[:2] if adapter else []
    return [*found, *(replace(one, id=f"{one.id}, adapted", adapter=adapter) for one in adapted)]


def config_of(path: Path, **more: Any) -> EngineConfig:
    return EngineConfig(
        model=str(path), max_num_seqs=8 if HAS_GPU else 3, max_model_len=512 if HAS_GPU else 192,
        max_step_tokens=256 if HAS_GPU else 128, n_pages=60 if HAS_GPU else 20, n_checkpoints=12, cache_host_gb=0.1,
        max_picture_tokens=80, max_drafts=3, **more,
    )  # fmt: skip


def run(runner: Any, path: Path, adapter: bytes, patch: pytest.MonkeyPatch) -> Counter[str]:
    """Answers all requests twice: the second time with what the cache has, and two of them preempted. Counts what the steps had."""
    engine, seen = Engine(runner, vocabulary=Vocabulary((path / "tokenizer.json").read_text)), count(runner, patch)
    guess_at_random(patch)
    engine.guides.prepare()
    for preempt in ({}, {6: "text", 9: "pictures"}):
        for one in requests(adapter):
            engine.add(one)
        found = answers(engine, preempt)
        assert all(found.values()) and len(found) == len(requests(adapter)) + 1
    engine.close(1.0)
    return seen


@needs_gpu
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_drafts_pictures_adapters_and_grammars(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint(kind, has_tower=True, has_mtp=True)
    config = config_of(path, allow_lora_loading=True, max_loras=2, max_lora_rank=20, lora_gb=0.05)
    runner: Any = build_runner(config, lambda stage, done: None, Gpu())
    adapter = adapter_of(runner.plan.shape, 1)
    assert runner.adapters.load_now(adapter).error is None
    seen = run(runner, path, adapter.key, monkeypatch)
    assert all(seen.values()), seen


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_two_gpus(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on two."""
    path = tiny_checkpoint(kind, has_tower=True, has_mtp=True)
    config = config_of(path, allow_lora_loading=True, max_loras=2, max_lora_rank=20, lora_gb=0.05)
    runner: Any = build_runner(config, lambda stage, done: None, Gpu(n_gpus=2))
    adapter = adapter_of(whole(runner.plan.shape, runner.plan.cuts), 1)
    assert runner.adapters.load_now(adapter).error is None
    seen = run(runner, path, adapter.key, monkeypatch)
    assert all(seen.values()), seen


@needs_gpu
@pytest.mark.parametrize("format", [None, "fp8", "int4-g128-bfloat16", "ud-q4_k_xl", "Q8_0"])
def test_kernels_that_start_early_change_nothing(format: str | None) -> None:
    """The widths of 27B, whose products fill the chip."""
    config = EngineConfig(device="cuda", dummy="qwen3.5-27b", memory_gb=30.0, max_model_len=1024, prefix_cache=False)
    model = GpuModel.load(config, format, 4)
    found = []
    for pdl in (False, True):
        engine = model.engine(Levers(pdl=pdl), 64)
        found.append([decode(engine, n, 64, 40, seed=n)[1] for n in (1, 4, 8, 9, 14, 16, 32, 64)])
        del engine
    assert found[0] == found[1]
